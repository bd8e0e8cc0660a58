"""What `diloco chaos --job` sees of a job: who trains, what can be disturbed, and whether it ended."""

import pytest

from diloco_cli.job_view import view


def job(*, size=1, conditions=(), suspend=False, **status):
    return {
        "metadata": {"name": "a", "namespace": "team"},
        "spec": {
            "steps": 9,
            "sync": {"quorum": 2},
            "learner": {"podsPerLearner": size},
            "regions": [{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}],
            "runPolicy": {"suspend": suspend, "learnerRestartLimit": 3},
        },
        "status": {
            "step": 5,
            "conditions": [{"type": kind, "status": "True", "message": "why"} for kind in conditions],
            **status,
        },
    }  # fmt: skip


def pod(name, region="eu", role="learner", *, ready=True, state="running", **metadata):
    return {
        "metadata": {
            "name": name, "uid": f"uid-{name}", **metadata,
            "labels": {"diloco.dev/region": region, "diloco.dev/role": role},
        },
        "status": {
            "phase": "Running" if state == "running" else "Pending",
            "containerStatuses": [{"name": "main", "state": {state: {}}}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }  # fmt: skip


def test_ready_learners_train_and_those_of_other_clusters_as_the_syncer_reports():
    regions = [{"name": "eu", "training": 2}, {"name": "us", "training": 1}]
    found = view(
        job(regions=regions),
        [pod("a-eu-0"), pod("a-eu-1", ready=False), pod("a-syncer-x", "eu", "syncer")],
    )
    assert (found.learners, found.here) == (("eu/0", "eu/1", "us/0", "us/1"), ("eu/0", "eu/1"))
    assert found.training == {"eu/0", "us/0"}
    assert (found.step, found.steps, found.restart_limit) == (5, 9, 3)
    assert found.serves
    assert [p.uid for p in found.targets("eu/1")[0]] == ["uid-a-eu-1"]


def test_a_learner_of_several_pods_trains_and_is_disturbed_whole():
    pods = [pod(f"a-eu-{n}") for n in (0, 1, 2)]
    found = view(job(size=2), pods)
    assert found.training == {"eu/0"}
    assert [p.name for p in found.targets("eu/0")[0]] == ["a-eu-0", "a-eu-1"]
    assert found.targets("eu/1") == ((), "only 1 of its 2 pods exist")
    assert found.targets("us/0") == ((), "only 0 of its 2 pods exist")
    pods[1] = pod("a-eu-1", ready=False)
    assert view(job(size=2), pods).training == set()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "its pod is gone"),
        (
            [pod("a-eu-0", state="waiting")],
            "pod a-eu-0 is Pending, its container does not run",
        ),
        (
            [pod("a-eu-0", deletionTimestamp="2026-01-02T03:04:05Z")],
            "pod a-eu-0 is being deleted",
        ),
        ([{"metadata": {"name": "a-eu-0", "labels": {
            "diloco.dev/region": "eu", "diloco.dev/role": "learner"}}}],
         "pod a-eu-0 is unknown, its container does not run"),
    ],
)  # fmt: skip
def test_a_pod_in_which_no_command_can_run_is_not_disturbed(given, reason):
    found = view(job(), given)
    assert found.targets("eu/0") == ((), reason)
    assert found.training == set()


def test_the_syncer_is_disturbed_in_the_pod_that_runs():
    old = pod("a-syncer-x", role="syncer", deletionTimestamp="now")
    assert view(job(), [old]).syncer_targets() == ((), "pod a-syncer-x is being deleted")
    found = view(job(), [old, pod("a-syncer-y", role="syncer", ready=False)])
    assert [p.name for p in found.syncer_targets()[0]] == ["a-syncer-y"]
    assert not found.serves
    assert view(job(), []).syncer_targets() == ((), "its pod is gone")


def test_pods_of_other_jobs_and_roles_are_no_learners():
    found = view(
        job(), [pod("a-eu-b-0"), pod("a-evaluator-0", role="evaluator"), pod("a-x-0", "x")]
    )
    assert (found.here, found.pods, found.syncer) == ((), {}, ())


@pytest.mark.parametrize("end", ["Complete", "Failed", "Suspended"])
def test_a_job_that_ended_is_seen(end):
    found = view(job(conditions=["Accepted", end]), [])
    assert (found.end, found.message) == (end, "why")
    assert view(job(suspend=True), []).end == "Suspended"
    assert view(job(conditions=["Accepted"]), []).end == ""
    assert view({"metadata": {"name": "a"}}, []).learners == ()
