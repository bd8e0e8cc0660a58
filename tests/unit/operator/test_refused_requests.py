"""What the API server refuses or does not answer: it is reported, tried again later, and delays nothing else."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest

from diloco_operator.decide.decisions import Decisions, ObjectRef, decide
from diloco_operator.resources.operator_scope import NetworkPolicies
from diloco_operator.workqueue import Key, RetryError
from diloco_testing.kubernetes.fake_api import Fault
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, ReconciledCluster, job, reasons


def reported(**decisions):
    """These decisions; the status shows what the server refused."""
    return lambda observation: Decisions(
        **decisions,
        status={
            "state": ";".join(
                f"{refusal.child}={refusal.message}" for refusal in observation.refusals
            )
        },
    )


@pytest.mark.parametrize("code", [400, 403, 422, 500])
def test_a_refused_child_is_reported_in_the_status_and_retried_with_back_off(world, code):
    """500 as well: a real API server returns it for a field of the wrong type."""
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", code, "data: Forbidden", times=9))
    world.decide = reported(apply=(world.child("a-1"), world.child("a-2")))
    assert world.run() < 30
    assert world.api.get("configmaps", "a-2") is not None
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-1=data: Forbidden"}
    assert world.count("diloco_operator_reconcile_seconds_count", result="refused") == 1


def test_only_the_refused_child_waits(world):
    """Its siblings and the status keep their pace, and the refusal stays in the status."""
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", 403, "denied", times=10**6))
    for turn in range(60):
        world.now += timedelta(seconds=30)
        world.decide = reported(apply=(world.child("a-1"), world.child("a-2", applied=str(turn))))
        assert 0 <= world.run() <= 30
        annotations = world.api.get("configmaps", "a-2")["metadata"]["annotations"]
        assert annotations == {"diloco.dev/applied": str(turn)}
        assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-1=denied"}
    tries = [r.path for r in world.api.writes() if "/a-1" in r.path]
    assert 10 < len(tries) < 50, "after 120 s at most, and after 60 s on average"
    assert world.count("diloco_operator_reconcile_seconds_count", result="refused") == 60


def test_a_refused_child_is_sent_at_once_when_it_or_the_manifest_changes(world):
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", 403, "denied", times=10**6))
    applied = ["1"]
    world.decide = lambda observation: Decisions(apply=(world.child("a-1", applied=applied[0]),))

    def tries():
        before = len(world.api.writes())
        world.run()
        return len(world.api.writes()) - before

    assert [tries() for _ in range(3)] == [1, 0, 0]
    applied[0] = "2"
    assert [tries(), tries()] == [1, 0]
    world.api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
    assert [tries(), tries()] == [1, 0]
    world.now += timedelta(seconds=120)
    assert tries() == 1
    world.api.faults.clear()
    world.now += timedelta(seconds=120)
    assert world.run() == 30.0
    assert world.api.get("configmaps", "a-1") is not None


@pytest.mark.slow
def test_many_refused_children_cause_no_more_reconciles_than_one(world):
    world.api.faults.append(Fault("PATCH", "configmaps/a-", 403, "denied", times=10**6))
    world.decide = reported(apply=tuple(world.child(f"a-{number}") for number in range(30)))
    begin, num_runs = world.now, 0
    while world.now < begin + timedelta(hours=1):
        world.now += timedelta(seconds=world.run())
        num_runs += 1
    assert num_runs < 3 * 120, (
        "30 s apart, or less after a refusal, which comes 60 s after the last on average"
    )


def test_a_server_that_does_not_answer_is_retried_with_back_off(world):
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", 503, "no", times=10**6))
    world.decide = reported(apply=(world.child("a-1"),))
    with pytest.raises(RetryError, match="ConfigMap a-1: no"):
        world.run()
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-1=no"}


@pytest.mark.parametrize("seconds", [0, 120], ids=["waits", "due"])
def test_a_refusal_outlasts_a_sibling_that_has_no_answer(world, seconds):
    """It stays in the status, and does not start over with the shortest wait."""
    world.api.faults.append(Fault("PATCH", "configmaps/a-2", 403, "denied", times=10**6))
    world.decide = reported(apply=(world.child("a-2"),))
    for _ in range(20):
        world.now += timedelta(seconds=120)
        world.run()
    refusals = world.reconciler._refusals[Key("ns", "a")]
    tries = refusals._backoff._tries
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", 503, "no", times=10**6))
    world.decide = reported(apply=(world.child("a-1"), world.child("a-2")))
    world.now += timedelta(seconds=seconds)
    writes = len(world.api.writes())
    with pytest.raises(RetryError, match="ConfigMap a-1: no; ConfigMap a-2: denied"):
        world.run()
    assert world.api.get("dilocojobs", "a")["status"] == {
        "state": "ConfigMap a-1=no;ConfigMap a-2=denied"
    }
    assert not [r for r in world.api.writes()[writes:] if "/a-2" in r.path]
    assert refusals._backoff._tries == tries


def test_a_refused_delete_is_reported_and_blocks_nothing(world):
    world.api.create(world.child("old"))
    world.api.create(world.child("older"))
    refs = tuple(
        ObjectRef(
            kind="ConfigMap",
            name=name,
            uid=world.api.get("configmaps", name)["metadata"]["uid"],
        )
        for name in ("old", "older")
    )
    world.api.faults.append(Fault("DELETE", "configmaps/old$", 403, "denied by a policy", times=9))
    world.decide = reported(delete=refs)
    assert world.run() < 30
    assert world.api.get("configmaps", "older") is None
    assert world.api.get("dilocojobs", "a")["status"] == {
        "state": "ConfigMap old=denied by a policy"
    }


def test_a_finished_job_is_removed_though_the_server_refuses_a_child(world):
    world.api.faults.append(Fault("PATCH", "configmaps/", 403, "no", times=9))
    world.decide = lambda observation: Decisions(apply=(world.child(),), remove_job=True)
    world.run()
    assert world.api.get("dilocojobs", "a") is None


def test_without_access_to_certificates_the_job_reports_it_and_gets_its_other_children(
    api, tmp_path
):
    """rbac.certManager of the chart is false: reading a Certificate is refused like creating one."""
    api.create(job(tls={"mode": "CertManager", "issuerRef": {"name": "ca"}}))
    api.faults.append(Fault("*", "certificates", 403, "certificates is forbidden", times=99))
    world = ReconciledCluster(api, tmp_path)
    world.decide = lambda observation: decide(observation, SCOPE, NOW)
    world.run()
    world.reconciler.close()
    assert api.get("statefulsets", "a-eu")
    assert api.get("deployments", "a-syncer")
    status, reason, message = reasons(api)["Accepted"]
    assert (status, reason) == ("False", "Refused")
    assert "Certificate a-tls: certificates is forbidden" in message


@pytest.mark.parametrize("plural", ["pods", "statefulsets", "persistentvolumeclaims"])
def test_a_job_whose_objects_may_not_be_read_reports_it_until_they_can_be(world, plural):
    world.decide = lambda observation: decide(observation, SCOPE, NOW)
    world.run()
    before = reasons(world.api)
    world.api.faults.append(Fault("GET", f"/{plural}", 403, "User x cannot list", times=2))
    for _ in range(2):
        with pytest.raises(RetryError, match="User x cannot list"):
            world.run()
    status, reason, message = reasons(world.api)["Accepted"]
    assert (status, reason) == ("False", "Refused")
    assert plural in message
    assert "User x cannot list" in message
    assert {**reasons(world.api), "Accepted": before["Accepted"]} == before, "the rest is as known"
    warnings = [event for event in world.api.all("events") if event["reason"] == "Refused"]
    assert len(warnings) == 1
    world.run()
    assert reasons(world.api)["Accepted"] == before["Accepted"]


@pytest.mark.parametrize("plural", ["poddisruptionbudgets", "serviceaccounts", "networkpolicies"])
def test_objects_that_no_decision_needs_do_not_stop_a_job_when_they_may_not_be_read(
    api, tmp_path, plural
):
    """It is suspended and completed nevertheless."""
    scope = replace(SCOPE, network_policies=NetworkPolicies(operator_namespace="system"))
    api.create(job())
    world = ReconciledCluster(api, tmp_path, scope=scope)
    world.decide = lambda observation: decide(observation, scope, world.now)
    world.run()
    assert api.all(plural)
    uids = {item["metadata"]["uid"] for item in api.all(plural)}
    fault = Fault("*", f"/{plural}", 403, "User x cannot do that", times=999)
    api.faults.append(fault)
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(runPolicy={"suspend": True}))
    for _ in range(2):
        world.now += timedelta(seconds=1)
        world.run()
    assert api.get("statefulsets", "a-eu")["spec"]["replicas"] == 0
    assert reasons(api)["Suspended"][:2] == ("True", "Suspended")
    status, reason, message = reasons(api)["Accepted"]
    assert (status, reason) == ("False", "Refused")
    assert "User x cannot do that" in message
    fault.times = 0
    world.now += timedelta(seconds=300)
    world.run()
    world.run()
    assert reasons(api)["Accepted"][:2] == ("True", "Valid")
    assert {item["metadata"]["uid"] for item in api.all(plural)} == uids
    world.reconciler.close()


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/statefulsets"), ("GET", "/pods"), ("PATCH", "/ns/[^d]")]
)
def test_a_new_job_of_which_everything_is_forbidden_reports_the_servers_message(
    api, tmp_path, method, path
):
    """No installation has claimed it yet."""
    api.create(job())
    world = ReconciledCluster(api, tmp_path, installation="system/one")
    world.decide = lambda observation: decide(observation, SCOPE, NOW)
    fault = Fault(method, path, 403, "User x cannot do that", times=999)
    api.faults.append(fault)
    with pytest.raises(RetryError) if method == "GET" else nullcontext():
        world.run()
    status, reason, message = reasons(api)["Accepted"]
    assert (status, reason) == ("False", "Refused")
    assert "User x cannot do that" in message
    assert ("Warning", "Refused") in [(e["type"], e["reason"]) for e in api.all("events")]
    fault.times = 0
    world.now += timedelta(seconds=120)
    world.run()
    assert reasons(api)["Accepted"][:2] == ("True", "Valid")
    assert api.get("statefulsets", "a-eu")
    world.reconciler.close()
