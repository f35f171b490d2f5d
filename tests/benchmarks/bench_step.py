"""Compare a training step with TRL's, whose completions come from `generate`, batches, or vLLM.

    python tests/benchmarks/bench_step.py --size 3b --lora 16 --new 1024

Needs the extra `bench`. There are four sides: "ours"; "generate", TRL's GRPOTrainer as it comes;
"batching", the same with transformers' continuous batching; and "vllm", the same with vLLM in its
process, which must be installed (only run if `--sides` names it). All get the same model file (a
Llama with random weights), tokenizer, prompts, completions of exactly `--new` tokens, random
rewards, LoRA, KL weight and learning rate, and make one update in each step, with the dapo loss. On
a GPU all use bfloat16; in full fine-tuning ours has float32 masters, and TRL has none. On a CPU all
use float32. TRL gets our line end after each prompt.

TRL is set for speed: no gradient checkpointing, no reference model without KL, one micro-batch
(where memory runs out, give the largest --trl-micro that fits), and Liger's kernels on a GPU if
`liger-kernel` is installed. Continuous batching takes `flash-attn` if that is installed, and
otherwise PyTorch's attention. vLLM gets the share of memory that TRL gives it by default.

Each side is a process of its own, so that its memory can be measured. They run one after the other
on one device, which should be idle, and each prints its row when it is done; below a row of TRL is
its ratio to the first side. A side that saw other prompts (token by token) or lengths, or trained
other parameters, is refused; one that fails is named, and the others run.

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

With `--gpus N --sides ours` N processes share the step. Memory is that of the process with the
most; floor and MFU are those of one GPU's part of the work.
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
from unittest.mock import patch

import torch
from bench_model import (
    SHAPES,
    RandomRewards,
    adapter_of,
    make_model,
    memory_used,
    now,
    precision,
    prompts_of,
    rates,
    trained_by,
    trl_config,
    trl_dataset,
)

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

# Its steps, the number of trained parameters, and the memory used. A step has its seconds, those of
# the rollout, and the prompts and completion lengths.
Side = tuple[list[dict], int, dict[str, float]]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SHAPES, default="tiny")
    add("--lora", type=int, default=0, metavar="RANK", help="0: full fine-tuning")
    add("--beta", type=float, default=0.0, help="KL weight")
    add("--groups", type=int, default=4, help="prompts of a step")
    add("--group-size", type=int, default=16)
    add("--words", type=int, default=25, help="words of each of the two texts in a prompt")
    add("--new", type=int, default=128, help="tokens of each completion, exactly")
    add("--steps", type=int, default=4, help="the first one included")
    add("--gpus", type=int, default=1, help="ours: processes, each with its own GPU, if any")
    add("--shard", action="store_true", help="ours: divide weights and moments among the GPUs")
    add("--gb", type=float, default=0, help="ours: use at most this many GB of each GPU (0: all)")
    add("--trl-micro", type=int, default=0, help="TRL: completions of a micro-batch (0: all)")
    add(
        "--batching",
        type=json.loads,
        default={"use_cuda_graph": False, "max_memory_percent": 0.4},
        metavar="JSON",
        help="settings of transformers' continuous batching (default: what TRL's authors advise)",
    )
    add("--sides", default="ours,generate,batching", help="what is run, in this order")
    add("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sides = arguments.sides.split(",")
    if unknown := set(arguments.sides) - {"ours", "generate", "batching", "vllm"}:
        parser.error(f"--sides: {', '.join(unknown)}: give ours, generate, batching or vllm")
    if arguments.gpus > 1 and arguments.sides != ["ours"]:
        parser.error("--gpus: TRL runs on one; give --sides ours")
    return arguments


def run_ours(arguments, folder: Path) -> Side:
    """Run our trainer."""
    from grpo.config import Config, resolve_config
    from grpo.distributed import join_ranks
    from grpo.model.load import load_policy
    from grpo.rollout.generate import Drafting
    from grpo.tasks.supply import Supply
    from grpo.trainer import Trainer

    device, dtype = precision()
    if arguments.gb:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            arguments.gb * 1e9 / total, int(os.environ.get("LOCAL_RANK", 0))
        )
    ranks, task = join_ranks(device), RandomRewards()
    config = Config(
        task=task.name,
        level=arguments.words,
        model=str(folder / "model"),
        device=device,
        lora_rank=arguments.lora,
        prompts=arguments.groups,
        group_size=arguments.group_size,
        max_new_tokens=arguments.new,
        on_degenerate="keep",
        beta=arguments.beta,
        learning_rate=1e-5,
        schedule="constant",
        steps=arguments.steps,
        epochs=1,
        dtype=dtype if device == "cuda" else "auto",
        shard=arguments.shard,
    )
    config = resolve_config(config, task)
    # The model lacks its tokenizer's end token, so that no completion ends early.
    end = SHAPES[arguments.size]["vocab_size"]
    with patch("grpo.model.policy._stop_ids", return_value=((end,), end)):
        policy = load_policy(config.model, device=config.device, **config.loading)

    trainer, steps = Trainer(config, Supply(task, seed=0), policy, ranks), []
    trainer.drafting = Drafting(0)
    for _ in range(config.steps):
        start = now()
        report = trainer.step()
        seconds = now() - start
        completions = [each for group in report.groups for each in group.completions]
        steps.append(
            {
                "step": seconds,
                "rollout": report.metrics["time/rollout"],
                "prompts": [list(group.prompt) for group in report.groups],
                "lengths": [len(completion.tokens) for completion in completions],
            }
        )
    memory = memory_used()
    most = {name: max(each[name] for each in ranks.gather([memory])) for name in memory}
    return steps, trained_by(policy.model), most


def run_trl(arguments, folder: Path, side: str) -> Side:
    """Run TRL's trainer, which generates by `side`."""
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    marks, steps = [], []

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            start = now()
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            steps.append(
                {
                    "rollout": now() - start,
                    "prompts": [list(ids) for ids in prompt_ids[:: arguments.group_size]],
                    "lengths": [len(ids) for ids in completion_ids],
                }
            )
            return prompt_ids, completion_ids, *rest

    class Marks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            marks.append(now())

        def on_train_end(self, *_, **__):
            marks.append(now())

    prompts = [prompt + "\n" for prompt in prompts_of(arguments)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    longest = max(map(len, tokenizer(prompts).input_ids))
    config = trl_config(
        arguments.groups * arguments.group_size,
        arguments.trl_micro,
        model_init_kwargs={"dtype": precision()[1]},
        num_generations=arguments.group_size,
        max_completion_length=arguments.new,
        use_vllm=side == "vllm",
        vllm_max_model_length=longest + arguments.new,
        # TRL decodes the tokens itself.
        generation_kwargs={"detokenize": False} if side == "vllm" else None,
        use_transformers_continuous_batching=side == "batching",
        transformers_continuous_batching_config=arguments.batching,
        max_steps=arguments.steps,
        beta=arguments.beta,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
    )
    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=RandomRewards().draw,
        args=config,
        peft_config=adapter_of(arguments.lora),
        train_dataset=trl_dataset("prompt", prompts),
        processing_class=tokenizer,
        callbacks=[Marks()],
    )
    trainer.train()
    for step, start, end in zip(steps, marks[:-1], marks[1:], strict=True):
        step["step"] = end - start
    return steps, trained_by(trainer.model), memory_used()


def child(arguments, name: str, folder: Path):
    """Do the work of one process, and write its result to folder/NAME.json."""
    if name == "model":
        result = make_model(arguments, folder / "model")
    else:
        is_ours = name == "ours"
        measured = run_ours(arguments, folder) if is_ours else run_trl(arguments, folder, name)
        steps, trained, memory = measured
        if int(os.environ.get("RANK", 0)) > 0:
            return
        prompts = json.loads((folder / "model.json").read_text())["prompts"]
        seen = [prompt for step in steps for prompt in step.pop("prompts")]
        lengths = {length for step in steps for length in step.pop("lengths")}
        if seen != prompts or lengths != {arguments.new}:
            sys.exit(f"{name}: other prompts, or completions of {sorted(lengths)} tokens")
        gc.collect()
        torch.cuda.empty_cache()
        result = {"steps": steps, "trained": trained, "memory": memory, "rates": rates()}
    (folder / f"{name}.json").write_text(json.dumps(result))


def spawn(name: str, folder: Path, gpus: int = 1) -> dict:
    """Return the result of a child process, or of `gpus` of them together."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    launcher = []
    if gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    top = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, *launcher, __file__, *sys.argv[1:], "--child", name, str(folder)],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", **shown, "PYTHONPATH": str(top), **os.environ},
    )
    if done.returncode:
        log = Path(tempfile.gettempdir()) / f"{name}.log"
        log.write_text(done.stdout + done.stderr)
        raise ChildProcessError(f"{name} failed ({log}): {done.stderr.strip().splitlines()[-1]}")
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


def row_of(arguments, model: dict, found: dict) -> dict[str, float]:
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
        "of floor": read / found["rates"]["bandwidth"] / rollout,
        "MFU": flops / update / found["rates"]["flops"],
        **found["memory"],
    }


def main():
    arguments = parse()
    if arguments.child:
        return child(arguments, arguments.child[0], Path(arguments.child[1]))
    first, failed = None, False
    with tempfile.TemporaryDirectory() as folder:
        model = spawn("model", Path(folder))
        for name in arguments.sides:
            try:
                found = spawn(name, Path(folder), arguments.gpus)
            except ChildProcessError as error:
                print(error, flush=True)
                failed = True
                continue

            row = row_of(arguments, model, found)
            if first is None:
                show_head(arguments, model, found, row)
                first = name, found["trained"], row
            show_row(name, row, COLUMNS)
            if found["trained"] != first[1]:
                sys.exit(f"no comparison: {name} trained {found['trained']} parameters")
            if name != first[0]:
                ratios = {column: value / first[2][column] for column, value in row.items()}
                show_row(f"/ {first[0]}", ratios, dict.fromkeys(ratios, ".2f"))
    sys.exit(int(failed))


def show_head(arguments, model: dict, found: dict, row: dict):
    """Print what is measured, and the columns of `row`."""
    mean_prompt = sum(map(len, model["prompts"])) / len(model["prompts"])
    print(
        f"{model['parameters'] / 1e6:,.1f} M parameters, {found['trained'] / 1e6:,.1f} M trained, "
        f"{model['dtype']}; {arguments.groups} prompts of {mean_prompt:.0f} tokens x "
        f"{arguments.group_size} completions of {arguments.new}; beta {arguments.beta:g}\n"
        f"{arguments.gpus} x {model['device']}: {found['rates']['flops'] / 1e12:.3g} "
        f"TFLOP/s, {found['rates']['bandwidth'] / 1e9:.3g} GB/s measured\n"
        f"{'':<11}" + "".join(f"{column:>13}" for column in COLUMNS if column in row)
    )


def show_row(name: str, row: dict, forms: dict[str, str]):
    cells = (f"{row[column]:{form}}" for column, form in forms.items() if column in row)
    print(f"{name:<11}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
