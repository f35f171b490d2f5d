"""Make a folder in the format of meta-llama/Llama-3.2-3B-Instruct, without access to a model hub.

    python tests/tools/make_llama.py FOLDER [--layers 28]

The configuration is the real one (28 layers; fewer for tests). The weights are random, except that
common words are likely. The tokenizer has the real format: a byte-level BPE of 128,000 tokens
(trained on this project's texts, and padded with tokens that occur in no text), the special tokens
at their ids, a chat template with headers and end-of-turn tokens, and three tokens that end a
completion.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = Path(__file__).resolve().parents[2] / "data" / "texts"
ENDS = [128_001, 128_008, 128_009]
CONFIG = dict(
    vocab_size=128_256,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    bos_token_id=128_000,
    eos_token_id=ENDS,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
NAMED = [
    "begin_of_text",
    "end_of_text",
    "reserved_0",
    "reserved_1",
    "finetune_right_pad_id",
    "reserved_2",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] "
    "}}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% "
    "endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 128,000 tokens and 256 special ones."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer, bpe.decoder = split, decoders.ByteLevel()
    texts = (path.read_text() for path in sorted(TEXTS.glob("*.txt")))
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=128_000, show_progress=False, initial_alphabet=split.alphabet()
        ),
    )
    learned = bpe.get_vocab_size()
    bpe.add_tokens([f"\u2402{number}\u2403" for number in range(learned, 128_000)])
    names = NAMED + [f"reserved_special_token_{number}" for number in range(256 - len(NAMED))]
    bpe.add_special_tokens([f"<|{name}|>" for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        chat_template=TEMPLATE,
        pad_token="<|finetune_right_pad_id|>",
        clean_up_tokenization_spaces=False,
    )


def write_llama(folder: Path, layers: int = 28, device: str = "cpu") -> int:
    """Write the directory; return the number of parameters."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(
                LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **CONFIG)
            )
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=128_000, eos_token_id=ENDS, do_sample=True, temperature=0.6, top_p=0.9
    )
    words = tokenizer()
    speak(model, words)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def speak(model, words: PreTrainedTokenizerFast, tokens: int = 200, factor: float = 5.0):
    """Make the most frequent tokens of the texts, and the end token, likely.

    So a model with random weights writes words, some of them in the right place.
    """
    counts = Counter(
        words("\n".join(path.read_text() for path in sorted(TEXTS.glob("*.txt")))).input_ids
    )
    frequent = [token for token, _ in counts.most_common(tokens)] + [ENDS[2]]
    with torch.no_grad():
        model.get_output_embeddings().weight[frequent] *= factor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    size = write_llama(
        arguments.folder, arguments.layers, "cuda" if torch.cuda.is_available() else "cpu"
    )
    print(f"{arguments.folder}: {size:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
