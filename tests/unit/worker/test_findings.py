"""What a rank finds out about its program is in its row, and rank 0 shows it once, whichever ranks have it."""

from __future__ import annotations

import pytest

from diloco_testing.learners.control_area import board
from diloco_worker.core.findings import NONE, Finding, Findings

UNDONE, WRITTEN = Finding.UNDONE, Finding.WRITTEN


@pytest.mark.parametrize("has", [[0], [1], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("finding", [*Finding])
def test_a_finding_is_shown_once_with_the_ranks_that_have_it(finding, has):
    rows = [finding if rank in has else NONE for rank in range(3)]
    findings = Findings()
    shown = [findings.look(rows) for _ in range(5)]
    assert shown == [[], [(finding, has)], [], [], []]


def test_a_rank_that_is_a_boundary_behind_is_among_those_that_are_named():
    findings = Findings()
    assert findings.look([NONE, UNDONE]) == []
    assert findings.look([UNDONE, UNDONE]) == [(UNDONE, [0, 1])]


def test_a_rank_that_comes_to_the_same_finding_later_is_no_second_line():
    findings = Findings()
    for rows in ([NONE, UNDONE], [NONE, UNDONE], [UNDONE, UNDONE]):
        last = findings.look(rows)
    assert last == findings.look([UNDONE, UNDONE]) == []


def test_two_findings_are_shown_when_each_is_there():
    findings = Findings()
    assert findings.look([WRITTEN, NONE]) == []
    assert findings.look([WRITTEN, UNDONE]) == [(WRITTEN, [0])]
    assert findings.look([WRITTEN, UNDONE | WRITTEN]) == [(UNDONE, [1])]


def test_ranks_that_have_found_nothing_show_nothing():
    findings = Findings()
    assert [findings.look([NONE, NONE]) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("found", [NONE, UNDONE, WRITTEN, UNDONE | WRITTEN])
def test_a_row_has_the_findings_of_its_rank_beside_its_other_flags(found, terminated):
    rows = board(ranks=3, fragments=1)
    rows.enter(1, 7, terminated=terminated, finished=5, steps=12, findings=found)
    assert rows.findings() == [NONE, found, NONE]
    assert (rows.rows()[1], rows.steps()[1], rows.finished([1])) == ((7, terminated), (7, 12), 5)
    assert [rows.left(rank) for rank in range(3)] == [False] * 3
    rows.leave(1)
    assert rows.findings() == [NONE, found, NONE]
    assert [rows.left(rank) for rank in range(3)] == [False, True, False]


def test_rows_of_another_machine_bring_the_findings_of_its_ranks():
    here, there = board(ranks=3, fragments=1), board(ranks=3, fragments=1)
    there.enter(2, 9, terminated=False, findings=UNDONE)
    here.take_rows([1, 2], there.rows_of([1, 2]))
    assert here.findings() == [NONE, NONE, UNDONE]
