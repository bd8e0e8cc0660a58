"""Transfers on threads: what reaches the link's protocol, and what a session that is over leaves."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import UnavailableError
from diloco.model.fragments import Tensor, cut
from diloco.spec import RunSpec
from diloco_testing.syncers.streams import stream
from diloco_worker.core import events as ev
from diloco_worker.ipc.shared_memory import HostCopy, SharedMemory
from diloco_worker.link import bulk as module
from diloco_worker.link.buffers import most_transfers
from diloco_worker.link.bulk import BulkTransfers
from diloco_worker.link.transfer import Identity
from diloco_worker.settings import LearnerSettings

LAYOUT = cut(
    [Tensor(name=f"w{i}", shape=(256,), dtype="float32") for i in range(6)], num_fragments=6
)
SPEC = RunSpec(job="j", steps=9, fragments=6, interval=6, overlap=2)
IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)
TIMEOUT_SECONDS = 30


class Syncer:
    """In place of the gRPC calls: each download waits for its outcome."""

    def __init__(self) -> None:
        self.asked: queue.Queue = queue.Queue()
        self.outcomes: dict[int, queue.Queue] = {p: queue.Queue() for p in range(6)}

    def fetch(self, _channel, assembly, cancel):
        request = assembly._wanted
        self.asked.put(request.fragment)
        try:
            fragment = LAYOUT.fragments[request.fragment]
            values = np.full(256, request.round, np.float32)
            messages = list(stream(assembly.request(), fragment, values, version=(1, 5)))
            assembly.add(messages[0])
            outcome = self.outcomes[request.fragment].get(timeout=TIMEOUT_SECONDS)
            if isinstance(outcome, Exception):
                raise outcome
            for message in messages[1:]:
                assembly.add(message)
            assembly.end()
            return assembly.payloads() if outcome == "committed" else None
        finally:
            assembly.discard()

    def started(self, count: int) -> list[int]:
        return sorted(self.asked.get(timeout=TIMEOUT_SECONDS) for _ in range(count))


@pytest.fixture
def syncer(monkeypatch):
    syncer = Syncer()
    monkeypatch.setattr(module.download, "fetch", syncer.fetch)
    return syncer


@pytest.fixture
def ends():
    return queue.Queue()


@pytest.fixture
def transfers(syncer, ends):
    shared = SharedMemory.create(LAYOUT, constants_bytes=0)
    for p in range(6):
        shared.publish(p, 1, (1, 0))
        shared.set_host_copy(p, HostCopy(local_step=1, steps=1, tokens=1, base=1))
    config = LearnerSettings(
        job="j", learner="eu/0", syncer="127.0.0.1:1", spec=Path("unread"), faults=()
    )
    yield BulkTransfers(config, SPEC, shared, ends.put)
    shared.close()


def announced(fragment, *, round_=1, attempt=1):
    return ev.Download(fragment=fragment, round=round_, attempt=attempt)


def test_a_result_reaches_the_protocol_and_is_placed(transfers, syncer, ends):
    transfers.download(announced(2, round_=7), IDENTITY)
    syncer.outcomes[2].put("committed")
    event = transfers.settle(ends.get(timeout=TIMEOUT_SECONDS))
    assert (event.staged.fragment, event.staged.version, event.error) == (2, (1, 5), "")
    placed = transfers.place(ev.Place(staged=event.staged, generation=2))
    assert placed == ev.Placed(fragment=2)
    assert transfers.buffers.used_bytes == 0


def test_failed_and_aborted_downloads_hold_nothing_and_are_distinguished(transfers, syncer, ends):
    for outcome in ("aborted", UnavailableError("cut"), RuntimeError("a defect")):
        transfers.download(announced(0), IDENTITY)
        syncer.outcomes[0].put(outcome)
        event = transfers.settle(ends.get(timeout=TIMEOUT_SECONDS))
        assert (event.staged, event.aborted) == (None, outcome == "aborted")
        assert bool(event.error) == (outcome != "aborted")
        assert transfers.buffers.used_bytes == 0


def test_16_results_that_await_a_decision_are_bounded(transfers, syncer, ends):
    most = most_transfers(SPEC)
    for p in range(6):
        transfers.download(announced(p), IDENTITY)
        syncer.outcomes[p].put("committed")
    assert syncer.started(most) == list(range(most))
    waiting = [ends.get(timeout=TIMEOUT_SECONDS) for _ in range(most)]
    assert syncer.asked.empty()
    for ended in waiting:
        transfers.discard(transfers.settle(ended).staged)
        transfers.proceed()
    assert syncer.started(most) == list(range(most, 6))


@pytest.mark.parametrize("outcome", ["committed", "aborted", UnavailableError("cut")])
def test_a_session_that_is_over_leaves_nothing_behind(transfers, syncer, ends, outcome):
    for p in range(6):
        transfers.download(announced(p), IDENTITY)
    most = most_transfers(SPEC)
    syncer.started(most)
    transfers.cancel_all()
    for p in range(6):
        syncer.outcomes[p].put(outcome)
    for _ in range(most):
        assert transfers.settle(ends.get(timeout=TIMEOUT_SECONDS)) is None
        transfers.proceed()
    assert transfers.buffers.used_bytes == 0
    assert syncer.asked.empty()


def test_a_result_that_was_complete_before_its_session_was_lost_is_discarded(
    transfers, syncer, ends
):
    # Of an epoch that may be over: it must not become part of a model that is downloaded again.
    transfers.download(ev.Download(fragment=0), IDENTITY)
    syncer.outcomes[0].put("committed")
    ended = ends.get(timeout=TIMEOUT_SECONDS)
    transfers.cancel_all()
    assert transfers.settle(ended) is None
    assert transfers.buffers.used_bytes == 0


def test_failed_uploads_hold_nothing(transfers, ends):
    # Nothing listens on the syncer's port.
    transfers.upload(ev.Pulled(round=1, attempt=1, fragment=0, versions=((1, 0),)), IDENTITY)
    transfers.upload_initial(ev.UploadInitial(request=3), IDENTITY)
    events = [transfers.settle(ends.get(timeout=TIMEOUT_SECONDS)) for _ in range(2)]
    (initial,) = (e for e in events if e is not None)
    assert initial.request == 3
    assert initial.error.startswith("Unavailable")
    assert transfers.buffers.used_bytes == 0


def test_a_cancelled_upload_does_not_encode(transfers, ends):
    shared = transfers._placement._memory
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with shared.lock(0):
            entered.set()
            leave.wait(TIMEOUT_SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(TIMEOUT_SECONDS)
    transfers.upload(ev.Pulled(round=1, attempt=1, fragment=0, versions=((1, 0),)), IDENTITY)
    transfers.cancel_all()
    leave.set()
    assert transfers.settle(ends.get(timeout=TIMEOUT_SECONDS)) is None
    assert transfers.buffers.held_bytes == 0
    holder.join()
