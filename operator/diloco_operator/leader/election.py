"""
Leader election with a Lease, as a state machine: answers of the API server in, requests out.

Pure. The rules are those of client-go's LeaderElector. The times in a Lease are for people: each
candidate measures on its own monotonic clock how long the Lease has not changed, so the clocks of
nodes need not agree.

    standing by --the Lease is free, or unchanged for its duration; written--> leading
    leading --held by another, or not renewed for renew_seconds; not begun; ended--> standing by
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a Lease lasts; the defaults are those of Kubernetes' own components."""

    lease_seconds: int = 15
    """A Lease that did not change for so long may be taken."""
    renew_seconds: float = 10.0
    """A leader stops this long after it sent the last renewal that succeeded. The rest of
    lease_seconds is for requests that are still on their way."""
    retry_seconds: float = 2.0
    """Between two attempts to acquire or renew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The spec of a Lease, with its version; two equal ones are the same renewal."""

    holder: str
    """"": no replica holds it."""
    seconds: int
    """0: not stated."""
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    version: str
    """resourceVersion, the precondition of a write; "": it does not exist yet."""


# Events


@dataclass(frozen=True, slots=True)
class Due:
    """It is time to act: at the start, and whenever a Wake asked for it."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to Read; None: there is no Lease."""

    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to Write: the Lease as it is now."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A request was refused, or had no answer: whether a write took place is unknown."""


@dataclass(frozen=True, slots=True)
class NotBegun:
    """This process became the leader, but could not begin to reconcile."""


@dataclass(frozen=True, slots=True)
class Ended:
    """This process ends, and writes nothing from now on."""


Event = Due | Found | Written | Unanswered | NotBegun | Ended


# Decisions


@dataclass(frozen=True, slots=True)
class Read:
    """Read the Lease."""


@dataclass(frozen=True, slots=True)
class Write:
    """
    Create or replace the Lease, if it still has this version.

    The time of renewal is the current one, and so is the time of acquisition where it is empty.
    """

    lease: Lease


@dataclass(frozen=True, slots=True)
class Lead:
    """Begin to reconcile."""

    again: bool = False
    """No other candidate has led since this one did: it could not renew the Lease for a while."""


@dataclass(frozen=True, slots=True)
class StandBy:
    """Stop reconciling."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Due at this time, on the clock of `now`."""

    at: float


Decision = Read | Write | Lead | StandBy | Wake


class Election:
    """
    One candidate.

    Args:
        identity: unique among the candidates. A process that starts again under the identity of its
            predecessor, which must have ended, leads at once.
        timing: equal for all candidates.
    """

    def __init__(self, identity: str, timing: Timing = Timing()) -> None:
        self._identity = identity
        self._timing = timing
        self._seen: Lease | None = None
        self._seen_at = -inf
        self._fresh = False
        """Whether `_seen` has the Lease's version, as far as this candidate knows."""
        self._requested_at = -inf
        self._term = ""
        """When the Lease was acquired with which this candidate last led; "": with none."""
        self._leads_until: float = -inf
        """-inf: it stands by."""

    def may_write(self, now: float) -> bool:
        """Whether this candidate leads at this moment; safe to call from any thread."""
        return now < self._leads_until

    def handle(self, event: Event, now: float) -> list[Decision]:
        """
        What to do after an event: at most one request, whose answer is the next event, or a Wake.

        Args:
            event: what happened.
            now: monotonic clock, in seconds.
        """
        match event:
            case Due():
                held = self._held()
                return [*self._expire(now), self._renewal(held, now) if held else Read()]
            case Found(lease=lease):
                return self._found(lease, now)
            case Written(lease=written):
                return self._written(written, now)
            case Unanswered():
                self._fresh = False
                return [*self._expire(now), self._wake(now)]
            case NotBegun():
                self._term = ""
                # Not released: a write of its last term may be on its way. Later than the others take it.
                pause = self._timing.lease_seconds + 2 * self._timing.retry_seconds
                return [*self._stop("it could not begin to reconcile"), Wake(now + pause)]
            case Ended():
                return self._end()

    def _found(self, lease: Lease | None, now: float) -> list[Decision]:
        if lease is None:
            self._seen, self._fresh = None, False
            return [*self._expire(now), self._write(now, acquired="", transitions=0)]
        self._observe(lease, now)
        if lease.holder == self._identity:
            return [*self._expire(now), self._renewal(lease, now)]
        stopped = self._stop(f"{lease.holder or 'no replica'} holds the Lease")
        ends = self._seen_at + (lease.seconds if lease.seconds > 0 else self._timing.lease_seconds)
        if lease.holder and now < ends:
            return [*stopped, Wake(min(now + self._timing.retry_seconds, ends))]
        return [*stopped, self._write(now, acquired="", transitions=lease.transitions + 1)]

    def _written(self, lease: Lease, now: float) -> list[Decision]:
        self._observe(lease, now)
        if lease.holder != self._identity:
            return []
        # Counted from the request: others may see the renewal from then on.
        until = self._requested_at + self._timing.renew_seconds
        if now >= until:
            return [*self._expire(now), self._wake(now)]
        leads, again = self._leads_until > -inf, lease.acquired == self._term != ""
        begins: list[Decision] = [] if leads else [Lead(again=again)]
        self._leads_until, self._term = until, lease.acquired
        return [*begins, self._wake(now)]

    def _end(self) -> list[Decision]:
        stopped, held = self._stop("the process ends"), self._held()
        if not stopped or held is None:
            return stopped
        # One second and not 0, which is not valid.
        return [*stopped, Write(replace(held, holder="", seconds=1))]

    def _held(self) -> Lease | None:
        """The Lease, if this candidate holds it as far as it knows."""
        held = self._fresh and self._seen is not None and self._seen.holder == self._identity
        return self._seen if held else None

    def _observe(self, lease: Lease, now: float) -> None:
        if lease != self._seen:
            self._seen, self._seen_at = lease, now
        self._fresh = True

    def _renewal(self, held: Lease, now: float) -> Write:
        return self._write(now, acquired=held.acquired, transitions=held.transitions)

    def _write(self, now: float, *, acquired: str, transitions: int) -> Write:
        self._requested_at = now
        return Write(
            Lease(
                holder=self._identity,
                seconds=self._timing.lease_seconds,
                acquired=acquired,
                transitions=transitions,
                version=self._seen.version if self._seen is not None else "",
            )
        )

    def _wake(self, now: float) -> Wake:
        after = now + self._timing.retry_seconds
        return Wake(min(after, self._leads_until) if self.may_write(now) else after)

    def _expire(self, now: float) -> list[Decision]:
        if self.may_write(now):
            return []
        return self._stop(f"the Lease was not renewed for {self._timing.renew_seconds:.0f} s")

    def _stop(self, reason: str) -> list[Decision]:
        if self._leads_until == -inf:
            return []
        self._leads_until = -inf
        return [StandBy(reason)]
