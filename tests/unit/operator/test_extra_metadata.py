"""Labels and annotations for others reach every child, restart no pod and replace nothing of ours."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ConfigError
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.extra_metadata import ExtraMetadata, Metadata
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.settings import from_env
from diloco_testing.kubernetes.operated_job import SCOPE, is_idle, manifest, training
from diloco_testing.manifests.files import load_job

EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"
COST = "cost.example.com/center"
FIXED = Metadata(labels={COST: "42"}, annotations={"example.com/contact": "ml"})
ENV = {"DILOCO_WORKER_IMAGE": "w", "DILOCO_SYNCER_IMAGE": "s"}
CERT_MANAGER = "spec.tls={mode: CertManager, issuerRef: {name: ca}}"


def scope(**extra: Any) -> OperatorScope:
    return replace(SCOPE, extra_metadata=ExtraMetadata(**extra))


STORAGE = "spec.learner.storage={size: 3Gi}"


def children(scope, job=Metadata(), sets=(CERT_MANAGER, STORAGE)):  # noqa: B008 (frozen)
    owner = Owner(namespace="work", uid="7f", metadata=job)
    return desired(load_job(EVERYTHING, sets), owner, scope, Wanted())


def metadata_of(made):
    """Of all children, of the pods in them, and of cert-manager's Secret."""
    found = []
    for child in made:
        found.append(child["metadata"])
        if child["kind"] in ("StatefulSet", "Deployment"):
            found.append(child["spec"]["template"]["metadata"])
        claims = child.get("spec", {}).get("volumeClaimTemplates", ())
        found.extend(claim["metadata"] for claim in claims)
        if child["kind"] == "Certificate":
            found.append(child["spec"].get("secretTemplate", {}))
    return found


# --------------------------------------------------------------------------- what children get


def test_every_child_pod_and_secret_has_the_labels_and_annotations_of_the_installation():
    made = children(scope(fixed=FIXED))
    kinds = {child["kind"] for child in made}
    assert kinds == {
        "ServiceAccount", "ConfigMap", "Certificate", "PersistentVolumeClaim", "Service",
        "PodDisruptionBudget", "Deployment", "StatefulSet",
    }  # fmt: skip
    for metadata in metadata_of(made):
        assert metadata["labels"][COST] == "42"
        assert metadata["annotations"]["example.com/contact"] == "ml"


def test_every_child_pod_and_secret_inherits_what_the_installation_names_and_nothing_else():
    job = Metadata(
        labels={"team": "vision", f"{COST}": "7", "cost.example.com.other/a": "b", "tea": "m"},
        annotations={"example.com/note": "long text, with anything", "other": "x"},
    )
    inherits = scope(
        inherited_labels=("team", "cost.example.com/"), inherited_annotations=("example.com/note",)
    )
    for metadata in metadata_of(children(inherits, job)):
        assert metadata["labels"]["team"] == "vision"
        assert metadata["labels"][COST] == "7"
        assert metadata["annotations"]["example.com/note"] == "long text, with anything"
        assert not {"cost.example.com.other/a", "tea"} & metadata["labels"].keys()
        assert "other" not in metadata["annotations"]


def test_the_value_of_the_job_wins_over_that_of_the_installation():
    extra = scope(fixed=FIXED, inherited_labels=(COST,))
    for metadata in metadata_of(children(extra, Metadata(labels={COST: "7"}))):
        assert metadata["labels"][COST] == "7"


def test_a_pod_template_wins_over_both():
    own = f"spec.learner.podTemplate.metadata={{labels: {{{COST}: mine}}}}"
    made = children(scope(fixed=FIXED), sets=(CERT_MANAGER, own))
    pods = [c["spec"]["template"]["metadata"] for c in made if c["kind"] == "StatefulSet"]
    assert pods
    assert {pod["labels"][COST] for pod in pods} == {"mine"}


def test_labels_of_the_operator_are_never_replaced_and_never_inherited():
    odd = {
        "diloco.dev/job": "another", "diloco.dev/role": "syncer", "diloco.dev/queue": "a",
        "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "argo",
        "app.kubernetes.io/version": "3",
    }  # fmt: skip
    annotations = {
        "diloco.dev/applied": "0" * 16, "diloco.dev/template": "{}", "diloco.dev/template-inputs": "1-0",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
    }  # fmt: skip
    greedy = scope(
        inherited_labels=("diloco.dev/", "diloco.dev/job", "app.kubernetes.io/"),
        inherited_annotations=("diloco.dev/", "kubectl.kubernetes.io/"),
    )
    plain = children(SCOPE)
    made = children(greedy, Metadata(labels=odd, annotations=annotations))
    for before, after in zip(metadata_of(plain), metadata_of(made), strict=True):
        labels = dict(after["labels"])
        assert labels.pop("app.kubernetes.io/version") == "3"
        assert labels == before.get("labels", {})
        given = {"diloco.dev/applied", "diloco.dev/template"}
        kept, were = after.get("annotations", {}), before.get("annotations", {})
        assert kept.keys() == were.keys()
        assert all(kept[key] == were[key] for key in kept.keys() - given)


def test_without_such_metadata_children_are_as_before():
    job = Metadata(labels={"team": "vision"}, annotations={"a": "b"})
    assert children(SCOPE, job) == children(SCOPE)
    certificate = next(c for c in children(SCOPE) if c["kind"] == "Certificate")
    assert certificate["spec"]["secretTemplate"] == {"labels": {"diloco.dev/job": "stdlib-gpt"}}


# ------------------------------------------------------------------------------ running jobs


def pods_of(world):
    return {
        name: (copy.deepcopy(pod["metadata"]["labels"]), copy.deepcopy(pod["spec"]))
        for name, pod in world.pods.items()
    }


def labels_of(world):
    return {key: child["metadata"]["labels"].get("team") for key, child in world.children.items()}


@pytest.fixture
def world():
    """A job that trains, under an operator whose jobs inherit the label team."""
    job = manifest(evaluation={"everySteps": 5})
    job["metadata"]["labels"] = {"team": "vision"}
    world = training(job)
    world.scope = scope(inherited_labels=("team",))
    return world


def test_new_settings_reach_the_children_of_a_running_job_and_restart_no_pod(world):
    before = pods_of(world)
    world.settle()
    assert set(labels_of(world).values()) == {"vision"}
    assert pods_of(world) == before
    assert is_idle(world.reconcile(30))


def test_a_changed_label_of_a_job_reaches_its_children_and_restarts_no_pod(world):
    world.settle()
    before = pods_of(world)
    world.job["metadata"]["labels"]["team"] = "speech"
    world.settle()
    assert set(labels_of(world).values()) == {"speech"}
    assert pods_of(world) == before
    del world.job["metadata"]["labels"]
    world.settle()
    assert set(labels_of(world).values()) == {None}
    assert pods_of(world) == before
    assert is_idle(world.reconcile(30))


def test_pods_get_the_labels_when_they_are_made_anew(world):
    world.settle()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.change(runPolicy={})
    world.settle()
    assert world.pods
    assert {pod["metadata"]["labels"].get("team") for pod in world.pods.values()} == {"vision"}


# ---------------------------------------------------------------------------------- settings


def test_the_settings_are_read():
    found = from_env(
        ENV
        | {
            "DILOCO_JOB_LABELS": '{"a": "b"}',
            "DILOCO_JOB_ANNOTATIONS": '{"c": "d, e"}',
            "DILOCO_INHERITED_LABELS": "team,cost.example.com/",
            "DILOCO_INHERITED_ANNOTATIONS": "f",
        }
    ).scope.extra_metadata
    assert found == ExtraMetadata(
        fixed=Metadata(labels={"a": "b"}, annotations={"c": "d, e"}),
        inherited_labels=("team", "cost.example.com/"),
        inherited_annotations=("f",),
    )


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DILOCO_JOB_LABELS", '{"diloco.dev/job": "x"}', "the operator itself sets diloco.dev/job"),
        ("DILOCO_JOB_LABELS", '{"app.kubernetes.io/name": "x"}', "app.kubernetes.io/name"),
        ("DILOCO_JOB_ANNOTATIONS", '{"a": 1}', "a: expected a string"),
        ("DILOCO_JOB_ANNOTATIONS", "[]", "expected a JSON object"),
    ],
)
def test_a_setting_that_cannot_be_carried_out_is_reported(variable, text, message):
    with pytest.raises(ConfigError, match=variable) as refused:
        from_env(ENV | {variable: text})
    assert message in str(refused.value)
