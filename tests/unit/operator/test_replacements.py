"""Learners of several pods: a changed template reaches whole learners, one after the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_testing.kubernetes.operated_job import is_idle, manifest, set_ready, training
from diloco_testing.properties import examples

TWO_PODS = {"command": ["python", "train.py"], "podsPerLearner": 2}
LEARNERS = {"eu/0": ("a-eu-0", "a-eu-1"), "eu/1": ("a-eu-2", "a-eu-3"),
            "us/0": ("a-us-0", "a-us-1"), "us/1": ("a-us-2", "a-us-3")}  # fmt: skip


def trained(**spec):
    return training(manifest(**{"learner": TWO_PODS, **spec}))


def set_image(world, image):
    """Change the template, and let the controllers observe it."""
    world.change(learner={**TWO_PODS, "image": image})
    world.reconcile()
    world.count_pods()


def deleted(decisions):
    return sorted(ref.name for ref in decisions.delete if ref.kind == "Pod")


def train(world, *gone):
    """The syncer reports all learners but those."""
    world.answers(gone=gone)


def images(world):
    return {
        name: pod["spec"]["containers"][0]["image"]
        for name, pod in world.pods.items()
        if "syncer" not in name
    }


def test_the_controller_replaces_no_pod_of_a_learner_of_several_by_itself():
    assert trained().children["StatefulSet", "a-eu"]["spec"]["updateStrategy"] == {
        "type": "OnDelete"
    }
    single = training().children["StatefulSet", "a-eu"]
    assert single["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert is_idle(trained().reconcile())


def test_a_changed_template_reaches_all_pods_of_a_learner_at_once_and_one_learner_after_the_other():
    world = trained()
    set_image(world, "new")
    replaced = []
    for name, pods in LEARNERS.items():
        decisions = world.reconcile(1)
        assert deleted(decisions) == list(pods)
        replaced.append(name)
        # Gone, then started, then registered with the syncer.
        assert deleted(world.reconcile(1)) == []
        world.run_controllers(ready=lambda pod: False)
        train(world, name)
        assert deleted(world.reconcile(1)) == []
        for pod in pods:
            set_ready(world.pod(pod), True)
        train(world)
        world.count_pods()
    assert deleted(world.reconcile(1)) == []
    assert set(images(world).values()) == {"new"}
    assert replaced == list(LEARNERS)


@given(order=st.permutations(["a-eu-0", "a-eu-1"]), first=st.booleans())
def test_a_learner_counts_as_back_when_all_its_pods_are_in_whatever_order_they_come(order, first):
    world = trained()
    set_image(world, "new")
    world.reconcile(1)
    if first:  # the controller creates one pod first
        world.run_controllers(ready=lambda pod: False)
        late = world.pods.pop(order[1])
        set_ready(world.pod(order[0]), True)
        assert deleted(world.reconcile(1)) == []
        world.pods[order[1]] = late
    world.run_controllers(ready=lambda pod: False)
    for name in order:
        assert deleted(world.reconcile(1)) == []
        set_ready(world.pod(name), True)
    assert deleted(world.reconcile(1)) == ["a-eu-2", "a-eu-3"]


def test_a_learner_of_which_one_pod_came_back_new_is_replaced_at_once():
    """A pod is evicted while another learner is replaced: one learner never runs two templates."""
    world = trained()
    set_image(world, "new")
    world.reconcile(1)  # eu/0
    del world.pods["a-us-3"]
    train(world, "eu/0", "us/1")
    assert deleted(world.reconcile(1)) == ["a-us-2"], "it is down already"
    world.run_controllers()
    train(world)
    assert images(world)["a-us-2"] == images(world)["a-us-3"] == "new"
    assert deleted(world.reconcile(1)) == ["a-eu-2", "a-eu-3"]


def test_a_learner_whose_other_pod_is_new_and_ready_is_completed():
    world = trained()
    set_image(world, "new")
    del world.pods["a-us-3"]
    world.run_controllers()
    assert deleted(world.reconcile(1)) == ["a-us-2"]


def test_no_further_learner_is_replaced_while_only_a_quorum_trains():
    world = trained(sync={"quorum": 3})
    set_image(world, "new")
    train(world, "us/1")
    assert deleted(world.reconcile(30)) == []
    train(world)
    assert deleted(world.reconcile(30)) == ["a-eu-0", "a-eu-1"]


def test_where_the_quorum_is_all_learners_a_replacement_does_not_wait():
    world = trained(sync={"quorum": 4})
    set_image(world, "new")
    assert deleted(world.reconcile(1)) == ["a-eu-0", "a-eu-1"]


def test_a_learner_that_does_not_train_takes_a_correction_before_the_others():
    world = trained()
    for name in LEARNERS["us/0"]:
        set_ready(world.pod(name), False)
    train(world, "us/0")
    set_image(world, "right")
    assert deleted(world.reconcile(1)) == ["a-us-0", "a-us-1"]
    world.run_controllers()
    train(world)
    assert deleted(world.reconcile(1)) == ["a-eu-0", "a-eu-1"]


def test_an_image_that_cannot_be_pulled_stops_at_its_first_learner_and_a_correction_reaches_it():
    world = trained()
    set_image(world, "typo")
    assert deleted(world.reconcile(1)) == ["a-eu-0", "a-eu-1"]
    world.run_controllers(ready=lambda pod: False)
    for name in LEARNERS["eu/0"]:
        world.pod(name)["status"]["phase"] = "Pending"
    train(world, "eu/0")
    for _ in range(3):
        assert deleted(world.reconcile(100)) == []
    set_image(world, "right")
    assert deleted(world.reconcile(1)) == ["a-eu-0", "a-eu-1"]


def test_a_template_that_no_learner_can_run_is_corrected_everywhere_at_once():
    world = trained()
    for pods in LEARNERS.values():
        for name in pods:
            set_ready(world.pod(name), False)
    world.answers("Waiting", gone=tuple(LEARNERS))
    world.reconcile()
    set_image(world, "right")
    assert deleted(world.reconcile(5)) == [], "their syncer may just have restarted"
    world.answers("Waiting", gone=tuple(LEARNERS))
    assert len(deleted(world.reconcile(60))) == 8


def test_an_unreachable_syncer_makes_no_learner_one_that_has_nothing_to_lose():
    world = trained()
    for pods in LEARNERS.values():
        for name in pods:
            set_ready(world.pod(name), False)
    world.becomes_unreachable()
    set_image(world, "new")
    assert deleted(world.reconcile(400)) == []


def test_pods_that_no_node_fits_do_not_block_the_others():
    world = trained()
    set_image(world, "new")
    world.reconcile(1)
    world.run_controllers(ready=lambda pod: False)
    for name in LEARNERS["eu/0"]:
        world.pod(name)["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}],
        }
    train(world, "eu/0")
    assert deleted(world.reconcile(1)) == ["a-eu-2", "a-eu-3"]


@pytest.mark.parametrize("where", ["eu", "us"])
def test_a_template_that_the_controller_does_not_know_yet_replaces_nothing(where):
    world = trained()
    world.change(learner={**TWO_PODS, "image": "new"})
    assert deleted(world.reconcile()) == []
    assert deleted(world.reconcile(1)) == [], "observedGeneration is behind"
    live = world.children["StatefulSet", f"a-{where}"]
    world.count_pods()
    live["status"]["observedGeneration"] -= 1
    pods = deleted(world.reconcile(1))
    assert all(where not in name for name in pods)


def test_a_suspended_job_deletes_no_pod_itself():
    world = trained()
    set_image(world, "new")
    world.change(runPolicy={"suspend": True})
    assert deleted(world.reconcile(1)) == []


def test_a_pod_that_is_being_deleted_is_not_deleted_again():
    world = trained()
    set_image(world, "new")
    for name in LEARNERS["eu/0"]:
        world.pod(name)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert deleted(world.reconcile(1)) == []
    del world.pods["a-eu-0"]
    assert deleted(world.reconcile(1)) == []


@settings(max_examples=examples(20))
@given(order=st.permutations(range(8)), at_once=st.booleans())
def test_a_roll_ends_with_every_learner_whole_and_has_one_down_at_a_time(order, at_once):
    """Pods become ready in any order, and the operator looks after each of them."""
    world = trained()
    set_image(world, "new")
    for _ in range(4 * 5):
        world.reconcile(1)
        down = [
            learner
            for learner, names in LEARNERS.items()
            if any(name not in world.pods or not _ready(world.pods[name]) for name in names)
        ]
        assert len(down) <= 1
        if len(world.pods) < 9:
            world.run_controllers(ready=lambda pod: at_once)
        else:
            pods = sorted(name for name in world.pods if "syncer" not in name)
            waiting = [pods[pick] for pick in order if not _ready(world.pods[pods[pick]])]
            for name in waiting[:1]:
                set_ready(world.pods[name], True)
        train(world, *down)
        world.count_pods()
    assert set(images(world).values()) == {"new"}


def _ready(pod):
    return pod["status"]["conditions"][0]["status"] == "True"
