"""The two sides of `bench_step.py`: our trainer and TRL's `GRPOTrainer`, and their measurement."""

import os
import resource
import sys
import time
from pathlib import Path

from bench_model import RandomRewards, model_in, precision, prompts_of

from grpo.trainer import Parts


def now() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trained_by(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def run_ours(arguments, folder: Path) -> tuple[list[dict], int, dict[str, float]]:
    """Run our trainer; return its steps, the number of trained parameters, and the memory used.

    A step has its seconds, those of the rollout, and the prompts and completion lengths.
    """
    from grpo.distributed import join_ranks

    device, _ = precision(arguments)
    if arguments.gb:
        import torch

        torch.cuda.set_per_process_memory_fraction(
            arguments.gb * 1e9 / torch.cuda.get_device_properties(0).total_memory,
            int(os.environ.get("LOCAL_RANK", 0)),
        )
    return run_ranks(arguments, folder, device, join_ranks(device))


def config_of(arguments, folder: Path):
    """Return our configuration, with defaults filled in."""
    from grpo.config import Config, resolve_config

    task = RandomRewards()
    device, dtype = precision(arguments)
    config = Config(
        task=task.name,
        level=arguments.words,
        ramp=False,
        model=str(model_in(arguments, folder)),
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
        micro_tokens=arguments.micro_tokens or None,
        gradient_checkpointing=arguments.gradient_checkpointing,
        draft=arguments.draft,
        quantise=arguments.quantise,
        dtype=dtype if device == "cuda" else "auto",
    )
    return resolve_config(config, task)


def run_ranks(
    arguments, folder: Path, device: str, ranks
) -> tuple[list[dict], int, dict[str, float]]:
    from grpo.model.load import load_policy
    from grpo.trainer import Trainer

    task, config = RandomRewards(), config_of(arguments, folder)
    policy = load_policy(config.model, device=config.device, **config.loading)
    policy.stops = ()  # no token ends a completion, so all have the full length
    trainer, steps = Trainer(config, Parts(task), policy, ranks=ranks), []
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
    """Return the peak memory of this process so far, in GB."""
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
    """Run TRL's trainer, which generates by `transformers`; return the same as `run_ours`."""
    from datasets import Dataset
    from peft import LoraConfig
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

    adapter = None
    if arguments.lora:
        adapter = LoraConfig(
            r=arguments.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = Timed(
        model=str(model_in(arguments, folder)),
        reward_funcs=RandomRewards().draw,
        args=trl_config(arguments, folder),
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


def trl_config(arguments, folder: Path):
    """Return the settings of TRL's trainer."""
    from trl import GRPOConfig

    device, dtype = precision(arguments)
    batch = arguments.groups * arguments.group_size
    micro = arguments.trl_micro or batch
    return GRPOConfig(
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


def measured_rates(arguments) -> dict[str, float]:
    """Return the FLOP/s of a large matrix product, and the bytes/s that a large copy moves."""
    import rates
    import torch

    device, dtype = precision(arguments)
    side, size = (rates.SIDE, rates.COPIED) if device == "cuda" else (2048, 1 << 28)
    return {
        "flops": rates.product_rate(device, getattr(torch, dtype), side),
        "bandwidth": rates.copy_rate(device, size=size),
    }
