"""A user's reward functions: how they are checked, called, limited in time, and made into scores.

    def reward(prompt, completion, answer, **row):
        return {"correct": float(completion.endswith(answer)), "format": 0.2}

A function may have the parameters `prompt` and `completion`, and any column of the row (`answer`
...). With ``**row`` it gets all other columns. It returns a number, or a mapping of components to
numbers, whose weighted sum is the reward. A function with a parameter `completions` gets lists
instead, one entry for each completion of the group, and returns a list (the convention of TRL).
Functions may be coroutines (``async def``), e.g. for a judge behind a server.

The calls of a batch run side by side, in threads or in one event loop.
Results are put in the order of the completions, so they do not depend on timing.
"""

import asyncio
import copy
import inspect
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from data.errors import UserError
from data.text import shown
from tasks.base import COMPONENT, Problem, Score
from tasks.scoring import LARGEST, ROUNDING, Range, finite_number, is_within
from tasks.user_code import raised

# Is told the calls that are done, all calls, and the seconds since they were started.
Show = Callable[[int, int, float], None]

# Seconds between two looks at how many calls are done.
LOOK = 0.5


@dataclass(frozen=True)
class Bound:
    """A function and its arguments."""

    function: Callable
    arguments: dict[str, Any]
    is_async: bool

    def __call__(self) -> Any:
        """Call the function, or make its coroutine."""
        result = self.function(**self.arguments)
        if inspect.iscoroutine(result) and not self.is_async:
            result.close()  # nobody awaits it, and `Calls.result` refuses it
        return result


class Call:
    """A call that was started: its future, and when it began to run."""

    def __init__(self) -> None:
        self.future: Future = Future()
        self.began = math.inf  # while it waits for a free worker


class Progress:
    """Tells a watcher how many of some calls are done, while their results are awaited.

    It begins after LOOK seconds. If it told anything, it ends with all of them.
    """

    def __init__(self, calls: Sequence[Call], show: Show | None):
        self.calls = calls
        self.show = show
        self._start = self._last = time.monotonic()
        self._has_shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._has_shown:
            self._tell(len(self.calls))

    def look(self) -> None:
        """Tell how many calls are done, if that was not told lately."""
        if self.show is not None and time.monotonic() >= self._last + LOOK:
            self._tell(sum(call.future.done() for call in self.calls))
            self._has_shown = True

    def _tell(self, done: int) -> None:
        assert self.show is not None
        self._last = time.monotonic()
        self.show(done, len(self.calls), self._last - self._start)


class Calls:
    """Runs calls side by side, each no longer than `timeout` seconds.

    They run in up to `workers` threads, which are daemons: one that hangs does not keep the process
    from ending.
    """

    def __init__(self, workers: int, timeout: float):
        self.workers = workers
        self.timeout = timeout
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def start(self, bound: Bound) -> Call:
        """Start a call, which runs as soon as a worker is free. There is none after `close`."""
        assert not self._is_closed, "the workers have ended, so the call would wait for ever"
        call = Call()
        if bound.is_async:
            asyncio.run_coroutine_threadsafe(self._run_async(bound, call), self._event_loop())
            return call

        self._waiting.put((bound, call))
        if len(self._threads) < self.workers:
            thread = threading.Thread(target=self._work, daemon=True, name="reward")
            self._threads.append(thread)
            thread.start()
        return call

    def result(self, call: Call, whose: str, progress: Progress) -> Any:
        """Return the result of a call.

        Raises UserError, which begins with `whose`, if the call raises, takes too long, or returns
        a coroutine.
        """
        error = self._wait(call, whose, progress)
        if error is not None:
            raise raised(whose, error) from error

        result = call.future.result()
        if inspect.iscoroutine(result):
            raise UserError(
                f"{whose} returned a coroutine; define it with async def, so that it is awaited"
            )
        return result

    def _wait(self, call: Call, whose: str, progress: Progress) -> BaseException | None:
        """Wait for the end of a call; return what it raised, or None.

        It may have raised anything, even KeyboardInterrupt, so it is returned: what this method
        raises is of our own thread.
        """
        while True:
            progress.look()
            left = call.began + self.timeout - time.monotonic()
            try:
                return call.future.exception(max(0.01, min(left, LOOK)))
            except FutureTimeout as error:
                if time.monotonic() < call.began + self.timeout:
                    continue
                raise UserError(
                    f"{whose}: took more than {self.timeout:g} s; make it faster, or raise "
                    "--reward-timeout"
                ) from error

    def close(self) -> None:
        """Forget the calls that wait, and end the coroutines.

        A thread ends when its call does: nothing can interrupt it.
        """
        self._is_closed = True
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        for _ in self._threads:
            self._waiting.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._loop = None

    def _work(self) -> None:
        """Run waiting calls, one after the other, in a thread of its own."""
        while (waiting := self._waiting.get()) is not None:
            bound, call = waiting
            call.began = time.monotonic()
            try:
                call.future.set_result(bound())
            except BaseException as error:  # reported where the result is awaited
                call.future.set_exception(error)

            # A call that failed refers to the stack that awaited it, and so to the functions, which
            # could not be collected while this thread waits.
            del waiting, bound, call

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self._loop = runner.get_loop()
            self._free = asyncio.Semaphore(self.workers)
            self._ended = asyncio.Event()
            threading.Thread(
                target=_run_loop, args=(runner, self._ended), daemon=True, name="rewards"
            ).start()
        return self._loop

    async def _run_async(self, bound: Bound, call: Call) -> None:
        async with self._free:
            call.began = time.monotonic()
            try:
                call.future.set_result(await bound())
            except BaseException as error:  # reported where the result is awaited
                call.future.set_exception(error)


def _run_loop(runner: asyncio.Runner, ended: asyncio.Event) -> None:
    """Run an event loop until `ended` is set; then cancel its coroutines."""
    with runner:
        runner.run(ended.wait())


# Parameters that are not columns of a row.
OF_ONE = ("prompt", "completion")
OF_GROUP = ("prompts", "completions")

# What TRL gives its rewards besides.
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are computed.

    - `weights`: the weight of each component, by default 1;
    - `reward_range`: the lowest and the highest reward; a completion that earns the highest is
      right;
    - `timeout`: the most seconds that one call may take;
    - `workers`: how many calls run side by side.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    reward_range: Range = (0.0, 1.0)
    timeout: float = 60.0
    workers: int = 32


class RewardFunctions:
    """One or more reward functions, whose components are added up."""

    def __init__(self, functions: Sequence[Callable], settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings()
        self.functions = [_Function(function) for function in functions]
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise UserError(
                f"reward functions {', '.join(names)}: each needs a name of its own; define it "
                "with def, or name it: f = functools.partial(FUNCTION); f.__name__ = 'short'"
            )
        self.watcher: Show | None = None  # is told how many calls are done, while they run
        self._calls = self._new_calls()

    def _new_calls(self) -> Calls:
        calls = Calls(self.settings.workers, self.settings.timeout)
        weakref.finalize(self, calls.close)
        return calls

    @property
    def of_groups(self) -> list[str]:
        """The names of the functions that get all completions of a group."""
        return [function.name for function in self.functions if function.takes_group]

    def by_name(self) -> dict[str, Callable]:
        """Return the functions by their names."""
        return {function.name: function.function for function in self.functions}

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if a function has a parameter that the `row` lacks."""
        for function in self.functions:
            function.check(row, where)

    def reads(self, column: str) -> bool:
        """Return whether a function gets this column of a row."""
        return any(function.reads(column) for function in self.functions)

    def scores(self, groups: Sequence[tuple[Problem, Sequence[str]]]) -> list[list[Score]]:
        """Return the score of each completion of each group, all computed concurrently.

        A group is a problem, whose `data` has the columns of its row, and its completions. Raises
        UserError, which names the row and the completion, if a call fails, takes too long, or
        returns anything but finite numbers whose sum lies in the range. Then the other calls are
        abandoned.
        """
        try:
            return self._scores(groups)
        except BaseException:
            # A thread that hangs would be missing from the next calls.
            self._calls.close()
            self._calls = self._new_calls()
            raise

    def _scores(self, groups: Sequence[tuple[Problem, Sequence[str]]]) -> list[list[Score]]:
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
        problem, completions = group
        results = [self._finish(function, group, calls, progress) for function, calls in started]
        whose = f"reward {', '.join(function.name for function in self.functions)}, {problem.title}"
        return [
            self._score([of_function[i] for of_function in results], f"{whose}, completion {i + 1}")
            for i in range(len(completions))
        ]

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
    ) -> list["_Result"]:
        """Wait for the calls of a function; return its result for each completion."""
        problem, completions = group
        size = len(completions)
        whose = f"reward {function.name}, {problem.title}"

        if function.takes_group:
            of_group = f"{whose}, {_counted(size, 'completion')}"
            returned = self._calls.result(running[0], of_group, progress)
            results = _listed(returned, size, whose)
        else:
            results = [
                self._calls.result(call, f"{whose}, completion {number}", progress)
                for number, call in enumerate(running, start=1)
            ]

        return [
            _checked(result, function.name, f"{whose}, completion {number}")
            for number, result in enumerate(results, start=1)
        ]

    def _score(self, results: Sequence["_Result"], whose: str) -> Score:
        """Return the score of a completion: the weighted sum of its components."""
        components: dict[str, float] = {}
        for result in results:
            for name in result.components.keys() & components.keys():
                raise UserError(
                    f"{whose}: two functions have a component {name!r}; rename one of them"
                )
            components |= result.components

        weights = self.settings.weights
        for name in weights:
            if name not in components:
                raise UserError(
                    f"{whose}: has no component {name!r}, which --reward-weights names; it has "
                    f"{', '.join(sorted(components))}"
                )

        reward = math.fsum(weights.get(name, 1.0) * value for name, value in components.items())
        low, high = self.settings.reward_range
        if not is_within(reward, (low, high)):
            raise UserError(
                f"{whose}: is {reward:g}, outside [{low:g}, {high:g}]; give the lowest and the "
                "highest reward by --reward-range LOW,HIGH"
            )

        # The plain number of a single function is the reward itself, and no part of it.
        is_named = len(results) > 1 or results[0].is_named
        parts = {f"{COMPONENT}{name}": value for name, value in components.items()}
        is_highest = reward >= high - ROUNDING * (high - low)
        return Score(reward, parts if is_named else {}, exact=is_highest)


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
        self.own = OF_GROUP if self.takes_group else OF_ONE

        if any(one.kind is one.POSITIONAL_ONLY for one in named):
            raise UserError(f"reward {self.name}: has parameters without a name; remove the /")

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if the function has a parameter that the `row` lacks."""
        if self.own[1] not in self.parameters and not self.takes_all:
            raise UserError(
                f"reward {self.name}: has no parameter completion (or completions, for a whole "
                "group)"
            )

        for name in self.required:
            if name in row or name in self.own:
                continue
            has = f"only {', '.join(sorted(row))}" if row else "nothing but a prompt"
            fix = f"add it, or rename a column by --columns {name}=COLUMN"
            if name in (*OF_ONE, *OF_GROUP, *OF_TRL):
                fix = f"remove it: besides columns, it gets only {' and '.join(self.own)}, as texts"
            raise UserError(f"reward {self.name}: wants {name!r}, and {where} has {has}; {fix}")

    def reads(self, column: str) -> bool:
        """Return whether the function gets this column of a row."""
        return column not in self.own and (self.takes_all or column in self.parameters)

    def calls(self, problem: Problem, completions: Sequence[str]) -> list[Bound]:
        """Return the calls for a group: one, or one for each completion."""
        row = problem.data["row"]
        if not self.takes_all:
            row = {name: row[name] for name in self.parameters if name in row}

        # Each completion has copies, so that a function that changes a list changes no other call.
        rows = [copy.deepcopy(row) for _ in completions]
        if self.takes_group:
            columns = {name: [one[name] for one in rows] for name in row}
            columns |= {
                "prompts": [problem.prompt] * len(completions),
                "completions": list(completions),
            }
            return [self._call(columns)]

        return [
            self._call(one | {"prompt": problem.prompt, "completion": completion})
            for one, completion in zip(rows, completions, strict=True)
        ]

    def _call(self, arguments: dict[str, Any]) -> Bound:
        if not self.takes_all:
            arguments = {name: arguments[name] for name in self.parameters if name in arguments}
        return Bound(self.function, arguments, self.is_async)


def _listed(returned: Any, size: int, whose: str) -> list[Any]:
    """Return the results for a whole group as a list: one result for each completion."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, str | Mapping) or not isinstance(returned, Sequence):
        raise UserError(
            f"{whose}: returned {shown(returned)}; it must return a list with one "
            "result for each completion"
        )
    if len(returned) != size:
        raise UserError(
            f"{whose}: returned {_counted(len(returned), 'result')} for "
            f"{_counted(size, 'completion')}; it must return one for each"
        )
    return list(returned)


def _counted(number: int, what: str) -> str:
    """Return e.g. "1 result" or "2 results"."""
    return f"{number} {what}{'s' * (number != 1)}"


class _Result(NamedTuple):
    """What a function returned for a completion: its components, or one with the function's name.

    E.g. ``_Result({"correct": 1.0, "format": 0.2}, True)`` or ``_Result({"reward": 0.5}, False)``.
    """

    components: dict[str, float]
    is_named: bool


def _checked(result: Any, name: str, whose: str) -> _Result:
    """Return the `result` of the function `name` for one completion, with Python's numbers."""
    is_named = isinstance(result, Mapping)
    named = result if is_named else {name: result}
    if not named:
        raise UserError(f"{whose}: returned no component")

    components = {}
    for key, value in named.items():
        if not isinstance(key, str) or not key.isprintable() or not key.strip():
            raise UserError(
                f"{whose}: returned a component called {key!r}; its name must be a printable text"
            )
        number = finite_number(value)
        if number is None or abs(number) > LARGEST:
            which = f"{key!r}: " if is_named else ""
            raise UserError(
                f"{whose}: returned {which}{shown(value)}; it must return a finite "
                "number, or a mapping of components to finite numbers"
            )
        components[key] = number
    return _Result(components, is_named)
