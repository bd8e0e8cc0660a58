"""A region whose learners all fail in its own cluster: the syncer's region reports which one, and why."""

from dataclasses import replace

import pytest

from diloco_operator.state.observation import Failure, RegionFailure
from diloco_testing.kubernetes.operated_job import (
    is_idle,
    manifest,
    refuse,
    set_ready,
    training,
    trains_in,
)

US = ("us/0", "us/1")
REPORTED = RegionFailure(region="us", reason="LearnerRefused", message="all its learners failed")


def fails_in_us(*pods):
    """Region us after these learners were refused, and the decisions of that reconcile."""
    world = trains_in("us")
    for pod in pods:
        refuse(world.pod(pod))
    world.answers(gone=tuple(f"us/{pod[-1]}" for pod in pods))
    return world, world.reconcile()


def observed_in_eu(gone=US, quorum=2, failures=(REPORTED,)):
    """The syncer's region, with what the operator of us reported to the syncer."""
    world = trains_in("eu", sync={"quorum": quorum})
    world.answers(gone=gone, region_failures=failures)
    world.reconcile(1)
    return world


# ---------------------------------------------------------------- the region that fails


def test_the_failure_of_all_learners_of_a_region_is_reported_to_the_syncer():
    world, decisions = fails_in_us("a-us-0", "a-us-1")
    assert world.reason("Failed") == ("False", "NotFailed"), "a quorum is left in the other region"
    [reported] = decisions.regions_to_report
    assert (reported.region, reported.reason) == ("us", "LearnerRefused")
    assert reported.message == "all its learners failed, us/0: hidden size 4, expected 8"
    assert reported.learners == 2


def test_a_region_that_fails_the_job_for_itself_reports_its_reason():
    world = trains_in("us", sync={"quorum": 4})
    refuse(world.pod("a-us-0"))
    decisions = world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    message = world.condition("Failed")["message"]
    expected = RegionFailure(region="us", reason="LearnerRefused", message=message, learners=2)
    assert decisions.regions_to_report == (expected,)
    world.reconcile(1)
    assert world.reconcile(300).regions_to_report == (expected,), "until the syncer repeats it"
    world.answers(gone=US, region_failures=(expected,))
    assert world.reconcile(1).regions_to_report == ()


def test_one_learner_of_several_that_fails_is_reported_with_their_number():
    _, decisions = fails_in_us("a-us-0")
    [reported] = decisions.regions_to_report
    assert (reported.region, reported.reason, reported.learners) == ("us", "LearnerRefused", 1)
    assert reported.message.startswith("1 of 2 learners failed, us/0: hidden size 4")


def test_a_second_learner_that_fails_is_reported_again():
    world, decisions = fails_in_us("a-us-0")
    world.answers(gone=US, region_failures=decisions.regions_to_report)
    assert world.reconcile(1).regions_to_report == ()
    refuse(world.pod("a-us-1"))
    [reported] = world.reconcile(1).regions_to_report
    assert reported.learners == 2


def test_a_region_that_failed_by_its_deadline_reports_no_failed_learners():
    """Those of the others have the same deadline, and show it themselves."""
    world = trains_in("us", runPolicy={"activeDeadlineSeconds": 100})
    [reported] = world.reconcile(100).regions_to_report
    assert (reported.reason, reported.learners) == ("DeadlineExceeded", 0)


def test_a_region_whose_learners_are_ready_again_withdraws_its_failure():
    world, _ = fails_in_us("a-us-0", "a-us-1")
    for pod in ("a-us-0", "a-us-1"):
        set_ready(world.pod(pod), True)
    world.answers(region_failures=(REPORTED,))
    [reported] = world.reconcile(1).regions_to_report
    assert reported == RegionFailure(region="us", reason="", message="")
    world.answers()
    assert world.reconcile(1).regions_to_report == ()


def test_a_failed_region_that_is_suspended_to_correct_it_withdraws_its_failure():
    world = trains_in("us", sync={"quorum": 4})
    refuse(world.pod("a-us-0"))
    world.reconcile()
    world.change(runPolicy={"suspend": True})
    world.answers(gone=US, region_failures=(REPORTED,))
    [reported] = world.reconcile(1).regions_to_report
    assert (reported.region, reported.reason) == ("us", "")


def test_a_failed_region_reports_its_learners_to_each_syncer_until_it_was_suspended_and_resumed():
    """So the job is resumed there first, and last in the syncer's region."""
    world = trains_in("us", sync={"quorum": 4})
    refuse(world.pod("a-us-0"))
    world.reconcile()
    world.answers(gone=US)
    [reported] = world.reconcile(1).regions_to_report
    assert (reported.reason, reported.learners) == ("LearnerRefused", 2)
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.settle()
    world.answers()
    assert world.reconcile(1).regions_to_report == ()


def test_a_syncer_that_repeats_a_failure_without_its_number_of_learners_has_the_report():
    """An older one, to which the operator would report at every reconcile otherwise."""
    world, decisions = fails_in_us("a-us-0", "a-us-1")
    [reported] = decisions.regions_to_report
    world.answers(gone=US, region_failures=(replace(reported, learners=0),))
    assert world.reconcile(1).regions_to_report == ()
    world.answers(gone=US, region_failures=(replace(reported, learners=0, reason="Other"),))
    assert world.reconcile(1).regions_to_report == (reported,)


def test_a_region_that_follows_the_syncers_region_reports_nothing():
    world = trains_in("us")
    world.answers(failure=Failure(reason="DeadlineExceeded", message="ran too long"))
    assert world.reconcile(1).regions_to_report == ()
    assert world.reason("Failed") == ("True", "SyncerRegionFailed")
    assert world.reconcile(1).regions_to_report == ()


def test_the_syncers_own_operator_reports_nothing_of_its_regions():
    world = training(manifest(sync={"quorum": 1}))
    for pod in ("a-us-0", "a-us-1"):
        refuse(world.pod(pod))
    assert world.reconcile(1).regions_to_report == ()


def test_a_failure_is_not_reported_to_a_syncer_that_does_not_answer():
    world = trains_in("us")
    for pod in ("a-us-0", "a-us-1"):
        refuse(world.pod(pod))
    world.becomes_unreachable()
    assert world.reconcile(1).regions_to_report == ()


# ---------------------------------------------------------------- the syncer's region


def test_the_syncers_region_names_the_region_that_failed_and_its_reason():
    world = observed_in_eu()
    assert world.reason("QuorumMet") == ("True", "RegionFailed")
    message = world.condition("QuorumMet")["message"]
    assert "region us failed: LearnerRefused: all its learners failed" in message
    assert ("Warning", "RegionFailed") in world.events
    assert world.status["state"] == "Degraded"
    assert is_idle(world.reconcile(1)), "one write"


def test_without_a_quorum_it_names_the_region_that_is_missing():
    world = observed_in_eu(quorum=3)
    assert world.reason("QuorumMet") == ("False", "RegionMissing")
    assert "region us failed: LearnerRefused" in world.condition("QuorumMet")["message"]
    assert ("Warning", "RegionMissing") in world.events


def test_the_failure_is_over_when_the_region_trains_again():
    world = observed_in_eu()
    world.answers(region_failures=(REPORTED,))
    world.reconcile(1)
    assert world.reason("QuorumMet") == ("True", "EnoughLearners"), "whatever was reported before"


@pytest.mark.parametrize("region", ["eu", "asia"])
def test_failures_of_the_own_and_of_unknown_regions_are_not_shown(region):
    world = observed_in_eu(failures=(replace(REPORTED, region=region),))
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")


def failures_in_us_and_eu(num_us, *eu_pods, gone, quorum=3):
    """The syncer's region, where these learners failed, while as many failed in us."""
    reported = replace(
        REPORTED, learners=num_us, message=f"{num_us} of 2 learners failed, us/0: no"
    )
    world = trains_in("eu", sync={"quorum": quorum})
    for name in eu_pods:
        refuse(world.pod(name))
    world.answers(gone=gone, region_failures=(reported,))
    decisions = world.reconcile(1)
    return world, decisions


def test_a_job_fails_when_the_learners_that_failed_in_several_regions_leave_no_quorum():
    world, decisions = failures_in_us_and_eu(1, "a-eu-1", gone=("eu/1", "us/0"))
    assert decisions.fails, "decided again by what the store shows"
    assert world.reason("Failed") == ("True", "LearnersFailed")
    message = world.condition("Failed")["message"]
    assert message.startswith("2 learners are left (quorum: 3): region us: LearnerRefused: 1 of 2")
    assert "; learner eu/1: hidden size 4, expected 8" in message
    assert ("Warning", "LearnersFailed") in world.events
    assert world.reconcile(1).failure_to_report == Failure(reason="LearnersFailed", message=message)
    world.run_controllers()
    world.reconcile(1)
    assert not world.replicas()["a-eu"]


def test_a_job_fails_when_only_another_region_lost_too_many():
    world, _ = failures_in_us_and_eu(2, gone=US)
    assert world.reason("Failed") == ("True", "LearnersFailed")


@pytest.mark.parametrize(("num_us", "quorum"), [(1, 3), (2, 2)])
def test_a_job_with_a_quorum_left_in_all_regions_continues(num_us, quorum):
    world, _ = failures_in_us_and_eu(num_us, gone=US[:num_us], quorum=quorum)
    assert world.reason("Failed") == ("False", "NotFailed")


def test_a_learner_that_trains_has_not_failed_whatever_its_region_reported():
    world, _ = failures_in_us_and_eu(2, gone=("us/0",))
    assert world.reason("Failed") == ("False", "NotFailed")


def test_a_region_never_counts_for_more_learners_than_it_has():
    world, _ = failures_in_us_and_eu(4_000_000_000, gone=US, quorum=2)
    assert world.reason("Failed") == ("False", "NotFailed")


def test_only_the_syncers_region_counts_the_learners_of_all():
    world = trains_in("us", sync={"quorum": 4})
    reported = replace(REPORTED, region="eu", learners=2)
    world.answers(gone=("eu/0", "eu/1"), region_failures=(reported,))
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed"), "it follows the syncer's region"


def test_a_job_that_failed_in_several_regions_resumes_with_the_syncers_region():
    world, _ = failures_in_us_and_eu(1, "a-eu-1", gone=("eu/1", "us/0"))
    world.becomes_unreachable()
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.settle()
    world.answers()
    world.settle()
    assert world.status["state"] == "Training"


def test_what_another_region_reports_is_bounded():
    reported = RegionFailure(region="us", reason="\x1b" * 5000, message="m" * 5000)
    message = observed_in_eu(failures=(reported,)).condition("QuorumMet")["message"]
    assert len(message) < 600
    assert message.isprintable()
