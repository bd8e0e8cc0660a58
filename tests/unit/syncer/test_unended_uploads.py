"""Uploads that stall, break or are replaced: each member holds one of an attempt, and none after it."""

from __future__ import annotations

from diloco.model.fragments import Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec
from diloco_testing.syncers.pulled import TENSORS, finish

SMALL = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(2))


def stalled(pair):
    """An upload of which the last chunk and the end are missing."""
    upload = pair.whole()
    return upload.send(len(upload.left) - 2)


def drops(pair):
    return [(e.learner, e.reason) for e in pair.syncer.posted if isinstance(e, ev.Dropped)]


def test_a_member_holds_one_upload_per_attempt_and_none_after_it(pair):
    uploads = [stalled(pair) for _ in range(12)]
    assert [u.cancelled for u in uploads] == [True] * 11 + [False]
    for older in uploads[:-1]:
        older.receiver.lost()
    assert drops(pair) == [], "the newer one may still deliver"
    pair.syncer.run(ev.Left(session=2, learner="eu/1", reason="StreamEnded"))
    assert uploads[-1].cancelled, "the attempt is over"


def test_the_upload_that_replaces_another_is_merged(pair):
    stalled(pair)
    second, first = pair.whole().send_all(), pair.upload(0).send(1)
    pair.syncer.run()
    finish(first, second)
    pair.syncer.run()
    assert [u.replies[-1].done for u in (first, second)] == [True, True]
    assert pair.syncer.merged() == [1]
    late = pair.upload(1).send(1).replies[-1]
    assert (late.refused, drops(pair)) == ("Aborted", []), "it has delivered"


def test_a_complete_upload_that_waits_for_the_others_is_released_when_it_is_replaced(pair):
    older = pair.whole().send_all()
    assert older.receiver.waiting.until(0) is False
    newer = pair.upload(1).send(1)
    assert older.cancelled
    assert older.receiver.waiting.until(0) is True
    assert older.resume().replies[-1].refused == "Aborted"
    assert (older.receiver.done, newer.receiver.done, drops(pair)) == (True, False, [])


def test_the_loss_of_the_newest_upload_drops_the_member_although_an_older_one_is_left(pair):
    older, newer = stalled(pair), stalled(pair)
    newer.receiver.lost()
    older.receiver.lost()
    assert drops(pair) == [("eu/1", "StreamBroken")]


def test_a_commit_ends_the_upload_of_a_member_that_the_round_continued_without():
    spec = driven_spec(fragments=1, interval=1, quorum=2, learners={"eu": 3}, grace_max_steps=2.0)
    syncer = DrivenSyncer(spec)
    first, second, third = learners = [DrivenLearner(syncer, f"eu/{i}", SMALL) for i in range(3)]
    first.initialise([random_delta(f, 9) for f in first.layout.fragments])
    for learner in learners:
        learner.received()

    def deliver(pull):
        uploads = [x.upload(pull, random_delta(x.layout.fragments[0], 1)) for x in (first, second)]
        for upload in uploads:
            upload.send(1)
        syncer.run()
        for upload in uploads:
            upload.resume().send_all()
        return uploads

    first.step()
    [pull] = second.step()
    deliver(pull)
    syncer.run()
    third.step()
    first.step()
    [pull] = second.step()  # of all three, which train now
    values_N = random_delta(third.layout.fragments[0], 2)
    left = third.upload(pull, values_N, content=bulk.WHOLE, base=None, norms=[]).send(1)
    lost = ev.Dropped(
        learner="eu/2", round=pull.round, attempt=pull.attempt, reason="StreamBroken", detail=""
    )
    syncer.run(lost)
    uploads = deliver(pull)
    assert (syncer.merged(), left.cancelled) == ([1], False)
    syncer.run()
    assert (syncer.merged(), left.cancelled) == ([1, 2], True)
    assert not any(u.cancelled for u in uploads)


def test_a_header_for_an_attempt_that_is_over_takes_no_memory(pair):
    attempt = pair.syncer.attempts.get(pair.pull.round, pair.pull.attempt)
    attempt.finish(committed=True)
    upload = pair.whole().send(1)
    assert upload.replies[-1].refused == "Aborted"


def test_a_learner_that_was_not_pulled_is_refused_at_its_header(pair):
    third = DrivenLearner(pair.syncer, "eu/2", TENSORS)
    values_N = random_delta(third.layout.fragments[0], 2)
    [refused] = third.upload(pair.pull, values_N).send(1).replies
    assert refused.refused == "Protocol"
    assert "eu/2 is not a member" in refused.detail


def test_the_upload_of_a_probe_is_cancelled_when_the_probe_is_over(pair):
    learner = pair.learners[0]
    learner.received()
    probe = ev.ProbeLearner(round=4, attempt=9, fragment=0, learner="eu/0")
    pair.syncer.coordinator._carry_out(probe)
    [pull] = [m.pull for m in learner.received() if m.WhichOneof("kind") == "pull"]
    values_N = random_delta(learner.layout.fragments[0], 0)
    older, upload = (learner.upload(pull, values_N).send(3) for _ in range(2))
    assert (older.cancelled, upload.cancelled) == (True, False)
    pair.syncer.coordinator._carry_out(ev.AbortMerge(round=4, attempt=9, reason="late"))
    assert upload.cancelled


def test_parts_of_the_initial_model_are_held_once_and_not_of_two_senders():
    syncer = DrivenSyncer(driven_spec())
    first, second = (DrivenLearner(syncer, f"eu/{i}", SMALL) for i in range(2))
    values_N = random_delta(first.layout.fragments[0], 1)

    def part(learner, fragment):
        pull = pb.Pull(fragment=fragment)
        return learner.upload(pull, values_N, content=bulk.INITIAL, base=None, norms=[])

    stalled = [part(first, fragment).send(1) for fragment in (0, 0, 1)]
    assert [u.cancelled for u in stalled] == [True, False, False]
    assert part(first, 0).send_all().replies[-1].done, "a complete one is not cancelled"
    syncer.run(ev.Left(session=first.session.number, learner="eu/0", reason="StreamEnded"))
    begun = part(second, 0).send(1)
    assert [u.cancelled for u in (*stalled, begun)] == [True, True, True, False]
    late = stalled[2].send_all().replies[-1]
    assert late.refused == "StaleIncarnation", "what was on its way when it was cancelled"
    again = part(second, 1).send(1)
    second.initialise([values_N, random_delta(second.layout.fragments[1], 2)])
    assert [u.cancelled for u in (begun, again)] == [True, True]
    assert syncer.facts.parameters is not None
