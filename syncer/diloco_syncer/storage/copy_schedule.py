"""
When snapshots are copied to the object store, and what is shown of it. Pure: every method is given `now`.

    IDLE ──written──► DUE ──began──► RUNNING ──done──► IDLE
                       ▲                 │ failed                   another syncer writes there ──► FENCED
                       └──back-off───────┘

At most one snapshot is copied at a time, always the newest: those that are replaced meanwhile are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.runtime.backoff import doubled

RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 300.0

LASTING_FAILURES = 3
"""In a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """What other threads see."""

    url: str
    step: int = -1
    """Step of the newest snapshot that is complete in the store; -1: none is known."""
    problem: str = ""
    """Why newer ones are not there, in a sentence; "": nothing is wrong."""
    lasting: bool = False
    """It does not end by itself within seconds: operators report it."""


@dataclass(slots=True, kw_only=True)
class CopySchedule:
    """Where copying stands."""

    place: str
    """The URL, for sentences."""
    step: int = -1
    """See `CopyState`."""
    wanted: bool = False
    """There may be a snapshot that is not in the store."""
    fenced: str = ""
    """Why this process copies nothing more; "": it does."""
    _running_since: float | None = None
    _failures: int = 0
    _failure: str = ""
    _retry_at: float = float("-inf")

    def written(self) -> None:
        """A snapshot is durable in the directory."""
        self.wanted = True

    @property
    def is_idle(self) -> bool:
        """Nothing is to be copied, or ever will be."""
        return bool(self.fenced) or (not self.wanted and self._running_since is None)

    def due_in(self, now: float) -> float | None:
        """Seconds until a copy has to begin; None: not before another snapshot is written."""
        if not self.wanted or self.fenced:
            return None
        return max(0.0, self._retry_at - now)

    def begin(self, now: float) -> None:
        """The newest snapshot is being copied."""
        self.wanted, self._running_since = False, now

    def done(self, step: int) -> None:
        """The snapshot of this step is complete in the store."""
        self.step = step
        self._running_since, self._failures, self._failure = None, 0, ""
        self._retry_at = float("-inf")

    def failed(self, reason: str, now: float) -> None:
        """It is not; the newest is tried again after a back-off."""
        self.wanted, self._running_since, self._failure = True, None, reason
        self._retry_at = now + doubled(RETRY_SECONDS, self._failures, MAX_RETRY_SECONDS)
        self._failures += 1

    def hurry(self) -> None:
        """The process ends: what waits for its next attempt is tried at once."""
        self._retry_at = float("-inf")

    def fence(self, reason: str) -> None:
        """Another syncer writes there: nothing is copied from now on."""
        self.fenced, self._running_since = reason, None

    def state(self, now: float) -> CopyState:
        """What other threads see."""
        return CopyState(
            url=self.place,
            step=self.step,
            problem=self._problem(now),
            lasting=bool(self.fenced) or self._failures >= LASTING_FAILURES,
        )

    def _problem(self, now: float) -> str:
        if self.fenced:
            return self.fenced
        if not self._failure:
            return ""
        times = "once" if self._failures == 1 else f"{self._failures} times in a row"
        wait = self._retry_at - now
        if self._running_since is not None:
            when = f"in progress for {now - self._running_since:.0f} s"
        else:
            when = f"in {wait:.0f} s" if wait >= 0.5 else "now"
        return f"copying a snapshot to {self.place} failed {times}: {self._failure}; next attempt {when}"
