"""
Jobs with certificates from cert-manager, on a real API server with cert-manager's CRDs: what the operator makes is
accepted strictly, and its rights suffice.

The test stands in for controllers, scheduler and kubelet, and for cert-manager: it makes the Secret that a Certificate
asks for.
"""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco_operator.decide.drift import has_drifted
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.extra_metadata import ExtraMetadata, Metadata
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.clusters import cert_manager, scale
from diloco_testing.clusters.cert_manager import CERTIFICATES
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import KubectlError, until
from diloco_testing.manifests.files import load_job

SOON = 60.0
EVERYTHING = Path(__file__).parents[1] / "golden/everything.yaml"
ISSUER = {"name": "diloco", "kind": "ClusterIssuer"}
ISSUERS = (
    "{name: diloco}",
    "{name: diloco, kind: ClusterIssuer}",
    "{name: diloco, kind: StepIssuer, group: certmanager.step.sm}",
)


@pytest.fixture(scope="module")
def bare(local, tmp_path_factory):
    """A cluster without nodes and without cert-manager, with an operator that may manage Certificates."""
    flags = ("--set=rbac.certManager=true", "--set=rbac.tlsSecrets=true")
    cluster = scale.api_server(local, "certificates", *flags)
    with scale.operator(cluster, tmp_path_factory.mktemp("operator")):
        yield cluster
    local.end("certificates")


@pytest.fixture(scope="module")
def api(bare):
    """The same, with cert-manager's CRDs."""
    cert_manager.apply_crds(bare)
    return bare


def job_of(cluster, name: str, **spec) -> Job:
    """A job of one region whose certificates cert-manager makes."""
    tls = {"mode": "CertManager", "issuerRef": ISSUER}
    body = manifest(name, steps=1000, regions={"eu": 1}, tls=tls, **spec)
    return Job(cluster, "default", body).apply()


def certificate_of(job: Job):
    """Its Certificate; None: it has none, or the API server does not know the kind."""
    try:
        return job.cluster.kubectl.get(CERTIFICATES, f"{job.name}-tls", job.namespace)
    except KubectlError:
        return None


def until_certificate(job: Job):
    """Wait for its Certificate."""
    return until(
        lambda: certificate_of(job), SOON, expected="a Certificate", details=job.details
    )  # fmt: skip


def certificate(*sets: str, region: str = "", extra: ExtraMetadata = ExtraMetadata()):  # noqa: B008
    """What the operator makes for a job with every field; the last of `sets` wins."""
    scope = OperatorScope(
        worker_image="w:1", syncer_image="s:1", region=region, extra_metadata=extra
    )
    owner = Owner(namespace="default", uid="11111111-2222-3333-4444-555555555555")
    made = desired(load_job(EVERYTHING, sets), owner, scope, Wanted())
    [found] = [child for child in made if child["kind"] == "Certificate"]
    return found


def test_a_job_names_the_api_servers_answer_until_cert_manager_is_installed(bare):
    job = job_of(bare, "early")
    seen = job.until_condition("Accepted", SOON, status="False", reason="Refused")
    message = "404 page not found: this API server does not serve cert-manager.io/v1"
    assert f"Certificate early-tls: {message}" in seen["message"]
    # One refused child holds back none of the others, which are applied after it.
    for kind, name in (("statefulset", "early-eu"), ("deployment", "early-syncer")):
        assert bare.kubectl.get(kind, name, "default"), name
    until(
        lambda: seen["message"] in dict(job.events()).get("Refused", ""),
        SOON, expected="an Event has the same message", details=job.details,
    )  # fmt: skip
    cert_manager.apply_crds(bare)
    until_certificate(job)
    job.until_condition("Accepted", SOON, reason="Valid")
    job.delete()


@pytest.mark.parametrize("issuer", ISSUERS)
@pytest.mark.parametrize("region", ["", "eu"])
def test_a_certificate_is_accepted_strictly_and_shows_no_drift(api, issuer, region):
    extra = ExtraMetadata(
        fixed=Metadata(labels={"cost.example.com/center": "42"}, annotations={"a/b": "c, d"})
    )
    want = certificate(f"spec.tls={{mode: CertManager, issuerRef: {issuer}}}", extra=extra)
    command = ("apply", "--server-side", "--validate=strict", "-o", "json", "-f", "-")
    live = json.loads(api.kubectl(*command, stdin=json.dumps(want)))
    assert live["spec"] == want["spec"], "nothing is dropped, and no default is added"
    assert not has_drifted(live, want)
    api.kubectl.delete(CERTIFICATES, want["metadata"]["name"])


def test_the_crds_refuse_what_is_no_field_or_no_value_of_theirs(api):
    """So that the test above would notice."""
    good = certificate(f"spec.tls={{mode: CertManager, issuerRef: {ISSUERS[0]}}}")
    for place, value in (("hosts", ["a"]), ("usages", ["drink"]), ("uris", "not a list")):
        bad = copy.deepcopy(good)
        bad["spec"][place] = value
        with pytest.raises(KubectlError, match=place):
            api.kubectl.apply(bad)


def test_a_job_waits_for_the_secret_that_its_certificate_asks_for(api):
    job, since = job_of(api, "waits"), datetime.now(UTC)
    made = until_certificate(job)
    assert made["spec"]["issuerRef"] == {**ISSUER, "group": "cert-manager.io"}
    missing = job.until_condition(
        "LearnersReady", SOON, status="False", reason="CertificateMissing"
    )
    assert "Secret waits-tls" in missing["message"]
    cert_manager.make_secret(api, made)
    # The operator reads the Secret every 30 s, and whenever the job changes.
    job.change(runPolicy={"ttlSecondsAfterFinished": 1000})
    job.until_condition("LearnersReady", SOON, status="False", reason="Starting")
    assert job.condition("SyncerReachable")["reason"] != "CertificateMissing"

    job.change(regions=[{"name": "eu", "learners": 1}, {"name": "us", "learners": 1}])
    until(
        lambda: certificate_of(job)["spec"]["uris"]
        == ["diloco://waits/region/eu", "diloco://waits/region/us"],
        SOON, expected="the Certificate names the new region too", details=job.details,
    )  # fmt: skip
    other = job.until_condition(
        "LearnersReady", SOON, status="False", reason="CertificateOfOtherRegion"
    )
    assert "but learners of region eu, region us use it" in other["message"]
    cert_manager.make_secret(api, certificate_of(job))
    job.change(runPolicy={"ttlSecondsAfterFinished": 1001})
    job.until_condition("LearnersReady", SOON, status="False", reason="Starting")
    until(
        lambda: owners_of_secret(job) == [("DiLoCoJob", "waits", None)],
        SOON, expected="the job owns the Secret that was made again", details=job.details,
    )  # fmt: skip
    writes = [
        request for request in scale.requests(api, since)
        if request.resource == "certificates" and request.writes
    ]  # fmt: skip
    assert len(writes) == 2, "one for each state of the manifest"
    patched = [
        request for request in scale.requests(api, since)
        if request.resource == "secrets" and request.writes
    ]  # fmt: skip
    assert len(patched) == 1, "cert-manager's next apply leaves the owner"
    job.delete()


def owners_of_secret(job: Job) -> list[tuple[str, str, bool | None]]:
    """Kind, name and `controller` of the owners of the job's Secret."""
    secret = job.cluster.kubectl.get("secret", f"{job.name}-tls", job.namespace)
    owners = secret["metadata"].get("ownerReferences", [])
    return [(owner["kind"], owner["name"], owner.get("controller")) for owner in owners]


def test_an_ended_job_that_cleans_up_deletes_its_certificate(api):
    job = job_of(api, "ends", runPolicy={"activeDeadlineSeconds": 5, "cleanupPolicy": "All"})
    until_certificate(job)
    job.until_condition("Failed", SOON, reason="DeadlineExceeded")
    until(lambda: not certificate_of(job), SOON, expected="no Certificate", details=job.details)
    job.delete()
