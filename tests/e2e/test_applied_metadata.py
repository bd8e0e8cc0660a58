"""
On a real API server, labels for others and NetworkPolicies are accepted, and changing them is no change of a template.

Needs etcd and kube-apiserver (or hyperkube); nothing runs but those two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_operator.cluster.client import Cluster
from diloco_operator.decide.drift import has_drifted
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.extra_metadata import ExtraMetadata, Metadata
from diloco_operator.resources.operator_scope import NetworkPolicies, OperatorScope
from diloco_operator.resources.template_record import template_of, with_template
from diloco_testing.kubernetes.api_server import operated
from diloco_testing.manifests.files import load_job

Json = dict[str, Any]

EVERYTHING = Path(__file__).parents[1] / "golden/everything.yaml"
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
LOAD_BALANCER = (
    "spec.syncer.service={type: LoadBalancer, loadBalancerClass: example.com/inner, "
    "loadBalancerSourceRanges: [10.0.0.0/8, 'fd00::/8']}"
)


@pytest.fixture(scope="module")
def cluster(programs, tmp_path_factory) -> Iterator[Cluster]:
    with operated(programs, tmp_path_factory.mktemp("api")) as cluster:
        yield cluster


def children(team: str, *sets: str) -> list[Json]:
    """Of a job that has this label, under an operator with everything that an installation can add."""
    scope = OperatorScope(
        worker_image="w:1",
        syncer_image="s:1",
        extra_metadata=ExtraMetadata(
            fixed=Metadata(labels={"cost.example.com/center": "42"}, annotations={"a/b": "c, d"}),
            inherited_labels=("team",),
        ),
        network_policies=NetworkPolicies(operator_namespace="system", metrics_from=(MONITORING,)),
    )
    owner = Owner(
        namespace="default",
        uid="11111111-2222-3333-4444-555555555555",
        metadata=Metadata(labels={"team": team}),
    )
    return list(desired(load_job(EVERYTHING, sets), owner, scope, Wanted()))


def test_what_an_installation_adds_is_stored_and_shows_no_drift(cluster):
    wants = children("vision", LOAD_BALANCER)
    assert "NetworkPolicy" in {want["kind"] for want in wants}
    for want in wants:
        live = cluster.apply(want)
        assert live["metadata"]["labels"]["team"] == "vision"
        assert not has_drifted(live, want), want["kind"]
        again = cluster.apply(want)
        assert not has_drifted(again, want), want["kind"]


def test_another_label_reaches_every_kind_of_child_and_starts_no_rollout(cluster):
    before = [cluster.apply(want) for want in children("vision")]
    for live, want in zip(before, children("speech"), strict=True):
        kept = want
        if want["kind"] in ("StatefulSet", "Deployment"):
            # As decide/running_templates does for pods that run.
            kept = with_template(want, template_of(live))
        after = cluster.apply(kept)
        assert after["metadata"]["labels"]["team"] == "speech"
        assert after.get("spec") == live.get("spec")
        assert not has_drifted(after, kept), want["kind"]
