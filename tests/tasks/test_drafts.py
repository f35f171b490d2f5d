from copy import copy

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.align.needleman import split_words
from grpo.tasks.interleave import Guess, Interleave, interleaved

TASK = Interleave()
A, B = ["a1", "a2", "a3", "a4"], ["b1", "b2", "b3", "b4"]
TEXT = st.lists(
    st.sampled_from(["a", "an", "and", "the", "them", "b", "bo", "déjà", "\u0323x"]), max_size=8
)


def draft(text, a=A, b=B):
    return TASK.draft(TASK.problem(a, b))(text)


@given(TEXT, TEXT, st.data(), st.sampled_from(["", " ", "\n"]))
def test_a_beginning_of_the_target_goes_on_to_the_target(a, b, data, space):
    target = " ".join(interleaved(a, b))
    cut = data.draw(st.integers(0, len(target)))
    assert target[:cut] + draft(space + target[:cut], a, b) == target


@pytest.mark.parametrize(
    "text, rest",
    [
        ("the a ow", "l boat saw go"),
        ("the a owl", " boat saw go"),
        ("the a ", "owl boat saw go"),
        ("the a bo", "at owl go saw"),  # the turn is lost, and B's word begun
        ("the a sa", "w boat go"),  # "owl" is passed over
        ("the a x", " boat saw go"),  # begins nothing, so it stands for "owl"
        ("the a aw", " boat saw go"),
        ("the a bo ", "boat saw go"),  # a word of its own, so it stands for "owl"
    ],
)
def test_an_unfinished_word_is_completed(text, rest):
    assert draft(text, ["the", "owl", "saw"], ["a", "boat", "go"]) == rest


@pytest.mark.parametrize(
    "text, rest",
    [
        ("a1 b1 a3", " b2 a4 b3 b4"),  # a word is skipped
        ("a1 b1 b1", " a2 b2 a3 b3 a4 b4"),  # repeated
        ("a1 b1 zz", " b2 a3 b3 a4 b4"),  # garbled
        ("a1 b1 a2 a3", " b2 a4 b3 b4"),  # the turn is lost
        ("b1", " a1 b2 a2 b3 a3 b4 a4"),
        ("a1 b1 a2 b4", " a3 a4"),  # jumps ahead, where B is used up
        ("a1 b1 a2 b2 a1", " b3 a2 b4 a3 a4"),  # jumps back
        ("a1 b1 a1 b1", " a2 b2 a3 b3 a4 b4"),  # a pair is repeated
        ("a1 zz a2 a3 b2 zz", " b3 b4"),  # b1 and, after a turn lost, a4 are garbled
        ("a1 a2 a3", " b1 a4 b2 b3 b4"),  # the turn was kept, twice in a row
        ("a1 a2 a3 b1", " a4 b2 b3 b4"),
        ("a1 b1 b2 b3 b4", " a2 a3 a4"),  # the other text follows at one stroke
        ("b1 b2 b3 b4", " a1 a2 a3 a4"),
        ("a1 a2 a3 a4", " b1 b2 b3 b4"),
    ],
)
def test_slips_by_hand(text, rest):
    assert draft(text) == rest and draft(text + "\n") == rest[1:]


def test_a_word_out_of_place_is_taken_from_the_nearest_place():
    a, b = "a1 of a3 a4 a5 a6 of a8".split(), "b1 b2 b3 b4 b5 b6 b7 b8".split()
    # a4 is due, two places behind one "of" and three before the other
    assert draft("a1 b1 of b2 a3 b3 of", a, b) == " b4 a3 b5 a4 b6 a5 b7 a6 b8 of a8"
    # a5 is due, three places behind the one and two before the other
    assert draft("a1 b1 of b2 a3 b3 a4 b4 of", a, b) == " b5 a8 b6 b7 b8"


@given(st.integers(1, 9), st.data())
def test_one_slip_of_any_kind_and_on_from_there(n, data):
    texts = [f"a{i}" for i in range(n)], [f"b{i}" for i in range(n)]
    target = interleaved(*texts)
    right = data.draw(st.integers(0, len(target) - 1))
    slip = data.draw(st.sampled_from([*target, "zz"]))
    left = list(texts)
    for word in [*target[:right], target[right] if slip == "zz" else slip]:
        text = word[0] == "b"
        left[text] = texts[text][texts[text].index(word) + 1 :]
    rest = interleaved(*left) if word[0] == "b" else interleaved(*left[::-1])
    assert draft(" ".join([*target[:right], slip, ""]), *texts) == " ".join(rest)


@pytest.mark.parametrize("extra", ["", " ", " b4", " b4 zz", "zz"])
def test_nothing_follows_the_end(extra):
    assert draft(" ".join(interleaved(A, B)) + extra) == ""


@given(
    TEXT,
    TEXT,
    st.one_of(
        st.text(), st.lists(st.sampled_from(["a", "an", "the", "bo", "x", ""])).map(" ".join)
    ),
)
@example(["the", "a"], ["b", "bo"], "the b b b b b b")  # a stutter ends
def test_any_text_keeps_its_words_and_ends(a, b, text):
    written, whole = split_words(text), split_words(text + draft(text, a, b))
    assert " ".join(whole).startswith(" ".join(written))
    assert set(whole[len(written) :]) <= {*split_words(" ".join(a)), *split_words(" ".join(b))}
    assert len(whole) <= len(written) + len(a) + len(b)


@given(
    TEXT,
    TEXT,
    st.lists(st.sampled_from(["a", "an", "and", "the", "bo", " ", "\n", "\u0323", "\u0301x"])).map(
        "".join
    ),
    st.data(),
)
def test_a_guess_that_remembers_is_that_of_a_fresh_one(a, b, text, data):
    guess, other = Guess(a, b), "them " + text
    for cut in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
        assert guess(text[:cut]) == Guess(a, b)(text[:cut])
        assert copy(guess)(other) == Guess(a, b)(other)  # which leaves the guess as it was
    assert guess(other) == Guess(a, b)(other)  # another text


def test_only_what_is_new_is_read(monkeypatch):
    words, read, follow = [f"w{i}" for i in range(40)], [], Guess._follow
    monkeypatch.setattr(
        Guess, "_follow", lambda self, words: read.append(list(words)) or follow(self, words)
    )
    guess = Guess(words, [])
    guess(" ".join(words[:30]))
    assert guess(" ".join(words[:33])) == " " + " ".join(words[33:])
    assert read == [[], words[:29], words[29:32]]  # the last may be unfinished


def test_words_are_compared_as_the_score_compares_them():
    composed, combining = "na\u00efve", "nai\u0308ve"
    for word, text in (composed, combining[:4]), (combining, composed[:3]):
        assert draft(text, ["so", word], ["x"]) == "ve x"
