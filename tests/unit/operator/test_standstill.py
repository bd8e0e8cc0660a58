"""A syncer that states that it waits: the job is not shown as training while nothing is merged."""

from __future__ import annotations

import pytest

from diloco_testing.kubernetes.operated_job import is_idle, manifest, training

HALT = "manual action: fragment 1 of Θ would grow from a root mean square of 8.19 to 11.8"


def stands(waiting_for=HALT, seconds=61.0):
    world = training(manifest(sync={"quorum": 2}))
    world.answers(state="Waiting", waiting_for=waiting_for, seconds_since_merge=seconds)
    world.reconcile(1)
    return world


@pytest.mark.parametrize("seconds", [61.0, -1.0], ids=["after merges", "before the first merge"])
def test_a_job_in_which_nothing_is_merged_has_the_syncers_reason_and_is_degraded(seconds):
    world = stands(seconds=seconds)
    assert world.reason("QuorumMet") == ("True", "NothingMerges")
    assert world.condition("QuorumMet")["message"].endswith(f"the syncer waits for {HALT}")
    assert world.status["state"] == "Degraded"
    assert ("Warning", "NothingMerges") in world.events


def test_seconds_that_pass_are_no_write():
    world = stands("a learner to make a step; no round began for 61 s")
    world.answers(
        state="Waiting", seconds_since_merge=66.0,
        waiting_for="a learner to make a step; no round began for 66 s",
    )  # fmt: skip
    assert is_idle(world.reconcile(5))
    world.answers(state="Waiting", waiting_for="the model to be exported", seconds_since_merge=70.0)
    world.reconcile(5)
    assert "the model to be exported" in world.condition("QuorumMet")["message"]


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
