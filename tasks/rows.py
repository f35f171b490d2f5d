"""The task of a user's data: each row is a problem, and a reward function scores completions.

A row needs a prompt, which is a text (`prompt`) or a conversation (`messages`, a list of ``{"role",
"content"}`` whose last turn is the user's). `answer` and all other columns are passed to the reward
function. Two optional columns have a meaning: `split` ("train", "validation" or "test") and
`level`, a whole number. Without `split`, a hash of the prompt decides the split: 80 %, 10 % and
10 %. Of rows whose prompts differ only in case, white space and Unicode form, the first is used.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from align.words import normalise
from data.errors import UserError
from data.rows import Row, read_rows
from data.text import shortened, shown
from tasks.base import SPLITS, Problem, Score, check_problem, key_of, split_of_key
from tasks.rewards import OF_GROUP, OF_ONE, TIMEOUT, WORKERS, RewardFunctions
from tasks.user_code import load_function

ROLES = ("system", "user", "assistant")

# A list of turns that is a text, as JSON or Python writes it; turns have two fields (two schemes).
TURNS = re.compile(
    r"""\s*\[\s*\{(?=.*["'](role|from)["']\s*:)(?=.*["'](content|value)["']\s*:).*\}\s*\]\s*""",
    re.DOTALL,
)

# The completion budget in tokens. Completions may reason before they answer, so it does not follow
# from the length of the answer.
BUDGET = 256


@dataclass(frozen=True)
class RowOptions:
    """How rows are read and rewarded: texts, as on the command line, or Python values.

    E.g. ``RowOptions(columns={"prompt": "question"}, reward_range="0,1.2")``.

    - `columns`: what the columns are called: ``{"prompt": "question"}``, or
      "prompt=question,answer=solution";
    - the others: see `tasks.rewards.RewardFunctions`.
    """

    columns: str | Mapping[str, str] = ""
    reward_range: str | Sequence[float] = (0.0, 1.0)
    reward_weights: str | Mapping[str, float] = ""
    reward_timeout: str | float = TIMEOUT
    reward_workers: str | int = WORKERS

    def as_flags(self) -> dict[str, str]:
        """Return what decides the rewards as task options, without those that are empty.

        >>> RowOptions({"answer": "solution"}, (0, 1.2)).as_flags()
        {'columns': 'answer=solution', 'reward-range': '0,1.2'}
        """
        columns = _pairs(self.columns, "--columns")
        flags = {
            "columns": ",".join(f"{name}={column}" for name, column in columns.items()),
            "reward-range": ",".join(map(_written, _range(self.reward_range))),
            "reward-weights": ",".join(f"{k}={_written(v)}" for k, v in self.weights().items()),
        }
        return {name: text for name, text in flags.items() if text}

    def weights(self) -> dict[str, float]:
        """Return the weight of each component that has one."""
        weights = _pairs(self.reward_weights, "--reward-weights")
        return {name: _number(value, "--reward-weights") for name, value in weights.items()}


class Rows:
    """Problems from rows, scored by reward functions.

    - `data`: anything that `data.rows.read_rows` takes;
    - `reward_file`: a function, named as ``path/to/file.py:name``; or `reward_functions`;
    - `given`: the fields of `RowOptions`.
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
        "reward-range": "the lowest and the highest reward, e.g. 0,1.2 (default: 0,1)",
        "reward-weights": "weights of the reward's components, e.g. correct=1,format=0.2 "
        "(default: 1 each)",
        "reward-timeout": "the most seconds that a call of the reward function may take "
        f"(default: {TIMEOUT:g})",
        "reward-workers": "how many calls of the reward function run side by side, in threads "
        f"(default: {WORKERS})",
    }

    def __init__(
        self,
        data: Any = None,
        reward_file: str | None = None,
        reward_functions: Sequence[Callable] = (),
        **given: Any,
    ):
        options = RowOptions(**given)
        if data is None:
            raise UserError(
                "--task data: give your problems by --data FILE; a run whose rows were given in "
                "Python continues with train(rows, reward, resume=...)"
            )
        if reward_file is None and not reward_functions:
            raise UserError(
                "--data: give a reward function by --reward-file path/to/file.py:name; a run whose "
                "reward was given as a Python function continues with train(..., resume=...)"
            )

        self.program = [Path(reward_file.rpartition(":")[0])] if reward_file else []
        self.from_python = reward_file is None or not isinstance(data, str | Path)
        functions = [load_function(reward_file)] if reward_file else list(reward_functions)
        self.reward_range = _range(options.reward_range)
        self.functions = RewardFunctions(
            functions,
            weights=options.weights(),
            reward_range=self.reward_range,
            timeout=_number(options.reward_timeout, "--reward-timeout", above=0),
            workers=math.ceil(_number(options.reward_workers, "--reward-workers", above=0)),
        )
        self.compares = bool(self.functions.of_groups)
        self.python_functions = (
            {} if reward_file else {f.name: f.function for f in self.functions.functions}
        )

        names = _pairs(options.columns, "--columns")
        given_rows = read_rows(data)
        problems = [_problem(row, names, self.name) for row in given_rows]
        for problem in problems:
            self.functions.check(problem.data["row"], problem.data["where"])
        self._by_split, self.notes = _divided(problems)
        self.notes += self._unread(problems, given_rows, names)
        if self.compares:
            self.notes.append(
                f"reward {', '.join(self.functions.of_groups)}: takes completions and may compare "
                "them, so evaluations sample a whole group for each problem; if it scores each by "
                "itself, give it the parameter completion"
            )

    def _unread(
        self, problems: Sequence[Problem], rows: Sequence[Row], names: Mapping[str, str]
    ) -> list[str]:
        """Return notes of the columns that nothing reads."""
        notes = [
            f"--data: column {name} is not read; --columns {name}={column} replaces it"
            for name, column in names.items()
            if name not in names.values() and any(name in row for _, row in rows)
        ]
        columns = dict.fromkeys(name for one in problems for name in one.data["row"])
        unread = [name for name in columns if not self.functions.reads(name)]
        if unread:
            what = "columns" if len(unread) > 1 else "column"
            note = f"--data: no reward reads {what} {shortened(', '.join(unread), 200)}"
            if taken := [name for name in unread if name in (*OF_ONE, *OF_GROUP)]:
                note += f"; {taken[0]} is what was sampled, so give --columns NAME={taken[0]}"
            notes.append(note)
        return notes

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a random row of the split."""
        problems = [one for one in self._by_split[split] if one.level == level]
        if not problems:
            raise UserError(
                f"--data: no row of the {split} split has level {level}; give more rows, or a "
                "column split with train, validation and test"
            )
        return rng.choice(problems)

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        return self.score_groups([(problem, completions)])[0]

    def score_groups(self, groups: Sequence[tuple[Problem, Sequence[str]]]) -> list[list[Score]]:
        """Return the scores of several groups, whose completions are scored concurrently."""
        return self.functions.scores(groups)

    def watch(self, show: Callable[[int, int, float], None]) -> None:
        """Let `show` be told how many calls are done, of how many, and since how many seconds."""
        self.functions.watcher = show

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of a split, which training repeats in epochs."""
        return list(self._by_split[split])

    def family_size(self, level: int) -> int:
        """Return the number of problems of a level, in all splits."""
        return sum(one.level == level for part in self._by_split.values() for one in part)

    def levels(self, level: int) -> list[int]:
        """Return the levels of the data up to `level`."""
        found = {one.level for part in self._by_split.values() for one in part}
        return sorted(each for each in found if each <= level)

    def max_new_tokens(self, level: int) -> int:
        """Return the completion budget, unless --max-new-tokens gives one."""
        return BUDGET

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(problem.prompt, problem.data.get("messages"))

    def sources(self) -> dict[str, str]:
        """Return a fingerprint of the rows of each split."""
        return {
            f"data-{split}": key_of(*(json.dumps(one.to_json(), sort_keys=True) for one in part))
            for split, part in self._by_split.items()
            if part
        }


def _problem(row: Row, names: Mapping[str, str], task: str) -> Problem:
    """Return the problem of a row. Raises UserError, which names the row, if it is none."""
    where, given = row
    columns = _renamed(given, names, where)
    prompt, messages = _prompt_of(columns, where)

    level = _level(columns.pop("level", None), names, where)
    split = columns.pop("split", None)
    if split is not None and split not in SPLITS:
        raise UserError(
            f"{where}: split is {shown(split)}; give one of {', '.join(SPLITS)}, or rename the "
            f"column to split by a hash of the prompt: {_aside('split', names)}"
        )

    data: dict[str, Any] = {"where": where, "row": columns}
    if messages:
        data["messages"] = messages
    if split:
        data["split"] = split

    # The key is computed last, because it takes texts that have been checked.
    problem = Problem(task, level, prompt, "", "unchecked", data)
    check_problem(problem, where)
    return replace(problem, key=_key(prompt, messages))


def _level(given: Any, names: Mapping[str, str], where: str) -> int:
    """Return the level of a row, 1 if it has none. A data frame has 2.0 for 2 if some are missing.

    Raises UserError for anything but a whole number from 1.
    """
    if given is None:
        return 1
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise UserError(
            f"{where}: level is {shown(given)}; give a whole number from 1, or rename the column "
            f"if it is no difficulty: {_aside('level', names)}"
        )
    return given


def _aside(name: str, names: Mapping[str, str]) -> str:
    """Return the flag that takes its meaning from the column `name`."""
    return f"--columns my_{name}={names.get(name, name)}"


def _renamed(given: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the columns under the names that `names` gives them."""
    for name, column in names.items():
        if column not in given:
            raise UserError(
                f"--columns {name}={column}: {where} has no column {column!r}; it has "
                f"{', '.join(given)}"
            )

    renamed = set(names.values())
    others = {name: value for name, value in given.items() if name not in renamed}
    return others | {name: given[column] for name, column in names.items()}


def _prompt_of(columns: dict[str, Any], where: str) -> tuple[str, list[dict[str, str]]]:
    """Remove the prompt from the `columns`; return the user's last turn, and the conversation.

    The conversation is [] if the prompt is a plain text or a single turn.
    """
    name, given = "prompt", columns.pop("prompt", None)
    if given is None:
        name, given = "messages", columns.pop("messages", None)

    if isinstance(given, str) and TURNS.fullmatch(given):
        raise UserError(
            f"{where}: {name} is a conversation written as a text; make it a list of turns, e.g. "
            "by json.loads or ast.literal_eval (or the content of a turn, if the model should "
            "read it as it is)"
        )
    if isinstance(given, str) and given and name == "prompt":
        return given, []
    if not isinstance(given, list) or not given:
        wrong = "has no prompt" if given is None else f"{name} is {shown(given)}"
        raise UserError(
            f"{where}: {wrong}; it needs a column prompt (a text) or messages (a list of turns "
            '{"role", "content"}); --columns prompt=NAME names another column'
            f"{' of ' + ', '.join(columns) if columns else ''}"
        )

    for turn in given:
        is_turn = isinstance(turn, Mapping) and turn.get("role") in ROLES
        if not is_turn or not isinstance(turn.get("content"), str):
            raise UserError(
                f"{where}: a turn is {turn!r}; it must have a role ({', '.join(ROLES)}) and a "
                "text as content"
            )
        if turn.get("tool_calls"):
            raise UserError(
                f"{where}: a turn has tool_calls, which are not shown to the model; write them "
                "into its content"
            )
    if given[-1]["role"] != "user":
        raise UserError(f"{where}: the last turn must be the user's, and the model answers it")

    messages = [{"role": turn["role"], "content": turn["content"]} for turn in given]
    return messages[-1]["content"], messages if len(messages) > 1 else []


def _key(prompt: str, messages: Any) -> str:
    turns = [turn["content"] for turn in messages] if messages else [prompt]
    return key_of("data", *(" ".join(normalise(turn).casefold().split()) for turn in turns))


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


def _pairs(given: str | Mapping[str, Any], flag: str) -> dict[str, Any]:
    """Return the mapping of "name=value,name=value".

    >>> _pairs("prompt=question,answer=solution", "--columns")
    {'prompt': 'question', 'answer': 'solution'}
    """
    if isinstance(given, Mapping):
        for part in (each for pair in given.items() for each in pair if isinstance(each, str)):
            if "," in part or "=" in part or part != part.strip():
                raise UserError(
                    f"{flag}: {shown(part)}: a name with a comma, an equals sign or blanks around "
                    "it cannot be written down; rename it"
                )
        return dict(given)
    if not isinstance(given, str):
        raise UserError(f"{flag} {shown(given)}: give a mapping, or name=value,name=value")

    pairs = {}
    for part in given.split(","):
        if not part.strip():
            continue
        name, equals, value = part.strip().partition("=")
        if not (name and equals and value):
            raise UserError(f"{flag} {given}: give name=value,name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def _written(number: float) -> str:
    """Return `number` as a text that reads as the same number.

    >>> _written(1.0), _written(1 / 3)
    ('1', '0.3333333333333333')
    """
    return repr(number).removesuffix(".0")


def _range(given: str | Iterable[float]) -> tuple[float, float]:
    """Return the lowest and the highest reward, e.g. (0.0, 1.2) of "0,1.2"."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    parts = list(given) if is_list else str(given).split(",")
    if len(parts) != 2:
        raise UserError(f"--reward-range {given}: give the lowest and the highest reward, e.g. 0,1")
    low, high = (_number(part, "--reward-range") for part in parts)
    if not low < high:
        raise UserError(f"--reward-range {given}: the first must be below the second")
    return low, high


def _number(given: Any, flag: str, above: float = float("-inf")) -> float:
    """Return a finite number above `above`. Raises UserError, which names the `flag`, if not."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not above < number < float("inf"):
        raise UserError(f"{flag} {given}: give a finite number{' above 0' if above == 0 else ''}")
    return number
