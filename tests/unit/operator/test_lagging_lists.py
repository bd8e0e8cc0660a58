"""
Lists from the API server's cache may be old: the operator still ends where one ends that sees everything at once.

The cache is as old as it may be: as the newest version of the kind that the operator has written or listed, or
that its watch has delivered. Watches deliver what happened at random later times.
"""

import copy
import hashlib
import json
import random
from datetime import timedelta

import pytest

from diloco.v1 import syncer_pb2 as pb
from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.decide.decisions import decide
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.state.pods import REVISION
from diloco_operator.workqueue import Key
from diloco_testing.kubernetes.fake_api import GROUPS
from diloco_testing.kubernetes.operated_job import REFUSED
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, job, reasons
from diloco_testing.properties import seeds

KEY = Key("ns", "a")
WORKLOADS = ("statefulsets", "deployments")
CHILDREN = (
    *WORKLOADS,
    *(
        "configmaps",
        "services",
        "serviceaccounts",
        "poddisruptionbudgets",
        "persistentvolumeclaims",
    ),
)
RECIPE = {"recipe": {"name": "gpt"}}
TWO_PODS = {"command": ["python", "train.py"], "podsPerLearner": 2}
KINDS = {plural: kind for kinds in GROUPS.values() for plural, kind in kinds.items()}


def revision(workload):
    """Of the pod template."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Syncer:
    """Replies that all learners train; in place of the connections to syncers."""

    def __init__(self, api):
        self._api, self._last = api, None

    def ask(self, key, address):
        regions = self._api.get("dilocojobs", "a")["spec"]["regions"]
        learners = [f"{r['name']}/{i}" for r in regions for i in range(r["learners"])]
        states = [pb.LearnerStatus(name=name, state="Training") for name in learners]
        return pb.StatusReply(job="a", state="Training", step=3, quorum=1, learners=states)

    def answered(self, key, at):
        self._last = at

    def last_answer(self, key):
        return self._last

    def forget(self, key):
        self._last = None

    def known(self):
        return frozenset()

    def close(self):
        pass


class CachedCluster:
    """A job, its users, controllers and watches; `cache` as that of the API server in memory."""

    def __init__(self, api, tmp_path, cache):
        self.api, self.now, self.num_old = api, NOW, 0
        self.configuration = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
        self._cache, api.cache = cache, self.shown
        self.operator_starts()

    def shown(self, oldest, newest):
        version = self._cache(oldest, newest)
        self.num_old += version < newest
        return version

    def operator_starts(self):
        self.cluster = Cluster(self.configuration, manager="diloco-operator")
        self.reconciler = Reconciler(
            self.cluster,
            SCOPE,
            metrics=Metrics(),
            decide=lambda observation, scope, now: decide(observation, scope, now),
            now=lambda: self.now,
        )
        self.reconciler._observer._syncers = Syncer(self.api)

    def reconcile(self, seconds=5.0):
        self.now += timedelta(seconds=seconds)
        return self.reconciler.reconcile(KEY)

    def deliver(self, plural, version=None):
        """The watch of a kind delivers everything up to a version."""
        known = [
            number
            for number, _, of, _ in self.api._log
            if of == plural and (version is None or number <= version)
        ]
        if known:
            metadata = {"resourceVersion": str(known[-1])}
            self.cluster.saw({"metadata": metadata}, KINDS[plural])

    def change(self, **spec):
        self.api.edit("dilocojobs", "a", lambda item: item["spec"].update(spec))

    def run_controllers(self):
        """
        Pods of all workloads, which become ready; those of a former template are replaced, unless the
        operator replaces them.
        """
        wanted, kept = {}, set()
        for plural in WORKLOADS:
            for workload in self.api.all(plural):
                for ordinal in range(workload["spec"]["replicas"]):
                    pod = self.pod(workload, ordinal)
                    wanted[pod["metadata"]["name"]] = pod
                    if workload["spec"].get("updateStrategy") == {"type": "OnDelete"}:
                        kept.add(pod["metadata"]["name"])
        for pod in self.api.all("pods"):
            name = pod["metadata"]["name"]
            outdated = name in wanted and pod["spec"] != wanted[name]["spec"]
            if name not in wanted or (outdated and name not in kept):
                self.api.delete("pods", name)
        for name, pod in wanted.items():
            if self.api.get("pods", name) is None:
                self.api.create(pod)
        for plural in WORKLOADS:
            for workload in self.api.all(plural):
                number = workload["spec"]["replicas"]
                status = {
                    "observedGeneration": workload["metadata"]["generation"],
                    "replicas": number, "readyReplicas": number,
                    "currentRevision": revision(workload), "updateRevision": revision(workload),
                }  # fmt: skip
                self.api.edit(
                    plural,
                    workload["metadata"]["name"],
                    lambda item, status=status: item.update(status=status),
                )

    def pod(self, workload, ordinal):
        metadata, template = workload["metadata"], workload["spec"]["template"]
        ready = {"type": "Ready", "status": "True"}
        main = {"name": "main", "imageID": "x", "restartCount": 0, "state": {"running": {}}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "namespace": "ns",
                "name": f"{metadata['name']}-{ordinal}",
                "labels": {**template["metadata"]["labels"], REVISION: revision(workload)},
                "ownerReferences": [{"uid": metadata["uid"], "controller": True}],
            },
            "spec": copy.deepcopy(template["spec"]),
            "status": {"phase": "Running", "conditions": [ready], "containerStatuses": [main]},
        }

    def settle(self):
        """Everything is delivered, and nothing else happens."""
        for _ in range(20):
            before = len(self.api.writes())
            self.run_controllers()
            for plural in (*CHILDREN, "pods"):
                self.deliver(plural)
            self.reconcile(60.0)
            changed = [r for r in self.api.writes()[before:] if "/status?" not in r.path]
            if not changed:
                return
        raise AssertionError(f"still writes: {[r.path for r in changed]}")

    def children(self):
        """What the operator made, without what the server and other writers add."""
        return {
            (plural, item["metadata"]["name"]): (
                item["metadata"]["annotations"],
                item["metadata"]["labels"],
                {k: v for k, v in item.items() if k in ("spec", "data")},
            )
            for plural in CHILDREN
            for item in self.api.all(plural)
        }

    def is_well(self):
        """Nothing has failed, so no condition may claim that."""
        conditions = reasons(self.api)
        assert conditions["Accepted"][:2] == ("True", "Valid")
        assert conditions["SyncerReady"][1] != "VolumeGone"
        assert conditions["Failed"][0] == "False"


def user_changes(world, rng):
    """Something that a user or another writer does."""
    match rng.randrange(6):
        case 0:
            names = rng.choice([["eu"], ["eu", "us"]])
            world.change(regions=[{"name": n, "learners": rng.randrange(1, 4)} for n in names])
        case 1:
            world.change(runPolicy={"suspend": rng.random() < 0.5})
        case 2:
            learner = world.api.get("dilocojobs", "a")["spec"]["learner"]
            world.change(learner={**learner, "env": [{"name": "A", "value": str(rng.random())}]})
        case 3:
            world.change(steps=rng.randrange(10, 10**6))
        case 4:
            plural = rng.choice([p for p in CHILDREN if p != "persistentvolumeclaims"])
            if found := world.api.all(plural):
                world.api.delete(plural, rng.choice(found)["metadata"]["name"])
        case _:
            plural = rng.choice(("statefulsets", "deployments"))
            if found := world.api.all(plural):
                name = rng.choice(found)["metadata"]["name"]
                world.api.edit(plural, name, lambda item: item["spec"].update(replicas=7))


@pytest.mark.parametrize("seed", seeds(2, range(40)))
def test_whatever_lists_show_the_job_ends_as_if_they_showed_the_newest(api, tmp_path, seed):
    rng = random.Random(seed)
    caches = [lambda oldest, newest: oldest, rng.randint]
    api.create(job(learner=rng.choice([RECIPE, TWO_PODS])))
    world = CachedCluster(api, tmp_path, rng.choice(caches))
    world.reconcile()
    claim = api.get("persistentvolumeclaims", "a-syncer")["metadata"]["uid"]
    for _ in range(30):
        match rng.randrange(8):
            case 0 | 1:
                user_changes(world, rng)
            case 2:
                world.run_controllers()
            case 3:
                world.deliver(rng.choice((*CHILDREN, "pods")), rng.randint(1000, api._version))
            case 4 if rng.random() < 0.3:
                world.operator_starts()
            case _:
                world.reconcile(rng.choice([1.0, 5.0, 30.0]))
                world.is_well()
    assert world.num_old > 30
    world.change(runPolicy={"suspend": False})
    world.settle()
    world.is_well()
    assert reasons(api)["LearnersReady"][:2] == ("True", "AllTraining")
    assert api.get("persistentvolumeclaims", "a-syncer")["metadata"]["uid"] == claim
    found = world.children()

    for plural in (*CHILDREN, "pods"):
        for item in api.all(plural):
            if item["metadata"]["name"] in {m["metadata"]["name"] for m in api.all(plural)}:
                api.delete(plural, item["metadata"]["name"])
    api.edit("dilocojobs", "a", lambda item: item.pop("status"))
    calm = CachedCluster(api, tmp_path, lambda oldest, newest: newest)
    calm.settle()
    assert calm.children() == found


def test_a_resumed_job_does_not_fail_again_because_of_a_pod_that_is_gone(api, tmp_path):
    api.create(job(sync={"quorum": 2}))
    world = CachedCluster(api, tmp_path, lambda oldest, newest: oldest)
    world.settle()

    def end(item):
        item["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "x"}]
        ended = {"terminated": {"exitCode": 78, "message": REFUSED}}
        item["status"]["containerStatuses"][0]["state"] = ended

    api.edit("pods", "a-eu-0", end)
    world.deliver("pods")
    for _ in range(3):
        world.reconcile()
    assert reasons(api)["Failed"][:2] == ("True", "LearnerRefused")
    world.change(runPolicy={"suspend": True})
    world.reconcile()
    world.run_controllers()
    assert not api.all("pods")
    assert reasons(api)["Suspended"][0] == "True"
    world.change(runPolicy={"suspend": False})
    for _ in range(3):
        world.reconcile()
    assert reasons(api)["Failed"][:2] == ("False", "NotFailed")
    world.settle()
    assert reasons(api)["LearnersReady"][:2] == ("True", "AllTraining")
