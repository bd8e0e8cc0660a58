"""Uploads whose connection breaks, or that the syncer cannot receive: who is charged for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco.codec import frames
from diloco.model.fragments import Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.rpc import transfers, upload_parts
from diloco_syncer.rpc.uploads import Uploads
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, DrivenUpload, driven_spec

TENSORS = tuple(Tensor(name=name, shape=(300,), dtype="float32") for name in "ab")


@pytest.fixture
def syncer() -> DrivenSyncer:
    """A merge needs two of its three learners."""
    return DrivenSyncer(driven_spec(learners={"eu": 3}, quorum=2))


@pytest.fixture
def learners(syncer: DrivenSyncer) -> list[DrivenLearner]:
    """All three train."""
    joined = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(3)]
    joined[0].initialise([np.zeros(f.elements, np.float32) for f in joined[0].layout.fragments])
    deliver(*a_round(joined[1], joined[2]))
    joined[0].step()
    return joined


def pulls(learner: DrivenLearner) -> list[pb.Pull]:
    """Those that its session has brought since it was read last."""
    messages = [m for m in learner.received() if isinstance(m, pb.SyncerMessage)]
    return [m.pull for m in messages if m.WhichOneof("kind") == "pull"]


def upload(learner: DrivenLearner, pull: pb.Pull, **changes: Any) -> DrivenUpload:
    fragment = learner.layout.fragments[pull.fragment]
    return learner.upload(pull, random_delta(fragment, learner.local_step), **changes)


def a_round(first: DrivenLearner, second: DrivenLearner) -> list[DrivenUpload]:
    """The two report and are pulled; they have sent nothing yet."""
    early, late = first.step(), second.step()
    return [upload(first, [*early, *pulls(first)][-1]), upload(second, late[-1])]


def deliver(first: DrivenUpload, second: DrivenUpload) -> None:
    for each in (first, second):
        each.send_all()
    first.syncer.run()
    for each in (first, second):
        each.resume().send_all()
    first.syncer.run()
    assert [each.replies[-1].done for each in (first, second)] == [True, True]


def begin_to_merge(first: DrivenUpload, second: DrivenUpload) -> None:
    """The first has delivered, and the second has sent a part."""
    for each in (first, second):
        each.send(1)
    first.syncer.run()
    first.resume().send_all()
    second.resume().send(1)
    first.syncer.run()


def lines(syncer: DrivenSyncer, event: str) -> list[dict[str, Any]]:
    return [line for line in syncer.lines if line["event"] == event]


def pass_time(learners: list[DrivenLearner], seconds: int) -> None:
    """All are alive meanwhile."""
    syncer = learners[0].syncer
    for _ in range(seconds):
        syncer.now += 1.0
        for each in learners:
            syncer.queue.append(ev.Heartbeat(session=each.session.number, learner=each.name))
        syncer.run(ev.Tick())


# ---------------------------------------------------------------- the connection breaks


def test_a_connection_that_breaks_every_ten_minutes_ejects_no_learner(syncer, learners):
    for repeat in range(1, 4):
        pass_time(learners, 600)
        first, broken = a_round(learners[0], learners[2])
        begin_to_merge(first, broken)
        pass_time(learners, 1)
        broken.receiver.lost()
        syncer.run()
        assert lines(syncer, "eject") == []
        refused = [(x["learner"], x["reason"]) for x in lines(syncer, "refuse")]
        assert refused == [("eu/2", "StreamBroken")] * repeat
        pass_time(learners, 1)
        again = [upload(each, pulls(each)[-1]) for each in (learners[0], learners[2])]
        deliver(*again)  # of the same reports: the broken attempt has not used them up
        assert len(syncer.merged()) == 1 + repeat


def test_a_learner_that_dies_in_the_middle_of_an_upload_is_not_ejected(syncer, learners):
    """Its bulk stream may be noticed as broken before its session."""
    first, broken = a_round(learners[0], learners[2])
    begin_to_merge(first, broken)
    broken.receiver.lost()
    syncer.run(ev.Left(session=learners[2].session.number, learner="eu/2", reason="StreamEnded"))
    assert lines(syncer, "eject") == []
    assert syncer.state.engine.learners.by_name["eu/2"].ejection is None


def test_a_member_that_breaks_its_connection_on_purpose_is_ejected_for_the_time_that_it_costs(
    syncer, learners
):
    for _ in range(3):
        first, broken = a_round(learners[0], learners[2])
        begin_to_merge(first, broken)
        pass_time(learners, 2)
        broken.receiver.lost()
        syncer.run()
        learners[2].step()
        pass_time(learners, 1)
        if lines(syncer, "eject"):
            break
        deliver(*[upload(each, pulls(each)[-1]) for each in (learners[0], learners[2])])
    [ejected] = lines(syncer, "eject")
    assert (ejected["learner"], ejected["reason"]) == ("eu/2", "StreamBroken")


def probe(learner: DrivenLearner) -> DrivenUpload:
    """It is ejected, and probed now."""
    syncer = learner.syncer
    ejections = syncer.state.engine.ejections
    ejections.eject(learner.name, "Stalled", syncer.now)
    learner.step()
    learner.received()
    for _ in range(6):
        syncer.now += 1.0
        syncer.run(ev.Heartbeat(session=learner.session.number, learner=learner.name), ev.Tick())
    return upload(learner, pulls(learner)[-1])


@pytest.mark.parametrize("end", ["broken", "an error of the syncer"])
def test_a_probe_that_does_not_end_by_a_fault_of_the_learner_does_not_count(syncer, learners, end):
    upload = probe(learners[2]).send(1)
    record = syncer.state.engine.learners.by_name["eu/2"]
    assert record.ejection.probe is not None
    if end == "broken":
        upload.receiver.lost()
    else:
        upload.receiver.failed(MemoryError("cannot allocate"))
    syncer.run()
    assert (record.ejections, record.ejection.probe) == (1, None)
    assert record.ejection.probe_at == syncer.now + 10.0, "a connection is probed ever more rarely"


# ---------------------------------------------------------------- gRPC threads


class NoMemory:
    """NumPy on a machine whose memory is used up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, *arguments: object) -> np.ndarray[Any, Any]:
        raise MemoryError("cannot allocate")


def served(syncer: DrivenSyncer, messages: Iterator[bytes]) -> Iterator[bulk.UploadReply]:
    """What the thread of a stream replies."""
    authorizer = SimpleNamespace(check=lambda context, learner: None)
    refusals = SimpleNamespace(
        refuse=lambda what, learner, error: syncer.record("refuse", learner=learner, what=what)
    )
    context = SimpleNamespace(cancel=lambda: None, is_active=lambda: False)
    uploads: Any = Uploads(syncer, authorizer, refusals)  # type: ignore[arg-type]
    for packed in uploads.upload(messages, context):
        yield bulk.UploadReply.FromString(bytes(frames.unpack(packed).payload))


def staged(learners: list[DrivenLearner]) -> DrivenUpload:
    """The upload of a whole fragment by eu/2, which does not wait for the other member."""
    learners[0].step()
    [pull] = learners[2].step()
    return upload(learners[2], pull, content=bulk.WHOLE, base=None, norms=[])


def test_a_syncer_without_memory_for_an_upload_blames_no_member(
    syncer, learners, monkeypatch, caplog
):
    """A whole fragment is held until it is complete."""
    whole = staged(learners)
    with monkeypatch.context() as patch:
        patch.setattr(upload_parts, "np", NoMemory())
        [reply] = served(syncer, iter(whole.left))
    assert (reply.done, reply.refused) == (False, "Unavailable")
    assert "cannot allocate" in caplog.text
    syncer.run()
    [error] = lines(syncer, "error")
    assert (error["decision"], error["reason"]) == ("BeginMerge", "MemoryError('cannot allocate')")
    [refused] = lines(syncer, "refuse")
    assert (refused["learner"], refused["reason"]) == ("eu/2", "StreamBroken")
    assert "cannot allocate" in refused["detail"]
    assert lines(syncer, "eject") == []
    pass_time(learners, 1)
    deliver(*[upload(each, pulls(each)[-1]) for each in (learners[0], learners[2])])


def broken_after(messages: Iterable[bytes]) -> Iterator[bytes]:
    """As gRPC gives the requests of a peer that is gone."""
    yield from messages
    raise ConnectionError("the peer is gone")


def test_a_stream_whose_peer_is_gone_is_a_broken_one(syncer, learners):
    header, *_ = staged(learners).left
    with pytest.raises(ConnectionError):
        list(served(syncer, broken_after([header])))
    assert [e.reason for e in syncer.posted if isinstance(e, ev.Dropped)] == ["StreamBroken"]


def test_a_message_that_is_too_long_is_the_fault_of_its_sender(syncer, learners):
    header, *_ = staged(learners).left
    [reply] = served(syncer, iter([header, bytes(transfers.CHUNK_BYTES + 1)]))
    assert reply.refused == "Protocol"
    [dropped] = [e for e in syncer.posted if isinstance(e, ev.Dropped)]
    assert (dropped.learner, dropped.reason) == ("eu/2", "Protocol")


def test_an_upload_of_initial_parameters_that_breaks_is_not_refused(syncer):
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    theta_N = np.zeros(learner.layout.fragments[0].elements, np.float32)
    first = learner.upload(pb.Pull(), theta_N, content=bulk.INITIAL, base=None, norms=[]).send(1)
    posted = len(syncer.posted)
    first.receiver.lost()
    assert syncer.posted[posted:] == []
    assert lines(syncer, "refuse") == []
