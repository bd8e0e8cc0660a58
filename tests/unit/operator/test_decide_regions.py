"""One job in many clusters: each operator does its part, each status shows the whole job."""

from dataclasses import replace

import pytest

from diloco_testing.operated import VIEW, World, certificate, is_idle, manifest, set_ready

TLS = {"tls": {"mode": "Secret", "secretName": "s"}}
ENDPOINT = {"syncer": {"region": "eu", "endpoint": "sync.example.org:7070"}}
EVERYWHERE = manifest(**TLS, **ENDPOINT)
EU, US = (replace(VIEW, region=name) for name in ("eu", "us"))


def world(view, job=EVERYWHERE):
    made = World(job=manifest(**job["spec"]), view=view)
    made.certificate = certificate("a", view.region)
    made.settle()
    return made


def trains(view):
    made = world(view)
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
        assert [one["name"] for one in made.status["regions"]] == ["eu", "us"]
        assert made.status["state"] == "Training"
        assert made.status["syncer"]["endpoint"] == "sync.example.org:7070"
    assert eu.says("SyncerReady") == ("True", "Serving")
    assert us.says("SyncerReady") == ("Unknown", "OtherRegion")


def test_the_syncers_region_goes_on_while_another_is_cut_off():
    eu = trains(EU)
    eu.answers(gone=("us/0", "us/1"), step=400)
    eu.reconcile(30)
    assert eu.says("LearnersReady") == ("True", "AllTraining")
    assert eu.says("QuorumMet") == ("True", "EnoughLearners")
    assert eu.status["learners"]["summary"] == "2/4"
    assert eu.status["state"] == "Degraded"
    region = eu.status["regions"][1]
    assert (region["ready"], region["training"]) == (0, 0)
    assert region["lastSeenTime"] == "2026-03-01T11:59:59Z"


def test_the_region_that_is_cut_off_says_so_and_restarts_nothing():
    us = trains(US)
    us.is_silent("DialTimeout")
    for pod in us.pods.values():
        set_ready(pod, False)
    us.count_pods()
    us.reconcile(10)
    decisions = us.reconcile(25)
    assert (decisions.apply, decisions.delete) == ((), ())
    assert us.says("SyncerReachable") == ("False", "DialTimeout")
    assert us.says("QuorumMet") == ("Unknown", "NoAnswer")
    assert us.says("LearnersReady") == ("False", "SomeNotTraining")
    assert "train on by themselves" in us.condition("LearnersReady")["message"]
    assert us.replicas() == {"a-us": 2}
    assert "training" not in us.status["regions"][0]
    assert us.status["regions"][0]["lastSeenTime"]


def test_the_region_comes_back_after_the_cut():
    us = trains(US)
    us.is_silent()
    us.reconcile(60)
    us.answers(step=300)
    us.reconcile(1)
    us.run_controllers()
    us.settle()
    assert us.status["state"] == "Training"
    assert us.says("SyncerReachable") == ("True", "Answers")


def test_every_region_learns_from_the_syncer_that_the_job_is_complete():
    us = trains(US)
    us.answers("Complete", step=2000, model_sha256="ab", model_path="/m")
    us.settle()
    assert us.says("Complete") == ("True", "StepsDone")
    assert us.replicas() == {"a-us": 0}
    assert us.status["model"]["sha256"] == "ab"


def test_another_spec_in_one_region_is_told_there():
    us = trains(US)
    us.answers(spec_hash="0123456789abcdef")
    us.reconcile()
    assert us.says("SpecConsistent") == ("False", "OtherHash")
    message = us.condition("SpecConsistent")["message"]
    assert us.status["specHash"] in message
    assert "0123456789abcdef" in message
    assert "region eu" in message
    assert ("Warning", "OtherHash") in us.events


def test_another_spec_in_one_region_is_told_where_the_syncer_is():
    eu = trains(EU)
    assert eu.says("SpecConsistent") == ("True", "SameHash")
    eu.answers(differing=(("us/0", "0123456789abcdef"),))
    eu.reconcile()
    assert eu.says("SpecConsistent") == ("False", "OtherHash")
    assert "that of us/0 is 0123456789abcdef" in eu.condition("SpecConsistent")["message"]


def test_steps_that_were_raised_in_one_region_alone_are_told_there():
    us = trains(US)
    us.answers("Complete", step=2000)
    us.change(steps=3000)
    us.settle()
    assert us.says("Complete") == ("False", "SyncerDone")
    assert "asks for 3000" in us.condition("Complete")["message"]


def test_a_region_that_the_job_does_not_know_makes_nothing():
    made = world(replace(VIEW, region="asia"))
    assert not made.children
    assert made.says("Accepted") == ("False", "RegionNotInSpec")
    assert "asia" in made.condition("Accepted")["message"]
    assert made.status["state"] == "Pending"
    assert is_idle(made.reconcile(1000))


def test_the_deadline_of_a_job_elsewhere_means_nothing_here():
    job = manifest(runPolicy={"activeDeadlineSeconds": 0, "ttlSecondsAfterFinished": 0})
    made = world(replace(VIEW, region="asia"), job)
    made.reconcile(1000)
    assert made.says("Failed") == ("False", "NotFailed")
    assert not made.removed


def test_a_region_that_is_taken_out_of_the_job_loses_everything_there():
    us = trains(US)
    us.change(regions=[{"name": "eu", "learners": 2}])
    us.answers()
    us.settle()
    assert not us.children
    assert us.says("Accepted") == ("False", "RegionNotInSpec")


def test_without_an_endpoint_learners_of_other_regions_are_not_started():
    us = world(US, manifest())
    assert us.replicas() == {"a-us": 0}
    assert us.says("Accepted") == ("False", "NoEndpoint")
    assert us.says("SyncerReachable") == ("False", "NoEndpoint")
    assert us.says("LearnersReady") == ("False", "NoEndpoint")
    us.change(**TLS, **ENDPOINT)
    us.settle()
    assert us.replicas() == {"a-us": 2}


def test_the_syncers_region_needs_no_endpoint():
    assert world(EU, manifest()).says("Accepted") == ("True", "Valid")


def test_a_refused_learner_fails_the_job_in_its_own_cluster():
    us = trains(US)
    end = {"exitCode": 78, "message": '{"reason": "Refused", "message": "spec ab, expected cd"}'}
    us.pod("a-us-0")["status"]["containerStatuses"][0]["state"] = {"terminated": end}
    us.reconcile()
    assert us.says("Failed") == ("True", "LearnerRefused")
    us.reconcile(1)
    assert us.replicas() == {"a-us": 0}


@pytest.mark.parametrize("view", [EU, US, VIEW], ids=["eu", "us", "all"])
def test_a_region_that_rests_rests(view):
    made = world(view)
    made.certificate = certificate("a", "eu", "us")
    made.answers()
    made.settle()
    assert is_idle(made.reconcile(1000))
