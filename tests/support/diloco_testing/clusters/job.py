"""A DiLoCoJob in a cluster: the actions and views of a user."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from diloco.journal.audit import Audit, audit
from diloco_testing.clusters.kubectl import KubectlError, Object, until
from diloco_testing.clusters.provision import Cluster
from diloco_testing.clusters.volumes import on_this_machine

TINY = {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 1, "slowdown": 50,
        "data": "stdlib"}  # fmt: skip
"""
A model whose step takes some 5 ms of a core, and 245 ms of rest. With what links and the syncer do for it, a step of
two learners took 46 ms of a busy core, and most jobs make more steps than the tests wait for.
"""

CHILDREN = "statefulsets,deployments,services,configmaps,persistentvolumeclaims,serviceaccounts,poddisruptionbudgets"


def manifest(
    name: str,
    *,
    steps: int,
    regions: Mapping[str, int] | None = None,
    pod_fields: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Object:
    """
    A small text job.

    Args:
        name: of the job.
        steps: T.
        regions: learners by region; two regions of one learner if left out.
        pod_fields: podTemplate.spec of the learners.
        spec: more fields of spec; `sync` and `learner` are laid over those here.
    """
    learner = {
        "recipe": {"name": "gpt", "config": dict(TINY)},
        "checkpoint": {"everySteps": 50, "keep": 2},
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        **({"podTemplate": {"spec": dict(pod_fields)}} if pod_fields else {}),
    }
    body = {
        "steps": steps,
        "seed": 7,
        "sync": {"fragments": 8, "interval": 8, **spec.pop("sync", {})},
        "learner": {**learner, **spec.pop("learner", {})},
        "regions": [{"name": k, "learners": n} for k, n in (regions or {"eu": 1, "us": 1}).items()],
        "syncer": {
            "storage": {"size": "1Gi"},
            "checkpoint": {"everySteps": 16, "keep": 3},
            **spec.pop("syncer", {}),
        },
        **spec,
    }
    return copy.deepcopy(
        {
            "apiVersion": "diloco.dev/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": name},
            "spec": body,
        }
    )


_LIVING = ("SyncerReady", "LearnersReady", "QuorumMet", "Complete")
"""Conditions that a job which failed does not have again, unless it is resumed."""


class Job:
    """A job in one cluster."""

    def __init__(self, cluster: Cluster, namespace: str, manifest: Object) -> None:
        """Nothing is applied yet."""
        self.cluster = cluster
        self.namespace = namespace
        self.manifest = manifest
        self.name = str(manifest["metadata"]["name"])

    def apply(self) -> Job:
        """`kubectl apply` of the manifest as it is now."""
        self.cluster.kubectl.apply(self.manifest, namespace=self.namespace)
        return self

    def change(self, **spec: Any) -> None:
        """Change fields of spec (a merge patch)."""
        self.cluster.kubectl.patch("dilocojob", self.name, {"spec": spec}, self.namespace)

    def delete(self, *flags: str) -> None:
        """Delete the job, and wait until it is deleted unless a flag changes that."""
        self.cluster.kubectl.delete("dilocojob", self.name, self.namespace, *flags)

    # --- as the API server has it

    def object(self) -> Object:
        """The stored job; KubectlError: there is none."""
        found = self.cluster.kubectl.get("dilocojob", self.name, self.namespace)
        if found is None:
            raise KubectlError(f"there is no job {self.namespace}/{self.name}")
        return found

    def status(self) -> Object:
        """Its status, {} before the first."""
        return dict(self.object().get("status") or {})

    def condition(self, kind: str) -> Object:
        """One condition; {} if it has none."""
        return next((c for c in self.status().get("conditions", ()) if c["type"] == kind), {})

    def until_condition(
        self, kind: str, seconds: float, *, status: str = "True", reason: str = ""
    ) -> Object:
        """Wait for a condition's status (and reason); returns the condition."""

        def seen() -> Object | None:
            found = {
                condition["type"]: condition for condition in self.status().get("conditions", ())
            }
            condition = found.get(kind, {})
            if condition.get("status") == status and (
                not reason or condition.get("reason") == reason
            ):
                return condition
            failed = found.get("Failed", {})
            never = status == "True" and kind in _LIVING and failed.get("status") == "True"
            assert not never, f"{self.name} failed: {failed['reason']}: {failed['message']}"
            return None

        wanted = f"{kind}={status}{f', {reason}' if reason else ''}"
        return dict(until(seen, seconds, expected=f"{self.name}: {wanted}", details=self.details))

    def until_step(self, step: int, seconds: float) -> int:
        """Wait until the syncer has done so many global steps; returns how many."""
        return int(
            until(
                lambda: (self.step() >= step) and self.step(),
                seconds,
                expected=f"{self.name}: step {step}",
                details=self.details,
            )
        )

    def events(self) -> list[tuple[str, str]]:
        """(reason, message) of the job's Events."""
        kubectl = self.cluster.kubectl
        found = kubectl.list("events", self.namespace)
        return [
            (event["reason"], event.get("message", ""))
            for event in found
            if event["involvedObject"].get("kind") == "DiLoCoJob"
            and event["involvedObject"].get("name") == self.name
        ]

    def children(self) -> list[Object]:
        """Everything labelled as the job's but pods."""
        return self.cluster.kubectl.list(CHILDREN, self.namespace, f"diloco.dev/job={self.name}")

    def pods(self, role: str = "", region: str = "") -> list[Object]:
        """Its pods that are not being deleted."""
        chosen = f"diloco.dev/job={self.name}"
        chosen += f",diloco.dev/role={role}" if role else ""
        chosen += f",diloco.dev/region={region}" if region else ""
        found = self.cluster.kubectl.list("pods", self.namespace, chosen)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def instances(self) -> dict[str, tuple[str, int]]:
        """Pod → (uid, restarts of its container): the same as before means nothing was restarted."""
        return {
            pod["metadata"]["name"]: (
                pod["metadata"]["uid"],
                sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ())),
            )
            for pod in self.pods()
        }

    # --- as the pods have it

    def syncer_pod(self) -> str:
        """Name of the running syncer pod; KubectlError: there is none."""
        return str(self._syncer_pod()["metadata"]["name"])

    def _syncer_pod(self) -> Object:
        for pod in self.pods("syncer"):
            if pod["status"].get("phase") == "Running":
                return pod
        raise KubectlError(f"{self.name} has no running syncer pod")

    def kept(self, path: str) -> bytes:
        """A file of the syncer's volume."""
        return self._file(self._syncer_pod(), path)

    def _file(self, pod: Object, path: str) -> bytes:
        """A file of a running pod's volume; `kubectl exec` takes 130 ms of CPU, and is polled."""
        path = f"/var/lib/diloco/{path}"
        if place := on_this_machine(self.cluster, pod, path):
            try:
                return place.read_bytes()
            except OSError as error:
                raise KubectlError(f"{pod['metadata']['name']}: {error}") from None
        name = pod["metadata"]["name"]
        command = ("exec", "-n", self.namespace, name, "-c", "main", "--", "cat", path)
        return self.cluster.kubectl.raw(*command)

    def log(self) -> list[Object]:
        """events.jsonl so far, whole lines."""
        return _lines(self.kept("events.jsonl"))

    def audit(self) -> Audit:
        """The audit of events.jsonl."""
        return audit(self.kept("events.jsonl").decode().splitlines())

    def merges(self) -> list[Object]:
        """The merges in it."""
        return [line for line in self.log() if line["event"] == "merge"]

    def step(self) -> int:
        """Global step of the last merge; 0 before the first or without a syncer."""
        try:
            merges = self.merges()
        except KubectlError:
            return 0
        return int(merges[-1]["step"]) if merges else 0

    def pod_of(self, learner: str) -> str:
        """Pod of a learner (podsPerLearner 1)."""
        return f"{self.name}-{learner.replace('/', '-')}"

    def steps(self, learner: str) -> list[Object]:
        """steps.jsonl of a learner, as its current pod has it; [] without a pod."""
        try:
            pod = self.cluster.kubectl.get("pod", self.pod_of(learner), self.namespace)
            return _lines(self._file(pod, "steps.jsonl")) if pod else []
        except KubectlError:
            return []

    def in_learner(self, learner: str, program: str) -> str:
        """Run Python in a learner's container."""
        return self.cluster.kubectl.exec(
            self.pod_of(learner), "python3", "-c", program, namespace=self.namespace
        )

    def disruptions_allowed(self, region: str = "eu") -> int:
        """How many learners of a region may be evicted now."""
        budget = self.cluster.kubectl.get("pdb", f"{self.name}-{region}", self.namespace)
        if budget is None:
            raise KubectlError(f"there is no PodDisruptionBudget of region {region}")
        return int(budget["status"]["disruptionsAllowed"])

    def evict(self, pod: str) -> None:
        """As a drain of its node does."""
        body = {
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    def details(self) -> str:
        """The job's status in short, for a failure's text."""
        try:
            status = self.status()
        except KubectlError as error:
            return str(error)
        rows = [
            f"  {c['type']}={c['status']} {c['reason']}: {c['message']}"
            for c in status.get("conditions", ())
        ]
        facts = {k: status.get(k) for k in ("state", "progress", "learners", "epoch")}
        return "\n".join([str(facts), *rows])


def when(text: str) -> datetime:
    """A time of events.jsonl or Kubernetes."""
    return datetime.fromisoformat(text).astimezone(UTC)


def steadily(what: Callable[[], Any], seconds: float, *, expected: str, every: float = 1.0) -> None:
    """The opposite of `until`: true at every look for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = what()
        assert seen, f"{expected}: {seen!r}"
        time.sleep(every)


def _lines(content: bytes) -> list[Object]:
    whole = content.decode().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]
