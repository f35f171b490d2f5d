"""Guess how an interleaving continues, for speculative decoding.

The guess keeps track of the place in A and the place in B that the completion has reached. After a
mistake (a word that is skipped, repeated or misspelt, a lost turn, a jump) it assumes that the
policy continues from its new places and takes turns again. Only behaviour that is seen twice in a
row is assumed to continue, such as staying in one text or writing every word twice.
"""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from operator import eq

from align.words import normalise, split_words

# A word of the texts: 0 for A or 1 for B, and the index of the word.
Spot = tuple[int, int]

# How a word follows the one before: whether the text changes, and how far the word is from the
# place that was reached in its text. 0 is the next word, -1 repeats the last one.
Move = tuple[bool, int]

TAKES_TURNS: Move = (True, 0)
KEEPS_ON: Move = (False, 0)


class Guess:
    """Guesses the rest of an interleaving of the words `a` and `b`.

    If no white space follows the last word of the text, it may be unfinished, and the guess begins
    with its other letters. A guess remembers the text that it was called with last. If the next
    text continues it, only the new part is read. Copies are independent. The time is linear in the
    new words (times the logarithm of how often a word occurs) and in the length of the guess.

    >>> Guess(["Owls", "see."], ["It", "rains,"])("Owls Owls I")
    't see. rains,'
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.start = self.walk = _Walk(a, b)
        self.read = ""  # the text up to its last whole word, which `walk` has followed

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
        # The limit is for a policy that repeats words, which would never come to an end.
        while (spot := walk.expected()) and len(rest) < words:
            ahead = walk.ahead(words - len(rest) - 1)
            walk.advance(len(ahead))
            rest += ahead
            if spot := walk.expected():
                rest.append(walk.word(spot))
                walk.write(spot)
        return " ".join(rest)


class _Walk:
    """The places that are reached in both texts, and the moves of the last four words.

    Copies share the texts, and are otherwise independent.
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.texts, self.places = (a, b), (0, 0)
        # It begins as if B had just had its turn.
        self.last, self.moves = 1, (TAKES_TURNS,) * 4
        # For each text, the places of each word, in order.
        self.index: tuple[dict[str, list[int]], ...] = ({}, {})
        for words, index in zip(self.texts, self.index):
            for place, word in enumerate(words):
                index.setdefault(word, []).append(place)

    def word(self, spot: Spot) -> str:
        return self.texts[spot[0]][spot[1]]

    def ahead(self, most: int) -> list[str]:
        """Return the next words, about `most` of them; [] if the last moves were not alike.

        They continue in turns or in one text.
        """
        mine, other = (
            self.texts[text][self.places[text] : self.places[text] + most]
            for text in (1 - self.last, self.last)
        )
        if self.moves == (TAKES_TURNS,) * 4:
            return [word for pair in zip(mine, other) for word in pair]
        return list(other) if self.moves == (KEEPS_ON,) * 4 else []

    def advance(self, number: int) -> None:
        """Write `number` of the words that `ahead` returns."""
        if self.moves[-1] == KEEPS_ON:
            self._go_on(self.last, number)
        else:
            self._go_on(1 - self.last, (number + 1) // 2)
            self._go_on(self.last, number // 2)
            self.last = (self.last + number) % 2

    def follow(self, words: Sequence[str]) -> None:
        """Write `words`, each from the place where it most likely comes from."""
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
        """Return the place of the next word; None at the end of both texts."""
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
        """Return where `word` most likely comes from.

        A word that is in neither text is taken for the expected one.
        """
        expected = self.expected()
        if expected and self.word(expected) == word:
            return expected
        return self._nearest([word]) or expected

    def find_beginning(self, letters: str) -> Spot | None:
        """Return the word that most likely begins with `letters`; None if there is none."""
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
        """Continue after the word at `spot`."""
        if spot:
            text, place = spot
            step = place - self.places[text]
            self.moves = *self.moves[1:], (text != self.last, step)
            self.last = text
            self._go_on(text, step + 1)
