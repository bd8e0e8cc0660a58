"""Which fragments are announced to whom, and how far ahead."""

import pytest

from diloco.model import fragments
from diloco_syncer.core.announcements import LAG_DECAY, Announcements, lag_of
from diloco_syncer.core.learners import LearnerRecord, LearnerRecords


def announcements(
    *, overlap=2, steps=100, due=lambda step: step % 8, next_due=lambda step: step + 1
):
    return Announcements(overlap=overlap, steps=steps, due=due, next_due=next_due)


def learner(name="eu/0", *, lag=0.0):
    return LearnerRecord(name=name, region="eu", lag=lag, session=1)


LONE = LearnerRecords({"eu/0": learner()})


def announced(it, *learners, in_flight=(), step=0, started=0):
    records = LearnerRecords({r.name: r for r in learners}) if learners else LONE
    found = it.update(records, in_flight=[*in_flight], step=step, started=started)
    return {d.learners: (d.step, d.fragments) for d in found}


def test_the_fragments_of_tau_plus_one_rounds_are_announced():
    assert announced(announcements()) == {("eu/0",): (0, (1, 2, 3))}


def test_rounds_in_flight_count_among_them_and_come_first():
    found = announced(announcements(), in_flight=[1, 2], step=0, started=2)
    assert found == {("eu/0",): (0, (1, 2, 3))}


def test_steps_without_a_due_fragment_do_not_count():
    it = announcements(overlap=1, due=lambda step: step // 3 if step % 3 == 0 else None)
    assert announced(it) == {("eu/0",): (0, (1, 2))}


def test_only_steps_with_a_due_fragment_are_tested_however_long_the_interval_is():
    asked, interval = [], 10**9

    def due(step):
        asked.append(step)
        return fragments.due(step, num_fragments=4, interval=interval)

    def next_due(step):
        return fragments.next_due(step, num_fragments=4, interval=interval)

    it = announcements(steps=10**10, due=due, next_due=next_due)
    assert announced(it, step=1, started=1) == {("eu/0",): (1, (1, 2, 3))}
    assert asked == [interval // 4, interval // 2, 3 * interval // 4]


@pytest.mark.parametrize(("num_fragments", "interval"), [(1, 1), (1, 5), (3, 7), (4, 4), (5, 24)])
def test_the_next_due_step_is_the_first_that_has_a_fragment(num_fragments, interval):
    sizes = {"num_fragments": num_fragments, "interval": interval}
    steps = [step for step in range(100) if fragments.due(step, **sizes) is not None]
    for step in range(60):
        assert fragments.next_due(step, **sizes) == min(s for s in steps if s > step)


def test_a_far_learner_is_announced_every_step_that_begins_before_its_answer_arrives():
    found = announced(announcements(overlap=1), learner(lag=3.2), step=10, started=10)
    assert found == {("eu/0",): (10, (3, 4, 5, 6, 7))}, "steps 11 to 10 + 4 + 1"


def test_nothing_beyond_the_last_step_of_the_job_is_announced():
    it = announcements(steps=12)
    assert announced(it, step=10, started=10) == {("eu/0",): (10, (3, 4))}
    assert announced(it, step=12, started=12) == {("eu/0",): (12, ())}


def test_a_fragment_is_never_announced_twice_in_one_message():
    found = announced(announcements(overlap=9), step=5, started=5)
    assert found == {("eu/0",): (5, (6, 7, 0, 1, 2, 3, 4, 5))}


def test_nothing_is_repeated_until_step_or_fragments_change_or_the_session_is_new():
    it = announcements()
    assert announced(it)
    assert announced(it) == {}
    assert announced(it, step=1, started=1) == {("eu/0",): (1, (2, 3, 4))}
    assert announced(it, in_flight=[7], step=1, started=1) == {("eu/0",): (1, (7, 2, 3))}
    it.forget("eu/0")
    it.forget("never seen")
    assert announced(it, in_flight=[7], step=1, started=1) == {("eu/0",): (1, (7, 2, 3))}


def test_more_is_announced_to_a_learner_whose_lag_has_grown_although_no_round_has_changed():
    it, far = announcements(overlap=1), learner()
    records = LearnerRecords({"eu/0": far, "eu/1": learner("eu/1")})
    values = {"in_flight": [], "step": 0, "started": 0}
    assert it.update(records, **values)
    far.lag = 4.0
    it.touch("eu/0")
    it.touch("eu/1")
    [announcement] = it.update(records, **values)
    assert (announcement.learners, announcement.fragments) == (("eu/0",), (1, 2, 3, 4, 5))


def test_nothing_is_announced_to_a_learner_without_a_session():
    it, gone = announcements(), learner()
    gone.session = None
    records = LearnerRecords({"eu/0": gone})
    for _ in range(2):
        it.touch("eu/0")
        assert it.update(records, in_flight=[], step=0, started=0) == []


def test_learners_with_the_same_fragments_share_one_announcement():
    near, also, far = learner("eu/0"), learner("eu/1"), learner("us/0", lag=4.0)
    assert announced(announcements(overlap=1), near, far, also) == {
        ("eu/0", "eu/1"): (0, (1, 2)),
        ("us/0",): (0, (1, 2, 3, 4, 5)),
    }


def test_the_lag_is_the_steps_that_began_meanwhile_and_fades_with_each_report():
    assert lag_of(0.0, started=9, global_step=5) == 4.0
    assert lag_of(10.0, started=9, global_step=5) == 10.0 * LAG_DECAY
    assert lag_of(0.0, started=5, global_step=9) == 0.0, "never negative"
    assert lag_of(1.0, started=9, global_step=9) == LAG_DECAY


def test_a_learner_that_joins_is_announced_the_rounds_although_they_have_not_changed():
    it, records = announcements(), LearnerRecords({"eu/0": learner()})
    values = {"in_flight": [], "step": 0, "started": 0}
    assert it.update(records, **values)
    records.get_or_add("eu/1", region="eu").session = 2
    records.changed()
    [announcement] = it.update(records, **values)
    assert announcement.learners == ("eu/1",)
