"""What the audit finds about blocks of the data."""

from __future__ import annotations

import json

import pytest

from diloco.journal.audit import audit
from diloco.journal.block_audit import LOOK_BACK, MAX_MERGES, MAX_SERIALS

LEARNERS = {"eu": 2}


def line(event, epoch=1, **fields):
    return json.dumps({"epoch": epoch, "event": event, **fields})


def span(*serials):
    return [{"first": serial, "count": 1} for serial in serials]


def lease(learner, *serials, epoch=1):
    return line("lease", epoch, learner=learner, incarnation=1, blocks=span(*serials))


def release(learner, *serials):
    return line("release", learner=learner, incarnation=1, blocks=span(*serials), reason="x")


def trained(learner, serial, begin, end):
    blocks = [{"block": serial, "begin": begin, "end": end}]
    return line("trained", learner=learner, incarnation=1, blocks=blocks)


def merge(step, fragment, learner, local_step, steps):
    weight = 4.0 * 4.0 * steps
    member = {
        "learner": learner, "incarnation": 1, "step": local_step, "steps": steps, "tokens": 4 * steps, "weight": weight,
        "base": None,
    }  # fmt: skip
    return line("merge", step=step, fragment=fragment, quorum=1, members=[member])


def data(epoch=1, after=0, free=(), opened=()):
    return line("data", epoch, items=100, size=10, next=after, free=span(*free), open=span(*opened))


def start(epoch=1):
    return line("start", epoch, fragments=1, interval=1, learners=LEARNERS)


def joined(learner):
    return line("join", learner=learner, incarnation=1)


BEGIN = (start(), joined("eu/0"), joined("eu/1"), data())


def test_each_block_has_its_learner_steps_and_merges():
    found = audit(
        [
            *BEGIN, lease("eu/0", 0, 1), lease("eu/1", 2), trained("eu/0", 0, 0, 3), merge(1, 0, "eu/0", 2, 2),
            merge(2, 0, "eu/0", 5, 3), trained("eu/0", 1, 3, 6), release("eu/1", 2), lease("eu/0", 2),
        ]
    )  # fmt: skip
    assert found.ok, found.violations
    assert [(row["block"], row["localSteps"], row["merges"]) for row in found.blocks] == [
        (0, [1, 3], [1, 2]),
        (1, [4, 6], [2]),
    ]
    assert found.data == (
        "Blocks of data: 2 trained on (eu/0 2); 2 of them in at least one merge; 1 open; 0 to be leased again."
    )


def test_a_block_that_two_learners_have_at_once_is_a_violation_also_in_another_pass():
    for serial in (1, 11):
        found = audit([*BEGIN, lease("eu/0", 1), lease("eu/1", serial)])
        [sentence] = found.violations
        assert sentence.endswith("is leased to eu/1 while it is open at eu/0")


def test_a_block_that_counts_for_another_learner_or_twice_is_a_violation():
    found = audit([*BEGIN, lease("eu/0", 0), trained("eu/1", 0, 0, 1)])
    assert "block 0 of pass 0 counts for eu/1, where it is not open" in found.violations[0]
    found = audit([*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 1), lease("eu/0", 0)])
    assert "is leased to eu/0, but was trained on" in found.violations[0]


def test_a_restart_leases_again_what_was_trained_after_its_snapshot_and_loses_nothing():
    before = [*BEGIN, lease("eu/0", 0, 1), trained("eu/0", 0, 0, 3), trained("eu/0", 1, 3, 6)]
    found = audit([*before, start(2), data(2, after=2, free=[1]), lease("eu/1", 1, epoch=2)])
    assert found.ok, found.violations
    assert "1 undone by restarts of the syncer" in found.data
    found = audit([*BEGIN, lease("eu/0", 0, 1), start(2), data(2, after=2, free=[1])])
    assert "block 0 of pass 0 is lost" in found.violations[0]


def test_after_lines_that_are_missing_nothing_is_stated_before_the_next_state():
    rest = [trained("eu/0", 0, 0, 3), lease("eu/1", 1), release("eu/1", 1), lease("eu/1", 4)]
    rotated = line("rotate", part=3, fragments=1, interval=1)
    assert audit([rotated, joined("eu/0"), joined("eu/1"), *rest]).ok
    dropped = line("dropped", lines=2, events={"lease": 2})
    found = audit([*BEGIN, dropped, *rest])
    assert found.ok, found.violations
    again = [dropped, *rest, data(after=6, free=[5], opened=[4]), lease("eu/1", 4)]
    [sentence] = audit([*BEGIN, *again]).violations
    assert "block 4 of pass 0 is leased to eu/1 while it is open at eu/1" in sentence


def test_lines_about_blocks_without_a_dataset_are_a_violation():
    found = audit([start(), joined("eu/0"), lease("eu/0", 0)])
    assert "of a dataset that no line states" in found.violations[0]


def test_a_state_within_an_epoch_shows_what_was_removed_from_the_lines_before():
    lines = [*BEGIN, lease("eu/0", 0, 1), trained("eu/0", 0, 0, 3), data(after=2, opened=[1])]
    found = audit(lines)
    assert found.ok, found.violations
    del lines[-2]
    assert "block 0 of pass 0 is lost" in audit(lines).violations[0]


def test_merges_that_a_restart_undid_do_not_count():
    before = [*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 3), merge(1, 0, "eu/0", 1, 1)]
    undone = [
        merge(2, 0, "eu/0", 3, 2),
        line("start", 2, step=1, fragments=1, interval=1, learners=LEARNERS),
    ]
    found = audit([*before, *undone, data(2, after=1)])
    assert [row["merges"] for row in found.blocks] == [[1]]


@pytest.mark.slow
def test_many_blocks_and_merges_are_audited():
    lines = [*BEGIN[:3], line("data", items=10**12, size=1, next=0, free=[], open=[])]
    opened, steps = 0, LOOK_BACK + 500
    for step in range(1, steps + 1):
        blocks = [{"first": opened, "count": 8}]
        lines.append(line("lease", learner="eu/0", incarnation=1, blocks=blocks))
        done = [{"block": opened + n, "begin": step - 1, "end": step} for n in range(8)]
        lines.append(line("trained", learner="eu/0", incarnation=1, blocks=done))
        opened += 8
        lines.append(merge(step, 0, "eu/0", step, 1))
    book = audit(lines)
    assert book.ok, book.violations[:3]
    assert len(book.blocks) == 8 * steps


def later(epoch, *lines):
    """These lines, in an epoch after the first one."""
    return [json.dumps(json.loads(line) | {"epoch": epoch}) for line in lines]


def members(step, *counted):
    """A merge of fragment 0 with (learner, t_m, steps, weight) each."""
    return line(
        "merge", step=step, fragment=0, quorum=1,
        members=[
            {
                "learner": learner, "incarnation": 1, "step": local_step, "steps": steps,
                "tokens": 4 * steps if weight else 0, "weight": weight, "base": None,
            }
            for learner, local_step, steps, weight in counted
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("local_step", "steps", "counts"),
    [(3, 3, False), (4, 1, True), (4, 4, True), (6, 1, True), (7, 1, False), (9, 3, False), (9, 4, True), (9, 9, True)],
)  # fmt: skip
@pytest.mark.parametrize("first", ["merge", "block"])
def test_a_block_counts_in_a_merge_that_has_one_of_its_steps(local_step, steps, counts, first):
    # Its steps are 4 to 6.
    lines = [merge(1, 0, "eu/0", local_step, steps), trained("eu/0", 0, 3, 6)]
    found = audit([*BEGIN, lease("eu/0", 0), *(lines if first == "merge" else lines[::-1])])
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[1] if counts else []]


def test_of_two_blocks_that_end_together_each_counts_in_the_merges_of_its_own_steps():
    blocks = [{"block": 0, "begin": 3, "end": 6}, {"block": 1, "begin": 6, "end": 9}]
    both = line("trained", learner="eu/0", incarnation=1, blocks=blocks)
    merges = [merge(1, 0, "eu/0", 6, 3), merge(2, 0, "eu/0", 7, 1)]
    found = audit([*BEGIN, lease("eu/0", 0, 1), *merges, both])
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[1], [2]]


def test_a_block_of_a_line_without_a_time_has_none():
    [row] = audit([*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 3)]).blocks
    assert row["time"] == ""


def test_members_without_weight_do_not_count_and_those_after_them_do():
    found = audit(
        [
            *BEGIN, lease("eu/0", 0), lease("eu/1", 1), trained("eu/0", 0, 0, 3), trained("eu/1", 1, 0, 3),
            members(1, ("eu/0", 3, 3, 0.0), ("eu/1", 3, 3, 48.0)),
        ]
    )  # fmt: skip
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[], [1]]
    assert found.data.startswith(
        "Blocks of data: 2 trained on (eu/0 1, eu/1 1); 1 of them in at least one merge;"
    )


def test_only_merges_of_the_same_incarnation_count():
    lines = [*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 3)]
    other = json.loads(merge(1, 0, "eu/0", 3, 3))
    other["members"][0]["incarnation"] = 2
    [row] = audit([*lines, json.dumps(other)]).blocks
    assert (row["incarnation"], row["merges"]) == (1, [])
    assert [row["merges"] for row in audit([*lines, merge(1, 0, "eu/0", 3, 3)]).blocks] == [[1]]


def test_each_row_is_complete():
    done = json.loads(trained("eu/1", 13, 4, 9)) | {"time": "2026-01-02T03:04:05Z"}
    [row] = audit(
        [
            *BEGIN[:3], data(after=13), lease("eu/1", 13), merge(2, 0, "eu/1", 9, 2), merge(1, 0, "eu/1", 7, 2),
            json.dumps(done),
        ]
    ).blocks  # fmt: skip
    assert row == {
        "pass": 1,
        "block": 3,
        "learner": "eu/1",
        "incarnation": 1,
        "time": "2026-01-02T03:04:05Z",
        "localSteps": [5, 9],
        "merges": [1, 2],
    }


def test_serials_that_a_lease_leaves_out_are_to_be_leased_later():
    # A learner that returned had them from before the syncer lost its state.
    found = audit([*BEGIN, lease("eu/0", 3), lease("eu/1", 1)])
    assert found.ok, found.violations
    assert found.data == (
        "Blocks of data: 0 trained on (no learner); 0 of them in at least one merge; 2 open; 2 to be leased again."
    )


def test_what_is_released_by_a_learner_that_does_not_have_it_is_a_violation():
    for line_ in (release("eu/1", 0), release("eu/0", 5)):
        [sentence] = audit([*BEGIN, lease("eu/0", 0), line_]).violations
        learner, number = json.loads(line_)["learner"], json.loads(line_)["blocks"][0]["first"]
        assert sentence.endswith(
            f": block {number} of pass 0 is released by {learner}, where it is not open"
        )
    # It is free then, and can be leased to the other one.
    found = audit([*BEGIN, lease("eu/0", 0), release("eu/0", 0), lease("eu/1", 0)])
    assert found.ok, found.violations
    assert "; 1 open; 0 to be leased again." in found.data


def test_a_block_that_counts_twice_for_the_same_learner_is_a_violation():
    found = audit(
        [*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 1), trained("eu/0", 0, 1, 2)]
    ).violations
    assert [sentence.partition(": ")[2] for sentence in found] == [
        "block 0 of pass 0 counts for eu/0, where it is not open",
        "block 0 of pass 0 counts twice",
    ]


def test_after_a_restart_it_is_not_known_who_has_what_until_it_is_leased_again():
    before = [*BEGIN, lease("eu/0", 0, 1, 2), start(2), data(2, after=3, opened=[0, 1, 2])]
    found = audit(
        [*before, *later(2, trained("eu/1", 0, 0, 1), release("eu/1", 1), lease("eu/1", 1))]
    )
    assert found.ok, found.violations
    [sentence] = audit([*before, lease("eu/1", 2, epoch=2)]).violations
    assert sentence.endswith(
        "block 2 of pass 0 is leased to eu/1 while it is open at another learner"
    )
    # The state alone, in the same epoch, does not make it forget.
    found = audit([*BEGIN, lease("eu/0", 0), data(after=1, opened=[0]), trained("eu/1", 0, 0, 1)])
    assert "counts for eu/1, where it is not open" in found.violations[0]


def test_a_merge_that_a_restart_undid_does_not_count_for_a_block_that_is_stated_later():
    undone = [merge(1, 0, "eu/0", 1, 1), merge(2, 0, "eu/0", 3, 2)]
    resumed = line("start", 2, step=1, fragments=1, interval=1, learners=LEARNERS)
    lines = [*BEGIN, lease("eu/0", 0), *undone, resumed, data(2, after=1, opened=[0])]
    found = audit([*lines, *later(2, trained("eu/0", 0, 0, 3))])
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[1]]


def test_a_restart_undoes_what_its_snapshot_has_as_free_or_open_or_does_not_know():
    before = [*BEGIN, lease("eu/0", 0, 1, 2, 3), *(trained("eu/0", n, n, n + 1) for n in range(4))]
    resumed = [start(2), data(2, after=3, free=[1], opened=[2])]
    found = audit([*before, *resumed, *later(2, merge(1, 0, "eu/0", 4, 4))])
    assert found.ok, found.violations
    assert [(row["block"], row["merges"]) for row in found.blocks] == [(0, [1])]
    assert found.data == (
        "Blocks of data: 1 trained on (eu/0 1); 1 of them in at least one merge; 1 open; 1 to be leased again; "
        "3 undone by restarts of the syncer."
    )
    # Two restarts add up, and a block that is undone may count again.
    again = [
        start(2), data(2, after=4, free=[1]), *later(2, lease("eu/1", 1), trained("eu/1", 1, 0, 1)),
        start(3), data(3, after=4, free=[1]),
    ]  # fmt: skip
    found = audit([*before, *again])
    assert found.ok, found.violations
    assert "; 2 undone by restarts of the syncer." in found.data


def test_serials_before_the_first_line_are_counted_as_such():
    rotated = line("rotate", part=3, fragments=1, interval=1)
    rest = [joined("eu/0"), data(after=7, free=[4], opened=[5, 6]), trained("eu/0", 5, 0, 1)]
    found = audit([rotated, *rest])
    assert found.ok, found.violations
    assert found.data == (
        "Blocks of data: 1 trained on (eu/0 1); 0 of them in at least one merge; 1 open; 1 to be leased again; "
        "6 before the first line, or where lines are missing."
    )
    assert audit([rotated, joined("eu/0")]).data == (
        "Blocks of data: not known, the lines are missing."
    )
    assert audit([start(), joined("eu/0")]).data == ""


@pytest.mark.parametrize(
    ("dropped", "unsure"),
    [
        ({"lines": 1, "events": {"release": 1}}, True),
        ({"lines": 1, "events": {"eject": 1}, "torn": 1}, True),
        ({"lines": 1, "events": {"eject": 1}}, False),
    ],
)
def test_only_missing_lines_that_may_be_about_blocks_make_them_unsure(dropped, unsure):
    lines = [*BEGIN, line("dropped", **dropped), release("eu/0", 3)]
    assert audit(lines).ok == unsure


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"items": 0}, True),
        ({"size": 0}, True),
        ({"items": 1, "size": 1}, False),
        ({"free": [{"first": 0, "count": MAX_SERIALS}], "open": [{"first": 9, "count": 1}]}, True),
    ],
)
def test_a_state_of_no_dataset_or_of_too_many_blocks_is_refused_as_a_whole(changes, refused):
    stated = json.loads(data()) | changes
    found = audit([*BEGIN[:3], json.dumps(stated)])
    assert found.ok != refused
    if refused:
        assert found.violations[0].partition(": ")[2] == (
            f"states {stated['items']} items in blocks of {stated['size']}, or too many blocks"
        )
        assert found.data == ""


def test_a_block_lists_a_bounded_number_of_merges():
    merges = [merge(step, 0, "eu/0", 1, 1) for step in range(1, MAX_MERGES + 10)]
    book = audit([*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 1), *merges])
    assert len(book.blocks[0]["merges"]) == MAX_MERGES


def test_a_member_counts_however_small_its_weight_is():
    lines = [*BEGIN, lease("eu/0", 0), trained("eu/0", 0, 0, 4)]
    member = {
        "learner": "eu/0",
        "incarnation": 1,
        "step": 4,
        "steps": 4,
        "tokens": 1,
        "weight": 0.25,
        "base": None,
    }
    found = audit([*lines, line("merge", step=1, fragment=0, quorum=1, members=[member])])
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[1]]


def test_a_block_that_was_trained_on_long_after_the_last_merge_is_recorded():
    far = 10 * LOOK_BACK
    lines = [*BEGIN, lease("eu/0", 0, 1), trained("eu/0", 0, 0, 1), merge(1, 0, "eu/0", 1, 1)]
    found = audit([*lines, trained("eu/0", 1, far, far + 1), merge(2, 0, "eu/0", far + 1, 1)])
    assert found.ok, found.violations
    assert [row["merges"] for row in found.blocks] == [[1], [2]]
