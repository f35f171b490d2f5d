"""The groups of a step as the page holds them: views, formulas, words and their figures."""

import pytest
from report_runs import group
from sample_groups import group_of

from grpo.records import Completion, Group
from grpo.tasks.base import Problem, Score
from grpo.tools.report import samples


def packed(one, number=0, config=None, pieces=None):
    """Pack a group; `pieces` maps tokens to texts."""
    read = (lambda tokens: [pieces[token] for token in tokens]) if pieces else None
    return samples.packed(one, number, config or {}, read)


def test_a_group_packed():
    one = group(
        ("a x c d", 0.25), ("a b c d", 1.0), ("a x c d", 0.25), advantages=[-0.5, 1.0, -0.5]
    )
    found = packed(one, 3)
    assert (found["group"], found["target"], found["class"], found["distinct"]) == (
        3,
        "a b c d",
        "varied",
        2,
    )
    assert [(text["words"], text["ops"], text["divergence"]) for text in found["texts"]] == [
        ("a x c d", "1=1x2=", "word 2: wrote 'x' for 'b'"),
        ("a b c d", "4=", ""),
    ]
    assert found["rows"]["text"] == [0, 1, 0]
    assert found["rows"]["advantage"] == [-0.5, 1.0, -0.5]
    assert found["texts"][0]["parts"] == {"matches": 4}
    assert packed(group(("a", 0.5)))["rows"]["advantage"] == [None]


@pytest.mark.parametrize(
    ("target", "text", "ops"),
    [("a b", "", "2-"), ("a", "a b c", "1=2+"), ("a b c", "c", "2-1="), ("a", " \n ", "1-")],
)
def test_run_lengths(target, text, ops):
    assert samples.run_lengths(target, text) == ops


def test_log_probabilities_and_credits_by_word():
    pieces = {1: " ow", 2: "l", 3: " ", 4: "“", 5: "it”", 6: None}
    numbers = samples.word_numbers([pieces[i] for i in (1, 2, 3, 6, 4, 5, 6)], " owl “it”")
    # The blank and the first byte of the quotation mark belong to the word after them.
    assert numbers == [0, 0, 1, 1, 1, 1, 2]
    assert samples.word_numbers([" ow"], " owl") is None
    one = Group(
        0,
        Problem("t", 2, "p", "owl it", "k"),
        (1,),
        1.0,
        [Completion((1, 2, 6), (-0.5, -0.25, -9.0), " owl", "stop")],
        scores=[Score(0.5)],
        advantages=[[0.5, 0.25, 9.0]],
    )
    found = packed(one, pieces=pieces)
    assert found["texts"][0]["logprobs"] == [-75]  # -0.5 - 0.25
    assert found["rows"]["credits"] == [[0.375]]  # (0.5 + 0.25) / 2
    by_words = samples.by_word([1.0, 2.0], [0, 1], "a b")
    assert by_words == [[1.0], [2.0]]  # cut by the budget: no end token


def test_pieces_by_the_tokenizer_of_a_checkpoint(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    assert samples.pieces_of(tmp_path) is None
    letters = {"Ġowl": 0, "â": 1, "Ģ": 2, "ľ": 3}  # the three bytes of a quotation mark
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="â"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "checkpoints" / "step-000002" / "tokenizer.json"))
    assert [piece or "" for piece in samples.pieces_of(tmp_path)([0, 1, 2, 3, 4])] == [
        " owl",
        "",
        "",
        "“",
        "<end>",
    ]
    assert samples.pieces_of(tmp_path)([2**40, 0]) == [None, " owl"]


def test_control_tokens_inside_a_text_are_words_of_it_and_the_last_one_is_not():
    pieces = {1: " owl", 2: "<|pad|>", 3: " saw", 9: "<|end|>"}
    one = Group(
        0,
        Problem("t", 2, "p", "owl saw", "k"),
        (1,),
        1.0,
        [Completion((1, 2, 3, 9), (-0.5, -0.25, -0.125, -9.0), " owl<|pad|> saw", "stop")],
        scores=[Score(0.5)],
    )
    found = packed(one, pieces=pieces)
    assert found["texts"][0]["logprobs"] == [-75, -12]  # -0.5 - 0.25; -0.125, rounded to even


def scored_group(target, *rows):
    """Return a group with the given target, of rows (text, parts of the score)."""
    texts, parts = zip(*rows)
    return group_of(texts, [Score(0.1, each) for each in parts], target=target)


@pytest.mark.parametrize(
    ("target", "parts", "view"),
    [
        ("a b", {"matches": 2}, "alignment"),
        (" ", {"reward/a": 1.0}, "plain"),
        ("52", {"answer": None, "reason": "empty"}, "plain"),
        ("Answer: 18", {"answer": "17"}, "plain"),
    ],
)
def test_a_group_is_shown_by_what_its_scores_hold(target, parts, view):
    assert packed(scored_group(target, ("a", parts)))["view"] == view


def test_a_text_without_a_target_has_no_mistakes():
    (text,) = packed(scored_group("", ("one\ntwo three\n\nfour", {})))["texts"]
    assert "ops" not in text and "divergence" not in text
    assert text["breaks"] == [1, 3, 3]


def test_a_reward_is_rounded_once():
    found = packed(group(("a", 4 / 21), ("b", 0.0625)))
    assert found["rows"]["reward"] == [0.19, 0.062]  # not 0.191 by way of 0.1905


def test_the_prompt_is_shown_within_its_template():
    one = group(("a", 0.5))
    prompt = one.problem.prompt
    pieces = {1: f"<|user|>{prompt}", 2: "<|end|>", 7: "", 8: ""}
    assert packed(one, pieces=pieces)["around"] == ["<|user|>", "<|end|>"]
    assert packed(one, pieces={**pieces, 1: "other"})["around"] is None
