"""
200 jobs of 3 regions: how long they take, what the operator needs for it, and how often it writes.

`benchmarks/bench_operator_scale.py` measures the same and writes it down.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from diloco_testing.clusters import scale
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.machine import slowdown
from diloco_testing.clusters.scale import CONVERGE_SECONDS, JOBS

QUIET_SECONDS = 60.0
MOST_MEGABYTES = 256
MOST_WRITES = 40
"""For each job: its children once each (16 or so), its status, Events; nothing twice."""


@pytest.fixture(scope="module")
def api(local):
    """A cluster without nodes, with the chart's rights and CRD in it."""
    cluster = scale.api_server(local)
    yield cluster
    local.end("scale")


@pytest.fixture(scope="module")
def converged(api, tmp_path_factory):
    """The operator, and what it took until every child was there."""
    with scale.operator(api, tmp_path_factory.mktemp("operator")) as operator:
        yield operator, scale.converge(api, operator)


def test_two_hundred_jobs_get_their_children(converged):
    _, took = converged
    assert took.seconds < CONVERGE_SECONDS * slowdown()


def test_the_operator_stays_small(converged):
    operator, _ = converged
    assert operator.peak_megabytes() < MOST_MEGABYTES


def test_no_job_is_written_about_again_and_again_and_then_it_is_quiet(api, converged):
    _, took = converged

    def quiet() -> bool:
        pause = datetime.now(UTC) - timedelta(seconds=QUIET_SECONDS)
        return not any(request.writes for request in scale.requests(api, pause))

    # What the first status could not know yet is written; jobs whose pods never come are reported
    # five minutes after their creation, which a slow machine may reach here.
    until(quiet, CONVERGE_SECONDS + 360, every=5.0, expected="the operator rests")
    writes = [request for request in scale.requests(api, took.since) if request.writes]
    about = scale.writes_by_job(writes)
    assert len(about) == JOBS, set(about)
    assert max(about.values()) <= MOST_WRITES, about.most_common(3)
    applied = Counter(
        (request.resource, request.name)
        for request in writes
        if request.verb == "patch" and "/" not in request.resource
    )
    assert applied.most_common(1)[0][1] <= 2, applied.most_common(5)
