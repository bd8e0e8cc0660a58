"""The largest jobs that a tenant can apply: what a decision about one costs the operator in memory."""

import tracemalloc

import pytest

from diloco_job.names import MAX_LEARNERS, MAX_QUEUED
from diloco_testing.kubernetes.operated_job import OperatedJob, manifest

MIB = 2**20
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def job(config_bytes: int, regions: dict[str, int], labels: dict[str, str]):
    config = {f"key{number}": "x" * (config_bytes // 256) for number in range(256)}
    body = manifest(
        learner={"recipe": {"name": "gpt", "config": config}},
        regions=[{"name": name, "learners": learners} for name, learners in regions.items()],
        sync={"quorum": 1},
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
    decisions, peak = measured(OperatedJob(job=body))
    assert sum(want["kind"] == "StatefulSet" for want in decisions.apply) == applied
    assert peak < mib * MIB


@pytest.mark.parametrize("suspend", [False, True])
def test_raising_a_queued_job_to_the_most_learners_takes_little_memory(suspend):
    world = OperatedJob(job=job(20_000, {"r0": 1}, QUEUE))
    world.settle()
    regions = [{"name": name, "learners": learners} for name, learners in ALL.items()]
    world.change(regions=regions, runPolicy={"suspend": suspend})
    check_refused(world)


@pytest.mark.parametrize("suspend", [False, True])
def test_a_label_on_the_largest_suspended_job_takes_little_memory(suspend):
    world = OperatedJob(job=job(20_000, ALL, {}))
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.job["metadata"]["labels"] = QUEUE
    world.change(runPolicy={"suspend": suspend})
    check_refused(world)


@pytest.mark.parametrize("index", ["999", "1" + "0" * 60])
def test_statefulsets_with_high_numbers_make_no_room_for_those_between(index):
    world = OperatedJob(job=job(20_000, {"r0": 1}, QUEUE))
    world.settle()
    [(_, live)] = [item for item in world.children.items() if item[0][0] == "StatefulSet"]
    for name in ALL:
        own = {"diloco.dev/region": name, "diloco.dev/learner": index}
        fake = {"name": f"x-{name}", "labels": {**live["metadata"]["labels"], **own}}
        world.children["StatefulSet", fake["name"]] = {
            **live,
            "metadata": {**live["metadata"], **fake},
        }
    regions = [{"name": name, "learners": learners} for name, learners in ALL.items()]
    world.change(regions=regions, runPolicy={"suspend": False})
    check_refused(world)


def check_refused(world):
    decisions, peak = measured(world)
    accepted = next(
        entry for entry in decisions.status["conditions"] if entry["type"] == "Accepted"
    )
    assert accepted["reason"] == "TooManyForQueue"
    assert not any(
        want["kind"] == "StatefulSet" and want["spec"]["replicas"] for want in decisions.apply
    )
    assert peak < 32 * MIB


def measured(world):
    """What is decided, and the most bytes of memory that it took."""
    tracemalloc.start()
    try:
        return world.decide(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
