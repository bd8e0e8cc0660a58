"""A job in two clusters that fails where its syncer runs: the other region learns of it, and follows."""

import pytest

from diloco_operator.state.observation import Failure
from diloco_testing.kubernetes.operated_job import (
    is_idle,
    manifest,
    refuse,
    training,
    trains_in,
)

DEADLINE = {"runPolicy": {"activeDeadlineSeconds": 100}}
FAILURE = Failure(reason="DeadlineExceeded", message="the job ran longer than allowed (100 s)")


def fails_in_eu(**policy):
    """The syncer's region, in the reconcile that fails the job."""
    world = trains_in("eu", runPolicy={**DEADLINE["runPolicy"], **policy})
    return world, world.reconcile(100)


def failed_in_us():
    world = trains_in("us")
    world.answers(failure=FAILURE)
    world.reconcile(1)
    world.settle()
    return world


# ---------------------------------------------------------------- the syncer's region


def test_a_failure_is_reported_to_the_syncer():
    world, decisions = fails_in_eu()
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    message = world.condition("Failed")["message"]
    assert decisions.failure_to_report == Failure(reason="DeadlineExceeded", message=message)


def test_a_failure_is_reported_again_until_the_syncer_repeats_it():
    world, _ = fails_in_eu()
    assert world.reconcile(1).failure_to_report is not None
    world.answers(failure=FAILURE)
    assert world.reconcile(1).failure_to_report is None


@pytest.mark.parametrize("policy", ["Running", "All"])
def test_a_failed_syncer_answers_other_regions_for_two_minutes(policy):
    world, _ = fails_in_eu(cleanupPolicy=policy)
    world.reconcile(1)
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1}
    world.run_controllers()
    assert world.reconcile(60).requeue_seconds <= 59
    world.reconcile(59)
    assert not any(world.replicas().values())
    assert bool(world.children) == (policy == "Running")


def test_in_one_cluster_a_failure_is_not_reported_and_the_syncer_stops_at_once():
    world = training(manifest(**DEADLINE))
    assert world.reconcile(100).failure_to_report is None
    world.reconcile(1)
    assert not any(world.replicas().values())


def test_a_failure_is_not_reported_to_a_syncer_that_does_not_answer():
    world = trains_in("eu", **DEADLINE)
    world.becomes_unreachable()
    assert world.reconcile(100).failure_to_report is None
    assert world.reason("Failed") == ("True", "DeadlineExceeded")


def test_a_failure_of_the_former_attempt_does_not_fail_the_syncers_region():
    world = trains_in("eu")
    world.answers(failure=FAILURE)
    assert world.reconcile(30).failure_to_report is None
    assert world.reason("Failed") == ("False", "NotFailed")


# ---------------------------------------------------------------- the other region


def test_another_region_states_where_and_why_the_job_failed_and_frees_its_pods():
    world = failed_in_us()
    assert world.status["state"] == "Failed"
    assert world.reason("Failed") == ("True", "SyncerRegionFailed")
    message = world.condition("Failed")["message"]
    assert "failed in region eu" in message
    assert f"{FAILURE.reason}: {FAILURE.message}" in message
    assert ("Warning", "SyncerRegionFailed") in world.events
    assert world.replicas() == {"a-us": 0}


def test_it_stays_failed_without_a_write_while_the_syncer_is_unavailable():
    world = failed_in_us()
    world.becomes_unreachable()
    world.reconcile(40)
    assert world.reason("SyncerReachable") == ("False", "Failed")
    assert world.reason("Failed") == ("True", "SyncerRegionFailed")
    decisions = world.reconcile(3600)
    assert is_idle(decisions)
    assert decisions.requeue_seconds == 30, "it asks on: no event announces that the job resumes"


def test_it_follows_when_the_job_is_resumed_in_the_syncers_region():
    world = failed_in_us()
    world.becomes_unreachable()
    world.reconcile(40)
    world.answers("Waiting", gone=("us/0", "us/1"))
    world.reconcile(30)
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.replicas() == {"a-us": 2}
    world.run_controllers()
    world.answers(step=200)
    world.settle()
    assert world.status["state"] == "Training"
    assert "completionTime" not in world.status


def test_the_deadline_begins_anew_with_the_syncers_region():
    world = trains_in("us", **DEADLINE)
    world.answers(failure=FAILURE)
    world.reconcile(90)
    world.answers()
    world.reconcile(90)
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.status["startTime"] == "2026-03-01T12:03:00Z"


def test_it_can_be_suspended_and_resumed_by_itself():
    world = failed_in_us()
    world.becomes_unreachable()
    world.change(runPolicy={"suspend": True})
    world.reconcile(60)
    assert world.reason("Suspended") == ("True", "Suspended")
    world.change(runPolicy={})
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.replicas() == {"a-us": 2}


def test_a_failure_of_its_own_stays_whatever_the_syncer_answers():
    world = trains_in("us", sync={"quorum": 4})
    refuse(world.pod("a-us-1"))
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    for failure in (FAILURE, None):
        world.answers(failure=failure)
        world.reconcile(30)
        assert world.reason("Failed") == ("True", "LearnerRefused")


def test_what_another_region_reports_is_bounded():
    world = trains_in("us")
    world.answers(failure=Failure(reason="\x1b" * 5000, message="m" * 5000))
    world.reconcile(1)
    message = world.condition("Failed")["message"]
    assert len(message) <= 1000
    assert message.isprintable()
