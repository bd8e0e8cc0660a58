"""
Carries out a plan of faults with the processes of one supervisor.

All calls come from the supervisor's loop. Each turn compares what the schedule wants disturbed with what is
disturbed, so a fault is undone by no longer wanting it. Only processes of this supervisor are signalled, and a
process that is stopped when the supervisor ends is killed by the guard as all others (`process_guard.py`).
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_agent.processes import Processes
from diloco_local.chaos.fault_schedule import Begin, Decision, End, Skip
from diloco_local.chaos.injection import Injection, Note
from diloco_local.chaos.proxy import Proxies
from diloco_local.faults import KILLS, LINK_KINDS, SYNCER, Fault, Kind
from diloco_local.status import Status


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
        self._injection = Injection(faults, len(learners), journal, seed=seed, spare=spare)
        self._schedule = self._injection.schedule
        self._learners, self._clock = tuple(learners), clock
        self._stopped: dict[str, int] = {}
        """Learner → the process that was stopped; not its successor, if it ends meanwhile."""
        self._full: int | None = None
        """The syncer's process whose files cannot grow."""
        self._link_faults: dict[str, Fault | None] = dict.fromkeys(learners)
        self._flipped: dict[str, int] = {}
        """Learner → bytes that its last fault of connections inverted."""
        self._began: float | None = None
        linked = any(fault.kind in LINK_KINDS for fault in faults)
        self._proxies = Proxies(learners) if linked else None

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
        if not self._injection.begins(training, note):
            return
        self._began = time.monotonic() if self._began is None else self._began
        now = self._clock(status) if self._clock else time.monotonic() - self._began
        decisions = self._schedule.step(now, training=training, serves=serves)
        self._carry_out(decisions, processes, status, note)

    def undo(self, processes: Processes, status: Status, note: Note) -> None:
        """Undo all faults and begin no other; may be called again."""
        self._carry_out(self._schedule.close(), processes, status, note)

    @property
    def uncounted(self) -> str:
        """Why the journal cannot tell the faults of this run; "": it can."""
        return self._injection.uncounted

    def close(self) -> None:
        """End the proxies, after the processes."""
        if self._proxies is not None:
            self._proxies.close()

    def _carry_out(
        self, decisions: Sequence[Decision], processes: Processes, status: Status, note: Note
    ) -> None:
        self._signal(processes)
        self._fill(processes.pid(SYNCER))
        self._disturb_links()
        for decision in decisions:
            fault = decision.fault
            match decision:
                case Begin():
                    self._injection.begun(fault, int(status.get("step") or 0), note)
                    if fault.kind in KILLS:
                        processes.kill(fault.target)
                case Skip():
                    self._injection.skipped(fault, decision.reason, note)
                case End() if fault.seconds:
                    corrupt = fault.kind is Kind.CORRUPT
                    flipped = self._flipped[fault.target] if corrupt else None
                    self._injection.ended(fault, note, flipped=flipped)

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

    def _fill(self, running: int | None) -> None:
        """
        Let no file of the syncer grow: its writes fail with EFBIG, as those to a full disk do with ENOSPC.

        A process that starts meanwhile can write: its start is another fault.
        """
        if self._schedule.full and self._full is None and running is not None:
            self._full = running
            _limit_files(running, 0)
        elif not self._schedule.full and self._full is not None:
            # A process that ended meanwhile has a successor, which was never limited.
            if running == self._full:
                _limit_files(running, resource.RLIM_INFINITY)
            self._full = None

    def _disturb_links(self) -> None:
        for name, before in self._link_faults.items() if self._proxies else ():
            fault = self._schedule.link_fault(name)
            if fault != before and self._proxies is not None:
                self._link_faults[name] = fault
                self._proxies.set_fault(name, None)
                self._flipped[name] = self._proxies.flipped(name)
                self._proxies.set_fault(name, fault)


def _limit_files(pid: int, most_bytes: int) -> None:
    """How large a file may become that this process writes; the hard limit stays."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        soft = hard if most_bytes == resource.RLIM_INFINITY else most_bytes
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
