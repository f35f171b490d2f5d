"""Export a trained policy for other programs: `python -m grpo.export runs/NAME FOLDER`.

The folder gets the model of the run's latest valid checkpoint, the tokenizer, and a model card with
the run's results. `transformers` (`AutoModelForCausalLM.from_pretrained`) and vLLM load it. An
adapter is merged into its base model; with `--adapter` it is written alone, for
`PeftModel.from_pretrained`. `--dtype bfloat16` halves the files. The folder must be new or empty.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.text import printable
from grpo.config import Config, load_config, names_in
from grpo.model.load import load_policy
from grpo.model.save import save_model
from grpo.run.checkpoint import find_resume, step_of
from grpo.run.reader import RunData, load_run
from grpo.run.sources import check_base
from grpo.show.lines import interval
from tasks.base import Parser, UserError, exit_status

Record = Mapping[str, Any]

# The settings that the model card names.
SETTINGS = (
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


def write(arguments: argparse.Namespace) -> int:
    """Write the folder, and print what is in it; return the exit status."""
    step = export(
        arguments.run,
        arguments.folder,
        adapter=arguments.adapter,
        dtype=arguments.dtype,
        accept=names_in(arguments.accept_changes),
    )
    kind = "adapter" if arguments.adapter else "model"
    line = f"{arguments.folder}: {kind} of step {step}, with tokenizer and model card"
    print(printable(line))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the folder of a run, or one of its checkpoints")
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapter of a LoRA run"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="data type of the weights (default: as trained)",
    )
    parser.add_argument(
        "--accept-changes",
        metavar="KINDS",
        help="base: export an adapter even if its base model has changed since the checkpoint",
    )
    return parser.parse_args(argv)


def export(
    run: Path,
    folder: Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    accept: Sequence[str] = (),
) -> int:
    """Write the latest valid checkpoint of `run` to `folder`; return its step.

    Sources of the kinds in `accept` may have changed since the checkpoint. Raises UserError if
    there is no valid checkpoint, or no adapter to export, or if the folder is not empty.
    """
    checkpoint, _ = find_resume(run)
    data = load_run(checkpoint.parent.parent)
    config = load_config(data.path / "config.yaml")

    if adapter and not config.lora_rank:
        raise UserError(
            f"--adapter: {data.path} trained the whole model and has no adapter; leave the flag out"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; give a new or an empty folder")

    for note in check_base(checkpoint, config.model, accept):
        print(f"grpo.export: {printable(note)}", file=sys.stderr)

    as_trained = {
        **config.loading,
        "device": "cpu",
        "dtype": "float32" if config.dtype == "auto" else config.dtype,
        "keep_reference": False,
    }
    policy = load_policy(config.model, **as_trained, weights=checkpoint)

    model = policy.model
    if config.lora_rank and not adapter:
        model = model.merge_and_unload()
    if dtype:
        model = model.to(getattr(torch, dtype))

    save_model(model, folder)
    policy.tokenizer.save_pretrained(folder)

    # The card comes last, because peft writes one of its own.
    step = step_of(checkpoint)
    (folder / "README.md").write_text(card(data, step, adapter=adapter))
    return step


def card(run: RunData, step: int, *, adapter: bool) -> str:
    """Return the model card in Markdown: the model, its training, and its held-out scores."""
    config = {**asdict(Config()), **run.config}
    facts = config.get("facts", {})
    settings = ", ".join(f"{name} {config[name]}" for name in SETTINGS)

    head = [
        "---",
        "library_name: " + ("peft" if adapter else "transformers"),
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning]",
    ]
    if _is_hub_id(config):
        head.append(f"base_model: {config['model']}")
    head.append("---")

    control = ""
    if config.get("control", "none") != "none":
        control = (
            f"\n**A control experiment ({config['control']}): its rewards carried no "
            "information.**\n"
        )

    lines = [
        *head,
        f"# {run.path.name}",
        "",
        _summary(config, step),
        control,
        *_scores(run, config, step),
        "",
        f"Settings: {settings}.",
        "",
        f"Made with torch {facts.get('torch')}, transformers {facts.get('transformers')}, on "
        f"{facts.get('device')}, at commit {facts.get('commit')}, started {facts.get('started')}.",
        "",
        "The model was trained for this one task. Its other abilities were not evaluated.",
        "",
    ]
    return "\n".join(lines)


def _scores(run: RunData, config: Record, step: int) -> list[str]:
    """Return the table of the held-out scores up to `step`."""
    reports = [line for line in run.reports if line["step"] <= step]
    metric = reports[0].get("metric", "score") if reports else "score"
    lines = [
        f"Held-out {metric}, on validation problems that training never saw, at temperature "
        f"{config['temperature']:g} (mean and 95 % interval):",
        "",
        "| step | level | mean | exact | n |",
        "|---|---|---|---|---|",
    ]
    for line in reports:
        level = f"{line['level']} {line.get('unit', '')}"
        cells = [line["step"], level, interval(line), f"{line['exact']:.3f}", line["n"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _summary(config: Record, step: int) -> str:
    """Return a sentence on how the model was trained, and one on the policy it started from."""
    start = _start_of(config)
    path = f" (curriculum {config['curriculum']})" if config.get("curriculum") else ""
    reward = f"the reward `{config['reward']}`" if config.get("reward") else "the task's reward"
    summary = (
        f"`{_base_name(config)}` trained by GRPO for {step} steps on the task "
        f"`{config['task']}`, level {config['level']}{path}, with {reward}."
    )
    return summary + (f" Training started from {origin(start)}." if start else "")


def _start_of(config: Record) -> Path | None:
    """Return the checkpoint of an earlier run that training started from, if any."""
    return Path(config["start"]) if config.get("start") else None


def _is_hub_id(config: Record) -> bool:
    """Return whether the model is named by its id on the Hugging Face hub."""
    model = config["model"]
    return _base_name(config) == model != "builtin" and not Path(model).exists()


def _base_name(config: Record) -> str:
    """Return the name of the model that training started from, without this machine's paths."""
    model, start = config["model"], _start_of(config)
    if start is not None and model == str(start):
        return start.parent.parent.name
    return Path(model).name if Path(model).exists() else model


def origin(start: Path) -> str:
    """Return in words which checkpoint of which run this is."""
    return f"step {step_of(start)} of the run `{start.parent.parent.name}`"
