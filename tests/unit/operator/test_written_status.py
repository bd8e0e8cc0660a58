"""What is written as the status, and what remains of fields that others wrote into it."""

from dataclasses import replace
from datetime import timedelta

from diloco_operator.decide.decisions import Decisions, JobEvent, decide
from diloco_operator.state.previous_status import removal
from diloco_testing.kubernetes.fake_api import Fault
from diloco_testing.kubernetes.operated_job import OperatedJob
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, ReconciledCluster, job, reasons

FOREIGN = {"type": "Billed", "status": "True", "reason": "Paid", "message": ""}


def test_a_failed_job_from_which_this_region_was_removed_no_longer_counts_as_failed(api, tmp_path):
    """Its alert would never end, although it cannot be resolved in this cluster."""
    api.create(job())
    scope, seconds = replace(SCOPE, region="eu"), {"activeDeadlineSeconds": 60}
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(runPolicy=seconds))
    world = ReconciledCluster(api, tmp_path, scope=scope)
    world.decide = lambda observation: decide(observation, scope, world.now)
    of_job = {"job_namespace": "ns", "job_name": "a"}
    for _ in range(3):
        world.run()
        world.now += timedelta(seconds=60)
    assert world.count("diloco_operator_job_state", **of_job, state="Failed") == 1
    regions = [{"name": "us", "learners": 2}]
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(regions=regions))
    world.run()
    assert reasons(api)["Accepted"][1] == "RegionNotInSpec"
    assert api.get("dilocojobs", "a")["status"]["state"] == "Failed"
    assert world.count("diloco_operator_job_state", **of_job, state="Failed") == 0
    assert world.count("diloco_operator_job_state", **of_job, state="Pending") == 1
    world.reconciler.close()


def test_a_region_name_that_was_set_back_leaves_no_times_behind_that_end_a_resumed_job(
    api, tmp_path
):
    """Of two field managers that applied the same value, one alone cannot remove it."""
    api.create(job())
    policy = {"activeDeadlineSeconds": 3600}

    def run_as(region, at, **changed):
        scope = replace(SCOPE, region=region)
        api.edit("dilocojobs", "a", lambda item: item["spec"].update(runPolicy=policy | changed))
        world = ReconciledCluster(api, tmp_path, scope=scope)
        world.decide = lambda observation: decide(observation, scope, world.now)
        world.now = NOW + timedelta(seconds=at)
        world.run()
        world.run()
        world.reconciler.close()
        return api.get("dilocojobs", "a")["status"]

    assert run_as("eu", 0)["startTime"] == "2026-11-21T12:00:00Z"
    assert run_as("eu2", 60)["startTime"] == "2026-11-21T12:00:00Z"
    run_as("eu", 120)
    assert "startTime" not in run_as("eu", 180, suspend=True)
    assert run_as("eu", 7200)["startTime"] == "2026-11-21T14:00:00Z"
    assert reasons(api)["Failed"][0] == "False"


def test_events_are_posted_though_what_a_former_region_name_applied_cannot_be_removed(
    api, tmp_path, caplog
):
    api.create(job())

    def run_as(region, **status):
        world = ReconciledCluster(api, tmp_path, scope=replace(SCOPE, region=region))
        event = JobEvent(type="Normal", reason=status["state"], message="x")
        world.decide = lambda observation: Decisions(status=status, events=(event,))
        world.run()
        world.reconciler.close()
        return api.get("dilocojobs", "a")["status"]

    run_as("eu2", state="Training", startTime="before")
    api.faults.append(Fault("PATCH", "fieldManager=diloco-operator-eu-status$", 403, "denied"))
    assert run_as("eu", state="Failed") == {"state": "Failed", "startTime": "before"}
    assert "denied" in caplog.text
    assert run_as("eu", state="Complete") == {"state": "Complete"}, "the next write removes it"
    posted = {event["reason"] for event in api.all("events")}
    assert posted == {"Training", "Failed", "Complete"}


def test_what_others_wrote_into_the_status_is_removed_once_and_then_nothing_is_written(
    api, tmp_path
):
    api.create(job(runPolicy={"suspend": True}))
    world = ReconciledCluster(api, tmp_path)
    world.decide = lambda observation: decide(observation, SCOPE, NOW)
    world.run()
    world.run()

    def restore(item):
        status = item["status"]
        status |= {"startTime": "2026-03-01T12:00:00Z", "operator": "system/diloco"}
        status["regions"].append({"name": "us", "ready": 1})

    before = api.get("dilocojobs", "a")["status"]
    api.edit("dilocojobs", "a", restore)
    world.run()
    assert api.get("dilocojobs", "a")["status"] == {**before, "operator": "system/diloco"}
    num_writes = len(api.writes())
    world.run()
    world.reconciler.close()
    assert len(api.writes()) == num_writes


def test_a_condition_of_another_controller_is_not_written_about():
    world = OperatedJob()
    world.settle()
    world.job["status"]["conditions"].append(FOREIGN)
    assert world.reconcile().status is None
    del world.job["status"]["conditions"][0]
    assert world.reconcile().status is not None


def test_what_a_status_lacks_is_removed_at_any_depth():
    stored = {
        "state": "Failed", "syncer": {"endpoint": "a:1", "volumeUid": "u"}, "model": {"path": "p"},
        "regions": [{"name": "us", "ready": 1}, {"name": "eu", "ready": 2, "restarts": 3}],
        "conditions": [FOREIGN, {"type": "Failed", "status": "True"}],
    }  # fmt: skip
    wanted = {
        "state": "Failed", "syncer": {"endpoint": "a:1"}, "regions": [{"name": "eu", "ready": 2}],
        "conditions": [{"type": "Failed", "status": "True"}],
    }  # fmt: skip
    assert removal(stored, wanted) == {
        "syncer": {"volumeUid": None}, "model": None, "regions": wanted["regions"],
    }  # fmt: skip
    assert removal(wanted, wanted) == {}
