"""How an interleaving most likely goes on: the places reached in A and in B are followed apart, through every slip.

A policy that skips, repeats or garbles a word, loses the turn, or jumps to another place goes on from where it is then, and
takes turns again. Only what it does twice in a row becomes its way: to keep to one text, to write every word twice.
"""
from bisect import bisect_left
from collections.abc import Sequence

from align.words import split_words

Spot = tuple[int, int]  # (0 for A or 1 for B, place in it)
Move = tuple[bool, int]  # (whether the turn changed, how far from the place reached in the text: -1 repeats its last word)

TAKES_TURNS: Move = (True, 0)
KEEPS_ON: Move = (False, 0)


def rest_of(a: Sequence[str], b: Sequence[str], text: str) -> str:
    """Return how `text`, the beginning of an interleaving of the words `a` and `b`, most likely goes on until its end.

    A last word that no white space follows may be unfinished: then the rest begins with its other letters. Time is linear
    in the words of all three (times the logarithm of how often one occurs).

    >>> rest_of(["Owls", "see."], ["It", "rains,"], "Owls Owls I")
    't see. rains,'
    """
    walk, words = _Walk(a, b), split_words(text)
    last = words.pop() if words and not text[-1].isspace() else ""
    place = 0
    while place < len(words):
        place += walk.follow(words, place)
        if place < len(words):
            walk.write(walk.find(words[place]))
            place += 1
    rest = []
    if last:
        spot = walk.find_beginning(last)
        walk.write(spot or walk.expected())
        rest.append(walk.word(spot)[len(last):] if spot else "")
    while (spot := walk.expected()) and len(rest) < len(a) + len(b):  # who stutters would do so for ever
        ahead = walk.ahead()
        walk.follow(ahead, 0)
        rest += ahead
        if spot := walk.expected():
            rest.append(walk.word(spot))
            walk.write(spot)
    return " ".join(rest)


class _Walk:
    """The places reached in both texts, and how the last four words came about."""

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.texts, self.places = (a, b), [0, 0]
        self.last, self.moves = 1, (TAKES_TURNS,) * 4  # as if B had just had its turn
        self.index: tuple[dict[str, list[int]], ...] = {}, {}  # of each text: word to its places, in order
        for words, index in zip(self.texts, self.index):
            for place, word in enumerate(words):
                index.setdefault(word, []).append(place)

    def word(self, spot: Spot) -> str:
        return self.texts[spot[0]][spot[1]]

    def ahead(self) -> list[str]:
        """Return the words of the next turns, as long as both texts have some; none unless the last words took turns."""
        if self.moves != (TAKES_TURNS,) * 4:
            return []
        mine, other = (self.texts[text][self.places[text]:] for text in (1 - self.last, self.last))
        return [word for pair in zip(mine, other) for word in pair]

    def follow(self, words: Sequence[str], place: int) -> int:
        """Write those of the `words` from `place` on that are `ahead`, at one stroke; return how many."""
        number = 0
        for word, ahead in zip(words[place:], self.ahead()):
            if word != ahead:
                break
            number += 1
        self.places[1 - self.last] += (number + 1) // 2
        self.places[self.last] += number // 2
        self.last = (self.last + number) % 2
        return number

    def expected(self) -> Spot | None:
        """Return where the next word stands; None when both texts are used up."""
        first, second, third, fourth = self.moves
        again = (first, second) == (third, fourth) or third == fourth == KEEPS_ON
        changes, step = third if again else TAKES_TURNS
        turn = 1 - self.last if changes else self.last
        for text, place in (turn, self.places[turn] + step), (turn, self.places[turn]), (1 - turn, self.places[1 - turn]):
            if 0 <= place < len(self.texts[text]):
                return text, place
        return None

    def find(self, word: str) -> Spot | None:
        """Return where `word` was most likely taken from; a word of neither text stands in place of the expected one."""
        expected = self.expected()
        if expected and self.word(expected) == word:
            return expected
        return self._nearest([word]) or expected

    def find_beginning(self, letters: str) -> Spot | None:
        """Return which word `letters` most likely begins, or all of which they are; None where there is none."""
        expected = self.expected()
        if expected and self.word(expected).startswith(letters):
            return expected
        return self._nearest([word for index in self.index for word in index if word.startswith(letters)])

    def _nearest(self, words: Sequence[str]) -> Spot | None:
        near = []
        for text, index in enumerate(self.index):
            for places in [index[word] for word in words if word in index]:
                after = bisect_left(places, self.places[text])
                near += [(text, place) for place in places[max(0, after - 1):after + 1]]
        return min(near, key=lambda spot: abs(spot[1] - self.places[spot[0]]), default=None)

    def write(self, spot: Spot | None):
        """Go on behind the word at `spot`."""
        if spot:
            text, place = spot
            self.moves = *self.moves[1:], (text != self.last, place - self.places[text])
            self.last, self.places[text] = text, place + 1
