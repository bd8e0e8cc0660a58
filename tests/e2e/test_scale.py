"""
50 jobs of 3 regions, then 200: how long they take, what the operator needs for it, and how often it writes.

`benchmarks/bench_operator_scale.py` measures the same with 200 and 1,000 jobs, and writes it down.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from diloco_testing.clusters import scale
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.scale import CONVERGE_SECONDS, JOBS
from diloco_testing.machine import slowdown

FEW = 50
QUIET_SECONDS = 60.0
MAX_MEGABYTES = 256
MAX_GROWTH = 1.25
"""Of what a job costs where there are four times as many."""
MAX_WRITES = 40
"""For each job: its children once each (16 or so), its status, Events; nothing twice."""


@pytest.fixture(scope="module")
def api(local):
    """A cluster without nodes, with the chart's rights and CRD in it."""
    cluster = scale.api_server(local)
    yield cluster
    local.end("scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The operator when every child of all jobs was there."""

    operator: scale.Operator
    since: datetime
    seconds: float
    empty_megabytes: float
    """Before the first job."""
    few_megabytes: float
    """With FEW jobs."""
    megabytes: float


@pytest.fixture(scope="module")
def converged(api, tmp_path_factory):
    with scale.operator(api, tmp_path_factory.mktemp("operator")) as operator:
        until(lambda: "operator of" in operator.log.read_text(), 60, expected="the operator runs")
        empty = operator.peak_megabytes()
        few = scale.converge(api, operator, jobs=FEW)
        few_megabytes = operator.peak_megabytes()
        all_jobs = scale.converge(api, operator, first=FEW)
        yield Grown(
            operator=operator, since=few.since, seconds=all_jobs.seconds, empty_megabytes=empty,
            few_megabytes=few_megabytes, megabytes=operator.peak_megabytes(),
        )  # fmt: skip


def test_two_hundred_jobs_get_their_children(converged):
    assert converged.seconds < CONVERGE_SECONDS * slowdown()


def test_the_operator_stays_small(converged):
    assert converged.operator.peak_megabytes() < MAX_MEGABYTES


def test_memory_grows_no_faster_than_the_number_of_jobs(converged):
    few = (converged.few_megabytes - converged.empty_megabytes) / FEW
    more = (converged.megabytes - converged.few_megabytes) / (JOBS - FEW)
    print(f"{few:.2f} MB for each of {FEW} jobs, {more:.2f} MB for each one more")
    assert more <= MAX_GROWTH * few


def test_no_job_is_written_about_again_and_again_and_then_it_is_quiet(api, converged):
    def quiet() -> bool:
        pause = datetime.now(UTC) - timedelta(seconds=QUIET_SECONDS)
        return not any(request.writes for request in scale.requests(api, pause))

    # What the first status could not know yet is written; jobs whose pods never come are reported
    # five minutes after their creation, which a slow machine may reach here.
    until(quiet, CONVERGE_SECONDS + 360, every=5.0, expected="the operator rests")
    writes = [request for request in scale.requests(api, converged.since) if request.writes]
    about = scale.writes_by_job(writes)
    assert len(about) == JOBS, set(about)
    assert max(about.values()) <= MAX_WRITES, about.most_common(3)
    first = [about[scale.name_of(number)] for number in range(FEW)]
    others = [about[scale.name_of(number)] for number in range(FEW, JOBS)]
    assert statistics.median(others) <= MAX_GROWTH * statistics.median(first)
    applied = Counter(
        (request.resource, request.name)
        for request in writes
        if request.verb == "patch" and "/" not in request.resource
    )
    assert applied.most_common(1)[0][1] <= 2, applied.most_common(5)
