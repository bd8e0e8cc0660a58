"""Handlers of signals that are restored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int], None]) -> Iterator[None]:
    """
    Call `handler` with the number of each of these signals; afterwards they have the handlers from before.

    An ignored SIGHUP stays ignored, as `nohup` asks. An ignored SIGINT does not: a script has every
    program that it starts with `&` ignore it. Only the main thread can enter it.
    """
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {
        number: signal.signal(number, lambda n, _: handler(n))
        for number in numbers
        if not (nohup and number == signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
