"""A directory like meta-llama/Llama-3.2-3B-Instruct, where no hub can be reached: `python tests/llama.py FOLDER [--layers 28] [--lessons N]`.

Its configuration is exact (28 layers; fewer for tests), the weights are random, or shown N batches of 16 short interleavings, and the tokenizer has the format: byte-level BPE of 128,000 tokens (trained on this
project's texts, filled up with names that no text has), the special tokens in their places, a chat template with headers and end-of-turn tokens, three tokens that
end a completion.
"""
import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from grpo.learn.optimizer import Optimizer, maker  # noqa: E402
from tasks.base import load_task, problem_at  # noqa: E402

TEXTS = Path(__file__).resolve().parent.parent / "data" / "texts"
ENDS = [128_001, 128_008, 128_009]
CONFIG = dict(
    vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=True, bos_token_id=128_000, eos_token_id=ENDS, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})
NAMED = ["begin_of_text", "end_of_text", "reserved_0", "reserved_1", "finetune_right_pad_id", "reserved_2", "start_header_id", "end_header_id",
         "eom_id", "eot_id", "python_tag"]
TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
            "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 128,000 tokens and 256 special ones."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer, bpe.decoder = split, decoders.ByteLevel()
    texts = (path.read_text() for path in sorted(TEXTS.glob("*.txt")))
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=128_000, show_progress=False, initial_alphabet=split.alphabet()))
    learned = bpe.get_vocab_size()
    bpe.add_tokens([f"\u2402{number}\u2403" for number in range(learned, 128_000)])
    names = NAMED + [f"reserved_special_token_{number}" for number in range(256 - len(NAMED))]
    bpe.add_special_tokens([f"<|{name}|>" for name in names])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=TEMPLATE,
                                   pad_token="<|finetune_right_pad_id|>", clean_up_tokenization_spaces=False)


def write_llama(folder: Path, layers: int = 28, device: str = "cpu", lessons: int = 0) -> int:
    """Write the directory; return the number of parameters."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **CONFIG))
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=128_000, eos_token_id=ENDS, do_sample=True, temperature=0.6, top_p=0.9)
    words = tokenizer()
    if lessons:
        teach(model, words, lessons)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def teach(model, words, lessons: int, rate: float = 1e-4):
    """Show the model so many batches of interleavings of 1 to 10 words. It learns to write words and to end, a little late to write the right ones."""
    task = load_task("interleave")
    optimizer = Optimizer(model.parameters(), maker("adamw", rate=rate, weight_decay=0.0))
    for lesson in range(lessons):
        rows = []
        for i in range(16):
            problem = problem_at(task, seed=lesson, split="train", level=1 + i % 10, index=i)
            asked = [{"role": "user", "content": problem.prompt}]
            rows.append(words.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) + problem.target + words.eos_token)
        batch = words(rows, add_special_tokens=False, padding=True, return_tensors="pt").to(model.device)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (lesson + 1) / 20)
        optimizer.clear()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.collect(1.0)
        optimizer.step()
        if lesson % 50 == 0 or lesson == lessons - 1:
            print(f"lesson {lesson + 1}: loss {loss.item():.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--lessons", type=int, default=0)
    arguments = parser.parse_args()
    size = write_llama(arguments.folder, arguments.layers, "cuda" if torch.cuda.is_available() else "cpu", arguments.lessons)
    print(f"{arguments.folder}: {size:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
