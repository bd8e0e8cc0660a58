"""
Two operators, each with an API server in memory, and one real syncer between them over mutual TLS.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest

from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.decide.decisions import decide
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.workqueue import Key
from diloco_testing.kubernetes.fake_api import FakeApi
from diloco_testing.network.certificates import Authority, write
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

KEY = Key("ns", "j")


def here(region, endpoint):
    """The syncer runs on this machine, whose address no manifest can name."""

    class Here(OperatorScope):
        def syncer_address(self, job, namespace):
            return endpoint

    return Here(region=region, worker_image="w", syncer_image="s")


class Region:
    """An operator with its cluster; time passes when the test advances it."""

    def __init__(self, name, folder, api, endpoint, tls):
        self.api, self.now = api, datetime.now(UTC)
        self.reconciler = Reconciler(
            Cluster(connect(kubeconfig=api.kubeconfig(folder / name)), manager="diloco-operator"),
            here(name, endpoint),
            metrics=Metrics(), decide=decide, now=lambda: self.now,
        )  # fmt: skip
        data = {"tls.crt": tls.certificate, "tls.key": tls.key, "ca.crt": tls.authority}
        api.create({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": "ns", "name": "s"},
            "data": {file: base64.b64encode(text).decode() for file, text in data.items()},
        })  # fmt: skip
        api.create({
            "apiVersion": "diloco.dev/v1alpha1", "kind": "DiLoCoJob",
            "metadata": {"namespace": "ns", "name": "j"},
            "spec": {
                "steps": 10**6,
                "learner": {"recipe": {"name": "gpt"}},
                "regions": [{"name": "eu", "learners": 4}, {"name": "us", "learners": 1}],
                "syncer": {"region": "eu", "endpoint": "syncer.example:7070"},
                "tls": {"mode": "Secret", "secretName": "s"},
            },
        })  # fmt: skip

    def reconcile(self, after_seconds=1.0, *, condition="Failed"):
        """Once; returns a condition."""
        self.now += timedelta(seconds=after_seconds)
        self.reconciler.reconcile(KEY)
        conditions = self.api.get("dilocojobs", "j")["status"]["conditions"]
        return next(entry for entry in conditions if entry["type"] == condition)

    def reconcile_until(self, reason, *, condition="Failed", after=None):
        """
        Again and again, until a condition has this reason; a busy syncer is asked again. Returns it.

        Args:
            reason: of the condition.
            condition: its type.
            after: called before each time.
        """

        def reached():
            if after is not None:
                after()
            found = self.reconcile(30, condition=condition)
            return found if found["reason"] == reason else None

        return until(reached, expected=f"{condition}: {reason}")

    def policy(self, **fields):
        self.api.edit("dilocojobs", "j", lambda job: job["spec"].update(runPolicy=fields))

    def replicas(self, kind, name):
        return self.api.get(kind, name)["spec"]["replicas"]


def test_a_region_fails_and_resumes_with_the_one_that_has_the_syncer(tmp_path):
    authority = Authority()
    files = write(tmp_path / "tls", authority.make(regions=["eu"]))
    with FakeApi() as apart, FakeApi() as together:
        with RealSyncer(tmp_path / "job", make_spec(), tls=files) as syncer:
            tls = authority.make(regions=["eu"])
            eu = Region("eu", tmp_path, together, syncer.endpoint, tls)
            us = Region(
                "us", tmp_path, apart, syncer.endpoint, authority.make(regions=["us"], names=[])
            )
            for region in (eu, us):
                assert region.reconcile()["status"] == "False"
            eu.api.edit(
                "deployments", "j-syncer", lambda item: item.update(status={"readyReplicas": 1})
            )
            eu.policy(activeDeadlineSeconds=60)
            failed = eu.reconcile(61)
            assert (failed["status"], failed["reason"]) == ("True", "DeadlineExceeded")
            eu.reconcile()
            assert eu.replicas("deployments", "j-syncer") == 1, "it answers for a while"
            assert eu.replicas("statefulsets", "j-eu") == 0

            condition = us.reconcile_until("SyncerRegionFailed", after=eu.reconcile)
            assert condition["status"] == "True"
            assert failed["message"] in condition["message"]
            us.reconcile()
            assert us.replicas("statefulsets", "j-us") == 0

        eu.reconcile(120)
        assert eu.replicas("deployments", "j-syncer") == 0
        assert us.reconcile(600)["status"] == "True", "no process answers"

        eu.policy(suspend=True)
        assert eu.reconcile()["status"] == "False"
        eu.policy(suspend=False)
        eu.reconcile()
        assert eu.replicas("deployments", "j-syncer") == 1
        with syncer:
            until(lambda: us.reconcile(30)["status"] == "False", expected="it follows")
            us.reconcile()
            assert us.replicas("statefulsets", "j-us") == 1
        for region in (eu, us):
            region.reconciler.close()


def test_a_region_whose_learners_all_fail_is_named_where_the_syncer_is(tmp_path):
    authority = Authority()
    files = write(tmp_path / "tls", authority.make(regions=["eu"]))
    with (
        FakeApi() as apart,
        FakeApi() as together,
        RealSyncer(tmp_path / "job", make_spec(), tls=files) as syncer,
    ):
        eu = Region("eu", tmp_path, together, syncer.endpoint, authority.make(regions=["eu"]))
        us = Region(
            "us", tmp_path, apart, syncer.endpoint, authority.make(regions=["us"], names=[])
        )
        eu.reconcile()
        eu.api.edit(
            "deployments", "j-syncer", lambda item: item.update(status={"readyReplicas": 1})
        )
        us.reconcile()
        owner = us.api.get("statefulsets", "j-us")["metadata"]["uid"]
        us.api.create(refused_pod("j-us-0", owner))
        us.reconcile()
        condition = eu.reconcile_until("RegionMissing", condition="QuorumMet", after=us.reconcile)
        assert "region us failed: LearnerRefused: all its learners failed" in condition["message"]
        assert "hidden size 4, expected 8" in condition["message"]

        us.api.edit("pods", "j-us-0", lambda pod: pod.update(status={"phase": "Running"}))
        us.reconcile()
        eu.reconcile_until("Starting", condition="QuorumMet", after=us.reconcile)
        for region in (eu, us):
            region.reconciler.close()


def test_a_job_of_which_each_region_loses_some_learners_fails_in_all_of_them(tmp_path):
    """One of four and one of one: each region alone leaves the quorum of four."""
    authority = Authority()
    files = write(tmp_path / "tls", authority.make(regions=["eu"]))
    with (
        FakeApi() as apart,
        FakeApi() as together,
        RealSyncer(tmp_path / "job", make_spec(), tls=files) as syncer,
    ):
        eu = Region("eu", tmp_path, together, syncer.endpoint, authority.make(regions=["eu"]))
        us = Region(
            "us", tmp_path, apart, syncer.endpoint, authority.make(regions=["us"], names=[])
        )
        for region in (eu, us):
            region.api.edit("dilocojobs", "j", lambda job: job["spec"].update(sync={"quorum": 4}))
            region.reconcile()
        eu.api.edit(
            "deployments", "j-syncer", lambda item: item.update(status={"readyReplicas": 1})
        )
        eu.api.create(refused_pod("j-eu-1", eu.api.get("statefulsets", "j-eu")["metadata"]["uid"]))
        assert eu.reconcile()["status"] == "False", "four of five are left"
        us.api.create(refused_pod("j-us-0", us.api.get("statefulsets", "j-us")["metadata"]["uid"]))
        assert us.reconcile()["status"] == "False"

        failed = eu.reconcile_until("LearnersFailed", after=us.reconcile)
        assert failed["status"] == "True"
        assert failed["message"].startswith("3 learners are left (quorum: 4): region us: ")
        assert "learner eu/1: hidden size 4, expected 8" in failed["message"]
        condition = us.reconcile_until("SyncerRegionFailed", after=eu.reconcile)
        assert "3 learners are left (quorum: 4)" in condition["message"]
        for region in (eu, us):
            region.reconciler.close()


def refused_pod(name, owner):
    """A pod of a StatefulSet whose learner ended with exit code 78."""
    message = '{"reason": "Refused", "message": "hidden size 4, expected 8"}'
    end = {"exitCode": 78, "reason": "Error", "message": message}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": "ns", "name": name, "labels": {"diloco.dev/job": "j"},
            "ownerReferences": [{"uid": owner, "controller": True}],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "main", "state": {"terminated": end}}],
        },
    }  # fmt: skip
