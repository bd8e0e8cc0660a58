"""One round and the uploads of its members, without an engine."""

import pytest

from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import ConfirmedNorm, Merged, Progress
from diloco_syncer.core.rounds import (
    MAX_RETRY_SECONDS,
    RETRY_SECONDS,
    Phase,
    Round,
    merge_line,
)
from diloco_syncer.core.upload_limits import (
    MAX_HOLD_SECONDS,
    MIN_BYTES_PER_SECOND,
    MIN_HOLD_SECONDS,
    START_SECONDS,
    UploadProgress,
    free_seconds,
    hold_seconds,
)

RATE = int(MIN_BYTES_PER_SECOND)


def contribution(learner, *, tokens=10, steps=2, base=(1, 4), **changes):
    values = {
        "learner": learner, "incarnation": 3, "round": 7, "attempt": 1, "local_step": 9,
        "steps": steps, "tokens": tokens, "base": base, "format": 1, "norms": (), **changes,
    }  # fmt: skip
    return Contribution(**values)


def pulled(*names, now=100.0):
    round_ = Round(step=7, fragment=2, started=90.0)
    round_.pull(names, now)
    return round_


def progress(learner, received_bytes, **changes):
    return Progress(learner=learner, round=7, attempt=1, received_bytes=received_bytes, **changes)


def delivers(round_, learner, *, waiting=False, done=False, now=100.0):
    round_.progressed(progress(learner, 0, waiting=waiting, done=done), now)


@pytest.mark.parametrize(
    ("phase", "opened", "may_pull", "transferring"),
    [
        (Phase.COLLECTING, True, True, False),
        (Phase.GRACE, True, True, False),
        (Phase.PULLING, False, True, True),
        (Phase.MERGING, False, False, True),
        (Phase.MERGED, False, False, False),
    ],
)
def test_what_each_phase_allows(phase, opened, may_pull, transferring):
    round_ = Round(step=1, fragment=0, started=0.0, phase=phase)
    assert (round_.open, round_.may_pull, round_.transferring) == (opened, may_pull, transferring)


def test_a_pull_begins_an_attempt_anew():
    round_ = Round(step=7, fragment=2, started=90.0, phase=Phase.GRACE, deadline=101.0)
    round_.held.run(True, 1.0)
    round_.contributions["old"] = contribution("old")
    round_.pull(["b", "a"], 100.0)
    assert (round_.phase, round_.attempt, round_.pulled_at) == (Phase.PULLING, 1, 100.0)
    assert (round_.deadline, round_.held.since, round_.contributions) == (None, None, {})
    assert {name: d.begun for name, d in round_.members.items()} == {"a": 100.0, "b": 100.0}


def test_a_member_whose_header_has_arrived_waits_for_the_others_until_all_are_there():
    round_ = pulled("a", "b")
    round_.contributed(contribution("a"), 100.0)
    assert [d.waiting for d in round_.members.values()] == [True, False]
    round_.held.since = 105.0
    round_.merge(150.0)
    assert (round_.phase, round_.held.since) == (Phase.MERGING, None)
    assert [d.waiting for d in round_.members.values()] == [False, False]
    assert [d.deadline for d in round_.members.values()] == [150.0 + START_SECONDS] * 2


def test_contributions_are_in_the_order_of_names():
    round_ = pulled("b", "a", "c")
    for name in ("c", "a", "b"):
        round_.contributed(contribution(name), 100.0)
    assert [c.learner for c in round_.by_name()] == ["a", "b", "c"]


def test_one_contribution_with_a_weight_is_enough_to_change_the_parameters():
    round_ = pulled("a", "b")
    assert not round_.changes_parameters
    round_.contributed(contribution("a", tokens=0), 100.0)
    assert not round_.changes_parameters
    round_.contributed(contribution("b"), 100.0)
    assert round_.changes_parameters


def test_the_pause_before_another_try_doubles_with_each_attempt_up_to_its_maximum():
    round_ = Round(step=7, fragment=2, started=0.0)
    round_.pull(["a"], 1.0)
    round_.quorum_at = round_.deadline = round_.held.run(True, 1.0)
    round_.contributed(contribution("a"), 100.0)
    round_.collect_again(10.0)
    assert (round_.phase, round_.attempt) == (Phase.COLLECTING, 2)
    assert (round_.members, round_.contributions) == ({}, {})
    assert (round_.deadline, round_.quorum_at, round_.held.since) == (None, None, None)
    assert round_.retry_at == 10.0 + RETRY_SECONDS
    for doubled in (2, 4, 8):
        round_.pull(["a"], 10.0)
        round_.collect_again(10.0)
        assert round_.retry_at == 10.0 + RETRY_SECONDS * doubled
    for _ in range(2000):  # and however often it fails, the power does not overflow
        round_.collect_again(10.0)
    assert round_.retry_at == 10.0 + MAX_RETRY_SECONDS


# ---------------------------------------------------------------- lateness


def test_others_wait_only_while_at_least_k_and_half_of_all_have_delivered():
    round_ = pulled("a", "b", "c", "d")
    delivers(round_, "a", waiting=True)
    round_.update_hold(101.0, quorum=1)
    assert round_.held.since is None, "one of four is not half"
    delivers(round_, "b", done=True)
    round_.update_hold(102.0, quorum=3)
    assert round_.held.since is None, "two are no quorum of three"
    round_.update_hold(102.0, quorum=2)
    round_.update_hold(103.0, quorum=2)
    assert round_.held.since == 102.0, "since the first time"
    round_.remove("b")
    delivers(round_, "a", waiting=False)
    round_.update_hold(104.0, quorum=1)
    assert round_.held.since is None


def test_half_of_an_odd_number_is_rounded_up():
    round_ = pulled("a", "b", "c")
    delivers(round_, "a", waiting=True)
    round_.update_hold(101.0, quorum=1)
    assert round_.held.since is None
    delivers(round_, "b", waiting=True)
    round_.update_hold(101.0, quorum=1)
    assert round_.held.since == 101.0


def test_no_member_is_held_up_when_all_have_delivered():
    round_ = pulled("a", "b")
    for name in round_.members:
        delivers(round_, name, waiting=True)
    round_.update_hold(101.0, quorum=1)
    assert round_.held.since is None


def test_a_member_is_late_at_its_own_deadline_or_when_the_others_have_waited_long_enough():
    round_ = pulled("b", "a", "c")
    delivers(round_, "c", waiting=True)
    end = 100.0 + START_SECONDS
    assert round_.late(end - 0.01, hold_seconds=5.0, window_seconds=0.0) == []
    assert round_.late(end, hold_seconds=5.0, window_seconds=0.0) == ["a", "b"]
    round_.held.run(True, 101.0)
    assert round_.late(105.99, hold_seconds=5.0, window_seconds=0.0) == []
    assert round_.late(106.0, hold_seconds=5.0, window_seconds=0.0) == ["a", "b"]
    round_.phase = Phase.MERGED
    assert round_.late(1e9, hold_seconds=5.0, window_seconds=0.0) == []


def test_the_next_deadline_is_the_earliest_at_which_a_member_can_be_late():
    round_ = pulled("a", "b")
    end = 100.0 + START_SECONDS
    assert round_.next_deadline(5.0, 0.0, 100.0) == end
    delivers(round_, "a", waiting=True)
    assert round_.next_deadline(5.0, 0.0, 101.0) == end
    round_.held.run(True, 101.0)
    assert round_.next_deadline(5.0, 0.0, 101.0) == 106.0
    round_.held.run(False, 101.0)
    delivers(round_, "b", waiting=True)
    assert round_.next_deadline(5.0, 0.0, 101.0) is None
    delivers(round_, "b", waiting=False, now=110.0)
    assert round_.next_deadline(5.0, 0.0, 110.0) == end, "too early by a wake-up"
    assert round_.next_deadline(5.0, 0.0, end) == 110.0 + START_SECONDS
    round_.phase = Phase.COLLECTING
    assert round_.next_deadline(5.0, 0.0, 101.0) is None


def test_a_member_without_which_the_attempt_begins_again_costs_the_others_all_of_it():
    round_ = pulled("a", "b")
    assert round_.waited_seconds("a", 103.0, quorum=2) == 3.0 + RETRY_SECONDS
    assert round_.waited_seconds("a", 103.0, quorum=1) == 0.0
    assert round_.waited_seconds("c", 103.0, quorum=2) == 0.0, "it is not a member"
    for _ in range(20):
        round_.remove("a")
        round_.collect_again(103.0)
        round_.pull(["a", "b"], 104.0)
    assert round_.waited_seconds("a", 104.0, quorum=2) == MAX_RETRY_SECONDS, "pauses that it caused"
    assert round_.waited_seconds("a", 104.0, quorum=2, pauses=False) == 0.0
    assert round_.waited_seconds("b", 104.0, quorum=2) == RETRY_SECONDS, (
        "b is lost for the first time"
    )


def test_a_pause_of_the_syncer_moves_every_deadline_by_its_length():
    round_ = pulled("a")
    round_.shift(7.0)
    assert (round_.deadline, round_.held.since) == (None, None)
    assert round_.members["a"].begun == 107.0
    assert round_.members["a"].deadline == 107.0 + START_SECONDS
    round_.deadline, round_.held.since = 10.0, 20.0
    round_.shift(7.0)
    assert (round_.deadline, round_.held.since) == (17.0, 27.0)


def test_the_others_wait_twice_tau_steps_within_limits():
    assert hold_seconds(overlap=3, step_seconds=1.5) == 2 * 3 * 1.5
    assert hold_seconds(overlap=2, step_seconds=None) == MIN_HOLD_SECONDS
    assert hold_seconds(overlap=1, step_seconds=0.01) == MIN_HOLD_SECONDS
    assert hold_seconds(overlap=9, step_seconds=60.0) == MAX_HOLD_SECONDS


def test_the_others_wait_for_a_member_again_and_again_a_quarter_longer_than_tau_steps():
    assert free_seconds(overlap=4, step_seconds=1.5) == 1.25 * 4 * 1.5
    assert free_seconds(overlap=2, step_seconds=None) == MIN_HOLD_SECONDS
    assert free_seconds(overlap=1, step_seconds=0.01) == MIN_HOLD_SECONDS
    assert free_seconds(overlap=9, step_seconds=60.0) == MAX_HOLD_SECONDS


def waited(round_, now):
    """For how long the others have waited for each member of the attempt."""
    return {name: round_.waited_seconds(name, now, quorum=1) for name in sorted(round_.members)}


def test_how_long_the_others_waited_for_a_member_is_added_up_over_header_and_upload():
    round_ = pulled("a", "b", "c", now=100.0)
    round_.contributed(contribution("a"), 100.0)
    round_.contributed(contribution("b"), 100.5)
    round_.update_hold(100.5, quorum=1)
    assert waited(round_, 103.0) == {"a": 0.0, "b": 0.0, "c": 2.5}
    round_.contributed(contribution("c"), 103.0)
    round_.merge(103.0)
    delivers(round_, "a", done=True, now=103.5)
    delivers(round_, "b", waiting=True, now=103.5)
    round_.update_hold(103.5, quorum=1)
    assert round_.late(104.9, hold_seconds=4.0, window_seconds=0.0) == []
    assert round_.next_deadline(4.0, 0.0, 104.0) == 105.0
    assert round_.late(105.0, hold_seconds=4.0, window_seconds=0.0) == ["c"]


def test_that_the_others_continue_for_a_moment_does_not_end_the_wait_for_a_member():
    round_ = pulled("a", "b", "c", now=100.0)
    for name in "abc":
        round_.contributed(contribution(name), 100.0)
    round_.merge(100.0)
    for second in range(4):
        for name in "ab":
            delivers(round_, name, waiting=True, now=100.5 + second)
        round_.update_hold(100.5 + second, quorum=1)
        assert round_.late(101.0 + second, hold_seconds=2.5, window_seconds=0.0) == []
        for name in "ab":
            delivers(round_, name, now=101.0 + second)
        round_.update_hold(101.0 + second, quorum=1)
    for name in "ab":
        delivers(round_, name, waiting=True, now=104.0)
    round_.update_hold(104.0, quorum=1)
    assert round_.next_deadline(2.5, 0.0, 104.0) == 104.5
    assert round_.late(104.5, hold_seconds=2.5, window_seconds=0.0) == ["c"]
    assert round_.next_deadline(2.5, 5.0, 104.6) == 106.25, (
        "not before a quarter more than tau steps"
    )
    assert round_.late(104.6, hold_seconds=2.5, window_seconds=5.0) == []
    round_.shift(10.0)
    assert round_.late(114.4, hold_seconds=2.5, window_seconds=0.0) == []
    assert round_.next_deadline(2.5, 0.0, 114.4) == 114.5


def test_members_are_late_by_what_they_need_themselves_beyond_most_others_and_tau_steps():
    def late(*own, window=0.0, quorum=1):
        round_ = pulled(*"abcd"[: len(own)], now=100.0)
        for name, seconds in zip("abcd", own, strict=False):
            round_.contributed(contribution(name), 100.0 + seconds / 2)
        round_.merge(120.0)
        for name, seconds in zip("abcd", own, strict=False):
            round_.progressed(progress(name, 9, done=True, awaited_seconds=seconds / 2), 200.0)
        round_.update_hold(200.0, quorum=quorum)
        return round_.late_seconds(window)

    assert late(1.0, 2.0, 3.0, 9.0) == {"c": 1.0, "d": 7.0}, "beyond what two need"
    assert late(1.0, 2.0, 3.0, 9.0, window=4.0) == {"d": 5.0}
    assert late(1.0, 2.0, 3.0, 9.0, quorum=3) == {"d": 6.0}
    assert late(1.0, 2.0, 3.0, 9.0, quorum=4) == {}, "the quorum needs all"
    assert late(8.0, 8.0, 8.0, 9.0) == {}
    assert late(0.0, 0.1, 0.35, 0.5) == {"d": pytest.approx(0.4)}, "jitter"
    assert late(5.0) == {}


def test_an_upload_earns_time_by_its_bytes_but_never_more_than_the_start_up_time():
    upload = UploadProgress.begin(100.0)
    assert (upload.begun, upload.deadline) == (100.0, 100.0 + START_SECONDS)
    upload.progressed(progress("a", 4 * RATE), 110.0)
    assert upload.deadline == 104.0 + START_SECONDS
    upload.progressed(progress("a", 5 * RATE), 110.0)
    assert upload.deadline == 105.0 + START_SECONDS, "only what is new counts"
    upload.progressed(progress("a", 10**9), 111.0)
    assert upload.deadline == 111.0 + START_SECONDS
    assert upload.received_bytes == 10**9


def test_an_older_state_of_an_upload_is_ignored_and_an_equal_one_is_not():
    upload = UploadProgress.begin(100.0)
    upload.progressed(progress("a", 1000), 101.0)
    upload.progressed(progress("a", 999, waiting=True, done=True), 102.0)
    assert (upload.received_bytes, upload.pending) == (1000, True)
    upload.progressed(progress("a", 1000, waiting=True), 102.0)
    assert upload.waiting
    upload.progressed(progress("a", 1000, done=True), 102.0)
    assert (upload.waiting, upload.done, upload.pending) == (False, True, False)


@pytest.mark.parametrize("before", [True, False])
def test_time_during_which_a_member_waited_for_others_is_not_its_own(before):
    upload = UploadProgress.begin(100.0)
    upload.waiting = before
    upload.progressed(progress("a", 0, waiting=not before), 120.0)
    assert upload.deadline == 120.0 + START_SECONDS


def test_a_deadline_never_moves_back():
    upload = UploadProgress.begin(100.0)
    upload.resume(90.0)
    assert upload.deadline == 100.0 + START_SECONDS
    upload.progressed(progress("a", 5), 50.0)
    assert upload.deadline == 100.0 + START_SECONDS


# ---------------------------------------------------------------- the line


def test_the_line_of_a_merge_shows_the_duration_of_each_part_and_the_members():
    round_ = pulled("b", "a", now=100.0)
    round_.clock = {"a": 7, "b": 9, "c": 1}
    round_.quorum_at, round_.grace_seconds = 92.5, 1.23456789
    round_.contributed(contribution("b"), 100.0)
    round_.contributed(contribution("a", base=None, steps=4, tokens=20), 100.0)
    merged = Merged(
        round=7, attempt=1, delta_norm=0.5, bytes_up=11, bytes_result=13,
        confirmed=(ConfirmedNorm(learner="b", norm=0.75, deviation=1e-7),),
    )  # fmt: skip
    line = merge_line(round_, merged, quorum=2, guard=10.0, receivers=3, now=104.5)
    members = line.pop("members")
    assert line == {
        "step": 7, "fragment": 2, "attempt": 1, "quorum": 2, "quorumSeconds": 2.5,
        "graceSeconds": 1.234568, "syncSeconds": 4.5, "bytesUp": 11, "bytesDown": 39, "deltaNorm": 0.5,
        "guard": 10.0, "clock": {"a": 7, "b": 9, "c": 1},
    }  # fmt: skip
    assert [m["learner"] for m in members] == ["a", "b"]
    assert members[0]["base"] is None
    assert [(m["norm"], m["deviation"]) for m in members] == [(0.0, 0.0), (0.75, 1e-7)]
    assert {k: members[1][k] for k in ("incarnation", "step", "steps", "tokens", "base")} == {
        "incarnation": 3, "step": 9, "steps": 2, "tokens": 10, "base": 4,
    }  # fmt: skip


def test_the_line_of_a_merge_has_digests_and_the_members_of_aborted_attempts():
    round_ = pulled("a", "b", "c", now=100.0)
    round_.pull(["a"], 101.0)
    round_.contributed(contribution("a", digests=b"\x01\xff\x00\x00"), 102.0)
    merged = Merged(
        round=7, attempt=2, delta_norm=0.5, bytes_up=11, bytes_result=13, digests=b"\0\0\0\x0a"
    )  # fmt: skip
    line = merge_line(round_, merged, quorum=1, guard=10.0, receivers=3, now=104.5)
    assert (line["abandoned"], line["digests"]) == ("b, c", "0000000a")
    assert [member["digests"] for member in line["members"]] == ["01ff0000"]


def test_a_member_that_is_removed_is_no_longer_pending():
    round_ = pulled("a", "b", "c", now=100.0)
    delivers(round_, "a", done=True)
    assert round_.pending == 2
    round_.remove("b")
    assert round_.pending == 1
    round_.remove("a")
    assert round_.pending == 1


def test_what_a_member_that_is_removed_has_contributed_is_not_merged():
    round_ = pulled("a", "b", "c")
    for name in "abc":
        round_.contributed(contribution(name), 100.0)
    round_.remove("b")
    assert [c.learner for c in round_.by_name()] == ["a", "c"]


def test_what_the_others_lose_with_a_member_is_their_wait_for_it():
    round_ = pulled("a", "b", now=100.0)
    assert round_.waited_seconds("a", 103.0, quorum=1) == 0.0, "no other member waits for it yet"
    delivers(round_, "b", done=True, now=101.0)
    round_.update_hold(101.0, quorum=1)
    assert round_.waited_seconds("a", 103.0, quorum=1) == 2.0
    assert round_.waited_seconds("b", 103.0, quorum=1) == 0.0, "it has delivered"
    assert round_.waited_seconds("c", 103.0, quorum=1) == 0.0, "it is not a member"


def test_a_pause_of_the_syncer_is_in_none_of_the_times_of_a_round():
    round_ = pulled("a", "b", now=100.0)
    round_.quorum_at = 95.0
    round_.merge(101.0)
    round_.shift(60.0)
    assert (round_.started, round_.quorum_at, round_.pulled_at) == (150.0, 155.0, 160.0)
    assert round_.waited_seconds("a", 161.5, quorum=1) == 1.5


def test_a_member_that_delivers_again_may_be_the_first_that_can_be_late():
    round_ = pulled("a", "b")
    delivers(round_, "a", waiting=True)
    round_.progressed(progress("b", 20 * RATE), 120.0)
    assert round_.next_deadline(5.0, 0.0, 120.0) == 120.0 + START_SECONDS
    round_.members["a"].deadline = 125.0
    round_.progressed(progress("a", 0, waiting=True), 90.0)
    assert round_.next_deadline(5.0, 0.0, 120.0) == 120.0 + START_SECONDS, "it waits"
    round_.progressed(progress("a", 0), 90.0)
    assert round_.next_deadline(5.0, 0.0, 120.0) == 125.0


def test_a_new_attempt_and_a_pause_move_the_next_deadline():
    round_ = pulled("a")
    assert round_.next_deadline(5.0, 0.0, 100.0) == 100.0 + START_SECONDS
    round_.shift(7.0)
    assert round_.next_deadline(5.0, 0.0, 107.0) == 107.0 + START_SECONDS
    round_.pull(["a"], 110.0)
    assert round_.next_deadline(5.0, 0.0, 110.0) == 110.0 + START_SECONDS
    round_.merge(120.0)
    assert round_.next_deadline(5.0, 0.0, 120.0) == 120.0 + START_SECONDS


def test_a_member_that_is_removed_or_pulled_again_has_no_early_header():
    round_ = pulled("a", "b")
    round_.early["a"] = contribution("a")
    round_.remove("a")
    assert round_.early == {}
    round_.early["b"] = contribution("b")
    round_.pull(["b"], 101.0)
    assert round_.early == {}
    round_.early["b"] = contribution("b")
    round_.collect_again(102.0)
    assert (round_.early, round_.pending) == ({}, 0)


def test_a_member_of_a_merged_round_that_is_lost_costs_the_whole_attempt():
    round_ = pulled("a", now=100.0)
    round_.phase = Phase.MERGED
    assert round_.waited_seconds("a", 103.0, quorum=0) == 3.0
    assert round_.waited_seconds("a", 103.0, quorum=1) == 3.0 + RETRY_SECONDS


def test_the_line_of_a_merge_has_all_of_a_member_and_its_times_in_microseconds():
    round_ = pulled("a", now=100.00000004)
    round_.quorum_at, round_.grace_seconds = 92.12345678, 1.0
    round_.contributed(
        contribution("a", tokens=10, steps=2, norms=(6.0, 1.0), norm_limits=(2.0, 2.0)), 100.0
    )
    merged = Merged(
        round=7, attempt=1, delta_norm=0.5, bytes_up=11, bytes_result=13,
        confirmed=(ConfirmedNorm(learner="a", norm=0.75, deviation=1e-7),),
    )  # fmt: skip
    line = merge_line(round_, merged, quorum=2, guard=10.0, receivers=3, now=104.7654321)
    assert (line["quorumSeconds"], line["syncSeconds"]) == (2.123457, 4.765432)
    assert line["members"] == [
        {
            "learner": "a", "incarnation": 3, "step": 9, "steps": 2, "tokens": 10, "weight": 50.0,
            "base": 4, "norm": 0.75, "deviation": 1e-7, "ofMedian": 30.0, "clipped": 1,
        }
    ]  # fmt: skip


def test_without_a_measured_step_the_others_wait_least_however_many_rounds_overlap():
    assert free_seconds(overlap=9, step_seconds=None) == MIN_HOLD_SECONDS
    assert hold_seconds(overlap=9, step_seconds=None) == MIN_HOLD_SECONDS


def test_a_pause_of_the_syncer_is_excused_to_uploads_that_are_awaited_after_their_header_only():
    round_ = pulled("a", "b", "c", now=100.0)
    for name in "ab":
        round_.contributed(contribution(name), 101.0)

    def excused():
        round_.shift(60.0)
        return {name: upload.excused_seconds for name, upload in round_.members.items()}

    assert excused() == {"a": 0.0, "b": 0.0, "c": 0.0}, "a and b wait, and c has sent no header"
    round_.contributed(contribution("c"), 161.0)
    round_.merge(161.0)
    delivers(round_, "a", done=True, now=162.0)
    assert excused() == {"a": 0.0, "b": 60.0, "c": 60.0}
    delivers(round_, "b", waiting=True, now=223.0)
    assert excused() == {"a": 0.0, "b": 60.0, "c": 120.0}


def test_members_that_are_fewer_than_the_quorum_are_late_by_what_they_need_beyond_tau_steps():
    round_ = pulled("a", now=100.0)
    round_.contributed(contribution("a"), 100.0)
    round_.merge(100.0)
    round_.progressed(progress("a", 1, done=True, awaited_seconds=2.0), 102.0)
    round_.update_hold(102.0, quorum=2)
    assert round_.late_seconds(0.5) == {"a": 1.5}


def test_the_wait_for_a_member_leaves_out_the_time_in_which_it_waited_itself():
    round_ = pulled("a", "b", "c", "d")
    for name in "cd":
        delivers(round_, name, done=True)
    round_.update_hold(100.0, quorum=1)  # c and d wait for a and b
    delivers(round_, "a", waiting=True, now=102.0)
    round_.update_hold(102.0, quorum=1)
    delivers(round_, "a", now=105.0)
    round_.update_hold(105.0, quorum=1)
    assert round_.waited_seconds("a", 106.0, quorum=1) == 3.0
    assert round_.waited_seconds("b", 106.0, quorum=1) == 6.0
    assert round_.late(106.9, hold_seconds=4.0, window_seconds=0.1) == ["b"]
    assert round_.late(107.0, hold_seconds=4.0, window_seconds=0.1) == ["a", "b"]
    delivers(round_, "a", waiting=True, now=106.0)
    assert round_.waited_seconds("a", 109.0, quorum=1) == 3.0, "both times together"


def test_no_member_is_late_before_it_took_a_quarter_more_than_most_others():
    round_ = pulled("a", "b", "c")
    for name in "bc":
        round_.contributed(contribution(name), 108.0)  # most needed 8 s
    round_.update_hold(108.0, quorum=1)
    assert round_.late(109.9, hold_seconds=0.5, window_seconds=1.0) == []
    assert round_.late(110.0, hold_seconds=0.5, window_seconds=1.0) == ["a"]
