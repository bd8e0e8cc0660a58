"""
Faults that `diloco chaos` injects, as values, and the lines of faults.jsonl.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.journal.records import Record

SYNCER = "syncer"
"""Target of the faults of the syncer; all other targets are learners."""


class Kind(StrEnum):
    """What happens to the target."""

    KILL = "kill"
    """SIGKILL of a learner and its helpers; its supervisor restarts it."""
    SYNCER_KILL = "syncer-kill"
    """SIGKILL of the syncer; its supervisor restarts it."""
    SYNCER_FULL = "syncer-full"
    """No file of the syncer can grow, as on a full disk; only in a run on this machine."""
    PAUSE = "pause"
    """A learner and its helpers are stopped (SIGSTOP), and continue at the end."""
    SLOW = "slow"
    """A learner is stopped for the part `amount` of each second."""
    CUT = "cut"
    """The connections of a learner to the syncer are closed, and new ones too."""
    HANG = "hang"
    """The connections of a learner stay open, and nothing passes."""
    DELAY = "delay"
    """Each direction takes `amount` seconds longer and passes `bandwidth` bytes per second."""
    CORRUPT = "corrupt"
    """A byte of a fragment on its way is inverted every `amount` seconds."""
    DELETE = "delete"
    """The pods of a learner are deleted, and Kubernetes makes new ones; only in a cluster."""


KILLS = frozenset({Kind.KILL, Kind.SYNCER_KILL, Kind.DELETE})
"""Faults that are over at once."""

SYNCER_KINDS = frozenset({Kind.SYNCER_KILL, Kind.SYNCER_FULL})
"""Faults of the syncer; the target of all others is a learner."""

LINK_KINDS = frozenset({Kind.CUT, Kind.HANG, Kind.DELAY, Kind.CORRUPT})
"""Faults of the connections between a learner and the syncer; only in a run on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one target; times are seconds since training began."""

    number: int
    """From 1 on, in order of time."""
    kind: Kind
    target: str
    at: float
    until: float
    """When it is undone. Of a kill: until then the target counts as disturbed."""
    amount: float = 0.0
    """What `Kind` states; 0: the kind has none."""
    bandwidth: float = 0.0
    """Bytes per second; 0: unlimited."""

    @property
    def seconds(self) -> float:
        """How long it lasts; a kill is over at once."""
        return 0.0 if self.kind in KILLS else self.until - self.at

    def __str__(self) -> str:
        """Such as "delay us/0 for 4.2 s (0.25 s longer, 2.0 MB/s)"."""
        detail = {
            Kind.SLOW: f" (stopped {self.amount:.0%} of the time)",
            Kind.DELAY: f" ({self.amount:.2f} s longer, {self.bandwidth / 1e6:.1f} MB/s)",
            Kind.CORRUPT: f" (a byte every {self.amount:.1f} s)",
        }.get(self.kind, "")
        length = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target}{length}{detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """A run with faults begins; those of an earlier one are over."""

    kind = "plan"
    seed: int
    planned: int
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRecord(Record):
    """A fault began."""

    kind = "begin"
    number: int
    fault: str
    """Its kind."""
    target: str
    step: int
    """Global."""
    seconds: float
    """How long it is planned to last."""
    amount: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord(Record):
    """A fault is undone."""

    kind = "end"
    number: int
    flipped: int | None = None
    """Bytes that were inverted; None: the fault inverts none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRecord(Record):
    """A fault did not begin."""

    kind = "skip"
    number: int
    fault: str
    target: str
    reason: str
