"""A process that computes rewards, and the pipe to it.

The process loads the user's file itself, so that nothing is pickled. Arguments and results are
lines of JSON. What the function prints goes to standard error. The process is in a session of its
own, so that Ctrl-C does not reach it, and ends when its pipe is closed: also when our process is
killed, and also if the function hangs.
"""

import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any, BinaryIO

from data.errors import UserError
from data.text import shown
from tasks.checks import raised
from tasks.own_files import load_function

# The process: `main`. Python must not look for our packages in the working directory first.
COMMAND = (sys.executable, "-P", "-c", "from tasks.reward_process import main; main()")


class CallError(Exception):
    """What a call in a process came to, as the end of a line that begins with whose call it was."""


def call_function(function: Callable, arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns. Raises CallError if that is a coroutine."""
    result = function(**arguments)
    if inspect.iscoroutine(result):
        result.close()
        raise CallError("returned a coroutine, which nobody awaits; define it by async def")
    return result


class RewardProcess:
    """A process that calls the function `program`, ``path/to/file.py:name``."""

    def __init__(self, program: str):
        self.program = program
        self._process: subprocess.Popen | None = None

    def begin(self) -> None:
        """Start the process unless it runs, and wait until it has loaded the function.

        Raises CallError if it cannot load it.
        """
        if self._process is not None:
            return
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [*COMMAND, self.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        self._answer()

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Return the result of the function, as JSON values.

        Raises CallError if it raises, if its result is not JSON, or if the process ends.
        """
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, and the answer says how
        return self._answer()

    def kill(self) -> None:
        """End the process, which may be at work in another thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and wait for its end."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # what the process has not read is lost with it
            self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise CallError(f"ended its process ({_end_of(self._process.wait())})")
        answer = json.loads(line)
        if "failed" in answer:
            raise CallError(answer["failed"])
        return answer["result"]


def _end_of(status: int) -> str:
    """Return an exit status in words.

    >>> _end_of(3), _end_of(-9)
    ('exit status 3', 'killed by SIGKILL; was the memory not enough?')
    """
    if status >= 0:
        return f"exit status {status}"
    hint = "; was the memory not enough?" if -status == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-status).name}{hint}"


# The other end of the pipe.


def main() -> None:
    """Load the function that the command line names, and call it for each line of the pipe."""
    calls: BinaryIO = os.fdopen(os.dup(0), "rb")
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    # A thread reads, so that the process ends with its pipe even while the function runs.
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls, waiting), daemon=True).start()

    try:
        function = load_function(sys.argv[1])
    except UserError as error:
        _send(answers, {"failed": f"cannot be called: {error}"})
        return
    _send(answers, {"result": None})
    while True:
        _send(answers, _answer(function, waiting.get()))


def _send(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _answer(function: Callable, line: bytes) -> dict[str, Any]:
    """Return what is answered to a line of arguments."""
    try:
        result = call_function(function, json.loads(line))
    except CallError as error:
        return {"failed": str(error)}
    except BaseException as error:
        return {"failed": str(raised("", error)).strip()}
    try:
        plain = _plain(result)
        json.dumps(plain)
    except (TypeError, ValueError):
        return {
            "failed": f"returned {shown(result)}; it must return a finite number, or a "
            "mapping of components to finite numbers"
        }
    return {"result": plain}


def _plain(value: Any) -> Any:
    """Return `value` with the numbers and arrays of NumPy and PyTorch as Python's.

    Raises TypeError for a name that is no text, which JSON would turn into one.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("a name is no text")
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _read(calls: BinaryIO, waiting: queue.SimpleQueue) -> None:
    for line in calls:
        waiting.put(line)
    os._exit(0)
