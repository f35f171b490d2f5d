"""The model and the task of the benchmarks: a Llama with random weights, and random rewards."""

import random
from pathlib import Path


def shape(
    layers: int,
    width: int,
    inner: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    context: int = 131072,
) -> dict[str, int]:
    """Return the sizes of a Llama; `heads` are its query heads, key heads, and their size."""
    return dict(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        max_position_embeddings=context,
    )


# After the tiny one: the shapes of SmolLM2-135M, Qwen2.5-0.5B, and Llama 3 of 1, 3 and 8 billion
# parameters.
SHAPES = {
    "tiny": shape(6, 256, 768, (8, 4, 32), 4096, context=2048),
    "135m": shape(30, 576, 1536, (9, 3, 64), 49152),
    "0.5b": shape(24, 896, 4864, (14, 2, 64), 151936),
    "1b": shape(16, 2048, 8192, (32, 8, 64), 128256),
    "3b": shape(28, 3072, 8192, (24, 8, 128), 128256),
    "8b": shape(32, 4096, 14336, (32, 8, 128), 128256),
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
    from tasks.supply import problem_at

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
