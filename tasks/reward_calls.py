"""Calls of reward functions side by side: in threads, or in one event loop for coroutines."""

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data.errors import UserError
from tasks.checks import TaskError, raised

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
            # What completion[0]["content"] raises if the completion is a text.
            is_of_turns = isinstance(error, TypeError | IndexError) and "string ind" in str(error)
            fix = "; prompts and completions are texts, not lists of turns" if is_of_turns else ""
            raise TaskError(f"{raised(whose, error)}{fix}") from error

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
