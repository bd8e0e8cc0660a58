"""What holds for the children of every job that the API server accepts."""

import itertools
import json
import re

import kubernetes.client as k8s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_job.types import API_VERSION, KIND, DiLoCoJob
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.manifests.generated import jobs
from diloco_testing.properties import examples

OWNER = Owner(namespace="ml", uid="7f")
DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"


@st.composite
def cases(draw):
    job = draw(jobs())
    region = draw(st.sampled_from(["", *(region.name for region in job.spec.regions), "elsewhere"]))
    scope = OperatorScope(
        region=region, worker_image="w", syncer_image="s", image_pull_secrets=("pull",)
    )
    wanted = Wanted(
        learners=draw(st.booleans()), syncer=draw(st.booleans()), evaluator=draw(st.booleans())
    )
    return job, scope, wanted


def has_null(value):
    if isinstance(value, dict):
        return any(map(has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(has_null, value)))


@settings(max_examples=examples(100))
@given(cases())
def test_every_child_is_named_labelled_owned_and_marked(case):
    job, scope, wanted = case
    made = desired(job, OWNER, scope, wanted)
    for child in made:
        metadata, kind = child["metadata"], child["kind"]
        # ConfigMaps need no DNS label: their names are 253 characters at most.
        most = {"StatefulSet": 52, "ConfigMap": 253}.get(kind, 63)
        assert len(metadata["name"]) <= most
        assert re.fullmatch(DNS_LABEL, metadata["name"])
        assert metadata["namespace"] == "ml"
        assert metadata["labels"]["diloco.dev/job"] == job.metadata.name
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == scope.manager
        for value in metadata["labels"].values():
            assert len(value) <= 63
            assert re.fullmatch(LABEL_VALUE, value)
        assert re.fullmatch("[0-9a-f]{16}", metadata["annotations"]["diloco.dev/applied"])
        (owner,) = metadata["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["name"]) == ("7f", True, job.metadata.name)
        assert "status" not in child
        assert not has_null(child)
    assert len({(child["kind"], child["metadata"]["name"]) for child in made}) == len(made)


@settings(max_examples=examples(50))
@given(cases())
def test_the_same_job_gives_the_same_bytes(case):
    job, scope, wanted = case
    again = DiLoCoJob.model_validate(job.model_dump(by_alias=True))
    first, second = (desired(stored, OWNER, scope, wanted) for stored in (job, again))
    assert json.dumps(first) == json.dumps(second)


@settings(max_examples=examples(50))
@given(cases())
def test_selectors_pick_the_pods_of_their_own_workload_and_of_no_other(case):
    job, scope, wanted = case
    made = desired(job, OWNER, scope, wanted)
    workloads = [child for child in made if child["kind"] in ("Deployment", "StatefulSet")]
    picking = [*workloads, *(child for child in made if child["kind"] == "PodDisruptionBudget")]
    for child in picking:
        select = child["spec"]["selector"]["matchLabels"].items()
        picked = [
            child["metadata"]["name"]
            for child in workloads
            if select <= child["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert picked == [child["metadata"]["name"]]


@settings(max_examples=examples(50))
@given(cases())
def test_every_spec_that_a_pod_mounts_is_there(case):
    job, scope, wanted = case
    made = desired(job, OWNER, scope, wanted)
    documents = {child["metadata"]["name"] for child in made if child["kind"] == "ConfigMap"}
    used = set()
    for child in made:
        if child["kind"] in ("Deployment", "StatefulSet"):
            volumes = child["spec"]["template"]["spec"]["volumes"]
            # If the user wrote no list, the API server rejects the pod.
            for volume in volumes if isinstance(volumes, list) else ():
                if isinstance(volume, dict) and volume.get("name") == "spec":
                    used.add(volume["configMap"]["name"])
    assert used <= documents


def test_jobs_of_different_names_share_a_child_only_where_a_dash_can_be_read_in_two_ways():
    parts = ["a", "syncer", "tls"]
    names = ["-".join(chosen) for n in (1, 2, 3) for chosen in itertools.product(parts, repeat=n)]
    regions = [name for name in names if name.count("-") < 2 and name != "syncer"]
    scope = OperatorScope(worker_image="w", syncer_image="s")
    holders: dict[tuple[str, str], list[str]] = {}
    for name in names:
        spec = {
            "steps": 1,
            "learner": {"recipe": {"name": "gpt"}},
            "regions": [{"name": region, "learners": 1} for region in regions],
            "evaluation": {"everySteps": 1},
            "tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}},
        }
        job = DiLoCoJob.model_validate(
            {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
        )
        for child in desired(job, OWNER, scope, Wanted()):
            key = child["kind"], child["metadata"]["name"]
            holders.setdefault(key, []).append(name)
    shared = {key: held for key, held in holders.items() if len(held) > 1}
    # Such as job a with region a-tls and job a-a with region tls.
    assert ("StatefulSet", "a-a-tls") in shared
    # Such as job a with region a-syncer and the syncer of job a-a.
    assert ("Service", "a-a-syncer") in shared
    for (kind, child), held in shared.items():
        assert kind in ("StatefulSet", "Service", "PodDisruptionBudget")
        for name in held:
            suffix = child.removeprefix(f"{name}-")
            assert suffix in regions or (kind, suffix) == ("Service", "syncer")


MODELS = {
    "ServiceAccount": k8s.V1ServiceAccount,
    "ConfigMap": k8s.V1ConfigMap,
    "PersistentVolumeClaim": k8s.V1PersistentVolumeClaim,
    "Service": k8s.V1Service,
    "PodDisruptionBudget": k8s.V1PodDisruptionBudget,
    "Deployment": k8s.V1Deployment,
    "StatefulSet": k8s.V1StatefulSet,
}


@pytest.mark.skipif(
    not hasattr(k8s.V1Pod, "model_validate"), reason="clients before 37 have no types to check by"
)
@settings(max_examples=examples(50))
@given(cases())
def test_every_field_is_one_that_kubernetes_knows(case):
    job, scope, wanted = case
    plain = job.model_dump(by_alias=True)
    for learner in (plain["spec"]["learner"], plain["spec"]["syncer"], *plain["spec"]["regions"]):
        learner["podTemplate"]["spec"] = {}
    for variable in plain["spec"]["learner"]["env"]:
        variable["valueFrom"] = None
    for child in desired(DiLoCoJob.model_validate(plain), OWNER, scope, wanted):
        if child["kind"] in MODELS:
            MODELS[child["kind"]].model_validate(child)
