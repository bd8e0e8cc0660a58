"""The largest jobs that a tenant can apply: what a decision about one costs the operator in memory."""

import tracemalloc

import pytest

from diloco_job.names import MAX_LEARNERS
from diloco_operator.decide.objections import MAX_QUEUED
from diloco_testing.kubernetes.operated_job import OperatedJob, manifest

MIB = 2**20
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def job(config_bytes: int, regions: dict[str, int], labels: dict[str, str]):
    config = {f"key{number}": "x" * (config_bytes // 256) for number in range(256)}
    body = manifest(
        learner={"recipe": {"name": "gpt", "config": config}},
        regions=[{"name": name, "learners": learners} for name, learners in regions.items()],
    )
    body["metadata"]["labels"] = labels
    return body


ALL = {f"r{number}": 1000 for number in range(MAX_LEARNERS // 1000)}


@pytest.mark.parametrize(
    ("body", "applied", "mib"),
    [
        (job(100_000, ALL, {}), len(ALL), 16),
        # Each StatefulSet records its pod template once more, as text.
        (job(20_000, {"eu": MAX_QUEUED}, QUEUE), MAX_QUEUED, 32),
    ],
    ids=["in ten regions", "in a queue"],
)
def test_a_decision_about_the_largest_job_takes_little_memory(body, applied, mib):
    world = OperatedJob(job=body)
    tracemalloc.start()
    try:
        decisions = world.decide()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(want["kind"] == "StatefulSet" for want in decisions.apply) == applied
    assert peak < mib * MIB
