"""What several rooms' tests share: a tiny random model that any machine runs in milliseconds."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import train
from grpo.model.load import BUILTIN, load_policy

settings.register_profile(
    "house", deadline=None
)  # shared machines are slow at times; that is no failure
settings.register_profile(
    "mutation", deadline=None, phases=[Phase.explicit, Phase.generate]
)  # a failure need not be made small
settings.load_profile("house")

# Under `pytest -n` there is a worker per core. One with a thread per core would make the others
# wait, and the processes that a test starts must have as many threads as it has itself, or their
# runs differ in the last bit.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


# A task for runs whose texts do not matter. `train.py --resume` has to be given it again.
BY_PLACE = ["--task", f"{Path(__file__).with_name('examples') / 'by_place.py'}:ByPlace"]


def make_tiny_model(folder, *, layers=2, heads=4, kv_heads=2, context=1024, seed=0, scale=0.15):
    """Write a random Llama (64 wide) with the embedded tokenizer into `folder`, large weights:
    peaked, varied texts.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=scale,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


# A task whose groups vary, whatever is written: the text of a file of the user's own.
OWN = """
from tasks.base import Problem, Score, key_of

class Own:
    name, rewards, default_level = "own", (), 1

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, number, number, key_of(number))

    def score(self, problem, completions):
        return [Score(0.1 * i) for i in range(len(completions))]
"""


def whole_run(flags, home):
    """Make the run "whole" in the folder `home`, and return its directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train.main([*flags, "--name", "whole"]) == 0
    return home / "runs" / "whole"


@pytest.fixture(scope="session")
def tiny_flags(tiny_model):
    """Flags for `train.py`: all weights of the tiny model, in a fifth of the time that the
    embedded one takes.
    """
    return ["--model", str(tiny_model), "--lora-rank", "0"]


@pytest.fixture(scope="session")
def quick_flags(tiny_flags):
    """Flags for `train.py`: the tiny model learns something in every step."""
    return [*tiny_flags, *BY_PLACE, "--max-new-tokens", "8"]


@pytest.fixture()
def tiny_policy(tiny_model):
    return load_policy(str(tiny_model), device="cpu")
