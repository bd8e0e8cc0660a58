"""Reads and writes of a reconcile, with decisions that the test defines; the API server is in memory, over HTTP."""

import logging
import re
from dataclasses import replace
from datetime import timedelta

import pytest
from prometheus_client import generate_latest

from diloco_job.types import DiLoCoJob
from diloco_operator import logs
from diloco_operator.decide.decisions import Decisions, JobEvent, ObjectRef, decide
from diloco_operator.metrics import Metrics
from diloco_operator.settings import Faults
from diloco_operator.state.objects import identity
from diloco_operator.workqueue import Key, RetryError
from diloco_testing.kubernetes.fake_api import Fault
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, ReconciledCluster, job


def test_a_deleted_job_is_forgotten(api, tmp_path):
    world = ReconciledCluster(api, tmp_path)
    assert world.run() is None
    assert not world.observation


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector(world):
    world.api.edit(
        "dilocojobs",
        "a",
        lambda item: item["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
    )
    assert world.run() is None
    assert not world.observation
    assert not world.api.writes()


def test_everything_is_read_each_time_and_nothing_is_written_without_a_decision(world):
    world.api.create(world.child())
    world.api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "ns", "name": "a-eu-0", "labels": {"diloco.dev/job": "a"}},
        }
    )
    assert world.run() == 30.0
    (seen,) = world.observation
    assert seen.stored.raw["spec"]["steps"] == 5
    assert [child["metadata"]["name"] for child in seen.children] == ["a-spec"]
    assert [pod["metadata"]["name"] for pod in seen.pods] == ["a-eu-0"]
    assert (seen.syncer, seen.certificate, seen.foreign, seen.refusals) == (None, None, (), ())
    assert not world.api.writes()


def test_the_syncers_claim_is_found_without_its_label(world):
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": "ns", "name": "a-syncer"},
    }
    for labels in ({}, {"diloco.dev/job": "a"}):
        made = world.api.create({**claim, "metadata": {**claim["metadata"], "labels": labels}})
        world.run()
        (seen,) = world.observation
        assert [child["metadata"]["uid"] for child in seen.children] == [made["metadata"]["uid"]]
        world.api.delete("persistentvolumeclaims", "a-syncer")


def test_decisions_are_carried_out_in_order_and_counted(world):
    world.api.create(world.child("old"))
    uid = world.api.get("configmaps", "old")["metadata"]["uid"]
    world.decide = lambda observation: Decisions(
        apply=(world.child("a-1"), world.child("a-2")),
        delete=(ObjectRef(kind="ConfigMap", name="old", uid=uid),),
        status={"state": "Training", "step": 3},
        events=(JobEvent(type="Normal", reason="Valid", message="the job can run"),),
        requeue_seconds=7.0,
    )
    assert world.run() == 7.0
    assert [(write.method, write.path.split("?")[0].rpartition("/")[2]) for write in world.api.writes()] == [
        ("PATCH", "a-1"),
        ("PATCH", "a-2"),
        ("DELETE", "old"),
        ("PATCH", "status"),
        ("POST", "events"),
    ]  # fmt: skip
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "Training", "step": 3}
    assert world.count("diloco_operator_writes_total", kind="ConfigMap") == 3
    assert world.count("diloco_operator_writes_total", kind="DiLoCoJob") == 1
    assert world.count("diloco_operator_writes_total", kind="Event") == 1
    assert world.count("diloco_operator_jobs", state="Training") == 1
    job = {"job_namespace": "ns", "job_name": "a"}
    assert world.count("diloco_operator_job_state", **job, state="Training") == 1
    assert world.count("diloco_operator_reconcile_seconds_count", result="ok") == 1


def test_an_event_has_its_object_and_its_reporter(world):
    world.decide = lambda observation: Decisions(
        events=(JobEvent(type="Warning", reason="Refused", message="x" * 5000),)
    )
    world.run()
    (event,) = world.api.all("events")
    assert event["metadata"]["name"].startswith("a.")
    assert event["involvedObject"]["uid"] == world.api.get("dilocojobs", "a")["metadata"]["uid"]
    assert (event["reportingComponent"], event["reportingInstance"]) == ("diloco-operator", "pod-1")
    assert event["firstTimestamp"] == "2026-11-21T12:00:00Z"
    assert len(event["message"]) <= 1024
    world.run()
    assert len(world.api.all("events")) == 1


def test_two_events_of_one_reason_and_second_are_both_posted(world):
    world.decide = lambda observation: Decisions(
        events=tuple(
            JobEvent(type="Warning", reason="PodTrouble", message=message) for message in "ab"
        )
    )
    world.run()
    assert sorted(event["message"] for event in world.api.all("events")) == ["a", "b"]


def test_a_condition_that_changes_back_and_forth_for_hours_causes_no_flood_of_events(world):
    """An API server keeps each Event for an hour; the condition shows what it is now."""

    def changed(reason, seconds):
        world.now += timedelta(seconds=seconds)
        event = JobEvent(type="Warning", reason=reason, message=f"at {world.now}")
        world.decide = lambda _: Decisions(events=(event,))
        world.run()

    def posted(reason):
        return sum(event["reason"] == reason for event in world.api.all("events"))

    for _ in range(30):
        changed("SomeNotTraining", 10)
        changed("AllTraining", 10)
    assert posted("SomeNotTraining") == posted("AllTraining") == 10
    changed("TooFewLearners", 1)
    assert posted("TooFewLearners") == 1, "what is new is always reported"
    changed("SomeNotTraining", 3600)
    assert posted("SomeNotTraining") == 11


def test_the_events_of_an_object_that_is_stuck_are_read(world):
    child = world.child("a-eu")
    child |= {"apiVersion": "apps/v1", "kind": "StatefulSet", "spec": {"replicas": 2}}
    child["metadata"]["labels"]["diloco.dev/role"] = "learner"
    made = world.api.create(child)
    world.api.edit(
        "statefulsets", "a-eu", lambda item: item.update(status={"observedGeneration": 9})
    )
    about = {"uid": made["metadata"]["uid"]}
    world.api.create({
        "apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "ns", "name": "e"},
        "involvedObject": about, "type": "Warning", "reason": "FailedCreate",
    })  # fmt: skip
    world.run()
    assert world.observation[-1].events == ()
    condition = {"type": "LearnersReady", "status": "False", "reason": "Starting",
                 "lastTransitionTime": "2026-11-21T11:59:30Z"}  # fmt: skip
    world.api.edit("dilocojobs", "a", lambda item: item.update(status={"conditions": [condition]}))
    world.run()
    assert [event["reason"] for event in world.observation[-1].events] == ["FailedCreate"]


def test_an_apply_that_changed_nothing_is_not_sent_again_until_something_differs(world):
    world.api.create(world.child())
    applied = ["1"]
    world.decide = lambda observation: Decisions(apply=(world.child(applied=applied[0]),))
    world.run()
    world.run()
    assert len(world.api.writes()) == 1

    world.api.edit("configmaps", "a-spec", lambda item: item.update(status={"seen": 1}))
    world.run()
    assert len(world.api.writes()) == 1, "a status is not ours to repair"

    world.api.edit("configmaps", "a-spec", lambda item: item["data"].update(x="drifted"))
    world.run()
    assert len(world.api.writes()) == 2
    assert world.api.get("configmaps", "a-spec")["data"] == {"x": "1"}

    world.run()  # it changed something then: now it does not
    applied[0] = "2"
    world.run()
    assert world.api.get("configmaps", "a-spec")["metadata"]["annotations"] == {
        "diloco.dev/applied": "2"
    }


def foreign_child(world, **metadata):
    body = world.child()
    body["metadata"] = {"namespace": "ns", "name": "a-spec", **metadata}
    body["data"] = {"of": "another owner"}
    return body


def taken(observation):
    return map(identity, observation.foreign)


def test_a_foreign_child_passes_through_as_the_object_that_was_read(world):
    body = foreign_child(
        world,
        labels={"diloco.dev/job": "a"},
        ownerReferences=[{"uid": "other", "controller": True}],
    )
    world.api.create(body)
    world.decide = lambda observation: Decisions(apply=(world.child(),))
    world.run()
    first, second = world.observation
    assert first.foreign == ()
    (listed,) = first.children
    (foreign,) = second.foreign
    assert foreign is listed


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_is_parsed_once_per_reconcile_even_if_decisions_are_made_twice(
    world, monkeypatch, fails
):
    parsed = []

    def model_validate(data, validate=DiLoCoJob.model_validate):
        parsed.append(data)
        return validate(data)

    monkeypatch.setattr(DiLoCoJob, "model_validate", model_validate)
    world.api.create(foreign_child(world))
    world.decide = lambda observation: replace(decide(observation, SCOPE, NOW), fails=fails)
    world.api.faults.append(Fault("PATCH", "statefulsets/a-eu", 403, "no", times=9))
    world.run()
    assert len(world.observation) == (3 if fails else 2)
    assert len(parsed) == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"labels": {"diloco.dev/job": "b"}},
        {"ownerReferences": [{"uid": "other", "controller": True}]},
        {
            "labels": {"diloco.dev/job": "a"},
            "ownerReferences": [{"uid": "other", "controller": True}],
        },
    ],
    ids=["no owner", "another job's", "another controller's", "a predecessor's"],
)
def test_a_child_of_another_owner_is_left_alone_and_the_others_are_applied(world, metadata):
    world.api.create(foreign_child(world, **metadata))
    world.decide = lambda observation: Decisions(
        apply=(world.child(), world.child("a-2")),
        status={"state": ",".join(f"{kind} {name}" for kind, name in taken(observation))},
    )
    world.run()
    assert world.api.get("configmaps", "a-spec")["data"] == {"of": "another owner"}
    assert world.api.get("configmaps", "a-2") is not None
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-spec"}


def test_a_labelled_child_without_a_controller_is_adopted(world):
    world.api.create(foreign_child(world, labels={"diloco.dev/job": "a"}))
    world.decide = lambda observation: Decisions(apply=(world.child(),))
    world.run()
    assert world.api.get("configmaps", "a-spec")["data"]["x"] == "1"


def test_the_error_of_a_crd_that_lacks_a_field_states_what_to_do(world):
    message = ".status.operator: field not declared in schema"
    world.decide = lambda observation: Decisions(status={"state": "Training"})
    world.api.faults.append(Fault("PATCH", "dilocojobs/a/status", 500, message, times=99))
    with pytest.raises(RetryError, match="the CRD is older than this operator: upgrade it"):
        world.run()


def test_nothing_more_is_tried_in_a_namespace_that_is_being_deleted(world):
    world.api.faults.append(
        Fault("PATCH", "configmaps/", 403, "is being terminated", "NamespaceTerminating", times=9)
    )
    world.decide = lambda observation: Decisions(
        apply=(world.child("a-1"), world.child("a-2")),
        status={"state": "Refused"},
        events=(JobEvent(type="Warning", reason="Refused", message="refused"),),
    )
    with pytest.raises(RetryError, match="is being terminated"):
        world.run()
    assert [request.path.partition("?")[0] for request in world.api.writes()] == [
        "/api/v1/namespaces/ns/configmaps/a-1"
    ]


def test_an_unavailable_server_ends_the_reconcile_without_a_status(world):
    world.api.faults.append(Fault("GET", "pods", 503, times=9))
    with pytest.raises(RetryError, match="pods"):
        world.run()
    assert not world.observation
    assert not world.api.writes()
    assert world.count("diloco_operator_reconcile_seconds_count", result="error") == 1


def test_a_finished_job_is_removed_unless_it_changed_meanwhile(world):
    def change_it(observation):
        world.api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
        return Decisions(remove_job=True)

    world.decide = change_it
    world.run()
    assert world.api.get("dilocojobs", "a") is not None
    world.decide = lambda observation: Decisions(remove_job=True)
    world.run()
    assert world.api.get("dilocojobs", "a") is None
    assert world.run() is None


def test_every_line_of_a_reconcile_carries_the_jobs_key(world, capfd):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(json=True)
        world.decide = lambda observation: Decisions(apply=(world.child(),))
        world.run()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all('"job": "ns/a"' in line for line in lines)


@pytest.mark.parametrize(
    ("point", "done"),
    [
        ("after-read", []),
        ("after-apply-1", ["a-1"]),
        ("after-apply-2", ["a-1", "a-2"]),
        ("before-status", ["a-1", "a-2"]),
        ("after-status", ["a-1", "a-2", "status"]),
    ],
)
def test_faults_come_where_they_are_named(api, tmp_path, point, done):
    api.create(job())

    class StopError(Exception):
        pass

    class StopAtPoint(Faults):
        def reached(self, at):
            if at == point:
                raise StopError

    world = ReconciledCluster(api, tmp_path, faults=StopAtPoint())
    world.decide = lambda observation: Decisions(
        apply=(world.child("a-1"), world.child("a-2")), status={"step": 1}
    )
    with pytest.raises(StopError):
        world.run()
    assert [write.path.split("?")[0].rpartition("/")[2] for write in api.writes()] == done


def test_an_invalid_manifest_reaches_the_decision_and_no_syncer_is_contacted(world):
    world.api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=-1))
    assert world.run() == 30.0
    assert world.observation[0].syncer is None
    assert [request.method for request in world.api.requests] == ["GET"], (
        "the job, and nothing else"
    )


def test_the_reasons_of_a_job_that_need_action_are_in_the_metrics_until_they_are_over(world):
    def warnings():
        lines = generate_latest(world.metrics.registry).decode().splitlines()
        return sorted(line for line in lines if line.startswith("diloco_operator_job_warning{"))

    def conditions(**reasons):
        entries = [
            {"type": kind, "reason": reason, "status": "True"} for kind, reason in reasons.items()
        ]
        world.decide = lambda _: Decisions(status={"state": "Training", "conditions": entries})
        world.run()

    conditions(
        Accepted="Contested", SyncerReachable="CertificateExpires", QuorumMet="EnoughLearners"
    )
    of_job = 'job_name="a",job_namespace="ns"'
    assert warnings() == [
        f'diloco_operator_job_warning{{condition="Accepted",{of_job},reason="Contested"}} 1.0',
        f'diloco_operator_job_warning{{condition="SyncerReachable",{of_job},'
        'reason="CertificateExpires"} 1.0',
    ]
    conditions(Accepted="Valid", SyncerReachable="CertificateExpires")
    assert len(warnings()) == 1
    world.metrics.leader(leads=False)
    assert warnings() == []
    world.metrics.leader(leads=True)
    conditions(SyncerReachable="CertificateExpires")
    assert len(warnings()) == 1
    world.api.delete("dilocojobs", "a")
    assert world.run() is None
    assert warnings() == []


def test_each_job_has_one_state_in_the_metrics_and_none_after_its_deletion():
    metrics = Metrics()
    for name, state in (("a", "Starting"), ("a", "Failed"), ("b", "Failed"), ("b", None)):
        metrics.state(Key("ns", name), state)
    text = generate_latest(metrics.registry).decode()
    assert re.findall(r"^(diloco_operator_job(?:s|_state)\S+) (\S+)", text, re.M) == [
        ('diloco_operator_jobs{state="Failed"}', "1.0"),
        ('diloco_operator_job_state{job_name="a",job_namespace="ns",state="Failed"}', "1.0"),
    ]
