"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its current step, which is saved.

A second Ctrl-C or SIGTERM ends the program immediately, unless it follows within a second: many
programs that start others send a signal twice, once to the process and once to its group (GNU
`timeout` does).

A library may put handlers of its own in their place, without Python's knowledge. Triton's does when
it compiles the first kernel: LLVM removes its temporary files at a signal, then sends the signal
again, and meanwhile a second one kills the process. So the handlers are renewed at each step.

A terminal that is closed often sends SIGHUP twice: once by the shell to its jobs, and once by the
system to the foreground process. So a second SIGHUP changes nothing. If SIGHUP is ignored when the
program starts, as under nohup, it stays ignored.

SIGUSR1 is how a scheduler announces that the time of a job is over (Slurm's --signal=USR1@120). The
SIGTERM that follows at the time limit is the first one, so the step can still be saved. A program
that handles SIGUSR1 itself keeps its handler.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

FIRST = "\n{}: finishing and saving the current step{}\n"
AGAIN = "; send it again to stop immediately and lose this step"

# Signals of which a second one stops the run immediately.
STOPPING = (signal.SIGINT, signal.SIGTERM)

# Signals that never do. Windows has neither.
HANGUP = getattr(signal, "SIGHUP", None)
TIME_OVER = getattr(signal, "SIGUSR1", None)

# Name of the thread that writes checkpoints.
WRITER = "checkpoint writer"

# A signal that follows the first one within so many seconds is the same request.
SAME = 1.0


class Interrupt:
    """Records the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 within a `with` block.

    A second SIGINT or SIGTERM, after more than `SAME` seconds, goes to the handler that was there
    before. `wanted` is the signal that was received, or None. Python can handle signals only in the
    main thread; in any other one nothing is recorded.
    """

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None
        self.time = 0.0  # of the first signal, by the monotonic clock
        self.earlier: dict[int, Any] = {}
        self.process = os.getpid()

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            numbers = [*STOPPING]
            if HANGUP and signal.getsignal(HANGUP) != signal.SIG_IGN:
                numbers.append(HANGUP)
            if TIME_OVER and signal.getsignal(TIME_OVER) == signal.SIG_DFL:
                numbers.append(TIME_OVER)
            self.earlier = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def renew(self) -> None:
        """Set the handlers again, also the one that ignores SIGHUP under nohup."""
        if not self.earlier:
            return
        for number in (*STOPPING, HANGUP, TIME_OVER):
            if number and (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)

    def note(self, number: int, _: object) -> None:
        """Remember the first signal, and announce how the run ends; pass a second one on.

        A process forked from this one, for example by a reward function, is not a run. There the
        signal does what it did before.
        """
        if os.getpid() != self.process:
            signal.signal(number, self.earlier[number])
            signal.raise_signal(number)
            return
        if self.wanted and number not in STOPPING:
            return
        if self.wanted in STOPPING:
            if time.monotonic() - self.time > SAME:
                self._give_back()
                signal.raise_signal(number)
            return

        self.wanted, self.time = signal.Signals(number), time.monotonic()
        line = FIRST.format(self.wanted.name, AGAIN if number in STOPPING else "")
        with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
            # Not print: a handler may run in the middle of one.
            os.write(sys.stderr.fileno(), line.encode())

    def _give_back(self) -> None:
        """Restore the earlier handlers of SIGINT and SIGTERM.

        A later SIGHUP or SIGUSR1 still does nothing.
        """
        for number in STOPPING:
            signal.signal(number, self.earlier.pop(number))


def end_process(status: int) -> None:
    """End the program with this exit status.

    After a second Ctrl-C the thread may still be writing a checkpoint. Then the interpreter must
    not shut down in the ordinary way: it would tear down a thread inside Rust code, which aborts
    the process (exit status 134).
    """
    if any(thread.name == WRITER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
