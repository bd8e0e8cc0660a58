"""
A plan of faults while it is injected: when it begins, its schedule, and its lines in faults.jsonl.

How a fault is carried out differs: `fault_injector` signals processes of this machine, `diloco chaos --job` those of
pods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from diloco.journal import writer
from diloco.journal.records import Record
from diloco_local.chaos.fault_schedule import Schedule
from diloco_local.faults import BeginRecord, EndRecord, Fault, PlanRecord, SkipRecord

Note = Callable[[str], None]


class Injection:
    """One plan, and the journal of what becomes of it."""

    def __init__(
        self, faults: Sequence[Fault], learners: int, journal: Path, *, seed: int, spare: int
    ) -> None:
        """
        A plan that waits until more than `spare` learners train, or all.

        Args:
            faults: the plan.
            learners: number of the job's learners.
            journal: faults.jsonl.
            seed: of the plan, for the journal.
            spare: learners that stay undisturbed.
        """
        self.schedule = Schedule.of(faults, spare=spare)
        self._learners, self._journal = learners, journal
        self._most = 0
        """Learners that trained at once."""
        self._began = self._unwritten = False
        self._plan = PlanRecord(seed=seed, planned=len(faults), spare=spare)

    def begins(self, training: Collection[str], note: Note) -> bool:
        """Whether its time runs, given the learners that train now; once it does, it runs on."""
        if not self._began:
            self._most = max(self._most, len(training))
            if len(training) < min(self.schedule.spare + 1, self._learners):
                return False
            self._began = True
            self._write(self._plan, note)
        return True

    @property
    def uncounted(self) -> str:
        """Why the journal cannot tell the faults of this run; "": it can."""
        if self._unwritten:
            return "unknown, because not all of them could be written"
        if self._began:
            return ""
        if not self._most:
            return "none, because training did not begin"
        return (
            f"none, because never more than {self._most} of {self._learners} learners trained at once, "
            f"and {self.schedule.spare} are spared"
        )

    def begun(self, fault: Fault, step: int, note: Note) -> None:
        """A fault began at this global step."""
        note(f"fault {fault.number}: {fault}")
        record = BeginRecord(
            number=fault.number, fault=fault.kind, target=fault.target, step=step,
            seconds=fault.seconds, amount=fault.amount, bandwidth=fault.bandwidth,
        )  # fmt: skip
        self._write(record, note)

    def ended(self, fault: Fault, note: Note, *, flipped: int | None = None) -> None:
        """A fault is undone; `flipped`: the bytes that it inverted, if it inverts any."""
        self._write(EndRecord(number=fault.number, flipped=flipped), note)

    def skipped(self, fault: Fault, reason: str, note: Note) -> None:
        """A fault did not begin."""
        record = SkipRecord(
            number=fault.number, fault=fault.kind, target=fault.target, reason=reason
        )
        self._write(record, note)

    def _write(self, record: Record, note: Note) -> None:
        try:
            writer.append(self._journal, {"event": record.kind, **record.to_json()})
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                note(f"warning: cannot write {self._journal}: {error.strerror}; the run continues")
