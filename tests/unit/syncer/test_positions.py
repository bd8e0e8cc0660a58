"""A learner's position never moves back, so one that no learner can have reached must not be believed."""

import pytest

from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.history import (
    ABSENT_STEPS,
    ABSENT_TOKENS,
    STEPS_PER_SECOND,
    TOKENS_PER_SECOND,
    Origin,
)
from diloco_testing.syncers.engine_job import Job, logs, of

FAR, MANY = 1 << 40, 1 << 50


@pytest.mark.parametrize("lie", [{"local_step": FAR}, {"local_step": 3, "total_tokens": MANY}])
def test_a_report_that_time_does_not_permit_ends_its_session_and_counts_for_nothing(lie):
    job = Job("ab")
    job.report("a", 2, at=1.0)
    decisions = job.report("a", **lie, at=2.0)
    [close] = of(ev.Close, decisions)
    assert close.reason == "Protocol"
    assert "time permits at most" in logs("refuse", decisions)[0]["detail"]
    assert logs("leave", decisions)[0]["reason"] == "Protocol"
    assert (job["a"].local_step, job["a"].total_tokens) == (2, 20)
    # The honest process comes back where it was.
    job.hello("a", session=7, incarnation=9, at=3.0)
    assert job["a"].session == 7


def test_a_hello_that_time_does_not_permit_is_refused_also_of_a_learner_never_seen():
    job = Job("")
    decisions = job(hello(local_step=FAR))
    assert of(ev.Admit, decisions) == []
    assert "time permits at most" in logs("refuse", decisions)[0]["detail"]
    [admit] = of(ev.Admit, job(hello(local_step=0)))
    assert admit.local_step == 0


def test_a_learner_that_trained_while_the_syncer_did_not_run_is_believed():
    job = Job("a")
    job.report("a", 10)
    resumed = Engine.resume(job.engine.spec, epoch=2, state=job.engine.to_json())
    back = hello(local_step=1_000_000, incarnation=1, fresh=False)
    [admit] = of(ev.Admit, resumed.handle(back, 5.0))
    assert admit.local_step == 1_000_000


def test_the_bound_moves_with_time_from_where_the_learner_was_first():
    origin = Origin(7, 100, 50.0)
    steps, tokens = 7 + ABSENT_STEPS, 100 + ABSENT_TOKENS
    assert origin.implausible(steps, tokens, 50.0) == ""
    assert "local_step" in origin.implausible(steps + 1, tokens, 50.0)
    assert "total_tokens" in origin.implausible(steps, tokens + 1, 50.0)
    later = (steps + 10 * STEPS_PER_SECOND, tokens + 10 * TOKENS_PER_SECOND)
    assert origin.implausible(*later, 60.0) == ""
    assert origin.implausible(*later, 59.0) != ""


def test_lies_within_the_bound_keep_far_from_the_largest_position_of_a_report():
    """Each restart of the syncer gives one month more: a learner is not locked out of its job."""
    assert 100 * ABSENT_STEPS < FAR
    assert 60 * ABSENT_TOKENS < MANY


def hello(*, local_step: int, incarnation: int = 1, fresh: bool = True) -> ev.Hello:
    return ev.Hello(
        session=1, learner="a", region="eu", incarnation=incarnation, fresh=fresh,
        local_step=local_step, checkpoint_step=0,
    )  # fmt: skip
