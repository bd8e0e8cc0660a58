"""
A job under the pure operator: an API server, controllers and a syncer made of plain values.

`OperatedJob.reconcile()` is one reconcile: observe, decide, carry out. Everything else that a cluster
does (defaults, uids, pods, their readiness) happens when the test asks for it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from diloco.rpc.certificates import CertificateFacts
from diloco.rpc.identity import server_name
from diloco_job.plan import run_spec
from diloco_job.types import DiLoCoJob
from diloco_operator.decide.decisions import Decisions, decide
from diloco_operator.decide.kept_pods import ROLE
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.state.observation import (
    Answer,
    LearnerAnswer,
    Observation,
    Refusal,
    Unreachable,
)
from diloco_operator.state.pending_events import stuck_objects
from diloco_operator.state.queues import JOB_UID, queued_uids
from diloco_operator.state.stored_job import StoredJob

Json = dict[str, Any]

SCOPE = OperatorScope(worker_image="diloco/worker:1", syncer_image="diloco/syncer:1")
REFUSED = '{"reason": "Refused", "message": "hidden size 4, expected 8"}'
START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def manifest(name: str = "a", **spec: Any) -> Json:
    """A job as the API server stores it; 2 learners in eu, 2 in us, unless `spec` changes that."""
    defaults: Json = {
        "steps": 2000,
        "sync": {"quorum": 2},
        "learner": {"recipe": {"name": "gpt", "config": {}}},
        "regions": [{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}],
    }
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {
            "name": name,
            "namespace": "work",
            "uid": f"uid-of-{name}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": "2026-03-01T11:59:59Z",
        },
        "spec": {**defaults, **spec},
    }


@dataclass
class OperatedJob:
    """One cluster with one job in it."""

    job: Json = field(default_factory=manifest)
    scope: OperatorScope = SCOPE
    now: datetime = START
    children: dict[tuple[str, str], Json] = field(default_factory=dict)
    pods: dict[str, Json] = field(default_factory=dict)
    syncer: Answer | Unreachable | None = None
    last_answer: datetime | None = None
    certificate: CertificateFacts | None = None
    secret: Json | None = None
    """Metadata of the Secret with it."""
    foreign: tuple[Json, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    events: list[tuple[str, str]] = field(default_factory=list)
    """Type and reason of all Events so far."""
    removed: bool = False
    reported_events: list[Json] = field(default_factory=list)
    """Events of Kubernetes about children and pods."""
    workloads: list[Json] = field(default_factory=list)
    """Kueue's, of the objects that wait in a queue."""
    asked: list[str] = field(default_factory=list)
    """Names of the objects whose Events the last reconcile read."""
    _uids: int = 0

    # ------------------------------------------------------------------ the operator

    def observation(self) -> Observation:
        stuck = stuck_objects(
            self.job, list(self.children.values()), list(self.pods.values()), self.now
        )
        self.asked = [item["metadata"]["name"] for item in stuck]
        uids = [item["metadata"]["uid"] for item in stuck]
        return Observation(
            stored=StoredJob.parse(_copied(self.job)),
            children=tuple(_copied(list(self.children.values()))),
            foreign=self.foreign,
            pods=tuple(_copied(list(self.pods.values()))),
            events=tuple(
                event for event in self.reported_events if event["involvedObject"]["uid"] in uids
            ),
            workloads=tuple(
                workload
                for workload in self.workloads
                if workload["metadata"]["labels"][JOB_UID] in queued_uids(self.pods.values())
            ),
            syncer=self.syncer,
            last_answer=self.last_answer,
            certificate=self.certificate,
            secret=_copied(self.secret),
            refusals=self.refusals,
        )

    def decide(self) -> Decisions:
        return decide(self.observation(), self.scope, self.now)

    def reconcile(self, passed_seconds: float = 0.0) -> Decisions:
        """One reconcile, some time after the last."""
        self.now += timedelta(seconds=passed_seconds)
        if isinstance(self.syncer, Answer):
            self.syncer = replace(self.syncer, at=self.now)
            self.last_answer = self.now
        decisions = self.decide()
        for body in decisions.patch:
            self.patch(body)
        for wanted in decisions.apply:
            try:
                self.apply(wanted)
            except (TypeError, AttributeError, KeyError) as error:
                # The user's podTemplate has a shape that no API server accepts.
                child = f"{wanted['kind']} {wanted['metadata']['name']}"
                self.refusals += (Refusal(child=child, message=str(error)),)
        if self.refusals and decisions.apply:
            # As in the shell: the status reports this reconcile.
            report = self.decide()
            decisions = replace(decisions, status=report.status, events=report.events)
        for ref in decisions.delete:
            if ref.kind == "Pod":
                assert self.pods.pop(ref.name)["metadata"]["uid"] == ref.uid
                continue
            child = self.children[ref.kind, ref.name]
            assert child["metadata"]["uid"] == ref.uid
            del self.children[ref.kind, ref.name]
        if decisions.status is not None:
            self.job["status"] = copy.deepcopy(decisions.status)
        self.events += [(event.type, event.reason) for event in decisions.events]
        self.removed = self.removed or decisions.remove_job
        return decisions

    def settle(self, most: int = 12) -> int:
        """Run operator and controllers in turn until the operator is idle; the number of turns."""
        for turn in range(most):
            if is_idle(self.reconcile()):
                return turn
            self.run_controllers()
        raise AssertionError(f"the operator is not idle after {most} turns: {self.decide()}")

    # ------------------------------------------------------------------ the API server

    def apply(self, wanted: Json) -> None:
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        old = self.children.get((kind, name))
        new = _stored(wanted)
        self._uids += old is None
        new["metadata"]["uid"] = old["metadata"]["uid"] if old else f"uid-{self._uids}"
        generation = old["metadata"]["generation"] if old else 0
        changed = old is None or old.get("spec") != new.get("spec")
        new["metadata"]["generation"] = generation + changed
        new["status"] = old["status"] if old else {}
        self.children[kind, name] = new

    def patch(self, body: Json) -> None:
        """Server-side apply of some fields of an object that others made."""
        metadata = body["metadata"]
        if body["kind"] == "Secret":
            assert self.secret is not None
            assert self.secret["metadata"]["uid"] == metadata["uid"]
            owners = self.secret["metadata"].setdefault("ownerReferences", [])
            owners.extend(metadata["ownerReferences"])
            return
        pod = self.pods[metadata["name"]]
        assert pod["metadata"]["uid"] == metadata["uid"]
        pod["metadata"]["labels"].update(metadata["labels"])
        pod["metadata"]["ownerReferences"].extend(metadata["ownerReferences"])
        pod["spec"] = {**pod["spec"], **body["spec"]}

    def change(self, **spec: Any) -> None:
        """The user edits the manifest."""
        self.job["spec"] = {**self.job["spec"], **spec}
        self.job["metadata"]["generation"] += 1

    # ------------------------------------------------------------------ the controllers

    def run_controllers(self, ready: Callable[[Json], bool] = lambda pod: True) -> None:
        """
        Create the pods of StatefulSets and Deployments; new ones become ready if `ready`.

        A pod with another template is replaced, unless the update strategy is OnDelete.
        """
        self.release_pods()
        wanted: dict[str, Json] = {}
        kept: set[str] = set()
        for child in self.children.values():
            if child["kind"] in ("StatefulSet", "Deployment"):
                first = child["spec"].get("ordinals", {}).get("start", 0)
                for ordinal in range(first, first + child["spec"]["replicas"]):
                    pod = _pod(child, ordinal)
                    wanted[pod["metadata"]["name"]] = pod
                    if child["spec"].get("updateStrategy") == {"type": "OnDelete"}:
                        kept.add(pod["metadata"]["name"])
        for name, pod in wanted.items():
            old = self.pods.get(name)
            if old is not None and (name in kept or _is_released(old)):
                continue
            if old is None or old["spec"] != pod["spec"] or old["metadata"] != pod["metadata"]:
                set_ready(pod, ready(pod))
                self.pods[name] = pod
        self.pods = {
            name: pod for name, pod in self.pods.items() if name in wanted or _is_released(pod)
        }
        self.count_pods()

    def release_pods(self) -> None:
        """
        The controllers release the pods that their selectors no longer select, and the kubelet ends those
        whose deadline has passed.
        """
        for pod in self.pods.values():
            if _is_released(pod):
                metadata = pod["metadata"]
                owners = [
                    owner for owner in metadata["ownerReferences"] if "controller" not in owner
                ]
                metadata["ownerReferences"] = owners
                pod["status"]["phase"] = "Failed"

    def count_pods(self) -> None:
        """Update the status of workloads."""
        for child in self.children.values():
            if child["kind"] not in ("StatefulSet", "Deployment"):
                continue
            uid = child["metadata"]["uid"]
            mine = [pod for pod in self.pods.values() if _controller(pod) == uid]
            revision = _revision(child)
            num_ready = sum(map(_is_ready, mine))
            child["status"] = {
                "observedGeneration": child["metadata"]["generation"],
                "replicas": len(mine),
                "readyReplicas": num_ready,
                **self._availability(child, num_ready),
                "currentRevision": revision,
                "updateRevision": revision,
            }

    def _availability(self, child: Json, num_ready: int) -> Json:
        """The condition Available of a Deployment, with the time of its last change."""
        if child["kind"] != "Deployment":
            return {}
        status = "True" if num_ready >= child["spec"]["replicas"] else "False"
        before = [
            entry for entry in child["status"].get("conditions", ()) if entry["type"] == "Available"
        ]
        same = [entry for entry in before if entry["status"] == status]
        now = {"type": "Available", "status": status, "lastTransitionTime": self.now.isoformat()}
        return {"conditions": same or [now]}

    def report_event(self, item: Json, reason: str, message: str, kind: str = "Warning") -> None:
        """A controller or the kubelet reports an Event about an object."""
        self.reported_events.append({
            "type": kind, "reason": reason, "message": message,
            "involvedObject": {"uid": item["metadata"]["uid"]},
            "lastTimestamp": self.now.isoformat(timespec="seconds"),
        })  # fmt: skip

    def pod(self, name: str) -> Json:
        return self.pods[name]

    # ------------------------------------------------------------------ the syncer

    def answers(
        self, state: str = "Training", gone: tuple[str, ...] = (),
        ejected: tuple[str, ...] = (), **values: Any,
    ) -> None:  # fmt: skip
        """Set the syncer's answer; every learner of the manifest trains but `gone` and `ejected`."""
        job = DiLoCoJob.model_validate(self.job)
        names = (
            f"{region.name}/{i}" for region in job.spec.regions for i in range(region.learners)
        )
        learners = tuple(
            LearnerAnswer(
                name=name,
                state="Gone" if name in gone else "Ejected" if name in ejected else "Training",
                seconds_since_heard=-1.0 if name in gone else 0.5,
            )
            for name in names
        )
        defaults: Json = {
            "job": job.metadata.name,
            "epoch": 1,
            "step": 100,
            "tokens": 5000,
            "spec_hash": run_spec(job).hash,
            "quorum": job.spec.sync.quorum,
            "seconds_since_merge": 1.0,
            "learners": learners,
        }
        self.syncer = Answer(at=self.now, state=state, **{**defaults, **values})

    def becomes_unreachable(self, reason: str = "ConnectionRefused") -> None:
        self.syncer = Unreachable(reason=reason, message="gRPC's message")

    # ------------------------------------------------------------------ assertions

    @property
    def status(self) -> Json:
        status: Json = self.job.get("status", {})
        return status

    def condition(self, kind: str) -> Json:
        found: Json = next(entry for entry in self.status["conditions"] if entry["type"] == kind)
        return found

    def reason(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        return self.condition(kind)["status"], self.condition(kind)["reason"]

    def replicas(self) -> dict[str, int]:
        """Name → replicas of all workloads."""
        return {
            name: child["spec"]["replicas"]
            for (kind, name), child in sorted(self.children.items())
            if kind in ("StatefulSet", "Deployment")
        }


def is_idle(decisions: Decisions) -> bool:
    """Whether nothing is written."""
    return not (
        decisions.patch
        or decisions.apply
        or decisions.delete
        or decisions.status
        or decisions.events
    )


def training(job: Json | None = None, **world: Any) -> OperatedJob:
    """A job whose learners all train."""
    return _trains(OperatedJob(job=job or manifest(), **world))


_TRAINING: dict[bytes, bytes] = {}
"""By the world before: many tests begin with the same one, and to settle it takes most of their time."""


def _trains(world: OperatedJob) -> OperatedJob:
    """This world when all of its learners train, computed once."""
    before = pickle.dumps(world)
    if before not in _TRAINING:
        world.settle()
        world.answers()
        world.settle()
        _TRAINING[before] = pickle.dumps(world)
    found: OperatedJob = pickle.loads(_TRAINING[before])
    return found


def certificate(job: str = "a", *regions: str, **facts: Any) -> CertificateFacts:
    """A valid certificate for these regions, and for the syncer."""
    return CertificateFacts(**{"regions": regions, "server_names": (server_name(job),)} | facts)


def trains_in(region: str, **spec: Any) -> OperatedJob:
    """A training job of two clusters, as the operator of one region has it; its syncer is in eu."""
    both = {
        "tls": {"mode": "Secret", "secretName": "s"},
        "syncer": {"region": "eu", "endpoint": "sync.example.org:7070"},
    }
    job = OperatedJob(job=manifest(**both, **spec), scope=replace(SCOPE, region=region))
    job.certificate = certificate("a", region)
    return _trains(job)


def set_ready(pod: Json, ready: bool) -> None:
    """The pod runs, and is ready or not."""
    pod["status"] = {
        "phase": "Running",
        # Of a pod that is not ready, the kubelet gives a reason; the control plane of a lost node does not.
        "conditions": [
            {
                "type": "Ready",
                "status": str(ready),
                **({} if ready else {"reason": "ContainersNotReady"}),
            }
        ],
        "containerStatuses": [
            {
                "name": "main",
                "image": pod["spec"]["containers"][0]["image"],
                "imageID": "sha256:1",
                "restartCount": 0,
                "ready": ready,
                "state": {"running": {}},
            }
        ],
    }


def main_of(pod: Json) -> Json:
    """Status of the container `main`."""
    main: Json = pod["status"]["containerStatuses"][0]
    return main


def _copied(value: Any) -> Any:
    """A copy of JSON, in a fraction of the time of copy.deepcopy."""
    return json.loads(json.dumps(value))


def refuse(pod: Json, code: int = 78, message: str = REFUSED) -> None:
    """The pod's learner ends with this exit code and termination message."""
    set_ready(pod, False)
    main_of(pod)["state"] = {
        "terminated": {"exitCode": code, "reason": "Error", "message": message}
    }


def restarted(pod: Json, count: int, code: int, reason: str = "Error", message: str = "") -> None:
    """The kubelet restarted the pod's container so often, the last time because it ended so."""
    set_ready(pod, False)
    main = main_of(pod)
    main["restartCount"] = count
    main["lastState"] = {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def _stored(wanted: Json) -> Json:
    """
    What an API server stores of an applied object: defaults added, empty text omitted.

    Raises:
        TypeError, AttributeError, KeyError: it has a shape that the server does not accept.
    """
    new: Json = _copied(wanted)
    template = new.get("spec", {}).get("template")
    if template is not None:
        template["spec"].setdefault("restartPolicy", "Always")
        template["spec"].setdefault("dnsPolicy", "ClusterFirst")
        for volume in template["spec"]["volumes"]:
            volume.update()
        for container in template["spec"]["containers"]:
            container["terminationMessagePath"] = "/dev/termination-log"
            container["image"] += ""
            for variable in container.get("env", ()):
                if variable.get("value") == "":
                    del variable["value"]
            for values in container.get("resources", {}).values():
                if isinstance(values, dict):
                    values.update({key: str(value) for key, value in values.items()})
    if new["kind"] == "Service":
        new["spec"].setdefault("clusterIP", "10.0.0.1")
        new["spec"].setdefault("sessionAffinity", "None")
    return new


def _pod(owner: Json, ordinal: int) -> Json:
    name = f"{owner['metadata']['name']}-{ordinal}"
    template = owner["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "labels": {
                **template["metadata"]["labels"],
                "controller-revision-hash": _revision(owner),
            },
            "ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True}],
        },
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }


def _revision(workload: Json) -> str:
    """Of the pod template."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _controller(pod: Json) -> str:
    owners = (owner for owner in pod["metadata"]["ownerReferences"] if owner.get("controller"))
    return next((str(owner["uid"]) for owner in owners), "")


def _is_released(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get("diloco.dev/role") == ROLE)


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
