"""Two installations of the operator that see the same jobs: one runs a job, the other leaves it alone."""

import pytest

from diloco_operator.decide.decisions import Decisions
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.workqueue import RetryError
from diloco_testing.kubernetes.reconciled_cluster import ReconciledCluster, job


def operator(api):
    return (api.get("dilocojobs", "a").get("status") or {}).get("operator")


@pytest.fixture
def pair(api, tmp_path):
    """Two installations of one cluster; the same job."""
    api.create(job())
    made = [
        ReconciledCluster(api, tmp_path, installation=f"system/{name}") for name in ("one", "two")
    ]
    yield made
    for world in made:
        world.reconciler.close()


def test_the_first_installation_records_itself_before_it_writes_anything_else(pair, api):
    first, _ = pair
    first.decide = lambda observation: Decisions(apply=(first.child(),))
    first.run()
    assert operator(api) == "system/one"
    assert [request.path.split("?")[0] for request in api.writes()] == [
        "/apis/diloco.dev/v1alpha1/namespaces/ns/dilocojobs/a/status",
        "/api/v1/namespaces/ns/configmaps/a-spec",
    ]


def test_a_job_is_claimed_once_and_its_status_does_not_touch_the_mark(pair, api):
    first, _ = pair
    first.decide = lambda observation: Decisions(status={"state": "Starting"})
    first.run()
    first.run()
    assert api.get("dilocojobs", "a")["status"] == {"operator": "system/one", "state": "Starting"}
    claims = [request for request in api.writes() if "-claim" in request.path]
    assert len(claims) == 1


def test_the_second_installation_writes_one_event_that_names_the_first_and_nothing_else(pair, api):
    first, second = pair
    first.run()
    second.decide = lambda observation: pytest.fail("it decides nothing about this job")
    before = len(api.requests)
    for _ in range(3):
        assert second.run() == 300.0
    asked = api.requests[before:]
    assert {r.path.split("?")[0] for r in asked if r.method == "GET"} == {
        "/apis/diloco.dev/v1alpha1/namespaces/ns/dilocojobs/a"
    }
    (event,) = api.all("events")
    assert (event["type"], event["reason"]) == ("Warning", "OtherOperator")
    assert "system/one" in event["message"]
    assert "system/two" in event["message"]
    assert [r.method for r in asked if r.method != "GET"] == ["POST"]
    assert operator(api) == "system/one"


def test_of_two_installations_that_read_an_unclaimed_job_one_gets_a_conflict(pair, api):
    first, second = pair
    observe = second.reconciler._observer.observe

    def slow(key, raw):
        observed = observe(key, raw)
        first.run()  # the other one is faster
        return observed

    second.reconciler._observer.observe = slow
    second.decide = lambda observation: pytest.fail("it lost the claim")
    with pytest.raises(RetryError, match="modified"):
        second.run()
    assert operator(api) == "system/one"
    assert not api.all("configmaps")


def test_a_job_whose_mark_was_removed_is_taken_by_the_other_installation(pair, api):
    first, second = pair
    first.run()
    second.run()
    api.edit("dilocojobs", "a", lambda item: item["status"].pop("operator"))
    second.run()
    assert operator(api) == "system/two"
    assert first.run() == 300.0
    assert first.count("diloco_operator_jobs", state="Pending") == 0.0, "the other one counts it"


def test_a_job_that_is_left_to_another_installation_is_counted_until_it_is_taken_or_deleted(
    pair, api
):
    """Else no alert shows a job of an installation that no longer exists."""
    first, second = pair
    first.run()
    second.run()
    assert second.count("diloco_operator_jobs", state="OtherOperator") == 1.0
    named = {"job_namespace": "ns", "job_name": "a", "state": "OtherOperator"}
    assert second.count("diloco_operator_job_state", **named) == 1.0
    assert first.count("diloco_operator_jobs", state="OtherOperator") == 0.0
    api.edit("dilocojobs", "a", lambda item: item["status"].pop("operator"))
    second.run()
    assert second.count("diloco_operator_jobs", state="OtherOperator") == 0.0
    first.run()
    assert first.count("diloco_operator_jobs", state="OtherOperator") == 1.0
    api.delete("dilocojobs", "a")
    first.run()
    assert first.count("diloco_operator_jobs", state="OtherOperator") == 0.0


@pytest.mark.parametrize("state", ["Suspended", "Complete", "Failed"])
def test_a_job_at_rest_that_is_left_to_another_installation_is_not_reported_until_it_changes(
    pair, api, state
):
    """No operator has to run it, so the alert DilocoJobAbandoned would be false."""
    first, second = pair
    first.run()
    conditions = [{"type": state, "status": "True", "reason": "x", "message": ""}]
    status = {"conditions": conditions, "observedGeneration": 1}
    api.edit("dilocojobs", "a", lambda item: item["status"].update(status))
    assert second.run() == 300.0
    assert second.count("diloco_operator_jobs", state="OtherOperator") == 0.0
    assert not api.all("events")
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
    second.run()
    assert second.count("diloco_operator_jobs", state="OtherOperator") == 1.0
    assert [event["reason"] for event in api.all("events")] == ["OtherOperator"]
    status["observedGeneration"] = 2
    api.edit("dilocojobs", "a", lambda item: item["status"].update(status))
    second.run()
    assert second.count("diloco_operator_jobs", state="OtherOperator") == 0.0


def at_rest(state="Failed", reason="LearnerRefused", ready=0):
    entry = {"type": state, "status": "True", "reason": reason, "message": ""}
    return {"conditions": [entry], "learners": {"ready": ready}}


KEPT = {"runPolicy": {"ttlSecondsAfterFinished": 10**6}}


@pytest.mark.parametrize(
    ("status", "spec", "is_reported"),
    [
        (at_rest(), {}, False),
        (at_rest(reason="SyncerRegionFailed"), {}, True),
        (at_rest(ready=2), {}, True),
        (at_rest("Suspended", ready=2), {}, True),
        (at_rest(), KEPT, True),
        (at_rest("Complete"), KEPT, True),
        (at_rest("Suspended"), KEPT, False),
    ],
    ids=["nothing", "resumes elsewhere", "stop", "suspend", "delete", "delete", "suspended"],
)
def test_a_job_at_rest_that_still_needs_an_operator_is_reported(
    api, tmp_path, status, spec, is_reported
):
    """To stop its learners, to delete it, or to resume it with the syncer's region."""
    api.create(job(**spec))
    world = ReconciledCluster(api, tmp_path, installation="system/two")
    marked = {**status, "operator": "system/one", "observedGeneration": 1}
    api.edit("dilocojobs", "a", lambda item: item.update(status=marked))
    assert world.run() == 300.0
    assert world.count("diloco_operator_jobs", state="OtherOperator") == float(is_reported)
    events = [event["reason"] for event in api.all("events")]
    assert events == ["OtherOperator"] * is_reported
    world.reconciler.close()


@pytest.mark.parametrize(
    "spec",
    [
        {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
        {"regions": [{"name": "us", "learners": 2}]},
        {"steps": -1},
    ],
    ids=["of another controller", "of another region", "invalid"],
)
def test_a_job_that_it_does_not_run_is_not_claimed(api, tmp_path, spec):
    scope = OperatorScope(region="eu", worker_image="w", syncer_image="s")
    api.create(job(**spec))
    world = ReconciledCluster(api, tmp_path, scope=scope, installation="system/one")
    world.run()
    assert operator(api) is None
    world.reconciler.close()


def test_without_an_installation_no_job_is_claimed_and_none_is_left_alone(world):
    world.run()
    assert operator(world.api) is None
    world.api.edit("dilocojobs", "a", lambda item: item.update(status={"operator": "system/one"}))
    assert world.run() == 30.0
    assert world.observation
