"""
The pods of a learner are one unit: their processes run together or not at all.

Rank 0 leads. The agents of the other ranks report to it once a second and learn which run to
execute. When a process of the run ends, or a pod is stopped, replaced or silent, all processes of
the run end, and the next run begins once every pod is back. So no rank waits for the timeout of a
collective, and the exits of a run are one incident, of which rank 0 decides whether it counts.

Pure. Times are of the caller's monotonic clock; a report holds none of another machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_agent.restarts import counts, exit_cause

REPORT_SECONDS = 1.0
"""Between two reports of a rank."""

SETTLE_SECONDS = 3.0
"""Exits of other ranks within this time of the first belong to the same incident."""

LOST_SECONDS = 15.0
"""A rank of a run that is silent for longer is lost."""

_FRESH_SECONDS = 5.0
"""No run begins with a rank that is silent for longer."""

FOLLOW_SECONDS = 10.0
"""How long a process may take to exit when another of its run is gone, before SIGKILL."""

_MAX_CAUSE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the agent of another rank reports to rank 0."""

    rank: int
    boot: str
    """A random name of this start of the agent."""
    run: str
    """The run that its process executes; "": none."""
    ready_to_start: bool
    """It is ready to start a process."""
    stopping: bool
    """Its container is being stopped."""
    ended: str = ""
    """The last run that its process left by itself; "": none."""
    code: int = 0
    """The exit code in that run."""
    cause: str = ""
    """How it ended, as text."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON; agents of other versions know `ready_to_start` as `willing`."""
        fields = asdict(self)
        fields["willing"] = fields.pop("ready_to_start")
        return fields

    @classmethod
    def of(cls, data: Any) -> Report:
        """
        The report that another agent sent.

        Raises:
            ValueError, TypeError, KeyError: the data is not a report.
        """
        return cls(
            rank=int(data["rank"]),
            boot=str(data["boot"])[:64],
            run=str(data["run"])[:80],
            ready_to_start=bool(data["willing"]),
            stopping=bool(data["stopping"]),
            ended=str(data["ended"])[:80],
            code=int(data["code"]),
            cause=str(data["cause"])[:_MAX_CAUSE],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 replies."""

    run: str
    """The run to execute; "": none."""
    member: str
    """Boot of the agent that takes part in it as the rank that asked; "": none."""
    running: str
    """The run that the process of rank 0 executes; "": none."""
    broken: bool
    """A process of that run is gone."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Any) -> Order:
        """
        The order that rank 0 sent.

        Raises:
            ValueError, TypeError, KeyError: the data is not an order.
        """
        return cls(
            run=str(data["run"]),
            member=str(data["member"]),
            running=str(data["running"]),
            broken=bool(data["broken"]),
        )


@dataclass(slots=True, kw_only=True)
class Leader:
    """Rank 0's view of its learner."""

    boot: str
    size: int
    """Pods of the learner."""
    run: str = ""
    """What all ranks should execute; "": nothing."""
    running: str = ""
    """What the process of rank 0 executes."""
    _broken: bool = False
    _runs: int = 0
    _members: dict[int, str] = field(default_factory=dict)
    """Rank → boot of its agent when the run began."""
    _reports: dict[int, tuple[float, Report]] = field(default_factory=dict)
    _ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Rank → exit code and cause in the last run, in the order in which they became known."""
    _open_run: str = ""
    """The last run, until its incident is closed."""
    _ended_at: float = float("-inf")
    _done: bool = False
    """The process of rank 0 has exited with 0: its work is done, whatever the others do."""

    def receive_report(self, report: Report, now: float) -> None:
        """Another rank has reported."""
        self._reports[report.rank] = (now, report)
        if report.ended and report.ended == self._open_run and report.code:
            cause = f"rank {report.rank}: {report.cause}"
            self._ends.setdefault(report.rank, (report.code, cause))

    def order(self, rank: int) -> Order:
        """The reply to a report of that rank."""
        member = self._members.get(rank, "")
        return Order(run=self.run, member=member, running=self.running, broken=self._broken)

    def may_start(self, now: float) -> bool:
        """Whether all ranks are ready for another run."""
        if self._done:
            # Started again after its work was done: first the others end as well.
            self._done, self._open_run = False, ""
            self._end(now)
        return not self.waits_for(now)

    def waits_for(self, now: float) -> str:
        """Which rank is not ready for another run; "": all are."""
        for rank in range(1, self.size):
            reported_at, report = self._reports.get(rank, (float("-inf"), None))
            if report is None or now - reported_at > _FRESH_SECONDS:
                return f"rank {rank} does not report"
            if report.stopping:
                return f"rank {rank} is being stopped"
            # A report from before the end of the last run does not count for the next.
            if (
                report.run
                or not report.ready_to_start
                or reported_at < self._ended_at + SETTLE_SECONDS
            ):
                return f"rank {rank} is not ready"
        return ""

    def started(self, now: float) -> None:
        """The process of rank 0 was started."""
        self._runs += 1
        self.run = self.running = self._open_run = f"{self.boot}.{self._runs}"
        self._members = {rank: report.boot for rank, (_, report) in self._reports.items()}
        self._ends, self._broken = {}, False

    def must_end(self, now: float) -> str:
        """Why the process of rank 0 must end although it runs; "": it need not."""
        trouble = self._disturbed(now) or next((cause for _, cause in self._ends.values()), "")
        if trouble:
            self._end(now)
        return trouble

    def has_lost_peer(self, now: float) -> bool:
        """Whether another process of the run is gone, so that waiting for this one is in vain."""
        reports = (self._reports[rank] for rank in self._members)
        self._broken = any(
            report.run != self.running or now - reported_at > LOST_SECONDS
            for reported_at, report in reports
        )
        return self._broken

    def exited(self, code: int, last_line: str, now: float, *, by_itself: bool) -> None:
        """The process of rank 0 exited."""
        self.running = ""
        if by_itself and code == 0:
            self._done, self._open_run = True, ""
            return
        if by_itself:
            self._ends.setdefault(0, (code, f"rank 0: {exit_cause(code, last_line)}"))
        self._end(now)

    def stop(self) -> None:
        """The container of rank 0 is being stopped."""
        self.run = ""

    def fault(self, now: float) -> str:
        """
        The cause of an incident that counts against the learner, once; "": there is none.

        A run that a pod left, or of which a process was killed from outside or missed the syncer, is a disruption:
        the crashes of the others followed. Otherwise the first crash stands for all of them.
        """
        if not self._open_run or self.run:
            return ""
        disturbed = self._disturbed(now)
        reported = (at for at, _ in self._reports.values())
        settles = any(at < self._ended_at + SETTLE_SECONDS for at in reported)
        if not disturbed and settles:
            return ""
        self._open_run = ""
        ends = list(self._ends.values())
        if disturbed or not all(counts(code) for code, _ in ends):
            return ""
        return ends[0][1] if ends else ""

    def _disturbed(self, now: float) -> str:
        """Which pod has left the run, and how; "": none."""
        for rank, boot in self._members.items():
            reported_at, report = self._reports[rank]
            if now - reported_at > LOST_SECONDS:
                return f"rank {rank} does not report"
            if report.boot != boot:
                return f"rank {rank} was replaced"
            if report.stopping:
                return f"rank {rank} is being stopped"
        return ""

    def _end(self, now: float) -> None:
        if self.run:
            self.run, self._ended_at = "", now


@dataclass(slots=True, kw_only=True)
class Follower:
    """The view of another rank: it executes what rank 0 orders."""

    boot: str
    rank: int
    running: str = ""
    """The run that its process executes."""
    ready_to_start: bool = True
    stopping: bool = False
    _order: Order | None = None
    _order_at: float = float("-inf")
    _last: str = ""
    """The run that it executed last: each is started once."""
    _ended: str = ""
    _code: int = 0
    _cause: str = ""

    def receive_order(self, order: Order, now: float) -> None:
        """Rank 0 has replied."""
        self._order, self._order_at = order, now

    @property
    def report(self) -> Report:
        """What to report to rank 0."""
        return Report(
            rank=self.rank, boot=self.boot, run=self.running, ready_to_start=self.ready_to_start,
            stopping=self.stopping, ended=self._ended, code=self._code, cause=self._cause,
        )  # fmt: skip

    def may_start(self, now: float) -> bool:
        """Whether rank 0 has begun a run that this rank has not executed."""
        return not self.waits_for(now)

    def waits_for(self, now: float) -> str:
        """Why it does not start; "": it may."""
        if self._order is None or now - self._order_at > _FRESH_SECONDS:
            return "rank 0 does not answer"
        begun = self._order.run and self._order.member == self.boot
        if not begun or self._order.run == self._last:
            return "rank 0 has not begun another run"
        return ""

    def started(self, now: float) -> None:
        """The process was started."""
        if self._order is not None:
            self.running = self._last = self._order.run

    def must_end(self, now: float) -> str:
        """Why its process must end although it runs; "": it need not."""
        if self._order is None or now - self._order_at > LOST_SECONDS:
            return "rank 0 does not answer"
        return "" if self._order.run == self.running else "rank 0 has ended the run"

    def has_lost_peer(self, now: float) -> bool:
        """Whether another process of the run is gone, so that waiting for this one is in vain."""
        order = self._order
        if order is None or now - self._order_at > LOST_SECONDS:
            return True
        return order.broken or order.running != self.running

    def exited(self, code: int, last_line: str, now: float, *, by_itself: bool) -> None:
        """The process exited."""
        if by_itself:
            self._ended, self._code = self.running, code
            self._cause = exit_cause(code, last_line)[:_MAX_CAUSE]
        self.running = ""

    def stop(self) -> None:
        """The container is being stopped."""
        self.stopping = True

    def fault(self, now: float) -> str:
        """Rank 0 alone counts."""
        return ""


Unit = Leader | Follower
