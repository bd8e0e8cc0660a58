"""A job in a queue: each learner is an entry of its own, and one that waits is neither late nor lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco_job.names import MAX_CHILD_NAME, MAX_QUEUED
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.template_record import inputs_of
from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    is_idle,
    manifest,
    restarted,
    set_ready,
)
from diloco_testing.manifests.files import load_job

EVERYTHING = Path(__file__).parents[2] / "golden/everything.yaml"
KUEUE = {
    "kueue.x-k8s.io/queue-name": "team-a",
    "kueue.x-k8s.io/priority-class": "urgent",
}
VOLCANO = {"scheduling.volcano.sh/queue-name": "research"}
GATES = [{"name": "kueue.x-k8s.io/admission"}]
NO_QUOTA = (
    "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any"
)
TWO_PODS = {"command": ["python", "t.py"], "podsPerLearner": 2}


def queued_job(labels=KUEUE, annotations=None, **spec):
    """Of two learners in eu."""
    job = manifest(**{"regions": [{"name": "eu", "learners": 2}], "sync": {"quorum": 1}, **spec})
    job["metadata"] |= {"labels": dict(labels), "annotations": dict(annotations or {})}
    return job


def sets(job):
    """The StatefulSets of a job without any, by name."""
    world = OperatedJob(job=job)
    world.reconcile()
    return live_sets(world)


def live_sets(world):
    return {name: child for (kind, name), child in world.children.items() if kind == "StatefulSet"}


def gate(world, *names):
    """Kueue's webhook has gated these new pods."""
    for name in names:
        pod = world.pod(name)
        pod["spec"] = {**pod["spec"], "schedulingGates": GATES}
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
                    "message": "Scheduling is blocked due to non-empty scheduling gates",
                }
            ],
        }  # fmt: skip
    world.count_pods()


def admit(world, name):
    """The queue lets a pod start, and it becomes ready at once."""
    pod = world.pod(name)
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key != "schedulingGates"}
    set_ready(pod, True)
    world.count_pods()


def explain(world, set_name, message, kind="QuotaReserved"):
    """Kueue writes into the Workload of a StatefulSet why it waits."""
    uid = world.children["StatefulSet", set_name]["metadata"]["uid"]
    world.workloads.append({
        "metadata": {"name": f"statefulset-{set_name}", "labels": {"kueue.x-k8s.io/job-uid": uid}},
        "status": {"conditions": [{"type": kind, "status": "False", "message": message}]},
    })  # fmt: skip


def waiting(**spec):
    """Two learners, neither of which is admitted."""
    world = OperatedJob(job=queued_job(**spec))
    world.reconcile()
    world.run_controllers()
    gate(world, "a-eu-0-0", "a-eu-1-1")
    world.reconcile(1)
    return world


# ------------------------------------------------------------------------------ what is rendered


def test_each_learner_in_a_queue_has_a_statefulset_that_kueue_finds():
    made = sets(queued_job())
    assert sorted(made) == ["a-eu-0", "a-eu-1"]
    for index, child in enumerate(made.values()):
        assert child["metadata"]["labels"].items() >= KUEUE.items()
        assert child["metadata"]["labels"]["diloco.dev/learner"] == str(index)
        assert child["spec"]["replicas"] == 1
        assert child["spec"]["selector"]["matchLabels"]["diloco.dev/learner"] == str(index)
        assert child["spec"]["template"]["metadata"]["labels"]["diloco.dev/learner"] == str(index)
        assert child["spec"]["serviceName"] == "a-eu"


def test_nothing_but_learners_is_queued():
    world = OperatedJob(job=queued_job())
    world.reconcile()
    others = [child for (kind, _), child in world.children.items() if kind != "StatefulSet"]
    assert others
    assert not [child for child in others if "kueue.x-k8s.io" in str(child)]


def test_all_pods_of_a_learner_are_one_entry_and_keep_the_ordinals_of_their_region():
    made = sets(queued_job(learner=TWO_PODS))
    spec = {name: child["spec"] for name, child in made.items()}
    assert [spec[name]["replicas"] for name in ("a-eu-0", "a-eu-1")] == [2, 2]
    assert "ordinals" not in spec["a-eu-0"]
    assert spec["a-eu-1"]["ordinals"] == {"start": 2}
    annotations = spec["a-eu-1"]["template"]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/pod-index-offset"] == "2"


def test_volcano_makes_one_pod_group_of_a_learners_pods():
    made = sets(queued_job(labels={}, annotations=VOLCANO, learner=TWO_PODS))
    assert sorted(made) == ["a-eu-0", "a-eu-1"]
    for child in made.values():
        assert child["metadata"]["annotations"]["scheduling.volcano.sh/group-min-member"] == "2"
        template = child["spec"]["template"]
        assert template["spec"]["schedulerName"] == "volcano"
        assert template["metadata"]["annotations"].items() >= VOLCANO.items()
        assert "kueue" not in str(child["metadata"]["labels"])


def test_a_scheduler_of_the_podtemplate_takes_precedence_over_volcanos_usual_name():
    learner = {**TWO_PODS, "podTemplate": {"spec": {"schedulerName": "volcano-gpu"}}}
    made = sets(queued_job(labels={}, annotations=VOLCANO, learner=learner))
    specs = [child["spec"]["template"]["spec"] for child in made.values()]
    assert {spec["schedulerName"] for spec in specs} == {"volcano-gpu"}


def test_a_queue_of_kueue_changes_no_input_of_a_template_and_one_of_volcano_does():
    def inputs(metadata):
        owner = Owner(namespace="work", uid="1", metadata=metadata)
        made = desired(load_job(EVERYTHING), owner, SCOPE, Wanted())
        return {inputs_of(child) for child in made if child["kind"] == "StatefulSet"}

    plain = inputs(Metadata())
    assert inputs(Metadata(labels=KUEUE)) == plain
    assert not inputs(Metadata(annotations=VOLCANO)) & plain


def test_the_longest_name_of_a_learners_statefulset_is_checked():
    fits = manifest(name="j" * (MAX_CHILD_NAME - len("-eu-0")))
    fits["metadata"]["labels"] = dict(KUEUE)
    fits["spec"]["regions"] = [{"name": "eu", "learners": 10}]
    world = OperatedJob(job=fits)
    world.reconcile()
    assert world.condition("Accepted")["status"] == "True"
    fits["spec"]["regions"] = [{"name": "eu", "learners": 11}]
    world = OperatedJob(job=fits)
    assert is_idle_but_for_its_status(world.reconcile())
    assert world.reason("Accepted") == ("False", "NameTooLongForQueue")
    assert "-eu-10 has 53 characters; the maximum is 52" in world.condition("Accepted")["message"]


def test_a_job_has_no_more_learners_in_a_queue_than_fit_into_memory():
    """Each has a StatefulSet with a pod template of its own."""
    world = OperatedJob(job=queued_job(regions=[{"name": "eu", "learners": MAX_QUEUED + 1}]))
    assert is_idle_but_for_its_status(world.reconcile())
    assert world.reason("Accepted") == ("False", "TooManyForQueue")
    assert f"{MAX_QUEUED + 1} learners" in world.condition("Accepted")["message"]
    world.change(regions=[{"name": "eu", "learners": MAX_QUEUED}])
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")
    assert len(live_sets(world)) == MAX_QUEUED


def test_a_queued_job_that_has_more_learners_is_still_repaired_but_grows_no_more(monkeypatch):
    """An earlier version of the operator made them."""
    world = trains(queued_job())
    monkeypatch.setattr("diloco_operator.resources.queue_labels.MAX_QUEUED", 1)
    del world.children["StatefulSet", "a-eu-0"]
    world.reconcile(1)
    assert world.reason("Accepted") == ("True", "Valid")
    assert sorted(live_sets(world)) == ["a-eu-0", "a-eu-1"]
    world.change(regions=[{"name": "eu", "learners": 3}])
    assert is_idle_but_for_its_status(world.reconcile(1))
    assert world.reason("Accepted") == ("False", "TooManyForQueue")
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.job["metadata"]["labels"] = {}
    world.change(runPolicy={})
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert sorted(live_sets(world)) == ["a-eu"], "as operations.md advises"
    assert sorted(world.pods) == ["a-eu-0", "a-eu-1", "a-eu-2", "a-syncer-0"]


def test_only_the_learners_of_this_cluster_count_for_its_queue():
    regions = [{"name": "eu", "learners": 1}, {"name": "us", "learners": MAX_QUEUED}]
    world = OperatedJob(job=queued_job(regions=regions), scope=replace(SCOPE, region="eu"))
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


def test_a_suspended_job_whose_names_are_too_long_for_the_queue_keeps_its_statefulsets():
    storage = {"recipe": {"name": "gpt"}, "storage": {"size": "1Gi"}}
    world = trains(queued_job(labels={}, name="j" * (MAX_CHILD_NAME - 3), learner=storage))
    before = set(world.children)
    world.job["metadata"]["labels"] = dict(KUEUE)
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.reason("Accepted") == ("False", "NameTooLongForQueue")
    assert set(world.children) == before, "the volumes of its learners may go with them"
    assert not world.pods
    world.job["metadata"]["labels"] = {}
    world.change(runPolicy={})
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert len(world.pods) == 3


def is_idle_but_for_its_status(decisions):
    return not decisions.apply and not decisions.delete


# ------------------------------------------------------------------------------ who waits


def test_a_job_that_waits_for_its_first_learner_is_pending_and_has_not_started():
    world = waiting(runPolicy={"activeDeadlineSeconds": 60})
    explain(world, "a-eu-0", NO_QUOTA)
    world.reconcile(3600)
    assert world.reason("LearnersReady") == ("False", "WaitingInQueue")
    message = world.condition("LearnersReady")["message"]
    assert message == (
        f"0 of 2 are training; waiting in queue team-a: eu/0, eu/1; Kueue: {NO_QUOTA}"
    )
    assert world.reason("QuorumMet") == ("Unknown", "NoAnswer")
    assert world.status["state"] == "Pending"
    assert "startTime" not in world.status, "the deadline counts from there"
    assert world.asked == [], "no Event states why"
    assert not [event for event in world.events if event[0] == "Warning"]


def test_a_job_trains_with_the_learners_that_are_admitted_and_is_not_degraded():
    world = waiting()
    admit(world, "a-eu-0-0")
    world.answers(gone=("eu/1",))
    world.reconcile(1)
    world.reconcile(3600)
    assert world.status["state"] == "Training"
    assert world.status["learners"]["summary"] == "1/2"
    assert world.reason("LearnersReady") == ("False", "WaitingInQueue")
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    assert "startTime" in world.status
    assert is_idle(world.reconcile())
    assert not [event for event in world.events if event[0] == "Warning"]


def test_a_learner_that_the_scheduler_has_not_seen_since_its_admission_has_no_problem():
    world = waiting()
    pod = world.pod("a-eu-0-0")
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key != "schedulingGates"}
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "Starting")
    assert not [event for event in world.events if event[0] == "Warning"]


def test_a_learner_that_is_admitted_later_joins_and_its_start_is_not_late():
    world = waiting()
    admit(world, "a-eu-0-0")
    world.answers(gone=("eu/1",))
    world.reconcile(3600)
    pod = world.pod("a-eu-1-1")
    admit(world, "a-eu-1-1")
    set_ready(pod, False)
    at = world.now.isoformat(timespec="seconds")
    pod["status"]["conditions"] += [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    ]
    world.reconcile(60)
    assert world.reason("LearnersReady") == ("False", "Starting")
    world.reconcile(60)
    assert world.reason("LearnersReady") == ("False", "Starting")
    world.reconcile(300)
    assert world.reason("LearnersReady") == ("False", "PodTrouble"), "now it is late"
    set_ready(pod, True)
    world.answers()
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("True", "AllTraining")


def test_too_few_admitted_learners_for_a_quorum_wait_and_miss_nothing():
    world = waiting(sync={"quorum": 2})
    admit(world, "a-eu-0-0")
    world.answers(gone=("eu/1",), state="Waiting")
    world.reconcile(1)
    assert world.reason("QuorumMet") == ("False", "WaitingInQueue")
    assert world.condition("QuorumMet")["message"] == (
        "1 learners report (quorum: 2); 1 wait in a queue"
    )


def test_a_preempted_learner_waits_again_with_kueues_message_and_is_no_fault():
    world = waiting()
    for name in ("a-eu-0-0", "a-eu-1-1"):
        admit(world, name)
    world.answers()
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    gate(world, "a-eu-1-1")
    explain(world, "a-eu-1", "Preempted to accommodate a workload (UID: 1)")
    world.answers(gone=("eu/1",))
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "WaitingInQueue")
    assert "Kueue: Preempted to accommodate" in world.condition("LearnersReady")["message"]
    assert world.status["state"] == "Training"
    assert ("Normal", "WaitingInQueue") in world.events


def test_a_learner_with_trouble_is_reported_although_another_one_waits():
    world = waiting()
    admit(world, "a-eu-0-0")
    restarted(world.pod("a-eu-0-0"), 1, 1, message="no CUDA device")
    main = world.pod("a-eu-0-0")["status"]["containerStatuses"][0]
    main["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert "no CUDA device" in world.condition("LearnersReady")["message"]


def test_a_learner_that_starts_while_another_one_waits_is_named_apart():
    world = waiting()
    admit(world, "a-eu-0-0")
    set_ready(world.pod("a-eu-0-0"), False)
    world.reconcile(1)
    assert world.condition("LearnersReady")["message"] == (
        "0 of 2 are training; not registered: eu/0; waiting in the queue: eu/1"
    )


def test_a_learner_of_two_pods_waits_until_both_are_admitted():
    world = OperatedJob(job=queued_job(learner=TWO_PODS))
    world.reconcile()
    world.run_controllers()
    assert sorted(pod for pod in world.pods if "eu" in pod) == [
        "a-eu-0-0", "a-eu-0-1", "a-eu-1-2", "a-eu-1-3",
    ]  # fmt: skip
    gate(world, "a-eu-1-3")
    world.answers(gone=("eu/1",))
    world.reconcile(1)
    assert "waiting in queue team-a: eu/1" in world.condition("LearnersReady")["message"]
    assert world.status["regions"][0]["ready"] == 1


@pytest.mark.parametrize("kind", ["QuotaReserved", "Admitted"])
def test_the_first_step_of_an_admission_that_is_not_done_explains_the_wait(kind):
    world = waiting()
    explain(world, "a-eu-1", "not all checks are ready", kind=kind)
    world.reconcile(1)
    assert world.condition("LearnersReady")["message"].endswith("Kueue: not all checks are ready")


def test_gates_of_another_controller_are_a_wait_without_a_message():
    """Such as the queue's label in podTemplate, which queues each pod by itself."""
    job = queued_job(labels={})
    world = OperatedJob(job=job)
    world.reconcile()
    world.run_controllers()
    gate(world, "a-eu-0", "a-eu-1")
    world.reconcile(1)
    message = world.condition("LearnersReady")["message"]
    assert message == "0 of 2 are training; waiting in queue: eu/0, eu/1"


# ------------------------------------------------------------------------------ changes


def trains(job):
    world = OperatedJob(job=job)
    world.settle()
    world.answers()
    world.settle()
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    return world


def test_a_label_that_comes_while_the_job_runs_moves_nothing_before_a_suspension():
    world = trains(queued_job(labels={}))
    world.job["metadata"]["labels"] = dict(KUEUE)
    assert is_idle(world.reconcile(1))
    assert sorted(live_sets(world)) == ["a-eu"]
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.settle()
    assert sorted(live_sets(world)) == ["a-eu-0", "a-eu-1"]


def test_a_job_stays_in_the_queue_that_admitted_it_until_it_is_suspended():
    world = trains(queued_job())
    world.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-b"}
    assert is_idle(world.reconcile(1))
    assert live_sets(world)["a-eu-0"]["metadata"]["labels"].items() >= KUEUE.items()
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.replicas() | {"a-eu-0": 0, "a-eu-1": 0} == world.replicas()
    labels = live_sets(world)["a-eu-0"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-b"
    assert "kueue.x-k8s.io/priority-class" not in labels


def test_a_learner_leaves_the_queue_before_its_template_changes():
    # Kueue refuses other requests, and would refuse the suspension with them.
    world = trains(queued_job())
    before = live_sets(world)["a-eu-0"]["spec"]["template"]
    more = {"requests": {"cpu": "2"}}
    learner = {**world.job["spec"]["learner"], "resources": more}
    world.change(learner=learner, runPolicy={"suspend": True})
    world.reconcile(1)
    stopped = live_sets(world)["a-eu-0"]["spec"]
    assert (stopped["replicas"], stopped["template"]) == (0, before)
    world.settle()
    template = live_sets(world)["a-eu-0"]["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"] == more


def test_another_priority_reaches_a_running_job_without_another_template():
    world = trains(queued_job())
    before = [child["spec"]["template"] for child in live_sets(world).values()]
    world.job["metadata"]["labels"] = {**KUEUE, "kueue.x-k8s.io/priority-class": "idle"}
    world.settle()
    after = live_sets(world).values()
    assert {child["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] for child in after} == {
        "idle"
    }
    assert [child["spec"]["template"] for child in after] == before


def test_a_learner_that_is_added_enters_the_queue_and_one_that_is_taken_out_leaves_it():
    world = trains(queued_job())
    world.change(regions=[{"name": "eu", "learners": 3}])
    world.settle()
    assert sorted(live_sets(world)) == ["a-eu-0", "a-eu-1", "a-eu-2"]
    world.change(regions=[{"name": "eu", "learners": 1}])
    world.settle()
    replicas = {name: child["spec"]["replicas"] for name, child in live_sets(world).items()}
    assert replicas == {"a-eu-0": 1, "a-eu-1": 0, "a-eu-2": 0}, (
        "their volumes wait as whenScaled states"
    )


def test_a_region_that_is_removed_takes_its_statefulsets_along():
    regions = [{"name": "eu", "learners": 1}, {"name": "us", "learners": 2}]
    world = trains(queued_job(regions=regions))
    world.change(regions=regions[:1])
    world.settle()
    assert sorted(live_sets(world)) == ["a-eu-0"]


def test_regions_whose_names_look_like_learners_keep_their_pods_apart():
    regions = [{"name": "eu", "learners": 1}, {"name": "eu-0", "learners": 1}]
    world = trains(queued_job(regions=regions))
    assert sorted(live_sets(world)) == ["a-eu-0", "a-eu-0-0"]
    set_ready(world.pod("a-eu-0-0-0"), False)
    world.answers(gone=("eu-0/0",))
    world.reconcile(1)
    ready = {region["name"]: region["ready"] for region in world.status["regions"]}
    assert ready == {"eu": 1, "eu-0": 0}


def test_a_queue_begins_and_ends_where_the_name_of_a_region_is_that_of_another_ones_learner():
    """A selector never changes, so the StatefulSet of the one has to go before the other comes."""
    regions = [{"name": "eu", "learners": 2}, {"name": "eu-1", "learners": 1}]
    world = trains(queued_job(labels={}, regions=regions))
    for labels, made in [
        (KUEUE, ["a-eu-0", "a-eu-1", "a-eu-1-0"]),
        ({}, ["a-eu", "a-eu-1"]),
    ]:
        world.change(runPolicy={"suspend": True})
        world.settle()
        former = live_sets(world)["a-eu-1"]
        world.job["metadata"]["labels"] = dict(labels)
        decisions = world.reconcile(1)
        assert former["metadata"]["uid"] in [ref.uid for ref in decisions.delete]
        assert "a-eu-1" not in [
            want["metadata"]["name"] for want in decisions.apply if want["kind"] == "StatefulSet"
        ]
        world.change(runPolicy={})
        world.settle()
        world.answers()
        world.settle()
        assert sorted(live_sets(world)) == made
        assert live_sets(world)["a-eu-1"]["spec"]["selector"] != former["spec"]["selector"]
        assert world.reason("LearnersReady") == ("True", "AllTraining")


def test_no_statefulset_with_replicas_is_deleted_for_the_region_that_it_selects():
    world = trains(queued_job(labels={}))
    live = live_sets(world)["a-eu"]
    live["spec"]["selector"] = {"matchLabels": {"diloco.dev/region": "eu-1"}}
    assert world.reconcile(1).delete == ()


# ------------------------------------------------------------------------------ PodGroups of Kubernetes

POD_GROUPS = {"diloco.dev/pod-groups": "true"}


def pod_groups(world):
    return {name: item for (kind, name), item in world.children.items() if kind == "PodGroup"}


def in_pod_groups(**spec):
    """A training job whose learners are PodGroups of two pods."""
    world = OperatedJob(job=queued_job({}, POD_GROUPS, learner=TWO_PODS, **spec))
    world.settle()
    world.answers()
    world.settle()
    return world


def test_each_learner_of_a_job_that_asks_for_it_is_a_pod_group_of_its_pods():
    world = in_pod_groups()
    groups, found = pod_groups(world), live_sets(world)
    assert sorted(groups) == sorted(found) == ["a-eu-0", "a-eu-1"]
    for name, stateful_set in found.items():
        assert groups[name]["apiVersion"] == "scheduling.k8s.io/v1beta1"
        assert groups[name]["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
        template = stateful_set["spec"]["template"]["spec"]
        assert template["schedulingGroup"] == {"podGroupName": name}
        assert "schedulingGates" not in template
    assert is_idle(world.reconcile(1))


def test_a_pod_group_exists_before_the_pods_that_name_it():
    kinds = [item["kind"] for item in OperatedJob(job=queued_job({}, POD_GROUPS)).decide().apply]
    assert kinds.index("PodGroup") < kinds.index("StatefulSet")


def test_a_pod_group_goes_with_its_learner_and_comes_with_a_new_one():
    world = in_pod_groups()
    world.change(regions=[{"name": "eu", "learners": 3}])
    world.settle()
    assert sorted(pod_groups(world)) == ["a-eu-0", "a-eu-1", "a-eu-2"]
    world.change(regions=[{"name": "eu", "learners": 1}])
    world.settle()
    assert sorted(pod_groups(world)) == ["a-eu-0"]


def test_pod_groups_begin_and_end_with_a_suspension():
    world = in_pod_groups()
    world.job["metadata"]["annotations"] = {}
    world.settle()
    assert len(pod_groups(world)) == 2, "the learners that run keep theirs"
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.settle()
    assert not pod_groups(world)
    assert sorted(live_sets(world)) == ["a-eu"]


@pytest.mark.parametrize(
    "annotations", [{}, {"diloco.dev/pod-groups": "false"}, VOLCANO | POD_GROUPS]
)
def test_no_other_job_has_pod_groups_of_kubernetes(annotations):
    world = OperatedJob(job=queued_job({}, annotations))
    world.reconcile()
    assert not pod_groups(world)


def test_kueue_may_gate_the_pods_of_a_pod_group():
    world = OperatedJob(job=queued_job(KUEUE, POD_GROUPS))
    world.reconcile()
    assert len(pod_groups(world)) == 2
    assert all(
        "kueue.x-k8s.io/queue-name" in item["metadata"]["labels"]
        for item in live_sets(world).values()
    )
