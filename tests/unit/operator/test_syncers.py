"""Status requests of many jobs: a syncer that is silent delays only its own job."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from diloco.errors import UnavailableError
from diloco.rpc import servers
from diloco.v1 import syncer_pb2, syncer_pb2_grpc
from diloco_operator.cluster import syncers as syncers_module
from diloco_operator.cluster.syncers import Address, Syncers
from diloco_operator.workqueue import Key

KEY = Key("ns", "a")


class FakeSyncer(syncer_pb2_grpc.SyncerServicer):
    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def GetStatus(self, request, context):  # noqa: N802
        self.asked += 1
        self.answers.wait(30)
        return syncer_pb2.StatusReply(job="a", step=self.asked)


@pytest.fixture
def syncer() -> Iterator[FakeSyncer]:
    fake = FakeSyncer()
    server = servers.server(max_workers=8)
    syncer_pb2_grpc.add_SyncerServicer_to_server(fake, server)
    port = servers.bind(server, "127.0.0.1:0", None)
    fake.address = Address(endpoint=f"127.0.0.1:{port}", tls=None, server_name="a-syncer")
    server.start()
    yield fake
    fake.answers.set()
    server.stop(None).wait(10)


@pytest.fixture
def silent(syncer, monkeypatch) -> Iterator[tuple[Syncers, threading.Event]]:
    """The first request had no answer in time; the event is set when a late answer comes."""
    late = threading.Event()
    asking = Syncers(lambda key: late.set() if key == KEY else None)
    monkeypatch.setattr(syncers_module, "ASK_SECONDS", 0.2)
    with pytest.raises(UnavailableError, match="DEADLINE"):
        asking.ask(KEY, syncer.address)
    # A request that is waited for would from now on outlast the test.
    monkeypatch.setattr(syncers_module, "ASK_SECONDS", 600.0)
    yield asking, late
    asking.close()


def test_a_silent_syncer_is_asked_again_but_not_waited_for(silent, syncer):
    asking, late = silent
    for _ in range(3):
        with pytest.raises(UnavailableError, match="DEADLINE"):
            asking.ask(KEY, syncer.address)
    assert not late.is_set()
    assert syncer.asked <= 2, "one request at a time"


def test_a_syncer_that_answers_again_wakes_its_job_and_the_answer_counts(silent, syncer):
    asking, late = silent
    with pytest.raises(UnavailableError):
        asking.ask(KEY, syncer.address)
    syncer.answers.set()
    assert late.wait(20)
    assert asking.ask(KEY, syncer.address).step == 2
    assert asking.ask(KEY, syncer.address).step == 3, "it is waited for again"


def test_a_silent_syncer_whose_second_request_ends_without_an_answer_stays_silent(
    silent, syncer, monkeypatch
):
    asking, late = silent
    monkeypatch.setattr(syncers_module, "ASK_SECONDS", 1.0)
    with pytest.raises(UnavailableError):
        asking.ask(KEY, syncer.address)
    request = asking._known[KEY].request
    assert request is not None
    with pytest.raises(UnavailableError):
        request.reply()
    # The next one is sent at once, so that each reconcile has one under way.
    monkeypatch.setattr(syncers_module, "ASK_SECONDS", 600.0)
    with pytest.raises(UnavailableError):
        asking.ask(KEY, syncer.address)
    assert asking._known[KEY].request not in (None, request)
    assert asking._known[KEY].unanswered is not None
    assert not late.is_set()
    syncer.answers.set()
    assert late.wait(20)


def test_another_address_is_asked_afresh(silent, syncer, monkeypatch):
    asking, _ = silent
    syncer.answers.set()
    other = Address(endpoint=syncer.address.endpoint, tls=None, server_name="b-syncer")
    assert asking.ask(KEY, other).job == "a"
