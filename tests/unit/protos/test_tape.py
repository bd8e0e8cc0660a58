"""Lines of tape.jsonl: what is read, and what is refused."""

import json

import pytest

from diloco.journal import tape
from diloco.journal.records import RecordError
from diloco_testing.local.tapes import process


def test_a_tape_is_read_as_it_was_written():
    lines = process("eu/0", 3, results={2: [(0, 2, 3), (1, 1)]})
    [found] = tape.processes(json.loads(json.dumps(lines)))
    assert (found.begin.learner, found.last, sorted(found.steps)) == ("eu/0", 3, [1, 2, 3])
    assert found.steps[2].results == (
        tape.Held(fragment=0, step=2, epoch=3),
        tape.Held(fragment=1, step=1, epoch=1),
    )
    assert found.steps[1].results is None
    assert found.end is not None
    assert found.end.parameters[1] == tape.Digests(fragment=1, digests="eeeeeeee")


def test_each_incarnation_is_a_process_and_one_that_was_killed_has_no_end():
    lines = [
        *process("eu/0", 3, ended=False),
        *process("eu/0", 5, incarnation=4, restarts=1, after=2),
    ]
    first, second = tape.processes(lines)
    assert (first.end, first.last) == (None, 3)
    assert (second.begin.incarnation, second.begin.restarts, sorted(second.steps)) == (
        4,
        1,
        [3, 4, 5],
    )


def test_what_rotation_has_left_of_an_earlier_process_does_not_count():
    lines = [*process("eu/0", 3)[2:], *process("eu/0", 9, incarnation=2, after=7)]
    [found] = tape.processes(lines)
    assert found.begin.incarnation == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:2] + lines[3:], "has local step 3 after 1 in incarnation 1"),
        (lambda lines: [{**lines[0], "tape": 2}, *lines[1:]], "has version 2, this release reads version 1"),
        (lambda lines: [*lines, {"event": "dropped", "lines": 7, "events": {"step": 7}}], "has lost 7 lines"),
        (lambda lines: [lines[0], {**lines[1], "seen": "x"}], "has seen 'x', expected a whole number"),
    ],
)  # fmt: skip
def test_a_tape_with_a_gap_or_of_another_version_is_refused(change, message):
    with pytest.raises(RecordError, match=message):
        tape.processes(change(process("eu/0", 4)))


def test_kinds_of_later_releases_are_left_out():
    lines = process("eu/0", 2)
    [found] = tape.processes([lines[0], {"event": "weather", "wind": 3}, *lines[1:]])
    assert found.last == 2


def test_a_step_that_applies_every_one_of_24_fragments_has_less_than_a_kilobyte():
    results = tuple(tape.Held(fragment=f, step=1_000_000) for f in range(24))
    step = tape.Step(
        incarnation=1000, local_step=10**6, seen=10**6, step=10**6, results=results
    )  # fmt: skip
    line = {"time": "2026-11-27T00:00:00.000+00:00", **tape.encode(step)}
    assert len(json.dumps(line, separators=(",", ":"))) < 1000
