"""The proxy to syncers of other clusters: who gets it, and who does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.settings import from_env
from diloco_testing.kubernetes.operated_job import SCOPE, training
from diloco_testing.manifests.files import load_job
from diloco_worker import settings as worker_settings

PROXY = "http://proxy.example.com:3128"
ENV = {"DILOCO_WORKER_IMAGE": "w", "DILOCO_SYNCER_IMAGE": "s"}
EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"
REMOTE = ("spec.syncer.endpoint=a.b:7070", "spec.tls={mode: Secret, secretName: s}")


def with_proxy(region, sets=REMOTE):
    """Names of the workloads whose pods get the proxy."""
    scope = replace(SCOPE, region=region, syncer_proxy=PROXY)
    made = desired(load_job(EVERYTHING, sets), Owner(namespace="w", uid="7"), scope, Wanted())
    return {
        item["metadata"]["name"]
        for item in made
        if item["kind"] in ("StatefulSet", "Deployment")
        for container in item["spec"]["template"]["spec"]["containers"]
        if {"name": "DILOCO_SYNCER_PROXY", "value": PROXY} in container["env"]
    }


def test_learners_of_a_cluster_without_the_syncer_dial_it_through_the_proxy():
    assert with_proxy("us") == {"stdlib-gpt-us"}


def test_no_program_dials_a_syncer_of_its_own_cluster_through_the_proxy():
    assert with_proxy("eu") == set()
    assert with_proxy("", ()) == set()


def test_a_proxy_that_is_set_later_restarts_no_learner():
    world = training()
    pods = {name: pod["spec"] for name, pod in world.pods.items()}
    world.scope = replace(world.scope, syncer_proxy=PROXY)
    world.settle()
    assert {name: pod["spec"] for name, pod in world.pods.items()} == pods


def test_the_settings_are_read():
    assert from_env(ENV).scope.syncer_proxy == ""
    assert from_env(ENV | {"DILOCO_SYNCER_PROXY": PROXY}).scope.syncer_proxy == PROXY
    learner = {
        "DILOCO_SYNCER": "a:1",
        "DILOCO_JOB": "a",
        "DILOCO_LEARNER": "eu/0",
        "DILOCO_SPEC": "s",
    }
    assert worker_settings.from_env(learner).proxy == ""
    assert worker_settings.from_env(learner | {"DILOCO_SYNCER_PROXY": PROXY}).proxy == PROXY


@pytest.mark.parametrize(
    "text", ["proxy:3128", "https://proxy:3128", "http://proxy", "http:// a:1"]
)
def test_a_proxy_that_grpc_could_not_use_is_refused(text):
    with pytest.raises(ConfigError, match="DILOCO_SYNCER_PROXY"):
        from_env(ENV | {"DILOCO_SYNCER_PROXY": text})
