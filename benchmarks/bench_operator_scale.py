"""
200 jobs of 3 regions on a real API server without nodes: `python benchmarks/bench_operator_scale.py`.

Time until every job has its children and its conditions, the operator's memory and CPU, writes and
reads per job (from the API server's audit log), and what it does in the minutes after: when nothing
changes, and when it is restarted. Goals: the limits of `tests/e2e/test_scale.py`. Needs root, as the
local clusters of tests/e2e do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from _timing import ROOT, judge, table, write_results

sys.path.insert(0, str(ROOT / "tests/support"))

from diloco_testing.clusters import scale
from diloco_testing.clusters.audit import Request
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.provision import Cluster, LocalClusters

QUIET_SECONDS = 90.0


def main() -> int:
    """Measure, write benchmarks/results/operator_scale.md, judge."""
    with tempfile.TemporaryDirectory() as folder:
        local = LocalClusters(Path(folder))
        try:
            return _measure(scale.api_server(local), Path(folder))
        finally:
            local.stop()


def _measure(api: Cluster, folder: Path) -> int:
    with scale.operator(api, folder) as operator:
        took = scale.converge(api, operator)
        time.sleep(30.0)  # what the first status could not know yet
        asked = scale.requests(api, took.since)
        quiet, cpu = _quiet(api, operator)
        megabytes = operator.peak_megabytes()
    with scale.operator(api, folder) as operator:
        again, restarted_seconds = _restarted(api)
        restarted_megabytes = operator.peak_megabytes()
    writes = scale.writes_by_job(asked)
    kinds = Counter(request.resource for request in asked if request.writes)
    rows = [
        ("time until all is there", f"{took.seconds:.0f} s", f"≤ {scale.CONVERGE_SECONDS:.0f} s"),
        ("CPU of the operator meanwhile", f"{took.cpu_seconds:.0f} s", ""),
        ("its memory at the highest", f"{megabytes:.0f} MB", "≤ 256 MB"),
        ("writes per job", f"{statistics.median(writes.values()):.0f}, at most "
         f"{max(writes.values())}", "≤ 40"),
        ("reads per job", f"{_reads(asked) / scale.JOBS:.0f}", ""),
        ("then writes in a minute", str(_writes(quiet)), "0"),
        ("then reads per job in a minute",
         f"{_reads(quiet) / scale.JOBS * 60 / QUIET_SECONDS:.0f}", ""),
        ("then CPU", f"{100 * cpu / QUIET_SECONDS:.0f} % of a core", ""),
        ("restart: every job was read after", f"{restarted_seconds:.0f} s", ""),
        ("restart: writes", str(_writes(again)), "0"),
        ("restart: memory at the highest", f"{restarted_megabytes:.0f} MB", "≤ 256 MB"),
    ]  # fmt: skip
    regions = len(scale.REGIONS)
    body = f"""{scale.JOBS} jobs of {regions} regions with 2 learners each ({scale.JOBS * regions} \
StatefulSets), applied at once. etcd, API server and operator share the cores; there are no nodes and \
no controllers, so every job waits for its syncer, the state in which the operator polls most often.

{table(("", "measured", "goal"), rows)}

Writes of all jobs by resource: {", ".join(f"{name} {n}" for name, n in kinds.most_common())}.
"""
    write_results("operator_scale", "The operator with 200 jobs", body, packages=("kopf",))
    goals = {
        "seconds": (took.seconds, scale.CONVERGE_SECONDS),
        "megabytes": (max(megabytes, restarted_megabytes), 256.0),
        "writes per job": (float(max(writes.values())), 40.0),
        "writes when quiet": (float(_writes(quiet) + _writes(again)), 0.0),
    }
    return judge(goals, at_most=frozenset(goals))


def _quiet(api: Cluster, operator: scale.Operator) -> tuple[list[Request], float]:
    since, before = datetime.now(UTC), operator.cpu_seconds()
    time.sleep(QUIET_SECONDS)
    return scale.requests(api, since), operator.cpu_seconds() - before


def _restarted(api: Cluster) -> tuple[list[Request], float]:
    since, begun = datetime.now(UTC), time.monotonic()

    def all_read() -> bool:
        found = scale.requests(api, since)
        read = {
            request.name
            for request in found
            if (request.verb, request.resource) == ("get", "dilocojobs")
        }
        return len(read) == scale.JOBS

    until(all_read, scale.CONVERGE_SECONDS, expected="every job was read again", every=1.0)
    seconds = time.monotonic() - begun
    time.sleep(10.0)  # the last reconciles end
    return scale.requests(api, since), seconds


def _writes(found: list[Request]) -> int:
    return sum(request.writes for request in found)


def _reads(found: list[Request]) -> int:
    return sum(request.verb in ("get", "list") for request in found)


if __name__ == "__main__":
    raise SystemExit(main())
