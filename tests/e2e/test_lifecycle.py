"""
The lifecycle of a job from outside: suspend, resume, scale, finish, fail, delete; the chart upgraded and uninstalled.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from diloco_cli.authority import write_certs
from diloco_job.types import DiLoCoJob
from diloco_testing.clusters.install import CLUSTER_ROLE, NAMESPACE, RELEASE, RESTRICTED, install
from diloco_testing.clusters.job import Job, manifest, steadily
from diloco_testing.clusters.kubectl import KubectlError, Object, until

DEPLOYMENT = "deployment/diloco"
SOON = 120.0


@pytest.fixture
def make(eu, fleet, namespace, resting):
    """A job in a namespace of this test."""

    def made(name: str, *, steps: int = 10**6, learners: int = 1, **spec) -> Job:
        regions = spec.pop("regions", {"eu": learners})
        fields = fleet.images.pod_fields
        return Job(
            eu, namespace, manifest(name, steps=steps, regions=regions, pod_fields=fields, **spec)
        )

    return made


def own_program(job: Job, text: str) -> Job:
    """The job with a program of the user's own as learner; it needs no torch to start."""
    learner = job.manifest["spec"]["learner"]
    del learner["recipe"]
    learner["command"] = ["python3", "-c", text]
    return job


def test_suspend_keeps_the_state_and_frees_the_pods_and_resume_continues_from_it(make):
    job = make("nap").apply()
    job.until_step(40, 240)
    job.change(runPolicy={"suspend": True})
    job.until_condition("Suspended", SOON)
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)
    step = job.status()["step"]
    assert step >= 40
    assert job.status()["state"] == "Suspended"
    claims = [c for c in job.children() if c["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == 1, "the syncer's volume stays"
    job.change(runPolicy={"suspend": False})
    job.until_condition("LearnersReady", SOON)
    assert job.step() >= step, "what was done before the suspension is not done again"
    job.until_step(step + 10, SOON)
    assert job.audit().ok


def test_learners_come_and_go_while_the_job_trains(make):
    job = make("tide").apply()
    job.until_condition("LearnersReady", 240)
    stays = (job.pod_of("eu/0"), job.syncer_pod())
    before = [job.instances()[pod] for pod in stays]
    job.change(regions=[{"name": "eu", "learners": 2}])
    until(lambda: len(job.pods("learner")) == 2, SOON, expected="one more learner")
    # The kubelet brings the new number to the syncer's pod within about a minute.
    until(lambda: "eu/1" in _merged(job), 2 * SOON, expected="the second learner is merged",
          details=job.details)  # fmt: skip
    job.until_condition("LearnersReady", SOON)
    job.change(regions=[{"name": "eu", "learners": 1}, {"name": "us", "learners": 1}])
    until(
        lambda: {p["metadata"]["name"] for p in job.pods("learner")} == {"tide-eu-0", "tide-us-0"},
        SOON, expected="one region more, one learner less", details=job.details,
    )  # fmt: skip
    until(lambda: "us/0" in _merged(job), 2 * SOON, expected="the new region is merged",
          details=job.details)  # fmt: skip
    job.until_condition("LearnersReady", SOON)
    job.change(regions=[{"name": "eu", "learners": 1}])
    until(
        lambda: not any(c["metadata"]["name"] == "tide-us" for c in job.children()),
        SOON, expected="the region's children are gone", details=job.details,
    )  # fmt: skip
    until(lambda: _limits(job)[-1:] == [{"eu": 1}], SOON, expected="the syncer has the last numbers",
          details=job.details)  # fmt: skip
    assert _limits(job) == [{"eu": 2}, {"eu": 1, "us": 1}, {"eu": 1}]
    assert [job.instances()[pod] for pod in stays] == before, (
        "neither the first learner nor the syncer was restarted"
    )
    assert [line["event"] for line in job.log()].count("start") == 1
    assert job.audit().ok


@pytest.mark.slow_tier
def test_raised_steps_make_a_complete_job_continue(make):
    job = make("more", steps=5).apply()
    job.until_condition("Complete", 240)
    job.change(steps=30)
    job.until_condition("Complete", SOON, status="False")
    job.until_condition("Complete", 240)
    assert job.status()["step"] == 30


def test_a_finished_job_is_removed_after_its_time(make):
    job = make("brief", steps=3, runPolicy={"ttlSecondsAfterFinished": 10}).apply()
    kubectl, namespace = job.cluster.kubectl, job.namespace
    job.until_condition("Complete", 240)
    until(lambda: kubectl.get("dlj", job.name, namespace) is None, SOON, expected="the job is gone")
    until(lambda: not job.children() and not job.pods(), SOON, expected="and all that it had")


def test_cleanup_policy_all_leaves_nothing_in_the_cluster(make):
    """cleanupPolicy All: after the end no child is left, and the job still reports how it ended."""
    job = make("clean", steps=3, runPolicy={"cleanupPolicy": "All"}).apply()
    job.until_condition("Complete", 240)
    until(lambda: not job.children() and not job.pods(), 180, expected="no child is left",
          details=job.details)  # fmt: skip
    assert job.status()["state"] == "Complete"
    assert job.status()["step"] == 3


def test_a_job_beyond_its_deadline_fails_and_frees_its_pods(make):
    job = make("late", runPolicy={"activeDeadlineSeconds": 15})
    own_program(job, "import time; time.sleep(1e6)").apply()
    job.until_condition("Failed", SOON, reason="DeadlineExceeded")
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)


def test_a_learner_that_was_refused_for_good_fails_the_job(make):
    """Exit code 78; the condition has the program's last log line, and it is not restarted."""
    job = own_program(make("no"), "import sys; print('the model does not fit'); sys.exit(78)")
    job.apply()
    failed = job.until_condition("Failed", SOON, reason="LearnerRefused")
    assert "eu/0" in failed["message"]
    assert "the model does not fit" in failed["message"]
    kept = until_kept(job)
    assert "LearnerRefused" in dict(job.events())
    assert last_messages(kept) == FORGOTTEN or "the model does not fit" in last_messages(kept)
    job.delete()
    until(lambda: not job.pods(), SOON, expected="it goes with its job", details=job.details)


def test_a_failed_jobs_failed_pods_stay_without_resources_until_it_is_resumed(make):
    """A quota of one pod's CPU is free again while the failed pod is kept."""
    job = make("keeps", regions={"eu": 1, "us": 1}, runPolicy={"learnerRestartLimit": 1})
    own_program(job, MENDABLE).apply()
    job.until_condition("Failed", 2 * SOON, reason="LearnerRestartLimit")
    kept = until_kept(job)
    kubectl, name = job.cluster.kubectl, kept["metadata"]["name"]
    assert last_messages(kept) == FORGOTTEN or "out of luck" in last_messages(kept)
    chosen = f"diloco.dev/job={job.name},diloco.dev/role=failed-learner"
    assert f"[pod/{name}/main]" in kubectl("logs", "-l", chosen, "--prefix", "-n", job.namespace)
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "10"}},
    }  # fmt: skip
    kubectl("apply", "-n", job.namespace, "-f", "-", stdin=json.dumps(quota))
    used = until(
        lambda: kubectl.get("resourcequota", "pods", job.namespace).get("status", {}).get("used"),
        SOON, expected="the quota counts", details=job.details,
    )  # fmt: skip
    assert used["pods"] == "0"

    job.change(runPolicy={"suspend": True, "learnerRestartLimit": 1})
    job.until_condition("Suspended", SOON)
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)
    job.change(learner={"env": [{"name": "MENDED", "value": "1"}]})
    job.change(runPolicy={"suspend": False})
    until(lambda: _running(job, name), SOON, expected=f"a new {name} runs", details=job.details)


def last_messages(pod: Object) -> str:
    """
    Of its last two containers: the kubelet may have started one more before the job failed.

    The kubelet keeps one ended container. Without the first one, the pod states no message: the condition does.
    """
    [main] = [status for status in pod["status"]["containerStatuses"] if status["name"] == "main"]
    ends = [main.get(state, {}).get("terminated") or {} for state in ("state", "lastState")]
    if main["restartCount"] and not ends[1]:
        return FORGOTTEN
    return " | ".join(str(end.get("message")) for end in ends)


FORGOTTEN = "the kubelet has removed the container that failed"
MENDABLE = """
import os, time
if "MENDED" not in os.environ:
    raise SystemExit("out of luck")
time.sleep(1e6)
"""


def until_kept(job):
    """Wait until only ended pods of failed learners are left; the first of them."""

    def kept():
        pods = job.pods()
        ended = pods and all(pod["status"]["phase"] == "Failed" for pod in pods)
        return pods if ended else None

    pods = until(kept, SOON, expected="only ended pods are left", details=job.details)
    assert {pod["metadata"]["labels"]["diloco.dev/role"] for pod in pods} == {"failed-learner"}
    assert [owner["kind"] for pod in pods for owner in pod["metadata"]["ownerReferences"]] == [
        "DiLoCoJob"
    ] * len(pods)
    return pods[0]


def test_a_learner_that_crashes_too_often_fails_the_job(make):
    job = make("fall", runPolicy={"learnerRestartLimit": 2})
    own_program(job, "raise SystemExit('out of luck')").apply()
    failed = job.until_condition("Failed", SOON, reason="LearnerRestartLimit")
    assert "eu/0" in failed["message"]


def test_deleted_pods_do_not_count_as_crashes(make):
    job = make("drained", runPolicy={"learnerRestartLimit": 0})
    own_program(job, "import time; time.sleep(1e6)").apply()
    kubectl, pod = job.cluster.kubectl, job.pod_of("eu/0")
    for _ in range(3):
        until(lambda: _running(job, pod), SOON, expected=f"{pod} runs", details=job.details)
        kubectl.delete("pod", pod, job.namespace, "--force", "--grace-period=0")
    until(lambda: _running(job, pod), SOON, expected=f"{pod} runs", details=job.details)
    assert job.condition("Failed")["status"] == "False"


def test_evictions_are_limited_and_do_not_count_as_crashes(make):
    """As a drain of nodes asks: one learner may go, the quorum stays; and nothing counts."""
    job = make("drain", learners=2, sync={"quorum": 1}, runPolicy={"learnerRestartLimit": 0})
    job.apply().until_condition("LearnersReady", 240)
    before = job.instances()
    until(
        lambda: job.disruptions_allowed() == 1,
        60,
        expected="one disruption is allowed",
        details=job.details,
    )
    job.evict(job.pod_of("eu/0"))
    with pytest.raises(KubectlError, match="disruption budget"):
        job.evict(job.pod_of("eu/1"))
    until(
        lambda: job.instances().get(job.pod_of("eu/0"), before[job.pod_of("eu/0")])
        != before[job.pod_of("eu/0")],
        SOON, expected="another pod takes its place", details=job.details,
    )  # fmt: skip
    job.until_condition("LearnersReady", SOON)
    assert job.instances()[job.pod_of("eu/1")] == before[job.pod_of("eu/1")]
    assert job.condition("Failed")["status"] == "False"


def test_a_changed_template_reaches_one_learner_after_the_other_and_not_the_syncer(make):
    job = make("change", learners=2).apply()
    job.until_condition("LearnersReady", 240)
    before = job.instances()
    env = [*job.manifest["spec"]["learner"]["env"], {"name": "NEW", "value": "1"}]
    job.change(learner={"env": env})
    missing: list[int] = []

    def replaced() -> bool:
        ready = [pod for pod in job.pods("learner") if _is_ready(pod)]
        missing.append(2 - len(ready))
        return not missing[-1] and all(_has_env(pod, "NEW") for pod in ready)

    until(replaced, 2 * SOON, expected="both have the new variable", details=job.details, every=0.2)
    assert max(missing) == 1, "one at a time"
    assert job.instances()[job.syncer_pod()] == before[job.syncer_pod()]


@pytest.mark.slow_tier
def test_a_reverted_image_heals_the_job(make):
    """The learner that got the image that does not exist comes back; the other never notices."""
    job = make("oops", learners=2, sync={"quorum": 1}).apply()
    job.until_condition("LearnersReady", 240)
    before = job.instances()
    job.change(learner={"image": "localhost/no-such-image:1"})
    pulled = job.until_condition("LearnersReady", SOON, status="False", reason="PodTrouble")
    assert "localhost/no-such-image:1" in pulled["message"], pulled
    step = job.until_step(job.step() + 10, SOON)
    witness = [pod for pod, instance in job.instances().items() if before.get(pod) == instance]
    assert len(witness) == 2, "the syncer and one learner"
    assert job.syncer_pod() in witness
    job.change(learner={"image": None})
    job.until_condition("LearnersReady", SOON)
    job.until_step(step + 10, SOON)
    assert {pod: job.instances()[pod] for pod in witness} == {pod: before[pod] for pod in witness}
    assert job.condition("Failed")["status"] == "False"
    assert job.audit().ok


def test_a_job_of_another_controller_is_left_alone(make):
    other = {"managedBy": "example.com/other"}
    jobs = [make("theirs", **other).apply(), make("theirs-too", runPolicy=other).apply()]
    steadily(
        lambda: not any(job.children() or job.status() for job in jobs),
        10, expected="nothing is written",
    )  # fmt: skip


def test_a_job_is_deleted_at_once_while_the_operator_is_down(make):
    job = make("gone").apply()
    job.until_condition("SyncerReady", SOON)
    kubectl = job.cluster.kubectl
    kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=0")
    try:
        job.delete("--timeout=20s")
        until(lambda: not job.children(), SOON, expected="the garbage collector took its children")
    finally:
        kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=1")
        kubectl("rollout", "status", DEPLOYMENT, "-n", NAMESPACE, "--timeout=120s")
    steadily(lambda: not job.children(), 10, expected="the operator brings nothing back")


def test_a_namespace_with_a_running_job_is_deleted(make):
    job = make("inside").apply()
    job.until_condition("SyncerReady", SOON)
    job.cluster.kubectl.delete("namespace", job.namespace, "", "--timeout=120s")


def test_an_upgrade_of_the_chart_restarts_no_learner(eu, fleet, make):
    """Not even with new default images: a running job keeps those that it began with."""
    job = make("kept").apply()
    job.until_condition("LearnersReady", 240)
    instances = job.instances()
    install(eu, fleet.images, "--set", "images.worker.tag=next", podLabels={"release": "next"})
    step = job.step()
    job.until_step(step + 20, SOON)
    assert job.instances() == instances
    install(eu, fleet.images)


def test_an_uninstall_leaves_nothing_and_does_not_hang(eu, fleet, make):
    """The CRD and the jobs stay (crds.keep); jobs keep training, and are deleted without the operator."""
    job = make("orphan").apply()
    job.until_condition("LearnersReady", 240)
    kubectl = eu.kubectl
    eu.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "2m")
    try:
        step = job.step()
        until(lambda: not _of_release(kubectl), 30, expected="the release's last pod has ended")
        job.until_step(step + 5, SOON)
        job.delete("--timeout=20s")
        until(
            lambda: not job.children(), SOON, expected="its children are gone", details=job.details
        )
    finally:
        install(eu, fleet.images)


@pytest.mark.slow_tier
def test_pods_that_the_api_server_refuses_are_reported_with_its_message(eu, fleet):
    """
    Pod Security refuses the learner's pod, and a quota that of the syncer.

    A StatefulSet has no condition for it: its controller reports the refusal in an Event only.
    """
    with fleet.namespace("pods-refused", eu, **RESTRICTED) as namespace:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}}
        eu.kubectl.apply({**quota, "spec": {"hard": {"pods": "0"}}}, namespace=namespace)
        until(
            lambda: eu.kubectl.get("resourcequota", "full", namespace)["status"].get("used"),
            30, expected="the quota is in force",
        )  # fmt: skip
        fields = {"hostPID": True}
        job = Job(eu, namespace, manifest("barred", steps=9, regions={"eu": 1}, pod_fields=fields))
        job.apply()
        syncer = job.until_condition("SyncerReady", SOON, status="False", reason="PodTrouble")
        assert "Deployment barred-syncer: FailedCreate: " in syncer["message"]
        ready = job.until_condition("LearnersReady", SOON, status="False", reason="PodTrouble")
        assert "StatefulSet barred-eu: FailedCreate: " in ready["message"]
        for message, expected in (
            (syncer["message"], "exceeded quota: full, requested: pods=1, used: pods=0"),
            (ready["message"], "violates PodSecurity"),
        ):
            assert expected in message
            until(
                lambda expected=expected: any(
                    why == "PodTrouble" and expected in text for why, text in job.events()
                ),
                30, expected="an Event reports it as well", details=job.details,
            )  # fmt: skip
        job.delete()


@pytest.mark.slow_tier
def test_jobs_in_the_network_of_one_node_share_no_port(eu, fleet):
    """The scheduler keeps pods of the same ports apart; a job with ports of its own has a place."""
    if not eu.local:
        pytest.skip("given clusters may have several nodes")
    fields = {
        **fleet.images.pod_fields, "hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet",
    }  # fmt: skip
    ports = {"health": 18080, "metrics": 19090}
    with fleet.namespace("host-network", eu) as namespace:

        def started(name: str, learners: int, **learner) -> Job:
            body = manifest(
                name, steps=10**6, regions={"eu": learners}, pod_fields=fields, learner=learner
            )
            return Job(eu, namespace, body).apply()

        usual = started("usual", 2)
        found = usual.until_condition("LearnersReady", SOON, status="False", reason="PodTrouble")
        assert "free ports" in found["message"]
        own = started("own", 1, ports=ports)
        own.until_condition("LearnersReady", SOON)
        for job in (usual, own):
            job.until_step(3, SOON)
        nodes = {pod["spec"]["nodeName"] for job in (usual, own) for pod in _running_learners(job)}
        assert len(nodes) == 1


def test_named_namespaces_are_enough_for_an_operator(eu, fleet, make, tmp_path):
    """
    watchNamespaces and rbac.tlsSecretNamespaces: Roles there, no ClusterRole, and a job with TLS and
    NetworkPolicies completes.
    """
    tls = {"mode": "Secret", "secretName": "named-tls"}
    job = make("named", steps=5, regions={"eu": 1, "us": 1}, tls=tls)
    made = DiLoCoJob.model_validate(job.manifest)
    write_certs(made, tmp_path, now=datetime.now(UTC), namespace=job.namespace)
    eu.kubectl.apply(yaml.safe_load((tmp_path / "all.yaml").read_text()), namespace=job.namespace)
    assert eu.kubectl.get("clusterrole", CLUSTER_ROLE, "") is not None
    install(
        eu, fleet.images, watchNamespaces=[job.namespace],
        rbac={"tlsSecretNamespaces": [job.namespace]}, jobs={"networkPolicy": {"enabled": True}},
    )  # fmt: skip
    try:
        assert eu.kubectl.get("clusterrole", CLUSTER_ROLE, "") is None
        with fleet.namespace("elsewhere", eu) as other:
            copy = Job(eu, other, job.manifest).apply()
            job.apply()
            job.until_condition("Complete", 240)
            assert not copy.status(), "a job of another namespace is not its own"
            copy.delete()
            policy = ("networkpolicy", "named-us", job.namespace)
            assert eu.kubectl.get(*policy) is not None
            job.change(regions=[{"name": "eu", "learners": 1}])
            until(lambda: eu.kubectl.get(*policy) is None, 60, expected="its region is gone")
            # The operator that stops meanwhile no longer has a right to its NetworkPolicies.
            job.delete()
    finally:
        install(eu, fleet.images)


def _of_release(kubectl) -> list[str]:
    kinds = (
        "deployments,services,serviceaccounts,configmaps,secrets,pods,roles,rolebindings,"
        "clusterroles,clusterrolebindings,networkpolicies"
    )
    chosen = "app.kubernetes.io/instance=diloco,app.kubernetes.io/managed-by=Helm"
    return str(
        kubectl("get", kinds, "-A", "-l", chosen, "-o", "name", "--ignore-not-found")
    ).split()


def _merged(job: Job) -> set[str]:
    """Learners that were part of a merge."""
    return {member["learner"] for merge in job.merges() for member in merge["members"]}


def _limits(job: Job) -> list[dict[str, int]]:
    """The numbers of learners that the syncer took over while it ran."""
    return [line["learners"] for line in job.log() if line["event"] == "limits"]


def _is_ready(pod) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
    )


def _has_env(pod, name: str) -> bool:
    main = next(c for c in pod["spec"]["containers"] if c["name"] == "main")
    return name in {variable["name"] for variable in main.get("env", ())}


def _running_learners(job: Job) -> list[dict[str, Any]]:
    return [pod for pod in job.pods("learner") if pod["status"]["phase"] == "Running"]


def _running(job: Job, pod: str) -> bool:
    return any(
        p["metadata"]["name"] == pod and p["status"].get("phase") == "Running"
        for p in job.pods("learner")
    )
