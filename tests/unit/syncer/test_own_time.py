"""The time that a member itself needs for its upload, without the waits that others cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer import coordinator
from diloco_syncer.core import events as ev
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.pulled import WINDOW, finish, pulled_together


def own(pair, index):
    """What the engine has counted for a member of the round that collects."""
    [round_] = pair.syncer.state.engine.scheduler.in_flight
    return round_.members[f"eu/{index}"].own_seconds


def test_a_member_needs_the_time_to_its_header_and_that_in_which_its_messages_are_awaited(pair):
    pair.wait(1.0)
    first = pair.upload(0).send(1)
    pair.syncer.run()
    pair.wait(1.0)
    second = pair.upload(1).send(1)
    pair.syncer.run()
    for upload in (first, second):
        upload.resume()
    pair.wait(0.5)
    first.send(WINDOW + 1)
    assert first.receiver.waiting is not None
    pair.wait(0.5)
    second.send(2)
    finish(first, second)
    assert pair.progress("eu/0")[-1].awaited_seconds == pytest.approx(0.5), (
        "not the wait for the other header, nor for room"
    )
    assert pair.progress("eu/1")[-1].awaited_seconds == pytest.approx(1.0)
    for event in pair.progress("eu/0") + pair.progress("eu/1"):
        pair.syncer.state.engine.handle(event, pair.syncer.now)
    assert (own(pair, 0), own(pair, 1)) == (pytest.approx(1.5), pytest.approx(3.0))


def test_the_time_of_a_fragment_that_is_rebuilt_counts_once(pair):
    first = pair.upload(0).send(1)
    upload = pair.whole().send(1)
    pair.syncer.run()
    while upload.left:
        pair.wait(0.3)
        upload.send(1)
        pair.syncer.run()
    pair.syncer.run()
    begun = pair.progress("eu/1")[0]
    assert begun.awaited_seconds == 0.0
    took = pair.syncer.now
    assert own(pair, 1) == pytest.approx(took)
    finish(first, upload)
    assert pair.progress("eu/1")[-1].awaited_seconds == 0.0


def test_a_new_stream_does_not_undo_the_time_that_a_member_has_taken(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    first.resume()
    second.resume().send(2)
    pair.wait(2.0)
    newer = pair.upload(1).send(1)
    assert second.cancelled
    newer.resume()
    finish(first, newer)
    assert pair.progress("eu/1")[-1].awaited_seconds == pytest.approx(2.0)


def test_a_new_stream_while_headers_are_awaited_is_not_charged_for_that(pair):
    staged = pair.whole().send(2)
    newer = pair.upload(1).send(1)
    pair.syncer.run()
    assert staged.cancelled
    pair.wait(2.5)
    first = pair.upload(0).send(1)
    pair.syncer.run()
    finish(first, newer)
    assert pair.progress("eu/1")[-1].awaited_seconds == 0.0
    assert own(pair, 1) == 0.0


def test_a_new_stream_that_is_rebuilt_after_the_header_of_the_one_before_counts(pair):
    pair.upload(1).send(1)
    pair.syncer.run()
    delta = random_delta(pair.learners[1].layout.fragments[0], 1)
    newer = pair.learners[1].upload(
        pair.pull, -delta, content=bulk.WHOLE, base=None, norms=[]
    ).send(1)  # fmt: skip
    first = pair.upload(0).send(1)
    pair.syncer.run()
    pair.wait(2.8)
    finish(first, newer)
    assert pair.progress("eu/1")[-1].awaited_seconds == pytest.approx(2.8)


def test_a_new_stream_of_a_held_back_member_that_is_silent_is_refused():
    job = pulled_together(3)
    scheduler = job.syncer.state.engine.scheduler
    scheduler.spec = replace(scheduler.spec, quorum=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "MERGE_WINDOW_BYTES", 1)
        uploads = [job.upload(index).send(1) for index in range(3)]
        job.syncer.run()
    *others, last = uploads
    for _ in range(4):
        for upload in uploads:
            upload.resume()
        last.send_all()
        job.syncer.run()
    assert job.progress("eu/2")[-1].waiting
    job.upload(2).send(1)
    job.syncer.run()
    for _ in range(30):
        for upload in others:
            if not upload.receiver.done:
                upload.resume().send_all()
        job.syncer.run()
    for _ in range(60):
        job.syncer.now += 1.0
        job.heartbeats()
    refused = [x for x in job.syncer.lines if x["event"] == "refuse"]
    assert (refused[0]["learner"], refused[0]["reason"]) == ("eu/2", "Stalled")


def test_what_a_held_back_member_would_have_needed_follows_from_its_rate_until_then(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    second.resume()
    chunks = pair.learners[0].layout.fragments[0].chunks
    first.resume()
    pair.wait(3.0)
    first.send(1)
    for _ in range(WINDOW):
        pair.wait(0.5)
        first.send(1)
    assert first.receiver.waiting is not None
    pair.wait(5.0)
    finish(first, second)
    last = pair.progress("eu/0")[-1]
    assert last.awaited_seconds == pytest.approx(3.0 + 0.5 * WINDOW)
    assert last.expected_seconds == pytest.approx(3.0 + 0.5 * (chunks - 1)), (
        "one slow start counts once"
    )


def test_a_pause_of_the_syncer_is_not_the_time_of_the_member_that_it_waited_for(pair):
    first, second = pair.upload(0).send(1), pair.upload(1).send(1)
    pair.syncer.run()
    for upload in (first, second):
        upload.resume()
    pair.wait(0.5)
    pair.syncer.now += 20.0
    pair.syncer.run(ev.Tick())
    first.send(2)
    second.send(2)
    pair.syncer.run()
    assert pair.progress("eu/1")[-1].awaited_seconds == pytest.approx(20.5)
    assert own(pair, 1) == pytest.approx(0.5)
    finish(first, second)
