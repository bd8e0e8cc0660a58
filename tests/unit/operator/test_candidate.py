"""The thread of the leader election, against an API server in memory, over HTTP."""

import time
from contextlib import contextmanager

import pytest

from diloco_operator.cluster.client import ApiError, Cluster, connect
from diloco_operator.leader.candidate import Candidate
from diloco_operator.leader.election import Timing
from diloco_testing.kubernetes.fake_api import FakeApi, Fault

QUICK = Timing(lease_seconds=2, renew_seconds=1.0, retry_seconds=0.05)


def wait(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def api():
    with FakeApi() as made:
        yield made


class Process:
    """What an operator's process is to the election."""

    def __init__(self, api, tmp_path, name):
        configuration = connect(kubeconfig=api.kubeconfig(tmp_path / f"kubeconfig-{name}"))
        requests = Cluster(configuration, manager="test", only_try_seconds=1.0)
        self.log = []
        self.candidate = Candidate(
            requests, namespace="system", name="diloco", identity=name, timing=QUICK
        )
        self.cluster = Cluster(configuration, manager="test", may_write=self.candidate.may_write)

    def start(self):
        self.candidate.start(
            lead=lambda again: self.log.append("leads again" if again else "leads"),
            stand_by=lambda: self.log.append("stands by"),
        )
        return self


@contextmanager
def processes(api, tmp_path, *names):
    made = [Process(api, tmp_path, name) for name in names]
    try:
        yield made
    finally:
        for process in made:
            process.candidate.stop(release=False)


def holder(api):
    return ((api.get("leases", "diloco", "system") or {}).get("spec") or {}).get("holderIdentity")


def config_map():
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": "ns", "name": "a", "annotations": {}},
    }


def test_the_lease_is_what_other_tools_expect_of_one(api, tmp_path):
    with processes(api, tmp_path, "pod-1") as (first,):
        first.start()
        wait(first.candidate.may_write)
        body = api.get("leases", "diloco", "system")
        assert body["apiVersion"] == "coordination.k8s.io/v1"
        spec = body["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("pod-1", 0)
        assert spec["leaseDurationSeconds"] == 2
        assert len("2026-01-01T00:00:00.000000Z") == len(spec["renewTime"])
        acquired = spec["acquireTime"]
        wait(
            lambda: api.get("leases", "diloco", "system")["spec"]["renewTime"] != spec["renewTime"]
        )
        assert api.get("leases", "diloco", "system")["spec"]["acquireTime"] == acquired


def test_of_two_that_start_together_one_leads_and_only_that_one_can_write(api, tmp_path):
    with processes(api, tmp_path, "a", "b") as both:
        for process in both:
            process.start()
        wait(lambda: any(process.candidate.may_write() for process in both))
        leader, other = sorted(both, key=lambda process: not process.candidate.may_write())
        leader.cluster.apply(config_map())
        before = len(api.requests)
        with pytest.raises(ApiError, match="not the leader"):
            other.cluster.apply(config_map())
        with pytest.raises(ApiError, match="not the leader"):
            other.cluster.delete("ConfigMap", "ns", "a", uid="x")
        assert other.cluster.get("ConfigMap", "ns", "a") is not None, "reads are free"
        refused = [r for r in api.requests[before:] if "configmaps" in r.path and r.method != "GET"]
        assert not refused, "nothing was sent"
        assert (leader.log, other.log) == (["leads"], [])


def test_a_released_lease_is_taken_at_once(api, tmp_path):
    with processes(api, tmp_path, "a", "b") as (first, second):
        first.start()
        wait(first.candidate.may_write)
        second.start()
        first.candidate.stop(release=True)
        assert not first.candidate.may_write()
        assert first.log == ["leads", "stands by"]
        wait(second.candidate.may_write)
        assert holder(api) == "b"
        assert api.get("leases", "diloco", "system")["spec"]["leaseTransitions"] == 1


def test_a_lease_that_is_not_released_is_taken_when_it_expires(api, tmp_path):
    with processes(api, tmp_path, "a", "b") as (first, second):
        first.start()
        wait(first.candidate.may_write)
        second.start()
        first.candidate.stop(release=False)
        wait(second.candidate.may_write)
        assert not first.candidate.may_write()


def test_a_request_that_hangs_does_not_prolong_the_right_to_write(api, tmp_path):
    with processes(api, tmp_path, "a") as (first,):
        first.start()
        wait(first.candidate.may_write)
        api.faults.append(Fault("PUT", "leases", hang_seconds=30, times=10**6))
        api.faults.append(Fault("GET", "leases", hang_seconds=30, times=10**6))
        wait(lambda: not first.candidate.may_write())
        wait(lambda: first.log == ["leads", "stands by"])
        api.faults.clear()
        wait(first.candidate.may_write)
        assert first.log == ["leads", "stands by", "leads again"]


@pytest.mark.parametrize("status", [403, 409, 500])
def test_a_refused_request_is_tried_again(api, tmp_path, status):
    api.faults.append(Fault("PUT", "leases", status, times=3))
    with processes(api, tmp_path, "a") as (first,):
        first.start()
        wait(first.candidate.may_write)


def test_an_error_of_what_the_leader_begins_is_followed_by_another_attempt(api, tmp_path, caplog):
    with processes(api, tmp_path, "a") as (first,):
        log = []

        def begin(again):
            assert not again, "what it began is not complete"
            log.append("leads")
            if len(log) == 1:
                raise ValueError("a defect")

        first.candidate.start(lead=begin, stand_by=lambda: log.append("stands by"))
        wait(lambda: log == ["leads", "stands by", "leads"])
        assert first.candidate.may_write()
        seen = api.get("leases", "diloco", "system")["spec"]["renewTime"]
        wait(lambda: api.get("leases", "diloco", "system")["spec"]["renewTime"] != seen)
        assert log == ["leads", "stands by", "leads"], "it leads on"
        assert "a defect" in caplog.text


def test_a_replica_that_cannot_begin_does_not_keep_another_from_leading(api, tmp_path):
    with processes(api, tmp_path, "a", "b") as (first, second):
        log = []

        def fail(again):
            log.append("leads")
            if len(log) == 1:
                second.start()
            raise ValueError("a defect")

        first.candidate.start(lead=fail, stand_by=lambda: log.append("stands by"))
        wait(second.candidate.may_write)
        assert holder(api) == "b"
        assert log[:2] == ["leads", "stands by"]
        assert not first.candidate.may_write()
