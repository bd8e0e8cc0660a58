"""Both ends of bulk transfers at the syncer, without threads: what waits, for what, and what it reports."""

from __future__ import annotations

import gc
import resource
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.codec import frames
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer import coordinator
from diloco_syncer.attempts import MemberUpload
from diloco_syncer.core import events as ev
from diloco_syncer.core import upload_limits
from diloco_syncer.rpc import initial, source, upload_parts
from diloco_testing.learners.scripted import chunk, random_delta, thetas_of
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, DrivenUpload, driven_spec
from diloco_testing.syncers.pulled import WINDOW, finish, pulled_together

SMALL = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(2))


def decoded(frame, message):
    return message.FromString(bytes(frames.unpack(frame).payload))


# ---------------------------------------------------------------- uploads


def test_an_upload_waits_until_all_members_have_contributed(pair):
    first, second = pair.upload(0), pair.upload(1)
    first.send_all()
    pair.syncer.run()
    assert len(first.left) == 9, "only the header was taken"
    assert first.receiver.waiting.until(0) is False
    second.send(1)
    pair.syncer.run()
    assert first.receiver.waiting.until(0) is True
    assert first.resume().receiver.waiting is None


def test_a_member_a_window_ahead_waits_for_the_slowest(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    first.resume().send_all()
    assert len(first.left) == 9 - WINDOW - 1, "the chunk that has no room was taken and is held"
    assert first.receiver.waiting.until(0) is False
    second.resume().send(1)
    assert first.receiver.waiting.until(0) is True
    assert first.resume().receiver.waiting is None
    finish(second, first)
    pair.syncer.run()
    assert [u.replies[-1].done for u in (first, second)] == [True, True]
    assert pair.syncer.merged() == [1]


def test_the_last_part_of_the_initial_model_is_answered_however_late_its_thread_asks_what_it_waits_for():
    """Else it would wait for another message, and its sender for the reply."""
    syncer = DrivenSyncer(driven_spec())
    learner = DrivenLearner(syncer, "eu/0", SMALL)
    for fragment, theta_N in enumerate(thetas_of(learner)):
        pull = pb.Pull(fragment=fragment)
        learner.upload(pull, theta_N, content=bulk.INITIAL, base=None, norms=[]).send_all()
    header = learner.header(
        pb.Pull(), content=bulk.CONSTANTS, format=bulk.RAW, elements=0, chunks=0
    )
    upload = DrivenUpload(learner, header, []).send_all()
    assert upload.replies == []
    syncer.run()
    assert syncer.facts.parameters is not None
    assert upload.receiver.waiting.until(0) is True
    assert upload.resume().replies[-1].done
    assert upload.receiver.waiting is None


@pytest.mark.parametrize("content", ["WHOLE", "an older version"])
def test_a_staged_upload_is_handed_over_when_it_is_complete(pair, content):
    parameters = pair.syncer.facts.parameters
    if content == "WHOLE":
        first = pair.upload(0).send(1)
        second = pair.whole()
    else:
        current = parameters.current(0)
        newer_N = current.theta_N + random_delta(parameters.layout.fragments[0], 3)
        parameters.commit(0, replace(current, theta_N=newer_N, version=(1, 99)))
        first = pair.upload(0, base=pb.Version(epoch=1, step=99)).send(1)
        second = pair.upload(1, base=pb.Version(epoch=1, step=0))
    second.send_all()
    assert not second.left, "nothing is waited for while it is staged"
    assert second.receiver.waiting is not None
    pair.syncer.run()
    finish(first, second)
    pair.syncer.run()
    assert [u.replies[-1].done for u in (first, second)] == [True, True]
    assert pair.syncer.merged() == [1]


def test_the_end_of_the_round_refuses_a_member_that_waits(pair):
    first = pair.upload(0).send_all()
    pair.syncer.run()
    pair.syncer.run(ev.Left(session=2, learner="eu/1", reason="StreamEnded"))
    assert first.cancelled
    assert first.receiver.waiting.until(0) is True
    [reply] = first.resume().replies
    assert reply.refused == "Aborted"
    assert first.receiver.done


def test_a_refused_upload_does_not_keep_its_attempt_in_memory(pair):
    """Nor the vectors of its merge, not even until the next garbage collection."""
    first = pair.upload(0).send_all()
    pair.syncer.run()
    attempt = weakref.ref(pair.syncer.attempts.get(pair.pull.round, pair.pull.attempt))
    gc.disable()
    try:
        pair.syncer.run(ev.Left(session=2, learner="eu/1", reason="StreamEnded"))
        [reply] = first.resume().replies
        assert reply.refused == "Aborted"
        assert attempt() is not None
        first.receiver = None
        assert attempt() is None
    finally:
        gc.enable()


def test_a_flood_of_damaged_chunks_is_one_line_per_repeat(pair, caplog):
    upload, other = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    upload.resume()
    other.resume()
    end = frames.pack(frames.Kind.END, 0, b"")
    for _ in range(1000):
        upload.receiver.receive(b"damaged" * 10, 0.0)
    assert not caplog.records
    for repeat in range(1, 4):
        upload.receiver.receive(b"damaged" * 10, 0.0)
        [frame] = upload.receiver.receive(end, 0.0)
        assert len(decoded(frame, bulk.UploadReply).again) == 8
        assert len(caplog.records) == repeat
    assert "upload of eu/0: 1001 damaged chunks, the last: " in caplog.records[0].getMessage()
    [frame] = upload.receiver.receive(end, 0.0)
    assert decoded(frame, bulk.UploadReply).refused == "Damaged"


@pytest.mark.parametrize(
    ("payload", "refused"), [(None, ""), (b"", "Damaged"), (bytes(4), "Damaged")]
)
def test_a_probe_is_delivered_only_by_chunks_of_their_whole_length(pair, payload, refused):
    learner = pair.learners[0]
    learner.received()
    probe = ev.ProbeLearner(round=4, attempt=9, fragment=0, learner="eu/0")
    pair.syncer.coordinator._carry_out(probe)
    [pull] = [m.pull for m in learner.received() if m.WhichOneof("kind") == "pull"]
    upload = learner.upload(pull, random_delta(learner.layout.fragments[0], 0))
    if payload is not None:
        header, *chunks, end = upload.left
        upload.left = deque([header, *(chunk(i, payload) for i, _ in enumerate(chunks)), end])
    reply = upload.send_all().replies[-1]
    assert (reply.done, reply.refused) == (not refused, refused)


def test_a_probe_that_is_over_takes_no_further_chunk(pair):
    """The rest of it would keep the learner from uploading to its next probe or round."""
    learner = pair.learners[0]
    learner.received()
    pair.syncer.coordinator._carry_out(
        ev.ProbeLearner(round=4, attempt=9, fragment=0, learner="eu/0")
    )
    [pull] = [m.pull for m in learner.received() if m.WhichOneof("kind") == "pull"]
    upload = learner.upload(pull, random_delta(learner.layout.fragments[0], 0)).send(3)
    assert upload.replies == []
    pair.syncer.coordinator._carry_out(ev.AbortMerge(round=4, attempt=9, reason="late"))
    [reply] = upload.send(1).replies
    assert (reply.done, reply.refused) == (False, "Aborted")


def test_a_damaged_end_is_the_end_of_an_upload_that_lacks_nothing(pair):
    """Its sender would wait for the reply forever, and upload nothing else."""
    first, second = pair.upload(0), pair.upload(1)
    for upload in (first, second):
        upload.left[-1] = b"damaged" * 10
        upload.send(1)
    pair.syncer.run()
    for upload in (first, second) * 4:
        upload.resume().send_all()
        pair.syncer.run()
    assert [u.replies[-1].done for u in (first, second)] == [True, True]
    assert pair.syncer.merged() == [1]


def test_a_broken_stream_drops_the_member_once(pair):
    first = pair.upload(0).send(1)
    pair.syncer.run()
    first.receiver.lost()
    first.receiver.lost()
    assert first.receiver.receive(b"late", 0.0) == []
    [dropped] = [e for e in pair.syncer.posted if isinstance(e, ev.Dropped)]
    assert (dropped.learner, dropped.reason) == ("eu/0", "StreamBroken")


def test_a_stream_that_ends_before_its_upload_is_a_broken_one(pair):
    """gRPC may present a call that was cut as one whose peer has sent its last."""
    first = pair.upload(0).send(1)
    pair.syncer.run()
    [packed] = first.receiver.receive(None, 0.0)
    assert decoded(packed, bulk.UploadReply).refused == "Unavailable"
    first.receiver.lost()
    [dropped] = [e for e in pair.syncer.posted if isinstance(e, ev.Dropped)]
    assert (dropped.learner, dropped.reason) == ("eu/0", "StreamBroken")


def test_an_upload_without_a_header_is_refused_without_a_learner(pair):
    upload = pair.upload(0)
    [packed] = upload.receiver.receive(None, 0.0)
    assert decoded(packed, bulk.UploadReply).refused == "Protocol"
    assert pair.syncer.lines[-1]["learner"] == ""


def test_the_size_of_constants_is_checked_before_memory_is_taken_for_it():
    syncer = DrivenSyncer(driven_spec())
    learner = DrivenLearner(syncer, "eu/0", SMALL)
    header = learner.header(
        pb.Pull(), content=bulk.CONSTANTS, format=bulk.RAW, elements=1 << 60, chunks=(1 << 32) - 1
    )
    [reply] = DrivenUpload(learner, header, []).send(1).replies
    assert reply.refused == "Protocol"


def test_a10_memory_for_constants_is_taken_as_they_arrive():
    """A header alone, of constants that the model may have, must not cost a gigabyte."""
    constants = (Tensor(name="c", shape=(64 << 20,), dtype="float32"),)
    layout = cut(SMALL, num_fragments=2, constants=constants)
    syncer = DrivenSyncer(driven_spec())
    header = bulk.UploadHeader(content=bulk.CONSTANTS, format=bulk.RAW, elements=1 << 30)
    before = resident_bytes()
    upload = MemberUpload("eu/0", lambda: None)
    part = initial.InitialPart(syncer.initial, header, layout, upload)
    part.take(0, memoryview(bytes(4 * CHUNK)), 0.0)
    assert resident_bytes() - before < 64 << 20


def test_a10_memory_for_initial_parameters_is_taken_as_they_arrive():
    """Likewise, of a fragment of a model that fits into the memory of the syncer."""
    layout = cut((Tensor(name="w", shape=(256 << 20,), dtype="float32"), *SMALL), num_fragments=2)
    [large] = [f for f in layout.fragments if f.elements > 64 << 20]
    syncer = DrivenSyncer(driven_spec())
    header = bulk.UploadHeader(
        content=bulk.INITIAL, format=bulk.FP32, fragment=large.index, elements=large.elements
    )
    before = resident_bytes()
    part = initial.InitialPart(syncer.initial, header, layout, MemberUpload("eu/0", lambda: None))
    part.take(0, memoryview(bytes(4 * CHUNK)), 0.0)
    assert resident_bytes() - before < 64 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---------------------------------------------------------------- progress


def test_progress_is_reported_at_most_every_quarter_second_and_at_the_end(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    first.resume()
    second.resume()
    for _ in range(8):
        pair.syncer.now += 0.1
        first.send(1)
        second.send(1)
    first.send_all()
    payload = 4 * pair.learners[0].layout.fragments[0].elements
    sent = pair.progress("eu/0")
    assert [e.received_bytes // (4 * CHUNK) for e in sent[:-1]] == [1, 4, 7]
    assert (sent[-1].received_bytes, sent[-1].waiting, sent[-1].done) == (payload, False, True)
    assert all((e.round, e.attempt) == (pair.pull.round, pair.pull.attempt) for e in sent)


def test_progress_shows_that_a_member_is_held_back(pair):
    first = pair.upload(0).send(1)
    pair.upload(1).send(1)
    pair.syncer.run()
    first.resume().send_all()
    pair.syncer.now += upload_parts.PROGRESS_SECONDS
    first.resume()
    [*_, last] = pair.progress("eu/0")
    assert (last.waiting, last.received_bytes) == (True, 4 * CHUNK * (WINDOW + 1))


def test_a_member_that_becomes_silent_after_it_was_held_back_is_refused(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    first.resume().send(WINDOW + 1)
    for pair.syncer.now in (1.0, 1.3):
        first.resume()
        pair.syncer.run()
    assert pair.progress("eu/0")[-1].waiting
    second.resume().send_all()
    first.resume()
    pair.syncer.run()
    assert not pair.progress("eu/0")[-1].waiting, "there is room, and its next chunk never comes"
    for now in range(2, 60):
        pair.syncer.now = float(now)
        pair.heartbeats()
    assert "Stalled" in {x["reason"] for x in pair.syncer.lines if x["event"] == "refuse"}


@pytest.mark.parametrize("chunk_seconds", [0.2, 1.5])
def test_a_member_that_lets_the_others_continue_chunk_by_chunk_is_refused_for_the_sum_of_their_waits(
    chunk_seconds, monkeypatch
):
    monkeypatch.setattr(coordinator, "MERGE_WINDOW_BYTES", 1)
    monkeypatch.setattr(upload_limits, "MIN_HOLD_SECONDS", 4 * chunk_seconds)
    monkeypatch.setattr(upload_limits, "HOLD_WINDOWS", 0.0)
    job = pulled_together(3)
    scheduler = job.syncer.state.engine.scheduler
    scheduler.spec = replace(scheduler.spec, quorum=1)
    *others, slow = [job.upload(index).send(1) for index in range(3)]
    job.syncer.run()
    for _ in range(7):
        for each in others:
            each.resume().send_all()
        for _ in range(4):
            job.syncer.now += chunk_seconds / 4
            job.heartbeats()
        slow.resume().send(1)
        for each in others:
            each.resume()
    refused = [x for x in job.syncer.lines if x["event"] == "refuse"]
    assert [(x["learner"], x["reason"]) for x in refused] == [("eu/2", "Stalled")]


# ---------------------------------------------------------------- downloads


def frames_of(download, now):
    found = []
    while (frame := download.next_frame(now)) is not None:
        found.append(frame)
    return found


def test_a_download_follows_the_merge_and_ends_with_its_commit(pair):
    download = pair.learners[0].download(pair.pull)
    [header] = frames_of(download, 0.0)
    assert decoded(header, bulk.DownloadHeader).chunks == 8
    assert download.waiting.until(0) is False, "the merge has not begun"
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    first.resume().send(3)
    second.resume().send(2)
    assert download.waiting.until(0) is True
    second.send_all()
    finish(second, first)
    assert len(frames_of(download, 0.0)) == 8
    assert not download.over, "the engine has not decided"
    assert download.waiting.until(0) is False
    pair.syncer.run()
    assert download.waiting.until(0) is True
    [trailer] = frames_of(download, 0.0)
    assert decoded(trailer, bulk.DownloadTrailer).committed
    assert download.over


@pytest.mark.parametrize("when", ["before the merge", "during it"])
def test_a_download_of_an_aborted_round_ends_at_once(pair, when):
    download = pair.learners[0].download(pair.pull)
    frames_of(download, 0.0)
    pair.upload(0).send(1)
    if when == "during it":
        pair.upload(1).send(1)
    pair.syncer.run()
    pair.syncer.run(ev.Left(session=2, learner="eu/1", reason="StreamEnded"))
    assert download.waiting is None or download.waiting.until(0)
    [trailer] = frames_of(download, 0.0)
    ended = decoded(trailer, bulk.DownloadTrailer)
    assert not ended.committed
    assert "StreamEnded" in ended.reason


def test_a_download_that_is_not_decided_in_time_can_be_requested_again(pair):
    download = pair.learners[0].download(pair.pull)
    frames_of(download, 5.0)
    assert frames_of(download, 5.0 + source.OUTPUT_SECONDS - 1) == []
    [trailer] = frames_of(download, 5.0 + source.OUTPUT_SECONDS)
    ended = decoded(trailer, bulk.DownloadTrailer)
    assert (ended.committed, "request it again" in ended.reason) == (False, True)
    assert len(frames_of(pair.learners[0].download(pair.pull), 400.0)) == 1


def test_the_current_version_needs_no_waiting(pair):
    download = pair.learners[1].download(pb.Pull(fragment=0))
    found = frames_of(download, 0.0)
    assert len(found) == 1 + 8 + 1
    assert decoded(found[-1], bulk.DownloadTrailer).committed
