"""
One attempt of one round, as the upload and download threads see it.

    pulled ──headers──► merge set ──all chunks──► committed
       └────────────────────┴──────────────────► aborted

The runner is the only one that moves it; everybody else waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.errors import UnavailableError
from diloco_syncer.core.events import Version
from diloco_syncer.core.merge import FragmentMerge


class AttemptAbortedError(UnavailableError):
    """This attempt came to nothing; its bytes are to be forgotten."""

    reason = "Aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a member's upload header says about its payload."""

    format: int
    norms: tuple[float, ...]


class Attempt:
    """
    Shared by the runner (which moves it) and the bulk threads (which wait on it).

    Args:
        round: global step of the round.
        attempt: number of the attempt.
        fragment: index.
        version: what the fragment becomes if this commits.
    """

    def __init__(self, *, round: int, attempt: int, fragment: int, version: Version) -> None:  # noqa: A002
        self.round, self.attempt, self.fragment, self.version = round, attempt, fragment, version
        self.deliveries: dict[str, Delivery] = {}
        self._changed = threading.Condition()
        self._merge: FragmentMerge | None = None
        self._outcome: bool | None = None
        self._why = ""
        self._cancels: dict[str, Callable[[], None]] = {}
        self._progress: dict[str, float] = {}
        self.bytes_up = 0

    def join(self, learner: str, delivery: Delivery, cancel: Callable[[], None]) -> None:
        """A member's upload is here; `cancel` ends its stream."""
        with self._changed:
            if self._outcome is not None:
                raise AttemptAbortedError(self._why or "the round is over")
            self.deliveries[learner] = delivery
            self._cancels[learner] = cancel

    def begin(self, merge: FragmentMerge) -> None:
        """All members answered."""
        with self._changed:
            self._merge = merge
            # From now on others wait for each of them, also for one that never sends a chunk.
            self._progress = dict.fromkeys(self.deliveries, time.monotonic())
            self._changed.notify_all()

    def finish(self, *, committed: bool, why: str = "") -> None:
        """The end; wakes everyone, ends the uploads of an attempt that came to nothing."""
        with self._changed:
            if self._outcome is not None:
                return
            self._outcome, self._why = committed, why
            cancels = [] if committed else list(self._cancels.values())
            merge = self._merge
            self._changed.notify_all()
        if not committed and merge is not None:
            merge.abort(why)
        for cancel in cancels:
            cancel()

    @property
    def over(self) -> bool:
        """Committed or aborted."""
        return self._outcome is not None

    def merge(self, *, timeout_seconds: float) -> FragmentMerge:
        """
        The merge, as soon as all members answered.

        Raises:
            AttemptAbortedError: it came to nothing, or nothing happened in time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._merge is not None or self._outcome is not None, timeout_seconds
            )
            if self._outcome is False or self._merge is None:
                raise AttemptAbortedError(
                    self._why or f"round {self.round} did not begin to merge in time"
                )
            return self._merge

    def outcome(self, *, timeout_seconds: float) -> bool:
        """Whether it was committed; False as well when that took too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None, timeout_seconds)
            return self._outcome is True

    # ------------------------------------------------------------ who is stuck

    def moved(self, learner: str, size: int) -> None:
        """A chunk of this member arrived."""
        with self._changed:
            self._progress[learner] = time.monotonic()
            self.bytes_up += size

    def delivered(self, learner: str) -> None:
        """This member has nothing more to send."""
        with self._changed:
            self._progress.pop(learner, None)
            self._cancels.pop(learner, None)

    def stalled(self, *, now: float, limit_seconds: float) -> list[str]:
        """Members of a running merge from which nothing came for too long."""
        with self._changed:
            if self._merge is None or self._outcome is not None:
                return []
            return [name for name, at in self._progress.items() if now - at > limit_seconds]
