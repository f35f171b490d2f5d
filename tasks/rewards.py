"""A user's reward functions: how they are checked, called, limited in time, and made into scores.

    def reward(prompt, completion, answer, **row):
        return {"correct": float(completion.endswith(answer)), "format": 0.2}

A function may have the parameters `prompt` and `completion`, and any column of the row (`answer`
...). With ``**row`` it gets all other columns. It returns a number, or a mapping of components to
numbers, whose weighted sum is the reward. A function with a parameter `completions` gets lists
instead, one entry for each completion of the group, and returns a list (the convention of TRL).
Functions may be coroutines (``async def``), e.g. for a judge behind a server.

The calls of a batch run side by side, in threads, in processes, or in one event loop
(`tasks.reward_calls`). Results are put in the order of the completions, so they do not depend on
timing.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from data.errors import UserError
from data.text import shortened
from tasks.protocol import COMPONENT, Problem, Score
from tasks.reward_calls import Bound, Call, Calls, Progress, Show

# Because of rounding, a sum of components may be this far below the highest reward.
ROUNDING = 1e-9

# Parameters that are not columns of a row.
OF_ONE = ("prompt", "completion")
OF_GROUP = ("prompts", "completions")


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are computed.

    - `weights`: the weight of each component, by default 1;
    - `highest`: the highest reward; a completion that earns it is right;
    - `timeout`: the most seconds that one call may take;
    - `workers`: how many calls run side by side;
    - `program`: the function as ``path/to/file.py:name``, if calls run in processes, which load it
      themselves; None if they run in threads.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    highest: float = 1.0
    timeout: float = 60.0
    workers: int = 32
    program: str | None = None


class RewardFunctions:
    """One or more reward functions, whose components are added up."""

    def __init__(self, functions: Sequence[Callable], settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings()
        self.functions = [_Function(function) for function in functions]
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise UserError(f"reward functions {', '.join(names)}: each needs a name of its own")
        self.watcher: Show | None = None  # is told how many calls are done, while they run
        self._calls = Calls(self.settings.workers, self.settings.timeout, self.settings.program)
        weakref.finalize(self, self._calls.close)

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if a function has a parameter that the `row` lacks."""
        for function in self.functions:
            function.check(row, where)

    def scores(self, groups: Sequence[tuple[Problem, Sequence[str]]]) -> list[list[Score]]:
        """Return the score of each completion of each group, all computed concurrently.

        A group is a problem, whose `data` has the columns of its row, and its completions. Raises
        UserError, which names the row and the completion, if a call fails, takes too long, or
        returns anything but finite numbers.
        """
        started = [
            [(function, self._start(function, group)) for function in self.functions]
            for group in groups
        ]
        every = list(chain.from_iterable(calls for group in started for _, calls in group))
        with Progress(every, self.watcher) as progress:
            return [
                self._finish_group(group, calls, progress)
                for group, calls in zip(groups, started, strict=True)
            ]

    def _finish_group(
        self,
        group: tuple[Problem, Sequence[str]],
        started: Sequence[tuple["_Function", Sequence[Call]]],
        progress: Progress,
    ) -> list[Score]:
        """Return the score of each completion of a group, whose calls have started."""
        _, completions = group
        components: list[dict[str, float]] = [{} for _ in completions]  # of all functions so far
        for function, calls in started:
            more = self._finish(function, group, calls, progress)
            for of_completion, others in zip(components, more, strict=True):
                for name in others.keys() & of_completion.keys():
                    raise UserError(
                        f"reward {function.name}: another function has a component {name!r} too; "
                        "give it another name"
                    )
                of_completion |= others
        return [self._score(of_completion) for of_completion in components]

    def _start(self, function: "_Function", group: tuple[Problem, Sequence[str]]) -> list[Call]:
        problem, completions = group
        calls = function.calls(problem, completions)
        return [self._calls.start(call) for call in calls]

    def _finish(
        self,
        function: "_Function",
        group: tuple[Problem, Sequence[str]],
        running: Sequence[Call],
        progress: Progress,
    ) -> list[dict[str, float]]:
        """Wait for the calls of a function; return the components of each completion."""
        problem, completions = group
        size = len(completions)
        whose = f"reward {function.name}, {problem.data.get('where', problem.key)}"

        if function.takes_group:
            returned = self._calls.result(running[0], f"{whose}, {size} completions", progress)
            results = _listed(returned, size, whose)
        else:
            results = [
                self._calls.result(call, f"{whose}, completion {number}", progress)
                for number, call in enumerate(running, start=1)
            ]

        return [
            _components(result, function.name, f"{whose}, completion {number}")
            for number, result in enumerate(results, start=1)
        ]

    def _score(self, components: Mapping[str, float]) -> Score:
        """Return the score of a completion: the weighted sum of its components."""
        weights = self.settings.weights
        for name in weights:
            if name not in components:
                raise UserError(
                    f"--reward-weights {name}: no such component; there are "
                    f"{', '.join(sorted(components))}"
                )

        reward = math.fsum(weights.get(name, 1.0) * value for name, value in components.items())
        parts = {f"{COMPONENT}{name}": value for name, value in components.items()}
        is_right = reward >= self.settings.highest - ROUNDING
        return Score(reward, parts if len(parts) > 1 else {}, exact=is_right)


class _Function:
    """A reward function, and how it is called.

    - `is_async`: whether calls are coroutines;
    - `takes_group`: whether one call scores all completions of a group;
    - `takes_all`: whether it gets all columns (``**row``);
    - `parameters`, `required`: the names of its parameters, and of those without a default.
    """

    def __init__(self, function: Callable):
        if not callable(function):
            raise UserError(f"reward {function!r}: give a function")
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

        # An object with an async __call__ counts as well.
        called = getattr(function, "__call__", None)  # noqa: B004
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))

        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise UserError(f"reward {self.name}: its parameters cannot be read") from error

        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self.parameters = [one.name for one in named]
        self.required = [one.name for one in named if one.default is one.empty]
        self.takes_group = "completions" in self.parameters

        if any(one.kind is one.POSITIONAL_ONLY for one in named):
            raise UserError(f"reward {self.name}: has parameters without a name; remove the /")

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if the function has a parameter that the `row` lacks."""
        own = OF_GROUP if self.takes_group else OF_ONE
        if own[1] not in self.parameters and not self.takes_all:
            raise UserError(
                f"reward {self.name}: has no parameter completion (or completions, for a whole "
                "group)"
            )

        for name in self.required:
            if name not in row and name not in own:
                raise UserError(
                    f"reward {self.name}: wants {name!r}, and {where} has only "
                    f"{', '.join(sorted(row))}; rename a column by --columns {name}=COLUMN"
                )

    def calls(self, problem: Problem, completions: Sequence[str]) -> list[Bound]:
        """Return the calls for a group: one, or one for each completion."""
        row = problem.data["row"]
        if self.takes_group:
            size = len(completions)
            columns = {name: [value] * size for name, value in row.items()}
            columns |= {"prompts": [problem.prompt] * size, "completions": list(completions)}
            return [self._call(columns)]

        return [
            self._call(row | {"prompt": problem.prompt, "completion": completion})
            for completion in completions
        ]

    def _call(self, arguments: Mapping[str, Any]) -> Bound:
        if not self.takes_all:
            arguments = {name: arguments[name] for name in self.parameters if name in arguments}
        return Bound(self.function, dict(arguments), self.is_async)


def _listed(returned: Any, size: int, whose: str) -> list[Any]:
    """Return the results for a whole group as a list: one result for each completion."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, str | Mapping) or not isinstance(returned, Sequence):
        raise UserError(
            f"{whose}: returned {shortened(repr(returned))}; it must return a list with one "
            "result for each completion"
        )
    if len(returned) != size:
        raise UserError(
            f"{whose}: returned {len(returned)} results for {size} completions; it must return "
            "one for each"
        )
    return list(returned)


def _components(result: Any, name: str, whose: str) -> dict[str, float]:
    """Return the components of one completion; a plain number is a component called `name`."""
    named = result if isinstance(result, Mapping) else {name: result}
    if not named:
        raise UserError(f"{whose}: returned no component")

    components = {}
    for key, value in named.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            which = f"{key!r}: " if isinstance(result, Mapping) else ""
            raise UserError(
                f"{whose}: returned {which}{shortened(repr(value))}; it must return a finite "
                "number, or a mapping of components to finite numbers"
            )
        components[str(key)] = float(value)
    return components
