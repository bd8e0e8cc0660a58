"""The Secret that cert-manager makes for a job goes with the job."""

import pytest

from diloco_testing.kubernetes.operated_job import OperatedJob, certificate, is_idle, manifest

TLS = {"mode": "CertManager", "issuerRef": {"name": "ca"}}


def job(tls=TLS, **metadata):
    """A job whose Secret has this metadata."""
    world = OperatedJob(job=manifest(tls=tls), certificate=certificate("a", "eu", "us"))
    made = {
        "name": "a-tls",
        "uid": "uid-of-secret",
        "labels": {"diloco.dev/job": "a"},
        "annotations": {"cert-manager.io/certificate-name": "a-tls"},
    }
    world.secret = {"metadata": {**made, **metadata}}
    return world


def owners(world):
    return [owner["uid"] for owner in world.secret["metadata"].get("ownerReferences", [])]


def test_the_job_becomes_an_owner_of_the_secret_once():
    world = job()
    world.settle()
    assert owners(world) == ["uid-of-a"]
    assert is_idle(world.reconcile(1))


def test_an_owner_that_cert_manager_sets_is_kept():
    by_certificate = {"kind": "Certificate", "uid": "uid-of-certificate", "controller": True}
    world = job(ownerReferences=[by_certificate])
    world.settle()
    assert owners(world) == ["uid-of-certificate", "uid-of-a"]
    assert world.secret["metadata"]["ownerReferences"][1].get("controller") is None


def test_a_secret_of_a_former_job_of_the_name_gets_the_new_owner():
    """The garbage collector would delete it otherwise, while the new job uses it."""
    world = job(ownerReferences=[{"kind": "DiLoCoJob", "uid": "uid-of-the-former"}])
    world.settle()
    assert owners(world) == ["uid-of-the-former", "uid-of-a"]


@pytest.mark.parametrize(
    "foreign",
    [
        {"annotations": {}},
        {"annotations": {"cert-manager.io/certificate-name": "another"}},
        {"labels": {}},
        {"labels": {"diloco.dev/job": "b"}},
        {"tls": {"mode": "Secret", "secretName": "a-tls"}},
    ],
    ids=str,
)
def test_a_secret_of_other_origin_is_left_alone(foreign):
    """A person made it, or it belongs to another Certificate: it must not go with the job."""
    world = job(**foreign)
    world.settle()
    assert owners(world) == []
