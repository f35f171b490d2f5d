"""The task of a user's data: each row is a problem, and reward functions score completions.

A row needs a prompt, which is a text (`prompt`) or a conversation (`messages`, a list of ``{"role",
"content"}`` whose last turn is the user's). `answer` and all other columns are passed to the reward
functions. Three optional columns have a meaning: `split` ("train", "validation" or "test"),
`level`, a whole number, and `target`, a text that earns the highest reward, which the reward
functions get, too. Without `split`, a hash of the prompt decides the split: 80 %, 10 % and 10 %. Of
rows whose prompts differ only in case, white space and Unicode form, the first is used.

    def reward(prompt, completion, answer, **row):
        return {"correct": float(completion.endswith(answer)), "format": 0.2}

A function may have the parameters `prompt` and `completion`, and any column of the row. With
``**row`` it gets all other columns. It returns a number, or a mapping of components to numbers,
whose sum is the reward. It abstains by None; if all functions do, the completion gets the mean of
the others of its group, so its advantage is 0. A function with a parameter `completions` gets lists
instead, one entry for each completion of the group, and returns a list (the convention of TRL). Of
a row whose prompt is a conversation, it gets the `prompts` and `completions` as lists of turns, as
in TRL.
"""

import asyncio
import copy
import inspect
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo.align.needleman import normalise
from grpo.data.errors import UserError, shown
from grpo.data.rows import MOST, Row, read_rows
from grpo.tasks.base import (
    ABSTAINED,
    COMPONENT,
    LARGEST,
    ROUNDING,
    SPLITS,
    Problem,
    Range,
    Score,
    as_range,
    check_problem,
    finite_number,
    key_of,
    raised,
    split_of_key,
)
from grpo.tasks.registry import load_function

ROLES = ("system", "user", "assistant")
# How a conversation begins that was written into a text, as JSON or by Python's `str`.
AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")

# What reward functions are given besides the columns of the row.
GIVEN = ("prompt", "prompts", "completion", "completions")

# The completion budget in tokens, as completions may reason before they answer.
BUDGET = 256

# The most seconds that a call of a reward function may take by default, and how many calls run side
# by side.
TIMEOUT = 60.0
WORKERS = 32

# The --reward-range of rewards whose ends are not known.
UNKNOWN = "unknown"

# Keywords of `Rows` that say how rows are read and rewarded.
ROW_OPTIONS = ("columns", "reward_range", "reward_timeout")

Group = tuple[Problem, Sequence[str]]


def as_flags(columns: Any = "", reward_range: Any = (0.0, 1.0), **_: Any) -> dict[str, str]:
    """Return what decides the rewards as task options, so that a command line can name them.

    >>> as_flags({"answer": "solution"}, (0, 1.2))
    {'columns': 'answer=solution', 'reward-range': '0,1.2'}
    """
    names = _columns(columns)
    flags = {"columns": ",".join(f"{name}={column}" for name, column in names.items())}
    ends = [repr(end).removesuffix(".0") for end in _range(reward_range) or ()]
    flags["reward-range"] = ",".join(ends) or UNKNOWN
    return {name: text for name, text in flags.items() if text}


class Rows:
    """Problems from rows, scored by reward functions.

    - `data`: anything that `grpo.data.rows.read_rows` takes;
    - `reward_file`: a function, named as ``path/to/file.py:name``; or `reward_functions`;
    - `columns`: what the columns are called: ``{"prompt": "question"}`` or "prompt=question";
    - `reward_range`: the lowest and the highest reward, e.g. ``(0, 1.2)`` or "0,1.2"; a completion
      that earns the highest is right. If they are not known, None or "unknown": no completion is
      right, and its value is (1 + r / (1 + abs(r))) / 2, which rises with the reward r;
    - `reward_timeout`: the most seconds that a call of a reward function may take.
    """

    name = "data"
    rewards: tuple[str, ...] = ()
    default_level = 1
    reads_reasoning = True
    options = {
        "data": "your problems: a .jsonl or .parquet file, or a dataset of the hub, "
        "NAME[:CONFIG[:SPLIT]]",
        "reward-file": "your reward function, path/to/file.py:function",
        "columns": "what your columns are called, e.g. prompt=question,answer=solution",
        "reward-range": "the lowest and the highest reward, e.g. 0,1.2, or unknown (default: 0,1)",
        "reward-timeout": "the most seconds that a call of the reward function may take "
        f"(default: {TIMEOUT:g})",
    }

    def __init__(
        self,
        data: Any = None,
        reward_file: str | None = None,
        reward_functions: Sequence[Callable] = (),
        columns: str | Mapping[str, str] = "",
        reward_range: str | Sequence[float] | None = (0.0, 1.0),
        reward_timeout: str | float = TIMEOUT,
    ):
        if data is None or (reward_file is None and not reward_functions):
            raise UserError(
                "--task data: give --data FILE and --reward-file path/to/file.py:name; a run whose "
                "rows or reward were given in Python continues with train(..., resume=...)"
            )

        self.from_python = reward_file is None or not isinstance(data, str | Path)
        functions = [load_function(reward_file)] if reward_file else reward_functions
        self.functions = [_Function(function) for function in functions]
        self.reward_range, self.timeout = _range(reward_range), _seconds(reward_timeout)
        self.has_judged = False  # any completion
        self.compares = any(function.takes_group for function in self.functions)
        self.python_functions = (
            {} if reward_file else {each.name: each.function for each in self.functions}
        )

        columns = _columns(columns)
        rows = read_rows(data)
        problems = [_problem(row, columns, self.name) for row in rows]
        for problem in problems:
            for function in self.functions:
                function.check(problem.data["row"], problem.data["where"])
        self._by_split, self.notes = _divided(problems)
        source = data if isinstance(data, str | Path) else f"data ({type(data).__name__})"
        sizes = ", ".join(f"{len(part):,} {split}" for split, part in self._by_split.items())
        self.description = f"{source}: {len(rows):,} rows ({sizes}) of {', '.join(rows[0][1])}"
        self.notes += _left_out(data, rows, columns)

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a random row of the level and the split."""
        problems = [one for one in self._by_split[split] if one.level == level]
        if not problems:
            raise UserError(
                f"--data: no row of the {split} split has level {level}; give a column split"
            )
        return rng.choice(problems)

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        return self.score_groups([(problem, completions)])[0]

    def score_groups(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Return the scores of several groups: problems, each with its completions.

        The calls run side by side, in threads. Results are put in the order of the completions, so
        they do not depend on timing. If a call fails or takes too long, the others are abandoned.
        """
        most = sum(len(completions) for _, completions in groups) * len(self.functions)
        with ThreadPool(max(1, min(WORKERS, most))) as pool:
            calls = [[each.calls(pool, *group) for each in self.functions] for group in groups]
            scores = [
                self._scores(problem, of_group) for (problem, _), of_group in zip(groups, calls)
            ]
        self.has_judged |= any(not score.abstained for group in scores for score in group)
        if not self.has_judged and any(scores):
            raise UserError(
                f"reward {self.functions[0].name}, {groups[0][0].title}: returned None for every "
                "completion so far; it must return a number"
            )
        return scores

    def _scores(self, problem: Problem, calls: list[list["_Call"]]) -> list[Score]:
        columns = [[one for call in some for one in call.results(self.timeout)] for some in calls]
        scores = [
            self._score(results, f"{problem.title}, completion {number}")
            for number, results in enumerate(zip(*columns, strict=True), start=1)
        ]
        # The mean of the others leaves the baseline as it is, and makes the advantage 0.
        judged = [score.reward for score in scores if not score.abstained]
        mean = fmean(judged or self.reward_range or [0.0])
        return [self._made(mean, one.parts) if one.abstained else one for one in scores]

    def _score(self, results: Sequence[Any], place: str) -> Score:
        """Return the score of a completion: the sum of its components."""
        components: dict[str, float | None] = {}
        for function, result in zip(self.functions, results, strict=True):
            named = _components(result, function.name, f"reward {function.name}, {place}")
            if shared := named.keys() & components.keys():
                raise UserError(
                    f"reward {function.name}, {place}: two functions have a component "
                    f"{min(shared)!r}; let one return it by another name"
                )
            components |= named

        given = [value for value in components.values() if value is not None]
        # The plain number of a single function is the reward itself, and no part of it.
        is_plain = len(results) == 1 and not isinstance(results[0], Mapping)
        named = {f"{COMPONENT}{name}": value for name, value in components.items()}
        parts = ({} if is_plain else named) | ({} if given else {"reason": ABSTAINED})
        return self._made(math.fsum(given), parts)

    def _made(self, reward: float, parts: Mapping[str, Any]) -> Score:
        if self.reward_range is None:
            return Score(reward, parts, value=(1 + reward / (1 + abs(reward))) / 2)
        low, high = self.reward_range
        return Score(reward, parts, exact=reward >= high - ROUNDING * (high - low))

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of a split, which training repeats in epochs."""
        return list(self._by_split[split])

    def family_size(self, level: int) -> int:
        """Return the number of problems of a level, in all splits."""
        return sum(one.level == level for part in self._by_split.values() for one in part)

    def max_new_tokens(self, level: int) -> int:
        """Return the completion budget, unless --max-new-tokens gives one."""
        return BUDGET

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(problem.prompt, problem.data.get("messages"))

    def sources(self) -> dict[str, str]:
        """Return a fingerprint of the rows of each split."""
        return {
            f"data-{split}": key_of(*(json.dumps(asdict(one), sort_keys=True) for one in part))
            for split, part in self._by_split.items()
            if part
        }


# ---- rows


def _problem(row: Row, names: Mapping[str, str], task: str) -> Problem:
    where, given = row
    columns = _renamed(given, names, where)
    prompt, messages = _prompt_of(columns, where)
    if taken := [name for name in GIVEN if name in columns]:
        raise UserError(
            f"{where}: column {taken[0]!r} has the name of what reward functions get besides; "
            f"rename it, e.g. a right answer by --columns target={taken[0]}"
        )

    level = columns.pop("level", None)
    level = 1 if level is None else level
    # In a data frame that lacks some levels, 2 is 2.0.
    if isinstance(level, bool) or not isinstance(level, int | float) or level < 1 or level % 1:
        raise UserError(
            f"{where}: level is {shown(level)}; give a whole number from 1, or rename the column "
            "if it is no difficulty: --columns my_level=NAME"
        )
    split = columns.pop("split", None)
    if split is not None and split not in SPLITS:
        raise UserError(
            f"{where}: split is {shown(split)}; give one of {', '.join(SPLITS)}, or rename the "
            "column to split by a hash of the prompt: --columns my_split=NAME"
        )

    data = {"where": where, "row": columns, "messages": messages, "split": split}
    data = {name: value for name, value in data.items() if value or name == "row"}

    # The key is computed last, because it takes texts that have been checked.
    target = columns.get("target")
    target = target if isinstance(target, str) else ""  # a number, e.g. of countdown, is no answer
    problem = Problem(task, int(level), prompt, target, "unchecked", data)
    check_problem(problem, where)
    return replace(problem, key=_key(prompt, messages))


def _renamed(given: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    for name, column in names.items():
        if column not in given:
            there = ", ".join(given)
            raise UserError(f"--columns {name}={column}: {where} has no column {column!r}: {there}")

    others = {name: value for name, value in given.items() if name not in names.values()}
    return others | {name: given[column] for name, column in names.items()}


def _prompt_of(columns: dict[str, Any], where: str) -> tuple[str, list[dict[str, str]]]:
    """Remove the prompt from the `columns`; return the user's last turn, and the conversation.

    The conversation is [] if the prompt is a plain text.
    """
    given, name = columns.pop("prompt", None), "prompt"
    if given is None:
        given, name = columns.pop("messages", None), "messages"
    if isinstance(given, str) and AS_TEXT.match(given):
        raise UserError(
            f"{where}: {name} is a conversation stored as text; give a list of turns (json.loads)"
        )
    if given and isinstance(given, str) and name == "prompt":
        return given, []
    if not isinstance(given, list) or not given:
        raise UserError(
            f"{where}: has no prompt; it needs a column prompt (a text) or messages (a list of "
            'turns {"role", "content"}); --columns prompt=NAME names another column of '
            f"{', '.join(columns)}"
        )

    for turn in given:
        is_turn = isinstance(turn, Mapping) and turn.get("role") in ROLES
        if not is_turn or not isinstance(turn.get("content"), str) or turn.get("tool_calls"):
            raise UserError(
                f"{where}: a turn is {shown(turn)}; give a role of {', '.join(ROLES)}, and content "
                "that is a text; tool_calls are not supported"
            )
    if given[-1]["role"] != "user":
        raise UserError(f"{where}: the last turn must be the user's, and the model answers it")

    messages = [{"role": turn["role"], "content": turn["content"]} for turn in given]
    return messages[-1]["content"], messages


def _key(prompt: str, messages: Any) -> str:
    turns = [turn["content"] for turn in messages] if messages else [prompt]
    # Normalised again, because folding decomposes some letters: of "ΐ", but not of its capital.
    folded = (normalise(normalise(turn).casefold()) for turn in turns)
    return key_of("data", *(" ".join(turn.split()) for turn in folded))


def _divided(problems: Sequence[Problem]) -> tuple[dict[str, list[Problem]], list[str]]:
    """Return the different problems of each split, and what the user should know about them."""
    different: dict[str, Problem] = {}
    for problem in problems:
        different.setdefault(problem.key, problem)

    by_split: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    for problem in different.values():
        by_split[problem.data.get("split") or split_of_key(problem.key)].append(problem)
    repeated = len(problems) - len(different)
    notes = [f"--data: {repeated:,} of {len(problems):,} rows repeat the prompt of another"]
    return by_split, notes if repeated else []


def _left_out(data: Any, rows: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    notes = [
        f"--columns {name}={column}: it replaces the column {name} of the rows, which is not used; "
        f"to keep that too, name it: --columns old_{name}={name}"
        for name, column in names.items()
        if name not in names.values() and any(name in row for _, row in rows)
    ]
    if len(rows) == MOST and not isinstance(data, str | Path | Sized):
        notes.append(
            f"--data: the first {MOST:,} rows are used, because {type(data).__name__} does not say "
            "how many there are; for more give a list"
        )
    return notes


def _columns(given: str | Mapping[str, str]) -> dict[str, str]:
    """Return the mapping of --columns, e.g. of "prompt=question,answer=solution"."""
    if isinstance(given, Mapping):
        return dict(given)
    parts = [part.partition("=") for part in str(given or "").split(",") if part.strip()]
    names = {name.strip(): column.strip() for name, _, column in parts}
    if len(names) < len(parts) or not all(name and column for name, column in names.items()):
        raise UserError(f"--columns {given}: give name=value,name=value, each name once")
    return names


def _range(given: str | Iterable[float] | None) -> Range | None:
    """Return the lowest and the highest reward, e.g. (0.0, 1.2) of "0,1.2"; None if unknown."""
    if given is None or given == UNKNOWN:
        return None
    limits = as_range(given.split(",") if isinstance(given, str) else given)
    if limits is None:
        raise UserError(
            f"--reward-range {given}: give the lowest and the highest reward as 0,1.2, or {UNKNOWN}"
        )
    return limits


def _seconds(given: str | float) -> float:
    with suppress(TypeError, ValueError):
        if 0 < float(given) < math.inf:
            return float(given)
    raise UserError(f"--reward-timeout {given}: give a number of seconds")


# ---- reward functions


def _components(result: Any, name: str, whose: str) -> dict[str, float | None]:
    """Return the components that the function `name` returned, or its number under its name."""
    if result is None:
        return {name: None}
    is_named = isinstance(result, Mapping)
    components: dict[str, float | None] = {}
    for key, value in result.items() if is_named else [(name, result)]:
        number = finite_number(value)
        if number is None or abs(number) > LARGEST or not str(key).isprintable():
            raise UserError(
                f"{whose}: returned {shown({key: value} if is_named else value)}; it must return a "
                "finite number, a mapping of components to finite numbers, or None to abstain"
            )
        components[str(key)] = number
    if not components:
        raise UserError(f"{whose}: returned no component")
    return components


class _Function:
    """A reward function that takes all columns, or those that it names."""

    def __init__(self, function: Callable):
        if not callable(function):
            raise UserError(f"reward {function!r}: give a function")
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

        try:
            found = inspect.signature(function).parameters.values()
        except ValueError as error:  # some built-in functions do not say what they take
            raise UserError(f"reward {self.name}: {error}; wrap it in a function") from error
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in found)
        self.parameters = {  # and whether it needs each
            one.name: one.default is one.empty
            for one in found
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        }
        self.takes_group = "completions" in self.parameters

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if the function has a parameter that the `row` lacks."""
        own = ("prompts", "completions") if self.takes_group else ("prompt", "completion")
        if own[1] not in self.parameters and not self.takes_all:
            raise UserError(f"reward {self.name}: has no parameter completion, or completions")
        for name, is_needed in self.parameters.items():
            if is_needed and name not in row and name not in own:
                raise UserError(
                    f"reward {self.name}: wants {name!r}, and {where} has only "
                    f"{', '.join([*own, *row])}; add it, e.g. by --columns {name}=COLUMN"
                )

    def calls(
        self, pool: ThreadPool, problem: Problem, completions: Sequence[str]
    ) -> list["_Call"]:
        """Start the calls for a group: one, or one for each completion."""
        whose = f"reward {self.name}, {problem.title}"

        # Each completion has copies, so that a function that changes a list changes no other call.
        rows = [copy.deepcopy(problem.data["row"]) for _ in completions]
        if self.takes_group:
            lists = {name: [row[name] for row in rows] for name in problem.data["row"]}
            lists |= {"prompts": [problem.prompt] * len(rows), "completions": list(completions)}
            if messages := problem.data.get("messages"):
                lists["prompts"] = [copy.deepcopy(messages) for _ in rows]
                lists["completions"] = [
                    [{"role": "assistant", "content": completion}] for completion in completions
                ]
            return [_Call(pool, self, lists, f"{whose}, {len(rows)} completions")]

        own = [{"prompt": problem.prompt, "completion": completion} for completion in completions]
        return [
            _Call(pool, self, row | each, f"{whose}, completion {n}")
            for n, (row, each) in enumerate(zip(rows, own), start=1)
        ]


class _Call:
    """A call of a function, in a thread of the `pool`. Messages begin with `whose`."""

    def __init__(self, pool: ThreadPool, function: _Function, columns: dict[str, Any], whose: str):
        self.function, self.whose = function, whose
        self.size = len(columns["completions"]) if function.takes_group else None
        if not function.takes_all:
            columns = {name: columns[name] for name in function.parameters if name in columns}
        self.columns = columns
        self.began = math.inf  # while it waits for a free thread
        self.result: AsyncResult = pool.apply_async(self._run)

    def _run(self) -> Any:
        """Call the function. A coroutine runs in an event loop of its own."""
        self.began, process = time.monotonic(), os.getpid()
        try:
            result = self.function.function(**self.columns)
            return asyncio.run(result) if inspect.iscoroutine(result) else result
        except BaseException as error:  # even KeyboardInterrupt, which would end the thread
            if os.getpid() != process:  # in a child that the function forked, which ends here
                os._exit(0 if isinstance(error, SystemExit) and not error.code else 1)
            raise raised(self.whose, error) from error

    def results(self, timeout: float) -> list[Any]:
        """Return the result of each completion, up to `timeout` seconds after the call began."""
        while not self.result.ready():
            if time.monotonic() >= self.began + timeout:
                raise UserError(f"{self.whose}: took more than {timeout:g} s (--reward-timeout)")
            self.result.wait(0.05)
        result = self.result.get()
        if self.size is None:
            return [result]

        found = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(found, list | tuple) or len(found) != self.size:
            raise UserError(
                f"{self.whose}: returned {shown(found)}; it must return a list, a result for each"
            )
        return list(found)
