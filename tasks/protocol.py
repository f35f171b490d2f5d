"""What a task is: it makes problems from (seed, split, level, index) and scores completions."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

    def to_json(self) -> dict:
        """Return the fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """The score of one completion.

    - `reward`: what the policy is trained on, within the task's `reward_range`, by default [0, 1];
    - `value`: what reports and evaluations show, in [0, 1]. Without one, `scores_of` maps the
      reward from its range to [0, 1]; a task whose range is unknown must give it;
    - `exact`: whether the answer is completely right;
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


def is_right(score: Score) -> bool:
    """Return whether an answer is completely right: marked as exact, or of the highest value."""
    return score.exact or score.value >= 1.0


class Task(Protocol):
    """What the trainer asks of a task. A constructor without arguments must work.

    `rewards` are the names for --reward, the default first; () if there is only one reward. A task
    with several has an attribute `reward`, the name of the one in use.

    A task may also have:

    - `reward_range`: the lowest and the highest reward, by default (0.0, 1.0). None means unknown:
      then no group is called solved or failed, and each `Score` gives its `value`;
    - `default_steps(level)`: see `default_steps_of`;
    - `climbs`: whether a run begins with the easier levels of `tasks.levels.LADDER`;
    - `metric`: what reports call the score; `level_unit`: what a level counts ("words");
    - `options`: a mapping of flag to help. Each flag is also a keyword of the constructor, which
      gets a string;
    - `key(problem)`: the canonical key, computed again from `problem.data`;
    - `family_size(level)`: how many different problems there are, or None;
    - `max_new_tokens(level)`: see `declared_budget`; `draft(problem)`: see `draft_of`;
    - `credits(problem, completions)` and `credited`: see `credits_of`;
    - `sources()`: see `sources_of`; `levels(level)`: see `levels_of`;
      `plain_texts(split)`: see `plain_texts_of`;
    - `answer(problem, completion)`: see `answer_of`;
    - `mistakes`: see `mistakes_of`;
    - `explain(problem, completion, score, reward)`: a static method that says in words how the
      completion earned its reward; only tasks of the project are asked (see `tasks.base.explain`);
    - `problems(split)` and `notes`: see `problems_of` and `notes_of`;
    - `score_groups(groups)`: the scores of several groups at once, see `scores_of_groups`;
      `watch(show)`: see `watch_scoring`;
    - `program`: a list of the files of the user's own that it executes; `from_python`: whether it
      was made from Python values, so that no command line can load it; `python_functions`: see
      `python_functions_of`;
    - `placeholders`: what a wording of the user's own may contain: a mapping of name to a function
      that makes the text from a problem's `data`, e.g. ``{"words": lambda data:
      " ".join(data["words"])}``. `load_task` keeps the wording as the task's attribute `wording`,
      and `worded` applies it.

    A task that draws its problems from texts may have the option `texts` (a folder of the user's),
    `unseen(known)` (see `unseen_texts`) and `foreign(level)` (see `foreign_of`).
    """

    name: str
    rewards: tuple[str, ...]
    default_level: int

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem of `split` ("train", "validation" or "test"), drawn only with `rng`."""

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion of `problem`, in order."""


def key_of(*parts: Any) -> str:
    """Return the canonical key of a problem made of `parts`: 16 hex digits of SHA-256."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def split_of_key(key: str) -> str:
    """Return the split of a generated problem: "train" (80 %), "validation" or "test" (10 %)."""
    tenth = int(key, 16) % 10
    return {8: "validation", 9: "test"}.get(tenth, "train")
