"""Beginnings against any prefix of the target: by the definition, over every pair of beginnings."""

from hypothesis import given
from hypothesis import strategies as st

from align.needleman import nw_score
from align.prefixes import prefix_scores

WORDS = st.lists(st.sampled_from("abc"), max_size=7)


@given(st.lists(WORDS, max_size=4), WORDS)
def test_each_is_the_best_over_the_prefixes_of_the_target(sequences, target):
    expected = [
        [
            max(nw_score(sequence[:i], target[:j]) for j in range(len(target) + 1))
            for i in range(len(sequence) + 1)
        ]
        for sequence in sequences
    ]
    assert prefix_scores(sequences, target) == expected


def test_by_hand():
    # match, match, c passed over and d matched, too many, too many
    assert prefix_scores([list("abdxx")], list("abcd")) == [[0, 1, 2, 2, 1, 0]]
    assert prefix_scores([[], ["a"]], []) == [[0], [0, -1]]
