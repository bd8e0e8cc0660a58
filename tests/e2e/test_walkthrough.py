"""
A new platform engineer with docs/operations.md: the shell blocks of the page, taken from the page, on an empty cluster.

From `helm install` to a cluster with nothing of it left. What the page promises to show is asserted after each block.
A block that this walk does not run has a line in ELSEWHERE.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from diloco_testing.clusters import provision
from diloco_testing.clusters.faults import silent_kubelet
from diloco_testing.clusters.install import NAMESPACE, RELEASE, Images
from diloco_testing.clusters.job import CHILDREN, Job, manifest
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.pair import refresh_volumes
from diloco_testing.clusters.provision import ROOT, Cluster
from diloco_testing.shell_blocks import Place, shell_blocks

PAGE = (ROOT / "docs/operations.md").read_text()
BLOCKS = shell_blocks(PAGE)
SOON = 120.0
STEPS = 40
NAME = "stdlib-gpt"
OTHER = "second"
REGISTRY = "registry.example.com/team"

WALKED = {
    Place("Install", 1),
    Place("One cluster", 1),
    Place("One cluster", 2),
    Place("More and fewer learners", 1),
    Place("Upgrade", 1),
    Place("Labels for other tools", 1),
    Place("Replicas, and a second operator", 1),
    Place("Back up the syncer's volume", 1),
    Place("When no snapshot can be read", 1),
    Place("A failed job", 1),
    Place("Keep volumes", 1),
    Place("Uninstall", 1),
}
"""Blocks that the walk runs."""

ELSEWHERE = {
    Place("One cluster", 3): "a job with a failed learner: test_lifecycle.py",
    Place("Several regions", 1): "two clusters: test_two_clusters.py, with `write_certs` instead of the command; "
    "the command: tests/unit/cli/test_certs.py",
    Place("Several regions", 2): "kind and Docker: run by no test of this machine",
    Place("Lost nodes", 1): "a second node and a machine that is switched off: run by no test of this machine",
    Place("When the syncer's volume is gone", 1): "test_volumes.py",
    Place("Move the syncer to another cluster", 1): "two clusters: test_drills.py",
    Place("Move the syncer to another cluster", 2): "two clusters: test_drills.py",
    Place("Move the syncer to another cluster", 3): "two clusters: test_drills.py, with the pod of the page",
    Place("Move the syncer to another cluster", 4): "two clusters: test_drills.py",
}  # fmt: skip
"""Blocks that it does not run: why, and the test that does what they do."""


def test_every_shell_block_of_the_page_is_run_here_or_has_a_reason():
    assert not WALKED & ELSEWHERE.keys()
    assert set(BLOCKS) == WALKED | ELSEWHERE.keys()
    named = {
        name for why in ELSEWHERE.values() for name in re.findall(r"(?<![\w/])test_\w+\.py", why)
    }
    assert all((Path(__file__).parent / name).exists() for name in named)


class Person:
    """A user with a shell, the programs that the page needs, and a checkout with a smaller example."""

    def __init__(self, cluster: Cluster, images: Images, folder: Path) -> None:
        """`docker` only gives the node images of buildah by the names that are pushed."""
        self.folder = folder
        self.ran: set[Place] = set()
        programs = folder / "bin"
        kubectl = cluster.kubectl.script(programs)
        helm = cluster.entered(cluster.program("helm"), "--kubeconfig", str(cluster.kubeconfig))
        _program(programs / "helm", f'exec {shlex.join(helm)} "$@"')
        (programs / "diloco").symlink_to(Path(sys.executable).with_name("diloco"))
        node = ("ctr", "-a", str(cluster.folder / "run/containerd.sock"), "-n", "k8s.io")
        cases = "".join(
            f"{target}) image={getattr(images, target).name} ;; "
            for target in ("operator", "syncer", "worker")
        )
        _program(
            programs / "docker",
            '[ "$1" = push ] || exit 0',
            "target=${2##*/diloco-}",
            f"case ${{target%%:*}} in {cases}esac",
            f'exec {shlex.join(node)} images tag --force "$image" "$2"',
        )
        self._environment = {**os.environ, "PATH": f"{kubectl.parent}:{os.environ['PATH']}"}
        (folder / "charts").symlink_to(ROOT / "charts")
        self.write_example(STEPS, images)

    def write_example(self, steps: int, images: Images) -> None:
        """examples/01-text/job.yaml: the names of the true one, fewer learners, a smaller model."""
        path = self.folder / "examples/01-text/job.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Few snapshots: those from which the job will be taken back must stay.
        syncer = {"checkpoint": {"everySteps": 1000, "keep": 9}}
        body = manifest(
            NAME, steps=steps, sync={"quorum": 1}, syncer=syncer, pod_fields=images.pod_fields
        )
        path.write_text(json.dumps(body))

    def run(self, text: str, *, seconds: float = 400.0) -> str:
        """What these lines print; each has to succeed."""
        print(f"$ {text}")
        done = subprocess.run(
            ["sh", "-euc", text], env=self._environment, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def sentence(self, text: str) -> str:
        """A command in the text of the page, with NAME as placeholder."""
        assert f"`{text}`" in PAGE, text
        return self.run(text.replace("NAME", NAME))

    def block(self, heading: str, replaced: Mapping[str, str] | None = None) -> str:
        """The first shell block below a heading, with other text where it has a placeholder."""
        place = Place(heading, 1)
        return self._block(place, replaced or {})

    def second_block(self, heading: str) -> str:
        """The one after it."""
        return self._block(Place(heading, 2), {})

    def _block(self, place: Place, replaced: Mapping[str, str]) -> str:
        text = BLOCKS[place]
        for old, new in replaced.items():
            assert old in text, f"{place}: there is no {old}"
            text = text.replace(old, new)
        self.ran.add(place)
        return self.run(text)


def _program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def cluster(fleet) -> Iterator[Cluster]:
    """A cluster with nothing in it."""
    if provision.given():
        pytest.skip("the walk begins on an empty cluster, and removes every job")
    made = fleet.cluster("walk")
    fleet.namespaces.append((made, "default"))  # for the report of a failure
    yield made
    fleet.namespaces.remove((made, "default"))
    fleet.end("walk")


def test_a_newcomer_gets_from_an_empty_cluster_to_an_empty_cluster_with_the_page_alone(
    cluster, fleet, tmp_path
):
    person = Person(cluster, fleet.images, tmp_path)
    job = Job(cluster, "default", {"metadata": {"name": NAME}})
    install(person, cluster)
    first_job(person, job)
    model_and_log(person, job)
    person.write_example(10**6, fleet.images)
    person.run("kubectl apply -f examples/01-text/job.yaml")
    job.until_condition("Complete", SOON, status="False")
    job.until_condition("LearnersReady", SOON)
    job.until_step(STEPS + 5, SOON)
    more_learners(person, job)
    upgrade(person, job)
    back_up(person, job)
    suspend_and_resume_from_an_older_snapshot(person, job)
    refused_learner(person, job)
    lost_node(person, job)
    failed_job(person, job)
    keep_the_volume(person, job)
    hand_over(person, job)
    uninstall(person, cluster)
    assert person.ran == WALKED


def install(person: Person, cluster: Cluster) -> None:
    output = person.block("Install")
    assert re.search(r"Phase: +Succeeded", output)
    pods = cluster.kubectl.list("pods", NAMESPACE)
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert images == {f"{REGISTRY}/diloco-operator:0.1.0"}


def first_job(person: Person, job: Job) -> None:
    """A watch that the person ends after some seconds, instead of after two hours."""
    watch = "kubectl get dlj -w"
    output = person.block("One cluster", {watch: f"timeout 5 {watch} || [ $? = 124 ]"})
    assert "condition met" in output
    assert job.status()["state"] == "Complete"
    shown = person.sentence("kubectl get dlj").splitlines()
    assert shown[0].split()[:3] == ["NAME", "STATE", "STEP"]
    assert shown[1].split()[:2] == [NAME, "Complete"]
    kinds = {(each["kind"], each["metadata"]["name"]) for each in job.children()}
    for region in ("eu", "us"):
        for kind in ("StatefulSet", "Service", "PodDisruptionBudget"):
            assert (kind, f"{NAME}-{region}") in kinds
    for kind in ("Deployment", "Service", "PersistentVolumeClaim"):
        assert (kind, f"{NAME}-syncer") in kinds
    assert ("ServiceAccount", NAME) in kinds


def model_and_log(person: Person, job: Job) -> None:
    person.second_block("One cluster")
    model = (person.folder / "model/model.safetensors").read_bytes()
    assert hashlib.sha256(model).hexdigest() == job.status()["model"]["sha256"]
    assert f"{STEPS} merges of" in person.sentence("diloco audit run")


def more_learners(person: Person, job: Job) -> None:
    """Two learners instead of seven: a pod is added, and nothing else restarts."""
    before = job.instances()
    person.block("More and fewer learners", {'"value": 7': '"value": 2'})
    until(lambda: len(job.pods("learner")) == 3, SOON, expected="one more learner")
    refresh_volumes(job, job.syncer_pod())

    def merged() -> bool:
        last = job.merges()[-1]
        return "us/1" in {member["learner"] for member in last["members"]}

    until(merged, SOON, expected="the new learner is merged", details=job.details)
    job.until_condition("LearnersReady", SOON)
    assert "Training" in person.sentence("diloco status --job NAME")
    assert person.sentence("kubectl logs stdlib-gpt-us-0")
    assert {pod: job.instances()[pod] for pod in before} == before


def upgrade(person: Person, job: Job) -> None:
    """Values stay; nothing of the job restarts, not even for new labels."""
    before, step = job.instances(), job.step()
    assert re.search(r"REVISION: 2\b", person.block("Upgrade"))
    assert re.search(r"REVISION: 3\b", person.block("Labels for other tools"))
    values = person.run(f"helm get values {RELEASE} --namespace {NAMESPACE}")
    assert f"registry: {REGISTRY}" in values
    labels = {"cost.example.com/center": "42", "team": "vision"}

    def labelled() -> bool:
        return all(labels.items() <= each["metadata"]["labels"].items() for each in job.children())

    until(labelled, SOON, expected="every child has the labels", details=job.details)
    person.run(f"helm rollback {RELEASE} 2 --namespace {NAMESPACE} --wait")
    job.until_step(step + 20, SOON)
    assert job.instances() == before


def back_up(person: Person, job: Job) -> None:
    person.block("Back up the syncer's volume")
    with tarfile.open(person.folder / f"{NAME}.tar") as copy:
        names = copy.getnames()
    assert "./events.jsonl" in names
    assert any(re.fullmatch(r"\./snapshots/.*-step-\d+\.json", name) for name in names)
    job.until_step(job.step() + 5, SOON)


def suspend_and_resume_from_an_older_snapshot(person: Person, job: Job) -> None:
    """The file for it takes effect when the syncer starts the next time."""
    names = person.run(f"kubectl exec deployment/{NAME}-syncer -- ls /var/lib/diloco/snapshots")
    older = min(int(step) for step in re.findall(r"-step-(\d+)\.json", names) if step != "0")
    assert older < job.step()
    # A run on this machine: tests/unit/local and tests/unit/syncer.
    person.block(
        "When no snapshot can be read",
        {"diloco resume --from-snapshot": "true", "90": str(older)},
    )
    suspend = """kubectl patch dlj/stdlib-gpt --type merge -p '{"spec": {"runPolicy": {"suspend": true}}}'"""
    person.sentence(suspend)
    job.until_condition("Suspended", SOON)
    until(lambda: not job.pods(), SOON, expected="all pods are deleted", details=job.details)
    assert job.status()["state"] == "Suspended"
    assert job.cluster.kubectl.get("pvc", f"{NAME}-syncer") is not None
    person.run(suspend.replace("true", "false"))
    job.until_condition("LearnersReady", SOON)
    starts = [line for line in job.log() if line["event"] == "start"]
    assert starts[-1]["step"] == older
    # The first snapshot after the start deletes the file.
    job.until_step(older + 20, SOON)
    names = person.run(
        f"kubectl exec deployment/{NAME}-syncer -- ls /var/lib/diloco/snapshots "
        "/var/lib/diloco/snapshots/set-aside"
    )
    assert "from-snapshot" not in names.split()
    assert job.audit().ok


def refused_learner(person: Person, job: Job) -> None:
    """A learner that exits with code 78 fails alone; corrected, it takes part again."""

    def configure(**fields: object) -> None:
        job.change(regions=[{"name": "eu", "learners": 1}, {"name": "us", "learners": 1, **fields}])

    configure(config={"width": 32})  # another model
    failed = job.until_condition("LearnersReady", SOON, status="False", reason="LearnersFailed")
    assert "us/0 (LearnerRefused: " in failed["message"]
    described = person.sentence("kubectl describe dlj/NAME")
    assert re.search(r"Warning +LearnersFailed", described), described
    assert job.status()["state"] == "Degraded"
    step = job.step()
    job.until_step(step + 5, SOON)
    configure()
    job.until_condition("LearnersReady", SOON)
    until(
        lambda: any(
            member["learner"] == "us/0" and line["step"] > step
            for line in job.merges()[-3:] for member in line["members"]
        ),
        SOON, expected="the learner is merged again", details=job.details,
    )  # fmt: skip


def lost_node(person: Person, job: Job) -> None:
    """The only one: its pods are named, one is removed by force, and all run again when the kubelet responds."""
    pod = job.pod_of("us/0")
    first, step = job.instances()[pod], job.step()
    [node] = job.cluster.kubectl.list("nodes", "")
    with silent_kubelet(job.cluster):
        trouble = job.until_condition("LearnersReady", SOON, status="False", reason="PodTrouble")
        assert f"its node {node['metadata']['name']} does not respond" in trouble["message"]
        assert 'see "Lost nodes" in docs/operations.md' in trouble["message"]
        assert "`kubectl delete pod --force`" in PAGE
        person.run(f"kubectl delete pod --force {pod}")
        until(lambda: job.instances().get(pod, first) != first, SOON, expected="another pod")
    job.until_condition("LearnersReady", SOON)
    job.until_step(step + 5, SOON)


def failed_job(person: Person, job: Job) -> None:
    """The condition has the reason; corrected, the job continues from the last snapshot."""
    job.change(runPolicy={"activeDeadlineSeconds": 1})
    job.until_condition("Failed", SOON, reason="DeadlineExceeded")
    described = person.sentence("kubectl describe dlj/NAME")
    assert re.search(r"Warning +DeadlineExceeded", described), described
    logs = (
        """kubectl logs -n diloco-system deployment/diloco | grep '"job": "default/stdlib-gpt"'"""
    )
    assert all(json.loads(line) for line in person.sentence(logs).splitlines())
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)
    step = job.status()["step"]
    job.change(runPolicy={"activeDeadlineSeconds": None})
    assert job.condition("Failed")["status"] == "True", "it stays failed until it is suspended"
    person.block("A failed job", {"NAME": NAME})
    job.until_condition("LearnersReady", SOON)
    assert job.condition("Failed")["status"] == "False"
    job.until_step(step + 5, SOON)
    assert job.audit().ok


def keep_the_volume(person: Person, job: Job) -> None:
    """The job releases its claim, without a restart, and takes it back."""

    def owners() -> list[object]:
        claim = job.cluster.kubectl.get("pvc", f"{NAME}-syncer")
        return list((claim or {})["metadata"].get("ownerReferences") or [])

    before = job.instances()
    assert owners()
    job.change(syncer={"storage": {"whenDeleted": "Retain"}})
    person.block("Keep volumes", {"NAME": NAME})
    assert not owners()
    job.change(syncer={"storage": {"whenDeleted": "Delete"}})
    until(owners, SOON, expected="the job owns its claim again", details=job.details)
    assert job.instances() == before


def hand_over(person: Person, job: Job) -> None:
    """The CRD and the job stay without an operator; an installation under another name takes both."""
    before, step = job.instances(), job.step()
    assert job.status()["operator"] == f"{NAMESPACE}/{RELEASE}"
    person.run(f"helm uninstall {RELEASE} --namespace {NAMESPACE}")
    job.until_step(step + 5, SOON)
    person.block("Replicas, and a second operator", {"NAME": NAME})
    person.run(
        f"helm install {OTHER} charts/diloco --namespace {NAMESPACE} --take-ownership --wait "
        f"--set images.registry={REGISTRY}"
    )
    until(
        lambda: job.status().get("operator") == f"{NAMESPACE}/{OTHER}-diloco", 300,
        expected="the other operator takes the job within five minutes", details=job.details,
    )  # fmt: skip
    job.until_condition("LearnersReady", SOON)
    assert job.instances() == before


def uninstall(person: Person, cluster: Cluster) -> None:
    """Nothing of the project is left but the namespace that helm made."""
    names = {
        f"helm uninstall {RELEASE}": f"helm uninstall {OTHER}",
        f"lease {RELEASE}": f"lease {RELEASE} {OTHER}-diloco",
    }
    person.block("Uninstall", names)
    until(lambda: not _left(cluster), SOON, expected="nothing is left",
          details=lambda: str(_left(cluster)))  # fmt: skip
    assert "diloco" not in cluster.kubectl("get", "crd", "-o", "name")
    assert cluster.kubectl.get("namespace", NAMESPACE, "") is not None


def _left(cluster: Cluster) -> list[str]:
    """Objects of jobs or of the release, in all namespaces."""
    kinds = (
        f"{CHILDREN},pods,secrets,networkpolicies,roles,rolebindings,clusterroles,"
        "clusterrolebindings,leases"
    )
    found = cluster.kubectl("get", kinds, "-A", "-o", "json")
    return [
        f"{each['kind']} {each['metadata'].get('namespace', '')}/{each['metadata']['name']}"
        for each in json.loads(found)["items"]
        if any(word in json.dumps(each["metadata"]) for word in ("diloco.dev", NAME, NAMESPACE))
        and each["metadata"]["name"] not in ("kube-root-ca.crt", "default")
    ]
