"""
200 and 1,000 jobs of 3 regions on a real API server without nodes: `python benchmarks/bench_operator_scale.py`.

Time until every job has its children and its conditions, the operator's memory and CPU, writes and
reads per job (from the API server's audit log), and what it does in the time after: when nothing
changes, and when it is restarted. For comparison, the table has the figures from before the operator handled
lost nodes, volumes, failed jobs, replicas and pods that are never created. Goals: the limits of
`tests/e2e/test_scale.py` for 200 jobs, and no more for each of 1,000. Eight minutes. Needs root, as the
local clusters of tests/e2e do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from _timing import ROOT, judge, table, write_results

sys.path.insert(0, str(ROOT / "tests/support"))

from diloco_testing.clusters import scale
from diloco_testing.clusters.audit import Request
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.provision import Cluster, LocalClusters

SETTLE_SECONDS = 15.0
"""What the first status could not know yet is written."""
QUIET_SECONDS = 30.0
FEW, MANY = 200, 1000
REPORTS = ("dilocojobs/status", "events")
"""Five minutes after its creation, each job reports that its pods did not come; nothing else is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The operator with a number of jobs."""

    jobs: int
    seconds: float
    """From the last job's apply until all is there."""
    total_seconds: float | None
    """From the first job's apply; None: not measured."""
    cpu_seconds: float
    megabytes: float
    writes: float
    """Per job."""
    most_writes: int
    reads: float
    """Per job."""
    quiet_writes: int
    """Without reports."""
    quiet_reads: float
    """Per job in a minute."""
    quiet_cpu: float
    """Of a core."""
    restart_seconds: float
    restart_writes: int
    """Without reports."""
    restart_megabytes: float
    server_cpu_seconds: float | None = None
    """Of etcd and the API server until all is there; None: not measured."""
    kinds: str = ""
    """Writes by resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of each measurement."""

    name: str
    value: Callable[[Measured], float | None]
    unit: str = ""
    per_job: bool = False
    """The value is of one job already."""
    goal: float | None = None
    """Of 1,000 jobs, as a multiple of 200, per job; None: no ratio."""
    compared: bool = True
    """Whether the ratio is meaningful."""

    def cells(self, shown: Sequence[Measured]) -> list[str]:
        """The row of the table."""
        values = [self.value(measured) for measured in shown]
        texts = ["–" if value is None else f"{value:.0f}{self.unit}" for value in values]
        ratio = f"{self.ratio(*shown[-2:]):.2f}" if self.compared else ""
        return [self.name, *texts, ratio, f"≤ {self.goal:g}" if self.goal else ""]

    def ratio(self, few: Measured, many: Measured) -> float:
        """What each of many jobs takes, divided by what each of few takes."""
        baseline, measured = self.value(few) or 0.0, self.value(many) or 0.0
        return measured / baseline / (1 if self.per_job else many.jobs / few.jobs)


BEFORE_COMMIT = "f855f94"
BEFORE = Measured(
    jobs=200, seconds=37, total_seconds=None, cpu_seconds=20, megabytes=123, writes=18, most_writes=18,
    reads=37, quiet_writes=0, quiet_reads=18, quiet_cpu=0.15, restart_seconds=18, restart_writes=0,
    restart_megabytes=183,
)  # fmt: skip
"""As this benchmark recorded it at that commit, on two cores of an AMD EPYC."""


GOAL = 1.25
ROWS = (
    Row(name="from the last apply until all is there", value=lambda m: m.seconds, unit=" s"),
    Row(name="from the first apply", value=lambda m: m.total_seconds, unit=" s", goal=GOAL),
    Row(name="CPU of the operator meanwhile", value=lambda m: m.cpu_seconds, unit=" s", goal=GOAL),
    Row(
        name="CPU of etcd and the API server meanwhile", value=lambda m: m.server_cpu_seconds,
        unit=" s", goal=GOAL,
    ),
    Row(name="memory of the operator at the highest", value=lambda m: m.megabytes, unit=" MB", goal=1.0),
    Row(name="writes per job", value=lambda m: m.writes, per_job=True, goal=GOAL),
    Row(name="writes for the busiest job", value=lambda m: m.most_writes, per_job=True),
    Row(name="reads per job", value=lambda m: m.reads, per_job=True),
    Row(name="then writes", value=lambda m: m.quiet_writes, compared=False),
    Row(name="then reads per job in a minute", value=lambda m: m.quiet_reads, per_job=True),
    Row(name="then CPU", value=lambda m: 100 * m.quiet_cpu, unit=" % of a core", goal=GOAL),
    Row(
        name="restart: every job was read after", value=lambda m: m.restart_seconds, unit=" s",
        goal=GOAL,
    ),
    Row(name="restart: writes", value=lambda m: m.restart_writes, compared=False),
    Row(
        name="restart: memory at the highest", value=lambda m: m.restart_megabytes, unit=" MB",
        goal=1.0,
    ),
)  # fmt: skip


def main() -> int:
    """Measure, write benchmarks/results/operator_scale.md, judge."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (_alone(jobs, Path(folder) / str(jobs)) for jobs in (FEW, MANY))
    shown = (BEFORE, few, many)
    header = (
        "",
        f"{BEFORE.jobs} jobs at {BEFORE_COMMIT}",
        "200 jobs",
        "1,000 jobs",
        "per job, 1,000 / 200",
        "goal",
    )
    body = f"""Jobs of {len(scale.REGIONS)} regions with 2 learners each, applied at once to an empty API \
server. etcd, API server and operator share the cores; there are no nodes and no controllers, so every job \
waits for its syncer, the state in which the operator polls most often. Figures are for all jobs where \
they do not state "per job".

{table(header, [row.cells(shown) for row in ROWS])}

{BEFORE_COMMIT} ran on two cores of an AMD EPYC, and its reads and writes were counted for 15 s longer after \
all was there. The base, an operator \
without jobs, is part of memory and CPU. Not counted as writes after all is there: the \
report of each job, five minutes after its creation, that its pods did not come (a status and an Event).

Writes by resource, 200 jobs: {few.kinds}. 1,000 jobs: {many.kinds}.
"""
    write_results(
        "operator_scale", "The operator with 200 and 1,000 jobs", body, packages=("kopf",)
    )
    goals = {
        "seconds for 200": (few.seconds, scale.CONVERGE_SECONDS),
        "megabytes for 200": (max(few.megabytes, few.restart_megabytes), 256.0),
        "writes of the busiest of 200": (float(few.most_writes), 40.0),
        "writes when quiet or restarted": (
            float(sum(m.quiet_writes + m.restart_writes for m in (few, many))), 0.0,
        ),
        # A server that is overloaded answers fewer reads; then the operator checks jobs too rarely.
        "reads in a quiet minute, of one of 200 / of one of 1,000": (
            few.quiet_reads / max(many.quiet_reads, 0.1), GOAL,
        ),
        **{
            f"per job, 1,000 / 200: {row.name}": (row.ratio(few, many), row.goal)
            for row in ROWS
            if row.goal is not None
        },
    }  # fmt: skip
    return judge(goals, at_most=frozenset(goals))


def _alone(jobs: int, folder: Path) -> Measured:
    """With an API server of its own."""
    folder.mkdir()
    local = LocalClusters(folder)
    try:
        return _measure(scale.api_server(local), folder, jobs)
    finally:
        local.stop()


def _measure(api: Cluster, folder: Path, jobs: int) -> Measured:
    with scale.operator(api, folder) as operator:
        seconds = scale.CONVERGE_SECONDS * jobs / FEW
        took = scale.converge(api, operator, jobs=jobs, seconds=seconds)
        time.sleep(SETTLE_SECONDS)
        asked = scale.requests(api, took.since)
        quiet, cpu = _quiet(api, operator)
        megabytes = operator.peak_megabytes()
    with scale.operator(api, folder) as operator:
        again, restart_seconds = _restarted(api, jobs)
        restart_megabytes = operator.peak_megabytes()
    writes = scale.writes_by_job(asked)
    kinds = Counter(request.resource for request in asked if request.writes)
    return Measured(
        jobs=jobs, seconds=took.seconds, total_seconds=took.total_seconds,
        cpu_seconds=took.cpu_seconds, server_cpu_seconds=took.server_cpu_seconds, megabytes=megabytes,
        writes=statistics.median(writes.values()), most_writes=max(writes.values()),
        reads=_reads(asked) / jobs, quiet_writes=_writes(quiet),
        quiet_reads=_reads(quiet) / jobs * 60 / QUIET_SECONDS, quiet_cpu=cpu / QUIET_SECONDS,
        restart_seconds=restart_seconds, restart_writes=_writes(again),
        restart_megabytes=restart_megabytes,
        kinds=", ".join(f"{name} {number}" for name, number in kinds.most_common()),
    )  # fmt: skip


def _quiet(api: Cluster, operator: scale.Operator) -> tuple[list[Request], float]:
    since, before = datetime.now(UTC), operator.cpu_seconds()
    time.sleep(QUIET_SECONDS)
    return scale.requests(api, since), operator.cpu_seconds() - before


def _restarted(api: Cluster, jobs: int) -> tuple[list[Request], float]:
    """What is asked after a start, and the time until every job was read."""
    since = datetime.now(UTC)

    def first_reads() -> list[datetime]:
        reads: dict[str, datetime] = {}
        for request in scale.requests(api, since):
            if (request.verb, request.resource) == ("get", "dilocojobs"):
                reads.setdefault(request.name, request.at)
        return list(reads.values()) if len(reads) == jobs else []

    # Each look reads the whole log, which takes time from the operator.
    found = until(
        first_reads, scale.CONVERGE_SECONDS * jobs / FEW, every=jobs / 100,
        expected="every job was read again",
    )  # fmt: skip
    time.sleep(10.0)  # the last reconciles end
    return scale.requests(api, since), (max(found) - since).total_seconds()


def _writes(found: list[Request]) -> int:
    return sum(request.writes and request.resource not in REPORTS for request in found)


def _reads(found: list[Request]) -> int:
    return sum(request.verb in ("get", "list") for request in found)


if __name__ == "__main__":
    raise SystemExit(main())
