"""What a learner is credited: the counters of its Reports, within what time and its own past explain (a01)."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import Reported
from diloco_syncer.core.history import (
    HISTORY_MULTIPLE,
    MAX_REPORTS,
    MAX_UNSPENT,
    CountsDifferError,
    History,
)


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


@pytest.mark.parametrize(
    ("steps", "tokens", "usual"),
    [(0, 100, None), (4, 0, None), (4, 400, 100), (1, 400, 400), (4, 1, 0.25)],
)
def test_a_first_report_shows_the_usual_tokens_if_it_has_steps_and_tokens(steps, tokens, usual):
    history = History()
    history.add(report(4, steps=steps, tokens=tokens), 1.0)
    assert history.tokens_per_step == usual


def test_no_steps_are_credited_no_tokens_also_if_nothing_is_usual_yet():
    history = History()
    history.add(report(1, steps=0, tokens=110), 1.0)
    credited = history.credit(upload(1, 0, 110), 0)
    assert (credited.steps, credited.tokens) == (0, 0)


def test_an_upload_that_is_faster_than_its_report_waits_for_it():
    history = honest()
    early = upload(6, 6, 600)
    assert history.credit(early, 0) is None
    history.add(report(6), 6.0)
    assert history.credit(early, 0) is early


def skipping():
    """Reports of the steps 1 to 5 and of 8; 6 and 7 were replaced by newer ones in the link."""
    history = honest()
    history.add(report(8), 8.0)
    return history


def test_an_upload_of_a_step_without_a_report_is_credited_what_it_counted():
    contribution = upload(7, 7, 700)
    assert skipping().credit(contribution, 0) is contribution


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [(27, 2700), (8, 700), (6, 700), (1, 100), (7, 801), (7, 10**9), (7, 499), (7, 0)],
    ids=["a whole interval", "a step more", "a step less", "a result that was not applied",
         "more tokens than later", "a lie", "fewer tokens than before", "none"],
)  # fmt: skip
def test_an_upload_of_a_step_without_a_report_that_the_others_contradict_is_refused(steps, tokens):
    with pytest.raises(
        CountsDifferError, match=f"{tokens} tokens in {steps} steps at local step 7"
    ):
        skipping().credit(upload(7, steps, tokens), 0)


def reset(after):
    """Reports of the steps 1 to 5, and one of step 12 that shows a result applied at step `after`."""
    history = honest()
    steps = 12 - after
    history.add(report(12, steps=steps), 12.0)
    return history


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [(8, 800), (1, 100), (2, 200), (3, 300)],
    ids=["none", "at 7", "at 6", "at 5, after its report"],
)
def test_a_result_may_have_been_applied_before_the_one_that_the_next_report_shows(steps, tokens):
    """The copy is of step 8, and the report of step 12 shows the result of step 10."""
    contribution = upload(8, steps, tokens)
    assert reset(10).credit(contribution, 0) is contribution


def test_a_result_may_be_applied_at_the_step_of_the_copy_after_it():
    contribution = upload(8, 8, 800)
    assert reset(8).credit(contribution, 0) is contribution


@pytest.mark.parametrize(
    ("steps", "tokens"), [(8, 800), (27, 2700), (2, 200), (4, 400), (3, 301 + 500), (3, 701)]
)
def test_an_upload_after_a_result_counts_from_that_result(steps, tokens):
    """The copy is of step 9, the result of step 6: the learner that skips a report cannot hide it."""
    contribution = upload(9, 3, 300)
    assert reset(6).credit(contribution, 0) is contribution
    with pytest.raises(CountsDifferError):
        reset(6).credit(upload(9, steps, tokens), 0)


def test_steps_without_tokens_may_be_between_two_reports():
    contribution = upload(7, 7, 500)
    assert skipping().credit(contribution, 0) is contribution


def test_a_step_of_a_single_token_lowers_the_usual():
    history = honest(2)
    assert history.tokens_per_step == 100.0
    history.add(report(3, tokens=201, total=201), 3.0)
    assert history.tokens_per_step < 100.0


def test_a_slow_learner_gains_no_weight_by_skipping_the_report_of_its_copy():
    """Reports of the steps 1 and 3; an interval of 24 steps stated for the two that it made."""
    history = honest(1)
    history.add(report(3), 3.0)
    with pytest.raises(CountsDifferError, match="not merged"):
        history.credit(upload(2, 24, 2400), 0)


def test_tokens_of_a_step_without_a_report_are_at_most_a_multiple_of_the_usual():
    history = honest()
    history.add(report(7, tokens=2**49, total=2**49), 7.0)
    credited = history.credit(upload(6, 6, 2**48), 0)
    assert (credited.steps, credited.tokens) == (6, 500 + HISTORY_MULTIPLE * 100)


def test_steps_without_a_report_are_at_most_what_the_time_allows():
    history = honest()
    history.add(report(1005), 6.0)
    assert history.credit(upload(1004, 1004, 100_400), 0).steps == 5 + 1 + HISTORY_MULTIPLE


def test_tokens_of_steps_that_the_time_does_not_allow_are_those_since_the_report_before():
    """Five of 995 steps since step 9, whose 900 tokens are credited already."""
    history = honest(9)
    history.add(report(1005), 10.0)
    credited = history.credit(upload(1004, 1004, 100_400), 0)
    assert (credited.steps, credited.tokens) == (9 + 1 + HISTORY_MULTIPLE, 900 + 500)


def test_a_report_that_offered_nothing_shows_the_counters_of_its_step():
    """The link offers no fragment whose next result has arrived; the copy still exists."""
    history = honest()
    history.add(report(6, offers=()), 6.0)
    history.add(report(7), 7.0)
    assert history.credit(upload(6, 6, 600), 0) == upload(6, 6, 600)
    with pytest.raises(CountsDifferError, match="its report of local step 6 600 in 6"):
        history.credit(upload(6, 24, 2400), 0)


def test_an_upload_of_a_step_before_every_report_is_refused():
    """A syncer pulls what a report offers, so the copy is of that step or a later one."""
    history = History()
    history.add(report(6), 6.0)
    with pytest.raises(CountsDifferError, match="no report of local step 5 or before"):
        history.credit(upload(5, 5, 500), 0)


def test_tokens_grow_by_a_multiple_of_the_usual_at_most():
    history = honest()
    history.add(report(6, tokens=2**49, total=2**49), 6.0)
    credited = history.credit(upload(6, 6, 2**49), 0)
    assert credited.tokens == 500 + HISTORY_MULTIPLE * 100


def test_steps_grow_by_what_the_time_allows():
    history = honest()
    assert history.add(report(1005), 6.0) == 1 + HISTORY_MULTIPLE
    assert history.credit(upload(1005, 1005, 100_500), 0).steps == 5 + 1 + HISTORY_MULTIPLE


def test_tokens_of_steps_that_the_time_does_not_allow_are_not_credited_either():
    """Of 1000 steps 5 are credited, with the tokens of 5: fewer steps for the tokens would be worth more."""
    history = honest()
    history.add(report(1005), 6.0)
    assert history.credit(upload(1005, 1005, 100_500), 0) == upload(1005, 10, 1000)
    assert history.credit(upload(1004, 1004, 100_400), 0) == upload(1004, 10, 1000)


def test_a_learner_that_was_cut_off_keeps_the_steps_that_it_made():
    history = honest()
    assert history.add(report(605), 605.0) == 600
    assert history.credit(upload(605, 605, 60_500), 0) == upload(605, 605, 60_500)


def test_a_learner_whose_report_was_held_up_keeps_the_steps_that_it_made_meanwhile():
    """The connection delivers the report of step 6 after 30 s, and the newest one at once after it."""
    history = honest()
    history.add(report(6), 36.0)
    assert history.add(report(36), 36.05) == 30
    assert history.credit(upload(36, 36, 3600), 0) == upload(36, 36, 3600)
    assert history.add(report(1036), 37.0) < 20, "and no more than those"


def test_half_of_the_time_that_was_not_used_is_kept_once_a_report_takes_no_more_than_its_own_time():
    history = honest()
    history.usual_seconds, history.unspent = 1.0, 100.0
    assert history._steps(2, 0.5) == HISTORY_MULTIPLE * 0.5
    assert history.unspent == 100.0 / 2 + 2 - HISTORY_MULTIPLE * 2
    history.unspent = 100.0
    assert history._steps(3, 0.5) == 3
    assert history.unspent == 100.0 + 2 - HISTORY_MULTIPLE * 3, "it was held up"


def test_a_learner_cannot_save_up_steps_by_an_uneven_pace():
    history = History()
    for step in range(1, 400):
        history.add(report(step), step + 0.4 * (step % 2))
    assert history.add(report(2000), 400.4) < 20


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.6, 1.0, 1.4]), min_size=1, max_size=4),  # seconds of steps
            st.integers(0, 40),  # steps that a connection held up
            st.integers(1, 4),  # reports that it held, before newer ones replaced each other
        ),
        max_size=20,
    )
)
def test_reports_that_a_connection_held_up_cost_an_honest_learner_nothing(moves):
    history, now, step = honest(), 5.0, 5

    def arrives(to):
        assert history.add(report(to), now) == to - step
        return to

    for durations, held, queued in moves:
        for seconds in durations:
            now += seconds
            step = arrives(step + 1)
        if held:
            now += held
            last = step + held
            for to in range(step + 1, min(last, step + queued) + 1):
                now += 0.001
                step = arrives(to)
            if last > step:
                now += 0.05
                step = arrives(last)


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


def test_a_new_incarnation_has_saved_up_nothing_in_the_time_before_its_first_report():
    at_once, later = honest(), honest()
    for history, now in ((at_once, 6.0), (later, 600.0)):
        history.restart()
        assert history.add(report(1), now) == 1
    assert at_once.add(report(101), 7.0) == later.add(report(101), 601.0) < 100


def test_few_reports_are_kept_and_the_older_ones_still_bound_an_upload():
    history = honest(10 * MAX_REPORTS)
    assert len(history.reports) <= MAX_REPORTS
    for step in range(1, 10 * MAX_REPORTS + 1):
        contribution = upload(step, step, 100 * step)
        assert history.credit(contribution, 0) is contribution
        with pytest.raises(CountsDifferError):
            history.credit(upload(step, step + 1, 100 * step), 0)


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


MOVES = st.tuples(
    st.integers(50, 180),  # tokens of the step
    st.sampled_from([0.5, 1.0, 1.5]),  # its seconds
    st.sampled_from(["train", "train", "train", "copy", "copy", "result"]),
    st.booleans(),  # its report is replaced by a newer one
    st.sampled_from(["", "", "", "", "reconnect", "syncer", "restart"]),
)


@given(st.lists(MOVES, max_size=120))
def test_an_honest_upload_is_never_reduced_whichever_reports_were_skipped(moves):
    """
    Every copy since the first report that a syncer has of an incarnation, as soon as one of its step
    or of a later one has arrived: with results in between, and with reports that come again.
    """
    history, local_step, total, steps, tokens, now = History(), 0, 0, 0, 0, 0.0
    waiting, copies = [], []
    newest = None
    for per_step, seconds, what, skipped, event in moves:
        now, local_step, total = now + seconds, local_step + 1, total + per_step
        steps, tokens = steps + 1, tokens + per_step
        if what == "copy":
            waiting.append(upload(local_step, steps, tokens))
        if what == "result":
            steps = tokens = 0
        match event:
            case "reconnect":
                now += 30.0
                history.pause()
            case "syncer":
                # It knows nothing, and pulls what the first report offers, or newer copies.
                history, newest, waiting, copies = History(), None, [], []
            case "restart":
                history.pause()
                history.restart()
                steps = tokens = 0
                newest, waiting, copies = None, [], []
        if skipped or event in ("syncer", "restart"):
            continue
        stated = report(local_step, steps=steps, tokens=tokens, total=total)
        if newest is None:
            waiting = [copy for copy in waiting if copy.local_step == local_step]
        history.add(stated, now)
        newest, copies, waiting = stated, [*copies, *waiting], []
        for contribution in copies:
            assert history.credit(contribution, 0) is contribution


@given(
    st.lists(MOVES, min_size=2, max_size=60),
    st.integers(0, 10**6),
    st.integers(0, 40),
    st.integers(0, 10**5),
)
def test_no_upload_is_credited_more_than_a_report_of_its_step_would_have_been(
    moves, which, false_steps, false_tokens
):
    """
    Whatever a learner falsely states for a step that it did not report: never more steps than the report before
    and the steps since, never more tokens than 4 times the usual for each of them.
    """
    history, local_step, total, steps, tokens, now = History(), 0, 0, 0, 0, 0.0
    before = {}
    newest = (0, 0, 0, None)
    for per_step, seconds, what, skipped, _ in moves:
        now, local_step, total = now + seconds, local_step + 1, total + per_step
        steps, tokens = (0, 0) if what == "result" else (steps + 1, tokens + per_step)
        if skipped:
            before[local_step] = newest
            continue
        history.add(report(local_step, steps=steps, tokens=tokens, total=total), now)
        newest = (local_step, steps, tokens, history.tokens_per_step)
    if not before:
        return
    at = sorted(before)[which % len(before)]
    reported_at, reported_steps, reported_tokens, usual = before[at]
    try:
        credited = history.credit(upload(at, false_steps, false_tokens), 0)
    except CountsDifferError:
        return
    if credited is None:
        return  # it waits for a report of its step, or of a later one
    since = at - reported_at
    assert credited.steps <= reported_steps + since
    most = math.inf if usual is None else math.ceil(HISTORY_MULTIPLE * since * usual)
    assert credited.tokens <= min(false_tokens, reported_tokens + most)


# ---------------------------------------------------------------- what is kept and learned


def test_the_tokens_after_a_result_are_those_of_the_steps_after_it():
    """The time allows 5 of 1000 steps; the copy is of the fourth after the result."""
    history = honest()
    history.add(report(1005, steps=5), 6.0)
    contribution = upload(1004, 4, 400)
    assert history.credit(contribution, 0) is contribution


def test_the_first_report_is_credited_one_step_and_teaches_the_usual_tokens_of_a_step():
    history = History()
    first = replace(report(7), steps=(2, 4, 0), tokens=(100, 400, 0))
    assert history.add(first, 3.0) == 1
    assert history.tokens_per_step == 100.0, "of the fragment that has counted longest"
    assert (history.seconds_per_step, history.usual_seconds) == (None, None)


@pytest.mark.parametrize(("steps", "tokens"), [((0,), (0,)), ((), ()), ((3,), (0,))])
def test_a_first_report_without_tokens_teaches_nothing(steps, tokens):
    history = History()
    history.add(replace(report(7), steps=steps, tokens=tokens), 3.0)
    assert history.tokens_per_step is None


def test_of_reports_beyond_the_most_every_second_of_the_older_half_is_kept():
    assert [shown.local_step for shown in honest(MAX_REPORTS).reports] == list(range(1, 33))
    kept = [shown.local_step for shown in honest(MAX_REPORTS + 1).reports]
    assert kept == [1, 3, 5, 7, 9, 11, 13, 15, *range(17, 34)]


def test_a_report_that_was_held_up_raises_the_usual_time_of_a_step_by_a_multiple_at_most():
    history = honest()
    assert (history.seconds_per_step, history.usual_seconds) == (1.0, 1.0)
    history.add(report(7), 5.0 + 2 * 100.0)
    assert history.seconds_per_step == (1.0 + 100.0) / 2
    assert history.usual_seconds == (1.0 + HISTORY_MULTIPLE) / 2


def test_reports_at_one_time_and_after_a_pause_show_no_speed():
    history = honest()
    history.add(report(6), 5.0)
    history.pause()
    history.add(report(7), 105.0)
    assert (history.seconds_per_step, history.usual_seconds) == (1.0, 1.0)
    history.add(report(8), 108.0)
    assert history.seconds_per_step == 2.0


def test_the_usual_tokens_of_a_step_grow_by_a_multiple_at_most_and_none_teach_nothing():
    history = honest()
    history.add(report(7, total=500), 7.0)
    assert history.tokens_per_step == 100.0
    history.add(report(9, total=500 + 2 * 300), 9.0)
    assert history.tokens_per_step == (100.0 + 300.0) / 2
    history.add(report(10, total=2**49), 10.0)
    assert history.tokens_per_step == (200.0 + HISTORY_MULTIPLE * 200.0) / 2


def test_the_time_that_was_not_used_is_kept_up_to_a_limit_and_is_never_owed():
    history = honest()
    history.add(report(6), 1e6)
    assert history.unspent == MAX_UNSPENT
    history = honest()
    history.unspent = 0.0
    history.add(report(1005), 5.5)
    assert history.unspent == 0.0
    history.unspent = 7.0
    history.restart()
    assert history.unspent == 0.0


def test_after_a_result_an_upload_may_have_counted_no_tokens():
    """Steps without tokens; the fragment was received at step 7."""
    without = upload(9, 2, 0)
    assert reset(7).credit(without, 0) is without


def test_the_tokens_after_a_result_are_not_more_than_those_of_all_steps_between_the_reports():
    """The fragment was received at step 6, and after the upload at step 10 again."""
    history = reset(10)
    assert history.credit(upload(9, 3, 700), 0).tokens <= 700
    with pytest.raises(CountsDifferError, match="701 tokens in 3 steps"):
        history.credit(upload(9, 3, 701), 0)


def test_the_refusal_of_an_upload_states_the_reports_before_and_after_it():
    with pytest.raises(CountsDifferError, match="its reports 500 in 5 at 5 and 800 in 8 at 8; not"):
        skipping().credit(upload(7, 7, 801), 0)


def test_steps_that_the_time_does_not_allow_are_credited_no_tokens_if_none_were_counted():
    history = honest()
    history.add(report(6, tokens=10**6), 6.0)
    assert history.newest.tokens == (600,)
    assert history.add(report(20, tokens=10**6, total=600), 6.001) < 14
    assert history.newest.tokens == (600,)


def test_tokens_that_the_total_of_a_report_takes_back_are_taken_from_what_is_credited():
    history = honest()
    history.add(report(6, tokens=500, total=450), 6.0)
    assert history.newest.tokens == (450,)


def test_of_steps_that_the_time_does_not_allow_an_upload_is_credited_a_share_of_their_tokens():
    """Two of the four steps since the last report; the copy is of the third, and the result came after it."""
    history = honest()
    assert history.add(report(9, steps=1, total=900), 5.0001) == 2
    credited = history.credit(upload(8, 8, 800), 0)
    assert (credited.steps, credited.tokens) == (7, 700)


def test_an_upload_of_no_steps_between_two_reports_is_refused():
    """A copy is taken before results are applied, so it has a step at least."""
    with pytest.raises(CountsDifferError, match="0 tokens in 0 steps at local step 7"):
        reset(7).credit(upload(7, 0, 0), 0)


def test_after_a_result_an_upload_is_credited_the_tokens_of_its_own_steps_at_most():
    """The fragment was received at step 7; the copy is of one step, with the tokens of five."""
    credited = reset(7).credit(upload(8, 1, 500), 0)
    assert (credited.steps, credited.tokens) == (1, HISTORY_MULTIPLE * 100)
