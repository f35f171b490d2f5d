"""The model and the task of the benchmarks: a Llama with random weights, and random rewards."""

import random
from pathlib import Path

SHAPES = {
    "tiny": dict(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
    ),
    "3b": dict(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    ),
}


class RandomRewards:
    """A task without meaning: prompts of two texts of random words, and random rewards."""

    name, rewards, default_level = "bench", (), 25

    def __init__(self):
        rng = random.Random(0)
        self.words = [
            "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
            for _ in range(3000)
        ]
        self.rng = random.Random(1)

    def make(self, level, split, rng):
        from tasks.base import Problem, key_of

        prompt = " | ".join(" ".join(rng.choices(self.words, k=level)) for _ in range(2)) + " ="
        return Problem(self.name, level, prompt, target="", key=key_of(self.name, prompt))

    def score(self, problem, completions):
        from tasks.base import Score

        return [Score(reward) for reward in self.draw(completions)]

    def draw(self, completions, **_):
        return [self.rng.random() for _ in completions]


def prompts_of(arguments) -> list[str]:
    """Return the prompts of all steps, in the order in which our trainer draws them."""
    from tasks.base import problem_at

    return [
        problem_at(
            RandomRewards(), seed=0, split="train", level=arguments.words, index=index
        ).prompt
        for index in range(arguments.steps * arguments.groups)
    ]


def precision(arguments) -> tuple[str, str]:
    """Return (device, name of the dtype), which both sides use."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, "bfloat16" if device == "cuda" else "float32"


def make_model(arguments, folder: Path) -> dict:
    """Write the model and its tokenizer unless they exist.

    Returns facts about the model, and the tokens of the prompts.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place, (device, dtype) = model_in(arguments, folder), precision(arguments)
    if (
        not (place / "model.safetensors.index.json").exists()
        and not (place / "model.safetensors").exists()
    ):
        write_model(arguments, place, device, dtype)
    config, tokenizer = AutoConfig.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    number = getattr(torch, dtype).itemsize
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "dtype": dtype,
        "parameters": parameters,
        "weight_bytes": parameters * number,
        "kv_bytes": 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * number,
        "prompts": tokenizer([prompt + "\n" for prompt in prompts_of(arguments)]).input_ids,
    }


def model_in(arguments, folder: Path) -> Path:
    return arguments.keep or folder / "model"


def write_model(arguments, place: Path, device: str, dtype: str):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(place)
    config = LlamaConfig(
        **SHAPES[arguments.size],
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(place)
