"""Sources of the queue: kopf's settings, its login, and the list of all jobs."""

import asyncio
import itertools
import threading
import time
from datetime import UTC, datetime, timedelta

import kopf
import pytest
from kubernetes.client import Configuration

from diloco_operator.cluster import client
from diloco_operator.cluster.client import ApiError, Cluster, connect
from diloco_operator.resources.queue_labels import KUEUE_QUEUE, POD_GROUPS, VOLCANO_QUEUE
from diloco_operator.state.job_state import LOST_VOLUME
from diloco_operator.watch import handlers
from diloco_operator.watch.health import Health
from diloco_operator.workqueue import Key, WorkQueue
from diloco_testing.kubernetes.fake_api import FakeApi, Fault

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def configuration(token):
    made = Configuration(host="http://127.0.0.1:1")
    made.api_key["BearerToken"] = f"Bearer {token}"
    return made


def test_without_an_api_server_kopf_tries_for_ever():
    pauses = handlers.EndlessBackoffs()
    assert not hasattr(pauses, "__len__")
    for _ in range(2):  # each request iterates again
        seen = list(itertools.islice(pauses, 1000))
        assert seen[0] == 1
        assert seen[-1] == 13


def test_kopf_writes_nothing_and_asks_for_no_rights_beyond_the_jobs():
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert isinstance(settings.networking.error_backoffs, handlers.EndlessBackoffs)
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.watching.chunk_size == client.PAGE
    assert set(settings.watching.label_selectors.values()) == {"diloco.dev/job"}
    assert len(settings.watching.label_selectors) == 8


def test_kopf_compares_no_objects_and_so_copies_none():
    """kopf's diffs fail on an object nested deeper than the recursion limit, so it is never delivered."""
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    body = kopf.Body({"metadata": {}, "spec": {"deep": deep}})
    storage = settings.persistence.diffbase_storage
    assert storage.fetch(body=body) is None
    assert settings.persistence.progress_storage.clear(essence=storage.build(body=body)) == {}


def test_no_handler_needs_a_finalizer_or_keeps_state_in_the_cluster():
    queue = WorkQueue(lambda key: None, threads=1)
    made = handlers.registry(queue, Health(queue), configuration("t"), saw=lambda *_: None)
    assert len(made._watching.get_all_handlers()) == 9
    assert not made._changing.get_all_handlers()
    assert not made._spawning.get_all_handlers()
    assert not made._indexing.get_all_handlers()


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("annotations", LOST_VOLUME),
        ("annotations", POD_GROUPS),
        ("annotations", VOLCANO_QUEUE),
        ("labels", KUEUE_QUEUE),
        ("labels", "team"),  # children may inherit it
    ],
)
async def test_a_label_or_an_annotation_is_handled_and_a_status_is_not(kind, key):
    queue = WorkQueue(lambda key: None, threads=0)
    added = []
    queue.add = lambda key, *_, **__: added.append(key)
    handle = handlers._job(queue, Health(queue))
    metadata = {"uid": "1", "generation": 1}
    event = {"type": "MODIFIED", "object": {"metadata": metadata}}
    for changed, count in (({}, 1), ({key: "a"}, 2), ({key: "b"}, 3), ({}, 4)):
        metadata[kind] = changed
        await handle(event=event, namespace="ns", name="a")
        event["object"]["status"] = {"step": count}
        metadata["resourceVersion"] = str(count)
        await handle(event=event, namespace="ns", name="a")
        assert len(added) == count


async def test_only_what_may_correct_a_job_resets_its_back_off():
    queue = WorkQueue(lambda key: None, threads=0)
    added = []
    queue.add = lambda key, after_seconds=0.0, *, urgent=False: added.append(
        (after_seconds, urgent)
    )
    handle = handlers._job(queue, Health(queue))
    metadata = {"uid": "1", "generation": 1, "annotations": {}, "labels": {}}
    event = {"type": "MODIFIED", "object": {"metadata": metadata}}

    async def seen():
        await handle(event=event, namespace="ns", name="a")
        return added.pop()

    assert await seen() == (0.0, True)
    # A controller that rewrites its annotation every few seconds.
    for value in "abc":
        metadata["annotations"]["example.com/checked-at"] = value
        assert await seen() == (handlers.CHILD_PAUSE_SECONDS, False)
    metadata["labels"]["kueue.x-k8s.io/queue-name"] = "another"
    assert await seen() == (0.0, True)
    metadata["annotations"]["diloco.dev/lost-volume"] = "uid"
    assert await seen() == (0.0, True)
    metadata["generation"] = 2
    assert await seen() == (0.0, True)
    event["type"] = "DELETED"
    assert await seen() == (0.0, True)


async def test_a_reconcile_reads_no_older_version_of_a_child_than_the_event_that_caused_it():
    queue = WorkQueue(lambda key: None, threads=0)
    calls = []
    queue.add = lambda key, *_: calls.append(key)
    handle = handlers._child(queue, "Pod", lambda item, kind: calls.append((kind, item)))
    pod = {"metadata": {"name": "a-eu-0", "resourceVersion": "7"}}
    event = {"type": "DELETED", "object": pod}
    await handle(event=event, namespace="ns", labels={"diloco.dev/job": "a"})
    assert calls == [("Pod", pod), Key("ns", "a")]


def test_watches_that_ended_by_an_error_can_be_stopped(monkeypatch):
    async def fail(**_):
        raise RuntimeError("a watch failed")

    monkeypatch.setattr(kopf, "spawn_tasks", fail)
    ended = []
    watches = handlers.Watches(
        kopf.OperatorRegistry(), namespaces=(), ended=lambda: ended.append(True)
    )
    watches.start()
    watches._thread.join(10)
    assert ended == [True]
    watches.stop(1.0)


def test_kopf_dials_with_the_token_of_this_moment_and_asks_again_in_time():
    source = configuration("first")
    connection = handlers.connection_info(source, NOW)
    assert (connection.server, connection.as_http_headers()) == (
        "http://127.0.0.1:1",
        {"Authorization": "Bearer first"},
    )
    assert connection.expiration == NOW + timedelta(seconds=600)
    source.api_key["BearerToken"] = "Bearer second"
    assert handlers.connection_info(source, NOW).as_http_headers() == {
        "Authorization": "Bearer second"
    }


def test_the_same_token_is_a_new_login_because_kopf_never_reuses_a_rejected_one():
    source = configuration("t")
    later = NOW + timedelta(seconds=5)
    assert handlers.connection_info(source, NOW) != handlers.connection_info(source, later)


@pytest.fixture
def api():
    with FakeApi() as made:
        yield made


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def world(api, tmp_path):
    """A queue whose threads do not run, with its sources."""
    queue = WorkQueue(lambda key: None, threads=0)
    clock = Clock()
    health = Health(queue, clock=clock)
    found = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
    resync = handlers.Resync(
        Cluster(found, manager="m"), queue, health, namespaces=(), every_seconds=3600
    )
    return queue, health, clock, resync


def job(name, **metadata):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"namespace": "ns", "name": name, **metadata},
        "spec": {},
    }


def test_the_list_queues_jobs_that_only_the_list_or_only_the_queue_has(api, world):
    queue, _, _, resync = world
    api.create(job("a"))
    api.create(job("going", deletionTimestamp="2026-01-01T00:00:00Z"))
    resync.once()
    assert queue.keys() == {Key("ns", "a")}

    api.delete("dilocojobs", "a")
    queue.add(Key("ns", "a"), 3600)
    ran = []
    queue._work = ran.append
    resync.once()
    assert queue._entries[Key("ns", "a")].due <= time.monotonic()


def test_the_list_queues_a_change_of_a_known_job_that_the_watch_missed(api, world):
    queue, health, _, resync = world
    made = api.create(job("a"))
    health.delivered(made["metadata"]["uid"], 1)
    queue.add(Key("ns", "a"), 3600)
    resync.once()
    assert queue._entries[Key("ns", "a")].due > time.monotonic() + 3000
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=2))
    resync.once()
    assert queue._entries[Key("ns", "a")].due <= time.monotonic()


def test_the_list_finds_a_deaf_watch_without_a_write(api, world):
    _, health, clock, resync = world
    made = api.create(job("a"))
    health.delivered(made["metadata"]["uid"], 1)
    api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=2))
    resync.once()
    clock.now += 121
    resync.once()
    assert "ns/a (generation 2)" in health.problem()
    health.delivered(made["metadata"]["uid"], 2)
    assert health.problem() == ""
    assert not api.writes()


@pytest.fixture
def scoped(world):
    """Lists two namespaces, of which `gone` is the first."""
    queue, health, _, resync = world
    return handlers.Resync(
        resync._cluster, queue, health, namespaces=("gone", "ns"), every_seconds=3600
    )


def forbidden(api):
    """The Role went with the namespace."""
    fault = Fault("GET", "/namespaces/gone/", 403, "dilocojobs is forbidden", times=10**6)
    api.faults.append(fault)
    return fault


def test_a_namespace_that_cannot_be_listed_does_not_stop_the_others(api, world, scoped, caplog):
    queue, health, _, _ = world
    fault = forbidden(api)
    api.create(job("a"))
    health.heartbeat()
    caplog.set_level("INFO")
    for _ in range(3):
        scoped.once()
        assert queue.keys() == {Key("ns", "a")}
    assert health.ready()
    assert health.unread() == ("gone",)
    fault.times = 0
    scoped.once()
    assert health.unread() == ()
    messages = [
        record.message for record in caplog.records if "in namespace gone" in record.message
    ]
    assert len(messages) == 2, "once per change"
    assert "dilocojobs is forbidden" in messages[0]
    assert "again" in messages[1]


def test_the_jobs_of_a_namespace_that_cannot_be_listed_stay_as_they_are_known(api, world, scoped):
    queue, health, clock, _ = world
    made = api.create(job("b", namespace="gone"))
    health.delivered(made["metadata"]["uid"], 1, "gone")
    queue.add(Key("gone", "b"), 3600)
    fault = forbidden(api)
    for _ in range(3):
        scoped.once()
    assert queue._entries[Key("gone", "b")].due > time.monotonic() + 3000
    fault.times = 0
    for _ in range(3):
        scoped.once()
        clock.now += 121
    assert health.problem() == "", "the watch did deliver the job"


def test_a_watch_is_not_deaf_because_its_namespace_cannot_be_listed(api, world, scoped):
    _, health, clock, _ = world
    api.create(job("a"))
    api.create(job("b", namespace="gone"))
    scoped.once()
    forbidden(api)
    clock.now += 119
    scoped.once()
    assert health.problem() == ""
    clock.now += 2
    scoped.once()
    assert "ns/a" in health.problem(), "only the other namespace delays"


def test_a_list_of_which_one_page_fails_counts_for_no_job(api, world, scoped, monkeypatch):
    queue, _, _, _ = world
    monkeypatch.setattr(client, "PAGE", 1)
    api.create(job("b", namespace="gone"))
    api.create(job("c", namespace="gone"))
    api.faults.append(Fault("GET", "/namespaces/gone/.*continue=", 410, "too old"))
    scoped.once()
    assert queue.keys() == set()
    scoped.once()
    assert queue.keys() == {Key("gone", "b"), Key("gone", "c")}


def test_a_list_that_no_namespace_answers_fails(api, world, scoped):
    _, health, _, _ = world
    api.faults.append(Fault("GET", "dilocojobs", 403, "forbidden", times=10**6))
    health.heartbeat()
    with pytest.raises(ApiError):
        scoped.once()
    assert not health.ready()


def test_an_api_server_that_does_not_answer_is_asked_for_one_namespace_only(
    api, scoped, monkeypatch
):
    monkeypatch.setattr(client, "RETRY_PAUSES", ())
    api.unavailable = True
    with pytest.raises(ApiError):
        scoped.once()
    assert len(api.requests) == 1


def test_a_queue_that_resumes_gets_all_jobs_from_a_list_that_does_not_wait_its_turn(world, api):
    queue, _, _, resync = world
    queue.pause()
    api.create(job("a"))
    resync.start()
    try:
        deadline = time.monotonic() + 20
        while not any("dilocojobs" in request.path for request in api.requests):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert queue.keys() == frozenset()
        queue.resume()
        resync.now()
        while queue.keys() != {Key("ns", "a")}:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        resync.stop()


def test_one_watch_that_fails_ends_the_watches_although_kopf_waits_for_others_forever(
    monkeypatch, caplog
):
    async def fail() -> None:
        raise RuntimeError("gone for good")

    async def spawn(**_: object) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(3600))]

    async def wait_forever(tasks: object, ignored: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(kopf, "run_tasks", wait_forever)
    ended = threading.Event()
    handlers.Watches(kopf.OperatorRegistry(), namespaces=(), ended=ended.set).start()
    assert ended.wait(60.0)
    assert [record.message for record in caplog.records].count("the watches failed") == 1
