"""Which versions of Python and of the dependencies work: a table in Markdown.

    python tests/tools/try_versions.py [PYTHON ...] [--lowest] [--uv] [--without-torch]

PYTHON are programs, such as python3.12; without one, python3.11 to python3.14 as far as they are
there. Each gets a fresh environment and the README's installation. Then it trains two steps and
runs a few tests. `--lowest` takes the lower bounds of setup.cfg in place of constraints.txt, except
for what `--keep torch==2.13.0` (repeatable) names. `--uv` installs by `uv pip`.
`--without-torch` is for a machine that can get no torch for a PYTHON: it leaves out what needs it,
and runs the tests that do not. The exit status is 1 if anything fails.
"""

import argparse
import configparser
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")

NEED_TORCH = ("torch", "peft")

TRAIN = "train.py --words 10 --steps 2 --prompts 2 --group-size 4 --eval-problems 2 --preflight off"
TESTS = (
    "tests/align tests/data tests/tasks tests/grpo/library tests/grpo/run/test_checkpoint.py "
    "tests/grpo/show tests/grpo/tools/test_export.py tests/grpo/model/test_llama.py "
    "tests/grpo/learn tests/grpo/model/test_policy.py tests/grpo/report/test_report.py "
    "tests/grpo/run/test_store_logs.py tests/grpo/model/test_weights.py"
)
# conftest.py makes a tiny model, and test_scores.py computes in torch.
WITHOUT_TORCH = (
    "--noconftest tests/align tests/data tests/tasks --ignore tests/tasks/test_scores.py"
)


def requirements(extra: str = "") -> list[str]:
    """Return the requirements in setup.cfg: those of the project, or of one of its extras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = (
        config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
    )
    return lines.split()


def lower_bounds(keep: list[str]) -> list[str]:
    """Return the requirements at their lower bounds, e.g. "torch==2.9", but those of `keep`."""
    kept = {name_of(line): line for line in keep}
    return [kept.get(name_of(line), line.replace(">=", "==")) for line in requirements()]


def name_of(requirement: str) -> str:
    return re.split("[<>=!]", requirement)[0]


class FailedError(Exception):
    """A command failed; the text names up to three tests, and has the last line that it printed."""


def run(*command: str | Path, folder: Path | None = None) -> str:
    """Run a command and return its last line. Raises FailedError."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder or ROOT, capture_output=True, text=True
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    last = said[-1] if said else ""
    tests = [line for line in said if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 3):  # 3: a training that has not learned
        raise FailedError("; ".join([*tests[:3], last]))
    return last


def install(python: str, folder: Path, flags: argparse.Namespace) -> Path:
    """Make an environment in `folder`, and install the project; return its Python."""
    limits = folder / "limits.txt"
    lines = lower_bounds(flags.keep)
    limits.write_text("\n".join(lines) if flags.lowest else (ROOT / "constraints.txt").read_text())

    what = ["-e", ".[test]"]
    if flags.without_torch:
        needed = [*requirements(), *requirements("test")]
        what = [line for line in needed if name_of(line) not in NEED_TORCH]

    program = folder / "venv" / "bin" / "python"
    if flags.uv:
        run("uv", "venv", "-q", "--python", python, folder / "venv")
        run("uv", "pip", "install", "-q", "--python", program, "-c", limits, *what)
    else:
        run(python, "-m", "venv", folder / "venv")
        run(program, "-m", "pip", "install", "-q", "-c", limits, *what)
    return program


def try_one(python: str, flags: argparse.Namespace) -> list[str]:
    """Return what came out of each step, until one fails."""
    came_out: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            program = install(python, folder, flags)
            came_out.append("yes")
            if flags.without_torch:
                came_out.append("not tried")
            else:
                train, *rest = TRAIN.split()
                run(program, ROOT / train, *rest, "--name", "tried", folder=folder)
                came_out.append("yes")
            tests = WITHOUT_TORCH if flags.without_torch else TESTS
            pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line")
            came_out.append(run(program, *pytest, *tests.split()))
        except FailedError as error:
            came_out.append(f"FAILED: {error}")
    return came_out


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", metavar="PYTHON", nargs="*")
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("--keep", metavar="NAME==VERSION", action="append", default=[])
    parser.add_argument("--uv", action="store_true")
    parser.add_argument("--without-torch", action="store_true")
    flags = parser.parse_args()

    pythons = flags.pythons or [name for name in PYTHONS if shutil.which(name)]
    print("| Python | installs | trains | tests |\n|---|---|---|---|", flush=True)
    has_failed = False
    for python in pythons:
        version = subprocess.run([python, "--version"], capture_output=True, text=True).stdout
        came_out = try_one(python, flags)
        has_failed |= came_out[-1].startswith("FAILED")
        cells = [version.removeprefix("Python ").strip() or python, *came_out]
        cells += [""] * (4 - len(cells))
        print(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |", flush=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
