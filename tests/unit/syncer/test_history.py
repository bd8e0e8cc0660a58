"""What a learner is credited: the counters of its Reports, within what time and its own past explain (a01)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import Reported
from diloco_syncer.core.history import HISTORY_MULTIPLE, MAX_REPORTS, CountsDifferError, History


def report(local_step, *, steps=None, tokens=None, total=None, offers=(0,)):
    steps = local_step if steps is None else steps
    return Reported(
        session=1, learner="eu/0", local_step=local_step, steps=(steps,),
        tokens=(100 * steps if tokens is None else tokens,), offers=frozenset(offers),
        total_tokens=100 * local_step if total is None else total, global_step=0,
        step_seconds=1.0, sync_seconds=0.0, loss=None,
    )  # fmt: skip


def upload(local_step, steps, tokens):
    return Contribution(
        learner="eu/0", incarnation=1, round=1, attempt=1, local_step=local_step, steps=steps,
        tokens=tokens, base=(1, 0), format=1, norms=(),
    )  # fmt: skip


def honest(count=5):
    history = History()
    for step in range(1, count + 1):
        history.add(report(step), float(step))
    return history


def test_an_upload_with_the_counters_of_its_report_is_credited_unchanged():
    history = honest()
    same = upload(4, 4, 400)
    assert history.credit(same, 0) is same


@pytest.mark.parametrize(("steps", "tokens"), [(1, 400), (4, 2**63), (5, 500), (4, 399)])
def test_an_upload_that_states_other_counters_than_its_report_is_refused(steps, tokens):
    with pytest.raises(CountsDifferError, match="its report of local step 4 400 in 4"):
        honest().credit(upload(4, steps, tokens), 0)


def test_an_upload_that_is_faster_than_its_report_waits_for_it():
    history = honest()
    early = upload(6, 6, 600)
    assert history.credit(early, 0) is None
    history.add(report(6), 6.0)
    assert history.credit(early, 0) is early


def test_a_step_whose_report_was_never_sent_counts_the_usual_tokens():
    history = honest()
    history.add(report(8), 8.0)  # 6 and 7 were replaced by newer ones in the link
    assert history.credit(upload(7, 7, 700), 0) == upload(7, 7, 700)
    credited = history.credit(upload(7, 7, 10**9), 0)
    assert (credited.steps, credited.tokens) == (7, 700)


def test_tokens_grow_by_a_multiple_of_the_usual_at_most():
    history = honest()
    history.add(report(6, tokens=2**49, total=2**49), 6.0)
    credited = history.credit(upload(6, 6, 2**49), 0)
    assert credited.tokens == 500 + HISTORY_MULTIPLE * 100


def test_steps_grow_by_what_the_time_allows():
    history = honest()
    assert history.add(report(1005), 6.0) == 1 + HISTORY_MULTIPLE
    assert history.credit(upload(1005, 1005, 100_500), 0).steps == 5 + 1 + HISTORY_MULTIPLE


def test_a_learner_that_was_cut_off_keeps_the_steps_that_it_made():
    history = honest()
    assert history.add(report(605), 605.0) == 600
    assert history.credit(upload(605, 605, 60_500), 0) == upload(605, 605, 60_500)


def test_fewer_steps_for_the_same_tokens_are_worth_no_more():
    history = honest(20)
    history.add(report(21, steps=1, tokens=2100), 21.0)
    assert history.credit(upload(21, 1, 2100), 0).steps == 21


def test_a_fragment_that_was_received_counts_anew():
    history = honest()
    history.add(report(6, steps=1), 6.0)
    assert history.credit(upload(6, 1, 100), 0) == upload(6, 1, 100)


def test_a_new_incarnation_counts_anew_and_keeps_its_averages():
    history = honest()
    history.restart()
    history.add(report(1, tokens=2**49, total=2**49), 10.0)
    assert history.credit(upload(1, 1, 2**49), 0).tokens == HISTORY_MULTIPLE * 100


def test_only_the_newest_reports_are_kept():
    history = honest(3 * MAX_REPORTS)
    assert len(history.offered) == MAX_REPORTS


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(50, 180), st.floats(0, 20), st.booleans()),
        max_size=60,
    )
)
def test_an_honest_learner_is_always_credited_what_it_counted(moves):
    """Steps at any times, tokens that differ less than twofold from their usual, results in between."""
    history, local_step, total, steps, tokens, now = History(), 0, 0, 0, 0, 0.0
    for advance, per_step, pause, received in moves:
        # Reports that were replaced by a newer one were no faster than the usual.
        now += pause + (advance - 1) * 1.0 * (history.seconds_per_step or 0.0)
        if received:
            steps = tokens = 0
        local_step, total = local_step + advance, total + advance * per_step
        steps, tokens = steps + advance, tokens + advance * per_step
        stated = report(local_step, steps=steps, tokens=tokens, total=total)
        history.add(stated, now)
        contribution = upload(local_step, steps, tokens)
        assert history.credit(contribution, 0) == contribution
        assert history.newest == replace(stated)
