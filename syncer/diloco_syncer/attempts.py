"""
The attempts of rounds, as uploads and downloads see them.

    pulled ──all headers──► merging ──all chunks──► committed
       └───────────────────────┴──────────────────► aborted

Only the coordinator changes the phase of an attempt. `running` and `outcome` answer at once;
`wait_for_merge` and `wait_for_outcome` wait for the coordinator and are for the gRPC shell only.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from diloco.errors import UnavailableError
from diloco_syncer.core.contribution import Version
from diloco_syncer.merging.streaming import FragmentMerge

log = logging.getLogger(__name__)


class AttemptAbortedError(UnavailableError):
    """The attempt was aborted; discard its bytes."""

    reason = "Aborted"


class Attempt:
    """
    One attempt of one round; thread-safe.

    Args:
        round: global step of the round.
        attempt: number of the attempt.
        fragment: index.
        version: the version of the fragment if this commits.
        probe: its only upload is discarded.
    """

    def __init__(
        self, *, round: int, attempt: int, fragment: int, version: Version, probe: bool = False  # noqa: A002
    ) -> None:  # fmt: skip
        self.round, self.attempt, self.fragment, self.version = round, attempt, fragment, version
        self.probe = probe
        self._changed = threading.Condition()
        self._merge: FragmentMerge | None = None
        self._outcome: bool | None = None
        self._reason = ""
        self._cancels: dict[str, Callable[[], None]] = {}
        self.bytes_up = 0

    def join(self, learner: str, cancel: Callable[[], None]) -> None:
        """
        Register a member's upload; `cancel` ends its stream.

        Raises:
            AttemptAbortedError: the attempt is over.
        """
        with self._changed:
            if self._outcome is not None:
                raise AttemptAbortedError(self._reason or "the round is over")
            self._cancels[learner] = cancel

    def begin(self, merge: FragmentMerge) -> None:
        """All members have contributed a header."""
        with self._changed:
            self._merge = merge
            self._changed.notify_all()

    def finish(self, *, committed: bool, reason: str = "") -> None:
        """End the attempt and wake all waiting threads; an abort also ends the uploads."""
        with self._changed:
            if self._outcome is not None:
                return
            self._outcome, self._reason = committed, reason
            cancels = [] if committed else list(self._cancels.values())
            merge = self._merge
            self._changed.notify_all()
        if not committed and merge is not None:
            merge.abort(reason)
        for cancel in cancels:
            try:
                cancel()
            except Exception:  # the other members' streams must end as well
                log.exception("round %d: an upload could not be cancelled", self.round)

    @property
    def over(self) -> bool:
        """Committed or aborted."""
        return self._outcome is not None

    @property
    def outcome(self) -> bool | None:
        """True: committed, False: aborted, None: neither yet."""
        return self._outcome

    def running(self) -> FragmentMerge | None:
        """
        The merge; None: not all members have contributed a header.

        Raises:
            AttemptAbortedError: the attempt was aborted.
        """
        with self._changed:
            if self._outcome is False or (self._merge is None and self._outcome is not None):
                raise AttemptAbortedError(self._reason or f"round {self.round} is over")
            return self._merge

    def wait_for_merge(self, timeout_seconds: float) -> bool:
        """Wait until `running` has an answer; False: not within the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._merge is not None or self._outcome is not None, timeout_seconds
            )

    def wait_for_outcome(self, timeout_seconds: float) -> bool:
        """Wait until it is committed or aborted; False: not within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outcome is not None, timeout_seconds)

    # ------------------------------------------------------------ progress of members

    def count(self, size: int) -> None:
        """Count received bytes."""
        with self._changed:
            self.bytes_up += size

    def delivered(self, learner: str) -> None:
        """This member has sent everything."""
        with self._changed:
            self._cancels.pop(learner, None)


class Attempts:
    """
    The attempts that are running or were committed lately; thread-safe.

    Args:
        keep_committed: how many committed attempts stay: a learner may request a chunk again that
            arrived damaged.
    """

    def __init__(self, *, keep_committed: int) -> None:
        self._keep_committed = keep_committed
        self._lock = threading.Lock()
        self._attempts: OrderedDict[tuple[int, int], Attempt] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._attempts)

    def add(self, attempt: Attempt) -> None:
        """Make an attempt known."""
        with self._lock:
            self._attempts[(attempt.round, attempt.attempt)] = attempt

    def get(self, round_: int, attempt: int) -> Attempt | None:
        """An attempt; None: it was aborted, or its commit is too long ago, or it never was."""
        with self._lock:
            return self._attempts.get((round_, attempt))

    def abort(self, round_: int, attempt: int, reason: str) -> None:
        """Abort and remove an attempt, if it exists."""
        with self._lock:
            aborted = self._attempts.pop((round_, attempt), None)
        if aborted is not None:
            aborted.finish(committed=False, reason=reason)

    def commit(self, attempt: Attempt) -> None:
        """Mark an attempt as committed and remove the oldest committed ones."""
        attempt.finish(committed=True)
        with self._lock:
            over = [key for key, a in self._attempts.items() if a.over]
            for key in over[: -self._keep_committed]:
                del self._attempts[key]
