"""Texts and tokens: what a problem says is text, what control tokens a policy writes is seen."""

import json
import shutil
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import Encodings, end_of_turn, plain_tokens, prompt_tokens
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at

TASK = load_task("interleave")
CHAT = (
    "{% for m in messages %}<s>[{{ m.role }}]\n\n{{ m.content | trim }}</s>\n{% endfor "
    "%}<s>[assistant]\n"
)


def problems(count):
    return [
        problem_at(TASK, seed=0, split="train", level=10, index=index) for index in range(count)
    ]


def sentencepiece(*, legacy: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's kind: "▁" for spaces, one of them put before a text (`legacy`:
    before every part of one).
    """
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    texts = [problem.prompt for problem in problems(40)]
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *alphabet], show_progress=False
        ),
    )
    layout = json.loads(made.to_str())
    layout["added_tokens"] = layout["added_tokens"][:3]  # bytes are no control tokens
    made = Tokenizer.from_str(json.dumps(layout))
    if legacy:
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
    )


def greedy_about_blanks() -> PreTrainedTokenizerFast:
    """The embedded tokenizer with control tokens that swallow the blanks around them,
    as Phi's do.
    """
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    tokens = [
        AddedToken(f"<{name}>", special=True, lstrip=True, rstrip=True) for name in ("turn", "over")
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>  {{ m.content }}\n <over>\n{% endfor %}"
    )
    return tokenizer


def without_template(tokenizer):
    tokenizer.chat_template = None
    return tokenizer


KINDS = {
    "builtin": lambda: AutoTokenizer.from_pretrained(BUILTIN),
    "sentencepiece": lambda: sentencepiece(legacy=False),
    "legacy sentencepiece": lambda: sentencepiece(legacy=True),
    "greedy about blanks": greedy_about_blanks,
    "no template": lambda: without_template(AutoTokenizer.from_pretrained(BUILTIN)),
    "sentencepiece, no template": lambda: without_template(sentencepiece(legacy=False)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer_of(kind: str):
    return KINDS[kind]()


def encode(tokenizer, prompt):
    return prompt_tokens(tokenizer, [([("user", prompt)], tokenizer.chat_template)])[0]


def encoded_by_transformers(tokenizer, prompt):
    """The tokens of the prompt where no text of a control token is in it."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer(prompt + "\n").input_ids)
    turns = [{"role": "user", "content": prompt}]
    return tuple(
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids
    )


def control_ids(tokenizer):
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def control_texts(tokenizer):
    return sorted(tokenizer.added_tokens_decoder[i].content for i in control_ids(tokenizer))


ODD = ["", " ", " a ", "\n\na\n", "naïve café 猫 😀 e\u0301 “q”\u2003x", "a\ttab  b"]


@kinds
def test_a_text_without_control_tokens_is_encoded_as_ever(kind):
    tokenizer = tokenizer_of(kind)
    for text in ODD + [text for one in problems(30) for text in (one.prompt, one.target)]:
        assert encode(tokenizer, text) == encoded_by_transformers(tokenizer, text)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert plain_tokens(tokenizer, [text]) == [ids]


ROLES = ["system", "user", "assistant", "user"]


def conversation(texts):
    return list(zip(ROLES, texts, strict=True))


@kinds
@given(
    before=st.text(alphabet="a \n.é", max_size=6),
    after=st.text(alphabet="a \n.é", max_size=6),
    which=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    glue=st.sampled_from(["", " ", " owl "]),
    others=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
@example("the owl ", " saw", [0], "", [0, 0, 0])
@example("", "", [0, 1], "", [1, 0, 2])
def test_control_tokens_come_from_the_template_alone(kind, before, after, which, glue, others):
    """In the question, and in the system turn and the examples before it."""
    tokenizer = tokenizer_of(kind)
    texts = control_texts(tokenizer)
    prompt = before + glue.join(texts[i % len(texts)] for i in which) + after
    turns = conversation([f"x{texts[i % len(texts)]}y" for i in others] + [prompt])
    controls = control_ids(tokenizer)

    for said in (turns, turns[-1:]):
        ids = prompt_tokens(tokenizer, [(said, tokenizer.chat_template)])[0]
        plain_turns = [(role, "a") for role, _ in said]
        frame_ids = prompt_tokens(tokenizer, [(plain_turns, tokenizer.chat_template)])[0]
        assert [i for i in ids if i in controls] == [i for i in frame_ids if i in controls]

        # Nothing of the texts is lost: they are what the tokens say, as far as the template leaves
        # blanks alone.
        written = "".join(squeezed(tokenizer, ids))
        frame = "".join(squeezed(tokenizer, frame_ids))
        wanted = ["".join(text.split()) for _, text in said]
        assert all(text in written for text in wanted)
        assert len(written) == len(frame) - len(said) + len("".join(wanted))


def squeezed(tokenizer, ids):
    """What the tokens but the control tokens say, without blanks."""
    controls = control_ids(tokenizer)
    plain = [i for i in ids if i not in controls]
    return tokenizer.decode(plain, skip_special_tokens=False).split()


@kinds
def test_a_conversation_is_encoded_as_the_template_writes_it(kind):
    tokenizer = tokenizer_of(kind)
    turns = conversation(["Be brief.", "A: a\nB: b", "a b", "A: the owl\nB: it saw"])
    ids = prompt_tokens(tokenizer, [(turns, tokenizer.chat_template)])[0]
    if tokenizer.chat_template is None:
        wanted = tokenizer("Be brief.\nA: a\nB: b\na b\nA: the owl\nB: it saw\n").input_ids
    else:
        messages = [{"role": role, "content": text} for role, text in turns]
        wanted = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        ).input_ids
    assert ids == tuple(wanted)


def policy_of(tokenizer):
    """As much of a policy as encodes and decodes."""
    end = tokenizer.eos_token_id
    policy = SimpleNamespace(tokenizer=tokenizer, stops=(end,), end=end, vocabulary=len(tokenizer))
    policy.decode = lambda tokens: Policy.decode(policy, tokens)
    return policy


@kinds
def test_a_window_is_answered_by_what_follows_it(kind):
    """Although some tokens are of two words, or of a word and the space behind it."""
    policy = policy_of(tokenizer_of(kind))
    policy.target_tokens = lambda text: tuple(plain_tokens(policy.tokenizer, [text])[0])
    for problem in problems(10):
        for start in range(18):
            window = TASK.window(problem, 3, start)
            answer = Policy.answer_tokens(policy, window)
            whole = policy.decode((*policy.target_tokens(window.begun), *answer))
            assert whole.split() == problem.target.split()[: start + 3]


@kinds
def test_only_the_last_end_token_is_not_seen(kind):
    tokenizer = tokenizer_of(kind)
    policy, end = policy_of(tokenizer), tokenizer.eos_token_id
    name = next(text for text in control_texts(tokenizer) if text != tokenizer.eos_token)
    control = tokenizer.convert_tokens_to_ids(name)

    one, two = plain_tokens(tokenizer, ["a owl", "\nsaw"])
    assert policy.decode([*one, *two, end]) == policy.decode([*one, *two])
    written = policy.decode([*one, control, *two, control, end])
    assert written.count(name) == 2 and written.rstrip().endswith(name)
    assert policy.decode([end]) == policy.decode([]) == ""


def test_spaces_before_marks_are_read_as_they_were_written():
    tidies = dict(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN, **tidies)
    problem = TASK.problem("the old man said , no .".split(), "it was not here ,".split())
    (ids,) = plain_tokens(tokenizer, [problem.target])
    assert tokenizer.decode(ids) != problem.target  # otherwise nothing is shown
    (score,) = TASK.score(problem, [policy_of(tokenizer).decode([*ids, tokenizer.eos_token_id])])
    assert score.exact


def test_no_end_token_stands_between_a_prompt_and_its_answer():
    """Some tokenizers put one after every text; the answer would be written behind the end."""
    tokenizer = without_template(sentencepiece(legacy=False))
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    usual = prompt_tokens(tokenizer, [([("user", "hello </s>")], None)])[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    assert tokenizer("hello").input_ids[-1] == end
    assert prompt_tokens(tokenizer, [([("user", "hello </s>")], None)])[0] == usual
    assert usual[0] == begin and end not in usual


# Which token ends an answer


USER = "{% for m in messages %}<|user|>{{ m['content'] }}"


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
def test_the_control_token_after_the_answer(template, end):
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) == end


def test_an_added_token_ends_an_answer_even_if_it_is_not_special():
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    for name in ("<turn>", "<turn>over"):
        tokenizer.add_tokens([AddedToken(name, special=False)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <turn>over{% endfor %}"
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<turn>over")


def test_a_directory_that_names_other_ends_has_all_that_can_be_written(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 7, 2**70]}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))

    policy = load_policy(str(folder), device="cpu")
    assert policy.stops == (0, 3, 7, 11) and policy.end == 3
    assert policy.decode([40, 3]) == policy.decode([40])


def test_a_directory_whose_files_agree_has_one_end(tiny_policy):
    assert tiny_policy.stops == (tiny_policy.end,) == (3,)


@kinds
def test_prompts_that_are_encoded_together_are_encoded_as_alone(kind):
    tokenizer = tokenizer_of(kind)
    said = [*ODD, control_texts(tokenizer)[0], *(one.prompt for one in problems(30))]
    prompts = [((("user", text),), tokenizer.chat_template) for text in said]
    assert prompt_tokens(tokenizer, prompts) == [encode(tokenizer, text) for text in said]


def test_encodings_are_made_once_and_the_oldest_are_forgotten():
    calls = []

    def encode(texts):
        calls.append(texts)
        return [[len(text)] for text in texts]

    encodings = Encodings(encode, most=2)
    assert encodings(["a", "bb", "a", "ccc"]) == [(1,), (2,), (1,), (3,)]
    assert encodings(["ccc", "bb"]) == [(3,), (2,)]
    assert encodings(["a"]) == [(1,)]
    assert calls == [["a", "bb", "ccc"], ["a"]]
