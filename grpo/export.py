"""Export a trained policy for other programs: `python -m grpo.export runs/NAME FOLDER`.

The folder gets the model of the run's latest valid checkpoint, the tokenizer, and a model card with
the run's results. `transformers` (`AutoModelForCausalLM.from_pretrained`) and vLLM load it. An
adapter is merged into its base model; with `--adapter` it is written alone, for
`PeftModel.from_pretrained`. `--dtype bfloat16` halves the files. The folder must be new or empty.
RUN may also be a folder that holds a LoRA adapter; no model card is written then.

The hub takes the folder as it is: `hf upload OWNER/NAME FOLDER`.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from data.errors import Parser, UserError, exit_status
from data.files import kind_of
from data.text import printable
from grpo.config import Config, load_config
from grpo.ending import Verdict
from grpo.model.adapter import is_adapter, save_model
from grpo.model.forward import Model
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.run.checkpoint import disk_refusal, find_resume
from grpo.run.files import step_of
from grpo.run.logs import RunData, load_run
from grpo.run.resume import check_base, checkpoint_of, require_unicode
from grpo.show.lines import interval, sampling_name

# The settings that the model card names.
CARD_SETTINGS = (
    "loss",
    "scale",
    "credit",
    "beta",
    "learning_rate",
    "prompts",
    "group_size",
    "temperature",
    "lora_rank",
    "seed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.export", lambda: write(parse(argv)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, help="the folder of a run, one of its checkpoints, or any LoRA adapter")
    add("folder", type=Path, help="a new or empty folder")
    add("--adapter", action="store_true", help="write only the adapter of a LoRA run")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="data type of the weights (default: as trained)",
    )
    return parser.parse_intermixed_args(argv)  # FOLDER may follow a flag


def write(arguments: argparse.Namespace) -> int:
    """Write the folder, and print what is in it; return the exit status."""
    folder = arguments.folder
    content = export(arguments.run, folder, adapter=arguments.adapter, dtype=arguments.dtype)
    print(printable(f"{folder}: {content}"))
    return 0


def export(run: Path, folder: Path, *, adapter: bool = False, dtype: str | None = None) -> str:
    """Write the latest valid checkpoint of `run` to `folder`; return what was written, in words.

    `run` may also be an adapter made elsewhere. Raises UserError if there is no valid checkpoint,
    or no adapter to export, or if the folder is not empty.
    """
    if kind_of(folder) and (kind_of(folder) != "folder" or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; give a new or an empty folder")
    require_unicode(folder)

    if is_adapter(run) and checkpoint_of(str(run))[0] is None:
        if adapter:
            raise UserError(f"--adapter: {run} is an adapter already; leave the flag out")
        policy = load_policy(str(run), device="cpu", dtype="float32")
        _write(policy, policy.model, folder, dtype)
        return "base model with the adapter merged into it, and tokenizer"

    checkpoint, _ = find_resume(run, flag="")
    data = load_run(checkpoint.parent.parent)
    config = load_config(data.path / "config.yaml")
    if adapter and not config.lora_rank:
        raise UserError(
            f"--adapter: {data.path} trained the whole model and has no adapter; leave the flag out"
        )
    check_base(checkpoint, config.model)

    options = config.loading | {
        "dtype": "float32" if config.dtype == "auto" else config.dtype,
        "keep_reference": False,
    }
    policy = load_policy(config.model, device="cpu", weights=checkpoint, **options)
    model = policy.model
    if config.lora_rank and not adapter:
        model = model.merge_and_unload()
    step = step_of(checkpoint)
    _write(policy, model, folder, dtype, card(data, step, adapter=adapter))
    return f"{'adapter' if adapter else 'model'} of step {step}, with tokenizer and model card"


def _write(policy: Policy, model: Model, folder: Path, dtype: str | None, card: str = "") -> None:
    """Write the `model` of a policy, its tokenizer and, if there is one, the model card."""
    if dtype:
        model = model.to(getattr(torch, dtype))
    with _whole(folder):
        save_model(model, folder)
        policy.tokenizer.save_pretrained(folder)
        if card:  # it comes last, because peft writes one of its own
            (folder / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Empty `folder` again if the block, which writes it, fails.

    Raises UserError if the disk refuses a file.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not is_new:
            folder.mkdir(exist_ok=True)
        if reason := disk_refusal(error):
            raise UserError(f"{folder}: cannot be written ({reason}); nothing is left there") from (
                error
            )
        raise


# --- the model card ---------------------------------------------------------------------------


def card(run: RunData, step: int, *, adapter: bool) -> str:
    """Return the model card, in Markdown, of the policy that `run` had after `step` steps.

    It may be published, so it names files and folders without this machine's paths.
    """
    config = {**asdict(Config()), **run.config}
    reports = [line for line in run.reports if line["step"] <= step]
    metric, unit = ("score", "")
    if reports:
        metric, unit = reports[0].get("metric", "score"), reports[0].get("unit", "")

    model = config["model"]
    is_hub_id = model != "builtin" and not config.get("facts", {}).get("is_local_model", True)
    if not is_hub_id:  # of a checkpoint, the name of its run
        path = Path(model)
        model = path.parent.parent.name if path.name.startswith("step-") else path.name
    task = ":".join(Path(part).name for part in config["task"].split(":"))
    climb = f" (curriculum {config['curriculum']})" if config.get("curriculum") else ""
    reward = f"the reward `{config['reward']}`" if config.get("reward") else "the task's reward"

    sections = [
        _front_matter("peft" if adapter else "transformers", model if is_hub_id else ""),
        f"# {run.path.name}",
        f"`{model}` trained by GRPO for {step} steps on the task "
        f"`{task}`, level {config['level']}{climb}, with {reward}.",
    ]
    if (control := config.get("control", "none")) != "none":
        sections.append(
            f"**A control experiment ({control}): its rewards carried no information.**"
        )
    if run.verdict and run.verdict["step"] <= step:
        conclusion, *more = Verdict.from_json(run.verdict).lines(metric, unit)
        sections += [f"**{conclusion}**", *(f"{line}." for line in more)]
    sections += [
        _evaluations(reports, metric),
        _settings(config),
        "The model was trained for this one task. Its other abilities were not evaluated.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(library: str, base_model: str) -> str:
    lines = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning]",
        *([f"base_model: {base_model}"] if base_model else []),
        "---",
    ]
    return "\n".join(lines)


def _evaluations(reports: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return a table of the first and the last evaluation of each level and temperature."""
    rows = []
    by_kind = lambda line: (line["level"], line["temperature"])  # noqa: E731
    for _, group in groupby(sorted(reports, key=by_kind), by_kind):
        lines = list(group)
        first = lines[0] if lines[0]["step"] == 0 else None
        last = lines[-1] if len(lines) > 1 or first is None else None
        level = f"{lines[0]['level']} {lines[0].get('unit', '')}".rstrip()
        means = " | ".join(interval(line) if line else "-" for line in (first, last))
        exact = " → ".join(f"{line['exact']:.3f}" if line else "-" for line in (first, last))
        cells = (level, sampling_name(lines[0]), means, exact, str(lines[-1]["n"]))
        rows.append(f"| {' | '.join(cells)} |")

    head = (
        f"Held-out {metric} on validation problems that training never saw (mean and 95 % "
        "interval):\n"
    )
    columns = "| level | sampling | before | after | exact | n |"
    return "\n".join([head, columns, "|---|---|---|---|---|---|", *rows])


def _settings(config: Mapping[str, Any]) -> str:
    facts = config.get("facts", {})
    settings = ", ".join(f"{name} {config[name]}" for name in CARD_SETTINGS)
    return (
        f"Settings: {settings}.\n\n"
        f"Made with torch {facts.get('torch')}, transformers {facts.get('transformers')}, on "
        f"{facts.get('device')}, at commit {facts.get('commit')}, started {facts.get('started')}."
    )


if __name__ == "__main__":
    sys.exit(main())
