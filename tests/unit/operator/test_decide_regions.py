"""One job in many clusters: each operator runs its part, each status shows the whole job."""

from dataclasses import replace

import pytest

from diloco_operator.state.previous_status import time_text
from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    certificate,
    is_idle,
    manifest,
    refuse,
    set_ready,
    trains_in,
)

TLS = {"tls": {"mode": "Secret", "secretName": "s"}}
ENDPOINT = {"syncer": {"region": "eu", "endpoint": "sync.example.org:7070"}}
EVERYWHERE = manifest(**TLS, **ENDPOINT)
EU, US = (replace(SCOPE, region=name) for name in ("eu", "us"))


def world(scope, job=EVERYWHERE):
    made = OperatedJob(job=manifest(**job["spec"]), scope=scope)
    made.certificate = certificate("a", scope.region)
    made.settle()
    return made


def trains(scope, job=EVERYWHERE):
    made = world(scope, job)
    made.answers()
    made.settle()
    return made


def test_the_syncers_region_runs_its_learners_and_the_syncer():
    assert world(EU).replicas() == {"a-eu": 2, "a-syncer": 1}


def test_another_region_runs_its_learners_alone():
    assert world(US).replicas() == {"a-us": 2}


def test_each_status_shows_the_whole_job():
    eu, us = trains(EU), trains(US)
    for made in (eu, us):
        assert made.status["learners"] == {
            "desired": 4,
            "ready": 4,
            "training": 4,
            "summary": "4/4",
        }
        assert [region["name"] for region in made.status["regions"]] == ["eu", "us"]
        assert made.status["state"] == "Training"
        assert made.status["syncer"]["endpoint"] == "sync.example.org:7070"
    assert eu.reason("SyncerReady") == ("True", "Serving")
    assert us.reason("SyncerReady") == ("Unknown", "OtherRegion")


def test_the_syncers_region_continues_while_another_is_partitioned():
    eu = trains(EU)
    eu.answers(gone=("us/0", "us/1"), step=400)
    eu.reconcile(30)
    assert eu.reason("LearnersReady") == ("True", "AllTraining")
    assert eu.reason("QuorumMet") == ("True", "EnoughLearners")
    assert eu.status["learners"]["summary"] == "2/4"
    assert eu.status["state"] == "Degraded"
    region = eu.status["regions"][1]
    assert (region["ready"], region["training"]) == (0, 0)
    assert region["lastSeenTime"] == "2026-03-01T11:59:59Z"


def test_a_partitioned_region_reports_it_and_restarts_nothing():
    us = trains(US)
    us.becomes_unreachable("DialTimeout")
    for pod in us.pods.values():
        set_ready(pod, False)
    us.count_pods()
    us.reconcile(10)
    decisions = us.reconcile(25)
    assert (decisions.apply, decisions.delete) == ((), ())
    assert us.reason("SyncerReachable") == ("False", "DialTimeout")
    assert us.reason("QuorumMet") == ("Unknown", "NoAnswer")
    assert us.reason("LearnersReady") == ("False", "SomeNotTraining")
    assert "running learners continue without it" in us.condition("LearnersReady")["message"]
    assert us.replicas() == {"a-us": 2}
    assert "training" not in us.status["regions"][0]
    assert us.status["regions"][0]["lastSeenTime"]


def test_the_region_is_reachable_again_after_the_partition():
    us = trains(US)
    us.becomes_unreachable()
    us.reconcile(60)
    us.answers(step=300)
    us.reconcile(1)
    us.run_controllers()
    us.settle()
    assert us.status["state"] == "Training"
    assert us.reason("SyncerReachable") == ("True", "Answers")


def test_every_region_learns_from_the_syncer_that_the_job_is_complete():
    us = trains(US)
    us.answers("Complete", step=2000, model_sha256="ab", model_path="/m")
    us.settle()
    assert us.reason("Complete") == ("True", "StepsDone")
    assert us.replicas() == {"a-us": 0}
    assert us.status["model"]["sha256"] == "ab"


def test_a_region_that_the_former_syncer_completed_trains_when_the_next_one_begins_anew():
    """The finished job is deleted and applied again, in us before eu."""
    us = world(US)
    us.answers("Complete", step=2000)
    us.settle()
    assert us.reason("Complete") == ("True", "StepsDone")
    us.becomes_unreachable()
    us.reconcile(300)
    assert us.reason("Complete") == ("True", "StepsDone")
    us.answers("Initialising", step=0, gone=("us/0", "us/1"))
    us.reconcile(300)
    assert us.replicas() == {"a-us": 2}
    assert us.reason("Complete") == ("False", "NotComplete")
    assert us.status["step"] == 0
    assert us.status["startTime"] == "2026-03-01T12:10:00Z"
    assert "completionTime" not in us.status
    us.run_controllers()
    us.answers(step=10)
    us.settle()
    assert us.status["state"] == "Training"


@pytest.mark.parametrize(("state", "step"), [("Training", 2000), ("Waiting", 2500)])
def test_a_region_stays_complete_while_the_syncer_is_not_below_its_last_step(state, step):
    """The syncer has restarted with its last snapshot, or only eu has more steps."""
    us = trains(US)
    us.answers("Complete", step=2000)
    us.settle()
    us.answers(state, step=step)
    us.reconcile(60)
    assert us.reason("Complete") == ("True", "StepsDone")
    assert us.replicas() == {"a-us": 0}


def test_a_different_spec_in_one_region_is_reported_there():
    us = trains(US)
    us.answers(spec_hash="0123456789abcdef")
    us.reconcile()
    assert us.reason("SpecConsistent") == ("False", "OtherHash")
    message = us.condition("SpecConsistent")["message"]
    assert us.status["specHash"] in message
    assert "0123456789abcdef" in message
    assert "region eu" in message
    assert ("Warning", "OtherHash") in us.events


def test_a_different_spec_in_one_region_is_reported_where_the_syncer_runs():
    eu = trains(EU)
    assert eu.reason("SpecConsistent") == ("True", "SameHash")
    eu.answers(differing=(("us/0", "0123456789abcdef"),))
    eu.reconcile()
    assert eu.reason("SpecConsistent") == ("False", "OtherHash")
    assert "that of us/0 is 0123456789abcdef" in eu.condition("SpecConsistent")["message"]


def test_steps_raised_in_one_region_alone_are_reported_there():
    us = trains(US)
    us.answers("Complete", step=2000)
    us.change(steps=3000)
    us.settle()
    assert us.reason("Complete") == ("False", "SyncerDone")
    assert "has spec.steps 3000" in us.condition("Complete")["message"]


def test_a_region_that_is_not_in_the_job_creates_nothing():
    made = world(replace(SCOPE, region="asia"))
    assert not made.children
    assert made.reason("Accepted") == ("False", "RegionNotInSpec")
    assert "asia" in made.condition("Accepted")["message"]
    assert made.status["state"] == "Pending"
    assert is_idle(made.reconcile(1000))


def test_a_deadline_has_no_effect_in_a_region_that_is_not_in_the_job():
    job = manifest(runPolicy={"activeDeadlineSeconds": 0, "ttlSecondsAfterFinished": 0})
    made = world(replace(SCOPE, region="asia"), job)
    made.reconcile(1000)
    assert made.reason("Failed") == ("False", "NotFailed")
    assert not made.removed


def test_a_region_that_is_removed_from_the_job_loses_everything_there():
    us = trains(US)
    us.change(regions=[{"name": "eu", "learners": 2}])
    us.answers()
    us.settle()
    assert not us.children
    assert us.reason("Accepted") == ("False", "RegionNotInSpec")


def test_a_region_that_is_removed_and_added_again_begins_its_deadline_anew():
    regions = [{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}]
    us = trains_in("us", regions=regions, runPolicy={"activeDeadlineSeconds": 3600})
    assert "startTime" in us.status
    us.change(regions=regions[:1])
    us.settle()
    assert "startTime" not in us.status
    us.reconcile(7200)
    us.change(regions=regions)
    us.reconcile(1)
    assert us.reason("Failed") == ("False", "NotFailed")
    assert us.status["startTime"] == time_text(us.now)


def test_without_an_endpoint_learners_of_other_regions_are_not_started():
    us = world(US, manifest())
    assert us.replicas() == {"a-us": 0}
    assert us.reason("Accepted") == ("False", "NoEndpoint")
    assert us.reason("SyncerReachable") == ("False", "NoEndpoint")
    assert us.reason("LearnersReady") == ("False", "NoEndpoint")
    us.change(**TLS, **ENDPOINT)
    us.settle()
    assert us.replicas() == {"a-us": 2}


def test_a_first_start_that_waited_for_its_endpoint_is_a_start_and_not_a_loss():
    us = world(US, manifest())
    us.reconcile(3600)
    us.change(**TLS, **ENDPOINT)
    us.becomes_unreachable()
    us.events.clear()
    for _ in range(3):
        us.reconcile(5)
        us.run_controllers(ready=lambda _: False)
        for pod in us.pods.values():
            pod["status"]["phase"] = "Pending"
    assert us.reason("LearnersReady") == ("False", "Starting")
    assert ("Warning", "SomeNotTraining") not in us.events
    us.reconcile(300)
    assert us.reason("LearnersReady") == ("False", "PodTrouble"), "late, as with any first start"
    assert "still starting after 300 s" in us.condition("LearnersReady")["message"]


def test_a_region_that_lost_its_endpoint_after_the_first_step_has_lost_its_learners():
    us = trains(US)
    us.change(**TLS, syncer={"region": "eu"})
    us.settle()
    assert us.reason("LearnersReady") == ("False", "NoEndpoint")
    us.change(**TLS, **ENDPOINT)
    us.becomes_unreachable()
    us.reconcile(5)
    assert us.reason("LearnersReady") == ("False", "SomeNotTraining")


def test_the_syncers_region_needs_no_endpoint():
    assert world(EU, manifest()).reason("Accepted") == ("True", "Valid")


def test_learners_of_all_regions_count_for_the_quorum():
    us = trains(US)
    for name in ("a-us-0", "a-us-1"):
        refuse(us.pod(name))
    us.answers(gone=("us/0", "us/1"))
    us.reconcile()
    assert us.reason("Failed") == ("False", "NotFailed"), "two are left in the other region"
    assert us.reason("LearnersReady") == ("False", "LearnersFailed")
    assert us.status["state"] == "Degraded"


def test_a_refused_learner_without_which_there_is_no_quorum_fails_the_job_in_its_own_cluster():
    us = trains(US, manifest(**TLS, **ENDPOINT, sync={"quorum": 4}))
    refuse(us.pod("a-us-0"))
    us.reconcile()
    assert us.reason("Failed") == ("True", "LearnerRefused")
    us.settle()
    assert us.replicas() == {"a-us": 0}


# ---------------------------------------------------------------- several regions in one cluster


POOLS = manifest(
    **TLS,
    **ENDPOINT,
    regions=[
        {"name": "eu", "learners": 2},
        {"name": "eu-spot", "cluster": "eu", "learners": 1},
        {"name": "us-h100", "cluster": "us", "learners": 1},
        {"name": "us-l40s", "cluster": "us", "learners": 3},
    ],
)
"""Two pools in each of two clusters."""


def pools(scope, *regions):
    made = OperatedJob(job=manifest(**POOLS["spec"]), scope=scope)
    made.certificate = certificate("a", *regions)
    made.settle()
    made.answers()
    made.settle()
    return made


def test_each_pool_of_a_cluster_has_its_own_statefulset_and_row_in_the_status():
    eu, us = pools(EU, "eu", "eu-spot"), pools(US, "us-h100", "us-l40s")
    assert eu.replicas() == {"a-eu": 2, "a-eu-spot": 1, "a-syncer": 1}
    assert us.replicas() == {"a-us-h100": 1, "a-us-l40s": 3}
    for made in (eu, us):
        rows = {row["name"]: row["training"] for row in made.status["regions"]}
        assert rows == {"eu": 2, "eu-spot": 1, "us-h100": 1, "us-l40s": 3}
        assert made.status["state"] == "Training"
        assert is_idle(made.reconcile(1000))
    assert us.reason("SyncerReady") == ("Unknown", "OtherRegion")


def test_a_pool_that_is_added_to_a_cluster_changes_nothing_of_the_one_that_is_there():
    eu = trains(EU)
    before = {key: child for key, child in eu.children.items() if key[1].startswith("a-eu")}
    eu.change(regions=[*EVERYWHERE["spec"]["regions"], POOLS["spec"]["regions"][1]])
    eu.certificate = certificate("a", "eu", "eu-spot")
    eu.settle()
    assert eu.replicas() == {"a-eu": 2, "a-eu-spot": 1, "a-syncer": 1}
    assert {key: eu.children[key]["spec"] for key in before} == {
        key: child["spec"] for key, child in before.items()
    }


def test_a_certificate_without_the_region_of_a_pool_is_named():
    eu = world(EU, POOLS)
    eu.answers(gone=("eu-spot/0",))
    set_ready(eu.pod("a-eu-spot-0"), False)
    eu.reconcile()
    assert eu.reason("LearnersReady") == ("False", "CertificateOfOtherRegion")
    assert "region eu-spot" in eu.condition("LearnersReady")["message"]


def test_a_pool_that_moves_to_another_cluster_leaves_the_first():
    us = pools(US, "us-h100", "us-l40s")
    regions = [dict(region) for region in POOLS["spec"]["regions"]]
    regions[2]["cluster"] = "eu"
    us.change(regions=regions)
    us.answers()
    us.settle()
    assert us.replicas() == {"a-us-l40s": 3}


def test_an_operator_of_no_cluster_of_the_job_names_where_its_regions_are():
    made = world(replace(SCOPE, region="us-h100"), POOLS)
    assert not made.children
    assert made.reason("Accepted") == ("False", "RegionNotInSpec")
    assert "us-h100 (cluster us)" in made.condition("Accepted")["message"]


@pytest.mark.parametrize("scope", [EU, US, SCOPE], ids=["eu", "us", "all"])
def test_a_region_that_rests_rests(scope):
    made = world(scope)
    made.certificate = certificate("a", "eu", "us")
    made.answers()
    made.settle()
    assert is_idle(made.reconcile(1000))
