"""
The work queue of the operator: runs each key on one thread at a time.

Adding a waiting key can only move it forward; adding a running key runs it once more. A key whose
work fails is retried with exponential back-off; a key whose work returns None is forgotten. Of the
keys that are due, those of the namespace that has the fewest running come first, so that no
namespace waits for another one's many or slow jobs.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diloco.runtime.backoff import Backoff

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Between two runs of a key, so that a burst of events causes a single run."""
BACKOFF_SECONDS = (1.0, 120.0)
"""First and longest pause after consecutive failures."""


class Key(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RetryError(Exception):
    """An expected failure: logged in one line, and the work is retried with back-off."""


@dataclass(slots=True)
class _Entry:
    due: float | None
    """When to run it; None: it is running, and no further run is due."""
    backoff: Backoff
    started: float | None = None
    progressed: float = 0.0
    """When the current run began, or last reported progress."""
    earliest: float = 0.0
    """Not before this time: the pause after a run or a failure."""
    place: float | None = None
    """Its time in the order of the waiting keys of its namespace; None: it is not among them."""


Work = Callable[[Key], float | None]
"""Seconds until the key runs again; None: forget it."""


class WorkQueue:
    """
    Runs `work(key)` on its threads; call `start` once and `stop` at the end.

    Args:
        work: runs a key.
        threads: keys that may run at the same time.
        pause_seconds: between two runs of a key.
        waited: called with the seconds that a key was due before it runs.
    """

    def __init__(
        self, work: Work, *, threads: int, pause_seconds: float = PAUSE_SECONDS,
        waited: Callable[[float], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._work, self._waited = work, waited
        self._pause_seconds = pause_seconds
        self._entries: dict[Key, _Entry] = {}
        self._waiting: dict[str, list[tuple[float, Key]]] = {}
        """Namespace → its keys that do not run, sorted by the time at which they may: with thousands of
        jobs, no thread looks through all of them for the next one."""
        self._running: Counter[str] = Counter()
        """Namespace → its keys that run."""
        self._changed = threading.Condition()
        self._turns: dict[str, float] = {}
        """When a key of each namespace last began to run."""
        self._stopped = False
        self._paused = False
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def add(self, key: Key, after_seconds: float = 0.0, *, urgent: bool = False) -> None:
        """
        Run the key at this time, or earlier if it is already due earlier.

        Args:
            key: what to run.
            after_seconds: from now.
            urgent: the cause of failures may be gone: reset the back-off.
        """
        due = time.monotonic() + after_seconds
        with self._changed:
            if self._paused:
                return
            entry = self._entries.setdefault(key, self._new())
            if urgent:
                entry.backoff.reset()
                entry.earliest = min(entry.earliest, due)
            entry.due = due if entry.due is None else min(entry.due, due)
            self._place(key, entry)
            self._changed.notify()

    def pause(self) -> None:
        """Forget all keys, and accept none until `resume`; runs that have begun end by themselves."""
        with self._changed:
            self._paused = True
            running = {k: entry for k, entry in self._entries.items() if entry.started is not None}
            self._entries = running
            self._waiting.clear()
            self._turns.clear()

    def resume(self) -> None:
        """Accept keys again."""
        with self._changed:
            self._paused = False

    def keys(self) -> frozenset[Key]:
        """Waiting and running keys."""
        with self._changed:
            return frozenset(self._entries)

    def depth(self) -> int:
        """Keys that are due and wait for a thread."""
        now = time.monotonic()
        with self._changed:
            return sum(bisect_right(keys, now, key=_time) for keys in self._waiting.values())

    def progressed(self, key: Key) -> None:
        """The current run of the key, which may have many requests to send, is not stuck."""
        with self._changed:
            if (entry := self._entries.get(key)) is not None:
                entry.progressed = time.monotonic()

    def stalled_seconds(self) -> float:
        """The longest time for which a current run has made no progress; 0.0: none is running."""
        now = time.monotonic()
        with self._changed:
            running = [entry for entry in self._entries.values() if entry.started is not None]
            return now - min(entry.progressed for entry in running) if running else 0.0

    def alive(self) -> bool:
        """Whether all threads are running."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_seconds: float) -> bool:
        """Start no further run and wait for the current ones; whether all ended in time."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _new(self) -> _Entry:
        # Jitter spreads the retries after an outage; it needs no secure randomness.
        return _Entry(due=None, backoff=Backoff(*BACKOFF_SECONDS, random.Random()))  # noqa: S311

    def _run(self) -> None:
        while (key := self._take()) is not None:
            requeue, failed = self._work_on(key)
            self._done(key, requeue, failed=failed)

    def _work_on(self, key: Key) -> tuple[float | None, bool]:
        try:
            return self._work(key), False
        except RetryError as error:
            log.warning("%s; retrying", error, extra={"job": str(key)})
        except Exception:
            log.exception("unexpected error in reconcile", extra={"job": str(key)})
        return None, True

    def _take(self) -> Key | None:
        """Wait for the next due key and mark it as running; None: the queue was stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                first = [keys[0] for keys in self._waiting.values()]
                due = [item for item in first if item[0] <= now]
                if due:
                    when, key = self._fairest(due)
                    entry = self._entries[key]
                    entry.due, entry.started, entry.progressed = None, now, now
                    self._place(key, entry)
                    self._running[key.namespace] += 1
                    self._turns[key.namespace] = now
                    self._waited(now - when)
                    return key
                self._changed.wait(min(first)[0] - now if first else None)
            return None

    def _fairest(self, due: list[tuple[float, Key]]) -> tuple[float, Key]:
        """The namespace with the fewest running keys, then the one whose turn is longest ago."""

        def order(item: tuple[float, Key]) -> tuple[int, float, tuple[float, Key]]:
            namespace = item[1].namespace
            return self._running[namespace], self._turns.get(namespace, -math.inf), item

        return min(due, key=order)

    def _place(self, key: Key, entry: _Entry) -> None:
        """Sort the key in at the time at which it may run, or take it out if it does not wait."""
        keys = self._waiting.setdefault(key.namespace, [])
        if entry.place is not None:
            del keys[bisect_left(keys, (entry.place, key))]
        entry.place = None
        if entry.started is None and entry.due is not None:
            entry.place = max(entry.due, entry.earliest)
            insort(keys, (entry.place, key))
        if not keys:
            del self._waiting[key.namespace]

    def _done(self, key: Key, requeue: float | None, *, failed: bool) -> None:
        now = time.monotonic()
        with self._changed:
            entry = self._entries[key]
            entry.started = None
            self._running[key.namespace] -= 1
            if self._paused:
                del self._entries[key]
            elif failed:
                # Events do not shorten this: the failed reconcile may have caused them.
                entry.earliest = now + self._pause_seconds + entry.backoff.next()
                entry.due = entry.due or entry.earliest
            else:
                entry.backoff.reset()
                entry.earliest = now + self._pause_seconds
                if requeue is None and entry.due is None:
                    del self._entries[key]
                elif requeue is not None:
                    entry.due = min(entry.due or now + requeue, now + requeue)
            if key in self._entries:
                self._place(key, entry)
            elif not self._running[key.namespace] and key.namespace not in self._waiting:
                # Not the history of a namespace that no longer has a key.
                del self._running[key.namespace]
                self._turns.pop(key.namespace, None)
            self._changed.notify()


def _time(item: tuple[float, Key]) -> float:
    return item[0]
