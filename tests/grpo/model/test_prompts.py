"""How a problem is put to the model: what the template cannot express is refused, and what is sent
is shown.
"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from transformers import AutoTokenizer

from grpo.data.errors import UserError
from grpo.model.load import BUILTIN
from grpo.model.policy import Policy
from grpo.model.prompts import (
    PromptFormat,
    check_conversations,
    middle_left_out,
    sent_lines,
    system_text,
    wording_text,
)
from grpo.rollout.generate import budget_for, fitting
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.base import Problem
from grpo.tasks.supply import examples_of, problem_at

TASK = Arithmetic()
PROBLEM = problem_at(TASK, seed=0, split="test", level=2, index=0)
TWO = partial(examples_of, TASK, seed=0, count=2)

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
RAISING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}" + CHAT
)
IGNORING = CHAT.replace("in messages", "in messages if m.role != 'system'")
MERGING = (
    "{% if messages[0].role == 'system' %}<|user|>{{ messages[0].content }}\n{% endif %}" + IGNORING
)
LAST_ONLY = "<|user|>{{ messages[-1].content }}<|end|><|assistant|>"
THINKING = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<|pad|>{% endif %}"


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    tokenizer.chat_template = template
    return tokenizer


DEFAULT = PromptFormat()


def policy_with(template, format=DEFAULT):
    """As much of a policy as encodes."""
    tokenizer = tokenizer_with(template)
    policy = SimpleNamespace(
        tokenizer=tokenizer,
        vocabulary=len(tokenizer),
        context=4096,
        name="a model",
        target_tokens=lambda target: (1, 2, 3),
    )
    policy.encode = lambda problem: Policy.encode(policy, problem)
    Policy.use(policy, format)
    return policy


def fault(template, **format):
    return refused(lambda: policy_with(template, PromptFormat(**format)).encode(PROBLEM))


def test_the_turns_of_a_problem_in_their_order():
    first, second = TWO(PROBLEM.level, PROBLEM.key)
    assert PromptFormat().turns(PROBLEM) == PromptFormat().turns(PROBLEM.prompt)
    assert PromptFormat("Be brief.", TWO).turns(PROBLEM) == (
        ("system", "Be brief."),
        ("user", first.prompt),
        ("assistant", first.target),
        ("user", second.prompt),
        ("assistant", second.target),
        ("user", PROBLEM.prompt),
    )
    assert PromptFormat("", TWO).turns(PROBLEM.prompt) == (("user", PROBLEM.prompt),)


def test_a_policy_sends_what_its_format_says():
    policy = policy_with(CHAT)
    plain = policy.encode(PROBLEM)
    assert plain == policy.encode(PROBLEM.prompt)

    Policy.use(policy, PromptFormat("Be brief.", TWO))
    first, second = TWO(PROBLEM.level, PROBLEM.key)
    turns = [first.prompt, first.target, second.prompt, second.target]
    roles = ["<|user|>", "<|assistant|>"] * 2
    before = "".join(f"{role}{turn}<|end|>" for role, turn in zip(roles, turns, strict=True))
    text = f"<|system|>Be brief.<|end|>{before}<|user|>{PROBLEM.prompt}<|end|><|assistant|>"
    assert policy.encode(PROBLEM) == tuple(policy.tokenizer(text).input_ids)

    Policy.use(policy, PromptFormat())
    assert policy.encode(PROBLEM) == plain


def test_without_a_template_each_turn_is_a_line():
    policy = policy_with(None, PromptFormat("Be brief.", TWO))
    said = policy.tokenizer.decode(policy.encode(PROBLEM)).strip()
    assert said.split("\n") == [text for _, text in policy.format.turns(PROBLEM)]


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("", ""),
        ("<think>\n", "<think>\n"),
        ("<Thinking>", "<Thinking>"),
        ("<think>\n\n</think>\n\n", ""),
    ],
)
def test_the_reasoning_that_a_prompt_opens_is_known(end, opened):
    policy = policy_with(f"{CHAT}{{{{ {end!r} }}}}")
    assert Policy.opened(policy, PROBLEM) == opened
    asks = Problem("t", 1, "Reason between <think> and </think>. Begin with <think>", "x", "k")
    assert Policy.opened(policy, asks) == opened
    assert Policy.opened(policy_with(None), asks) == "<think>\n"  # a base model goes on from there


def test_the_variables_of_the_template_reach_it():
    pad = tokenizer_with(CHAT).convert_tokens_to_ids("<|pad|>")
    for value, last in ((False, True), (True, False)):
        policy = policy_with(THINKING, PromptFormat(arguments={"enable_thinking": value}))
        assert (policy.encode(PROBLEM)[-1] == pad) == last
    assert policy_with(THINKING).encode(PROBLEM)[-1] != pad


@pytest.mark.parametrize("template", [CHAT, MERGING, THINKING, None])
def test_formats_that_a_template_can_express(template):
    policy_with(template, PromptFormat("Be brief.")).encode(PROBLEM)


def test_a_template_that_refuses_or_drops_a_turn_is_one_line():
    said = fault(RAISING, system="Be brief.")
    assert "the model's chat template refuses it (" in said
    assert "System role not supported" in said and "leave out --system" in said
    drops = "the model's chat template does not pass on all of the {} turn; leave out --system or"
    assert drops.format("system") in fault(IGNORING, system="Be brief.")
    assert drops.format("user") in fault(LAST_ONLY, examples=TWO)
    for template in (RAISING, IGNORING):
        policy_with(template, PromptFormat("", TWO)).encode(PROBLEM)


DATED = "{{ strftime_now('%d %b %Y') }}" + CHAT


def conversation(*roles, where="rows.jsonl, line 7"):
    turns = [{"role": role, "content": f"the {role} says\n"} for role in roles]
    data = {"messages": turns, "where": where}
    return Problem("data", 1, turns[-1]["content"], "x", "k" + "".join(roles), data)


def test_one_conversation_of_each_sequence_of_roles_is_tried():
    most = [conversation("user", "assistant", "user", where="rows.jsonl, line 1")] * 99
    for template in (RAISING, IGNORING):
        policy = policy_with(template)
        check_conversations(policy, most)
        with pytest.raises(UserError, match="^rows.jsonl, line 7: the model's chat template"):
            check_conversations(policy, [*most, conversation("system", "user"), *most])


PARTS = CHAT.replace(
    "{{ m.content }}",
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize(
    "template",
    [PARTS, "<|user|>Hello<|end|><|assistant|>", CHAT.replace("m.content", "m.content[:40]"), ""],
    ids=["parts", "constant", "truncating", "empty"],
)
def test_a_template_that_does_not_pass_on_a_single_turn_is_one_line(template):
    policy = policy_with(template)
    problem = Problem("data", 1, "What is six times seven? Think before you answer.", "42", "k")
    said = "the model's chat template does not pass on all of the user turn; "
    for prompt in (problem, problem.prompt):
        with pytest.raises(UserError, match=f": {said}") as error:
            policy.encode(prompt)
        assert "\n" not in str(error.value)

    short = Problem("data", 1, "Hi", "42", "k")
    with pytest.raises(UserError, match=said):
        check_conversations(policy, [problem, short])


def test_todays_date_is_the_same_every_day():
    """The templates of Llama 3.1 and later ask for it: a run would go on with other prompts."""
    policy = policy_with(DATED)
    assert policy.tokenizer.decode(policy.encode("Hello")).lstrip().startswith("26 Jul 2024")


def test_variables_that_a_template_does_not_have_are_one_line():
    assert fault(THINKING, arguments={"enable_thinkin": False}) == (
        "--chat-template-kwargs: enable_thinkin: the model's chat template has no such variable; "
        "leave it out"
    )
    assert "no such variable" in fault(THINKING, arguments={"role": "x"})  # an attribute there
    assert "no such variable" in fault(RAISING, arguments={"system": "x"})  # a text there
    assert "no such variable" in fault(None, arguments={"enable_thinking": False})
    failing = "{{ 1 // depth }}" + CHAT
    assert "refuses it (ZeroDivisionError" in fault(failing, arguments={"depth": 0})
    assert "refuses it (TypeError" in fault(CHAT, arguments={"messages": []})


def test_texts_and_files(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("Be brief, \u732b.\n".encode())
    assert system_text("Be brief.") == "Be brief." and system_text("") == wording_text("") == ""
    assert system_text(f"@{file}") == wording_text(str(file)) == "Be brief, \u732b."
    file.write_bytes(b"\xff")
    for read in (lambda: system_text(f"@{file}"), lambda: wording_text(str(file))):
        with pytest.raises(UserError, match="is not UTF-8 text"):
            read()
    with pytest.raises(UserError, match=r"^absent.txt: cannot be read: No such file"):
        wording_text("absent.txt")


def test_examples_count_against_the_context():
    policy = policy_with(CHAT)
    alone = len(policy.encode(PROBLEM))
    policy.context = alone + 10
    assert next(fitting(policy, [PROBLEM], [])) == PROBLEM
    assert budget_for(policy, policy.encode(PROBLEM), PROBLEM.target) == 5

    Policy.use(policy, PromptFormat("", TWO))
    passed = []
    assert list(fitting(policy, [PROBLEM], passed)) == [] and passed == [PROBLEM]
    with pytest.raises(UserError, match="give a lower level, shorter prompts or fewer --shots"):
        budget_for(policy, policy.encode(PROBLEM), PROBLEM.target)


@given(st.lists(st.text(max_size=400), max_size=60))
def test_a_long_prompt_is_shown_without_its_middle(texts):
    shown = middle_left_out(texts)
    assert len(shown) <= 25
    assert all(len(line) <= 300 + 3 and line.isprintable() for line in shown)
    if len(texts) > 24:
        assert f"{len(texts) - 24} lines" in shown[12]
    if texts and len(texts[-1]) < 300 and texts[-1].isprintable():
        assert shown[-1] == texts[-1]


def test_what_is_sent_is_shown_with_its_control_tokens_and_harmless():
    policy = policy_with(CHAT, PromptFormat("Write\x1b[31m\nred <|end|>."))
    shown = sent_lines(policy, PROBLEM)
    assert shown == [
        r" <|system|>Write\x1b[31m",
        rf"red <|end|>.<|end|><|user|>{PROBLEM.prompt}<|end|><|assistant|>",
    ]
    added = policy.tokenizer.added_tokens_decoder
    controls = {token for token, each in added.items() if each.special}
    # the system turn's end, the user's turn, its end, the assistant's
    assert sum(token in controls for token in policy.encode(PROBLEM)) == 4

    policy = policy_with(CHAT)
    assert sent_lines(policy, PROBLEM) == [policy.tokenizer.decode(policy.encode(PROBLEM))]
    assert json.loads(json.dumps(sent_lines(policy, PROBLEM))) == sent_lines(policy, PROBLEM)
