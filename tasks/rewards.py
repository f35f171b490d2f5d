"""A user's reward functions: how they are checked, called, limited in time, and made into scores.

    def reward(prompt, completion, answer, **row):
        return {"correct": float(completion.endswith(answer)), "format": 0.2}

A function may have the parameters `prompt` and `completion`, and any column of the row (`answer`
...). With ``**row`` it gets all other columns. It returns a number, or a mapping of components to
numbers, whose weighted sum is the reward. A function with a parameter `completions` gets lists
instead, one entry for each completion of the group, and returns a list (the convention of TRL).
Functions may be coroutines (``async def``), e.g. for a judge behind a server.

The calls of a batch run side by side, in threads; coroutines share one event loop. Results are put
in the order of the completions, so they do not depend on timing.
"""

import asyncio
import copy
import inspect
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

from data.errors import UserError
from data.text import shown
from tasks.base import COMPONENT, Problem, Score
from tasks.scoring import LARGEST, ROUNDING, Range, finite_number, is_within
from tasks.user_code import raised

# Is told the calls that are done, all calls, and the seconds since they were started.
Show = Callable[[int, int, float], None]

# Seconds between two looks at how many calls are done.
LOOK = 0.5

# The most seconds that a call may take, and how many calls run side by side, by default.
TIMEOUT = 60.0
WORKERS = 32

Group = tuple[Problem, Sequence[str]]


class Call:
    """A call that was started: its future, and when it began to run."""

    def __init__(self, function: Callable, arguments: dict[str, Any], is_async: bool):
        self.function, self.arguments, self.is_async = function, arguments, is_async
        self.future: Future = Future()
        self.began = math.inf  # while it waits for a free worker
        self.running: Future | None = None  # of its coroutine

    def run(self) -> None:
        """Call the function, in a worker's thread."""
        self.began = time.monotonic()
        try:
            result = self.function(**self.arguments)
            if self.is_async:
                self.running = asyncio.run_coroutine_threadsafe(_caught(result), _event_loop())
                result, error = self.running.result()
                if error is not None:
                    raise error
            elif inspect.iscoroutine(result):
                result.close()  # nobody awaits it, and `Calls.result` refuses it
            self.future.set_result(result)
        except BaseException as error:  # reported where the result is awaited
            self.future.set_exception(error)


async def _caught(coroutine: Coroutine) -> tuple[Any, BaseException | None]:
    """Return the result of a coroutine, or what it raised, which might end the event loop."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all coroutines, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="rewards").start()
    return loop


class Calls:
    """Runs calls side by side, each no longer than `timeout` seconds.

    They run in up to `workers` threads, which are daemons: one that hangs does not keep the process
    from ending. `watcher` is told now and then how many of the started calls are done.
    """

    def __init__(self, workers: int, timeout: float, watcher: Show | None = None):
        self.workers, self.timeout, self.watcher = workers, timeout, watcher
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.begin()

    def begin(self) -> None:
        """Begin a batch of calls."""
        self._calls: list[Call] = []
        self._start = self._last = time.monotonic()
        self._has_told = False

    def start(self, call: Call) -> Call:
        """Start a call, which runs as soon as a worker is free."""
        self._calls.append(call)
        self._waiting.put(call)
        if len(self._threads) < self.workers:
            thread = threading.Thread(
                target=_work, args=(self._waiting,), daemon=True, name="reward"
            )
            self._threads.append(thread)
            thread.start()
        return call

    def result(self, call: Call, whose: str) -> Any:
        """Return the result of a call.

        Raises UserError, which begins with `whose`, if the call raises, takes too long, or returns
        a coroutine.
        """
        while True:
            if time.monotonic() >= self._last + LOOK:
                self._tell()
            left = call.began + self.timeout - time.monotonic()
            try:
                # It may have raised anything, even KeyboardInterrupt, so it is not raised here.
                error = call.future.exception(max(0.01, min(left, LOOK)))
                break
            except FutureTimeout as late:
                if time.monotonic() >= call.began + self.timeout:
                    raise UserError(
                        f"{whose}: took more than {self.timeout:g} s; make it faster, or raise "
                        "--reward-timeout"
                    ) from late

        if error is not None:
            raise raised(whose, error) from error
        if inspect.iscoroutine(call.future.result()):
            raise UserError(
                f"{whose} returned a coroutine; define it with async def, so that it is awaited"
            )
        return call.future.result()

    def finish(self) -> None:
        """Tell the watcher that all calls are done, if it was told anything."""
        if self._has_told:
            self._tell()

    def _tell(self) -> None:
        self._last = time.monotonic()
        self._has_told = True
        if self.watcher is not None:
            done = sum(call.future.done() for call in self._calls)
            self.watcher(done, len(self._calls), self._last - self._start)

    def close(self) -> None:
        """Forget the calls that wait, and end the coroutines.

        A thread ends when its call does: nothing can interrupt it.
        """
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        for _ in self._threads:
            self._waiting.put(None)
        for call in self._calls:
            if call.running is not None:
                call.running.cancel()


def _work(waiting: queue.SimpleQueue) -> None:
    """Run waiting calls, one after the other, in a thread of its own."""
    while (call := waiting.get()) is not None:
        call.run()

        # A call that failed refers to the stack that awaited it, and so to the functions, which
        # could not be collected while this thread waits.
        del call


# Parameters that are not columns of a row.
OF_ONE = ("prompt", "completion")
OF_GROUP = ("prompts", "completions")

# What TRL gives its rewards besides.
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


class RewardFunctions:
    """One or more reward functions, whose components are added up.

    - `weights`: the weight of each component, by default 1;
    - `reward_range`: the lowest and the highest reward; a completion that earns the highest is
      right;
    - `timeout`: the most seconds that one call may take;
    - `workers`: how many calls run side by side.
    """

    def __init__(
        self,
        functions: Sequence[Callable],
        *,
        weights: Mapping[str, float] = MappingProxyType({}),
        reward_range: Range = (0.0, 1.0),
        timeout: float = TIMEOUT,
        workers: int = WORKERS,
    ):
        self.weights, self.reward_range = weights, reward_range
        self.timeout, self.workers = timeout, workers
        self.functions = [_Function(function) for function in functions]
        self.names = [function.name for function in self.functions]
        if len(set(self.names)) < len(self.names):
            raise UserError(
                f"reward functions {', '.join(self.names)}: each needs a name of its own; define "
                "it with def, or name it: f = functools.partial(FUNCTION); f.__name__ = 'short'"
            )
        self.watcher: Show | None = None  # is told how many calls are done, while they run
        self._calls = self._new_calls()

    def _new_calls(self) -> Calls:
        calls = Calls(self.workers, self.timeout)
        weakref.finalize(self, calls.close)
        return calls

    @property
    def of_groups(self) -> list[str]:
        """The names of the functions that get all completions of a group."""
        return [function.name for function in self.functions if function.takes_group]

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise UserError if a function has a parameter that the `row` lacks."""
        for function in self.functions:
            function.check(row, where)

    def reads(self, column: str) -> bool:
        """Return whether a function gets this column of a row."""
        return any(
            column not in function.own and (function.takes_all or column in function.parameters)
            for function in self.functions
        )

    def scores(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Return the score of each completion of each group, all computed concurrently.

        A group is a problem, whose `data` has the columns of its row, and its completions. Raises
        UserError, which names the row and the completion, if a call fails, takes too long, or
        returns anything but finite numbers whose sum lies in the range. Then the other calls are
        abandoned.
        """
        self._calls.begin()
        self._calls.watcher = self.watcher
        try:
            started = [
                [
                    [self._calls.start(call) for call in function.calls(group)]
                    for function in self.functions
                ]
                for group in groups
            ]
            found = [
                self._scores_of_group(group, calls)
                for group, calls in zip(groups, started, strict=True)
            ]
        except BaseException:
            # A thread that hangs would be missing from the next calls.
            self._calls.close()
            self._calls = self._new_calls()
            raise
        self._calls.finish()
        return found

    def _scores_of_group(self, group: Group, started: Sequence[Sequence[Call]]) -> list[Score]:
        """Return the score of each completion of a group, whose calls have started."""
        problem, completions = group
        results = [
            self._results(function, calls, problem.title, len(completions))
            for function, calls in zip(self.functions, started, strict=True)
        ]
        return [
            self._score([of_function[i] for of_function in results], _place(problem.title, i))
            for i in range(len(completions))
        ]

    def _results(
        self, function: "_Function", calls: Sequence[Call], row: str, size: int
    ) -> Sequence[Any]:
        """Wait for the calls of a function; return what it returned for each completion."""
        whose = f"reward {function.name}"
        if not function.takes_group:
            return [
                self._calls.result(call, f"{whose}, {_place(row, i)}")
                for i, call in enumerate(calls)
            ]

        returned = self._calls.result(calls[0], f"{whose}, {row}, {size} completions")
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        is_list = isinstance(returned, Sequence) and not isinstance(returned, str)
        if not is_list or len(returned) != size:
            raise UserError(
                f"{whose}, {row}: returned {shown(returned)}; it must return a list with one "
                f"result for each of {size} completions"
            )
        return list(returned)

    def _score(self, results: Sequence[Any], place: str) -> Score:
        """Return the score of a completion: the weighted sum of its components."""
        components: dict[str, float] = {}
        for function, result in zip(self.functions, results, strict=True):
            named = _components(result, function.name, f"reward {function.name}, {place}")
            if shared := named.keys() & components.keys():
                raise UserError(
                    f"reward {function.name}, {place}: two functions have a component "
                    f"{min(shared)!r}; rename one of them"
                )
            components |= named

        whose = f"reward {', '.join(self.names)}, {place}"
        if absent := [name for name in self.weights if name not in components]:
            raise UserError(
                f"{whose}: has no component {absent[0]!r}, which --reward-weights names; it has "
                f"{', '.join(sorted(components))}"
            )

        reward = math.fsum(
            self.weights.get(name, 1.0) * value for name, value in components.items()
        )
        low, high = self.reward_range
        if not is_within(reward, (low, high)):
            raise UserError(
                f"{whose}: is {reward:g}, outside [{low:g}, {high:g}]; give the lowest and the "
                "highest reward by --reward-range LOW,HIGH"
            )

        # The plain number of a single function is the reward itself, and no part of it.
        is_plain = len(results) == 1 and not isinstance(results[0], Mapping)
        parts = {f"{COMPONENT}{name}": value for name, value in components.items()}
        is_highest = reward >= high - ROUNDING * (high - low)
        return Score(reward, {} if is_plain else parts, exact=is_highest)


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
        if any(one.kind is one.POSITIONAL_ONLY for one in named):
            raise UserError(f"reward {self.name}: has parameters without a name; remove the /")

        self.parameters = [one.name for one in named]
        self.required = [one.name for one in named if one.default is one.empty]
        self.takes_group = "completions" in self.parameters
        self.own = OF_GROUP if self.takes_group else OF_ONE

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

    def calls(self, group: Group) -> list[Call]:
        """Return the calls for a group: one, or one for each completion."""
        problem, completions = group
        row = problem.data["row"]
        if not self.takes_all:
            row = {name: row[name] for name in self.parameters if name in row}

        # Each completion has copies, so that a function that changes a list changes no other call.
        rows = [copy.deepcopy(row) for _ in completions]
        if self.takes_group:
            columns = {name: [one[name] for one in rows] for name in row}
            prompts = [problem.prompt] * len(completions)
            return [self._call(columns | {"prompts": prompts, "completions": list(completions)})]
        return [
            self._call(one | {"prompt": problem.prompt, "completion": completion})
            for one, completion in zip(rows, completions, strict=True)
        ]

    def _call(self, arguments: dict[str, Any]) -> Call:
        if not self.takes_all:
            arguments = {name: arguments[name] for name in self.parameters if name in arguments}
        return Call(self.function, arguments, self.is_async)


def _place(row: str, index: int) -> str:
    return f"{row}, completion {index + 1}"


def _components(result: Any, name: str, whose: str) -> dict[str, float]:
    """Return the components that the function `name` returned for a completion, or its number
    under its own name, as Python's numbers.
    """
    is_named = isinstance(result, Mapping)
    if is_named and not result:
        raise UserError(f"{whose}: returned no component")

    components = {}
    for key, value in result.items() if is_named else [(name, result)]:
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
    return components
