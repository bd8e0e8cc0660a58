"""
One job in two clusters over mutual TLS: it survives a partition and a slow WAN, and refuses other certificates.

Region eu with the syncer is in one cluster, region us in the other; each has an operator for its region alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from diloco_cli.authority import new_authority
from diloco_testing.clusters.job import TINY, Job, when
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.pair import Pair, refresh_volumes, training

CUT_SECONDS = 60.0
THIN = "20mbit"
THIN_STEPS = 60
PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="module")
def trained(pair, fleet, tmp_path_factory):
    """A job that trains in both clusters until the module ends."""
    with fleet.namespace("wan", *pair.values()):
        made = Pair(
            pair, fleet.images, "wan", 30711, tmp_path_factory.mktemp("wan"), steps=10**6
        ).start()
        for job in made.jobs.values():
            job.until_condition("LearnersReady", PATIENCE_SECONDS)
        until(
            lambda: made.members() == {"eu/0", "us/0"},
            60,
            expected="both train",
            details=made.details,
        )
        yield made


def test_a_job_in_two_clusters_becomes_complete(pair, fleet, tmp_path):
    with fleet.namespace("both", *pair.values()):
        made = Pair(pair, fleet.images, "both", 30710, tmp_path, steps=120).start()
        for job in made.jobs.values():
            job.until_condition("Complete", PATIENCE_SECONDS)
        for job in made.jobs.values():
            status = job.status()
            assert status["progress"] == "120/120"
            assert {region["name"] for region in status["regions"]} == {"eu", "us"}
        assert made.eu.status()["specHash"] == made.us.status()["specHash"]
        assert made.members() == {"eu/0", "us/0"}
        verdict = made.eu.audit()
        assert verdict.ok, verdict.violations
        assert not made.us.pods("syncer"), "the syncer runs in its region alone"
        until(
            lambda: not made.us.pods(), 60, expected="the other region's learners are gone as well"
        )


def test_a_job_becomes_complete_over_a_thin_wan(pair, fleet, tmp_path):
    """Every merge waits for both regions, and a fragment is 0.4 MB each way: the limit is felt."""
    if not pair["us"].local:
        pytest.skip("the WAN between given clusters is not ours to limit")
    with fleet.namespace("thin", *pair.values()):
        made = Pair(
            pair, fleet.images, "thin", 30713, tmp_path, steps=THIN_STEPS, sync={"quorum": 2},
            learner={"recipe": {"name": "gpt", "config": {**TINY, "width": 256, "batch": 4, "slowdown": 1}}},
        )  # fmt: skip
        with pair["us"].shaped(THIN), pair["eu"].shaped(THIN):
            made.start()
            for job in made.jobs.values():
                job.until_condition("Complete", PATIENCE_SECONDS)
        merges = made.eu.merges()
        assert all(len(merge["members"]) == 2 for merge in merges)
        seconds = (when(merges[-1]["time"]) - when(merges[0]["time"])).total_seconds()
        up = sum(merge["bytesUp"] for merge in merges) / 2
        print(f"{len(merges)} merges in {seconds:.1f} s; {up * 8e-6 / seconds:.1f} Mbit/s from us")
        verdict = made.eu.audit()
        assert verdict.ok, verdict.violations


def test_each_region_shows_the_whole_job(trained):
    for job in trained.jobs.values():
        job.until_condition("SyncerReachable", 60)
        job.until_condition("SpecConsistent", 60)
        regions = until(
            lambda j=job: training(j) == {"eu": 1, "us": 1} and training(j),
            60, expected="both regions' learners are shown", details=trained.details,
        )  # fmt: skip
        assert regions == {"eu": 1, "us": 1}


def test_a_cut_of_the_wan_stops_neither_side_and_the_heal_brings_them_together(pair, trained):
    if not pair["us"].local:
        pytest.skip("the WAN between given clusters is not ours to cut")
    instances = {region: job.instances() for region, job in trained.jobs.items()}
    begun, step = datetime.now(UTC), trained.eu.step()
    pair["us"].cut()
    try:
        trained.us.until_condition("SyncerReachable", CUT_SECONDS, status="False")
        until(
            lambda: training(trained.eu).get("us") == 0, CUT_SECONDS,
            expected="eu reports us as unreachable", details=trained.details,
        )  # fmt: skip
        until(
            lambda: "running learners continue without it" in trained.us.condition("LearnersReady")["message"],
            CUT_SECONDS, expected="us reports that it trains alone", details=trained.details,
        )  # fmt: skip
        assert [job.status()["state"] for job in trained.jobs.values()] == ["Degraded"] * 2
        time.sleep(max(0.0, CUT_SECONDS - (datetime.now(UTC) - begun).total_seconds()))
        cut_step = trained.eu.step()
        merged = trained.members(since_step=cut_step - 5)
        late = datetime.now(UTC) - timedelta(seconds=CUT_SECONDS / 2)
        alone = [x for x in trained.us.steps("us/0") if when(x["time"]) > late]
    finally:
        pair["us"].heal()
    assert cut_step > step + 10, "eu continued by quorum"
    assert merged == {"eu/0"}
    assert len(alone) > 10, "us continued alone"
    trained.us.until_condition("SyncerReachable", 90)
    until(
        lambda: "us/0" in trained.members(since_step=cut_step), 90,
        expected="us is merged again", details=trained.details,
    )  # fmt: skip
    joined = [x for x in trained.eu.log() if x["event"] == "join" and x["learner"] == "us/0"]
    assert not joined[-1]["fresh"], "us continues from what it learned alone"
    verdict = trained.eu.audit()
    assert verdict.ok, verdict.violations
    assert {region: job.instances() for region, job in trained.jobs.items()} == instances, (
        "no restart"
    )


BAD = {
    "a wrong CA": (
        "SyncerReachable", "CertificateOfOtherAuthority", "not issued by the authority in the local ca.crt",
    ),
    # Any holder of a certificate of the job's authority may ask for the status, but not train.
    "another region": (
        "LearnersReady", "CertificateOfOtherRegion", "presented a certificate for region eu",
    ),
    "an expired certificate": (
        "SyncerReachable", "CertificateExpired", "certificate has expired",
    ),
}  # fmt: skip
"""Kind → the affected condition, its reason, and a line of the learner's log."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "a wrong CA" else pytest.mark.slow_tier)
        for kind in BAD
    ],
)
def test_a_bad_certificate_is_refused_and_the_condition_names_the_reason(trained, kind):
    us, (condition, reason, line) = trained.us, BAD[kind]
    trained.give_us(trained.bad_secret(kind))
    until(lambda: line in _log_of(us, "us/0"), 120, expected=f"the log of us/0 has {line}")
    found = us.until_condition(condition, 90, status="False", reason=reason)
    print(f"{kind}: {found['reason']}: {found['message']}")
    until(lambda: reason in dict(us.events()), 30, expected="an Event reports it as well")
    refused_since = trained.eu.step()
    trained.eu.until_step(refused_since + 20, 60)
    assert trained.members(since_step=refused_since) == {"eu/0"}
    if kind == "another region":
        # Of sessions: on a busy machine a member may also be late for a round.
        refusals = [
            line
            for line in trained.eu.log()
            if line["event"] == "refuse" and "fragment" not in line
        ]
        assert {line["reason"] for line in refusals} == {"Unauthorised"}
    instances = us.instances()
    us.cluster.kubectl.apply(trained.certificates()["us"], namespace=trained.namespace)
    refresh_volumes(us, us.pod_of("us/0"))
    until(
        lambda: "us/0" in trained.members(since_step=refused_since), 180,
        expected="us is merged with the right certificate", details=trained.details,
    )  # fmt: skip
    for kind_of_condition in ("SyncerReachable", "LearnersReady"):
        us.until_condition(kind_of_condition, 60)
    assert us.instances() == instances, "the right certificate needs no restart"


def test_plain_text_is_refused_by_the_syncer(pair, trained):
    """A client without TLS gets no answer from a syncer with TLS."""
    endpoint = trained.eu.manifest["spec"]["syncer"]["endpoint"]
    program = (
        "import sys, grpc\n"
        "from diloco.v1 import syncer_pb2 as pb, syncer_pb2_grpc as rpc\n"
        "stub = rpc.SyncerStub(grpc.insecure_channel(sys.argv[1]))\n"
        "try:\n    stub.GetStatus(pb.StatusRequest(), timeout=10)\n"
        "except grpc.RpcError as error:\n    print(error.code().name)\n"
        "else:\n    print('ANSWERED')\n"
    )
    command = pair["us"].entered(sys.executable, "-c", program, endpoint)
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.split() == ["UNAVAILABLE"]


def test_a_syncer_in_plain_text_is_refused(pair, fleet, tmp_path):
    """The manifest of us asks for TLS, the one of eu does not: us reports it, and sends nothing."""
    with fleet.namespace("plain", *pair.values()):
        made = Pair(pair, fleet.images, "plain", 30712, tmp_path, steps=10**6)
        made.us.cluster.kubectl.apply(made.certificates()["us"], namespace=made.namespace)
        without = json.loads(json.dumps(made.eu.manifest))
        without["spec"]["tls"] = {"mode": "Disabled"}
        without["spec"]["syncer"]["endpoint"] = ""
        Job(made.eu.cluster, made.namespace, without).apply()
        made.eu.until_step(3, PATIENCE_SECONDS)
        made.us.apply()
        made.us.until_condition("SyncerReachable", 90, status="False", reason="PlainText")
        until(
            lambda: "PlainText" in dict(made.us.events()),
            30,
            expected="an Event reports it as well",
        )
        assert made.members() == {"eu/0"}


@pytest.mark.slow_tier
def test_a_changed_manifest_in_one_region_alone_is_reported_in_both(trained):
    """SpecConsistent=False names the region that differs; the region with the other manifest does not train."""
    us = trained.us
    # A field that may not change is changed by recreating the job: the syncer's region keeps its own.
    other = json.loads(json.dumps(us.manifest))
    other["spec"]["sync"]["outer"] = {"learningRate": "0.5"}
    us.delete()
    Job(us.cluster, us.namespace, other).apply()
    condition = us.until_condition("SpecConsistent", 120, status="False", reason="OtherHash")
    assert "the syncer in region eu" in condition["message"]
    lost = us.until_condition("LearnersReady", 120, status="False", reason="LearnersFailed")
    assert us.status()["specHash"] in lost["message"]
    assert us.condition("Failed")["status"] == "False", "a quorum is left in the other region"
    condition = trained.eu.until_condition("SpecConsistent", 60, status="False", reason="OtherHash")
    assert "us/0" in condition["message"]
    us.delete()
    us.apply()
    for job in trained.jobs.values():
        job.until_condition("SpecConsistent", 120)


def test_the_authority_is_replaced_without_a_pause_or_a_restart(trained):
    """The three steps of docs/security.md, "Rotation"; a new learner then trusts the new one alone."""
    begun = datetime.now(UTC)
    instances = {region: job.instances() for region, job in trained.jobs.items()}
    trained.certificates()
    old, old_key = ((trained.folder / "good" / name).read_bytes() for name in ("ca.crt", "ca.key"))
    new = new_authority("wan", begun)
    for bundle, key in (
        (old + new.bundle, old_key), (new.bundle + old, new.key_pem), (new.bundle, new.key_pem),
    ):  # fmt: skip
        trained.replace_authority(bundle, key)
        step = trained.eu.step()
        until(
            lambda at=step: trained.members(since_step=at) == {"eu/0", "us/0"}, 120,
            expected="both are merged", details=trained.details,
        )  # fmt: skip
        for job in trained.jobs.values():
            job.until_condition("SyncerReachable", 60)
    assert {region: job.instances() for region, job in trained.jobs.items()} == instances
    log = [line for line in trained.eu.log() if when(line["time"]) > begun]
    # A refused upload would be one that was late on a busy machine: a refused peer never gets that far.
    assert not [line for line in log if line["event"] in ("leave", "start")]
    trained.us.cluster.kubectl.delete("pod", trained.us.pod_of("us/0"), trained.namespace)
    step = trained.eu.step()
    until(
        lambda: "us/0" in trained.members(since_step=step), PATIENCE_SECONDS,
        expected="a new learner is merged", details=trained.details,
    )  # fmt: skip
    trained.us.until_condition("LearnersReady", 120)


@pytest.mark.slow_tier
def test_a_job_that_fails_where_its_syncer_runs_fails_and_resumes_in_both_regions(
    pair, fleet, tmp_path
):
    """The operator of us knows it from the syncer alone; only eu is corrected and resumed."""
    with fleet.namespace("given-up", *pair.values()):
        made = Pair(pair, fleet.images, "given-up", 30714, tmp_path, steps=10**6).start()
        for job in made.jobs.values():
            job.until_condition("LearnersReady", PATIENCE_SECONDS)
        made.eu.until_step(20, 120)
        made.eu.change(runPolicy={"activeDeadlineSeconds": 1})
        made.eu.until_condition("Failed", 60, reason="DeadlineExceeded")
        failed = made.us.until_condition("Failed", 120, reason="SyncerRegionFailed")
        assert "activeDeadlineSeconds" in failed["message"]
        until(lambda: not made.us.pods(), 120, expected="us frees its pods", details=made.details)
        made.eu.change(runPolicy={"suspend": True, "activeDeadlineSeconds": None})
        made.eu.until_condition("Suspended", 60)
        until(lambda: not made.eu.pods(), 120, expected="eu has no pod", details=made.details)
        assert made.us.status()["state"] == "Failed"
        made.eu.change(runPolicy={"suspend": False})
        for job in made.jobs.values():
            until(
                lambda j=job: j.condition("Failed")["status"] == "False",
                PATIENCE_SECONDS, expected="the job runs again", details=made.details,
            )  # fmt: skip
            job.until_condition("LearnersReady", PATIENCE_SECONDS)
        step = made.eu.step()
        made.eu.until_step(step + 10, 120)
        assert made.members(since_step=step) == {"eu/0", "us/0"}
        verdict = made.eu.audit()
        assert verdict.ok, verdict.violations


def _log_of(job: Job, learner: str) -> str:
    return job.cluster.kubectl("logs", "-n", job.namespace, job.pod_of(learner))
