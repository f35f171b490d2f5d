"""Ctrl-C, SIGTERM and SIGHUP end a run after its current step, which is saved.

A second Ctrl-C or SIGTERM ends the program at once.

A terminal that is closed sends SIGHUP, often twice (the shell to its jobs, then the system to the
foreground), so that a further one changes nothing. Where it is ignored from the start, as under
nohup, it stays ignored.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

FIRST = "\n{}: the step under way is finished and saved first{}\n"
AGAIN = "; once more stops at once, and loses it"
HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows


class Interrupt:
    """Notes the first SIGINT, SIGTERM or SIGHUP that comes between `__enter__` and `__exit__`;
    leaves a second SIGINT or SIGTERM to whoever had it before.

    `wanted` is the signal that came, None before. Outside the main thread Python has no say in
    signals, and nothing is noted.
    """

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None
        self.earlier: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if HANGUP and signal.getsignal(HANGUP) != signal.SIG_IGN:
                numbers.append(HANGUP)
            self.earlier = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def note(self, number: int, _: object) -> None:
        """Remember a signal, and announce how the run ends."""
        if number == HANGUP and self.wanted:
            return

        self.wanted = signal.Signals(number)
        if number != HANGUP:
            self._give_back()
        line = FIRST.format(self.wanted.name, "" if number == HANGUP else AGAIN)
        with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
            os.write(
                sys.stderr.fileno(), line.encode()
            )  # a handler may run in the middle of a print

    def _give_back(self) -> None:
        """Restore the earlier handlers of SIGINT and SIGTERM. A later SIGHUP remains harmless."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.earlier.pop(number))
