"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its current step, which is saved."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# Signals of which a second one stops the run immediately, and others. A scheduler sends SIGUSR1
# when the time of a job is almost over (Slurm's --signal=USR1@120), and SIGTERM later.
STOPPING = (signal.SIGINT, signal.SIGTERM)
GENTLE = (signal.SIGHUP, signal.SIGUSR1)

# A signal that follows the first one within so many seconds is the same request: many programs send
# one twice, once to the process and once to its group (GNU `timeout` does).
SAME = 1.0


class Interrupt:
    """Records the first of these signals within a `with` block as `wanted`.

    A second SIGINT or SIGTERM, after more than `SAME` seconds, goes to the handler that was there
    before, and ends the run immediately. SIGHUP stays ignored under nohup. Python can handle
    signals only in the main thread; in any other one nothing is recorded.
    """

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None
        self.time = 0.0  # of the first signal, by the monotonic clock
        self.earlier: dict[int, Any] = {}
        self.process = os.getpid()

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            gentle = [each for each in GENTLE if signal.getsignal(each) == signal.SIG_DFL]
            numbers = [*STOPPING, *gentle]
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
        for number in (*STOPPING, *GENTLE) if self.earlier else ():
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)

    def note(self, number: int, _: object) -> None:
        """Remember the first signal, and announce how the run ends; pass a second one on."""
        if os.getpid() != self.process:  # forked, for example by a reward function: not a run
            signal.signal(number, self.earlier[number])
            signal.raise_signal(number)
        elif number in STOPPING and self.wanted in STOPPING:
            if time.monotonic() - self.time > SAME:
                for each in STOPPING:
                    signal.signal(each, self.earlier.pop(each))
                signal.raise_signal(number)
        elif number in STOPPING or not self.wanted:
            self.wanted, self.time = signal.Signals(number), time.monotonic()
            line = f"\n{self.wanted.name}: finishing and saving the current step\n"
            with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
                # Not print: a handler may run in the middle of one.
                os.write(sys.stderr.fileno(), line.encode())
