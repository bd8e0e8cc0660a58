"""A reconciler of one job against an API server in memory; the test defines its decisions."""

from datetime import UTC, datetime

from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.decide.decisions import Decisions
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.settings import Faults
from diloco_operator.workqueue import Key

KEY = Key("ns", "a")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SCOPE = OperatorScope(worker_image="worker", syncer_image="syncer")


def job(**spec):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"namespace": "ns", "name": "a"},
        "spec": {
            "steps": 5,
            "learner": {"recipe": {"name": "gpt"}},
            "regions": [{"name": "eu", "learners": 2}],
            **spec,
        },
    }


class ReconciledCluster:
    """A reconciler whose decisions are `self.decide`."""

    def __init__(self, api, tmp_path, scope=SCOPE, faults=None, installation=""):
        configuration = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
        self.api = api
        self.now = NOW
        self.observation = []
        self.decide = lambda observation: Decisions()
        self.metrics = Metrics()
        self.reconciler = Reconciler(
            Cluster(configuration, manager=scope.manager),
            scope,
            metrics=self.metrics,
            decide=self._decide,
            installation=installation,
            reporter="pod-1",
            faults=faults or Faults(),
            now=lambda: self.now,
        )

    def _decide(self, observation, scope, now):
        assert now == self.now
        self.observation.append(observation)
        return self.decide(observation)

    def run(self):
        self.observation.clear()
        return self.reconciler.reconcile(KEY)

    def child(self, name="a-spec", applied="1", **data):
        uid = self.api.get("dilocojobs", "a")["metadata"]["uid"]
        owner = {"apiVersion": "diloco.dev/v1alpha1", "kind": "DiLoCoJob", "name": "a"}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": "ns",
                "name": name,
                "labels": {"diloco.dev/job": "a"},
                "annotations": {"diloco.dev/applied": applied},
                "ownerReferences": [{**owner, "uid": uid, "controller": True}],
            },
            "data": data or {"x": "1"},
        }

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def reasons(api):
    """Condition of the stored job → status, reason, message."""
    conditions = api.get("dilocojobs", "a")["status"]["conditions"]
    return {
        condition["type"]: (condition["status"], condition["reason"], condition["message"])
        for condition in conditions
    }
