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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco.errors import AbortedError, ProtocolError
from diloco_syncer.core.contribution import Version
from diloco_syncer.merging.streaming import FragmentMerge

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class MemberUpload:
    """The upload of one member for one attempt."""

    learner: str
    cancel: Callable[[], None]
    """Ends its stream."""
    contributed: bool = False
    """The merge counts on it: a commit shows that it has every chunk, and only the end may be missing."""
    awaited_seconds: float = 0.0
    """For how long this process has waited for its next messages, since the first header of this member."""
    awaits_from: float | None = None
    """Since when it waits for the next one, monotonic; None: it does not."""
    counted_from: float | None = None
    """What `awaited_seconds` was when the round counted the member's header; None: it has not."""
    received_bytes: int = 0
    """Payload of all streams of this member in the attempt."""
    replaced: bool = False
    """A newer one of this member has begun: nothing more of this one counts."""


class Attempt:
    """
    One attempt of one round; thread-safe.

    Args:
        round: global step of the round.
        attempt: number of the attempt.
        fragment: index.
        version: the version of the fragment if this commits.
        members: the learners that were pulled; no other may upload.
        probe: its only upload is discarded.
    """

    def __init__(
        self, *, round: int, attempt: int, fragment: int, version: Version,  # noqa: A002
        members: Iterable[str], probe: bool = False,
    ) -> None:  # fmt: skip
        self.round, self.attempt, self.fragment, self.version = round, attempt, fragment, version
        self.probe = probe
        self._changed = threading.Condition()
        self._merge: FragmentMerge | None = None
        self._outcome: bool | None = None
        self._reason = ""
        self._members = frozenset(members)
        self._uploads: dict[str, MemberUpload] = {}
        self._delivered: set[str] = set()
        self.bytes_up = 0

    def join(self, upload: MemberUpload) -> None:
        """
        Register a member's upload before it takes memory; it replaces and cancels an older one.

        Raises:
            ProtocolError: the learner is not a member.
            AbortedError: the attempt is over, or this member has delivered.
        """
        learner = upload.learner
        if learner not in self._members:
            raise ProtocolError(
                f"{learner} is not a member of round {self.round} attempt {self.attempt}; wait for a pull"
            )
        with self._changed:
            if self._outcome is not None:
                raise AbortedError(self._reason or "the round is over")
            if learner in self._delivered:
                raise AbortedError(f"{learner} has delivered to this round already")
            older = self._uploads.get(learner)
            self._uploads[learner] = upload
            if older is not None:
                older.replaced = True
                # A new stream does not undo the time that the member has taken.
                upload.awaited_seconds, upload.awaits_from = (
                    older.awaited_seconds,
                    older.awaits_from,
                )
                upload.counted_from = older.counted_from
                upload.received_bytes = older.received_bytes
                self._changed.notify_all()
        if older is not None:
            self._cancel([older])

    def begin(self, merge: FragmentMerge) -> None:
        """All members have contributed a header."""
        with self._changed:
            self._merge = merge
            self._changed.notify_all()

    def finish(self, *, committed: bool, reason: str = "") -> None:
        """
        End the attempt, wake all waiting threads and end the uploads that nothing is left to do for.

        After a commit, the ends of the uploads that were merged may still be on their way.
        """
        with self._changed:
            if self._outcome is not None:
                return
            self._outcome, self._reason = committed, reason
            left = [u for u in self._uploads.values() if not (committed and u.contributed)]
            merge = self._merge
            self._changed.notify_all()
        if not committed and merge is not None:
            merge.abort(reason)
        self._cancel(left)

    def end_uploads(self) -> None:
        """End those that are left so long after the commit."""
        with self._changed:
            left = list(self._uploads.values())
        self._cancel(left)

    def _cancel(self, uploads: Iterable[MemberUpload]) -> None:
        """Without the lock: a stream that ends may call this attempt."""
        for upload in uploads:
            try:
                upload.cancel()
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
            AbortedError: the attempt was aborted.
        """
        with self._changed:
            if self._outcome is False or (self._merge is None and self._outcome is not None):
                raise AbortedError(self._reason or f"round {self.round} is over")
            return self._merge

    def wait_for_merge(self, timeout_seconds: float, upload: MemberUpload | None = None) -> bool:
        """Wait until `running` has an answer or the upload is replaced; False: not within the timeout."""

        def answered() -> bool:
            replaced = upload is not None and upload.replaced
            return self._merge is not None or self._outcome is not None or replaced

        with self._changed:
            return self._changed.wait_for(answered, timeout_seconds)

    def wait_for_outcome(self, timeout_seconds: float) -> bool:
        """Wait until it is committed or aborted; False: not within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outcome is not None, timeout_seconds)

    # ------------------------------------------------------------ progress of members

    def count(self, size: int) -> None:
        """Count received bytes."""
        with self._changed:
            self.bytes_up += size

    def delivered(self, upload: MemberUpload) -> None:
        """This member has sent everything."""
        with self._changed:
            self._delivered.add(upload.learner)
        self.leave(upload)

    def leave(self, upload: MemberUpload) -> None:
        """This upload has ended by itself."""
        with self._changed:
            if self._uploads.get(upload.learner) is upload:
                del self._uploads[upload.learner]


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

    def forget(self) -> None:
        """Of a replay that begins another epoch: remove all, since its rounds have the same numbers."""
        with self._lock:
            removed, self._attempts = [*self._attempts.values()], OrderedDict()
        for each in removed:
            each.finish(committed=False, reason="another epoch begins")
            each.end_uploads()

    def commit(self, attempt: Attempt) -> None:
        """Mark an attempt as committed and remove the oldest committed ones."""
        attempt.finish(committed=True)
        with self._lock:
            over = [key for key, a in self._attempts.items() if a.over]
            removed = [self._attempts.pop(key) for key in over[: -self._keep_committed]]
        for each in removed:
            each.end_uploads()
