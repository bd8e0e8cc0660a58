"""
Which faults of a plan begin and end now, and what is disturbed meanwhile.

Pure. What is disturbed is a function of the faults that are active; so undoing all of them is to have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diloco_local.faults import LINK_KINDS, SYNCER_KINDS, Fault, Kind


@dataclass(frozen=True, slots=True)
class Begin:
    """Carry out this fault."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class End:
    """This fault is undone, or its target has had the time to return."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Skip:
    """This fault would disturb too much, or there is nothing to disturb."""

    fault: Fault
    reason: str


Decision = Begin | End | Skip


@dataclass(slots=True)
class Schedule:
    """The faults of one run."""

    pending: list[Fault]
    spare: int
    """Learners that stay undisturbed."""
    active: list[Fault] = field(default_factory=list)

    @classmethod
    def of(cls, faults: Iterable[Fault], *, spare: int) -> Schedule:
        """A schedule in which no fault has begun."""
        return cls(pending=sorted(faults, key=lambda fault: fault.at), spare=spare)

    def step(self, now: float, *, training: Collection[str], serves: bool) -> list[Decision]:
        """
        What begins and ends.

        Args:
            now: on the clock of the plan.
            training: names of the learners that train.
            serves: whether the syncer serves.
        """
        decisions: list[Decision] = [End(fault) for fault in self.active if fault.until <= now]
        self.active = [fault for fault in self.active if fault.until > now]
        while self.pending and self.pending[0].at <= now:
            fault = self.pending.pop(0)
            reason = self._refusal(fault, now, training, serves)
            if reason:
                decisions.append(Skip(fault, reason))
            else:
                self.active.append(fault)
                decisions.append(Begin(fault))
        return decisions

    def withdraw(self, fault: Fault) -> None:
        """This fault could not be carried out after all: its target counts as undisturbed."""
        self.active = [active for active in self.active if active.number != fault.number]

    def close(self) -> list[End]:
        """End all faults; none begins after this."""
        ended, self.active, self.pending = self.active, [], []
        return [End(fault) for fault in ended]

    def stopped(self, phase: float) -> frozenset[str]:
        """
        Learners that are stopped now.

        Args:
            phase: part of the current second that is over; a slow learner is stopped at its beginning.
        """
        return frozenset(
            fault.target
            for fault in self.active
            if fault.kind is Kind.PAUSE or (fault.kind is Kind.SLOW and phase < fault.amount)
        )

    @property
    def full(self) -> bool:
        """Whether no file of the syncer can grow now."""
        return any(fault.kind is Kind.SYNCER_FULL for fault in self.active)

    def link_fault(self, learner: str) -> Fault | None:
        """What disturbs the connections of this learner."""
        return next((f for f in self.active if f.target == learner and f.kind in LINK_KINDS), None)

    def _refusal(self, fault: Fault, now: float, training: Collection[str], serves: bool) -> str:
        """Why a fault does not begin; "": it does."""
        disturbed = {active.target for active in self.active}
        if fault.until <= now:
            return "its time was over before it could begin"
        if fault.target in disturbed:
            return f"{fault.target} is still disturbed"
        if fault.kind in SYNCER_KINDS:
            return "" if serves else "the syncer does not serve"
        if fault.target not in training:
            return f"{fault.target} does not train"
        left = len(set(training) - disturbed - {fault.target})
        if left < self.spare:
            return f"only {left} other learners train undisturbed, and {self.spare} are spared"
        return ""
