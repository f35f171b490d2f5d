"""Export a trained policy for other programs: `python -m grpo.export runs/NAME FOLDER`.

The folder gets the model of the run's latest valid checkpoint, the tokenizer, and a model card with
the run's results. `transformers` (`AutoModelForCausalLM.from_pretrained`) and vLLM load it. An
adapter is merged into its base model; with `--adapter` it is written alone, for
`PeftModel.from_pretrained`. `--dtype bfloat16` halves the files. The folder must be new or empty.
RUN may also be a folder that holds a LoRA adapter; no model card is written then.

The hub takes the folder as it is: `hf upload OWNER/NAME FOLDER`.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from grpo.config import Config, is_run
from grpo.data.errors import Parser, UserError, command_of, exit_status, printable
from grpo.data.files import kind_of
from grpo.ending import Verdict
from grpo.model.check import Model
from grpo.model.load import is_adapter, load_policy
from grpo.model.policy import Policy, save_model
from grpo.run.checkpoint import disk_refusal, find_resume
from grpo.run.logs import RunData, load_run, step_of
from grpo.run.resume import config_of, load_run_policy
from grpo.show.console import control_mark, evaluation_in_words

# The settings and facts that the model card names.
SETTINGS = (
    "reward curriculum loss scale credit beta learning_rate prompts group_size temperature "
    "lora_rank seed"
)
FACTS = "torch transformers device commit started"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.export", lambda: start(argv))


def start(argv: Sequence[str] | None) -> int:
    """Read the flags, write the folder, and print what is in it; return the exit status."""
    parser = Parser(prog=command_of("export"), description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="the folder of a run, one of its checkpoints, or any LoRA adapter")
    add("folder", type=Path, help="a new or empty folder")
    add("--adapter", action="store_true", help="write only the adapter of a LoRA run")
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, help="data type of the weights (default: as trained)")
    flags = parser.parse_intermixed_args(argv)  # FOLDER may follow a flag
    content = export(flags.run, flags.folder, adapter=flags.adapter, dtype=flags.dtype)
    print(printable(f"{flags.folder}: {content}"))
    return 0


def export(run: Path, folder: Path, *, adapter: bool = False, dtype: str | None = None) -> str:
    """Write the latest valid checkpoint of `run`, or an adapter made elsewhere, to `folder`; return
    what was written, in words.
    """
    require_empty(folder)
    if is_adapter(run) and not is_run(run):
        if adapter:
            raise UserError(f"--adapter: {run} is an adapter already; leave the flag out")
        policy = load_policy(str(run), device="cpu", dtype="float32")
        write_policy(policy, policy.model, folder, dtype)
        return "base model with the adapter merged into it, and tokenizer"

    checkpoint, _ = find_resume(run, flag="")
    data, step = load_run(checkpoint.parent.parent), step_of(checkpoint)
    config = config_of(checkpoint)
    if adapter and not config.lora_rank:
        raise UserError(
            f"--adapter: {data.path} trained the whole model and has no adapter; leave the flag out"
        )

    dtype_as_trained = "float32" if config.dtype == "auto" else config.dtype
    config = replace(config, quantise="none", dtype=dtype_as_trained)
    policy, _ = load_run_policy(checkpoint, config, "cpu")
    is_merged = config.lora_rank and not adapter
    model = policy.model.merge_and_unload() if is_merged else policy.model
    write_policy(policy, model, folder, dtype, card(data, step, adapter=adapter))
    return f"{'adapter' if adapter else 'model'} of step {step}, with tokenizer and model card"


def require_empty(folder: Path) -> None:
    """Raise UserError unless a model can be written to `folder`."""
    if kind_of(folder) and (kind_of(folder) != "folder" or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; give a new or an empty folder")


def write_policy(
    policy: Policy, model: Model, folder: Path, dtype: str | None = None, card: str = ""
) -> None:
    """Write the `model` of a policy, its tokenizer and the model card, completely or not at all."""
    if dtype:
        model = model.to(getattr(torch, dtype))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = folder if folder.is_dir() else folder.parent
        with tempfile.TemporaryDirectory(prefix=".export-", dir=place) as aside:
            made = Path(aside, "model")
            made.mkdir()
            save_model(model, made)
            policy.tokenizer.save_pretrained(made)
            if card:  # it comes last, because peft writes one of its own
                (made / "README.md").write_text(card, encoding="utf-8")
            if place == folder:  # a shell may stand in it, and it may be a mount point
                for file in made.iterdir():
                    os.replace(file, folder / file.name)
            else:
                os.replace(made, folder)
    except Exception as error:
        if reason := disk_refusal(error):
            raise UserError(f"{folder}: cannot be written ({reason})") from error
        raise


# --- the model card ---------------------------------------------------------------------------


def card(run: RunData, step: int, *, adapter: bool) -> str:
    """Return the model card, in Markdown, of the policy that `run` had after `step` steps.

    It may be published, so it names files and folders without this machine's paths.
    """
    config = asdict(Config()) | run.config
    facts = config["facts"]
    base, model = "", config["model"]
    if model != "builtin" and not facts.get("is_local_model", True):
        base = f"base_model: {model}\n"
    else:
        path = Path(model)  # of a checkpoint, the name of its run
        model = path.parent.parent.name if path.name.startswith("step-") else path.name
    task = _without_folders(config["task"])
    given = [name for name in SETTINGS.split() if config[name] is not None]
    settings = ", ".join(f"{name} {_without_folders(config[name])}" for name in given)
    made_with = ", ".join(f"{name} {facts.get(name)}" for name in FACTS.split())
    return f"""---
library_name: {"peft" if adapter else "transformers"}
pipeline_tag: text-generation
tags: [grpo, reinforcement-learning]
{base}---

# {run.path.name}

`{model}` trained by GRPO for {step} steps on the task `{task}`, level {config["level"]}.

{_results(run, step)}Settings: {settings}.

Made with {made_with}.

The model was trained for this one task. Its other abilities were not evaluated.
"""


def _without_folders(value: Any) -> str:
    """Return a setting as text; of ``path/to/file.py:Name`` without the folders."""
    return ":".join(Path(part).name for part in str(value).split(":"))


def _results(run: RunData, step: int) -> str:
    """Return the verdict, and the last evaluation of each level before and after training, unless
    they are later than `step`.
    """
    reports = [line for line in run.reports if line["step"] <= step]
    metric, unit = (reports[0][name] for name in ("metric", "unit")) if reports else ("score", "")
    lines = []
    if run.verdict and run.verdict["step"] <= step:
        first, *rest = Verdict.from_json(run.verdict).lines(metric, unit)
        lines += [f"{line}.\n" for line in (control_mark(run.verdict) + first, *rest)]
    last = {(line["level"], line["step"] > 0): line for line in reports}
    for (_, is_trained), line in sorted(last.items()):
        when = "after" if is_trained else "before"
        lines.append(f"- {when} training, held-out {evaluation_in_words(line)}")
    lines += [""] * bool(last)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
