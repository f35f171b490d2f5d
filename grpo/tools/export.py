"""Export a trained policy for other programs: `python -m grpo.export runs/NAME FOLDER`.

The folder gets the model of the run's latest valid checkpoint, the tokenizer, and a model card with
the run's results. `transformers` (`AutoModelForCausalLM.from_pretrained`) and vLLM load it. An
adapter is merged into its base model; with `--adapter` it is written alone, for
`PeftModel.from_pretrained`. `--dtype bfloat16` halves the files. The folder must be new or empty.
RUN may also be a folder that holds a LoRA adapter; no model card is written then.

`--push OWNER/NAME` uploads the same to the Hugging Face hub, to a private repository unless it
exists already or `--public` is given. Then FOLDER may be left out. The token is that of `hf auth
login` or HF_TOKEN.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from data.errors import Parser, UserError, exit_status
from data.files import kind_of
from data.text import printable
from grpo.config import load_config, names_in
from grpo.model.adapter import is_adapter
from grpo.model.interfaces import Model
from grpo.model.load import load_policy
from grpo.model.options import LoadOptions
from grpo.model.policy import Policy
from grpo.model.save import save_model
from grpo.run.checkpoint import disk_refusal, find_resume
from grpo.run.folders import step_of
from grpo.run.opening import require_unicode
from grpo.run.reader import load_run
from grpo.run.sources import check_base
from grpo.run.start import checkpoint_of
from grpo.tools.hub import check_push, push
from grpo.tools.model_card import card


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.export", lambda: write(parse(argv)))


def write(arguments: argparse.Namespace) -> int:
    """Write the folder or upload it, or both, and print what is in it; return the exit status."""
    repo = arguments.push
    if repo:
        check_push(repo)
    with _folder(arguments) as folder:
        content = export(
            arguments.run,
            folder,
            adapter=arguments.adapter,
            dtype=arguments.dtype,
            accept=names_in(arguments.accept_changes),
        )
        if arguments.folder:
            print(printable(f"{folder}: {content}"))
        if repo:
            address = push(folder, repo, is_public=arguments.public, message=f"Add {content}")
            print(printable(f"{address}: {content}"))
    return 0


@contextmanager
def _folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder to write, which is a temporary one if the user named none."""
    if arguments.folder:
        yield arguments.folder
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=Path, help="the folder of a run, one of its checkpoints, or any LoRA adapter"
    )
    parser.add_argument("folder", type=Path, nargs="?", help="a new or empty folder")
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
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload it to this repository of the Hugging Face hub"
    )
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private)"
    )
    arguments = parser.parse_intermixed_args(argv)  # FOLDER may follow a flag
    if not arguments.folder and not arguments.push:
        parser.error("give a new or empty FOLDER, --push OWNER/NAME, or both")
    if arguments.public and not arguments.push:
        parser.error("--public is for --push alone")
    return arguments


def export(
    run: Path,
    folder: Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    accept: Sequence[str] = (),
) -> str:
    """Write the latest valid checkpoint of `run` to `folder`; return what was written, in words.

    `run` may also be an adapter made elsewhere. Sources of the kinds in `accept` may have changed
    since the checkpoint. Raises UserError if there is no valid checkpoint, or no adapter to export,
    or if the folder is not empty.
    """
    if kind_of(folder) and (kind_of(folder) != "folder" or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; give a new or an empty folder")
    require_unicode(folder)

    if is_adapter(run) and checkpoint_of(str(run))[0] is None:
        if adapter:
            raise UserError(f"--adapter: {run} is an adapter already; leave the flag out")
        policy = load_policy(str(run), device="cpu", options=LoadOptions("float32"))
        _write(policy, policy.model, folder, dtype)
        return "base model with the adapter merged into it, and tokenizer"

    checkpoint, _ = find_resume(run, flag="")
    data = load_run(checkpoint.parent.parent)
    config = load_config(data.path / "config.yaml")

    if adapter and not config.lora_rank:
        raise UserError(
            f"--adapter: {data.path} trained the whole model and has no adapter; leave the flag out"
        )
    for note in check_base(checkpoint, config.model, accept):
        print(f"grpo.export: {printable(note)}", file=sys.stderr)

    options = replace(
        config.loading,
        dtype="float32" if config.dtype == "auto" else config.dtype,
        keep_reference=False,
    )
    policy = load_policy(config.model, device="cpu", weights=checkpoint, options=options)

    model = policy.model
    if config.lora_rank and not adapter:
        model = model.merge_and_unload()
    step = step_of(checkpoint)
    _write(policy, model, folder, dtype, card(data, step, adapter=adapter))
    kind = "adapter" if adapter else "model"
    return f"{kind} of step {step}, with tokenizer and model card"


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
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if is_new and folder.is_dir():
            folder.rmdir()
        if reason := disk_refusal(error):
            raise UserError(f"{folder}: cannot be written ({reason}); nothing is left there") from (
                error
            )
        raise
