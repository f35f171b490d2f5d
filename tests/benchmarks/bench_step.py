"""One training step beside TRL's GRPOTrainer, in one run: `python tests/benchmarks/bench_step.py
--size 3b --lora 16 --new 1024`.

Both get the same model file (a Llama with random weights), tokenizer, prompts, completions of
exactly `--new` tokens, random rewards, LoRA, KL weight, learning rate and precision: bfloat16 on a
GPU (in full fine-tuning ours has float32 masters, TRL none), else float32 (ours by its default,
`--dtype auto`: on a CPU with units for bfloat16 the products of the backward pass are in bfloat16,
see `grpo.model.matmul`). Each is a process of its own, so that memory is its own, one after the
other, ours first, on one device, which should be idle. What saw other prompts (token by token) or
lengths, or trained other parameters, is no result. The first step, with its warm-up, is told
apart; "step", "rollout" and "update" are medians of the later ones. What is no rollout (scores,
logging) counts as update. "reserved" is what the process took from the GPU, memory of captured
graphs included; on a CPU "peak" is the process's. TRL gets our line end after each prompt. With
`--gpus N` ours is N processes that share out the step (TRL is not run; "plan" is what `grpo.plan`
foretells for such GPUs); memory is then that of the one that takes most, floor and MFU those of a
GPU's part of the work.

Useful work, for both alike (P parameters, L layers, K key-value heads of D, B groups of G
completions of N tokens, b bytes a number):
- decode floor, seconds: N - 1 times the weights, P * b, each once, and at its t-th time the keys
  and values of the prompts, once a group, and of B * G * t completion tokens, 2 * L * K * D * b
  each; all over the bandwidth of a copy. "of floor" is floor / rollout.
- FLOPs of the update: 2 * P * T forward, 2 * P * T backward under LoRA (no gradient of frozen
  weights) and 4 * P * T without, 2 * P * T for the reference where beta > 0; T = prompts once a
  group + B * G * N. Attention scores and recomputation are not counted. "MFU" is FLOPs / update
  seconds over the rate of a large matrix product.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench_model import SHAPES, RandomRewards, make_model, model_in, precision, prompts_of

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
    parser.add_argument("--groups", type=int, default=4, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument(
        "--words", type=int, default=25, help="words of each of the prompt's two texts"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens of each completion, exactly")
    parser.add_argument("--steps", type=int, default=4, help="the first one included")
    parser.add_argument(
        "--micro-tokens",
        type=int,
        default=0,
        help="ours: most tokens of a micro-batch (0: our default)",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="ours: processes, each with a GPU where there are any"
    )
    parser.add_argument(
        "--gb",
        type=float,
        default=0,
        help="ours: no more memory of each GPU than so many GB (0: all of it)",
    )
    parser.add_argument("--optimizer", default="adamw", help="ours: see train.py")
    parser.add_argument("--shard", action="store_true", help="ours: see train.py")
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
        help="leave the model there, for the next run; use it if it is there",
    )
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "trl" and arguments.gpus > 1:
        parser.error("--gpus: TRL runs on one")
    if arguments.steps < 2 or arguments.group_size < 2:
        parser.error("--steps and --group-size: give 2 or more")
    if arguments.trl_micro and arguments.groups * arguments.group_size % arguments.trl_micro:
        parser.error("--trl-micro: give a divisor of groups * group size")
    return arguments


def now() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trained_by(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def run_ours(arguments, folder: Path) -> tuple[list[dict], int, dict[str, float]]:
    """Return (the steps of our trainer: seconds of the whole and of the rollout, prompts and
    lengths seen; parameters trained; memory used).
    """
    from grpo.distributed import process_group

    device, _ = precision(arguments)
    if arguments.gb:
        import torch

        torch.cuda.set_per_process_memory_fraction(
            arguments.gb * 1e9 / torch.cuda.get_device_properties(0).total_memory,
            int(os.environ.get("LOCAL_RANK", 0)),
        )
    with process_group(device) as ranks:
        return run_ranks(arguments, folder, device, ranks)


def config_of(arguments, folder: Path):
    """Return our configuration, defaults filled in."""
    from grpo.config import Config, resolve_config

    task = RandomRewards()
    config = Config(
        task=task.name,
        level=arguments.words,
        ramp=False,
        model=str(model_in(arguments, folder)),
        device=precision(arguments)[0],
        lora_rank=arguments.lora,
        prompts=arguments.groups,
        group_size=arguments.group_size,
        max_new_tokens=arguments.new,
        on_degenerate="keep",
        beta=arguments.beta,
        learning_rate=1e-5,
        schedule="constant",
        warmup=0,
        steps=arguments.steps,
        micro_tokens=arguments.micro_tokens,
        draft=arguments.draft,
        optimizer=arguments.optimizer,
        shard=arguments.shard,
        quantise=arguments.quantise,
    )
    return resolve_config(config, task)


def forecast_of(arguments, folder: Path, prompts: list[list[int]]) -> dict[str, float] | None:
    """Return the row that `grpo.plan` would have foretold for a GPU that it knows, or None."""
    import torch

    from grpo.tools import estimate, plan

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = next((gpu for called, gpu in estimate.GPUS.items() if called in name), None)
    if known is None or arguments.quantise != "none":
        return None
    config = config_of(arguments, folder)
    gpu = replace(known, memory=arguments.gb * 1e9) if arguments.gb else known
    work = estimate.Work(
        arguments.groups,
        sum(map(len, prompts)) / len(prompts),
        arguments.group_size,
        arguments.new,
        arguments.new,
    )
    memory, seconds = estimate.forecast(config, plan.model_of(config), work, gpu, arguments.gpus)
    step = sum(seconds.values())
    rollout = seconds["prefill"] + seconds["decoding"]
    return {
        "step s": step,
        "rollout s": rollout,
        "update s": step - rollout,
        "tokens/s": arguments.groups * arguments.group_size * arguments.new / step,
        "peak GB": sum(memory.values()) / 1e9,
    }


def run_ranks(
    arguments, folder: Path, device: str, ranks
) -> tuple[list[dict], int, dict[str, float]]:
    from grpo.model.load import load_policy
    from grpo.trainer import Trainer

    task, config = RandomRewards(), config_of(arguments, folder)
    policy = load_policy(config.model, **config.loading)
    policy.stops = ()  # no token ends a completion, so all are as long as they may be
    trainer, steps = Trainer(config, task, policy, ranks=ranks), []
    for _ in range(config.steps):
        start = now()
        report = trainer.step()
        seconds = now() - start
        steps.append(
            {
                "step": seconds,
                "rollout": report.metrics["time/rollout"],
                "wait": report.metrics.get("time/wait", 0.0),
                "loss": report.metrics["loss"],
                "prompts": [list(group.prompt) for group in report.groups],
                "lengths": [
                    len(completion.tokens)
                    for group in report.groups
                    for completion in group.completions
                ],
            }
        )
    memory = memory_used()
    return (
        steps,
        trained_by(policy.model),
        {name: max(each[name] for each in ranks.gather([memory])) for name in memory},
    )


def memory_used() -> dict[str, float]:
    """Return the most memory that this process has taken so far, in GB."""
    import torch

    if torch.cuda.is_available():
        return {
            "peak GB": torch.cuda.max_memory_allocated() / 1e9,
            "reserved GB": torch.cuda.max_memory_reserved() / 1e9,
        }
    return {
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e9
    }


def run_trl(arguments, folder: Path) -> tuple[list[dict], int, dict[str, float]]:
    """Return what `run_ours` does, of TRL's trainer; it generates through `transformers`, as by
    default.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    device, dtype = precision(arguments)
    batch, marks, steps = arguments.groups * arguments.group_size, [], []

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

    micro = arguments.trl_micro or batch
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        model_init_kwargs={"dtype": dtype},
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=arguments.group_size,
        max_completion_length=arguments.new,
        generation_kwargs={"min_new_tokens": arguments.new},
        max_steps=arguments.steps,
        beta=arguments.beta,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=dtype == "bfloat16",
        use_cpu=device == "cpu",
        gradient_checkpointing=arguments.trl_gc,
        shuffle_dataset=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    adapter = (
        LoraConfig(
            r=arguments.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        if arguments.lora
        else None
    )
    trainer = Timed(
        model=str(model_in(arguments, folder)),
        reward_funcs=RandomRewards().draw,
        args=config,
        peft_config=adapter,
        train_dataset=Dataset.from_dict(
            {"prompt": [prompt + "\n" for prompt in prompts_of(arguments)]}
        ),
        processing_class=AutoTokenizer.from_pretrained(model_in(arguments, folder)),
        callbacks=[Marks()],
    )
    trainer.train()
    steps = [
        {**step, "step": end - start}
        for step, start, end in zip(steps, marks[:-1], marks[1:], strict=True)
    ]
    return steps, trained_by(trainer.model), memory_used()


def measured_rates(arguments) -> dict:
    """Return FLOP/s of a large matrix product and bytes/s, read and written, of a large copy; the
    best of several.
    """
    import torch

    device, dtype = precision(arguments)
    side, size = (8192, 1 << 30) if device == "cuda" else (2048, 1 << 28)
    a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    source, target = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))

    def least(work) -> float:
        times = []
        for _ in range(8):
            start = now()
            work()
            times.append(now() - start)
        return min(times)

    return {
        "flops": 2 * side**3 / least(lambda: a @ b),
        "bandwidth": 2 * size / least(lambda: target.copy_(source)),
    }


def child(arguments, name: str, folder: Path):
    """Do one process's work and write what came of it to folder/NAME.json."""
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
                f"{name}: not the work that was asked for: other prompts, or completions of "
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
            "plan": forecast_of(arguments, folder, prompts) if name == "ours" else None,
        }
    (folder / f"{name}.json").write_text(json.dumps(result))


def spawn(name: str, folder: Path, gpus: int = 1) -> dict | None:
    """Return what a child process (or `gpus` of them together) found out, or None, with the end of
    its output on the console, where it failed.
    """
    print(f"{name} ...", file=sys.stderr, flush=True)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        if gpus > 1
        else []
    )
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
    """Return (bytes that the decoding of a step must read, FLOPs of its update), as the head of
    this file counts them, of each GPU.
    """
    prompt_tokens = sum(map(len, model["prompts"])) / arguments.steps
    rows, passes = arguments.groups * arguments.group_size, arguments.new - 1
    cached = passes * prompt_tokens + rows * passes * (passes + 1) / 2
    read = passes * model["weight_bytes"] + cached * model["kv_bytes"] / arguments.gpus
    per_parameter = 2 + (2 if arguments.lora else 4) + (2 if arguments.beta else 0)
    return read, per_parameter * model["parameters"] * (
        prompt_tokens + rows * arguments.new
    ) / arguments.gpus


def row_of(arguments, model: dict, found: dict, rates: dict) -> dict[str, float]:
    """Return a contestant's row of the table."""
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
    names = (
        [arguments.only] if arguments.only else ["ours"] if arguments.gpus > 1 else ["ours", "trl"]
    )
    with tempfile.TemporaryDirectory() as folder:
        model = spawn("model", Path(folder))
        if model is None:
            return 1
        found = {
            name: result for name in names if (result := spawn(name, Path(folder), arguments.gpus))
        }
    trained = {result["trained"] for result in found.values()}
    if len(trained) != 1:
        print(
            f"no comparison: parameters trained: {sorted(trained)}"
            if trained
            else "nothing ran to its end"
        )
        return 1
    rates = {
        what: max(result["rates"][what] for result in found.values())
        for what in ("flops", "bandwidth")
    }
    rows = {name: row_of(arguments, model, result, rates) for name, result in found.items()}
    if foretold := found.get("ours", {}).get("plan"):
        rows["plan"] = foretold
    if {"ours", "trl"} <= rows.keys():
        rows["ours / trl"] = {
            name: value / rows["trl"][name] for name, value in rows["ours"].items()
        }
    mean = sum(map(len, model["prompts"])) / len(model["prompts"])
    print(
        f"{model['parameters'] / 1e6:,.1f} M parameters, {trained.pop() / 1e6:,.1f} M trained, "
        f"{model['dtype']}; "
        f"{arguments.groups} prompts of {mean:.0f} tokens x {arguments.group_size} completions of "
        f"{arguments.new}; beta {arguments.beta:g}; "
        f"optimizer {arguments.optimizer}{' shared out' if arguments.shard else ''}, base "
        f"{arguments.quantise}\n{arguments.gpus} x {model['device']}: {rates['flops'] / 1e12:.3g} "
        f"TFLOP/s, {rates['bandwidth'] / 1e9:.3g} GB/s measured"
    )
    shown = {
        column: form
        for column, form in COLUMNS.items()
        if any(column in row for row in rows.values())
    }
    print(f"{'':<11}" + "".join(f"{column:>13}" for column in shown))
    for name, row in rows.items():
        print(
            f"{name:<11}"
            + "".join(
                f"{row[column]:>13{'.3f' if '/' in name else form}}" if column in row else " " * 13
                for column, form in shown.items()
            )
        )
    if arguments.json:
        versions = {
            package: version(package)
            for package in ("torch", "transformers", "peft", *(["trl"] if "trl" in found else []))
        }
        facts = {name: value for name, value in model.items() if name != "prompts"} | {
            "mean_prompt_tokens": mean
        }
        with open(arguments.json, "w") as file:
            json.dump(
                {
                    "arguments": {
                        name: str(value) if isinstance(value, Path) else value
                        for name, value in vars(arguments).items()
                    },
                    "versions": versions,
                    "model": facts,
                    "rates": rates,
                    "rows": rows,
                    "steps": {name: result["steps"] for name, result in found.items()},
                },
                file,
                indent=1,
            )
    return 0 if len(found) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
