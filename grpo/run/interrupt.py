"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its current step, which is saved."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# Signals of which a second one stops the run immediately, and others, which Windows lacks.
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANGUP, TIME_OVER = (getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1"))

# A signal that follows the first one within so many seconds is the same request: many programs send
# one twice, once to the process and once to its group (GNU `timeout` does).
SAME = 1.0


class Interrupt:
    """Records the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 within a `with` block, as `wanted`.

    The run then ends after its current step, which is saved. A second SIGINT or SIGTERM, after more
    than `SAME` seconds, goes to the handler that was there before, and ends the run immediately. A
    second SIGHUP does nothing, because the shell and the system may send one each when a terminal
    is closed; nor does SIGUSR1, by which a scheduler announces that the time of a job is over
    (Slurm's --signal=USR1@120): the SIGTERM that follows counts as the first. SIGHUP stays ignored
    under nohup, and SIGUSR1 with whoever handles it already.

    Python can handle signals only in the main thread; in any other one nothing is recorded.
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
        """Set all handlers again, also the one that ignores SIGHUP under nohup.

        Triton replaces them without Python's knowledge when it compiles the first kernel: LLVM then
        sends a signal again, and meanwhile a second one would kill the process.
        """
        for number in (*STOPPING, HANGUP, TIME_OVER) if self.earlier else ():
            if number and (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)

    def note(self, number: int, _: object) -> None:
        """Remember the first signal, and announce how the run ends; pass a second one on."""
        if os.getpid() != self.process:  # forked, for example by a reward function: not a run
            signal.signal(number, self.earlier[number])
            signal.raise_signal(number)
            return
        if self.wanted and number not in STOPPING:
            return
        if self.wanted in STOPPING:
            if time.monotonic() - self.time > SAME:
                for each in STOPPING:
                    signal.signal(each, self.earlier.pop(each))
                signal.raise_signal(number)
            return

        self.wanted, self.time = signal.Signals(number), time.monotonic()
        again = "; send it again to stop immediately and lose this step"
        line = (
            f"\n{self.wanted.name}: finishing and saving the current step"
            f"{again if number in STOPPING else ''}\n"
        )
        with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
            # Not print: a handler may run in the middle of one.
            os.write(sys.stderr.fileno(), line.encode())
