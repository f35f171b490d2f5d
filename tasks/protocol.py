"""What a task is: it makes problems of a level and a split, and scores completions of them."""

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, Protocol

SPLITS = ("train", "validation", "test")

# Parts of a score under this prefix are components of the reward: their means are metrics.
COMPONENT = "reward/"


@dataclass(frozen=True)
class Problem:
    """One problem to solve, e.g. ``Problem("reverse", 2, "Reverse: a b", "b a", key="91c0...",
    data={"words": ["a", "b"]})``.

    - `prompt`: the user's turn in plain text; the policy applies the chat template;
    - `target`: an answer that earns the highest reward;
    - `key`: a canonical hash; two problems with the same key count as the same problem;
    - `data`: what the task's own `score` needs, as JSON values.
    """

    task: str
    level: int
    prompt: str
    target: str
    key: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """The conversation as (role, text): `data["messages"]` if there is one, else the prompt."""
        messages = self.data.get("messages")
        if not messages:
            return (("user", self.prompt),)
        return tuple((turn["role"], turn["content"]) for turn in messages)

    @property
    def title(self) -> str:
        """What messages call the problem: where its row stands, or its key."""
        return str(self.data.get("where") or f"problem {self.key}")

    def to_json(self) -> dict:
        """Return the fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """The score of one completion.

    - `reward`: what the policy is trained on, within the task's `reward_range`, by default [0, 1];
    - `value`: what reports and evaluations show, in [0, 1]. Without one, `scores_of` maps the
      reward from its range to [0, 1]; a task whose range is unknown must give it. Give it again
      with another reward: ``dataclasses.replace(score, reward=0.9)`` keeps the value;
    - `exact`: whether the answer is completely right; `scores_of` marks one of value 1 as well. An
      answer that the token budget cut off is never exact (see `tasks.scoring.without_end`);
    - `parts`: numbers and labels that explain the reward, e.g. ``{"matches": 18, "gaps": 2,
      "trap": "copies A"}``. The label `trap` names the cheap strategy that the completion follows,
      or is None. An alarm is raised if most completions follow one;
    - `credits`: how the reward was earned word by word, if that was asked for (see `credits_of`).

    Numbers may be NumPy's or PyTorch's; `scores_of` turns them into Python's.
    """

    reward: float
    parts: Mapping[str, Any] = field(default_factory=dict)
    value: float = None  # type: ignore[assignment]
    exact: bool = False
    credits: tuple[tuple[int, float], ...] | None = None
    gives_value: bool = field(init=False, repr=False, compare=False, default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gives_value", self.value is not None)
        if self.value is None:
            object.__setattr__(self, "value", self.reward)


class Task(Protocol):
    """What the trainer asks of a task. A constructor without arguments must work.

    `rewards` are the names for --reward, the default first; () if there is only one reward. A task
    with several has an attribute `reward`, the name of the one in use.

    `OptionalMembers` says what else a task may have.
    """

    name: str
    rewards: tuple[str, ...]
    default_level: int

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem of `split` ("train", "validation" or "test"), drawn only with `rng`."""

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion of `problem`, in order."""


class OptionalMembers(Protocol):
    """What a task may have besides what `Task` names."""

    # The lowest and the highest reward, by default (0.0, 1.0). None means unknown: then no group is
    # called failed, only right answers solved, and each `Score` gives its `value`.
    reward_range: tuple[float, float] | None
    reward: str  # the name of the one in use, see `Task`
    credits: Callable[[Problem, Sequence[str]], Sequence[Sequence[tuple[int, float]]]]

    # The scores of several groups at once, see `scores_of_groups`.
    score_groups: Callable[[Sequence[tuple[Problem, Sequence[str]]]], list[list[Score]]]
    watch: Callable[[Callable[[int, int, float], None]], None]  # see `watch_scoring`

    compares: bool  # whether scores depend on the group's other completions, see `compares`

    metric: str  # what reports call the score
    level_unit: str  # what a level counts ("words")
    answer: Callable[[Problem, str], str | None]  # see `answers_of`

    # Whether completions begin with the reasoning tag that the prompt ends with, e.g. "<think>", so
    # that the task sees that what follows is reasoning until it is closed.
    reads_reasoning: bool

    # The score of a completion that the token budget cut off, from the one that it would have had
    # with an end. Without it the reward stays. Its result is not checked.
    unended: Callable[[Problem, str, Score], Score]

    mistakes: Mapping[str, str]  # see `mistakes_of`

    # A static method that says in words how a completion earned its reward. Only tasks of the
    # project are asked (see `tasks.base.explain`).
    explain: Callable[[Problem, str, Score, str | None], str]

    # Of a level.
    default_steps: Callable[[int], int]  # see `default_steps_of`
    max_new_tokens: Callable[[int], int]  # see `declared_budget`
    levels: Callable[[int], Iterable[int]]  # on the way to it, see `levels_of`
    family_size: Callable[[int], int | None]  # how many different problems there are
    climbs: bool  # whether a run begins with the easier levels of `tasks.levels.LADDER`

    key: Callable[[Problem], str]  # the canonical key, computed again from `problem.data`
    draft: Callable[[Problem], Callable[[str], str]]  # see `draft_of`
    problems: Callable[[str], Iterable[Problem]]  # of a split, see `problems_of`
    notes: Iterable[str]  # see `notes_of`

    # The texts that problems are drawn from. Such a task may also have the option `texts`, a folder
    # of the user's.
    sources: Callable[[], Mapping[str, str]]  # see `sources_of`
    plain_texts: Callable[[str], Iterable[str]]  # of a split, see `plain_texts_of`
    unseen: Callable[[Collection[str]], Task]  # see `unseen_texts`
    foreign: Callable[[int], Mapping[str, Task]]  # at a level, see `foreign_of`

    # Flags and their help. Each is also a keyword of the constructor, which gets a string.
    options: Mapping[str, str]

    program: Sequence[str | PathLike[str]]  # files of the user's own that the task executes
    python_functions: Mapping[str, Callable]  # see `python_functions_of`
    from_python: bool  # whether it was made from Python values: no command line can load it

    # What a wording of the user's own may contain: by name, functions that make the text from a
    # problem's `data`, e.g. ``{"words": lambda data: " ".join(data["words"])}``. `load_task` sets
    # `wording`, and `worded` applies it.
    placeholders: Mapping[str, Callable[[Mapping[str, Any]], str]]
    wording: str


def key_of(*parts: Any) -> str:
    """Return the canonical key of a problem made of `parts`: 16 hex digits of SHA-256."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def split_of_key(key: str) -> str:
    """Return the split of a generated problem: "train" (80 %), "validation" or "test" (10 %)."""
    tenth = int(key, 16) % 10
    return {8: "validation", 9: "test"}.get(tenth, "train")
