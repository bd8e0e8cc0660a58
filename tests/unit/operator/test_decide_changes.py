"""Changes to children: applied, deleted, left alone, and the order of rollouts."""

import copy

import pytest

from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.state.observation import Refusal
from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    set_ready,
    training,
)


def names(decisions):
    return [(child["kind"], child["metadata"]["name"]) for child in decisions.apply]


def regions(**learners):
    return [{"name": name, "learners": count} for name, count in learners.items()]


# ------------------------------------------------------------------------------ drift


def test_a_child_without_drift_is_not_applied_again():
    world = training()
    assert world.reconcile().apply == ()


@pytest.mark.parametrize(
    "child",
    [("StatefulSet", "a-eu"), ("Deployment", "a-syncer"), ("Service", "a-syncer"), ("Service", "a-us"),
     ("ServiceAccount", "a"), ("PodDisruptionBudget", "a-eu")],
)  # fmt: skip
def test_a_deleted_child_is_created_again_and_no_other_changes(child):
    world = training()
    del world.children[child]
    assert names(world.reconcile()) == [child]


def test_a_manual_scaling_of_a_stateful_set_is_undone():
    world = training()
    world.children["StatefulSet", "a-eu"]["spec"]["replicas"] = 7
    assert names(world.reconcile()) == [("StatefulSet", "a-eu")]
    assert world.replicas()["a-eu"] == 2


def test_a_changed_image_is_undone():
    world = training()
    template = world.children["Deployment", "a-syncer"]["spec"]["template"]
    template["spec"]["containers"][0]["image"] = "evil"
    assert names(world.reconcile()) == [("Deployment", "a-syncer")]


def test_annotations_of_others_are_left_alone():
    world = training()
    world.children["Service", "a-syncer"]["metadata"]["annotations"]["other"] = "x"
    assert is_idle(world.reconcile())


def test_a_child_that_is_being_deleted_is_waited_for():
    world = training()
    metadata = world.children["Service", "a-syncer"]["metadata"]
    metadata["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    world.children["Service", "a-syncer"]["spec"] = {}
    assert world.reconcile().apply == ()
    del world.children["Service", "a-syncer"]
    assert names(world.reconcile()) == [("Service", "a-syncer")]


def test_an_orphaned_child_is_adopted():
    world = training()
    del world.children["StatefulSet", "a-eu"]["metadata"]["ownerReferences"]
    world.reconcile()
    owner = world.children["StatefulSet", "a-eu"]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "uid-of-a"


# ------------------------------------------------------------------------------ foreign children


def test_a_child_of_another_owner_is_left_alone_and_the_others_are_created():
    world = OperatedJob(foreign=({"kind": "StatefulSet", "metadata": {"name": "a-eu"}},))
    decisions = world.reconcile()
    assert ("StatefulSet", "a-eu") not in names(decisions)
    assert ("StatefulSet", "a-us") in names(decisions)
    assert world.reason("Accepted") == ("False", "NameTaken")
    assert "StatefulSet a-eu" in world.condition("Accepted")["message"]


def test_children_of_a_former_job_of_the_same_name_are_waited_for():
    world = training()
    world.job = manifest()
    world.job["metadata"]["uid"] = "uid-of-the-next"
    world.syncer = None
    decisions = world.reconcile()
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Accepted") == ("False", "NameTaken")
    assert world.condition("SyncerReady")["status"] != "True"
    assert world.status["state"] == "Pending"
    world.children.clear()
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")


CLAIM = ("PersistentVolumeClaim", "a-syncer")


def test_no_syncer_starts_on_the_claim_of_another_owner():
    """The claim of a former job, which the garbage collector is about to delete, for example."""
    world = training()
    former = copy.deepcopy(world.children[CLAIM])
    former["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former"
    world = OperatedJob(children={CLAIM: former})
    world.settle()
    assert world.reason("Accepted") == ("False", "NameTaken")
    assert world.replicas() == {"a-eu": 2, "a-syncer": 0, "a-us": 2}
    assert world.children[CLAIM] == former
    del world.children[CLAIM]
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.replicas()["a-syncer"] == 1


def test_obsolete_children_are_deleted_only_if_they_are_this_jobs():
    world = training()
    stray = copy.deepcopy(world.children["Service", "a-us"])
    for name, uid in (("ours", "uid-of-a"), ("orphan", None), ("other", "uid-of-b")):
        child = copy.deepcopy(stray)
        child["metadata"] |= {"name": name, "uid": name}
        child["metadata"]["ownerReferences"][0]["uid"] = uid
        if uid is None:
            del child["metadata"]["ownerReferences"]
        world.children["Service", name] = child
    assert [ref.name for ref in world.reconcile().delete] == ["ours"]


def test_children_of_another_regions_operator_are_left_alone():
    world = training()
    stray = copy.deepcopy(world.children["Service", "a-us"])
    stray["metadata"]["name"] = "a-asia"
    stray["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "diloco-operator-asia"
    world.children["Service", "a-asia"] = stray
    assert world.reconcile().delete == ()


def test_a_refusal_of_the_api_server_is_reported_with_its_message():
    world = training()
    message = 'admission webhook "policy" denied the request'
    world.refusals = (Refusal(child="StatefulSet a-eu", message=message),)
    world.reconcile()
    assert world.reason("Accepted") == ("False", "Refused")
    assert message in world.condition("Accepted")["message"]
    assert world.status["state"] == "Training"
    world.refusals = ()
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


# ------------------------------------------------------------------------------ scaling, regions


def test_scaling_learners_changes_replicas_and_the_quorums_facts_alone():
    world = training()
    world.change(regions=regions(eu=4, us=2))
    world.settle()
    assert world.replicas() == {"a-eu": 4, "a-syncer": 1, "a-us": 2}
    world.change(regions=regions(eu=1, us=2))
    world.settle()
    assert world.replicas() == {"a-eu": 1, "a-syncer": 1, "a-us": 2}
    assert world.status["learners"]["desired"] == 3


def test_a_region_of_no_learners_is_ready():
    world = training(manifest(regions=regions(eu=2, us=0)))
    assert world.replicas()["a-us"] == 0
    assert world.reason("LearnersReady") == ("True", "AllTraining")


def test_a_new_region_gets_its_children():
    world = training()
    world.change(regions=regions(eu=2, us=2, asia=1))
    world.settle()
    assert world.replicas()["a-asia"] == 1
    assert ("Service", "a-asia") in world.children
    assert [region["name"] for region in world.status["regions"]] == ["eu", "us", "asia"]


def test_a_removed_region_loses_its_children():
    world = training()
    world.change(regions=regions(eu=2))
    world.settle()
    assert not [name for kind, name in world.children if name == "a-us"]
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1}
    assert [region["name"] for region in world.status["regions"]] == ["eu"]


def test_a_changed_quorum_restarts_no_learner():
    world = training()
    previous = {name: pod["spec"] for name, pod in world.pods.items() if "syncer" not in name}
    world.change(sync={"quorum": 3}, steps=9000)
    world.settle()
    assert {
        name: pod["spec"] for name, pod in world.pods.items() if "syncer" not in name
    } == previous


def test_a_removed_evaluation_loses_its_deployment():
    world = training(manifest(evaluation={"everySteps": 5}))
    assert "a-evaluator" in world.replicas()
    world.change(evaluation=None)
    world.settle()
    assert "a-evaluator" not in world.replicas()


def documents(world):
    return {name for kind, name in world.children if kind == "ConfigMap"}


def test_a_config_map_stays_until_no_pod_has_it_mounted():
    world = training()
    old = documents(world)
    world.change(sync={"quorum": 3})
    world.reconcile()
    assert old < documents(world)
    world.reconcile()
    assert old < documents(world)
    world.run_controllers()
    world.answers()
    world.settle()
    assert len(documents(world)) == 2
    assert documents(world) != old


def test_the_volume_of_a_running_job_is_never_deleted():
    world = training()
    world.children["PersistentVolumeClaim", "old"] = copy.deepcopy(
        world.children["PersistentVolumeClaim", "a-syncer"]
    )
    world.children["PersistentVolumeClaim", "old"]["metadata"]["name"] = "old"
    assert world.reconcile().delete == ()


# ------------------------------------------------------------------------------ rollouts


def set_env(world, value):
    recipe = {"name": "gpt", "config": {}}
    world.change(learner={"recipe": recipe, "env": [{"name": "A", "value": value}]})


def rolled(decisions):
    return [name for kind, name in names(decisions) if kind == "StatefulSet"]


def test_a_changed_template_reaches_one_region_after_the_other():
    world = training()
    set_env(world, "1")
    assert rolled(world.reconcile()) == ["a-eu"]
    # The controller has not observed the change yet, then is rolling it out.
    assert rolled(world.reconcile()) == []
    world.count_pods()
    world.children["StatefulSet", "a-eu"]["status"] |= {"currentRevision": "old"}
    assert rolled(world.reconcile()) == []
    world.run_controllers()
    assert rolled(world.reconcile()) == ["a-us"]
    world.run_controllers()
    assert rolled(world.reconcile()) == []


def test_a_removed_field_rolls_one_region_after_the_other():
    world = training()
    set_env(world, "1")
    world.settle()
    world.change(learner={"recipe": {"name": "gpt", "config": {}}})
    assert rolled(world.reconcile()) == ["a-eu"]
    assert rolled(world.reconcile()) == []


def test_a_region_without_a_ready_pod_has_nothing_to_lose():
    world = OperatedJob()
    world.reconcile()
    world.run_controllers(ready=lambda pod: False)
    set_env(world, "1")
    assert rolled(world.reconcile()) == ["a-eu", "a-us"]


@pytest.mark.parametrize(
    ("second", "done"),
    [
        ([{"type": "Ready", "status": "True"}], True),
        ([{"type": "Ready", "status": "False"}], False),
        ([{"type": "PodScheduled", "status": "False"}], True),
    ],
    ids=["ready", "not-ready", "no-room"],
)
def test_a_roll_is_over_when_every_learner_that_has_a_node_is_back(second, done):
    world = training()
    set_env(world, "1")
    world.reconcile()
    world.run_controllers()
    world.children["StatefulSet", "a-eu"]["status"] |= {"currentRevision": "old"}
    revision = world.children["StatefulSet", "a-eu"]["status"]["updateRevision"]
    for name in ("a-eu-0", "a-eu-1"):
        world.pod(name)["metadata"]["labels"] |= {"controller-revision-hash": revision}
    world.pod("a-eu-1")["status"]["conditions"] = second
    assert rolled(world.reconcile()) == (["a-us"] if done else [])


def set_image(world, image):
    world.change(learner={"recipe": {"name": "gpt", "config": {}}, "image": image})


def stuck_at_its_first_pod(world, name):
    """The StatefulSet replaces its last pod, whose image cannot be pulled."""
    live, last = world.children["StatefulSet", name], world.pod(f"{name}-1")
    live["status"] |= {
        "observedGeneration": live["metadata"]["generation"],
        "readyReplicas": 1,
        "currentRevision": "old",
        "updateRevision": "new",
    }
    world.pod(f"{name}-0")["metadata"]["labels"] |= {"controller-revision-hash": "old"}
    last["metadata"]["labels"] |= {"controller-revision-hash": "new"}
    set_ready(last, False)
    main_of(last)["state"] = {"waiting": {"reason": "ImagePullBackOff"}}


def test_a_correction_reaches_a_region_that_is_stuck_in_the_middle_of_its_roll():
    world = training()
    set_image(world, "typo")
    assert rolled(world.reconcile()) == ["a-eu"]
    stuck_at_its_first_pod(world, "a-eu")
    assert rolled(world.reconcile(30)) == []
    set_image(world, "right")
    assert rolled(world.reconcile(30)) == ["a-eu"]
    world.run_controllers()
    assert rolled(world.reconcile(30)) == ["a-us"]


THREE = {"regions": regions(eu=2, us=2, asia=1), "sync": {"quorum": 4}}


def test_no_rollout_starts_while_only_a_quorum_trains():
    world = training(manifest(**THREE))
    set_ready(world.pod("a-asia-0"), False)
    world.count_pods()
    world.answers(gone=("asia/0",))
    set_env(world, "1")
    assert rolled(world.reconcile()) == ["a-asia"], "it has nothing to lose"
    world.count_pods()
    for _ in range(3):
        assert rolled(world.reconcile(30)) == []
    set_ready(world.pod("a-asia-0"), True)
    world.count_pods()
    world.answers()
    assert rolled(world.reconcile(30)) == ["a-eu"]


def test_lowering_the_quorum_starts_a_rollout():
    world = training(manifest(**THREE))
    world.answers(gone=("asia/0",))
    world.pods.pop("a-asia-0")
    world.children["StatefulSet", "a-asia"]["status"]["readyReplicas"] = 0
    set_env(world, "1")
    world.reconcile()
    world.children["StatefulSet", "a-asia"]["status"]["observedGeneration"] += 1
    assert rolled(world.reconcile(30)) == []
    world.change(sync={"quorum": 3})
    world.answers(gone=("asia/0",))
    assert rolled(world.reconcile(30)) == ["a-eu"]


@pytest.mark.parametrize("missing", [("us/1",), ("us/0", "us/1")])
def test_a_region_that_lacks_a_learner_takes_a_correction_before_the_others(missing):
    """Ready but not training: the others must not wait for a learner that nothing repairs."""
    world = training(manifest(sync={"quorum": 4 - len(missing)}))
    world.answers(gone=missing)
    set_env(world, "1")
    assert rolled(world.reconcile()) == ["a-us"]
    world.run_controllers()
    assert rolled(world.reconcile(30)) == []
    world.answers()
    assert rolled(world.reconcile(30)) == ["a-eu"]


@pytest.mark.parametrize(
    ("quorum", "gone"),
    [
        (4, ()),
        (3, ()),
        (3, ("us/0", "us/1")),
        (2, ("eu/0", "eu/1", "us/0", "us/1")),
    ],
    ids=["all-are-the-quorum", "one-to-spare", "below-the-quorum", "none-trains"],
)
def test_a_rollout_starts_where_it_could_never_start_otherwise_or_costs_no_merge(quorum, gone):
    world = training(manifest(sync={"quorum": quorum}))
    world.answers(gone=gone)
    set_env(world, "1")
    assert rolled(world.reconcile()) == ["a-eu"]


def test_a_roll_is_held_back_until_the_syncer_counts_as_unreachable():
    """One slow answer does not open the gate: only a quorum may still train."""
    world = training(manifest(**THREE))
    world.answers(gone=("asia/0",))
    world.children["StatefulSet", "a-asia"]["status"]["readyReplicas"] = 0
    set_env(world, "1")
    world.reconcile()
    world.children["StatefulSet", "a-asia"]["status"]["observedGeneration"] += 1
    assert rolled(world.reconcile(30)) == []
    world.becomes_unreachable()
    assert rolled(world.reconcile(1)) == rolled(world.reconcile(28)) == []
    assert rolled(world.reconcile(1)) == ["a-eu"]


def test_a_region_of_another_cluster_that_is_missing_holds_back_a_roll_here():
    scope = OperatorScope(region="eu", worker_image="w", syncer_image="s")
    world = training(manifest(sync={"quorum": 2}), scope=scope)
    world.answers(gone=("us/0", "us/1"))
    set_env(world, "1")
    assert rolled(world.reconcile()) == []
    world.answers(gone=("us/0",))
    assert rolled(world.reconcile(30)) == ["a-eu"]


def test_suspending_does_not_wait_for_a_roll():
    world = training()
    set_env(world, "1")
    world.reconcile()
    world.change(runPolicy={"suspend": True})
    world.reconcile()
    assert set(world.replicas().values()) == {0}


def test_scaling_does_not_wait_for_a_roll():
    world = training()
    world.children["StatefulSet", "a-us"]["status"]["currentRevision"] = "old"
    world.change(regions=regions(eu=3, us=2))
    assert "a-eu" in rolled(world.reconcile())


# ------------------------------------------------------------------------------ images


NEXT = OperatorScope(worker_image="diloco/worker:2", syncer_image="diloco/syncer:2")


def test_another_chart_restarts_nothing_of_a_job_that_runs():
    world = training()
    world.scope = NEXT
    assert is_idle(world.reconcile())


def test_a_job_takes_the_new_images_after_a_suspension():
    world = training()
    world.scope = NEXT
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.change(runPolicy={})
    world.settle()
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert images == {NEXT.worker_image, NEXT.syncer_image}


def test_an_image_that_never_ran_is_replaced_by_the_new_charts():
    world = OperatedJob(scope=OperatorScope(worker_image="typo", syncer_image="typo"))
    world.reconcile()
    world.run_controllers()
    for pod in world.pods.values():
        pod["status"]["containerStatuses"][0] |= {"imageID": "", "state": {"waiting": {}}}
    world.scope = SCOPE
    world.settle()
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert images == {SCOPE.worker_image, SCOPE.syncer_image}
