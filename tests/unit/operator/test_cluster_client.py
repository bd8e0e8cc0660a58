"""The Kubernetes client against an API server in memory, over real HTTP."""

import itertools
import time
from unittest.mock import Mock

import pytest

from diloco.errors import ConfigError
from diloco_operator import __main__ as main
from diloco_operator.cluster import client as cluster_module
from diloco_operator.cluster.client import ApiError, Cluster, connect
from diloco_testing.kubernetes import fake_api
from diloco_testing.kubernetes.fake_api import FakeApi, Fault

JOB = {
    "apiVersion": "diloco.dev/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"namespace": "ns", "name": "a"},
    "spec": {"steps": 5},
}


@pytest.fixture
def api():
    with FakeApi() as made:
        yield made


@pytest.fixture
def cluster(api, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "RETRY_PAUSES", (0.01, 0.01))
    return dial(api, tmp_path)


def dial(api, tmp_path, token=""):
    found = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig", token))
    return Cluster(found, manager="diloco-operator")


def config_map(name="a-spec", data=None, **metadata):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": "ns", "name": name, "labels": {"diloco.dev/job": "a"}} | metadata,
        "data": data or {"x": "1"},
    }


def test_a_missing_object_is_none(cluster):
    assert cluster.job("ns", "a") is None
    assert cluster.get("Secret", "ns", "tls") is None


def test_lists_come_page_by_page_with_kind_and_api_version(api, cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "PAGE", 2)
    for number in range(5):
        api.create({**JOB, "metadata": {"namespace": "ns", "name": f"a{number}"}})
    api.create({**JOB, "metadata": {"namespace": "other", "name": "b"}})
    jobs = list(cluster.jobs())
    assert [job["metadata"]["name"] for job in jobs] == ["a0", "a1", "a2", "a3", "a4", "b"]
    assert {(job["kind"], job["apiVersion"]) for job in jobs} == {
        ("DiLoCoJob", "diloco.dev/v1alpha1")
    }
    assert [job["metadata"]["name"] for job in cluster.jobs(["other"])] == ["b"]


def test_children_are_those_with_the_jobs_label_of_every_kind(api, cluster):
    cluster.apply(config_map())
    api.create(config_map("foreign", labels={"diloco.dev/job": "other"}))
    api.create(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"namespace": "ns", "name": "a-eu", "labels": {"diloco.dev/job": "a"}},
            "spec": {},
        }
    )
    found = cluster.children("ns", "a", certificates=False)
    assert [(item["kind"], item["metadata"]["name"]) for item in found] == [
        ("StatefulSet", "a-eu"),
        ("ConfigMap", "a-spec"),
    ]


def asked_versions(api, kind="configmaps"):
    """The versions in the last request for a list of a job's objects; None: it was read from the store."""
    query = next(r.query for r in reversed(api.requests) if f"/{kind}?" in r.path)
    if "resourceVersion" not in query:
        return None
    assert "limit" not in query, "many servers do not serve pages from their cache"
    return query["resourceVersion"], query["resourceVersionMatch"]


def test_objects_of_a_job_come_from_the_servers_cache_but_no_older_than_what_is_known(api, cluster):
    def listed():
        cluster.children("ns", "a", certificates=False)
        cluster.pods("ns", "a")
        return (asked_versions(api) or ("",))[0]

    of_another = api.create(config_map(labels={"diloco.dev/job": "b"}))
    # Of another kind: the cache of ConfigMaps does not learn this version.
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"}})
    assert listed() == "", "the process before this one may have seen more than an old cache has"
    assert listed() == of_another["metadata"]["resourceVersion"]
    after = cluster.apply(config_map())
    assert listed() == after["metadata"]["resourceVersion"]
    assert asked_versions(api, "pods") == ("1", "NotOlderThan"), "no pod has a job"
    api.edit("configmaps", "a-spec", lambda item: item["data"].update(x="2"))
    newest = api.get("configmaps", "a-spec")
    cluster.saw(newest, "ConfigMap")
    cluster.saw(after, "ConfigMap")
    assert cluster.delete("ConfigMap", "ns", "a-spec", uid=after["metadata"]["uid"])
    cluster.saw({"metadata": {"resourceVersion": "of another kind of store"}}, "ConfigMap")
    assert listed() == newest["metadata"]["resourceVersion"]
    assert not [request for request in api.requests if request.status == 504]


def test_jobs_that_are_listed_while_the_first_list_is_under_way_are_read_from_the_store(
    api, cluster, monkeypatch
):
    api.create(config_map())
    asked = []
    lists = Cluster._list

    def beside(self, kind, namespace, selected, of):
        asked.append(selected)
        if len(asked) == 1:
            cluster.pods("ns", "b")
            cluster.begin()
        return lists(self, kind, namespace, selected, of=of)

    monkeypatch.setattr(Cluster, "_list", beside)
    cluster.pods("ns", "a")
    cluster.pods("ns", "a")
    every, single = {"labelSelector": "diloco.dev/job"}, {"labelSelector": "diloco.dev/job=b"}
    assert asked == [every, single, every], "the list from before this process led does not count"


def test_a_first_list_that_fails_is_repeated(api, cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "RETRY_PAUSES", ())
    api.faults.append(Fault("GET", "pods", 500))
    with pytest.raises(ApiError):
        cluster.pods("ns", "a")
    cluster.pods("ns", "a")
    assert asked_versions(api, "pods") is None


def test_the_first_list_of_a_process_that_begins_to_lead_is_read_from_the_store(api, cluster):
    """Whatever its watches have delivered: a standby's have run for hours."""

    def asked():
        cluster.children("ns", "a", certificates=False)
        return asked_versions(api)

    made = api.create(config_map())
    cluster.saw(made, "ConfigMap")
    assert asked() is None
    assert asked() == (str(api._version), "NotOlderThan")
    cluster.begin()
    cluster.saw(made, "ConfigMap")
    assert asked() is None
    assert asked() is not None


def test_the_leaders_first_list_is_read_from_the_store(api, cluster):
    stub = Mock()
    work = main._Work(cluster, stub, stub, stub, stub)
    cluster.pods("ns", "a")
    work.pause()
    work.begin()
    cluster.pods("ns", "a")
    assert asked_versions(api, "pods") is None
    work.pause()
    work.begin(again=True)
    cluster.pods("ns", "a")
    assert asked_versions(api, "pods") is not None, "no other process has written meanwhile"


def test_the_answer_to_a_delete_that_takes_its_time_is_a_new_version(api, cluster, monkeypatch):
    pod = api.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"}}
    )
    monkeypatch.setattr(FakeApi, "_precondition", lambda *_: pod)
    cluster.pods("ns", "a")
    assert cluster.delete("Pod", "ns", "p", uid=pod["metadata"]["uid"])
    cluster.pods("ns", "a")
    assert asked_versions(api, "pods")[0] == pod["metadata"]["resourceVersion"]


def test_a_cache_that_is_too_old_is_waited_for_once_a_minute(api, tmp_path):
    now = 1000.0
    found = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
    cluster = Cluster(found, manager="diloco-operator", clock=lambda: now)
    cluster.apply(config_map())
    cluster.children("ns", "a", certificates=False)
    cluster.saw({"metadata": {"resourceVersion": "999999"}}, "ConfigMap")  # etcd was restored
    assert cluster_module.RETRY_PAUSES, "no retry of a request that waited for 3 s"
    for seconds in (0, 30, 29):
        now += seconds
        assert len(cluster.children("ns", "a", certificates=False)) == 1
        assert asked_versions(api) is None, "from the store"
    too_large = [request for request in api.requests if request.status == 504]
    assert [request.query["resourceVersion"] for request in too_large] == ["999999"]
    now += 1
    assert len(cluster.children("ns", "a", certificates=False)) == 1
    assert asked_versions(api)[0] == str(api._version), "the newest of the list from the store"


def test_an_empty_list_may_be_null(api, cluster):
    api.null_lists = True
    assert cluster.children("ns", "a", certificates=True) == ()


def test_children_come_without_cert_manager_too(api, cluster):
    api.faults.append(Fault("GET", "cert-manager.io", 404))
    assert cluster.children("ns", "a", certificates=True) == ()


@pytest.mark.parametrize("status", [400, 410, 422])
def test_a_list_that_the_server_ends_is_not_a_kind_without_objects(api, cluster, status):
    """410: the list was so slow that its next page has expired."""
    api.faults.append(Fault("GET", "poddisruptionbudgets", status, "too old"))
    with pytest.raises(ApiError) as caught:
        cluster.children("ns", "a", certificates=False)
    assert caught.value.status == status


def test_the_answer_to_a_group_that_the_server_does_not_serve_names_the_group(
    api, cluster, monkeypatch
):
    """An API server answers "404 page not found" in plain text, with a line break."""
    monkeypatch.delitem(fake_api.GROUPS, "cert-manager.io/v1")
    body = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate"}
    with pytest.raises(ApiError) as caught:
        cluster.apply({**body, "metadata": {"namespace": "ns", "name": "a-tls"}, "spec": {}})
    assert (caught.value.status, caught.value.refused) == (404, True)
    assert caught.value.message == (
        "404 page not found: this API server does not serve cert-manager.io/v1"
    )


def test_an_apply_owns_its_fields_and_drops_removed_ones(api, cluster):
    cluster.apply(config_map(data={"x": "1", "y": "2"}))
    api.edit("configmaps", "a-spec", lambda item: item["data"].update(users="3"))
    after = cluster.apply(config_map(data={"x": "1"}))
    assert after["data"] == {"x": "1", "users": "3"}
    write = api.writes()[-1]
    assert write.query == {"fieldManager": "diloco-operator", "force": "true"}
    again = cluster.apply(config_map(data={"x": "1"}))
    assert again["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]


def test_the_status_is_written_beside_the_spec_by_a_manager_of_its_own(api, cluster):
    job = api.create(JOB)
    cluster.put_status(job, {"step": 3})
    after = api.get("dilocojobs", "a")
    assert (after["spec"], after["status"]) == ({"steps": 5}, {"step": 3})
    assert after["metadata"]["generation"] == 1
    assert api.writes()[-1].query["fieldManager"] == "diloco-operator-status"
    cluster.put_status(job, {"state": "Failed"})
    assert api.get("dilocojobs", "a")["status"] == {"state": "Failed"}


def test_a_successor_of_the_same_name_does_not_get_the_status(api, cluster):
    job = api.create(JOB)
    api.delete("dilocojobs", "a")
    api.create(JOB)
    with pytest.raises(ApiError, match="UID"):
        cluster.put_status(job, {"step": 3})
    assert "status" not in api.get("dilocojobs", "a")


def test_only_the_object_that_was_read_is_deleted(api, cluster):
    job = api.create(JOB)
    metadata = job["metadata"]
    assert not cluster.delete("DiLoCoJob", "ns", "a", uid="another")
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
    version = metadata["resourceVersion"]
    assert not cluster.delete("DiLoCoJob", "ns", "a", uid=metadata["uid"], resource_version=version)
    assert cluster.delete("DiLoCoJob", "ns", "a", uid=metadata["uid"])
    assert not cluster.delete("DiLoCoJob", "ns", "a", uid=metadata["uid"])


def test_a_pod_is_deleted_by_force_without_waiting_for_its_kubelet(api, cluster):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "a-eu-0"}}
    for name, grace in (("a-eu-0", {"gracePeriodSeconds": 0}), ("a-eu-1", {})):
        made = api.create({**pod, "metadata": {**pod["metadata"], "name": name}})
        assert cluster.delete("Pod", "ns", name, uid=made["metadata"]["uid"], force=bool(grace))
        body = api.writes()[-1].body
        assert body["preconditions"] == {"uid": made["metadata"]["uid"]}
        assert {key: body[key] for key in body if key == "gracePeriodSeconds"} == grace


def test_an_existing_event_does_not_change(api, cluster):
    body = {"metadata": {"namespace": "ns", "name": "a.1"}, "reason": "Complete"}
    cluster.event(dict(body))
    cluster.event({**body, "reason": "Other"})
    assert [item["reason"] for item in api.all("events")] == ["Complete"]


def test_events_are_read_by_the_object_that_they_are_about(api, cluster):
    api.create({"apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "ns", "name": "e"}})
    item = {"metadata": {"namespace": "ns", "name": "a-eu", "uid": "1-2"}}
    assert [event["metadata"]["name"] for event in cluster.events_about(item)] == ["e"]
    request = api.requests[-1]
    assert request.query["fieldSelector"] == "involvedObject.uid=1-2"
    assert request.query["limit"] == str(cluster_module.AT_MOST)


def test_an_operator_that_may_not_read_events_continues_without_them(api, cluster):
    api.faults.append(Fault("GET", "events", 403))
    assert cluster.events_about({"metadata": {"namespace": "ns", "name": "a", "uid": "1"}}) == ()


def test_workloads_are_read_by_the_objects_that_they_admit_and_there_are_none_without_kueue(
    api, cluster
):
    assert cluster.workloads("ns", ("1-2", "3-4")) == ()
    request = api.requests[-1]
    path = request.path.partition("?")[0]
    assert path == "/apis/kueue.x-k8s.io/v1beta2/namespaces/ns/workloads"
    assert request.query["labelSelector"] == "kueue.x-k8s.io/job-uid in (1-2,3-4)"
    assert request.status == 404


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_to_a_busy_server_is_retried(api, cluster, status):
    api.create(JOB)
    api.faults.append(Fault("GET", "dilocojobs", status, times=2))
    assert cluster.job("ns", "a")["spec"] == {"steps": 5}


@pytest.mark.slow
def test_retry_after_is_obeyed(api, cluster):
    api.create(JOB)
    api.faults.append(Fault("GET", "dilocojobs", 429, headers={"Retry-After": "1"}))
    begun = time.monotonic()
    cluster.job("ns", "a")
    assert time.monotonic() - begun >= 1.0


def test_a_conflict_of_an_apply_is_tried_again(api, cluster):
    api.faults.append(Fault("PATCH", "configmaps", 409, times=1))
    assert cluster.apply(config_map())["data"] == {"x": "1"}


@pytest.mark.parametrize("status", [400, 403, 422, 500])
def test_a_refusal_raises_at_once_with_the_servers_message(api, cluster, status):
    api.faults.append(Fault("PATCH", "configmaps", status, "spec.x: Forbidden", times=9))
    with pytest.raises(ApiError, match=r"spec\.x: Forbidden") as caught:
        cluster.apply(config_map())
    assert caught.value.refused == (status != 500)  # the reconcile reports a refusal as well
    assert (caught.value.status, caught.value.message) == (status, "spec.x: Forbidden")
    assert len(api.writes()) == 1


def test_of_a_long_message_of_the_server_only_the_beginning_is_kept(api, cluster):
    """It may contain a value of a manifest, and is logged and kept for each object that is refused."""
    api.faults.append(Fault("PATCH", "configmaps", 422, 'Invalid value: "' + "x" * 1_000_000))
    with pytest.raises(ApiError, match='Invalid value: "xx') as caught:
        cluster.apply(config_map())
    assert len(caught.value.message) == cluster_module.MESSAGE_CHARACTERS


def test_a_broken_server_is_a_transient_error(api, cluster):
    api.faults.append(Fault("GET", "dilocojobs", 500, times=99))
    with pytest.raises(ApiError) as caught:
        cluster.job("ns", "a")
    assert (caught.value.status, caught.value.refused) == (500, False)
    assert len(api.requests) == 3


def test_an_unavailable_server_is_a_transient_error_until_it_is_back(api, cluster):
    api.create(JOB)
    cluster.job("ns", "a")
    api.unavailable = True
    with pytest.raises(ApiError, match="no answer") as caught:
        cluster.job("ns", "a")
    assert (caught.value.status, caught.value.refused) == (0, False)
    api.unavailable = False
    assert cluster.job("ns", "a") is not None


def test_a_server_that_hangs_costs_one_deadline(api, cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "READ_SECONDS", 0.3)
    api.faults.append(Fault("GET", "dilocojobs", hang_seconds=5))
    begun = time.monotonic()
    with pytest.raises(ApiError, match="no answer"):
        cluster.job("ns", "a")
    assert 0.3 <= time.monotonic() - begun < 2
    assert len(api.requests) == 1


def test_a_token_file_is_read_again(api, tmp_path):
    cluster = dial(api, tmp_path, token="first")
    cluster.job("ns", "a")
    tokens = itertools.count()

    def hook(configuration):
        configuration.api_key["BearerToken"] = f"Bearer renewed-{next(tokens)}"

    cluster._configuration.refresh_api_key_hook = hook
    cluster.job("ns", "a")
    cluster.job("ns", "a")
    tokens = [request.token for request in api.requests]
    assert tokens[0] == "Bearer first"
    assert tokens[1] != tokens[2]
    assert all(token.startswith("Bearer renewed-") for token in tokens[1:])


def test_a_server_that_answers_html_is_no_api_server(api, cluster, monkeypatch):
    monkeypatch.setattr(api, "handle", lambda request: ["not", "an", "object"])
    with pytest.raises(ApiError, match="is this the API server"):
        cluster.job("ns", "a")


def test_the_error_names_both_missing_pod_and_missing_kubeconfig(tmp_path):
    with pytest.raises(ConfigError, match="no API server"):
        connect(kubeconfig=tmp_path / "none")


def test_a_504_of_a_proxy_does_not_concern_the_cache(api, cluster):
    made = cluster.apply(config_map())
    cluster.children("ns", "a", certificates=False)
    api.faults.append(Fault("GET", "configmaps", 504, "Gateway Timeout"))
    with pytest.raises(ApiError):
        cluster.children("ns", "a", certificates=False)
    cluster.children("ns", "a", certificates=False)
    assert asked_versions(api) == (made["metadata"]["resourceVersion"], "NotOlderThan")


def test_a_cache_that_lagged_must_still_have_what_this_process_wrote(api, tmp_path):
    now = 1000.0
    found = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
    cluster = Cluster(found, manager="diloco-operator", clock=lambda: now)
    cluster.children("ns", "a", certificates=False)
    made = cluster.apply(config_map())
    lags = "Too large resource version: 9, current: 8"
    api.faults.append(Fault("GET", "configmaps.*resourceVersion", 504, lags))
    cluster.children("ns", "b", certificates=False)
    now += 60
    cluster.children("ns", "b", certificates=False)
    assert asked_versions(api)[0] == made["metadata"]["resourceVersion"]
