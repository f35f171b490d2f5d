"""A trained policy for others: `python -m grpo.export runs/NAME FOLDER`.

Writes what `AutoModelForCausalLM.from_pretrained(FOLDER)` and `AutoTokenizer` read, and others
that read their layout (vLLM): the model of the run's latest valid checkpoint, an adapter merged
into its base, with the tokenizer and a model card that holds the run's figures. `--adapter` writes
the adapter by itself, for `PeftModel.from_pretrained`. `--dtype bfloat16` halves the files. The
folder must be new or empty.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo.config import load_config, names_in
from grpo.model.load import load_policy
from grpo.model.policy import save_model
from grpo.run.checkpoint import find_resume, step_of
from grpo.run.reader import RunData, load_run
from grpo.run.sources import check_base
from grpo.show.console import interval
from tasks.base import Parser, UserError, exit_status


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status("grpo.export", lambda: write(parse(argv)))


def write(arguments: argparse.Namespace) -> int:
    step = export(
        arguments.run,
        arguments.folder,
        adapter=arguments.adapter,
        dtype=arguments.dtype,
        accept=names_in(arguments.accept_changes),
    )
    print(
        f"{arguments.folder}: the {'adapter' if arguments.adapter else 'model'} of step {step}, "
        "with its tokenizer and card"
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m grpo.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the directory of a run, or one of its checkpoints")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter of a LoRA run, by itself"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (default: as they were trained)",
    )
    parser.add_argument(
        "--accept-changes",
        metavar="KINDS",
        help="base: export an adapter although its base model has changed since the checkpoint",
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
    """Write the latest valid checkpoint of `run` into `folder`; return its step. Raises UserError
    where that cannot be.

    Kinds of sources in `accept` may have changed since the checkpoint.
    """
    checkpoint, _ = find_resume(run)
    data = load_run(checkpoint.parent.parent)
    config = load_config(data.path / "config.yaml")
    if adapter and not config.lora_rank:
        raise UserError(
            f"--adapter: {data.path} trained the whole model and has no adapter; leave the flag out"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give a new or an empty folder")
    for note in check_base(checkpoint, config.model, accept):
        print(f"grpo.export: {note}", file=sys.stderr)
    as_trained = {
        **config.loading,
        "device": "cpu",
        "dtype": "float32" if config.dtype == "auto" else config.dtype,
        "keep_reference": False,
    }
    policy = load_policy(config.model, **as_trained, weights=checkpoint)
    model = policy.model if adapter or not config.lora_rank else policy.model.merge_and_unload()
    model = model.to(getattr(torch, dtype)) if dtype else model
    save_model(model, folder)
    policy.tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(
        card(data, step_of(checkpoint), adapter=adapter)
    )  # last: peft writes a card of its own
    return step_of(checkpoint)


def card(run: RunData, step: int, *, adapter: bool) -> str:
    """Return the model card: what it is, how it was made, how it scored on held-out problems
    before and after, what it is not.
    """
    config, facts = run.config, run.config.get("facts", {})
    reports = [line for line in run.reports if line["step"] <= step]
    rows = [
        f"| {line['step']} | {line['level']} {line.get('unit', '')} | {interval(line)} | "
        f"{line['exact']:.3f} | {line['n']} |"
        for line in reports
    ]
    control = (
        f"\n**A control run ({config['control']}): its rewards carried no information.**\n"
        if config.get("control", "none") != "none"
        else ""
    )
    metric = reports[0].get("metric", "score") if reports else "score"
    front = [
        "library_name: " + ("peft" if adapter else "transformers"),
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning]",
    ]
    name = (
        Path(config["model"]).name if Path(config["model"]).exists() else config["model"]
    )  # a folder of one machine is nobody else's business
    start = Path(config["start"]) if config.get("start") else None
    if start is not None and config["model"] == str(start):
        name = start.parent.parent.name
    is_hub_id = name == config["model"] != "builtin" and not Path(name).exists()
    front += [f"base_model: {name}"] if is_hub_id else []
    learning = {
        name: config[name]
        for name in (
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
    }
    return "\n".join(
        [
            "---",
            *front,
            "---",
            f"# {run.path.name}",
            "",
            f"`{name}` trained by GRPO for {step} steps on the task `{config['task']}`, level "
            f"{config['level']}"
            + (f", by way of {config['curriculum']}" if config.get("curriculum") else "")
            + f", paid by `{config.get('reward') or 'the task'}`."
            + (f" Training began with {origin(start)}." if start else ""),
            control,
            f"Held-out {metric} (validation problems that training never saw; sampled at "
            f"temperature {config['temperature']:g}; mean and 95 % interval):",
            "",
            "| step | level | mean | exact | n |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Settings: " + ", ".join(f"{name} {value}" for name, value in learning.items()) + ".",
            "",
            f"Made with torch {facts.get('torch')}, transformers {facts.get('transformers')}, on "
            f"{facts.get('device')}, at commit {facts.get('commit')}, begun "
            f"{facts.get('started')}.",
            "",
            "It was trained for this one task; what else its base could do was not looked after.",
            "",
        ]
    )


def origin(start: Path) -> str:
    """Return in words which policy the checkpoint of an earlier run is."""
    return f"step {step_of(start)} of the run `{start.parent.parent.name}`"
