"""
Which job is reconciled next: a keyed queue that runs each key on one thread at a time.

Adding a key that waits already moves it forward, never back; adding one that runs makes it run once
more. A key whose work fails waits longer and longer; a key that says so is forgotten.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diloco.transport import Backoff

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Between two runs of one key: a burst of events is one piece of work."""
BACKOFF_SECONDS = (1.0, 120.0)
"""First and longest pause after failures in a row."""


class Key(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RetryError(Exception):
    """The work is not done and is tried again with back-off; said in one sentence, not a defect."""


@dataclass(slots=True)
class _Entry:
    due: float | None
    """When to run it; None: it runs, and nothing new is wanted."""
    backoff: Backoff
    started: float | None = None
    earliest: float = 0.0
    """Not before: the pause after a run, or after failures."""


Work = Callable[[Key], float | None]
"""Seconds until the key is looked at again; None: forget it."""


class WorkQueue:
    """Runs `work(key)` on its threads; call `start` once and `stop` at the end."""

    def __init__(self, work: Work, *, threads: int, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._work = work
        self._pause_seconds = pause_seconds
        self._entries: dict[Key, _Entry] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Let the threads run."""
        for thread in self._threads:
            thread.start()

    def add(self, key: Key, after_seconds: float = 0.0, *, urgent: bool = False) -> None:
        """
        Run the key so many seconds from now, or earlier if it is due before.

        Args:
            key: what to run.
            after_seconds: from now.
            urgent: what made the key fail may be gone: do not sit out its back-off.
        """
        due = time.monotonic() + after_seconds
        with self._changed:
            entry = self._entries.setdefault(key, self._new())
            if urgent:
                entry.backoff.reset()
                entry.earliest = min(entry.earliest, due)
            entry.due = due if entry.due is None else min(entry.due, due)
            self._changed.notify()

    def keys(self) -> frozenset[Key]:
        """Keys that wait or run."""
        with self._changed:
            return frozenset(self._entries)

    def longest_seconds(self) -> float:
        """For how long the longest run that goes on now has been going on; 0.0: none does."""
        now = time.monotonic()
        with self._changed:
            started = [one.started for one in self._entries.values() if one.started is not None]
        return now - min(started) if started else 0.0

    def alive(self) -> bool:
        """Whether every thread that was started still runs."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_seconds: float) -> bool:
        """Begin nothing new; wait for what runs. Whether all of it ended in time."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _new(self) -> _Entry:
        # Jitter only spreads the jobs of an outage over time: nothing secret depends on it.
        return _Entry(due=None, backoff=Backoff(*BACKOFF_SECONDS, random.Random()))  # noqa: S311

    def _run(self) -> None:
        while (key := self._take()) is not None:
            again, failed = self._once(key)
            self._done(key, again, failed=failed)

    def _once(self, key: Key) -> tuple[float | None, bool]:
        try:
            return self._work(key), False
        except RetryError as error:
            log.warning("%s; trying again", error, extra={"job": str(key)})
        except Exception:
            log.exception("reconcile ended by an unexpected error", extra={"job": str(key)})
        return None, True

    def _take(self) -> Key | None:
        """Wait for the next key that is due and mark it as running; None: the queue was stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                waiting = [
                    (max(entry.due, entry.earliest), key)
                    for key, entry in self._entries.items()
                    if entry.started is None and entry.due is not None
                ]
                due, key = min(waiting, default=(now + 3600.0, None))
                if key is not None and due <= now:
                    entry = self._entries[key]
                    entry.due, entry.started = None, now
                    return key
                self._changed.wait(due - now)
            return None

    def _done(self, key: Key, again: float | None, *, failed: bool) -> None:
        now = time.monotonic()
        with self._changed:
            entry = self._entries[key]
            entry.started = None
            if failed:
                # Events do not shorten this: a reconcile that fails may have caused them itself.
                entry.earliest = now + self._pause_seconds + entry.backoff.next()
                entry.due = entry.due or entry.earliest
            else:
                entry.backoff.reset()
                entry.earliest = now + self._pause_seconds
                if again is None and entry.due is None:
                    del self._entries[key]
                elif again is not None:
                    entry.due = min(entry.due or now + again, now + again)
            self._changed.notify()
