"""What the audit finds about blocks of the data."""

from __future__ import annotations

import json

from diloco.journal.audit import audit
from diloco.journal.block_audit import LOOK_BACK

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
