"""A change of the manifest that waits for learners is visible: LearnersReady names whom it has not reached."""

import copy

import pytest

from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
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
    assert is_idle(world.reconcile(60)), "reported once"
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


def stuck_in_eu(world):
    """The image changed, and a new pod of eu does not start."""
    world.change(learner={**RECIPE, "image": "new"})
    world.reconcile()
    world.run_controllers()
    world.children["StatefulSet", "a-eu"]["status"] |= {"currentRevision": "old"}
    set_ready(world.pod("a-eu-1"), False)
    world.answers(gone=("eu/1",))
    world.reconcile(30)
    return world


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("is_edited", [False, True], ids=["as-applied", "edited-by-hand"])
def test_another_number_of_learners_does_not_wait_for_a_template_that_waits(number, is_edited):
    world = stuck_in_eu(training())
    live = world.children["StatefulSet", "a-us"]
    if is_edited:
        live["spec"]["template"]["spec"]["nodeSelector"] = {"disk": "fast"}
        live["spec"]["template"]["spec"]["containers"][0]["image"] = "edited"
    before = copy.deepcopy(live["spec"]["template"])
    world.change(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": number}])
    for _ in range(3):
        # Its controller has not seen the new number: no reason to take the new template.
        world.reconcile(1)
        live = world.children["StatefulSet", "a-us"]
        assert live["spec"]["replicas"] == number
        assert live["spec"]["template"] == before
    world.count_pods()
    world.children["StatefulSet", "a-eu"]["status"] |= {"currentRevision": "old"}
    assert message(world).endswith(f"; {WAITS}us")
    assert is_idle(world.reconcile(1)), "once"
    set_ready(world.pod("a-eu-1"), True)
    world.run_controllers()
    world.answers()
    turn(world)
    assert images(world) == {"new"}
    assert len([name for name in world.pods if "-us-" in name]) == number
    assert message(world) == f"{2 + number} of {2 + number} are training"


def test_a_template_that_waited_while_its_region_was_scaled_is_forgotten_with_its_change():
    world = stuck_in_eu(training())
    world.change(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}])
    world.reconcile(1)
    world.count_pods()
    before = copy.deepcopy(world.children["StatefulSet", "a-us"]["spec"])
    world.change(learner=RECIPE)
    turn(world)
    assert world.children["StatefulSet", "a-us"]["spec"] == before
    assert images(world) == {"diloco/worker:1"}
    assert message(world) == "3 of 3 are training"


class WithWebhook(OperatedJob):
    """A cluster in which a webhook sets the requests of every StatefulSet that is written."""

    def apply(self, wanted):
        key = wanted["kind"], wanted["metadata"]["name"]
        old = copy.deepcopy(self.children.get(key))
        super().apply(wanted)
        if wanted["kind"] == "StatefulSet":
            live = self.children[key]
            for container in live["spec"]["template"]["spec"]["containers"]:
                container["resources"] = {"requests": {"cpu": "1"}}
            if old and old["spec"] == live["spec"]:
                live["metadata"]["generation"] = old["metadata"]["generation"]


def turn(world, turns=12):
    for _ in range(turns):
        world.reconcile(30)
        world.run_controllers()
        world.answers()


def image_of(pod):
    return pod["spec"]["containers"][0]["image"]


def images(world):
    return {image_of(pod) for name, pod in world.pods.items() if "syncer" not in name}


@pytest.mark.parametrize("queue", [{}, {"kueue.x-k8s.io/queue-name": "team"}])
@pytest.mark.parametrize("pods", [{"recipe": {"name": "gpt"}}, TWO_PODS])
def test_values_that_a_webhook_sets_in_every_statefulset_hold_no_change_back(pods, queue):
    learner = {**pods, "resources": {"requests": {"cpu": "500m"}}}
    job = manifest(learner=learner)
    job["metadata"]["labels"] = queue
    world = WithWebhook(job=job)
    turn(world)
    assert message(world) == "4 of 4 are training", "drift is no change that waits"
    world.change(learner={**learner, "image": "new"})
    turn(world)
    assert images(world) == {"new"}
    assert message(world) == "4 of 4 are training"


def test_one_region_after_the_other_is_replaced_where_a_webhook_changes_every_statefulset():
    learner = {**RECIPE, "resources": {"requests": {"cpu": "500m"}}}
    world = WithWebhook(job=manifest(learner=learner))
    turn(world)
    world.change(learner={**learner, "image": "new"})
    world.reconcile(30)
    world.reconcile(30)
    world.run_controllers()
    assert {name for name, pod in world.pods.items() if image_of(pod) == "new"} == {
        "a-eu-0",
        "a-eu-1",
    }
    turn(world)
    assert images(world) == {"new"}
