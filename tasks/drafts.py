"""Guess how an interleaving continues, for speculative decoding.

The guess keeps track of the places in A and in B that the completion has reached. After a mistake
(a word that is skipped, repeated or misspelt, a lost turn, a jump) it assumes that the policy
continues from its new places and takes turns again. It assumes that other behaviour, such as
staying in one text or writing every word twice, continues only after seeing it twice in a row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from operator import eq

from align.needleman import normalise, split_words

# A word of the texts: 0 for A or 1 for B, and the index of the word.
Spot = tuple[int, int]

# How a word follows the one before: whether it is in the other text, and how far it is from the
# place reached in its text. 0 is the next word, -1 repeats the last one.
Move = tuple[bool, int]

TAKES_TURNS: Move = (True, 0)
STAYS: Move = (False, 0)


class Guess:
    """Guesses the rest of an interleaving of the words `a` and `b`.

    If no white space follows the last word of the text, the word may be unfinished, and the guess
    begins with its missing letters. A guess remembers the text of its last call. If the next text
    continues it, only the new part is read. Copies are independent. The time is linear in the
    number of new words (times the logarithm of how often a word occurs) and in the length of the
    guess.

    >>> Guess(["Owls", "see."], ["It", "rains,"])("Owls Owls I")
    't see. rains,'
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.start = _Walk(a, b)
        self.walk = self.start
        self.read = ""  # the text that `walk` has followed, up to its last whole word

    def __call__(self, text: str) -> str:
        """Return how the text is expected to continue."""
        is_unfinished = bool(text) and not text[-1].isspace()
        last = text.rsplit(None, 1)[-1] if is_unfinished else ""
        self._follow(text[: len(text) - len(last)])

        walk = copy(self.walk)
        rest = []
        if letters := normalise(last):
            spot = walk.find_beginning(letters)
            walk.write(spot or walk.expected())
            rest.append(walk.word(spot)[len(letters) :] if spot else "")

        # The limit stops the guess for a policy that repeats words, which never reaches the end.
        most = sum(map(len, walk.texts))
        while walk.expected() and len(rest) < most:
            ahead = walk.ahead(most - len(rest) - 1)
            walk.advance(len(ahead))
            rest += ahead

            if spot := walk.expected():
                rest.append(walk.word(spot))
                walk.write(spot)
        return " ".join(rest)

    def _follow(self, text: str) -> None:
        """Move `walk` to the end of `text`, from the start unless the text continues `read`."""
        if not text.startswith(self.read):
            self.walk = self.start
            self.read = ""
        self.walk = copy(self.walk)
        self.walk.follow(split_words(text[len(self.read) :]))
        self.read = text


class _Walk:
    """The places reached in both texts, and how the last four words followed each other.

    - `places`: the index of the next word of each text;
    - `last`: the text of the last word;
    - `moves`: the last four moves;
    - `index`: for each text, the places of each word, in order.

    Copies share the texts, and are otherwise independent.
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]):
        self.texts = (a, b)
        self.places = (0, 0)

        # A begins, as if B had just had its turn.
        self.last = 1
        self.moves = (TAKES_TURNS,) * 4

        self.index: tuple[dict[str, list[int]], ...] = ({}, {})
        for words, index in zip(self.texts, self.index):
            for place, word in enumerate(words):
                index.setdefault(word, []).append(place)

    def word(self, spot: Spot) -> str:
        """Return the word at `spot`."""
        return self.texts[spot[0]][spot[1]]

    def ahead(self, most: int) -> list[str]:
        """Return the next words if the last four moves took turns, or all stayed in one text.

        They are about `most` words. Returns [] if the moves were not alike.
        """
        in_last = self._next_words(self.last, most)
        if self.moves == (STAYS,) * 4:
            return list(in_last)
        if self.moves == (TAKES_TURNS,) * 4:
            in_other = self._next_words(1 - self.last, most)
            return [word for pair in zip(in_other, in_last) for word in pair]
        return []

    def _next_words(self, text: int, most: int) -> Sequence[str]:
        place = self.places[text]
        return self.texts[text][place : place + most]

    def advance(self, number: int) -> None:
        """Write `number` of the words that `ahead` returns."""
        if self.moves[-1] == STAYS:
            self._move_on(self.last, number)
        else:
            self._move_on(1 - self.last, (number + 1) // 2)
            self._move_on(self.last, number // 2)
            self.last = (self.last + number) % 2

    def follow(self, words: Sequence[str]) -> None:
        """Write `words`, each taken from the place where it most likely comes from."""
        place = 0
        while place < len(words):
            # The words that are as expected are written at once.
            expected = self.ahead(len(words) - place)
            number = sum(takewhile(bool, map(eq, words[place:], expected)))
            self.advance(number)
            place += number

            if place < len(words):
                self.write(self.find(words[place]))
                place += 1

    def _move_on(self, text: int, number: int) -> None:
        """Move the place in a text by `number` words."""
        a, b = self.places
        self.places = (a, b + number) if text else (a + number, b)

    def expected(self) -> Spot | None:
        """Return the place of the next word; None at the end of both texts."""
        # A pattern of two moves that was seen twice continues with its first move.
        first, second, third, fourth = self.moves
        is_repeated = (first, second) == (third, fourth) or third == fourth == STAYS
        changes, step = third if is_repeated else TAKES_TURNS

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

        A word that is in neither text counts as the expected one.
        """
        expected = self.expected()
        if expected and self.word(expected) == word:
            return expected
        return self._nearest([word]) or expected

    def find_beginning(self, letters: str) -> Spot | None:
        """Return the place of the word that is most likely begun by `letters`; None if none is."""
        expected = self.expected()
        if expected and self.word(expected).startswith(letters):
            return expected
        words = [word for index in self.index for word in index if word.startswith(letters)]
        return self._nearest(words)

    def _nearest(self, words: Sequence[str]) -> Spot | None:
        """Return where one of `words` occurs nearest to the places reached; None if nowhere."""
        near = []
        for text, index in enumerate(self.index):
            for places in [index[word] for word in words if word in index]:
                # The last occurrence before the place reached, and the first one after it.
                after = bisect_left(places, self.places[text])
                near += [(text, place) for place in places[max(0, after - 1) : after + 1]]
        return min(near, key=lambda spot: abs(spot[1] - self.places[spot[0]]), default=None)

    def write(self, spot: Spot | None) -> None:
        """Write the word at `spot`, and continue after it."""
        if spot is None:
            return
        text, place = spot
        step = place - self.places[text]
        self.moves = *self.moves[1:], (text != self.last, step)
        self.last = text
        self._move_on(text, step + 1)
