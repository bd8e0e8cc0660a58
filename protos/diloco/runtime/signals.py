"""Handlers of signals that are restored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int], None]) -> Iterator[None]:
    """
    Call `handler` with the number of each of these signals; afterwards they have the handlers from before.

    Only the main thread can enter it.
    """
    before = {number: signal.signal(number, lambda n, _: handler(n)) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
