"""A syncer that states that it waits: the job is not shown as training while nothing is merged."""

from __future__ import annotations

import pytest

from diloco_testing.kubernetes.operated_job import is_idle, manifest, training

HALT = "manual action: fragment 1 of Θ would grow from a root mean square of 8.19 to 11.8"


def stands(waiting_for=HALT, seconds=61.0, **answer):
    """A job of two learners per region whose quorum is met since a minute."""
    world = training(manifest(sync={"quorum": 2}))
    world.answers(state="Waiting", waiting_for=waiting_for, seconds_since_merge=seconds, **answer)
    world.reconcile(60)
    return world


@pytest.mark.parametrize(
    "answer", [{}, {"seconds": -1.0}, {"step": 0}], ids=["after merges", "none yet", "at step 0"]
)
def test_a_job_in_which_nothing_is_merged_has_the_syncers_reason_and_is_degraded(answer):
    world = stands(**answer)
    assert world.reason("QuorumMet") == ("True", "NothingMerges")
    assert world.condition("QuorumMet")["message"].endswith(f"the syncer waits for {HALT}")
    assert world.status["state"] == "Degraded"
    assert ("Warning", "NothingMerges") in world.events


def test_seconds_that_pass_are_no_write_but_another_learner_is():
    late = (
        "a merge of fragment 0 (step 4, Merging); there was none for {} s; last failure: {}: Late"
    )
    world = stands(late.format(61, "eu/1"))
    world.answers(state="Waiting", seconds_since_merge=66.0, waiting_for=late.format(66, "eu/1"))
    assert is_idle(world.reconcile(5))
    world.answers(state="Waiting", seconds_since_merge=71.0, waiting_for=late.format(71, "eu/0"))
    world.reconcile(5)
    assert "71 s; last failure: eu/0" in world.condition("QuorumMet")["message"]


def test_one_answer_that_is_late_does_not_make_the_job_train():
    world = stands()
    world.becomes_unreachable("DialTimeout")
    world.reconcile(1)
    assert (world.reason("QuorumMet")[1], world.status["state"]) == ("NothingMerges", "Degraded")


def test_a_quorum_that_has_just_come_back_has_time_to_merge():
    world = training(manifest(sync={"quorum": 4}))
    world.answers(
        gone=("us/0",), state="Waiting", waiting_for="a quorum of 4", seconds_since_merge=3600.0
    )
    world.reconcile(3600)
    assert world.reason("QuorumMet") == ("False", "TooFewLearners")
    for seconds, reason in ((1, "EnoughLearners"), (58, "EnoughLearners"), (2, "NothingMerges")):
        world.answers(
            state="Waiting", waiting_for="a merge of fragment 0", seconds_since_merge=3700.0
        )
        world.reconcile(seconds)
        assert world.reason("QuorumMet") == ("True", reason)


def test_the_end_of_a_large_job_takes_minutes_and_a_failure_is_shown():
    steps = manifest()["spec"]["steps"]
    world = stands("the model to be exported", seconds=300.0, step=steps)
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    full = "the model to be exported; last failure: no space left on device"
    world = stands(full, seconds=300.0, step=steps)
    assert world.reason("QuorumMet") == ("True", "NothingMerges")


def test_a_job_that_merges_again_trains():
    world = stands()
    world.answers()
    world.reconcile(1)
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    assert world.status["state"] == "Training"


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "Waiting", "waiting_for": "the model to be exported", "seconds_since_merge": 2.0},
        {"state": "Waiting", "waiting_for": "", "seconds_since_merge": 90.0},
        {"state": "Training", "waiting_for": "", "seconds_since_merge": 90.0},
    ],
    ids=["for a moment", "for nothing", "slow steps"],
)
def test_a_short_wait_and_slow_steps_are_no_standstill(answer):
    world = training(manifest(sync={"quorum": 2}))
    world.answers(**answer)
    world.reconcile(1)
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    assert world.status["state"] == "Training"


def test_without_a_quorum_the_missing_learners_are_the_reason():
    world = training(manifest(sync={"quorum": 4}))
    world.answers(
        state="Waiting", gone=("us/0",), waiting_for="a quorum of 4 (learners training: 3)",
        seconds_since_merge=90.0,
    )  # fmt: skip
    world.reconcile(1)
    assert world.reason("QuorumMet") == ("False", "TooFewLearners")
