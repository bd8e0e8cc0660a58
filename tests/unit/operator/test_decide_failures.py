"""Failures in a cluster, and the conditions that report them."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest

from diloco_operator.state.observation import Unreachable
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    certificate,
    is_idle,
    main_of,
    manifest,
    set_ready,
    training,
)

UNREACHABLE = Unreachable(reason="NoAnswer", message="no answer")
SECRET = {"tls": {"mode": "Secret", "secretName": "a-tls"}}


# ------------------------------------------------------------------------------ pods


def stuck(pod, reason, message="", **main):
    set_ready(pod, False)
    main_of(pod).update({"state": {"waiting": {"reason": reason, "message": message}}, **main})


def test_a_pod_that_cannot_be_scheduled_is_named():
    world = training()
    world.pod("a-eu-1")["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu"}
        ],
    }
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    message = world.condition("LearnersReady")["message"]
    assert "a-eu-1" in message
    assert "Insufficient cpu" in message


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull"])
def test_an_image_that_cannot_be_pulled_is_named_in_a_stable_message(reason):
    world = training()
    stuck(world.pod("a-eu-1"), reason, f"{reason}, a message that changes")
    world.reconcile()
    message = "pod a-eu-1: ImagePullBackOff: image diloco/worker:1 cannot be pulled"
    assert world.condition("LearnersReady")["message"] == message


def test_the_message_explains_why_a_pod_keeps_exiting():
    world = training()
    end = {
        "exitCode": 1,
        "reason": "Error",
        "message": '{"reason": "CrashLoop", "message": "no GPU"}',
    }
    stuck(world.pod("a-us-0"), "CrashLoopBackOff", "back-off 40s", lastState={"terminated": end})
    world.reconcile()
    message = world.condition("LearnersReady")["message"]
    assert "a-us-0" in message
    assert "CrashLoopBackOff" in message
    assert "no GPU" in message
    assert "40s" not in message


def test_the_message_explains_why_a_container_cannot_be_created():
    world = training()
    stuck(world.pod("a-us-0"), "CreateContainerConfigError", 'secret "x" not found')
    world.reconcile()
    assert 'secret "x" not found' in world.condition("LearnersReady")["message"]


def test_more_pods_in_trouble_are_counted():
    world = training()
    for name in ("a-eu-0", "a-eu-1", "a-us-0"):
        stuck(world.pod(name), "ErrImagePull")
    world.reconcile()
    assert "(and 2 more pods)" in world.condition("LearnersReady")["message"]


def test_the_message_explains_why_the_syncers_pod_cannot_run():
    world = training()
    stuck(world.pod("a-syncer-0"), "ErrImagePull")
    world.count_pods()
    world.syncer = None
    world.reconcile(100)
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    assert "a-syncer-0" in world.condition("SyncerReady")["message"]
    assert world.reason("SyncerReachable") == ("False", "NotStarted")
    assert "a-syncer-0" in world.condition("SyncerReachable")["message"]


def test_learners_that_are_missing_are_named():
    world = training()
    del world.pods["a-us-1"]
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "SomeNotTraining")
    assert "us/1" in world.condition("LearnersReady")["message"]
    assert "us/0" not in world.condition("LearnersReady")["message"]
    assert ("Warning", "SomeNotTraining") in world.events


def test_an_ejected_learner_is_named_and_keeps_its_pod():
    world = training()
    pods = copy.deepcopy(world.pods)
    world.answers(ejected=("us/1",))
    decisions = world.reconcile()
    assert not decisions.delete
    assert not decisions.apply
    assert world.pods == pods
    assert world.reason("LearnersReady") == ("False", "SomeNotTraining")
    message = world.condition("LearnersReady")["message"]
    assert message == "3 of 4 are training; ejected, because they do not deliver: us/1"
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")


def test_an_ejected_learner_costs_no_write_per_reconcile():
    world = training()
    world.answers(ejected=("us/1",))
    waiting = world.reconcile()
    world.answers()
    assert waiting.requeue_seconds == world.reconcile().requeue_seconds, (
        "it is not asked more often"
    )
    world.answers(ejected=("us/1",))
    world.reconcile(1)
    assert world.reconcile().status is None


def test_a_learner_of_several_pods_is_ready_when_all_are():
    learner = {"command": ["python", "train.py"], "podsPerLearner": 2}
    world = training(manifest(learner=learner))
    assert world.replicas()["a-eu"] == 4
    assert world.status["learners"]["summary"] == "4/4"
    set_ready(world.pod("a-eu-3"), False)
    world.reconcile()
    assert "eu/1" in world.condition("LearnersReady")["message"]
    assert world.status["regions"][0]["ready"] == 1


def test_restarts_are_those_that_the_syncer_or_the_kubelet_saw():
    world = training()
    main_of(world.pod("a-eu-0"))["restartCount"] = 3
    main_of(world.pod("a-eu-1"))["restartCount"] = 2
    main_of(world.pod("a-us-0"))["restartCount"] = 1
    world.answers()
    learners = tuple(
        learner if learner.name != "eu/1" else type(learner)(**{**_fields(learner), "restarts": 5})
        for learner in world.syncer.learners
    )
    world.answers(learners=learners)
    world.reconcile()
    assert [region["restarts"] for region in world.status["regions"]] == [8, 1]
    world.becomes_unreachable()
    world.reconcile(100)
    assert [region["restarts"] for region in world.status["regions"]] == [8, 1]


def _fields(learner):
    return {name: getattr(learner, name) for name in learner.__slots__}


# ------------------------------------------------------------------------------ the syncer


def test_a_syncer_that_is_briefly_unavailable_is_still_reachable():
    world = training()
    world.becomes_unreachable()
    decisions = world.reconcile(20)
    assert is_idle(decisions)
    assert decisions.requeue_seconds == 10


def test_a_syncer_that_did_not_answer_for_30_s_is_not_reachable_and_the_condition_explains_why():
    world = training()
    world.becomes_unreachable("DialTimeout")
    world.reconcile(30)
    assert world.reason("SyncerReachable") == ("False", "DialTimeout")
    assert ("Warning", "DialTimeout") in world.events
    assert world.reason("QuorumMet") == ("Unknown", "NoAnswer")
    assert world.reason("SpecConsistent") == ("Unknown", "NoAnswer")
    assert world.status["state"] == "Degraded"


def test_an_unreachable_syncer_restarts_nothing_and_keeps_the_known_status():
    world = training()
    world.answers(step=700, tokens=9)
    world.reconcile(30)
    world.becomes_unreachable()
    decisions = world.reconcile(3600)
    assert (decisions.apply, decisions.delete) == ((), ())
    assert (world.status["step"], world.status["tokens"]) == (700, 9)
    assert world.status["lastSyncTime"] == "2026-03-01T12:00:30Z"
    assert is_idle(world.reconcile(3600))


def test_the_syncer_that_is_back_is_reachable_at_once():
    world = training()
    world.becomes_unreachable()
    world.reconcile(100)
    world.answers(step=150)
    world.reconcile(1)
    assert world.reason("SyncerReachable") == ("True", "Answers")
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    assert world.status["step"] == 150


def test_a_fresh_operator_keeps_the_last_status_for_30_s():
    world = training()
    world.becomes_unreachable()
    world.last_answer = None
    assert is_idle(world.reconcile(29))
    world.reconcile(1)
    assert world.reason("SyncerReachable") == ("False", "ConnectionRefused")


@pytest.mark.parametrize("operator", ["the same", "restarted"])
@pytest.mark.parametrize("state", ["Training", "Complete"])
def test_a_request_without_an_answer_changes_nothing_before_15_s(state, operator):
    """A quiet job is asked at least 30 s after the last answer, and one at rest every 5 minutes."""
    world = training()
    if state == "Complete":
        world.answers(state=state, step=2000, gone=("eu/0", "eu/1", "us/0", "us/1"))
    world.settle()
    answer, before, events = world.syncer, copy.deepcopy(world.status), len(world.events)
    for _ in range(2):  # each silence is counted from its own first request
        world.now += timedelta(seconds=301)
        world.syncer = replace(UNREACHABLE, silent_since=world.now)
        if operator == "restarted":
            world.last_answer = None
        assert is_idle(world.reconcile())
        assert is_idle(world.reconcile(14))
        world.syncer = answer
        world.reconcile(1)
        assert (world.status["state"], len(world.events)) == (before["state"], events)
        assert world.status["conditions"] == before["conditions"]
    world.now += timedelta(seconds=301)
    world.syncer = replace(UNREACHABLE, silent_since=world.now)
    world.reconcile(15)
    assert world.reason("SyncerReachable") == ("False", "NoAnswer")
    assert is_idle(world.reconcile(1))


def test_a_silence_that_begins_in_the_future_by_a_clock_that_was_set_back_does_not_count():
    world = training()
    world.now += timedelta(seconds=31)
    late = world.now + timedelta(hours=1)
    world.syncer = replace(UNREACHABLE, silent_since=late)
    world.reconcile()
    assert world.reason("SyncerReachable") == ("False", "NoAnswer")


def test_a_syncer_pod_that_restarts_is_not_ready():
    world = training()
    set_ready(world.pod("a-syncer-0"), False)
    world.count_pods()
    world.syncer = None
    world.reconcile(5)
    assert world.reason("SyncerReady") == ("False", "NotReady")
    assert world.reason("SyncerReachable") == ("True", "Answers")
    assert ("Warning", "NotReady") in world.events


def test_a_lost_quorum_is_a_condition_and_an_event():
    world = training()
    world.answers("Waiting", gone=("eu/1", "us/0", "us/1"))
    world.reconcile()
    assert world.reason("QuorumMet") == ("False", "TooFewLearners")
    assert "1 learners report (quorum: 2)" in world.condition("QuorumMet")["message"]
    assert ("Warning", "TooFewLearners") in world.events


def test_one_lost_learner_loses_no_quorum():
    world = training()
    world.answers(gone=("us/1",))
    world.reconcile()
    assert world.reason("QuorumMet") == ("True", "EnoughLearners")
    assert world.reason("LearnersReady") == ("False", "SomeNotTraining")
    assert world.status["learners"]["summary"] == "3/4"
    assert world.status["state"] == "Degraded"


def test_a_job_without_a_model_yet_has_no_quorum_and_no_trouble():
    world = OperatedJob()
    world.settle()
    world.answers("Initialising", step=0)
    world.settle()
    assert world.reason("QuorumMet") == ("False", "Starting")
    assert not [event for event in world.events if event[0] == "Warning"]


def test_a_load_balancer_without_an_address_is_waited_for():
    world = training(manifest(syncer={"service": {"type": "LoadBalancer"}}))
    assert world.reason("SyncerReady") == ("True", "WaitingForAddress")
    assert "LoadBalancer" in world.condition("SyncerReady")["message"]
    service = world.children["Service", "a-syncer"]
    service["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
    world.reconcile()
    assert world.reason("SyncerReady") == ("True", "Serving")
    assert world.status["syncer"]["endpoint"] == "192.0.2.7:7070"


# ------------------------------------------------------------------------------ certificates


def cut_off(facts):
    world = OperatedJob(job=manifest(**SECRET), certificate=facts)
    world.reconcile()
    world.run_controllers(ready=lambda pod: "syncer" in pod["metadata"]["name"])
    world.becomes_unreachable("HandshakeRefused")
    world.settle()
    return world


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (certificate("a", "eu"), "CertificateOfOtherRegion"),
        (certificate("a"), "CertificateOfOtherRegion"),
        (certificate("a", "eu", "us", server_names=("other",)), "CertificateNotForSyncer"),
        (certificate("a", reason="CertificateExpired", problem="it expired"), "CertificateExpired"),
        (certificate("a", reason="CertificateMissing", problem="no Secret"), "CertificateMissing"),
        (certificate("a", problem="odd"), "CertificateUnreadable"),
    ],
)
def test_a_certificate_problem_is_reported_by_the_conditions_that_depend_on_it(facts, reason):
    world = cut_off(facts)
    assert world.reason("SyncerReachable") == ("False", reason)
    assert world.reason("LearnersReady") == ("False", reason)
    assert world.events.count(("Warning", reason)) == 1


def test_a_first_start_that_waited_for_its_certificate_is_a_start_and_not_a_loss():
    """As with cert-manager, which makes the Secret a moment after the operator makes the Certificate."""
    missing = certificate("a", reason="CertificateMissing", problem="no Secret")
    world = OperatedJob(job=manifest(**SECRET), certificate=missing)
    world.reconcile()
    world.run_controllers(ready=lambda _: False)
    world.reconcile(5)
    assert world.reason("LearnersReady") == ("False", "CertificateMissing")
    world.events.clear()
    world.certificate = certificate("a", "eu", "us")
    world.reconcile(5)
    assert world.reason("LearnersReady") == ("False", "Starting")
    assert not [event for event in world.events if event[0] == "Warning"]


def test_the_end_of_a_certificate_is_a_warning_before_connections_fail():
    """All clusters may have got their certificates on one day, a year before."""
    world = training(manifest(**SECRET), certificate=certificate("a", "eu", "us"))
    assert world.reason("SyncerReachable") == ("True", "Answers")
    world.certificate = certificate("a", "eu", "us", renewal="the certificate expires on day 365")
    world.reconcile(30)
    assert world.reason("SyncerReachable") == ("True", "CertificateExpires")
    assert world.condition("SyncerReachable")["message"].endswith(
        "replies, but the certificate expires on day 365"
    )
    assert world.events[-1] == ("Warning", "CertificateExpires")
    assert world.status["state"] == "Training"
    assert is_idle(world.reconcile(10))
    world.certificate = certificate("a", "eu", "us")
    world.reconcile(30)
    assert world.reason("SyncerReachable") == ("True", "Answers")


def test_a_good_certificate_is_not_blamed():
    world = cut_off(certificate("a", "eu", "us"))
    assert world.reason("SyncerReachable") == ("False", "HandshakeRefused")
    assert world.reason("LearnersReady") == ("False", "Starting")


def test_a_certificate_of_another_region_is_reported_though_the_syncer_answers():
    world = cut_off(certificate("a", "eu"))
    world.answers(gone=("us/0", "us/1"))
    world.settle()
    assert world.reason("SyncerReachable") == ("True", "Answers")
    assert world.reason("LearnersReady") == ("False", "CertificateOfOtherRegion")
    assert "region us" in world.condition("LearnersReady")["message"]


def test_a_region_without_learners_needs_no_name_in_the_certificate():
    regions = [{"name": "eu", "learners": 2}, {"name": "us", "learners": 0}]
    world = OperatedJob(job=manifest(regions=regions, **SECRET), certificate=certificate("a", "eu"))
    world.settle()
    world.becomes_unreachable("HandshakeRefused")
    world.settle()
    assert world.reason("SyncerReachable") == ("False", "HandshakeRefused")
