"""The audit at its limits: what just passes, what just does not, and every sentence and count in full."""

from __future__ import annotations

import json

import pytest

from diloco.journal.audit import (
    CLAIMED_MULTIPLE,
    GUARDED_MEMBERS,
    NORM_FLOOR,
    NORM_TOLERANCE,
    RATE_MULTIPLE,
    audit,
    audit_parts,
)

NAMES = ("eu/0", "eu/1", "eu/2", "us/0")


def line(event, epoch=1, **fields):
    return json.dumps({"epoch": epoch, "event": event, **fields})


def start(epoch=1, fragments=1, interval=1, **fields):
    return line("start", epoch, fragments=fragments, interval=interval, **fields)


def member(name, *, local_step=10, steps=2, tokens=200, weight=None, **fields):
    stated = {
        "learner": name, "incarnation": 1, "step": local_step, "steps": steps, "tokens": tokens,
        "weight": tokens * tokens / steps if weight is None else weight, "base": None,
    }  # fmt: skip
    return {**stated, **fields}


def merge(members, *, step=1, epoch=1, fragment=0, quorum=1, **fields):
    return line(
        "merge", epoch, step=step, fragment=fragment, quorum=quorum, members=members, **fields
    )


def sentences(*lines):
    """Of the last line; those before it have none."""
    assert audit(lines[:-1]).violations == ()
    found = audit(lines).violations
    assert all(sentence.startswith(f"line {len(lines)}: ") for sentence in found)
    return [sentence.partition(": ")[2] for sentence in found]


def of_merge(members, **fields):
    return sentences(start(), merge(members, **fields))


# ---------------------------------------------------------------- one member


@pytest.mark.parametrize(
    ("deviation", "found"), [(NORM_TOLERANCE, 0), (1.01 * NORM_TOLERANCE, 1), (None, 0)]
)
def test_a_norm_may_differ_by_the_tolerance(deviation, found):
    result = of_merge([member("eu/0", norm=1.0, deviation=deviation)])
    assert len(result) == found
    if found:
        assert result[0] == (
            "merge of step 1: eu/0 (incarnation 1) stated a norm that differs by 0.00101 of it from what "
            "arrived, more than the allowed 0.001"
        )


@pytest.mark.parametrize(
    ("guard", "of_median", "clipped", "sentence"),
    [
        (10.0, 10.0, 0, ""),
        (10.0, 10.5, 2, ""),
        (
            10.0,
            10.5,
            0,
            "has a delta of 10.5 times the median and 0 clipped tensors, the guard is 10",
        ),
        (10.0, 9.5, 1, "has a delta of 9.5 times the median and 1 clipped tensor, the guard is 10"),
        (10.0, None, None, ""),
        (10.0, None, 2, "has a delta of 0 times the median and 2 clipped tensors, the guard is 10"),
        (0.0, 50.0, 0, ""),
        (None, 50.0, 0, ""),
        (None, 0.5, 1, "has a delta of 0.5 times the median and 1 clipped tensor, the guard is 0"),
        (0.5, 0.6, 1, ""),
    ],
)
def test_a_delta_beyond_the_guard_is_clipped_and_no_other(guard, of_median, clipped, sentence):
    found = of_merge([member("eu/0", ofMedian=of_median, clipped=clipped)], guard=guard)
    assert found == ([f"merge of step 1: eu/0 (incarnation 1) {sentence}"] if sentence else [])


@pytest.mark.parametrize(
    ("steps", "tokens", "weight", "expected"),
    [
        (4, 100, 2500.0, ""),
        (4, 100, 2500.0 * (1 + 1e-10), ""),
        (4, 100, 2501.0, "has weight 2501, expected 2500 for 100 tokens in 4 steps"),
        (4, 1, 0.25, ""),
        (1, 1, 0.0, "has weight 0, expected 1 for 1 tokens in 1 steps"),
        (0, 100, 0.0, ""),
        (4, 0, 0.0, ""),
        (0, 100, 1.0, "has weight 1, expected 0 for 100 tokens in 0 steps"),
        (4, 0, 1.0, "has weight 1, expected 0 for 0 tokens in 4 steps"),
    ],
)
def test_a_weight_is_tokens_squared_by_steps(steps, tokens, weight, expected):
    found = of_merge([member("eu/0", steps=steps, tokens=tokens, weight=weight)])
    prefix, suffix = "merge of step 1: eu/0 (incarnation 1) ", " beside the other members"
    assert found == ([prefix + expected + suffix] if expected else [])


@pytest.mark.parametrize(
    ("others", "guard", "limited"),
    [(2, 10.0, True), (1, 10.0, False), (2, 0.0, False), (2, None, False)],
)
def test_tokens_per_step_are_limited_by_the_median_of_three_members_with_a_guard(
    others, guard, limited
):
    members = [member(name) for name in NAMES[:others]]
    rate = RATE_MULTIPLE * 100
    eager = member("us/0", steps=2, tokens=1000)
    allowed = {**eager, "weight": rate**2 * 2 if limited else 1000.0**2 / 2}
    assert of_merge([*members, allowed], guard=guard) == []
    wrong = {**eager, "weight": 1000.0**2 / 2 if limited else rate**2 * 2}
    assert len(of_merge([*members, wrong], guard=guard)) == 1
    assert GUARDED_MEMBERS == 3


def test_members_without_steps_or_tokens_do_not_count_for_the_median():
    idle = [
        member("eu/1", steps=0, tokens=0, weight=0.0),
        member("eu/2", steps=3, tokens=0, weight=0.0),
    ]
    eager = member("us/0", steps=2, tokens=1000)
    assert of_merge([member("eu/0"), eager, *idle], guard=10.0) == []


# ---------------------------------------------------------------- the merge as a whole


@pytest.mark.parametrize(
    ("norm", "found"), [(2.0, 0), (2.0 * (1 + 1.9 * NORM_TOLERANCE), 0), (2.0 * (1 + 2.2 * NORM_TOLERANCE), 1)]
)  # fmt: skip
def test_a_merge_is_no_longer_than_the_weighted_mean_of_its_members(norm, found):
    # Weights are 1 : 3.
    members = [
        member("eu/0", steps=1, tokens=100, norm=5.0),
        member("eu/1", steps=3, tokens=300, norm=1.0),
    ]
    result = of_merge(members, deltaNorm=norm)
    assert len(result) == found
    if found:
        assert result == [
            "merge of step 1 has a delta of norm 2.0044, its members' weighted mean is 2"
        ]


def test_a_merge_of_unknown_or_no_lengths_is_not_judged_by_them():
    assert of_merge([member("eu/0", norm=1.0), member("eu/1")], deltaNorm=99.0) == []
    nothing = member("eu/0", tokens=0, weight=0.0, norm=1.0)
    assert of_merge([nothing], deltaNorm=99.0) == []


@pytest.mark.parametrize(
    ("steps", "norm", "others", "buffers", "found"),
    [
        (9, 0.0, 2, None, True),
        (9, NORM_FLOOR, 2, None, True),
        (9, 2 * NORM_FLOOR, 2, None, False),
        (9, None, 2, None, False),
        (8, 0.0, 2, None, False),
        (9, 0.0, 1, None, False),
        (9, 0.0, 2, True, False),
    ],
)
def test_of_three_members_none_claims_more_than_four_times_the_steps_without_a_delta(
    steps, norm, others, buffers, found
):
    assert CLAIMED_MULTIPLE == 4.0
    members = [member(name, norm=1.0) for name in NAMES[:others]]
    claims = member("us/0", steps=steps, tokens=100 * steps, norm=norm)
    extra = {} if buffers is None else {"buffers": buffers}
    result = of_merge([*members, claims], deltaNorm=0.0, **extra)
    sentence = "merge of step 1: us/0 claims 9 steps, the others 2, and its delta is empty"
    assert result == ([sentence] if found else [])


def test_a_member_without_weight_may_claim_steps():
    members = [member(name, norm=1.0) for name in NAMES[:2]]
    idle = member("us/0", steps=50, tokens=0, weight=0.0, norm=0.0)
    assert of_merge([*members, idle], deltaNorm=0.0) == []


def test_a_quorum_counts_distinct_learners():
    assert of_merge([member("eu/0"), member("eu/1")], quorum=2) == []
    assert of_merge([member("eu/0")], quorum=2) == [
        "merge of step 1 has 1 learner, its quorum is 2"
    ]
    assert of_merge([member("eu/0"), member("eu/1")], quorum=3) == [
        "merge of step 1 has 2 learners, its quorum is 3"
    ]
    assert of_merge([member("eu/0")], quorum=0) == [
        "merge of step 1 has 1 learner, its quorum is 0"
    ]


# ---------------------------------------------------------------- order


def test_steps_of_merges_grow_within_an_epoch_and_may_be_repeated_in_the_next():
    first = [
        start(),
        merge([member("eu/0", local_step=1)]),
        merge([member("eu/0", local_step=2)], step=2),
    ]
    assert sentences(*first, merge([member("eu/0", local_step=3)], step=2)) == [
        "merge of step 2 comes after that of step 2 in epoch 1"
    ]
    assert sentences(*first, start(2), merge([member("eu/0", local_step=3)], step=1, epoch=2)) == []


def test_a_report_counts_once_and_none_is_older_than_one_before():
    begin = [start(fragments=2, interval=2), merge([member("eu/0", local_step=5)], step=2)]
    who = "merge of step {}: eu/0 (incarnation 1): its report of local step {}, fragment {}, "
    assert sentences(*begin, merge([member("eu/0", local_step=5)], step=3, fragment=1)) == [
        who.format(3, 5, 1) + "counts twice: it is in the merge of step 2, fragment 0"
    ]
    assert sentences(*begin, merge([member("eu/0", local_step=4)], step=4)) == [
        who.format(4, 4, 0) + "is older than that of 5, merged before"
    ]
    # Another fragment, another learner or another incarnation is another matter.
    assert sentences(*begin, merge([member("eu/0", local_step=4)], step=3, fragment=1)) == []
    assert sentences(*begin, merge([member("eu/1", local_step=5)], step=4)) == []
    assert sentences(*begin, merge([member("eu/0", local_step=4, incarnation=2)], step=4)) == []


def test_what_is_older_than_the_newest_of_all_merges_stays_older():
    begin = [
        start(),
        *(merge([member("eu/0", local_step=n)], step=step) for step, n in ((1, 9), (2, 12))),
    ]
    assert audit(begin).ok
    found = audit(
        [
            *begin,
            merge([member("eu/0", local_step=10)], step=3),
            merge([member("eu/0", local_step=11)], step=4),
        ]
    )
    assert [sentence.rpartition(", ")[0].rpartition(" ")[2] for sentence in found.violations] == [
        "12",
        "12",
    ]


def test_an_incarnation_is_dead_once_a_later_one_joined():
    begin = [start(), line("join", learner="eu/0", incarnation=3)]
    assert sentences(*begin, merge([member("eu/0", incarnation=3)])) == []
    assert sentences(*begin, merge([member("eu/0", incarnation=4)])) == []
    assert sentences(*begin, merge([member("eu/0", incarnation=2)])) == [
        "merge of step 1: eu/0 (incarnation 2) was merged after its successor 3 joined"
    ]
    assert sentences(*begin, line("join", learner="eu/0", incarnation=3)) == []
    assert sentences(*begin, line("join", learner="eu/0", incarnation=2)) == [
        "incarnation 2 of eu/0 joined after its successor 3"
    ]
    after = [
        *begin,
        line("join", learner="eu/0", incarnation=2),
        line("join", learner="eu/0", incarnation=3),
    ]
    assert len(audit(after).violations) == 1, "the largest counts, not the last one"


@pytest.mark.parametrize(
    ("learner", "found"),
    [
        ("eu/0", False),
        ("eu/1", False),
        ("eu/2", True),
        ("us/0", True),
        ("eu/x", True),
        ("eu", True),
    ],
)
def test_learners_are_those_of_the_spec(learner, found):
    result = sentences(start(learners={"eu": 2}), line("join", learner=learner, incarnation=1))
    assert result == (
        [f"{learner} joined, but is not one of the learners of the spec"] if found else []
    )


def test_merges_are_of_the_fragment_that_is_due():
    begin = start(fragments=2, interval=4)
    assert sentences(begin, merge([member("eu/0")], step=2, fragment=1)) == []
    assert sentences(begin, merge([member("eu/0")], step=2, fragment=0)) == [
        "merge of step 2 is of fragment 0, but fragment 1 is due"
    ]
    assert sentences(begin, merge([member("eu/0")], step=3, fragment=1)) == [
        "merge of step 3 is of fragment 1, but no fragment is due"
    ]
    assert sentences(merge([member("eu/0")])) == [
        "merge of step 1 comes before any start: its schedule cannot be checked"
    ]


def test_a_schedule_that_changes_is_named_with_both():
    begin = start(fragments=2, interval=4)
    assert sentences(begin, start(2, fragments=2, interval=4)) == []
    assert sentences(begin, start(2, fragments=3, interval=4)) == [
        "the schedule became 3 fragments every 4 steps; it was 2 every 4"
    ]
    found = sentences(start(2), line("join", 1, learner="eu/0", incarnation=1))
    assert found == ["epoch 1 comes after epoch 2"]


# ---------------------------------------------------------------- parts, counts, sentences


def rotated(part, **fields):
    return json.dumps({"event": "rotate", "part": part, **fields})


def test_each_part_follows_the_one_before():
    begin = [start(), rotated(2), rotated(3)]
    assert sentences(*begin, rotated(4)) == []
    assert sentences(*begin, rotated(5)) == [
        "part 5 begins after part 3: lines are missing or counted twice"
    ]
    assert sentences(*begin, rotated(3)) == [
        "part 3 begins after part 3: lines are missing or counted twice"
    ]
    assert audit([rotated(4), start(), rotated(5)]).unseen == (
        "3 older parts that rotation deleted",
    )
    assert audit([rotated(2), start()]).unseen == ("1 older part that rotation deleted",)
    assert audit([rotated(1), start()]).unseen == ()
    restart = json.dumps({"event": "restart", "process": "eu/0", "code": 1})
    assert audit([restart, restart, rotated(2), start()]).unseen == (
        "1 older part that rotation deleted",
    )


def test_the_verdict_counts_in_words():
    begin = [start(), line("join", learner="eu/0", incarnation=1)]
    single = audit([*begin, merge([member("eu/0")])])
    assert single.verdict == (
        "Passed: 1 merge of 1 report from 1 learner in 1 incarnation, 1 syncer epoch; no report was merged "
        "twice, no merge was below the quorum, every weight is tokens²/steps, and every fragment kept its "
        "schedule."
    )
    more = [
        start(2), line("join", 2, learner="eu/1", incarnation=2), line("join", 2, learner="eu/0", incarnation=3),
        merge([member("eu/1", incarnation=2), member("eu/0", incarnation=3)], epoch=2, quorum=3),
    ]  # fmt: skip
    found = audit([*begin, merge([member("eu/0")]), *more])
    assert (found.events, found.merges, found.reports, found.epochs) == (7, 2, 3, 2)
    assert (found.learners, found.incarnations, found.torn_lines) == (2, 3, 0)
    assert found.verdict == (
        "Failed: 1 violation in 2 merges of 3 reports from 2 learners in 3 incarnations, 2 syncer epochs."
    )


def test_lines_that_cannot_be_read_are_placed_and_counted():
    found = audit_parts(
        [("a:1", start()), ("a:2", "{"), ("a:3", "["), ("b:1", merge([member("eu/0")]))]
    )
    assert found.notes == ("a:2 is torn", "a:3 is torn")
    assert found.violations == (
        "2 lines cannot be read (a:2, a:3), but kills of the syncer explain only 0: events are missing",
    )
    torn = [("a:1", start()), *((f"b:{n}", "{") for n in range(10))]
    [sentence] = audit_parts(torn).violations
    assert sentence.startswith(
        "10 lines cannot be read (b:0, b:1, b:2, b:3, b:4, b:5, b:6, b:7), but "
    )
    assert sentence.endswith(" explain only 1: events are missing")


def test_what_the_disk_did_not_take_is_stated_by_kind():
    dropped = {"event": "dropped", "lines": 3, "events": {"merge": 2, "join": 1}, "torn": 2}
    found = audit([start(), json.dumps(dropped), json.dumps(dropped)])
    assert found.unseen == (
        "lines that the disk did not take (2 join, 4 merge)",
        "4 lines that the disk may have kept only in part",
    )
    assert found.verdict.endswith(
        " Not checked: lines that the disk did not take (2 join, 4 merge); "
        "4 lines that the disk may have kept only in part."
    )
    once = {"event": "dropped", "lines": 1, "events": {"eject": 1}, "torn": 1}
    assert audit([start(), json.dumps(once)]).unseen[1:] == (
        "1 line that the disk may have kept only in part",
    )


def test_a_merge_without_its_start_passes_only_where_lines_are_known_to_be_missing():
    lone = merge([member("eu/0")])
    dropped = json.dumps({"event": "dropped", "lines": 1, "events": {"start": 1}})
    assert audit([dropped, lone]).ok
    assert audit([rotated(2), lone]).ok
    assert not audit([rotated(1), lone]).ok
    other = json.dumps({"event": "dropped", "lines": 1, "events": {"join": 1}})
    assert not audit([other, lone]).ok


def test_a_line_with_a_wrong_field_names_its_event():
    assert sentences(start(), line("merge", step="x")) == [
        "merge has step 'x', expected a whole number"
    ]
    assert sentences(start(), json.dumps({"event": 7})) == ["7 has event 7, expected a string"]
    assert sentences(start(fragments=1), start(2, fragments=0)) == [
        "start has a schedule without fragments or steps"
    ]


@pytest.mark.parametrize(("steps", "found"), [(12, False), (13, True)])
def test_claims_are_compared_with_the_median_of_the_steps(steps, found):
    members = [
        member("eu/0", steps=1, tokens=100, norm=1.0),
        member("eu/1", steps=3, tokens=300, norm=1.0),
    ]
    claims = member("us/0", steps=steps, tokens=100 * steps, norm=0.0)
    result = of_merge([*members, claims], deltaNorm=0.0)
    sentence = "merge of step 1: us/0 claims 13 steps, the others 3, and its delta is empty"
    assert result == ([sentence] if found else [])
