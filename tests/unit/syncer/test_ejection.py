"""Ejecting, probing and readmitting, without rounds."""

import math

import pytest

from diloco_syncer.core import events as ev
from diloco_syncer.core.ejection import (
    BACKOFF_SECONDS,
    FORGIVEN_AFTER_MERGES,
    PROBE_ATTEMPT,
    Ejections,
    backoff_seconds,
)
from diloco_syncer.core.learners import HANGS_SECONDS, LearnerRecords
from diloco_syncer.core.pacing import Pace
from diloco_syncer.core.upload_limits import START_SECONDS


class Learners:
    """Three learners that train, at global step 7."""

    def __init__(self, *, quorum=1, hold=4.0, sync=1.5):
        self.records = LearnerRecords()
        self.pace = Pace(step=7)
        for session, name in enumerate(("a", "b", "c"), start=1):
            self.join(name, session)
            self.report(name, session)
            self.pace.join(name)
        self.it = Ejections(
            self.records,
            self.pace,
            quorum,
            hold_seconds=lambda: hold,
            free_seconds=lambda: hold,
            sync_seconds=lambda: sync,
        )

    def join(self, name, session):
        hello = ev.Hello(
            session=session, learner=name, region="eu", incarnation=1, fresh=True, local_step=0,
            checkpoint_step=0,
        )  # fmt: skip
        self.records.admit(hello, now=0.0)

    def report(self, name, session, *, step=1, offers=(5, 3)):
        self.records.report(
            ev.Reported(
                session=session, learner=name, local_step=step, steps=(1,) * 9, tokens=(1,) * 9,
                offers=frozenset(offers), total_tokens=0, global_step=0, step_seconds=1.0,
                sync_seconds=0.0, loss=None,
            ),
            now=0.0,
        )  # fmt: skip
        self[name].last_seen = math.inf  # its heartbeats arrive

    def __getitem__(self, name):
        return self.records.by_name[name]

    def probe(self, now):
        [probe] = self.it.tick(now)
        assert isinstance(probe, ev.ProbeLearner)
        return probe


def names(records):
    return [record.name for record in records]


def test_the_back_off_doubles_from_five_seconds_to_ten_minutes():
    assert [backoff_seconds(n) for n in (1, 2, 3, 7)] == [5.0, 10.0, 20.0, 320.0]
    assert backoff_seconds(8) == backoff_seconds(5000) == 600.0


def test_an_ejected_learner_is_out_of_rounds_and_pace_and_its_row_of_merges_ends():
    job = Learners()
    job["b"].delivered_in_row = 9
    [log] = job.it.eject("b", "AnswerLate", 100.0)
    assert (log.event, log.fields) == (
        "eject", {"learner": "b", "reason": "AnswerLate", "probeSeconds": BACKOFF_SECONDS},
    )  # fmt: skip
    assert names(job.records.training()) == ["a", "c"]
    assert names(job.records.ejected()) == ["b"]
    assert sorted(job.pace.positions) == ["a", "c"]
    assert (job["b"].ejections, job["b"].delivered_in_row) == (1, 0)
    assert job["b"].ejection.reason == "AnswerLate"
    assert job.it.eject("b", "AnswerLate", 100.0) == [], "it is ejected already"
    assert job["b"].ejections == 1


def test_a_learner_that_the_quorum_needs_is_not_ejected():
    job = Learners(quorum=2)
    assert job.it.eject("a", "Stalled", 0.0)
    assert job.it.eject("b", "Stalled", 0.0) == []
    assert names(job.records.training()) == ["b", "c"]


def test_learners_that_hang_are_no_quorum_without_which_another_can_be_ejected_or_left_out():
    job = Learners(quorum=1)
    job["b"].ejections = 5
    job.records.note_hanging(20.0)
    job.report("a", 1, step=2)
    assert job.it.eject("a", "Stalled", 20.0) == []
    assert job.it.eject("b", "Stalled", 20.0)
    assert job.it.deadlines(20.0) == [20.0 + backoff_seconds(6)]
    job.records.note_hanging(21.0)
    assert job.it.deadlines(21.0) == [20.0 + backoff_seconds(6)], "all of them hang"
    job.report("b", 2, step=2)
    assert job.it.deadlines(21.0) == [20.0 + BACKOFF_SECONDS]


def test_a_learner_that_is_gone_is_not_ejected():
    job = Learners()
    job.records.leave("b", 2)
    assert job.it.eject("b", "Stalled", 0.0) == []
    assert job["b"].ejections == 0


def test_a_probe_begins_when_the_back_off_is_over_and_asks_for_the_first_offered_fragment():
    job = Learners()
    job.it.eject("b", "Stalled", 100.0)
    assert job.it.tick(104.9) == []
    assert job.it.deadlines(100.0) == [105.0]
    assert job.it.deadlines(105.0) == [], "what is due now is no deadline ahead"
    probe = job.probe(105.0)
    assert (probe.learner, probe.fragment, probe.round) == ("b", 3, 7)
    assert probe.attempt == PROBE_ATTEMPT + 1
    assert job.it.tick(105.0) == [], "one at a time"


def test_each_failed_probe_is_followed_by_one_of_another_offered_fragment():
    """With few fragments, the same one is offered at every boundary, and it may be the largest."""
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    now, asked = 0.0, []
    for _ in range(3):
        now = job["b"].ejection.probe_at
        asked.append(job.probe(now).fragment)
        job.it.end_probe(job["b"], now)
    assert asked == [3, 5, 3]


def test_the_round_of_a_probe_is_never_that_of_the_initial_model():
    job = Learners()
    job.pace.step = 0
    job.it.eject("b", "Stalled", 0.0)
    assert job.probe(5.0).round == 1


def test_nothing_can_be_probed_while_nothing_is_offered():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    job.report("b", 2, step=2, offers=())
    assert job.it.tick(50.0) == []


def test_a_delivered_probe_readmits_the_learner_at_the_current_step():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    mine = {"learner": "b", "round": probe.round, "attempt": probe.attempt}
    assert job.it.progressed(ev.Progress(**mine, received_bytes=10), 5.1) == []
    job.pace.step = 9
    abort, log = job.it.progressed(ev.Progress(**mine, received_bytes=20, done=True), 5.2)
    assert isinstance(abort, ev.AbortMerge)
    assert (abort.round, abort.attempt) == (probe.round, probe.attempt)
    assert (log.event, log.fields) == ("readmit", {"learner": "b"})
    assert names(job.records.training()) == ["a", "b", "c"]
    assert job.pace.positions["b"] == 9
    assert job["b"].ejections == 1, "the next back-off is longer until it has delivered for a while"


def test_progress_of_another_round_attempt_or_learner_is_no_progress_of_the_probe():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    for learner, round_, attempt in (
        ("b", probe.round, 1), ("b", probe.round + 1, probe.attempt),
        ("a", probe.round, probe.attempt), ("never seen", probe.round, probe.attempt),
    ):  # fmt: skip
        event = ev.Progress(
            learner=learner, round=round_, attempt=attempt, received_bytes=1, done=True
        )
        assert job.it.progressed(event, 5.1) is None
    assert job["b"].ejection is not None


def test_a_probe_must_not_take_longer_than_a_round_could_have_waited():
    job = Learners(hold=4.0, sync=1.5)
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    assert job.it.deadlines(5.0) == [10.5]
    assert job.it.tick(10.4) == []
    [abort] = job.it.tick(10.5)
    assert (abort.round, abort.attempt) == (probe.round, probe.attempt)
    assert job["b"].ejections == 2
    assert job.it.deadlines(10.5) == [10.5 + backoff_seconds(2)]


def test_a_probe_that_receives_nothing_ends_with_its_own_deadline():
    job = Learners(hold=1000.0)
    job.it.eject("b", "Stalled", 0.0)
    job.probe(5.0)
    assert job.it.deadlines(5.0) == [5.0 + START_SECONDS]
    assert job.it.tick(4.9 + START_SECONDS) == []
    assert job.it.tick(5.0 + START_SECONDS)


def test_while_the_quorum_is_short_a_probe_is_due_a_first_back_off_after_the_last_failure():
    job = Learners(quorum=2)
    job["a"].ejections = 5
    job.it.eject("a", "Stalled", 100.0)
    assert job.it.deadlines(100.0) == [100.0 + backoff_seconds(6)]
    job.records.leave("b", 2)
    assert job.it.deadlines(100.0) == [100.0 + BACKOFF_SECONDS]
    assert job.it.tick(99.9 + BACKOFF_SECONDS) == []
    assert job.probe(100.0 + BACKOFF_SECONDS).learner == "a"
    job.it.end_probe(job["a"], 108.0)
    assert job.it.deadlines(108.0) == [108.0 + BACKOFF_SECONDS], "after the probe that failed"


def test_an_ejected_learner_that_joins_again_is_probed_at_its_first_report():
    job = Learners()
    job["b"].ejections = 5
    job.it.eject("b", "Stalled", 100.0)
    job.records.leave("b", 2)
    job.it.left(job["b"])
    job.join("b", 9)
    job.it.joined(job["b"], 120.0)
    assert "b" not in job.pace.positions
    assert job.it.tick(120.0) == [], "it has not reported"
    job.report("b", 9)
    assert job.probe(120.0).learner == "b"


def test_a_probe_ends_with_its_session():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    job.it.left(job["b"])
    assert job["b"].ejection is not None
    assert job.it.probed("b", probe.round, probe.attempt) is None
    assert job.it.end_probe(job["b"], 6.0, delivered=True) == []


def test_joining_and_leaving_are_steps_of_the_pace():
    job = Learners()
    job.it.left(job["a"])
    assert sorted(job.pace.positions) == ["b", "c"]
    job.it.joined(job["a"], 1.0)
    assert job.pace.positions["a"] == 7


@pytest.mark.parametrize(
    ("merges", "now", "left"), [(-1, 1e9, 3), (0, 100.0 + 200.0, 0), (0, 100.0 + 199.9, 3)]
)
def test_failures_are_forgiven_after_enough_merges_in_a_row_and_enough_time(merges, now, left):
    job = Learners(hold=4.0)
    job["a"].ejections, job["a"].long_waits, job["a"].failed_at = 3, 3, 100.0
    for _ in range(FORGIVEN_AFTER_MERGES + merges):
        job.it.merged(job["a"], now)
    assert (job["a"].ejections, job["a"].long_waits) == (left, left)


def test_what_the_others_waited_for_a_learner_in_vain_adds_up_to_an_ejection():
    job = Learners(hold=4.0)
    assert job.it.waited("b", 0.0, "LeftRound", 1.0) == []
    assert job.it.waited("b", 3.0, "LeftRound", 2.0) == []
    job.records.leave("b", 2)  # gone or not
    [log] = job.it.waited("b", 1.0 + 10 / 50, "LeftRound", 12.0)
    assert log.fields == {"learner": "b", "reason": "LeftRound", "probeSeconds": BACKOFF_SECONDS}
    assert (job["b"].waits.seconds, job["b"].failed_at) == (0.0, 12.0)


def test_a_short_wait_in_vain_hides_no_longer_one_that_contains_it():
    job = Learners(hold=4.0)
    assert job.it.waited("b", 0.02, "StreamBroken", 10.0) == []
    assert job.it.waited("b", 3.9, "StreamBroken", 10.01) == []
    assert job["b"].waits.seconds == pytest.approx(3.9, abs=0.01), "the short one is a part of it"
    assert job.it.waited("b", 1.0, "LeftRound", 10.01) == [], "counted already"
    assert job.it.waited("b", 3.0, "LeftRound", 10.06) == []
    assert job["b"].waits.seconds == pytest.approx(3.95, abs=0.01)
    assert job.it.waited("b", 0.1, "LeftRound", 11.0)


def test_a_pause_of_the_syncer_lies_in_no_wait():
    job = Learners(hold=4.0)
    job.it.waited("b", 2.0, "StreamBroken", 10.0)
    job.it.shift(60.0)
    job.it.waited("b", 2.5, "StreamBroken", 70.5)  # a round whose times were moved as well
    assert job["b"].waits.seconds == pytest.approx(2.5, abs=0.02)


def test_an_ejection_that_cost_no_time_adds_no_wait():
    job = Learners(hold=4.0)
    assert job.it.eject("b", "Stalled", 1.0)
    assert (job["b"].waits.seconds, job["b"].long_waits) == (0.0, 0)


def test_waits_in_vain_and_what_a_member_costs_when_it_delivers_add_up():
    job = Learners(hold=4.0)
    assert job.it.delivered_late({"a": 3.9}, 10.0, window=1.0) == {}
    assert job.it.waited("a", 1.2, "StreamBroken", 20.0) == []
    assert job["a"].waits.seconds == pytest.approx(1.2)
    assert job["a"].late.seconds == pytest.approx(3.9 - 0.2 + 1.2)
    [log] = job.it.waited("a", 0.4, "StreamBroken", 30.0)
    assert (log.fields["reason"], job["a"].late.seconds) == ("StreamBroken", 0.0)
    assert job["a"].long_waits == 1


def test_short_waits_in_vain_are_forgiven_fifty_times_as_long_later():
    job = Learners(hold=4.0)
    for count in range(1, 40):
        assert job.it.waited("b", 1.0, "LeftRound", 51.0 * count) == []
    assert job["b"].waits.seconds == 1.0


def test_one_long_wait_in_vain_counts_as_one_failure():
    job = Learners(hold=4.0)
    assert job.it.waited("b", 1000.0, "LeftRound", 1.0)
    assert (job["b"].long_waits, job["b"].waits.seconds) == (1, 0.0)
    assert job.it.waited("b", 1000.0, "LeftRound", 2.0) == [], "it is ejected already"


def test_a_learner_that_the_quorum_needs_is_not_ejected_for_leaving_either():
    job = Learners(quorum=2)
    assert job.it.waited("a", 9.0, "LeftRound", 0.0)
    job.records.leave("b", 2)
    assert job.it.waited("b", 9.0, "LeftRound", 0.0) == []


def test_a_learner_for_which_rounds_waited_long_twice_waits_for_its_back_off_although_it_joins():
    job = Learners(hold=4.0)
    job["b"].long_waits = 1
    job.it.eject("b", "Stalled", 100.0, waited=4.0)
    job.records.leave("b", 2)
    job.it.left(job["b"])
    job.join("b", 9)
    job.report("b", 9)
    job.it.joined(job["b"], 101.0)
    assert job.it.deadlines(101.0) == [100.0 + backoff_seconds(2)]
    job.it.joined(job["b"], 500.0)
    assert job.probe(500.0).learner == "b"


def test_a_pause_of_the_syncer_is_given_back_to_probes():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    job.probe(5.0)
    job.it.eject("c", "Stalled", 5.0)  # without a probe
    job.it.shift(60.0)
    assert job.it.deadlines(5.0) == [65.0 + 5.5, 10.0]


@pytest.mark.parametrize("how", ["leaves", "joins again"])
def test_the_attempt_of_a_probe_is_aborted_when_its_session_ends(how):
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    [abort] = job.it.left(job["b"]) if how == "leaves" else job.it.joined(job["b"], 6.0)
    assert isinstance(abort, ev.AbortMerge)
    assert (abort.round, abort.attempt) == (probe.round, probe.attempt)
    assert job["b"].ejection.probe is None
    assert job["b"].ejections == 1, "neither a success nor a failure"
    assert job.it.left(job["b"]) == []


def test_probes_that_break_are_ever_rarer_and_ask_for_another_fragment_but_are_no_failures():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    now, fragments = 5.0, []
    for count in range(2, 6):
        fragments.append(job.probe(now).fragment)
        job.it.end_probe(job["b"], now, counts=False)
        assert job.it.deadlines(now) == [now + backoff_seconds(count)]
        now += backoff_seconds(count)
    assert len(set(fragments)) > 1
    assert job["b"].ejections == 1


def test_a_probe_has_the_time_of_an_upload_when_the_quorum_needs_the_learner():
    job = Learners(quorum=2, hold=4.0, sync=1.5)
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    job.records.leave("a", 1)
    mine = {"learner": "b", "round": probe.round, "attempt": probe.attempt}
    job.it.progressed(ev.Progress(**mine, received_bytes=1 << 20), 10.0)
    assert job.it.tick(11.0) == [], "more than hold and sync: two learners are needed, one is left"
    _, log = job.it.progressed(ev.Progress(**mine, received_bytes=1 << 21, done=True), 13.0)
    assert log.event == "readmit"


@pytest.mark.parametrize(
    ("returns", "failures"),
    [
        # After 5.5 s, when it would have been late long ago if the quorum had not needed it.
        (12.0, 1),
        # Before, so that it has as much time as each probe, and its own limit of 30 s.
        (8.0, 2),
        (35.0, 2),
    ],
)
def test_a_probe_that_is_late_only_because_the_quorum_needs_it_no_longer_is_no_failure(
    returns, failures
):
    job = Learners(quorum=2, hold=4.0, sync=1.5)
    job.it.eject("b", "Stalled", 0.0)
    job.records.leave("a", 1)
    job.probe(5.0)
    assert job.it.tick(7.0) == []
    job.join("a", 4)
    job.report("a", 4, step=2)
    ended = job.it.tick(returns) or job.it.tick(10.5)
    assert [type(each) for each in ended] == [ev.AbortMerge]
    assert job["b"].ejections == failures
    now = max(returns, 10.5)
    assert job.it.deadlines(now) == [now + backoff_seconds(2)]


def test_a_learner_that_costs_nothing_now_is_not_ejected_for_earlier_waits():
    job = Learners(hold=4.0)
    job["b"].waits.seconds, job["b"].waits.at = 9.0, 1.0
    assert job.it.waited("b", 0.0, "LeftRound", 1.0) == []


def test_all_probes_that_are_due_at_once_begin_at_once_each_as_an_attempt_of_its_own():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    job.it.eject("c", "Stalled", 0.0)
    probes = job.it.tick(5.0)
    assert [probe.learner for probe in probes] == ["b", "c"]
    assert [probe.attempt for probe in probes] == [PROBE_ATTEMPT + 1, PROBE_ATTEMPT + 2]


def test_an_offer_that_arrives_when_a_probe_is_due_is_probed_at_once():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    job.report("b", 2, step=2, offers=())
    assert job.it.tick(5.0) == []
    job.report("b", 2, step=3)
    job.it.reported("b", 5.0)
    assert job.probe(5.0).learner == "b"


def test_a_probe_of_a_learner_beyond_the_quorum_has_the_time_of_a_round_only():
    job = Learners(quorum=2, hold=4.0, sync=1.5)
    job.it.eject("b", "Stalled", 0.0)
    job.probe(5.0)
    assert job.it.deadlines(5.0) == [5.0 + 4.0 + 1.5], "two train, and two are enough"


def test_a_learner_for_which_rounds_waited_long_once_is_probed_at_once_when_it_joins():
    job = Learners(hold=4.0)
    job.it.eject("b", "Stalled", 100.0, waited=4.0)
    assert job["b"].long_waits == 1
    job.records.leave("b", 2)
    job.it.left(job["b"])
    job.join("b", 9)
    job.it.joined(job["b"], 101.0)
    job.report("b", 9)
    assert job.probe(101.0).learner == "b"


def test_the_attempt_of_a_probe_ends_with_a_reason():
    job = Learners()
    job.it.eject("b", "Stalled", 0.0)
    job.probe(5.0)
    [abort] = job.it.end_probe(job["b"], 6.0)
    assert abort.reason == "the probe is over"
    job.probe(job["b"].ejection.probe_at)
    [abort] = job.it.left(job["b"])
    assert abort.reason == "the session ended"


def test_bytes_of_a_probe_earn_it_time_as_those_of_an_upload_do():
    job = Learners(hold=1000.0)
    job.it.eject("b", "Stalled", 0.0)
    probe = job.probe(5.0)
    mine = {"learner": "b", "round": probe.round, "attempt": probe.attempt}
    job.it.progressed(ev.Progress(**mine, received_bytes=0, waiting=True), 20.0)
    assert job.it.tick(5.0 + START_SECONDS) == []
    assert job["b"].ejection.probe.upload.waiting
    assert job.it.tick(20.0 + START_SECONDS)


@pytest.mark.parametrize(("window", "most"), [(0.1, 4.5), (2.4, 6.0)])
def test_what_a_member_costs_ejects_it_at_two_and_a_half_windows_and_not_before_two_pauses(
    window, most
):
    job = Learners(hold=3.0)
    assert job.it.delivered_late({"b": most / 2}, 10.0, window=window) == {}
    assert job.it.delivered_late({"b": most / 2}, 20.0, window=window) == {}
    assert job["b"].late.seconds == pytest.approx(most - 0.2), "2 % of the time is forgiven"
    out = job.it.delivered_late({"b": 0.3}, 21.0, window=window)
    assert {name: log.fields["reason"] for name, [log] in out.items()} == {"b": "Slow"}
    assert (job["b"].late.seconds, job["b"].long_waits) == (0.0, 1)
    assert job["b"].waits.seconds == 0.0, "waits in vain have an account of their own"


def test_what_more_than_half_of_all_learners_cost_is_subtracted_from_the_account_of_each():
    job = Learners(hold=4.0)
    job.join("d", 4)
    job.report("d", 4)
    for now in range(10, 200, 10):
        assert job.it.delivered_late({"a": 3.0, "b": 3.0, "c": 3.0}, float(now), window=0.1) == {}
    assert [job[name].late.seconds for name in "abcd"] == pytest.approx([0.0] * 4, abs=1e-9)
    assert job.it.delivered_late({"a": 3.0, "b": 3.0}, 200.0, window=0.1) == {}
    assert [job[name].late.seconds for name in "abcd"] == [3.0, 3.0, 0.0, 0.0], "half are not late"


def test_what_most_learners_cost_is_subtracted_also_for_one_that_is_gone_when_that_shows():
    job = Learners(hold=4.0)
    assert job.it.delivered_late({"b": 3.0}, 10.0, window=0.1) == {}
    job.records.leave("a", 1)
    job.it.waited("a", 2.0, "LeftRound", 10.0)
    assert [job[name].late.seconds for name in "abc"] == [2.0, 3.0, 0.0], "one of two others"
    assert job.it.delivered_late({"c": 3.0}, 10.0, window=0.1) == {}
    assert [job[name].late.seconds for name in "abc"] == [0.0] * 3


def test_two_learners_do_not_excuse_each_other():
    job = Learners(hold=4.0)
    job.records.leave("c", 3)
    assert job.it.delivered_late({"b": 3.0}, 10.0, window=0.1) == {}
    assert job["b"].late.seconds == 3.0


def test_failures_are_forgiven_only_for_what_a_learner_delivers_after_it_was_readmitted():
    job = Learners(hold=4.0)
    job["b"].ejections = 9
    job.it.eject("b", "Slow", 0.0)
    probe = job.probe(backoff_seconds(10))
    mine = {"learner": "b", "round": probe.round, "attempt": probe.attempt}
    job.it.progressed(ev.Progress(**mine, received_bytes=1, done=True), 601.0)
    for _ in range(FORGIVEN_AFTER_MERGES):
        job.it.merged(job["b"], 700.0)
    assert job["b"].ejections == 10
    job.it.merged(job["b"], 601.0 + 200.0)
    assert job["b"].ejections == 0


@pytest.mark.parametrize(("waited", "probes"), [(HANGS_SECONDS, 0), (HANGS_SECONDS + 0.1, 1)])
def test_a_probe_is_due_early_once_a_round_waits_longer_for_its_quorum_than_steps_take(
    waited, probes
):
    learners = Learners()
    learners.it.eject("c", "Slow", 0.0)
    learners.probe(BACKOFF_SECONDS)
    learners.it.end_probe(learners["c"], BACKOFF_SECONDS)
    assert learners.it.tick(2 * BACKOFF_SECONDS) == []
    learners.it.note_wait(waited)
    assert len(learners.it.tick(2 * BACKOFF_SECONDS)) == probes


@pytest.mark.parametrize(("seconds", "ejected"), [(2.9, 0), (3.0, 1)])
def test_a_wait_in_vain_ejects_when_all_that_a_learner_cost_is_two_and_a_half_windows(
    seconds, ejected
):
    learners = Learners(hold=4.0)
    late = learners["a"].late
    late.seconds, late.begun, late.at = 2.0, 103.0, 103.0
    assert len(learners.it.waited("a", seconds, "LeftRound", 103.0)) == ejected


@pytest.mark.parametrize(
    ("silent", "charged"), [("a", True), ("ab", False), ("abc", False), ("bc", True)]
)
def test_what_a_learner_costs_is_not_charged_to_it_while_it_is_silent_with_most(silent, charged):
    for event in ("leaves", "is late"):
        job = Learners()
        for name in silent:
            job[name].last_seen = 6.9
        if event == "leaves":
            job.records.leave("a", 1)
            job.it.waited("a", 9.0, "LeftRound", 10.0)
        else:
            job.it.eject("a", "AnswerLate", 10.0, waited=9.0)
        assert (job["a"].ejection is not None) is charged
        assert (job["a"].late.seconds > 0) is charged
