"""
What the ranks of one learner find out about their program, each alone, and what rank 0 shows of it. Pure.

A rank states it in its row of the board (core/agreement.py), so that no rank waits for another.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Finding(enum.IntFlag):
    """What a rank has found; it stays in its row to the end."""

    UNDONE = 1
    """The program has undone results of merges (trainer/undone.py)."""
    WRITTEN = 2
    """It has written trained parameters between `Learner.connect` and the first step of an optimizer."""
    CHANGED = 4
    """Constant buffers or frozen parameters were written (trainer/buffers.py), of which a rank may hold a part."""
    OTHER_MODEL = 8
    """The program no longer trains what the job has."""


NONE = Finding(0)


class Findings:
    """
    Rank 0: what to show, each finding once, whichever ranks have it.

    A rank may be a boundary behind one that has stated a finding, so that this is shown at the next boundary of rank 0:
    then it is known of every rank that came to it in the same step.
    """

    def __init__(self) -> None:
        self._seen = self._shown = NONE

    def look(self, rows: Sequence[Finding]) -> list[tuple[Finding, list[int]]]:
        """
        Take the rows; call it once per boundary.

        Args:
            rows: what each rank states.

        Returns:
            What to show now: a finding, and the ranks that have it.
        """
        due = self._seen & ~self._shown
        self._shown |= due
        for row in rows:
            self._seen |= row
        return [(f, [rank for rank, row in enumerate(rows) if f & row]) for f in Finding if f & due]
