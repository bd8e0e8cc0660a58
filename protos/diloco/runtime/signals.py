"""Handlers of signals that are restored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

_OF_A_TERMINAL = (signal.SIGHUP, signal.SIGINT)
"""What `nohup` has a program ignore, and a shell without job control one in the background."""


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int], None]) -> Iterator[None]:
    """
    Call `handler` with the number of each of these signals; afterwards they have the handlers from before.

    A signal of a terminal that this process was started to ignore stays ignored. Only the main thread can enter it.
    """
    kept = [n for n in _OF_A_TERMINAL if signal.getsignal(n) is signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda n, _: handler(n))
        for number in numbers
        if number not in kept
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
