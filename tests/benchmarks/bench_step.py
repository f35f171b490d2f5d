"""Compare a training step with that of TRL's GRPOTrainer.

    python tests/benchmarks/bench_step.py --size 3b --lora 16 --new 1024

Both sides get the same model file (a Llama with random weights), tokenizer, prompts, completions of
exactly `--new` tokens, random rewards, LoRA, KL weight and learning rate. On a GPU both use
bfloat16; in full fine-tuning ours has float32 masters, and TRL has none. On a CPU both use float32.
TRL gets our line end after each prompt.

Each side is a process of its own, so that its memory can be measured. They run one after the other,
ours first, on one device, which should be idle. A side that saw other prompts (token by token) or
lengths, or trained other parameters, is refused.

The columns:

- "first step" includes the warm-up. "step", "rollout" and "update" are medians of the later steps;
  everything that is not rollout (scores, logging) counts as update.
- "peak" is the memory that was allocated; on a CPU that of the process. "reserved" is what the
  process took from the GPU, captured graphs included.
- "of floor" is decode floor / rollout. The floor is the time of reading what decoding must read, at
  the bandwidth of a copy: for N - 1 tokens all weights (P * b bytes), and for the t-th of them the
  keys and values of the prompts (once for each group) and of B * G * t completion tokens,
  2 * L * K * D * b bytes each.
- "MFU" is FLOPs of the update / its seconds, over the rate of a large matrix product. The FLOPs are
  2 * P * T forward; backward 2 * P * T under LoRA, which needs no gradient of frozen weights, and
  4 * P * T otherwise; 2 * P * T for the reference if beta > 0. T is the number of tokens, with each
  prompt counted once for its group. Attention scores and recomputation are not counted.

Here P is the number of parameters, L layers, K key-value heads of size D, B groups of G completions
of N tokens, and b bytes of a number.

With `--gpus N` ours is N processes that share the step, and TRL is not run. Memory is that of the
process with the most; floor and MFU are those of one GPU's part of the work.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench_model import SHAPES, make_model
from step_sides import measured_rates, run_ours, run_trl

COLUMNS = {
    "first step s": ".2f",
    "step s": ".2f",
    "rollout s": ".2f",
    "update s": ".2f",
    "tokens/s": ",.0f",
    "of floor": ".1%",
    "MFU": ".1%",
    "peak GB": ".2f",
    "reserved GB": ".2f",
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: full fine-tuning")
    parser.add_argument("--beta", type=float, default=0.04, help="KL weight")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument(
        "--words", type=int, default=25, help="words of each of the two texts in a prompt"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens of each completion, exactly")
    parser.add_argument("--steps", type=int, default=4, help="the first one included")
    parser.add_argument(
        "--micro-tokens", type=int, default=0, help="ours: tokens of a micro-batch (0: what fits)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="ours: processes, each with its own GPU, if any",
    )
    parser.add_argument(
        "--gb",
        type=float,
        default=0,
        help="ours: use at most this many GB of each GPU (0: all)",
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="ours: see train.py")
    parser.add_argument("--quantise", default="none", help="ours: see train.py")
    parser.add_argument(
        "--draft", choices=("off", "auto"), default="off", help="ours: speculative decoding"
    )
    parser.add_argument(
        "--trl-micro",
        type=int,
        default=0,
        help="TRL: completions of a micro-batch (0: the whole step)",
    )
    parser.add_argument("--trl-gc", action="store_true", help="TRL: gradient checkpointing")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the model in this folder, and use it if it is there",
    )
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "trl" and arguments.gpus > 1:
        parser.error("--gpus: TRL runs on one")
    if arguments.steps < 2 or arguments.group_size < 2:
        parser.error("--steps and --group-size: give 2 or more")
    if arguments.trl_micro and arguments.groups * arguments.group_size % arguments.trl_micro:
        parser.error("--trl-micro: give a divisor of groups * group size")
    return arguments


def child(arguments, name: str, folder: Path):
    """Do the work of one process, and write its result to folder/NAME.json."""
    import torch

    if name == "model":
        result = make_model(arguments, folder)
    else:
        steps, trained, memory = {"ours": run_ours, "trl": run_trl}[name](arguments, folder)
        if int(os.environ.get("RANK", 0)) > 0:
            return
        prompts = json.loads((folder / "model.json").read_text())["prompts"]
        seen = [prompt for step in steps for prompt in step.pop("prompts")]
        lengths = {length for step in steps for length in step.pop("lengths")}
        if seen != prompts or lengths != {arguments.new}:
            sys.exit(
                f"{name}: this is not the given work: other prompts, or completions of "
                f"{sorted(lengths)} tokens"
            )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        result = {
            "steps": steps,
            "trained": trained,
            "memory": memory,
            "rates": measured_rates(arguments),
        }
    (folder / f"{name}.json").write_text(json.dumps(result))


def spawn(name: str, folder: Path, gpus: int = 1) -> dict | None:
    """Return the result of a child process, or of `gpus` of them together.

    If it fails, print the end of its output and return None.
    """
    print(f"{name} ...", file=sys.stderr, flush=True)
    launcher = []
    if gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    with open(folder / f"{name}.log", "w") as log:
        status = subprocess.run(
            [sys.executable, *launcher, __file__, *sys.argv[1:], "--child", name, str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", **shown, **os.environ},
        ).returncode
    if status:
        print(
            f"{name} failed, exit status {status}:",
            *(folder / f"{name}.log").read_text().splitlines()[-15:],
            sep="\n  ",
        )
        return None
    return json.loads((folder / f"{name}.json").read_text())


def useful_work(arguments, model: dict) -> tuple[float, float]:
    """Return the bytes that the decoding of a step must read, and the FLOPs of its update.

    Both are for each GPU, counted as the head of this file says.
    """
    prompt_tokens = sum(map(len, model["prompts"])) / arguments.steps
    rows, passes = arguments.groups * arguments.group_size, arguments.new - 1
    cached = passes * prompt_tokens + rows * passes * (passes + 1) / 2
    read = passes * model["weight_bytes"] + cached * model["kv_bytes"] / arguments.gpus

    per_parameter = 2 + (2 if arguments.lora else 4) + (2 if arguments.beta else 0)
    tokens = prompt_tokens + rows * arguments.new
    return read, per_parameter * model["parameters"] * tokens / arguments.gpus


def row_of(arguments, model: dict, found: dict, rates: dict) -> dict[str, float]:
    """Return one side's row of the table."""
    first, *later = found["steps"]
    step, rollout = (median(each[name] for each in later) for name in ("step", "rollout"))
    update = median(each["step"] - each["rollout"] for each in later)
    read, flops = useful_work(arguments, model)
    return {
        "first step s": first["step"],
        "step s": step,
        "rollout s": rollout,
        "update s": update,
        "tokens/s": arguments.groups * arguments.group_size * arguments.new / step,
        "of floor": read / rates["bandwidth"] / rollout,
        "MFU": flops / update / rates["flops"],
        **found["memory"],
    }


def main():
    arguments = parse()
    if arguments.child:
        return child(arguments, arguments.child[0], Path(arguments.child[1]))
    names = ["ours"] if arguments.gpus > 1 else ["ours", "trl"]
    if arguments.only:
        names = [arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        model = spawn("model", Path(folder))
        if model is None:
            return 1
        found = {
            name: result for name in names if (result := spawn(name, Path(folder), arguments.gpus))
        }

    trained = {result["trained"] for result in found.values()}
    if not trained:
        print("no side finished")
        return 1
    if len(trained) > 1:
        print(f"no comparison: parameters trained: {sorted(trained)}")
        return 1

    rates = {
        what: max(result["rates"][what] for result in found.values())
        for what in ("flops", "bandwidth")
    }
    rows = {name: row_of(arguments, model, result, rates) for name, result in found.items()}
    if {"ours", "trl"} <= rows.keys():
        rows["ours / trl"] = {
            name: value / rows["trl"][name] for name, value in rows["ours"].items()
        }
    show_table(arguments, model, rates, rows, trained.pop())
    return 0 if len(found) == len(names) else 1


def mean_prompt(model: dict) -> float:
    """Return the mean tokens of a prompt."""
    return sum(map(len, model["prompts"])) / len(model["prompts"])


def show_table(arguments, model: dict, rates: dict, rows: dict, trained: int):
    """Print what was measured, and a row for each side."""
    print(
        f"{model['parameters'] / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained, "
        f"{model['dtype']}; {arguments.groups} prompts of {mean_prompt(model):.0f} tokens x "
        f"{arguments.group_size} completions of {arguments.new}; beta {arguments.beta:g}; "
        f"optimizer adamw, base {arguments.quantise}\n"
        f"{arguments.gpus} x {model['device']}: {rates['flops'] / 1e12:.3g} "
        f"TFLOP/s, {rates['bandwidth'] / 1e9:.3g} GB/s measured"
    )
    shown = {
        column: form
        for column, form in COLUMNS.items()
        if any(column in row for row in rows.values())
    }
    print(f"{'':<11}" + "".join(f"{column:>13}" for column in shown))
    for name, row in rows.items():
        line = f"{name:<11}"
        for column, form in shown.items():
            form = ".3f" if "/" in name else form
            line += f"{row[column]:>13{form}}" if column in row else " " * 13
        print(line)


if __name__ == "__main__":
    sys.exit(main())
