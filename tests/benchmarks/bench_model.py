"""What the benchmarks share: a Llama with random weights, random rewards, and a device's speed."""

import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.model.load import ALPHA
from grpo.tasks.base import Problem, Score, key_of
from grpo.tasks.supply import problem_at

SIZES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads "
    "head_dim vocab_size max_position_embeddings"
).split()

# The sizes of Llamas. After the tiny one: the shapes of SmolLM2-135M, Qwen2.5-0.5B and -1.5B, and
# Llama 3 of 1, 3 and 8 billion parameters, Qwen2.5 of 14 and 32.
SHAPES = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, *sizes in (
        ("tiny", 6, 256, 768, 8, 4, 32, 4096, 2048),
        ("135m", 30, 576, 1536, 9, 3, 64, 49152, 131072),
        ("0.5b", 24, 896, 4864, 14, 2, 64, 151936, 131072),
        ("1.5b", 28, 1536, 8960, 12, 2, 128, 151936, 131072),
        ("1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072),
        ("3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072),
        ("8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
        ("14b", 48, 5120, 13824, 40, 8, 128, 152064, 131072),
        ("32b", 64, 5120, 27648, 40, 8, 128, 152064, 131072),
    )
}


class RandomRewards:
    """A task without meaning: prompts of two texts of random words, and random rewards."""

    name, rewards, default_level = "bench", (), 25

    def __init__(self):
        rng = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(3000)]
        self.rng = random.Random(1)

    def make(self, level, split, rng):
        prompt = " | ".join(" ".join(rng.choices(self.words, k=level)) for _ in range(2)) + " ="
        return Problem(self.name, level, prompt, target="", key=key_of(self.name, prompt))

    def score(self, problem, completions):
        return [Score(reward) for reward in self.draw(completions)]

    def draw(self, completions, **_):
        return [self.rng.random() for _ in completions]


def prompts_of(arguments) -> list[str]:
    """Return the prompts of all steps, in the order in which our trainer draws them."""
    task, count = RandomRewards(), arguments.steps * arguments.groups
    return [
        problem_at(task, seed=0, split="train", level=arguments.words, index=index).prompt
        for index in range(count)
    ]


def precision() -> tuple[str, str]:
    """Return (device, name of the dtype), which both sides use."""
    return ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")


def make_model(arguments, folder: Path) -> dict:
    """Write the model and its tokenizer; return facts about it, and the tokens of the prompts."""
    device, dtype = precision()
    sizes = SHAPES[arguments.size]
    tokenizer = make_tokenizer(end=sizes["vocab_size"])
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=sizes["vocab_size"],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)

    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        "device": device_name(),
        "dtype": dtype,
        "parameters": model.num_parameters(),
        "weight_bytes": model.num_parameters() * model.dtype.itemsize,
        "kv_bytes": of_token * model.dtype.itemsize,
        "prompts": tokenizer([prompt + "\n" for prompt in prompts_of(arguments)]).input_ids,
    }


def make_tokenizer(end: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 4,096 tokens, trained on words of the task.

    The end token's id is `end`: one that the model lacks, so that every completion has the full
    length, on all sides, without work on the logits.
    """
    task, rng = RandomRewards(), random.Random(2)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    bpe.train_from_iterator(
        (" ".join(rng.choices(task.words, k=200)) for _ in range(300)),
        trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=["<pad>", "<eos>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    content = json.loads(bpe.to_str())
    content["model"]["vocab"]["<eos>"] = content["added_tokens"][1]["id"] = end
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        pad_token="<pad>",
        eos_token="<eos>",
    )


# A device: its name, memory, and speed. A rate is the best of several, after one that does not
# count.


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def memory_used() -> dict[str, float]:
    """Return the peak memory of this process so far, in GB."""
    if torch.cuda.is_available():
        return {
            "peak GB": torch.cuda.max_memory_allocated() / 1e9,
            "reserved GB": torch.cuda.max_memory_reserved() / 1e9,
        }
    return {"peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}


def now() -> float:
    """Return the time in seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def rates() -> dict[str, float]:
    """Return the bytes/s that a large copy moves, and the FLOP/s of a large matrix product."""
    device, dtype = precision()
    size, side = (1 << 31, 8192) if device == "cuda" else (1 << 28, 2048)
    source, target = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    factors = dict(device=device, dtype=getattr(torch, dtype))
    left, right = (torch.randn(side, side, **factors) for _ in range(2))
    return {
        "bandwidth": 2 * size / least_time(lambda: target.copy_(source)),
        "flops": 2 * side**3 / least_time(lambda: left @ right),
    }


def least_time(work: Callable[[], object], repeats: int = 8) -> float:
    """Return the shortest of several times of `work`, in seconds."""
    times = []
    for _ in range(repeats + 1):
        start = now()
        work()
        times.append(now() - start)
    return min(times[1:])


def trained_by(model) -> int:
    """Return the number of parameters that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def adapter_of(rank: int):
    """Return the configuration of a LoRA adapter as our trainer makes it; None for rank 0."""
    from peft import LoraConfig

    given = dict(lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    return LoraConfig(r=rank, **given) if rank else None


def trl_dataset(column: str, values: list):
    """Return the dataset of one column that TRL's trainer reads.

    It is given a fingerprint, because `dill` cannot make that of pyarrow's newer tables.
    """
    import pyarrow
    from datasets import Dataset

    return Dataset(pyarrow.table({column: values}), fingerprint=column)


def trl_config(batch: int, micro: int, **settings):
    """Return TRL's configuration of steps of `batch` completions, `micro` of them at a time.

    It is what TRL's "Speeding Up Training" advises for one GPU without vLLM.
    """
    from trl import GRPOConfig

    micro, has_gpu = micro or batch, torch.cuda.is_available()
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        bf16=has_gpu,
        use_cpu=not has_gpu,
        use_liger_kernel=has_gpu and find_spec("liger_kernel") is not None,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
