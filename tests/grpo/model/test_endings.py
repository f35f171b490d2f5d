"""The chat template shows which token ends an answer, and completions end there whatever a model's
files say.
"""

import json
import shutil

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from grpo.model.endings import end_of_turn
from grpo.model.load import BUILTIN, load_policy

USER = "{% for m in messages %}<|user|>{{ m['content'] }}"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUILTIN)


@pytest.mark.parametrize(
    "template, end",
    [
        (USER + "<|end|>{% endfor %}", 3),
        (USER + "\n<|pad|>\n{% endfor %}", 0),  # white space before it, and another token
        (USER + "<|end|>{% endfor %}<|assistant|>This is how it goes on", None),
        (USER + "\n{% endfor %}", None),  # an answer ends with its line
        (USER + "<|end|>{% break %}{% endfor %}", None),  # the user's turn alone
        ("{{ raise_exception('only a user speaks') }}", None),
        (None, None),
    ],
)
def test_the_control_token_after_the_answer(tokenizer, monkeypatch, template, end):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert end_of_turn(tokenizer) == end


def test_an_added_token_ends_an_answer_even_if_it_is_not_special():
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    for name in ("<turn>", "<turn>over"):
        tokenizer.add_tokens([AddedToken(name, special=False)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <turn>over{% endfor %}"
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<turn>over")


def test_a_directory_that_names_another_end_has_both(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 11]}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))

    policy = load_policy(str(folder), device="cpu")
    assert policy.stops == (0, 3, 11) and policy.end == 3
    assert policy.decode([40, 3]) == policy.decode([40])
    (note,) = policy.notes
    assert note.startswith(
        f"--model {folder}: its chat template ends an answer with <|end|>, but its files name "
        "<|pad|>, "
    )


def test_a_directory_whose_files_agree_has_no_note(tiny_policy):
    assert tiny_policy.stops == (tiny_policy.end,) == (3,) and tiny_policy.notes == []
