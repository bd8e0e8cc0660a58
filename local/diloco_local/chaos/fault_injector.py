"""
Carries out a plan of faults with the processes of one supervisor.

All calls come from the supervisor's loop. Each turn compares what the schedule wants disturbed with what is
disturbed, so a fault is undone by no longer wanting it. Only processes of this supervisor are signalled, and a
process that is stopped when the supervisor ends is killed by the guard as all others (`process_guard.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco.journal import writer
from diloco.journal.records import Record
from diloco_agent.processes import Processes
from diloco_local.chaos.fault_schedule import Begin, Decision, End, Schedule, Skip
from diloco_local.chaos.proxy import Proxies
from diloco_local.faults import (
    KILLS,
    LINK_KINDS,
    BeginRecord,
    EndRecord,
    Fault,
    Kind,
    PlanRecord,
    SkipRecord,
)
from diloco_local.status import Status

Note = Callable[[str], None]


class Injector:
    """The faults of one run; `undo` ends all of them, `close` the proxies."""

    def __init__(
        self,
        faults: Sequence[Fault],
        learners: Sequence[str],
        journal: Path,
        *,
        seed: int,
        spare: int,
        clock: Callable[[Status], float] | None = None,
    ) -> None:
        """
        An injector that waits until more than `spare` learners train, or all.

        Args:
            faults: the plan.
            learners: names of all learners.
            journal: faults.jsonl.
            seed: of the plan, for the journal.
            spare: learners that stay undisturbed.
            clock: the time of the plan; None: seconds since training began.
        """
        self._schedule = Schedule.of(faults, spare=spare)
        self._learners, self._journal, self._clock = tuple(learners), journal, clock
        self._stopped: dict[str, int] = {}
        """Learner → the process that was stopped; not its successor, if it ends meanwhile."""
        self._link_faults: dict[str, Fault | None] = dict.fromkeys(learners)
        self._flipped: dict[str, int] = {}
        """Learner → bytes that its last fault of connections inverted."""
        self._most = 0
        """Learners that trained at once."""
        self._began: float | None = None
        self._unwritten = False
        linked = any(fault.kind in LINK_KINDS for fault in faults)
        self._proxies = Proxies(learners) if linked else None
        self._plan = PlanRecord(seed=seed, planned=len(faults), spare=spare)

    def endpoint(self, name: str, endpoint: str) -> str:
        """The address of the syncer that a process is started with."""
        if self._proxies is None or name not in self._learners or not endpoint:
            return endpoint
        return self._proxies.endpoint(name, endpoint)

    def turn(self, processes: Processes, status: Status, note: Note, *, serves: bool) -> None:
        """Begin and end the faults that are due."""
        training = {
            process["name"]
            for process in status.get("processes", ())
            if process["state"] == "Training" and processes.pid(process["name"]) is not None
        }
        if self._began is None:
            self._most = max(self._most, len(training))
            if len(training) < min(self._schedule.spare + 1, len(self._learners)):
                return
            self._began = time.monotonic()
            self._write(self._plan, note)
        now = self._clock(status) if self._clock else time.monotonic() - self._began
        decisions = self._schedule.step(now, training=training, serves=serves)
        self._carry_out(decisions, processes, status, note)

    def undo(self, processes: Processes, status: Status, note: Note) -> None:
        """Undo all faults and begin no other; may be called again."""
        self._carry_out(self._schedule.close(), processes, status, note)

    @property
    def uncounted(self) -> str:
        """Why the journal cannot tell the faults of this run; "": it can."""
        if self._unwritten:
            return "unknown, because not all of them could be written"
        if self._began is not None:
            return ""
        if not self._most:
            return "none, because training did not begin"
        return (
            f"none, because never more than {self._most} of {len(self._learners)} learners trained at once, "
            f"and {self._schedule.spare} are spared"
        )

    def close(self) -> None:
        """End the proxies, after the processes."""
        if self._proxies is not None:
            self._proxies.close()

    def _carry_out(
        self, decisions: Sequence[Decision], processes: Processes, status: Status, note: Note
    ) -> None:
        self._signal(processes)
        self._disturb_links()
        for decision in decisions:
            fault = decision.fault
            match decision:
                case Begin():
                    note(f"fault {fault.number}: {fault}")
                    self._write(_begin(fault, status), note)
                    if fault.kind in KILLS:
                        processes.kill(fault.target)
                case Skip():
                    skipped = SkipRecord(
                        number=fault.number, fault=fault.kind, target=fault.target, reason=decision.reason
                    )  # fmt: skip
                    self._write(skipped, note)
                case End() if fault.seconds:
                    corrupt = fault.kind is Kind.CORRUPT
                    flipped = self._flipped[fault.target] if corrupt else None
                    self._write(EndRecord(number=fault.number, flipped=flipped), note)

    def _signal(self, processes: Processes) -> None:
        """Stop and continue processes."""
        wanted = self._schedule.stopped(time.monotonic() % 1.0)
        for name, pid in list(self._stopped.items()):
            if name not in wanted:
                del self._stopped[name]
                # A process that ended meanwhile has a successor, which was never stopped.
                if processes.pid(name) == pid:
                    processes.send_signal(name, signal.SIGCONT)
        for name in wanted - self._stopped.keys():
            if (running := processes.pid(name)) is not None:
                self._stopped[name] = running
                processes.send_signal(name, signal.SIGSTOP)

    def _disturb_links(self) -> None:
        for name, before in self._link_faults.items() if self._proxies else ():
            fault = self._schedule.link_fault(name)
            if fault != before and self._proxies is not None:
                self._link_faults[name] = fault
                self._proxies.set_fault(name, None)
                self._flipped[name] = self._proxies.flipped(name)
                self._proxies.set_fault(name, fault)

    def _write(self, record: Record, note: Note) -> None:
        try:
            writer.append(self._journal, {"event": record.kind, **record.to_json()})
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                note(f"warning: cannot write {self._journal}: {error.strerror}; the run continues")


def _begin(fault: Fault, status: Status) -> BeginRecord:
    return BeginRecord(
        number=fault.number, fault=fault.kind, target=fault.target, step=int(status.get("step") or 0),
        seconds=fault.seconds, amount=fault.amount, bandwidth=fault.bandwidth,
    )  # fmt: skip
