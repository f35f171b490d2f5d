"""Ctrl-C and SIGTERM: the step under way is finished and saved first; a second one ends the program at once."""

import os
import signal
import threading

FIRST = (
    "\n{}: the step under way is finished and saved first; once more stops at once, and loses it\n"
)


class Interrupt:
    """Notes the first SIGINT or SIGTERM that comes between `__enter__` and `__exit__`, and leaves a second one to whoever had it before.

    `wanted` is the signal that came, None before. Outside the main thread Python has no say in signals, and nothing is noted.
    """

    def __init__(self):
        self.wanted: signal.Signals | None = None
        self.earlier = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self.earlier = {
                number: signal.signal(number, self.note)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_):
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def note(self, number: int, _):
        self.wanted = signal.Signals(number)
        self.__exit__()
        os.write(
            2, FIRST.format(self.wanted.name).encode()
        )  # a handler may run in the middle of a print
