"""What a task may have besides `make` and `score`. All of it is optional."""

import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of
from data.text import shown
from tasks.checks import (
    CheckedGuess,
    calling,
    check_problem,
    data_unchanged,
    finite_number,
    is_task,
    maps_texts,
)
from tasks.protocol import Problem, Task, key_of

# The most problems, texts or levels that a task returns; a generator without end is a mistake.
MOST = 10_000_000

# Training steps of a task that declares no number.
STEPS = 100

# For each completion, pairs (end, amount): what the word that ends at character `end` earned.
Credits = list[tuple[tuple[int, float], ...]]


def draft_of(task: Task) -> Callable[[Problem], Callable[[str], str]] | None:
    """Return the function that guesses how completions continue, for speculative decoding, or None.

    ``draft(problem)(text)`` gets the text so far, which may end in the middle of a word. It returns
    the most likely continuation to the end of the completion: "l saw it." after "the ow". It
    returns "" if there is no guess, or if the completion should end now. A wrong guess costs time
    but changes no sample. Each completion has its own copy (`copy.copy`) of the guesser, which may
    remember earlier calls. `drafts_leave_data` checks that neither changes the problem's data.
    """
    draft = getattr(task, "draft", None)
    if draft is None:
        return None

    def checked(problem: Problem) -> Callable[[str], str]:
        with calling(f"task {task.name}: draft()"):
            return CheckedGuess(task, draft(problem))

    return checked


def drafts_leave_data(task: Task, problems: Sequence[Problem]) -> AbstractContextManager[None]:
    """Return a block that samples completions of the `problems` with the drafts of `task`.

    The block raises UserError if `draft`, or a guesser that it returned, changes a problem's data.
    """
    drafted = problems if hasattr(task, "draft") else []
    return data_unchanged(f"task {task.name}: draft()", drafted)


def watch_scoring(task: Task, show: Callable[[int, int, float], None]) -> None:
    """Let `task` say how far it is while its scores take long.

    It calls ``show(done, total, seconds)`` now and then, for any parts that it counts; `seconds` is
    the time since it began.
    """
    watch = getattr(task, "watch", None)
    if watch is not None:
        with calling(f"task {task.name}: watch()"):
            watch(show)


def compares(task: Task) -> bool:
    """Return whether a score may depend on the other completions of its group.

    Then evaluations score whole groups, as large as in training, and a right answer that stands
    alone proves nothing.
    """
    return bool(getattr(task, "compares", False))


def credits_of(task: Task) -> Callable[[Problem, Sequence[str]], Credits]:
    """Return the function that tells how a reward was earned word by word, for --credit alignment.

    ``credits(problem, completions)`` returns for each completion a pair (end, amount) for each
    word (or other piece), in order. The amount is what the word that ends at character `end` adds
    to the reward, judged only by the text up to `end`. The rest of the reward (for what is missing
    at the end, and any constant) is credited at the end of the text.

    Raises UserError if the task has no credits. The function that is returned raises UserError if
    the task's raises an exception, changes the problem's data, or returns anything else.
    """
    credits = getattr(task, "credits", None)
    if credits is None:
        raise UserError(
            f"--credit alignment: task {task.name} does not say what each word of a completion "
            "earns; give --credit outcome"
        )

    def checked(problem: Problem, completions: Sequence[str]) -> Credits:
        where = f"task {task.name}, problem {problem.key}: credits()"
        with data_unchanged(where, [problem]), calling(where):
            given = list(credits(problem, list(completions)))
        if len(given) != len(completions):
            raise UserError(
                f"{where} returned {len(given)} lists for {len(completions)} completions; it must "
                "return one for each"
            )

        found = []
        known: dict[tuple[int, int], tuple[tuple[int, float], ...] | None] = {}
        for i, (pairs, text) in enumerate(zip(given, completions)):
            key = (id(pairs), len(text))  # many completions are the same
            if key not in known:
                with calling(where):
                    known[key] = _plain_pairs(pairs, len(text))
            if (plain := known[key]) is None:
                raise UserError(
                    f"{where} returned {shown(pairs)} for completion {i}; it must return pairs "
                    f"(end, amount) for its words, in order: whole numbers from 0 to {len(text)}, "
                    "the length of the text, and finite numbers"
                )
            found.append(plain)
        return found

    return checked


def _plain_pairs(pairs: Any, length: int) -> tuple[tuple[int, float], ...] | None:
    """Return the credits of a text of `length` characters in Python's numbers; None if they are
    anything but pairs (end, amount) in order.
    """
    if not isinstance(pairs, Iterable):
        return None
    pairs = [tuple(pair) if isinstance(pair, Iterable) else () for pair in pairs]
    if not pairs:
        return ()
    if any(len(pair) != 2 for pair in pairs):
        return None

    ends, amounts = zip(*pairs)
    if set(map(type, ends)) != {int}:
        ends = tuple(end.tolist() if hasattr(end, "tolist") else end for end in ends)
    if set(map(type, amounts)) != {float} or not math.isfinite(sum(amounts)):
        amounts = tuple(map(finite_number, amounts))

    are_ends = set(map(type, ends)) == {int} and ends[0] >= 0 and ends[-1] <= length
    if not are_ends or None in amounts or any(map(operator.gt, ends, ends[1:])):
        return None
    return tuple(zip(ends, amounts))


def declared_budget(task: Task, level: int) -> int:
    """Return the completion budget in tokens that the task declares for `level`; 0 if none.

    A task whose completions reason before a short answer needs more tokens than the answer has. The
    budget is never less than the target needs, and --max-new-tokens overrides it. Raises UserError
    unless it is a whole number >= 0.
    """
    with calling(f"task {task.name}: max_new_tokens({level})"):
        declared = getattr(task, "max_new_tokens", lambda level: 0)(level)
    if isinstance(declared, bool) or not isinstance(declared, numbers.Integral) or declared < 0:
        raise UserError(
            f"task {task.name}: max_new_tokens({level}) returned {declared!r}; it must be a number "
            "of tokens"
        )
    return int(declared)


def default_steps_of(task: Task, level: int) -> int:
    """Return how many steps train the embedded model at `level` if no number is asked for.

    Raises UserError unless it is a whole number from 1 up.
    """
    where = f"task {task.name}: default_steps({level})"
    with calling(where):
        steps = getattr(task, "default_steps", lambda level: STEPS)(level)
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
        raise UserError(f"{where} returned {shown(steps)}; it must be a whole number from 1 up")
    return int(steps)


def own_programs_of(task: Task) -> list[Path]:
    """Return the files of the user's own that a task executes, besides its own file.

    Raises UserError unless its `program` is a list of paths of files.
    """
    where = f"task {task.name}: program"
    given: Any = getattr(task, "program", ())
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(isinstance(file, str | os.PathLike) for file in given):
        raise UserError(f"{where} is {shown(given)}; it must be a list of paths")

    files = [Path(file) for file in given]
    for file in files:
        if kind_of(file) != "file":
            raise UserError(f"{where} names {file}; there is no such file")
    return files


def python_functions_of(task: Task) -> Mapping[str, Callable]:
    """Return the functions that a task was given in Python, by name; {} for most tasks.

    They are compared when a run is resumed, as the files of `program` are.
    """
    found: Mapping[str, Callable] = getattr(task, "python_functions", {})
    return found


def levels_of(task: Task, level: int) -> list[int]:
    """Return the levels on the way to `level`, the easiest first; [] if the task names none.

    A task names them if its levels are not simply 1, 2, 3 ..., because only the task knows which
    are easier.
    """
    with calling(f"task {task.name}: levels({level})"):
        levels = _listed(getattr(task, "levels", lambda level: ())(level))
    if not all(isinstance(each, int) for each in levels):
        raise UserError(
            f"task {task.name}: levels({level}) returned {levels!r}; it must return whole numbers"
        )
    return levels


def plain_texts_of(task: Task, split: str) -> list[str]:
    """Return plain running texts of `split` that the task draws on; [] if it has none.

    The pre-flight measures the model's perplexity on them, which is high for a language model that
    was converted wrongly.
    """
    where = f"task {task.name}: plain_texts()"
    with calling(where):
        found = _listed(getattr(task, "plain_texts", lambda split: ())(split))
    if not all(isinstance(text, str) for text in found):
        raise UserError(f"{where} returned {shown(found)}; it must return texts")
    return found


def problems_of(task: Task, split: str) -> list[Problem]:
    """Return all problems of `split` of a task that has a fixed set of them; [] for others.

    Training repeats such a set in epochs.
    """
    where = f"task {task.name}: problems()"
    with calling(where):
        found = _listed(getattr(task, "problems", lambda split: ())(split))
    for each in found:
        if not isinstance(each, Problem):
            raise UserError(f"{where} returned {shown(each)} among them; it must return Problems")
        check_problem(each, f"{where} returned a problem that")
    return found


def _listed(found: Iterable[Any]) -> list[Any]:
    """Return what a task returned as a list. Raises ValueError if it does not end."""
    listed = list(islice(found, MOST + 1))
    if len(listed) > MOST:
        raise ValueError(f"it returned more than {MOST:,}")
    return listed


def notes_of(task: Task) -> list[str]:
    """Return what the user should know about the task's problems before training."""
    notes = getattr(task, "notes", ())
    if isinstance(notes, str) or not isinstance(notes, Iterable):
        raise UserError(f"task {task.name}: notes is {shown(notes)}; it must be a list of texts")
    return [str(note) for note in notes]


def mistakes_of(task: Task) -> dict[str, str]:
    """Return what the labels `trap` and `reason` in the parts of the task's scores mean, in words,
    e.g. ``{"copies A": "only text A is copied"}``; {} if they speak for themselves.
    """
    return _texts_of(task, "mistakes", getattr(task, "mistakes", {}))


def answers_of(task: Task, problem: Problem, completions: Sequence[str]) -> list[str | None]:
    """Return the answer in each completion, for majority votes; None where there is none.

    By default it is the whole completion, without white space around it; an empty one holds none.

    Raises UserError if `answer` raises an exception, changes the problem's data, or returns
    anything else.
    """
    answer = getattr(task, "answer", None)
    if answer is None:
        return [completion.strip() or None for completion in completions]

    where = f"task {task.name}: answer()"
    with data_unchanged(where, [problem]), calling(where):
        answers = [answer(problem, completion) for completion in completions]
    for found in answers:
        if found is not None and not isinstance(found, str):
            raise UserError(f"{where} returned {shown(found)}; give a text or None")
    return answers


def sources_of(task: Task) -> dict[str, str]:
    """Return the fingerprints of the texts that the problems are drawn from, by name, e.g.
    ``{"tale-flood": "91c0..."}``; {} for a task whose problems come from its code alone.

    With other texts the same seed and index give another problem, so a resumed run compares them.
    """
    where = "sources()"
    with calling(f"task {task.name}: {where}"):
        found: Any = getattr(task, "sources", dict)()
    return _texts_of(task, where, found)


def _texts_of(task: Task, name: str, found: Any) -> dict[str, str]:
    """Return the mapping of texts to texts that a member of the task is."""
    if not maps_texts(found):
        raise UserError(f"task {task.name}: {name} is {shown(found)}; it must map texts to texts")
    return dict(found)


def summary_of(sources: Mapping[str, str]) -> str:
    """Return one line that stands for all of `sources`: "96 with fingerprint 91c0..."."""
    parts = [part for item in sorted(sources.items()) for part in item]
    return f"{len(sources)} with fingerprint {key_of(*parts)}"


def unseen_texts(task: Task, known: Collection[str]) -> Task:
    """Return `task` for evaluation on all texts that a model was neither trained nor chosen on.

    `known` are the fingerprints of the texts that its training drew from, in all splits. Only the
    test split of these is held out, but all of the other texts. A task that does not draw from
    texts is returned unchanged.
    """
    unseen = getattr(task, "unseen", None)
    if unseen is None:
        return task

    where = f"task {task.name}: unseen()"
    with calling(where):
        found: Any = unseen(known)
    if not is_task(found):
        raise UserError(f"{where} returned {shown(found)}; it must return a task")
    return found


def foreign_of(task: Task, level: int) -> Mapping[str, Task]:
    """Return `task` on each foreign kind of text, e.g. ``{"tables": task, ...}``.

    No training uses these kinds (tables, code, other alphabets): all of their problems are in the
    test split. Raises UserError if the task has none.
    """
    where = f"task {task.name}: foreign()"
    with calling(where):
        found: Any = getattr(task, "foreign", lambda level: {})(level)
    if not isinstance(found, Mapping) or not all(map(is_task, found.values())):
        raise UserError(f"{where} returned {shown(found)}; it must map names to tasks")
    if not found:
        raise UserError(f"--foreign: task {task.name} has no foreign kinds of text; leave it out")
    return found
