"""The audit: a real run passes, and each violation is found separately."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco.journal.audit import audit

Event = dict[str, Any]
P, H = 3, 6


def member(learner: str, incarnation: int, step: int) -> Event:
    tokens = 1000 + 7 * step
    return {
        "learner": learner, "incarnation": incarnation, "step": step, "steps": 3, "tokens": tokens,
        "weight": tokens * tokens / 3, "base": max(0, step - 6),
    }  # fmt: skip


def start(epoch: int) -> Event:
    return {
        "epoch": epoch, "event": "start", "step": 0, "steps": 40, "fragments": P, "interval": H,
        "quorum": 2,
    }  # fmt: skip


def join(epoch: int, learner: str, incarnation: int) -> Event:
    return {"epoch": epoch, "event": "join", "learner": learner, "incarnation": incarnation}


def merge(epoch: int, step: int, members: list[Event]) -> Event:
    return {
        "time": "2026-01-01T00:00:00+00:00", "epoch": epoch, "event": "merge", "step": step,
        "fragment": step % H // 2, "attempt": 1, "quorum": 2, "members": members,
    }  # fmt: skip


def history() -> list[Event]:
    """Two epochs, three learners, one of which is replaced; the second epoch repeats two steps."""
    events = [start(1)]
    events += [join(1, f"eu/{i}", i + 1) for i in range(3)]
    for step in range(0, 12, 2):
        events.append(merge(1, step, [member(f"eu/{i}", i + 1, step + 1) for i in range(3)]))
    events.append({"epoch": 1, "event": "leave", "learner": "eu/2", "incarnation": 3})
    events.append({"event": "restart", "epoch": 0, "process": "eu/2", "code": -9})
    events += [start(2), join(2, "eu/0", 1), join(2, "eu/1", 2), join(2, "eu/2", 4)]
    for step in range(8, 16, 2):
        incarnations = (("eu/0", 1), ("eu/1", 2), ("eu/2", 4))
        events.append(
            merge(2, step, [member(name, number, step + 9) for name, number in incarnations])
        )
    events.append({"epoch": 2, "event": "complete", "step": 16, "surprise": [1]})
    return events


def lines(events: list[Event]) -> list[str]:
    return [json.dumps(event) + "\n" for event in events]


def merges(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "merge"]


def test_a_true_history_passes_and_is_counted():
    found = audit(lines(history()))
    assert found.violations == ()
    assert found.ok
    assert (found.merges, found.reports, found.epochs) == (10, 30, 2)
    assert (found.learners, found.incarnations, found.torn_lines) == (3, 4, 0)
    assert found.verdict.startswith(
        "Passed: 10 merges of 30 reports from 3 learners in 4 incarnations"
    )


def test_a_job_whose_parameters_never_changed_is_noted_until_they_do():
    events = [*history()[:-1], {"epoch": 2, "event": "complete", "step": 16, "unchanged": True}]
    found = audit(lines(events))
    assert found.ok
    assert found.notes == ("no merge changed a parameter: the model of step 16 is that of step 0",)
    raised = {"epoch": 2, "event": "complete", "step": 24}
    assert audit(lines([*events, raised])).notes == ()


def test_an_empty_log_is_no_violation():
    assert audit([]).ok


def repeat_report(events: list[Event]) -> None:
    # Steps 0 and 6 are both of fragment 0.
    merges(events)[3]["members"][0]["step"] = merges(events)[0]["members"][0]["step"]


def older_report(events: list[Event]) -> None:
    merges(events)[3]["members"][0]["step"] = 0


def repeat_over_epochs(events: list[Event]) -> None:
    # Step 8 of epoch 1 and of epoch 2 are of the same fragment, the learner lived on.
    late = merges(events)[6]["members"][0]
    late.update(member("eu/0", 1, merges(events)[4]["members"][0]["step"]))


def repeat_in_another_fragment(events: list[Event]) -> None:
    # Step 2 is of fragment 1; the report was merged into fragment 0 at step 0.
    merges(events)[1]["members"][0].update(member("eu/0", 1, 1))


def repeat_in_another_fragment_over_epochs(events: list[Event]) -> None:
    # Step 8 of epoch 2 is of fragment 1; the report was merged into fragment 2 in epoch 1.
    merges(events)[6]["members"][0].update(member("eu/0", 1, 11))


def twice_in_one_merge(events: list[Event]) -> None:
    members = merges(events)[0]["members"]
    members.append(copy.deepcopy(members[0]))


def dead_incarnation(events: list[Event]) -> None:
    merges(events)[-1]["members"][2]["incarnation"] = 3


def dead_joins(events: list[Event]) -> None:
    events.append(join(2, "eu/2", 3))


def weight_off(events: list[Event]) -> None:
    merges(events)[2]["members"][1]["weight"] *= 1 + 1e-8


def weight_of_nothing(events: list[Event]) -> None:
    merges(events)[2]["members"][1].update(steps=0, tokens=5, weight=25.0)


def below_quorum(events: list[Event]) -> None:
    del merges(events)[2]["members"][1:]


def one_learner_twice_is_no_quorum(events: list[Event]) -> None:
    event = merges(events)[0]
    event["members"] = [member("eu/0", 1, 1), member("eu/0", 1, 2)]


def no_quorum_stated(events: list[Event]) -> None:
    del merges(events)[0]["quorum"]


def quorum_of_zero(events: list[Event]) -> None:
    merges(events)[0].update(quorum=0, members=[])


def step_repeats(events: list[Event]) -> None:
    again = copy.deepcopy(merges(events)[5])
    for each in again["members"]:
        each.update(member(each["learner"], each["incarnation"], each["step"] + 1))
    events.insert(events.index(merges(events)[5]) + 1, again)


def wrong_fragment(events: list[Event]) -> None:
    merges(events)[-1]["fragment"] = 0


def nothing_due(events: list[Event]) -> None:
    merges(events)[-1]["step"] = 15


def epoch_back(events: list[Event]) -> None:
    events.append({"epoch": 1, "event": "snapshot", "step": 12})


def schedule_changes(events: list[Event]) -> None:
    events.append(start(3) | {"interval": 12})


def no_start(events: list[Event]) -> None:
    del events[0]


def no_members(events: list[Event]) -> None:
    merges(events)[-1]["members"] = None


def steps_not_a_number(events: list[Event]) -> None:
    merges(events)[-1]["members"][0]["steps"] = "3"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (repeat_report, "eu/0 (incarnation 1): its report of local step 1, fragment 0, counts"),
        (older_report, "its report of local step 0, fragment 0, is older than that of 1"),
        (repeat_over_epochs, "its report of local step 9, fragment 1, counts twice"),
        (
            repeat_in_another_fragment,
            "step 1, fragment 1, counts twice: it is in the merge of step 0, fragment 0",
        ),
        (
            repeat_in_another_fragment_over_epochs,
            "step 11, fragment 1, counts twice: it is in the merge of step 10, fragment 2",
        ),
        (twice_in_one_merge, "its report of local step 1, fragment 0, counts twice"),
        (dead_incarnation, "eu/2 (incarnation 3) was merged after its successor 4 joined"),
        (dead_joins, "incarnation 3 of eu/2 joined after its successor 4"),
        (weight_off, "has weight"),
        (weight_of_nothing, "has weight 25, expected 0 for 5 tokens in 0 steps"),
        (below_quorum, "merge of step 4 has 1 learner, its quorum is 2"),
        (one_learner_twice_is_no_quorum, "merge of step 0 has 1 learner, its quorum is 2"),
        (no_quorum_stated, "merge has quorum None, expected a whole number"),
        (quorum_of_zero, "merge of step 0 has 0 learners, its quorum is 0"),
        (step_repeats, "merge of step 10 comes after that of step 10 in epoch 1"),
        (wrong_fragment, "merge of step 14 is of fragment 0, but fragment 1 is due"),
        (nothing_due, "merge of step 15 is of fragment 1, but no fragment is due"),
        (epoch_back, "epoch 1 comes after epoch 2"),
        (schedule_changes, "the schedule became 3 fragments every 12 steps; it was 3 every 6"),
        (no_members, "merge has members None, expected a list of objects"),
        (steps_not_a_number, "merge has steps '3', expected a number"),
    ],
)
def test_each_violation_is_found_alone(damage: Callable[[list[Event]], None], sentence: str):
    events = history()
    damage(events)
    found = audit(lines(events))
    assert len(found.violations) == 1, found.violations
    assert sentence in found.violations[0]
    assert found.violations[0].startswith("line ")
    assert found.verdict.startswith("Failed: 1 violation")


def test_merges_before_any_start_are_violations():
    events = history()
    no_start(events)
    found = audit(lines(events))
    assert len(found.violations) == 6
    assert "comes before any start" in found.violations[0]


def test_a_weight_within_rounding_passes():
    events = history()
    merges(events)[2]["members"][1]["weight"] *= 1 + 1e-12
    assert audit(lines(events)).ok


@pytest.mark.parametrize("empty", ["steps", "tokens"])
def test_a_report_of_no_steps_or_no_tokens_weighs_nothing(empty: str):
    events = history()
    merges(events)[2]["members"][1].update({empty: 0, "weight": 0.0})
    assert audit(lines(events)).ok


def test_a_lower_quorum_is_taken_from_the_merge_itself():
    events = history()
    merges(events)[2].update(quorum=1, members=[member("eu/0", 1, 5)])
    assert audit(lines(events)).ok


def test_a_line_torn_by_a_kill_of_the_syncer_is_a_note():
    text = lines(history())
    torn = text.index(json.dumps(start(2)) + "\n")
    text.insert(torn, '{"time":"2026-01-01T00:00:00+00:00","ev\n')
    found = audit(text)
    assert found.ok
    assert found.notes == (f"line {torn + 1} is torn",)


def test_the_last_line_may_be_torn_too():
    assert audit([*lines(history()), '{"epoch":2,"event":"mer']).ok


def test_the_first_line_may_be_torn_if_the_first_start_that_is_left_is_a_later_one():
    """The machine crashed while the first syncer started, before anything was durable."""
    for epoch, torn, ok in [(2, 1, True), (2, 2, False), (3, 2, True), (1, 1, False), (0, 0, True)]:
        text = [*["{\n"] * torn, json.dumps(start(epoch)) + "\n"]
        assert audit(text).ok is ok, (epoch, torn)


def test_each_epoch_may_end_with_a_torn_line_also_one_that_left_no_other():
    # seed 20261133175: of epoch 2 the start is torn, of epoch 3 every line is lost
    for torn, ok in [(1, True), (2, True), (3, True), (4, False)]:
        text = [json.dumps(start(1)) + "\n", *["{\n"] * torn, json.dumps(start(4)) + "\n"]
        assert audit(text).ok is ok, torn


def test_a_torn_line_within_an_epoch_is_a_violation_however_many_kills_there_were():
    text = lines(history())
    text[3:3] = ["{\n"]
    text[-1:] = [json.dumps(start(9)) + "\n"]
    assert audit(text).violations == (
        "1 line cannot be read (line 4), but kills of the syncer explain only 0: events are missing",
    )


def test_a_torn_line_is_explained_also_if_the_supervisor_wrote_before_the_next_start():
    text = lines(history())
    second = text.index(json.dumps(start(2)) + "\n")
    restart = json.dumps(
        {"time": "t", "event": "restart", "process": "syncer", "reason": "Crash", "restarts": 1}
    )
    text[second:second] = ["{\n", restart + "\n"]
    assert audit(text).ok


def test_lines_that_the_disk_may_have_kept_in_part_are_not_checked():
    text = [
        *lines(history()),
        json.dumps({"event": "dropped", "lines": 0, "events": {}, "torn": 3}),
    ]
    found = audit(text)
    assert found.unseen == ("3 lines that the disk may have kept only in part",)


def test_more_torn_lines_than_kills_are_a_violation():
    text = lines(history())
    text[3:3] = ["{\n", "}\n"]
    found = audit(text)
    assert found.torn_lines == 2
    assert found.violations == (
        "2 lines cannot be read (line 4, line 5), but kills of the syncer explain only 0: events are missing",
    )


def test_lines_that_are_no_objects_count_as_torn_and_empty_ones_do_not():
    found = audit([*lines(history()), "\n", "  \n", "[1, 2]"])
    assert found.torn_lines == 1


def rotated(part, **fields):
    return json.dumps({"time": "t", "event": "rotate", "part": part, **fields})


def test_parts_that_rotation_deleted_are_stated_and_the_rest_is_checked():
    """The line `rotate` has the schedule: the `start` is in a deleted part."""
    start, *rest = lines(history())
    spec = json.loads(start)
    heading = {"fragments": spec["fragments"], "interval": spec["interval"]}
    found = audit([rotated(3, **heading), *rest])
    assert found.ok, found.violations
    assert found.unseen == ("2 older parts that rotation deleted",)
    assert found.verdict.endswith("Not checked: 2 older parts that rotation deleted.")
    heading["interval"] += 1
    assert not audit([rotated(3, **heading), *rest]).ok
    assert audit([rotated(3), *rest]).ok


def test_a_schedule_without_steps_is_not_taken_from_the_begin_of_a_part():
    [start, *rest] = lines(history())
    heading = {"fragments": json.loads(start)["fragments"], "interval": 0}
    assert audit([rotated(3, **heading), *rest]).ok
    assert audit([rotated(3, **heading), start, *rest]).ok


def test_a_part_missing_in_the_middle_is_a_violation():
    text = lines(history())
    assert audit([*text, rotated(2)]).ok
    [violation] = audit([*text, rotated(3)]).violations
    assert "part 3 begins after part 1" in violation


def test_merges_that_the_disk_did_not_take_are_stated():
    dropped = {"event": "dropped", "lines": 3, "events": {"merge": 2, "join": 1}}
    found = audit([*lines(history()), json.dumps(dropped)])
    assert found.ok
    assert found.unseen == ("lines that the disk did not take (1 join, 2 merge)",)
    assert "2 merge" in found.verdict


# -------------------------------------------- false values (defects a01, a02, a07: tests/unit/test_defects.py)


def guarded_history() -> list[Event]:
    """As a syncer with a guard writes it: four learners, one merge per fragment."""
    begin = {**start(1), "learners": {"eu": 3, "us": 1}}
    names = ("eu/0", "eu/1", "eu/2", "us/0")
    joins = [
        {**join(1, name, number), "peer": "ipv4:10.0.0.1:5", "certificate": "1f"}
        for number, name in enumerate(names, 1)
    ]
    merged = []
    for step in range(0, 12, 2):
        members = [
            {
                **member(name, number, step + 1),
                "norm": 2.0, "deviation": 1e-7, "ofMedian": 1.2, "clipped": 0,
            }
            for number, name in enumerate(names, 1)
        ]  # fmt: skip
        merged.append({**merge(1, step, members), "guard": 10.0, "deltaNorm": 2.0})
    return [begin, *joins, *merged]


def lie(**changes: Any) -> Callable[[list[Event]], None]:
    """The last member of the last merge, changed."""

    def apply(events: list[Event]) -> None:
        events[-1]["members"][3].update(changes)

    return apply


def sybil(events: list[Event]) -> None:
    events.insert(5, join(1, "us/123456789", 9))


def longer(events: list[Event]) -> None:
    events[-1]["deltaNorm"] = 1e18


def runaway(events: list[Event]) -> None:
    for each in events[-1]["members"][:3]:
        each.update(steps=2, tokens=2000, weight=2_000_000.0)
    events[-1]["members"][3].update(steps=32, tokens=32_000, weight=32_000_000.0, norm=0.0)
    events[-1]["deltaNorm"] = 0.3


@pytest.mark.parametrize(
    ("forge", "sentence"),
    [
        (lie(tokens=2**63, steps=1, weight=2.0**126), "has weight 8.5070591730"),
        (lie(deviation=9e16), "stated a norm that differs by 9e+16 of it from what arrived"),
        (lie(ofMedian=1e30), "has a delta of 1e+30 times the median and 0 clipped tensors"),
        (longer, "has a delta of norm 1e+18, its members' weighted mean is 2"),
        (sybil, "us/123456789 joined, but is not one of the learners of the spec"),
        (runaway, "claims 32 steps, the others 2, and its delta is empty"),
    ],
    ids=["a01", "a02", "a03", "a03-length", "a07-sybil", "a07-pace"],
)
def test_a_false_number_that_a_merge_used_is_found(forge: Any, sentence: str) -> None:
    events = guarded_history()
    assert audit(lines(events)).violations == ()
    forge(events)
    found = audit(lines(events)).violations
    assert len(found) == 1
    assert sentence in found[0]


def test_a_weight_within_its_limit_passes_the_audit() -> None:
    events = guarded_history()
    rate = sorted(m["tokens"] / m["steps"] for m in events[-1]["members"])[1]
    events[-1]["members"][3].update(tokens=2**40, weight=3 * (2.1 * rate) ** 2)
    assert audit(lines(events)).violations == ()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("merge", {"event": {"a": 1}}), ("merge", {"event": []}), ("start", {"interval": 0}),
        ("start", {"fragments": -1}), ("merge", {"deltaNorm": 10**400}),
        ("merge", {"members": [{**member("eu/0", 1, 1), "tokens": 10**400}]}),
    ],
)  # fmt: skip
def test_a_line_with_an_impossible_value_is_a_violation_with_its_place(kind, change):
    events = history()
    at = next(i for i, event in enumerate(events) if event["event"] == kind)
    events[at] = {**events[at], **change}
    found = audit(map(json.dumps, events)).violations
    assert any(f"line {at + 1}: " in sentence for sentence in found)


def limits(epoch: int, **learners: int) -> Event:
    return {"epoch": epoch, "event": "limits", "learners": learners, "step": 1}


def of_learners(**learners: int) -> Event:
    return {**start(1), "learners": learners}


@pytest.mark.parametrize(
    ("events", "violations"),
    [
        ([of_learners(eu=1), limits(1, eu=2), join(1, "eu/1", 1)], 0),
        ([of_learners(eu=1), limits(1, eu=1, us=1), join(1, "us/0", 1)], 0),
        ([of_learners(eu=2), limits(1, eu=1), join(1, "eu/1", 1)], 1),
        ([of_learners(eu=2), limits(1, us=1), join(1, "eu/0", 1)], 1),
        ([of_learners(eu=1), join(1, "eu/1", 1), limits(1, eu=2)], 1),
        ([of_learners(eu=1), limits(1, eu=2), {**of_learners(eu=1), "epoch": 2}, join(2, "eu/1", 1)], 1),
        ([{"epoch": 1, "event": "rotate", "part": 3}, limits(1, eu=1), join(1, "eu/1", 1)], 1),
    ],
)  # fmt: skip
def test_a_join_is_judged_by_the_numbers_of_learners_in_force(events, violations):
    found = audit(lines(events)).violations
    assert len(found) == violations, found
    assert all("is not one of the learners of the spec" in sentence for sentence in found)


def test_numbers_that_the_disk_did_not_take_in_time_are_not_held_against_a_learner():
    lost = {"epoch": 1, "event": "dropped", "lines": 1, "events": {"limits": 1}}
    found = audit(lines([of_learners(eu=1), lost, join(1, "eu/1", 1)]))
    assert found.ok, found.violations
    assert "1 limits" in found.verdict


def test_a_line_of_limits_without_numbers_is_a_violation():
    broken = {"epoch": 1, "event": "limits", "learners": {"eu": "2"}}
    [sentence] = audit(lines([of_learners(eu=1), broken])).violations
    assert "limits has learners" in sentence


def recovery(
    learner: str, incarnation: int, source: str = "Peer", epoch: int = 1, **fields: Any
) -> Event:
    return {
        "epoch": epoch, "event": "recovery", "learner": learner, "incarnation": incarnation, "source": source,
        **fields,
    }  # fmt: skip


TWO = [start(1), join(1, "eu/0", 1), join(1, "eu/1", 2)]


def test_recoveries_are_summed_up_and_listed_once_for_each_incarnation():
    events = [
        *TWO, recovery("eu/0", 1, peer="eu/1", stateStep=8, age=2, bytes=3 << 20, seconds=0.5),
        recovery("eu/1", 2, "None", problem="busy"), start(2), join(2, "eu/0", 1),
        # The syncer restarted: the learner states it again.
        recovery("eu/0", 1, epoch=2, peer="eu/1", stateStep=8, age=2, bytes=3 << 20, seconds=0.5),
    ]  # fmt: skip
    found = audit(lines(events))
    assert found.ok, found.violations
    assert found.recovery == (
        "Recovery: 2 processes began after step 0: 1 with the optimizers' state of a peer, 1 with new optimizers' "
        "state. Peers sent 3.00 MiB."
    )
    assert [(r.learner, r.peer, r.problem) for r in found.recoveries] == [
        ("eu/0", "eu/1", ""),
        ("eu/1", "", "busy"),
    ]
    assert audit(lines(TWO)).recovery == ""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (recovery("eu/0", 1, peer="eu/7"), "the optimizers' state of eu/7, which never joined"),
        (recovery("eu/0", 1, peer="eu/0"), "the optimizers' state of itself"),
        (recovery("eu/0", 5, "None"), "began to train without having joined"),
    ],
)
def test_a_recovery_that_cannot_have_happened_is_a_violation(line, sentence):
    [found] = audit(lines([*TWO, line])).violations
    assert sentence in found


def test_a_recovery_is_not_held_against_joins_that_the_file_lacks():
    older = {"epoch": 1, "event": "rotate", "part": 3}
    assert audit(lines([older, start(1), recovery("eu/0", 1, peer="eu/7")])).ok
    lost = {"epoch": 1, "event": "dropped", "lines": 1, "events": {"join": 1}}
    assert audit(lines([*TWO, lost, recovery("eu/0", 9, peer="eu/7")])).ok


def test_only_the_newest_recoveries_are_kept_and_all_are_counted():
    many = [recovery("eu/0", 1, "None"), *(recovery("eu/1", n, "None") for n in range(1100))]
    joins = [join(1, "eu/1", n) for n in range(1100)]
    found = audit(lines([start(1), join(1, "eu/0", 1), *joins, *many]))
    assert len(found.recoveries) == 1000
    assert found.recoveries[0].learner == "eu/1"
    assert "1101 processes" in found.recovery
