"""What the engine does with blocks of data: whose statements count, and what else leases and releases them."""

from __future__ import annotations

from diloco_syncer.core import events as ev
from diloco_syncer.core.blocks import HOLD_SECONDS, IDLE_SECONDS
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.events import BlocksStated, TrainedBlock
from diloco_syncer.core.history import ABSENT_STEPS
from diloco_testing.syncers.engine_job import Job, logs, of


def state(job, name, *, session=None, items=30, wanted=1, opened=(), trained=(), at=None):
    event = BlocksStated(
        session=session or job.session(name), learner=name, items=items, size=10, wanted=wanted,
        open=tuple(opened), trained=tuple(trained),
    )  # fmt: skip
    return job(event, at=at)


def leased(decisions):
    return {d.learner: d.serials for d in of(ev.LeaseBlocks, decisions)}


def test_a_statement_is_answered_with_leases_to_its_incarnation():
    job = Job("ab")
    out = state(job, "b", wanted=2)
    assert leased(out) == {"b": (0, 1)}
    assert [line["incarnation"] for line in logs("lease", out)] == [2]
    assert leased(state(job, "a")) == {"a": (2,)}


def test_a_statement_of_a_session_that_is_over_is_ignored():
    job = Job("ab")
    assert leased(state(job, "a", session=9)) == {}
    job.left("a")
    assert leased(state(job, "a")) == {}
    assert job.engine.blocks.dataset is None


def test_a_learner_with_another_dataset_is_refused_and_leaves():
    job = Job("ab")
    state(job, "a")
    out = state(job, "b", items=31)
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (2, "Config")
    assert close.detail.startswith("b states a dataset of 31 items in blocks of 10, expected 30 ")
    assert logs("refuse", out) == [{"learner": "b", "reason": "Config", "detail": close.detail}]
    assert [(line["learner"], line["reason"]) for line in logs("leave", out)] == [("b", "Config")]
    assert job["b"].session is None
    assert leased(out) == {}
    assert job["a"].session == 1


def test_steps_that_no_learner_can_have_made_are_refused_also_in_a_statement_of_blocks():
    job = Job("ab")
    state(job, "a")
    job.hello("b", session=7, incarnation=7)
    far = TrainedBlock(serial=0, begin=0, end=2 * ABSENT_STEPS)
    out = state(job, "b", session=7, trained=[TrainedBlock(serial=9, begin=0, end=1), far], at=5.0)
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (7, "Config")
    assert close.detail.startswith(f"local_step is {2 * ABSENT_STEPS}, and time permits at most ")
    assert [line["reason"] for line in logs("refuse", out)] == ["Config"]
    assert job["b"].session is None


def test_blocks_of_a_learner_that_leaves_are_leased_to_the_next_and_those_of_a_broken_session_later():
    job = Job("ab")
    state(job, "a")
    state(job, "b")
    out = job.left("a", at=1.0)
    assert [line["reason"] for line in logs("release", out)] == ["Gone"]
    assert leased(state(job, "b", wanted=2, opened=[1])) == {"b": (1, 0)}
    left = ev.Left(session=2, learner="b", reason="StreamEnded")
    assert logs("release", job(left, at=2.0)) == []
    assert logs("release", job(ev.Tick(), at=1.9 + HOLD_SECONDS)) == []


def test_a_new_process_of_a_learner_has_nothing_of_what_the_one_before_had():
    job = Job("ab")
    state(job, "a")
    job(ev.Left(session=1, learner="a", reason="StreamEnded"))
    out = job.hello("a", session=5, incarnation=5)
    assert [(line["learner"], line["reason"]) for line in logs("release", out)] == [
        ("a", "Replaced")
    ]
    # The same process has its blocks again.
    state(job, "b")
    job(ev.Left(session=2, learner="b", reason="StreamEnded"))
    assert logs("release", job.hello("b", session=6, incarnation=2, fresh=False)) == []


def waits_for_a(job):
    """b has trained on what a does not have, and waits."""
    job.meet()
    state(job, "a")
    out = state(job, "b")
    while serials := leased(out).get("b"):
        done = [TrainedBlock(serial=serial, begin=0, end=1) for serial in serials]
        out = state(job, "b", trained=done)
    return job


def alive(job, until, *, steps=()):
    """Heartbeats of both until then, and steps of these; returns the lines about released blocks."""
    found, step = [], 0
    while job.now < until:
        at, step = min(job.now + 1.0, until), step + 1
        for name in "ab":
            found += job(ev.Heartbeat(session=job.session(name), learner=name), at=at)
        for name in steps:
            found += job.report(name, step, offers=frozenset())
        found += job(ev.Tick())
    return logs("release", found)


def test_steps_of_a_learner_keep_its_blocks():
    job = waits_for_a(Job("ab"))
    assert [line["reason"] for line in alive(job, IDLE_SECONDS + 1)] == ["NoSteps"]
    job = waits_for_a(Job("ab"))
    assert alive(job, 1.5 * IDLE_SECONDS, steps="ab") == []
    # Another one's do not.
    job = waits_for_a(Job("ab"))
    assert [line["learner"] for line in alive(job, IDLE_SECONDS + 1, steps="b")] == ["a"]


def test_a_pause_of_the_syncer_is_not_counted_against_a_learner():
    job = waits_for_a(Job("ab"))
    assert logs("pause", job(ev.Tick(), at=50.0))
    assert alive(job, IDLE_SECONDS + 49.0) == []
    assert [line["reason"] for line in alive(job, IDLE_SECONDS + 51.0)] == ["NoSteps"]


def test_leases_outlive_the_syncer():
    job = Job("ab")
    state(job, "a", wanted=2)
    after = Engine.resume(job.engine.spec, epoch=2, state=job.engine.to_json())
    assert after.blocks.to_json() == job.engine.blocks.to_json()
    assert after.blocks.to_json()["held"] == {"a": {"incarnation": 1, "open": [0, 1]}}
    old = {name: value for name, value in job.engine.to_json().items() if name != "blocks"}
    assert Engine.resume(job.engine.spec, epoch=2, state=old).blocks.dataset is None


def test_a_lease_that_cannot_be_sent_ends_the_session():
    job = Job("ab")
    [lease] = of(ev.LeaseBlocks, state(job, "a"))
    out = job(ev.Failed(decision=lease, reason="full"))
    assert [(close.session, close.reason) for close in of(ev.Close, out)] == [(1, "Unavailable")]
    assert job["a"].session is None
