"""How an interleaving most likely goes on: the places reached in A and in B are followed apart,
through every slip.

A policy that skips, repeats or garbles a word, loses the turn, or jumps to another place goes on
from where it is then, and takes turns again. Only what it does twice in a row becomes its way: to
keep to one text, to write every word twice.
"""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from operator import eq

from align.words import normalise, split_words

Spot = tuple[int, int]  # (0 for A or 1 for B, place in it)
Move = tuple[
    bool, int
    # (whether the turn changed, how far from the place reached in the text: -1 repeats its last
    # word)
]

TAKES_TURNS: Move = (True, 0)
KEEPS_ON: Move = (False, 0)


class Guess:
    """How an interleaving of the words `a` and `b`, of which the text so far is known, most likely
    goes on until its end.

    A last word that no white space follows may be unfinished: then the rest begins with its other
    letters. A guess remembers how the text went that it was asked about last: of one that goes on
    from there, only what is new is read. Copies are independent. The time is linear in the new
    words (times the logarithm of how often one occurs) and in the rest.

    >>> Guess(["Owls", "see."], ["It", "rains,"])("Owls Owls I")
    't see. rains,'
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.start = self.walk = _Walk(a, b)
        self.read = ""  # the whole words that the walk has followed

    def __call__(self, text: str) -> str:
        """Return how the text is expected to continue."""
        last = text.rsplit(None, 1)[-1] if text and not text[-1].isspace() else ""
        whole, last = text[: len(text) - len(last)], normalise(last)
        if not whole.startswith(self.read):
            self.walk, self.read = self.start, ""
        walk = copy(self.walk)
        walk.follow(split_words(whole[len(self.read) :]))
        self.walk, self.read = walk, whole
        walk, rest = copy(walk), []
        if last:
            spot = walk.find_beginning(last)
            walk.write(spot or walk.expected())
            rest.append(walk.word(spot)[len(last) :] if spot else "")
        words = sum(map(len, walk.texts))
        while (spot := walk.expected()) and len(rest) < words:  # who stutters would do so for ever
            ahead = walk.ahead(words - len(rest) - 1)
            walk.advance(len(ahead))
            rest += ahead
            if spot := walk.expected():
                rest.append(walk.word(spot))
                walk.write(spot)
        return " ".join(rest)


class _Walk:
    """The places reached in both texts, and how the last four words came about. A copy shares the
    texts and goes its own way.
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.texts, self.places = (a, b), (0, 0)
        self.last, self.moves = 1, (TAKES_TURNS,) * 4  # as if B had just had its turn
        self.index: tuple[dict[str, list[int]], ...] = (
            {},
            {},
        )  # of each text: word to its places, in order
        for words, index in zip(self.texts, self.index):
            for place, word in enumerate(words):
                index.setdefault(word, []).append(place)

    def word(self, spot: Spot) -> str:
        return self.texts[spot[0]][spot[1]]

    def ahead(self, most: int) -> list[str]:
        """Return the next words, about `most`, as far as it is plain how they go on: in turns, or
        in one text.
        """
        mine, other = (
            self.texts[text][self.places[text] : self.places[text] + most]
            for text in (1 - self.last, self.last)
        )
        if self.moves == (TAKES_TURNS,) * 4:
            return [word for pair in zip(mine, other) for word in pair]
        return list(other) if self.moves == (KEEPS_ON,) * 4 else []

    def advance(self, number: int) -> None:
        """Write that many of the words that are `ahead`, at one stroke."""
        if self.moves[-1] == KEEPS_ON:
            self._go_on(self.last, number)
        else:
            self._go_on(1 - self.last, (number + 1) // 2)
            self._go_on(self.last, number // 2)
            self.last = (self.last + number) % 2

    def follow(self, words: Sequence[str]) -> None:
        """Write the `words`, as they were most likely taken from the texts."""
        place = 0
        while place < len(words):
            number = sum(takewhile(bool, map(eq, words[place:], self.ahead(len(words) - place))))
            self.advance(number)
            place += number
            if place < len(words):
                self.write(self.find(words[place]))
                place += 1

    def _go_on(self, text: int, number: int) -> None:
        a, b = self.places
        self.places = (a, b + number) if text else (a + number, b)

    def expected(self) -> Spot | None:
        """Return where the next word stands; None when both texts are used up."""
        first, second, third, fourth = self.moves
        again = (first, second) == (third, fourth) or third == fourth == KEEPS_ON
        changes, step = third if again else TAKES_TURNS
        turn = 1 - self.last if changes else self.last
        for text, place in (
            (turn, self.places[turn] + step),
            (turn, self.places[turn]),
            (1 - turn, self.places[1 - turn]),
        ):
            if 0 <= place < len(self.texts[text]):
                return text, place
        return None

    def find(self, word: str) -> Spot | None:
        """Return where `word` was most likely taken from; a word of neither text stands in place
        of the expected one.
        """
        expected = self.expected()
        if expected and self.word(expected) == word:
            return expected
        return self._nearest([word]) or expected

    def find_beginning(self, letters: str) -> Spot | None:
        """Return which word `letters` most likely begins, or all of which they are; None where
        there is none.
        """
        expected = self.expected()
        if expected and self.word(expected).startswith(letters):
            return expected
        return self._nearest(
            [word for index in self.index for word in index if word.startswith(letters)]
        )

    def _nearest(self, words: Sequence[str]) -> Spot | None:
        near = []
        for text, index in enumerate(self.index):
            for places in [index[word] for word in words if word in index]:
                after = bisect_left(places, self.places[text])
                near += [(text, place) for place in places[max(0, after - 1) : after + 1]]
        return min(near, key=lambda spot: abs(spot[1] - self.places[spot[0]]), default=None)

    def write(self, spot: Spot | None) -> None:
        """Go on behind the word at `spot`."""
        if spot:
            text, place = spot
            step = place - self.places[text]
            self.moves = *self.moves[1:], (text != self.last, step)
            self.last = text
            self._go_on(text, step + 1)
