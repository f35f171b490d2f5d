"""What is shown of a completion: its words against the wanted ones."""

from hypothesis import given
from hypothesis import strategies as st

from grpo.align.needleman import nw_align
from grpo.inspect import CONTEXT, rendered
from grpo.show.group import aligned, first_divergence, question_of
from grpo.tasks.base import Problem

TEXTS = st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join)


@given(TEXTS, TEXTS)
def test_columns_spell_out_both_texts_at_the_best_score(target, text):
    columns = aligned(target, text)
    if not target:
        assert columns == [("plain", None, word) for word in text.split()]
        return
    assert " ".join(c.wanted for c in columns if c.wanted is not None) == target
    assert " ".join(c.written for c in columns if c.written is not None) == text
    assert all((c.kind == "match") == (c.wanted == c.written) for c in columns)
    score = nw_align(target.split(), text.split()).score
    assert sum(1 if c.kind == "match" else -1 for c in columns) == score


def test_a_divergence_in_words():
    assert first_divergence("a b c", "a x c") == "word 2: wrote 'x' for 'b'"
    assert first_divergence("a b c", "a b") == "word 3: ended before 'c'"
    assert first_divergence("a b", "a b c") == "word 3: wrote 'c' after the end"


def test_a_text_without_a_target_is_plain():
    columns = aligned("", "the owl  saw")
    assert rendered(columns).plain == "the owl saw"


def test_marks_do_not_depend_on_colour():
    columns = aligned("the old owl saw", "the owl ran saw fast")
    assert rendered(columns).plain == "the [-old-] owl {+ran+} saw {+fast+}"
    assert rendered(aligned("a b c", "a x c")).plain == "a [-b-]{+x+} c"


def test_the_middle_of_a_long_run_of_right_words_is_counted():
    words = [f"w{i}" for i in range(40)]
    columns = aligned(" ".join(words), " ".join(words[:-1]))
    shown = rendered(columns).plain
    assert f"w5 … {39 - 2 * CONTEXT} right … w33" in shown and shown.endswith("w38 [-w39-]")
    long = aligned("", " ".join("x" * 40))
    assert f"… {40 - 2 * CONTEXT} more …" in rendered(long).plain


def test_a_question_is_the_prompt_and_the_row():
    row = {"answer": "x\n", "tests": [1, 2], "target": "yes", "code": "o" * 900}
    shown = question_of(Problem("data", 1, "a?", "yes", "k", {"row": row}))
    assert list(shown) == ["prompt", "answer", "tests", "code"]
    assert list(shown.values())[:3] == ["a?", "x\\n", "[1, 2]"] and len(shown["code"]) < 310
    assert question_of(Problem("data", 1, "a?", "", "k", {"row": 3})) == {"prompt": "a?"}
    window = Problem("interleave", 1, "a?", "b", "k", {"begun": "so far"})
    assert question_of(window) == {"prompt": "a?", "begun": "so far"}


def test_texts_cannot_colour_or_move_the_screen():
    shown = rendered(aligned("a b", "a \x1b[31m[bold]x[/bold]"))
    assert "\x1b" not in shown.plain and "[bold]x[/bold]" in shown.plain
    assert "\x1b" not in first_divergence("a", "\x1b[2J")
