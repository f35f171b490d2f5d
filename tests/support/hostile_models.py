"""Hostile models: directories in Hugging Face layout with damaged or malicious files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile import ACCEPTED, ESCAPE, HARMLESS, REFUSED, Input

CONFIGS: list[dict[str, Any]] = [
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"num_attention_heads": 0},
    {"hidden_size": 0},
    {"hidden_size": -1},
    {"hidden_size": 7},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**6},
    {"vocab_size": 1},
    {"vocab_size": 10**12},
    {"intermediate_size": 0},
    {"head_dim": 3},
    {"rope_theta": "x"},
    {"rms_norm_eps": None},
    {"model_type": "bert"},
    {"model_type": "t5"},
    {"model_type": "nonsense"},
    {"model_type": ESCAPE},
    {"architectures": ["Nonsense"]},
    {"eos_token_id": 10**9},
    {"eos_token_id": "x"},
    {"torch_dtype": "nonsense"},
    {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
]
FINE_CONFIGS = (
    {"architectures": ["Nonsense"]},
    {"eos_token_id": 10**9},
    {"rope_theta": "x"},
    {"torch_dtype": "nonsense"},
)
TEMPLATES = [
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{% for %}",
    "{{ messages[7].content }}",
    "{{ messages.__class__.__mro__ }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "no messages at all",
    "",
    ESCAPE + "{{ messages[0].content }}",
]


def models(model: Path) -> Iterator[Input]:
    """Yield changes of the files in the directory `model`, which can be loaded."""

    def case(name: str, change: Callable[[Path], None], outcome: str = REFUSED) -> Input:
        def prepare(home: Path) -> None:
            shutil.copytree(model, home / "model")
            change(home / "model")

        return Input(f"model: {name}", ("--model", "model"), prepare, outcome)

    yield case("whole", lambda model: None, ACCEPTED)
    for values in CONFIGS:
        outcome = HARMLESS if values in FINE_CONFIGS else REFUSED
        yield case(f"config.json {values}"[:80], _config(values), outcome)
    for number, template in enumerate(TEMPLATES):
        yield case(f"chat template {number}", _template(template), HARMLESS)

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        for what, change in _FILES.items():
            is_fine = (name, what) == ("tokenizer_config.json", "missing")
            yield case(f"{name} {what}", _file(name, change), HARMLESS if is_fine else REFUSED)
    yield case("weights by pickle alone", _pickle)
    yield case("tokenizer without words", _tokenizer(lambda vocab: {}))
    yield case(
        "tokenizer beyond the model",
        _tokenizer(lambda vocab: {word: number + 10**6 for word, number in vocab.items()}),
    )


_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: path.write_text("[1]"),
    "HTML": lambda path: path.write_text("<!doctype html>"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "gigabytes": lambda path: os.truncate(path, 5 << 30),
}


def _file(name: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda model: change(model / name) and None


def _config(values: dict[str, Any]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _template(text: str) -> Callable[[Path], None]:
    return lambda model: (model / "chat_template.jinja").write_text(text) and None


def _tokenizer(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        path = model / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"]["vocab"] = change(content["model"]["vocab"])
        path.write_text(json.dumps(content))

    return apply


def _pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
