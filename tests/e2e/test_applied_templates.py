"""
On a real API server, a pod template that the operator keeps or adopts is no change: no rollout begins.

Needs etcd and kube-apiserver (or hyperkube); nothing runs but those two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_operator.cluster.client import Cluster
from diloco_operator.decide.drift import has_drifted
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.resources.template_record import template_of, with_template
from diloco_testing.kubernetes.api_server import operated
from diloco_testing.manifests.files import load_job

Json = dict[str, Any]

EVERYTHING = Path(__file__).parents[1] / "golden/everything.yaml"
SCOPE = OperatorScope(worker_image="w:1", syncer_image="s:1")


@pytest.fixture(scope="module")
def cluster(programs, tmp_path_factory) -> Iterator[Cluster]:
    with operated(programs, tmp_path_factory.mktemp("api")) as cluster:
        yield cluster


def workloads(scope: OperatorScope = SCOPE) -> list[Json]:
    """StatefulSets and Deployments of a job with every field."""
    owner = Owner(namespace="default", uid="11111111-2222-3333-4444-555555555555")
    made = desired(load_job(EVERYTHING), owner, scope, Wanted())
    return [child for child in made if child["kind"] in ("StatefulSet", "Deployment")]


def changed(template: Json) -> Json:
    """What another version makes: one more variable."""
    main, *others = template["spec"]["containers"]
    env = [*main["env"], {"name": "DILOCO_NEW", "value": "1"}]
    return {**template, "spec": {**template["spec"], "containers": [{**main, "env": env}, *others]}}


def test_a_recorded_template_is_applied_again_without_a_rollout(cluster):
    for want in workloads():
        before = cluster.apply(want)
        other = with_template(want, changed(want["spec"]["template"]))
        kept = with_template(other, template_of(before))
        assert kept == want
        after = cluster.apply(kept)
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_an_adopted_live_template_starts_no_rollout_and_then_shows_no_drift(cluster):
    """As after an upgrade from a version that recorded nothing: with all of the server's defaults."""
    for want in workloads():
        before = cluster.apply(want)
        adopted = with_template(want, before["spec"]["template"])
        after = cluster.apply(adopted)
        assert after["spec"] == before["spec"]
        if want["kind"] == "StatefulSet":
            # A Deployment counts its annotations too, but makes no ReplicaSet for them.
            assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert not has_drifted(after, adopted)


def test_the_next_template_replaces_an_adopted_one_entirely(cluster):
    for want in workloads():
        before = cluster.apply(want)
        cluster.apply(with_template(want, before["spec"]["template"]))
        new = with_template(want, changed(want["spec"]["template"]))
        after = cluster.apply(new)
        assert "DILOCO_NEW" in str(after["spec"]["template"])
        again = cluster.apply(want)
        assert again["spec"] == before["spec"], "no field of the server's defaults stays behind"
