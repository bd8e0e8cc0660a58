"""
No merge is lost that a snapshot claims: each one below the step of a durable snapshot has its line in the
journal on the disk, unless that line was in a part that was deleted since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from diloco.journal import reader
from diloco.journal.writer import ROTATE
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Resumed

Merge = tuple[int, int]
"""Epoch and global step."""


class Journalled:
    """
    Checks the disk at each start of a syncer and at the end.

    Args:
        lines: of events.jsonl on the disk, each with its place; None: a disk that refused or damaged
            data may have cost lines, which the syncer survives.
    """

    observes = (dict, Resumed)

    def __init__(self, lines: Callable[[], Iterable[tuple[str, str]] | None]) -> None:
        self._lines = lines
        self._merges: list[Merge] = []
        """Of the history that led to the present state."""
        self._durable_step = 0

    def observe(self, event: dict[str, Any] | Resumed, now: float) -> None:
        """See `Checker`."""
        match event:
            case Resumed(step=step):
                self._merges = [merge for merge in self._merges if merge[1] <= step]
                self._durable_step = step
                self._check(now)
            case {"event": "merge", "epoch": epoch, "step": step}:
                self._merges.append((epoch, step))
            case {"event": "snapshot", "ok": True, "step": step}:
                self._durable_step = max(self._durable_step, step)

    def finish(self, now: float) -> None:
        """See `Checker`."""
        self._check(now)

    def _check(self, now: float) -> None:
        claimed = [merge for merge in self._merges if merge[1] <= self._durable_step]
        lines = self._lines() if claimed else None
        if lines is None:
            return
        objects = list(reader.objects(line for _, line in lines))
        if any(line.get("event") == "dropped" for line in objects):
            return  # the queue was full, which is counted
        found = {(line["epoch"], line["step"]) for line in objects if line.get("event") == "merge"}
        if objects and objects[0].get("event") == ROTATE and objects[0]["part"] > 1:
            oldest = min((step for _, step in found), default=self._durable_step + 1)
            claimed = [merge for merge in claimed if merge[1] >= oldest]
        lost = [merge for merge in claimed if merge not in found]
        if lost:
            epoch, step = lost[0]
            raise Violation(
                "journalled",
                f"the merge of step {step} in epoch {epoch} is not in events.jsonl, a durable snapshot of "
                f"step {self._durable_step} has it",
                step=step,
                now=now,
            )
