"""What an installation brings along is known: every package that the project needs, and that these
need, is pinned in constraints.txt.
"""

from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PINS = {
    canonicalize_name(pin.name): pin
    for pin in map(Requirement, (ROOT / "constraints.txt").read_text().split())
}


def asked_for() -> list[Requirement]:
    """Return what setup.cfg asks for, with every extra."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    lists = [setup["options"]["install_requires"], *extras.values()]
    return [Requirement(line) for lines in lists for line in lines.split("\n") if line.strip()]


def needed(requirements: list[Requirement]) -> set[str]:
    """Return the names of what `requirements` bring along on this platform, themselves included,
    as far as it is installed.
    """
    found: set[tuple[str, str]] = set()
    waiting = [
        (requirement.name, extra)
        for requirement in requirements
        for extra in ("", *requirement.extras)
    ]
    while waiting:
        name, extra = waiting.pop()
        if (canonicalize_name(name), extra) in found:
            continue
        found.add((canonicalize_name(name), extra))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, more) for more in ("", *requirement.extras)]
    return {name for name, _ in found}


def test_every_pin_is_of_one_version():
    assert len(PINS) > 50
    assert all(
        str(pin.specifier).startswith("==") and "*" not in str(pin.specifier) and not pin.marker
        for pin in PINS.values()
    )


def test_what_setup_asks_for_is_pinned_within_its_bounds():
    for requirement in asked_for():
        version = str(PINS[canonicalize_name(requirement.name)].specifier).removeprefix("==")
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_what_comes_along_is_pinned():
    names = needed(asked_for())
    assert {"torch", "tokenizers", "jinja2"} <= names  # the last two: needed by what is needed
    comes_with_torch = {
        name for name in names if name.startswith(("nvidia-", "cuda-")) or name == "triton"
    }  # for a GPU; torch pins them
    assert names - comes_with_torch - {"setuptools", "pip"} <= set(PINS)
