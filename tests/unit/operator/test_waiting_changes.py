"""A change of the manifest that waits for learners is visible: LearnersReady names whom it has not reached."""

from diloco_testing.kubernetes.operated_job import (
    is_idle,
    manifest,
    refuse,
    set_ready,
    training,
)

RECIPE = {"recipe": {"name": "gpt", "config": {}}}
TWO_PODS = {"command": ["python", "train.py"], "podsPerLearner": 2}
WAITS = "not updated yet, because learners are missing or being replaced: "


def message(world):
    return world.condition("LearnersReady")["message"]


def test_a_change_that_a_failed_learner_holds_back_is_named_until_it_comes():
    """Exactly a quorum trains, so the region that is complete does not roll."""
    world = training(manifest(sync={"quorum": 3}))
    refuse(world.pod("a-eu-1"))
    world.count_pods()
    world.answers(gone=("eu/1",))
    world.reconcile(30)
    assert WAITS not in message(world)
    world.change(learner={**RECIPE, "image": "new"})
    world.reconcile()
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    assert message(world).endswith(f"; {WAITS}us")
    world.count_pods()
    assert is_idle(world.reconcile(60)), "said once"
    # The corrected image brings the learner back.
    world.run_controllers()
    world.answers()
    world.settle()
    world.answers()
    world.settle()
    assert message(world) == "4 of 4 are training"
    images = {
        pod["spec"]["containers"][0]["image"]
        for name, pod in world.pods.items()
        if "syncer" not in name
    }
    assert images == {"new"}


def test_the_region_whose_turn_comes_next_is_named_while_the_first_one_rolls():
    world = training()
    world.change(learner={**RECIPE, "image": "new"})
    world.reconcile()
    assert message(world) == f"4 of 4 are training; {WAITS}us"
    assert world.reason("LearnersReady") == ("True", "AllTraining")


def test_learners_of_several_pods_are_named_one_by_one():
    world = training(manifest(learner=TWO_PODS))
    world.change(learner={**TWO_PODS, "image": "new"})
    world.reconcile()
    world.count_pods()
    world.reconcile(1)
    assert message(world).endswith(f"; {WAITS}eu/1, us/0, us/1")
    world.run_controllers(ready=lambda pod: False)
    world.answers(gone=("eu/0",))
    world.reconcile(1)
    assert message(world).endswith(f"; {WAITS}eu/1, us/0, us/1")
    for name in ("a-eu-0", "a-eu-1"):
        set_ready(world.pod(name), True)
    world.count_pods()
    world.answers()
    world.reconcile(1)
    assert message(world).endswith(f"; {WAITS}us/0, us/1")


def test_nothing_waits_in_a_job_that_is_suspended():
    world = training(manifest(sync={"quorum": 3}))
    world.answers(gone=("eu/1",))
    world.change(learner={**RECIPE, "image": "new"}, runPolicy={"suspend": True})
    world.settle()
    assert message(world) == "the job is suspended"
