"""
An older version of this project, from the history of the repository, is upgraded to this one and rolled back.

Other tests upgrade from this version to a changed copy of it (test_drills.py, test_lifecycle.py). Here chart, CRD,
operator, syncer and learners are those of a commit. Running jobs keep the images that they began with, so each of
these tests also runs components of two versions together:

    an older syncer and older learners under the operator of this version
    a syncer of this version with older learners, after a change that restarts only the syncer
    both kinds of jobs under the older operator, after a rollback
    an older syncer, which continues the state of one of this version, with learners of this version

The tests share their jobs, in this order.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from diloco_operator.resources.template_record import FORMAT, INPUTS
from diloco_testing.clusters import images, images_mounted
from diloco_testing.clusters.install import CHART, NAMESPACE, RELEASE, Images, install, load
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.provision import Cluster

OLDER = "5ffba47f0327ee01981196262db02e918b74c055"
"""
The last commit at which all tests ran whose operator records templates in format 1 (docs/adr/0017). Its packages have
today's names, and its operator ignores unknown fields. It knows neither queues nor pools, nor learners of several pods
that are replaced together, nor a syncer that reads the numbers of learners while it runs.
"""
FORMATS = {"older": "1-", "this": f"{FORMAT}-"}
"""How the record of a template begins, by the version of the operator that wrote it."""
NEWER_FIELD = "forceDeletePodsAfterSeconds"
"""Of spec.runPolicy, in this version only; no pod template depends on it."""
STEPS = 400
"""Of jobs that are to complete; they train for longer than an upgrade or a rollback takes."""
SOON = 120.0
PATIENCE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """A cluster in which the older version was installed, and what it runs."""

    cluster: Cluster
    older: Images
    this: Images
    short: Job
    """Ends on its own."""
    long: Job
    fresh: Job
    """Created under this version."""

    def until_reconciled_by(self, version: str, *jobs: Job) -> None:
        """Wait until the operator of a version has carried out everything for these jobs."""
        for job in jobs:
            until(
                lambda j=job: all(
                    each["metadata"]["annotations"].get(INPUTS, "").startswith(FORMATS[version])
                    for each in workloads(j)
                ),
                SOON, expected=f"the {version} operator has reconciled {job.name}",
                details=job.details,
            )  # fmt: skip


@pytest.fixture(scope="module")
def upgraded(fleet, files_of) -> Iterator[Upgraded]:
    """The older version with two jobs that train."""
    tree = files_of(OLDER)
    older = Images(
        operator=images.build_older("operator", tree),
        syncer=images.build_older("syncer", tree),
        worker=fleet.images.worker,
        pod_fields=images_mounted.pod_fields(tree),
    )
    cluster = fleet.cluster("older")
    load(cluster, older.operator, older.syncer)
    fleet.compile_kernels(cluster, tree)
    install(cluster, older, chart=tree / "charts/diloco")

    with fleet.namespace("older", cluster) as namespace:

        def job(name: str, of: Images, steps: int, **spec: Any) -> Job:
            regions, fields = {"eu": 1}, of.pod_fields
            body = manifest(name, steps=steps, regions=regions, pod_fields=fields, **spec)
            return Job(cluster, namespace, body)

        made = Upgraded(
            cluster=cluster, older=older, this=fleet.images,
            short=job("short", older, STEPS), long=job("long", older, 10**6),
            fresh=job("fresh", fleet.images, STEPS, runPolicy={NEWER_FIELD: 600}),
        )  # fmt: skip
        # The older version, which has a default of its own, must accept what this one stores.
        del made.fresh.manifest["spec"]["learner"]["checkpoint"]["everySteps"]
        for started in (made.long, made.short):
            started.apply()
        for started in (made.short, made.long):
            started.until_condition("LearnersReady", PATIENCE_SECONDS)
            started.until_step(10, PATIENCE_SECONDS)
        yield made
    fleet.end("older")


def workloads(job: Job) -> list[Object]:
    """Its StatefulSet and Deployment."""
    chosen = f"diloco.dev/job={job.name}"
    found = job.cluster.kubectl.list("statefulsets,deployments", job.namespace, chosen)
    assert len(found) == 2, found
    return found


def syncer_image(job: Job) -> str:
    """Of the syncer's pod; "" while there is none."""
    found = {
        container["image"] for pod in job.pods("syncer") for container in pod["spec"]["containers"]
    }
    assert len(found) <= 1, found
    return "".join(found)


def until_merged_further(job: Job) -> None:
    job.until_step(job.step() + 20, SOON)


def assert_trains(job: Job) -> None:
    """The conditions of a job to which nothing happened, for its current manifest."""
    status = job.status()
    assert status["observedGeneration"] == job.object()["metadata"]["generation"], job.details()
    seen = {each["type"]: each["status"] for each in status["conditions"]}
    true = {kind for kind, value in seen.items() if value == "True"}
    assert {"Accepted", "SyncerReady", "SyncerReachable", "LearnersReady", "QuorumMet"} <= true, (
        job.details()
    )
    assert not {"Failed", "Complete", "Suspended"} & true, job.details()


def assert_audit_is_clean(job: Job) -> None:
    verdict = job.audit()
    assert verdict.ok, verdict.violations


def upgrade(made: Upgraded) -> None:
    """As docs/operations.md has it; images of a checkout have no default tag."""
    repository, _, tag = made.this.operator.name.rpartition(":")
    syncer, _, syncer_tag = made.this.syncer.name.rpartition(":")
    values = {
        "images.operator.repository": repository, "images.operator.tag": tag,
        "images.syncer.repository": syncer, "images.syncer.tag": syncer_tag,
    }  # fmt: skip
    made.cluster.helm(
        "upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, "--reset-then-reuse-values",
        *(f"--set={key}={value}" for key, value in values.items()), "--wait", "--timeout", "3m",
    )  # fmt: skip


def test_an_upgrade_from_an_older_version_restarts_no_pod_and_its_jobs_complete(upgraded):
    short, long = upgraded.short, upgraded.long
    before = {job.name: job.instances() for job in (short, long)}
    templates = [each["spec"]["template"] for each in workloads(long)]
    upgraded.until_reconciled_by("older", short, long)
    upgrade(upgraded)
    upgraded.until_reconciled_by("this", short, long)
    assert short.step() < STEPS, "the job ended before the upgrade, which shows nothing of it"
    assert {job.name: job.instances() for job in (short, long)} == before
    until_merged_further(long)
    assert_trains(long)
    assert syncer_image(long) == upgraded.older.syncer.name

    short.until_condition("Complete", PATIENCE_SECONDS)
    assert short.status()["step"] == STEPS
    assert short.status()["model"]["sha256"]
    assert short.condition("Failed")["status"] == "False"
    syncer = short.syncer_pod()
    assert short.instances()[syncer] == before["short"][syncer]
    assert_audit_is_clean(short)

    assert long.instances() == before["long"]
    assert [each["spec"]["template"] for each in workloads(long)] == templates
    assert_audit_is_clean(long)


def test_a_syncer_of_this_version_continues_with_older_learners(upgraded):
    """A change of steps restarts only the syncer, which gets the new default image."""
    long = upgraded.long
    learner = long.pod_of("eu/0")
    before, step = long.instances(), long.step()
    long.change(steps=10**6 + 1)
    until(
        lambda: syncer_image(long) == upgraded.this.syncer.name, SOON,
        expected="the syncer of this version", details=long.details,
    )  # fmt: skip
    long.until_condition("LearnersReady", SOON)
    long.until_step(step + 40, SOON)
    assert long.instances()[learner] == before[learner]
    starts = [line for line in long.log() if line["event"] == "start"]
    assert len(starts) == 2
    assert starts[-1]["step"] > 0, "it continues from the last snapshot of the older syncer"
    until_settled(long)
    assert_audit_is_clean(long)


def until_settled(job: Job) -> None:
    """Conditions follow what happens after some seconds."""

    def settled() -> bool:
        try:
            assert_trains(job)
        except AssertionError:
            return False
        return True

    until(settled, SOON, expected="the job trains", details=job.details)


def test_a_rollback_to_the_older_version_restarts_no_pod_of_either_version(upgraded):
    """`helm rollback` brings the older CRD back as well, which has no place for newer fields."""
    long, fresh = upgraded.long, upgraded.fresh
    fresh.apply().until_condition("LearnersReady", PATIENCE_SECONDS)
    fresh.until_step(20, PATIENCE_SECONDS)
    upgraded.until_reconciled_by("this", long, fresh)
    before = {job.name: job.instances() for job in (long, fresh)}
    assert fresh.object()["spec"]["runPolicy"][NEWER_FIELD] == 600
    upgraded.cluster.helm("rollback", RELEASE, "1", "-n", NAMESPACE, "--wait", "--timeout", "3m")
    upgraded.until_reconciled_by("older", long, fresh)
    for job in (long, fresh):
        until_merged_further(job)
        assert_trains(job)
        assert_audit_is_clean(job)
    assert {job.name: job.instances() for job in (long, fresh)} == before
    assert NEWER_FIELD not in fresh.object()["spec"].get("runPolicy", {})


def test_the_older_operator_names_fields_of_a_newer_crd_and_runs_the_job(upgraded):
    """
    As where the CRD is managed separately, or another release has upgraded it.

    The API server fills in the defaults of newer fields, and the operator cannot tell them from fields that were set.
    So every job has this reason, and its message lists only the first fields.
    """
    long, fresh = upgraded.long, upgraded.fresh
    before = long.instances()
    crd = subprocess.check_output((sys.executable, "-m", "diloco_cli", "crd"), text=True)
    upgraded.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=crd)
    long.change(runPolicy={NEWER_FIELD: 600})
    accepted = long.until_condition("Accepted", SOON, reason="FieldsIgnored")
    assert re.search(r"ignores, spec\.\w+.* and \d+ more$", accepted["message"]), accepted
    until_merged_further(long)
    until_settled(long)
    assert long.instances() == before
    assert long.object()["spec"]["runPolicy"][NEWER_FIELD] == 600, "the field is not lost"
    assert_audit_is_clean(long)
    assert NEWER_FIELD not in fresh.object()["spec"].get("runPolicy", {}), "lost in the rollback"


def test_a_job_of_this_version_completes_under_the_older_operator_and_continues_with_its_syncer(
    upgraded,
):
    """More steps start an older syncer, which reads what one of this version wrote."""
    fresh = upgraded.fresh
    fresh.until_condition("Complete", PATIENCE_SECONDS)
    assert fresh.status()["step"] == STEPS
    assert syncer_image(fresh) == upgraded.this.syncer.name
    assert_audit_is_clean(fresh)
    fresh.change(steps=STEPS + 40)
    fresh.until_condition("Complete", SOON, status="False")
    fresh.until_condition("Complete", PATIENCE_SECONDS)
    assert fresh.status()["step"] == STEPS + 40
    assert syncer_image(fresh) == upgraded.older.syncer.name
    assert_audit_is_clean(fresh)
