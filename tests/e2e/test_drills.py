"""
What people do to a job of two clusters while it trains: upgrades, a region that goes and comes, a syncer that moves.

docs/operations.md, "Drills", has the commands. The tests share one job, in this order.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from diloco_testing.clusters.install import NAMESPACE, RELEASE, install
from diloco_testing.clusters.job import Job, manifest, when
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.pair import Pair, refresh_volumes
from diloco_testing.clusters.provision import ROOT, Cluster

SOON = 120.0
PATIENCE_SECONDS = 240.0
FIRST_PORT, SECOND_PORT = 30715, 30716
VERSION = "example.com/version"
BOTH = {"eu/0", "us/0"}

NEXT = """
from diloco_operator.resources import pod_templates

former = pod_templates.template

def template(context, parts):
    made = former(context, parts)
    main = next(c for c in made["spec"]["containers"] if c["name"] == pod_templates.MAIN)
    main["env"].append({"name": "DILOCO_NEXT", "value": "1"})
    made["spec"]["terminationGracePeriodSeconds"] += 1
    return made

pod_templates.template = template
"""
"""A newer version of the operator, which makes other pod templates of the same manifest."""


@pytest.fixture(scope="module")
def drilled(pair, fleet, tmp_path_factory) -> Iterator[Pair]:
    """A job that trains in both clusters."""
    with fleet.namespace("drills", *pair.values()):
        folder = tmp_path_factory.mktemp("drills")
        made = Pair(pair, fleet.images, "drills", FIRST_PORT, folder, steps=10**6).start()
        for job in made.jobs.values():
            job.until_condition("LearnersReady", PATIENCE_SECONDS)
        until_both_are_merged(made)
        yield made


def until_both_are_merged(made: Pair) -> None:
    """Learners of both regions are in merges after now."""
    step = made.home.step()
    until(
        lambda: made.members(since_step=step) == BOTH, SOON,
        expected="both are merged", details=made.details,
    )  # fmt: skip


def instances(made: Pair) -> dict[str, Any]:
    return {region: job.instances() for region, job in made.jobs.items()}


def since(job: Job, begun: datetime, event: str) -> list[Object]:
    """Lines of events.jsonl."""
    return [x for x in job.log() if x["event"] == event and when(x["time"]) > begun]


# Upgrades


def in_both(pair: dict[str, Cluster], work) -> None:
    """Do it in both clusters at the same time."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda region: work(region, pair[region]), pair))


def workloads(job: Job) -> dict[str, Object]:
    """StatefulSets and Deployments by kind and name."""
    found = job.cluster.kubectl.list(
        "statefulsets,deployments", job.namespace, f"diloco.dev/job={job.name}"
    )
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def templates(made: Pair) -> dict[str, Any]:
    return {
        f"{region}: {name}": each["spec"]["template"]
        for region, job in made.jobs.items()
        for name, each in workloads(job).items()
    }


def until_reconciled(made: Pair, version: str | None) -> None:
    """The operators with this value have carried out everything for the job."""
    for job in made.jobs.values():
        until(
            lambda j=job: {
                each["metadata"]["labels"].get(VERSION) for each in workloads(j).values()
            } == {version},
            SOON, expected=f"every workload has version {version}", details=made.details,
        )  # fmt: skip


def test_operators_that_are_upgraded_twice_and_rolled_back_restart_no_pod(pair, fleet, drilled):
    """First other values of the chart, then an operator that makes other templates."""
    before, same_templates, begun = instances(drilled), templates(drilled), datetime.now(UTC)
    revisions = {
        region: json.loads(cluster.helm("history", RELEASE, "-n", NAMESPACE, "-o", "json"))[-1]
        for region, cluster in pair.items()
    }
    code = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "next"},
        "data": {"sitecustomize.py": NEXT},
    }
    newer = {
        "extraEnv": [{"name": "PYTHONPATH", "value": "/next"}],
        "extraVolumes": [{"name": "next", "configMap": {"name": "next"}}],
        "extraVolumeMounts": [{"name": "next", "mountPath": "/next"}],
    }

    def upgrade(version: str, **values: Any) -> None:
        images = [f"--set=images.{name}.tag={version}" for name in ("worker", "syncer")]
        labels = {"labels": {VERSION: version}}
        in_both(
            pair,
            lambda region, cluster: install(
                cluster, fleet.images, *images, region={"name": region}, jobs=labels, **values
            ),
        )
        until_reconciled(drilled, version)

    def rolled_back(region: str, cluster: Cluster) -> None:
        revision = str(revisions[region]["revision"])
        cluster.helm("rollback", RELEASE, revision, "-n", NAMESPACE, "--wait", "--timeout", "3m")

    try:
        upgrade("first")
        until_both_are_merged(drilled)
        for cluster in pair.values():
            cluster.kubectl.apply(code, namespace=NAMESPACE)
        upgrade("second", **newer)
        until_both_are_merged(drilled)
        assert _makes_other_templates(drilled)
    finally:
        in_both(pair, rolled_back)
    until_reconciled(drilled, None)
    until_both_are_merged(drilled)
    assert instances(drilled) == before
    assert templates(drilled) == same_templates
    assert not since(drilled.eu, begun, "start")


def _makes_other_templates(made: Pair) -> bool:
    """What the operator makes of a new job: otherwise it had nothing to keep."""
    body = manifest("fresh", steps=9, regions={"eu": 1}, runPolicy={"suspend": True})
    fresh = Job(made.eu.cluster, made.namespace, body).apply()
    found = until(lambda: workloads(fresh).get("StatefulSet/fresh-eu"), SOON, expected="its set")
    fresh.delete()
    (main,) = found["spec"]["template"]["spec"]["containers"]
    has_variable = {"name": "DILOCO_NEXT", "value": "1"} in main["env"]
    return has_variable and main["image"].endswith(":second")


# A region


@contextlib.contextmanager
def drained_nodes(job: Job) -> Iterator[None]:
    """All nodes of a cluster, as far as the job is concerned."""
    kubectl = job.cluster.kubectl
    names = [node["metadata"]["name"] for node in kubectl.list("nodes", "")]
    try:
        kubectl(
            "drain", *names, "--ignore-daemonsets", "--delete-emptydir-data",
            f"--pod-selector=diloco.dev/job={job.name}", "--timeout=100s",
        )  # fmt: skip
        yield
    finally:
        kubectl("uncordon", *names)


def until_the_syncer_has(learners: dict[str, int], job: Job) -> None:
    """The kubelet would bring new numbers of learners to its pod within about a minute."""

    def known() -> bool:
        refresh_volumes(job, job.syncer_pod())
        limits = [line["learners"] for line in job.log() if line["event"] == "limits"]
        return limits[-1:] == [learners]

    until(known, SOON, every=3.0, expected=f"the syncer knows {learners}", details=job.details)


def test_a_region_is_drained_removed_and_added_while_the_other_trains(drilled):
    eu, us = drilled.eu, drilled.us
    before, begun = eu.instances(), datetime.now(UTC)

    with drained_nodes(us):
        us.until_condition("LearnersReady", SOON, status="False")
        step = eu.step()
        eu.until_step(step + 20, SOON)
        assert drilled.members(since_step=step) == {"eu/0"}
    us.until_condition("LearnersReady", PATIENCE_SECONDS)
    until_both_are_merged(drilled)

    # Removed: the same manifest in each cluster, then the job where it no longer has a region.
    left = json.loads(json.dumps(eu.manifest))
    left["spec"]["regions"] = [{"name": "eu", "learners": 1}]
    for job in drilled.jobs.values():
        Job(job.cluster, job.namespace, left).apply()
    us.until_condition("Accepted", SOON, status="False", reason="RegionNotInSpec")
    until(lambda: not us.pods(), SOON, expected="us frees its pods", details=drilled.details)
    us.delete()
    until(lambda: not us.children(), SOON, expected="nothing is left", details=drilled.details)
    until_the_syncer_has({"eu": 1}, eu)
    eu.until_condition("LearnersReady", SOON)
    until(
        lambda: [region["name"] for region in eu.status()["regions"]] == ["eu"],
        SOON, expected="the status is that of one region", details=drilled.details,
    )  # fmt: skip

    for job in drilled.jobs.values():
        job.apply()
    until_the_syncer_has({"eu": 1, "us": 1}, eu)
    for job in drilled.jobs.values():
        job.until_condition("LearnersReady", PATIENCE_SECONDS)
    until_both_are_merged(drilled)

    assert eu.instances() == before
    assert not since(eu, begun, "start")
    verdict = eu.audit()
    assert verdict.ok, verdict.violations


# The syncer


POD = re.compile(
    r"^ *```yaml\n( *apiVersion: v1\n *kind: Pod\n.*?)^ *```", re.MULTILINE | re.DOTALL
)


def mover(job: Job) -> Object:
    """The pod of docs/operations.md that mounts the syncer's volume."""
    (found,) = POD.findall((ROOT / "docs/operations.md").read_text())
    deployment = ("get", "deployment", f"{job.name}-syncer", "-n", job.namespace)
    image = job.cluster.kubectl(*deployment, "-o", "jsonpath={..image}")
    return dict(yaml.safe_load(found.replace("NAME", job.name).replace("IMAGE", image)))


@contextlib.contextmanager
def mounted(job: Job) -> Iterator[str]:
    """The name of a pod that mounts the syncer's volume."""
    kubectl, pod = job.cluster.kubectl, mover(job)
    name = str(pod["metadata"]["name"])
    kubectl.apply(pod, namespace=job.namespace)
    try:
        kubectl(
            "wait", "--for=condition=Ready", f"pod/{name}", "-n", job.namespace, "--timeout=100s"
        )
        yield name
    finally:
        kubectl.delete("pod", name, job.namespace, "--now")


def copy_volume(source: Job, target: Job) -> int:
    """Copy the syncer's volume; returns the step of its newest snapshot."""
    with mounted(source) as old, mounted(target) as new:
        content = source.cluster.kubectl.raw(
            "exec", "-n", source.namespace, old, "--",
            "tar", "-c", "-C", "/state", "--exclude=./lost+found", ".",
        )  # fmt: skip
        target.cluster.kubectl.raw(
            "exec", "-i", "-n", target.namespace, new, "--",
            "tar", "-x", "-C", "/state", "--no-overwrite-dir", stdin=content,
        )  # fmt: skip
        names = target.cluster.kubectl.exec(
            new, "ls", "/state/snapshots", namespace=target.namespace
        )
    return max(int(step) for step in re.findall(r"-step-(\d+)\.json", names))


def test_the_syncer_moves_to_the_other_cluster_and_continues_from_its_newest_snapshot(
    pair, fleet, drilled
):
    begun = datetime.now(UTC)
    drilled.eu.until_step(40, SOON)
    drilled.eu.change(runPolicy={"suspend": True})
    drilled.eu.until_condition("Suspended", SOON)
    pods = ("pods", drilled.namespace, "diloco.dev/job=drills")
    until(
        lambda: not drilled.eu.cluster.kubectl.list(*pods), SOON,
        expected="the last pod has ended", details=drilled.details,
    )  # fmt: skip
    known = drilled.eu.status()["step"]

    moved = Pair(
        pair, fleet.images, "drills", SECOND_PORT, drilled.folder, syncer="us", steps=10**6
    )
    secrets = moved.certificates()
    drilled.us.delete()
    moved.us.cluster.kubectl.apply(secrets["us"], namespace=moved.namespace)
    suspended = json.loads(json.dumps(moved.us.manifest))
    suspended["spec"]["runPolicy"] = {"suspend": True}
    Job(moved.us.cluster, moved.namespace, suspended).apply()
    claims = ("pvc", "drills-syncer", moved.namespace)
    until(
        lambda: moved.us.cluster.kubectl.get(*claims), SOON,
        expected="the new claim", details=moved.details,
    )  # fmt: skip
    snapshot = copy_volume(drilled.eu, moved.us)
    assert snapshot >= known, "the syncer wrote a snapshot when it was suspended"

    moved.us.change(runPolicy={"suspend": False})
    moved.us.until_condition("LearnersReady", PATIENCE_SECONDS)
    drilled.eu.delete()
    moved.eu.cluster.kubectl.apply(secrets["eu"], namespace=moved.namespace)
    moved.eu.apply()
    moved.eu.until_condition("LearnersReady", PATIENCE_SECONDS)
    until_both_are_merged(moved)

    assert since(moved.us, begun, "start")[0]["step"] == snapshot, "it continues where it was"
    starts = [line for line in moved.us.log() if line["event"] == "start"]
    assert starts[0]["step"] == 0, "the log moved with the snapshots"
    assert starts[-1]["epoch"] > starts[-2]["epoch"]
    for job in moved.jobs.values():
        assert job.status()["step"] >= snapshot
        job.until_condition("SpecConsistent", 60)
    assert not moved.eu.pods("syncer")
    until(lambda: moved.eu.cluster.kubectl.get(*claims) is None, SOON, expected="no old volume")
    verdict = moved.us.audit()
    assert verdict.ok, verdict.violations
