"""Pods that never come: what Kubernetes reports reaches a condition and an Event."""

from datetime import timedelta

import pytest

from diloco_operator.state.pending_events import reported_problem
from diloco_testing.kubernetes.operated_job import OperatedJob, manifest, set_ready, training

QUOTA = 'pods "a-eu-0" is forbidden: exceeded quota: compute, requested: requests.cpu=1'
SECURITY = 'pods "a-syncer-x" is forbidden: violates PodSecurity "restricted:latest"'
MOUNT = 'MountVolume.SetUp failed for volume "tls": secret "a-tls" not found'


def refused():
    """The controllers have seen the workloads, and the API server refuses every pod."""
    world = OperatedJob()
    world.reconcile()
    world.count_pods()
    return world


def wait_for_kubelet(pod):
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [
            {"name": "main", "image": "x", "state": {"waiting": {"reason": "ContainerCreating"}}}
        ],
    }


def mounting():
    world = OperatedJob()
    world.reconcile()
    world.run_controllers()
    for pod in world.pods.values():
        wait_for_kubelet(pod)
    world.count_pods()
    return world


# ------------------------------------------------------------------------------ messages from Kubernetes


def test_a_statefulset_that_gets_no_pods_reports_the_api_servers_message():
    world = refused()
    world.report_event(world.children["StatefulSet", "a-eu"], "FailedCreate", QUOTA)
    world.reconcile(30)
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert world.condition("LearnersReady")["message"] == f"StatefulSet a-eu: FailedCreate: {QUOTA}"
    assert ("Warning", "PodTrouble") in world.events


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [("ReplicaFailure", "True", "FailedCreate"), ("Progressing", "False", "ReplicaSetCreateError")],
)
def test_a_deployment_that_gets_no_pod_reports_the_api_servers_message(kind, status, reason):
    world = refused()
    entry = {"type": kind, "status": status, "reason": reason, "message": SECURITY}
    world.children["Deployment", "a-syncer"]["status"]["conditions"] = [entry]
    world.reconcile(1)
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    message = f"Deployment a-syncer: {reason}: {SECURITY}"
    assert world.condition("SyncerReady")["message"] == message
    assert message in world.condition("SyncerReachable")["message"]


def test_a_deployment_that_makes_progress_is_no_trouble():
    world = refused()
    world.children["Deployment", "a-syncer"]["status"]["conditions"] = [
        {"type": "Progressing", "status": "True", "reason": "NewReplicaSetCreated"},
        {"type": "ReplicaFailure", "status": "False"},
    ]
    world.reconcile(1)
    assert world.reason("SyncerReady") == ("False", "Starting")


@pytest.mark.parametrize("reason", ["FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"])
def test_a_pod_that_the_kubelet_cannot_start_reports_the_kubelets_message(reason):
    world = mounting()
    world.report_event(world.pod("a-syncer-0"), reason, MOUNT)
    world.report_event(world.pod("a-us-0"), reason, MOUNT)
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    assert world.condition("SyncerReady")["message"] == f"pod a-syncer-0: {reason}: {MOUNT}"
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert world.condition("LearnersReady")["message"] == f"pod a-us-0: {reason}: {MOUNT}"
    assert world.events.count(("Warning", "PodTrouble")) == 2, "each has a message of its own"


def test_what_passed_since_is_not_reported():
    world = mounting()
    world.report_event(world.pod("a-us-0"), "FailedMount", MOUNT)
    world.now = world.now.replace(second=9)
    world.report_event(world.pod("a-us-0"), "Pulling", "pulling the image", kind="Normal")
    world.reconcile(30)
    assert world.reason("LearnersReady") == ("False", "Starting")


@pytest.mark.parametrize("between", ["SuccessfulAttachVolume", "SandboxChanged"])
def test_what_only_comes_between_two_warnings_does_not_end_the_trouble(between):
    """A mount that fails again and again; each change of the reason would be a write and an Event."""
    world = mounting()
    world.report_event(world.pod("a-us-0"), "FailedMount", MOUNT)
    world.reconcile(30)
    events = list(world.events)
    for _ in range(3):
        world.now += timedelta(seconds=20)
        world.report_event(world.pod("a-us-0"), between, "again", kind="Normal")
        assert world.reconcile(20).status is None
        world.report_event(world.pod("a-us-0"), "FailedMount", MOUNT)
        assert world.reconcile(20).status is None
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert world.events == events


def test_a_pod_that_came_at_last_ends_the_trouble():
    world = refused()
    world.report_event(world.children["StatefulSet", "a-eu"], "FailedCreate", QUOTA)
    world.reconcile(30)
    world.run_controllers()
    world.answers()
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    assert world.asked == []


def test_a_message_of_kubernetes_is_bounded_and_without_control_characters():
    world = refused()
    message = "denied\x1b[31m\n" + "x" * 5000
    world.report_event(world.children["StatefulSet", "a-eu"], "FailedCreate", message)
    world.reconcile(30)
    shown = world.condition("LearnersReady")["message"]
    assert "denied" in shown
    assert shown.isprintable()
    assert len(shown) <= 1000


# ------------------------------------------------------------------------------ requests


def test_no_events_are_read_for_a_job_that_trains():
    world = training()
    world.reconcile(3600)
    assert world.asked == []


def test_no_events_are_read_in_the_first_seconds_of_a_start():
    world = refused()
    world.reconcile(19)
    assert world.asked == []
    world.reconcile(1)
    assert world.asked == ["a-eu", "a-us"]


def test_no_events_are_read_before_the_controllers_saw_the_workloads():
    world = OperatedJob()
    world.reconcile()
    world.reconcile(3600)
    assert world.asked == []


def test_no_events_are_read_for_a_pod_that_runs_or_that_no_node_fits():
    world = mounting()
    for pod in world.pods.values():
        set_ready(pod, False)
    world.pod("a-us-0")["status"] = {
        "phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]
    }  # fmt: skip
    world.reconcile(60)
    assert world.asked == []


def test_the_events_of_a_few_objects_are_read_however_many_are_stuck():
    regions = [{"name": f"r{number}", "learners": 3} for number in range(9)]
    world = OperatedJob(job=manifest(regions=regions))
    world.reconcile()
    world.count_pods()
    world.reconcile(60)
    assert len(world.asked) == 4


def test_no_events_are_read_while_a_job_is_suspended_nor_at_once_when_it_resumes():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.reconcile(3600)
    assert world.asked == []
    world.change(runPolicy={})
    world.reconcile(3600)
    world.pods.clear()
    world.count_pods()
    world.reconcile(1)
    assert world.reason("SyncerReady") == ("False", "Starting")
    assert world.asked == []


# ------------------------------------------------------------------------------ late starts


def test_a_start_that_takes_longer_than_five_minutes_is_trouble():
    world = mounting()
    world.reconcile(299)
    assert world.reason("SyncerReady") == ("False", "Starting")
    assert world.reason("LearnersReady") == ("False", "Starting")
    world.reconcile(1)
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    assert world.condition("SyncerReady")["message"] == (
        "still starting after 300 s: pod a-syncer-0 is Pending, not ready"
    )
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert "eu/0, eu/1, us/0, us/1" in world.condition("LearnersReady")["message"]
    assert ("Warning", "PodTrouble") in world.events


def test_a_late_start_stays_trouble_until_it_is_over_and_costs_no_further_write():
    world = mounting()
    world.reconcile(300)
    assert world.reconcile(60).status is None
    world.run_controllers()
    for pod in world.pods.values():
        set_ready(pod, True)
    world.count_pods()
    world.answers()
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")
    assert world.reason("LearnersReady") == ("True", "AllTraining")


def test_learners_whose_pods_run_are_not_blamed_for_a_syncer_that_does_not_reply():
    world = mounting()
    for name, pod in world.pods.items():
        if "syncer" not in name:
            set_ready(pod, False)
    world.reconcile(400)
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    assert world.reason("LearnersReady") == ("False", "Starting")


def test_a_syncer_that_was_ready_once_is_not_starting():
    world = training()
    set_ready(world.pod("a-syncer-0"), False)
    world.count_pods()
    world.syncer = None
    world.reconcile(5)
    world.reconcile(3600)
    assert world.reason("SyncerReady") == ("False", "NotReady")


def test_a_first_start_after_a_moment_of_trouble_is_a_start_and_not_a_loss():
    world = refused()
    world.report_event(world.children["StatefulSet", "a-eu"], "FailedCreate", QUOTA)
    world.reconcile(30)
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    world.reported_events.clear()
    world.run_controllers()
    for pod in world.pods.values():
        wait_for_kubelet(pod)
    world.count_pods()
    world.events.clear()
    world.reconcile(5)
    assert world.reason("LearnersReady") == ("False", "Starting")
    assert not [event for event in world.events if event[0] == "Warning"]


def test_the_message_of_an_event_about_a_pod_holds_after_the_event_has_expired():
    pod = {"kind": "Pod", "metadata": {"name": "x", "uid": "2"}}
    wait_for_kubelet(pod)
    message = f"pod x: FailedMount: {MOUNT}"
    assert reported_problem([pod], [], f"a sentence; {message}") == message
    assert reported_problem([pod], [], "pod x: its node n1 does not respond") == ""
    assert reported_problem([pod], [], f"pod y: FailedMount: {MOUNT}") == ""
    assert reported_problem([{**pod, "status": {}}], [], message) == ""
