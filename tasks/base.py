"""What a task is: it makes problems of a level and a split, and scores completions of them.

What a user's own code returns is checked here: problems, scores, and whatever else a task may have.
"""

import hashlib
import json
import math
import numbers
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Protocol

from grpo.data.errors import UserError, shortened, shown

SPLITS = ("train", "validation", "test")

# Parts of a score under this prefix are components of the reward: their means are metrics.
COMPONENT = "reward/"

# The part `reason` of a right answer that is not exact, because it did not end. Its part `unended`
# is what that adds to its reward, e.g. -0.02.
CUT_OFF = "right, but it does not end where the answer does"

# The part `reason` of a score if no reward judges the completion.
ABSTAINED = "the reward abstained, so it counts like the mean of its group"

# Where a window's `Problem.data` has what the whole answer is expected to score.
EXPECTED = "window_expected"

# Rounding, even in float32, moves a reward out of its range by at most this share of the range.
ROUNDING = 1e-6

# No reward is further from 0, so that sums and squares of rewards are finite.
LARGEST = 1e30

# The lowest and the highest reward.
Range = tuple[float, float]


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
    def begun(self) -> str:
        """In a window of the right answer: the text before it, which ends the prompt."""
        return str(self.data.get("begun", ""))

    @property
    def goes_on(self) -> bool:
        """In a window of the right answer: whether the answer continues after it."""
        return bool(self.data.get("goes_on"))

    @property
    def expected(self) -> float | None:
        """In a window of training: what the whole answer is expected to score; else None."""
        return self.data.get(EXPECTED)

    @property
    def title(self) -> str:
        """What messages call the problem: where its row stands, or its key."""
        return str(self.data.get("where") or f"problem {self.key}")


@dataclass(frozen=True)
class Score:
    """The score of one completion.

    - `reward`: what the policy is trained on, within the task's `reward_range`, by default [0, 1];
    - `value`: what reports and evaluations show, in [0, 1]. Without one, `scores_of` maps the
      reward from its range to [0, 1]; a task whose range is unknown must give it. Give it again
      with another reward: ``dataclasses.replace(score, reward=0.9)`` keeps the value;
    - `exact`: whether the answer is completely right; `scores_of` marks one of value 1 as well. An
      answer that the token budget cut off is never exact (see `without_end`), nor is one that no
      reward judged;
    - `parts`: numbers and labels that explain the reward, e.g. ``{"matches": 18, "gaps": 2,
      "trap": "copies A"}``. The label `trap` names the cheap strategy that the completion follows,
      or is None. An alarm is raised if most completions follow one. The label `trap_kind` is what
      several traps that ignore a part of the task count as together, e.g. "ignores a text";
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
        if self.abstained:
            object.__setattr__(self, "exact", False)

    @property
    def abstained(self) -> bool:
        """Whether no reward judged the completion."""
        return self.parts.get("reason") == ABSTAINED


class Task(Protocol):
    """What the trainer asks of a task. A constructor without arguments must work.

    `rewards` are the names for --reward, the default first; () if there is only one reward. A task
    with several has an attribute `reward`, the name of the one in use. Besides, it may have

    - `reward_range`: the lowest and the highest reward, by default (0.0, 1.0). None means unknown:
      then no group is called failed, only right answers solved, and each score gives its `value`;
    - `score_groups(groups)`: the scores of several groups at once; `compares`;
    - `credits(problem, completions)`: what each word earns (see `credits_of`);
    - `draft(problem)`: a guesser, for speculative decoding. ``draft(problem)(text)`` gets the text
      so far, which may end in the middle of a word, and returns the most likely continuation to the
      end ("l saw it." after "the ow"), or "". A wrong guess costs time but changes no sample. Each
      completion has its own copy (`copy.copy`) of the guesser, which may remember earlier calls;
    - `is_enough(problem, text)`: whether nothing after this text is scored; it may end in the
      middle of a word. In training, sampling ends there. It is False for the right answer itself;
    - `window(problem, words, start)`: the problem of writing `words` words of its one right answer,
      whose words are ``target.split()``, from number `start` (0, 1, ...) on: its `target` has them,
      `data["begun"]` the text before them, and `data["goes_on"]` says whether the answer continues;
    - `unended(problem, completion, score)`: the score of a completion that the token budget cut
      off, from the one that it would have had with an end. Without it the reward stays;
    - `explain(problem, completion, score, reward)`, a static method of the project's tasks;
    - `reads_reasoning`: whether completions begin with the reasoning tag that the prompt ends with
      ("<think>"), so that the task sees that what follows is reasoning until it is closed;
    - `metric`, what reports call the score; `level_unit`, what a level counts ("words");
    - of a level: `default_steps`, `default_window`, `max_new_tokens`, `levels`, `family_size`;
      `climbs`: whether a run begins with the easier levels of `grpo.tasks.supply.LADDER`;
    - `lora_rate_share`, what LoRA's default learning rate is multiplied by;
    - `key(problem)`, the canonical key, computed again from `problem.data`;
    - `problems(split)`: all problems of a fixed set; `notes`: what the user should know of them;
    - `sources()`, `foreign(level)`: of tasks that draw from texts;
    - `options`: flags and their help. Each is also a keyword of the constructor, which gets a text;
    - `wordings`: prompts that the pre-flight may try, the task's own first; `demonstrates`: whether
      targets are worth showing where no completion is right, and not only right;
    - `placeholders`: what a wording may contain: by name, functions that make the text from a
      problem's data, e.g. ``{"words": lambda data: " ".join(data["words"])}``;
    - `python_functions`, functions by name, which a resume compares and the run records;
      `from_python`: whether it was made from Python values, so that no command line can load it;
      `description`: of its data, in words.
    """

    name: str
    rewards: tuple[str, ...]
    default_level: int

    def make(self, level: int, split: str, rng: Random) -> Problem:
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


_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def after_reasoning(text: str) -> str | None:
    """Return what follows the reasoning; None if the reasoning is not closed."""
    ends = [tag.end() for tag in _THINKING.finditer(text) if tag[1]]
    said = text[ends[-1] :] if ends else text
    return None if _THINKING.search(said) else said


def worded(task: Task, problem: Problem) -> Problem:
    """Return `problem` with its prompt in the wording that `load_task` gave the task, if any."""
    wording = getattr(task, "wording", "")
    placeholders = getattr(task, "placeholders", {})
    if not (wording and placeholders):
        return problem

    with calling(f"--wording: task {task.name}, problem {problem.key}: a placeholder"):
        texts = {name: text_of(problem.data) for name, text_of in placeholders.items()}
    return replace(problem, prompt=wording.format(**texts))


# ---- a user's own code, and checks of what it returns


class TaskError(UserError):
    """A task's own code is wrong; by a plain UserError a task refuses a level."""


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Run a task's own code, e.g. `what` "task t: make()", within this block. Any exception except
    UserError, and any attempt to exit, becomes a TaskError that names file and line. The working
    directory is set back: the paths of the run may be relative to it.
    """
    here = None
    with suppress(OSError):  # `sudo -u` may leave one in a folder that one may not read
        here = os.open(".", os.O_RDONLY)  # a path may lead nowhere by now, or afterwards
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise raised(what, error) from error
    finally:
        if here is not None:
            os.fchdir(here)
            os.close(here)


# Where the code of Python and of installed packages begins.
LIBRARIES = (
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


def raised(what: str, error: BaseException) -> TaskError:
    """Return the one-line error for what a user's own code raised, with the innermost line that is
    the user's own, rather than one of a library that it calls.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    last = (users or frames)[-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno

    said = shortened(" ".join(str(error).split()), 300)
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return TaskError(f"{what} raised {reason} ({file}, line {line})")


FIELDS = {"task": str, "level": int, "prompt": str, "target": str, "key": str, "data": Mapping}


def check_problem(problem: Any, where: str) -> None:
    """Raise TaskError, which begins with `where`, unless `problem` is a Problem of texts and JSON.

    Levels begin at 1. No text may contain half of a surrogate pair, which is not a character.
    """
    if not isinstance(problem, Problem):
        raise TaskError(f"{where}: is {type(problem).__name__}, and must be a Problem")
    for name, kind in FIELDS.items():
        value = getattr(problem, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TaskError(
                f"{where}: {name} is {shown(value)}; it must be of type {kind.__name__}"
            )
    if problem.level < 1:
        raise TaskError(f"{where}: level is {problem.level}; it must be 1 or more")
    if not problem.key:
        raise TaskError(f"{where}: its key is empty; make one by key_of()")

    try:
        json.dumps(vars(problem), default=asdict, ensure_ascii=False).encode()
        "".join(text for turn in problem.turns for text in turn)
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{where}: holds a lone surrogate, {error.object[error.start]!a}"
        ) from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"{where}: its data, or the turns of its messages, are not what JSON can hold ({error})"
        ) from error


# ---- scores, checked


def range_of(task: Task) -> Range | None:
    """Return the lowest and the highest reward of `task`; None if it declares them unknown."""
    declared = getattr(task, "reward_range", (0.0, 1.0))
    limits = None if declared is None else as_range(declared)
    if declared is None or limits:
        return limits
    raise UserError(
        f"task {task.name}: reward_range is {declared!r}; give the lowest and the highest "
        f"reward, e.g. (-1.0, 0.0), or None if they are not known; none is beyond {LARGEST:g}"
    )


def as_range(given: Iterable[Any]) -> Range | None:
    """Return two rising numbers, which may be texts; None for anything else."""
    with suppress(TypeError, ValueError):
        low, high = map(float, given)
        if -LARGEST <= low < high <= LARGEST:
            return low, high
    return None


def finite_number(given: Any) -> float | None:
    """Return a finite number of Python, NumPy or PyTorch as a float; None for anything else."""
    plain = _plain(given)
    with suppress(OverflowError):  # an integer beyond the largest float
        if isinstance(plain, numbers.Real) and math.isfinite(plain):
            return float(plain)
    return None


def scores_of(task: Task, problem: Problem, completions: Sequence[str]) -> list[Score]:
    """Return the scores of a single group, see `scores_of_groups`."""
    return scores_of_groups(task, [(problem, completions)])[0]


def scores_of_groups(
    task: Task, groups: Sequence[tuple[Problem, Sequence[str]]]
) -> list[list[Score]]:
    """Return the scores of several groups (problems, each with its completions), with Python's
    numbers and every `value`.

    A task that has `score_groups` scores all groups in one call, for example concurrently. There
    must be one Score for each completion, with finite numbers within the task's range and parts
    that JSON can represent. What is out of its range only by rounding is moved to its end.
    """
    score_groups = getattr(task, "score_groups", None)
    # Copies, which the task may change: the run stores the data.
    given = [(replace(one, data=deepcopy(one.data)), list(texts)) for one, texts in groups]
    if score_groups and groups:
        with calling(f"task {task.name}: score_groups()"):
            found = [list(scores) for _, scores in zip(groups, score_groups(given), strict=True)]
    else:
        found = []
        for problem, texts in given:
            with calling(f"task {task.name}, {problem.title}: score()"):
                found.append(list(task.score(problem, texts)))

    reward_range = range_of(task)
    checked: list[list[Score]] = []
    for (problem, completions), scores in zip(groups, found):
        where = f"task {task.name}, {problem.title}"
        if len(scores) != len(completions):
            raise UserError(
                f"{where}: score() returned {len(scores)} scores for {len(completions)} completions"
            )

        checked.append([])
        for number, score in enumerate(scores, start=1):
            try:
                checked[-1].append(_checked(score, reward_range))
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"{where}, completion {number}: score() returned {error}"
                ) from error
    return checked


def without_end(task: Task, problem: Problem, completion: str, score: Score) -> Score:
    """Return the `score` of a completion that the token budget cut off, which is never exact.

    What it earns is the task's to say (`unended`).
    """
    earned = asked(task, "unended", problem, completion, score, default=score)
    parts = dict(earned.parts)
    if score.exact:
        parts |= {"reason": CUT_OFF, "unended": earned.reward - score.reward}
    return replace(earned, parts=parts, value=earned.value, exact=False)


def _checked(score: Any, reward_range: Range | None) -> Score:
    """Return `score` with Python's numbers and its value; ValueError says what is wrong."""
    if not isinstance(score, Score):
        raise ValueError(f"{type(score).__name__}; it must return a Score for each")

    reward = _within(score.reward, "reward", reward_range)
    if score.gives_value:
        value = _within(score.value, "value", (0.0, 1.0))
    elif reward_range is None:
        raise ValueError("no value; a task whose reward_range is None must give one, in [0, 1]")
    else:
        low, high = reward_range
        value = (reward - low) / (high - low)

    parts = {str(name): _plain(part) for name, part in score.parts.items()}
    for name, part in parts.items():
        if name in ("trap", "trap_kind") and not isinstance(part, str | None):
            raise ValueError(f"{name!r} {part!r}; give the name of a trap, or None")
        if name.startswith(COMPONENT) and part is not None:
            _within(part, name, None)
    json.dumps(parts, ensure_ascii=False).encode()  # what it cannot hold could not be stored
    exact = _plain(score.exact)
    if exact not in (0, 1):
        raise ValueError(f"exact {shown(exact)}; give True or False")
    is_exact = bool(exact) or value >= 1.0
    return replace(score, reward=reward, value=value, exact=is_exact, parts=parts)


def _plain(part: Any) -> Any:
    """Return a number or an array of NumPy or PyTorch as Python's."""
    return part.tolist() if hasattr(part, "tolist") else part


def _within(given: Any, name: str, limits: Range | None) -> float:
    """Return the number `given`; if only rounding put it outside `limits`, the nearest limit."""
    number = finite_number(given)
    if number is None or abs(number) > LARGEST:
        raise ValueError(f"a {name} of {shown(given)}; give a finite number, up to {LARGEST:g}")
    if limits is None:
        return number

    low, high = limits
    margin = ROUNDING * (high - low)
    if not low - margin <= number <= high + margin:
        hint = ""
        if name == "reward":
            hint = "; a task declares another reward_range, and rows have --reward-range LOW,HIGH"
        raise ValueError(f"a {name} of {number:g}; it must lie in [{low:g}, {high:g}]{hint}")
    return min(max(number, low), high)


def component_means(groups: Sequence[Sequence[Score]]) -> dict[str, list[float]]:
    """Return the means over each group's scores of each component of the reward, by name.

    A completion without a component counts as 0. One is left out for which the component is None,
    or which no reward judged; so is a group of which nothing is left.
    """
    judged = [[score.parts for score in group if not score.abstained] for group in groups]
    names = {name for group in judged for parts in group for name in parts}
    means = {}
    for name in sorted(name for name in names if name.startswith(COMPONENT)):
        given = [[parts.get(name, 0.0) for parts in group] for group in judged]
        found = [[value for value in values if value is not None] for values in given]
        if any(found):
            means[name] = [fmean(values) for values in found if values]
    return means


# ---- what a task may have besides, see `Task`


def asked(task: Task, name: str, *arguments: Any, default: Any = None) -> Any:
    """Return what the optional method `name` of a task returns, or `default` if it has none."""
    method = getattr(task, name, None)
    if method is None:
        return default
    with calling(f"task {task.name}: {name}()"):
        found = method(*arguments)
        return list(found) if isinstance(found, Iterator) else found


def compares(task: Task) -> bool:
    """Return whether a score may depend on the other completions of its group.

    Then evaluations score whole groups, and a right answer that stands alone proves nothing.
    """
    return bool(getattr(task, "compares", False))


def credits_of(
    task: Task,
) -> Callable[[Problem, Sequence[str]], list[tuple[tuple[int, float], ...]]]:
    """Return the function that tells how a reward was earned word by word, for --credit alignment.

    ``credits(problem, completions)`` returns for each completion a pair (end, amount) for each
    word (or other piece), in order. The amount is what the word that ends at character `end` adds
    to the reward, judged only by the text up to `end`. The rest of the reward (for what is missing
    at the end, and any constant) is credited at the end of the text.
    """
    if not hasattr(task, "credits"):
        raise UserError(
            f"--credit alignment: task {task.name} does not say what each word of a completion "
            "earns; give --credit outcome"
        )
    return partial(asked, task, "credits")


def declared_budget(task: Task, level: int) -> int:
    """Return the completion budget in tokens that the task declares for `level`; 0 if none."""
    return int(asked(task, "max_new_tokens", level, default=0))


def family_size(task: Task, level: int) -> int | None:
    """Return how many different problems `level` has, in all splits; None if that is unknown."""
    return asked(task, "family_size", level)


def levels_of(task: Task, level: int) -> list[int]:
    """Return the levels on the way to `level`, the easiest first; [] if they are 1, 2, 3 ..."""
    return list(asked(task, "levels", level, default=()))


def problems_of(task: Task, split: str) -> list[Problem]:
    """Return a task's fixed set of problems of `split`, which training repeats in epochs; or []."""
    found = list(asked(task, "problems", split, default=()))
    for each in found:
        check_problem(each, f"task {task.name}: problems() returned a problem that")
    return found


def sources_of(task: Task) -> dict[str, str]:
    """Return the fingerprints of the texts that the problems are drawn from, by name, e.g.
    ``{"tale-flood": "91c0..."}``. With other texts the same index gives another problem, so a
    resumed run compares them.
    """
    return dict(asked(task, "sources", default={}))


def foreign_of(task: Task, level: int) -> Mapping[str, Task]:
    """Return `task` on each kind of text that no training uses, e.g. ``{"tables": task, ...}``."""
    found: Mapping[str, Task] = asked(task, "foreign", level)
    if not found:
        raise UserError(f"--foreign: task {task.name} has no foreign kinds of text; leave it out")
    return found
