"""
What syncer and links hold is bounded, whatever happens: attempts, queues, transfers, memory, lines per
second, and the journal on the disk.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Moment
from diloco_syncer.sessions import MAX_QUEUED

WINDOW_SECONDS = 10.0
DOWNLOADS = 4
"""Of one fragment by one learner, per merge that the schedule allows it and per second: retries and sessions."""
LINES_PER_LEARNER = 40
"""Lines of events.jsonl within the window for each learner: joins, leaves, refusals."""
LINES_PER_MERGE = 4
"""A merge has one; its attempts may have been refused and repeated."""


MOST_MESSAGES = MAX_QUEUED + 100
"""Of a session: what it queues before the syncer ends it, and what its connection has taken."""

LINE_BYTES = 64
"""Of a line of events.jsonl, besides what the syncer records: its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """
    What the bounds follow from.

    Args:
        learners: of the job.
        fragments: of its model.
        overlap: τ.
        merges_per_second: of the schedule at full speed.
        link_bytes: of the buffers of a link.
        vector_bytes: of the vectors that the syncer holds.
        journal_bytes: from which on old parts are deleted, and the newest one becomes a part.
        kept_snapshots: each needs the lines after it.
    """

    learners: int
    fragments: int
    overlap: int
    merges_per_second: float
    link_bytes: int
    vector_bytes: int
    journal_bytes: int
    kept_snapshots: int


class Bounds:
    """See the module."""

    observes = (dict, Moment)

    def __init__(self, most: Most) -> None:
        self._most = most
        self._most_attempts = 2 * (most.overlap + 1) + most.learners
        self._most_streams = most.learners * (4 * most.overlap + 8)
        merges = WINDOW_SECONDS * most.merges_per_second
        self._most_lines = int(
            LINES_PER_LEARNER * (most.learners + 1) + LINES_PER_MERGE * merges * (1 + most.learners)
        )
        self._downloads_per_second = DOWNLOADS * (1 + most.merges_per_second / most.fragments)
        self._begun: dict[str, Mapping[int, int]] = {}
        self._judged_at = 0.0
        self._lines: deque[float] = deque()
        self._written = 0
        """Bytes of all lines so far."""
        # The oldest snapshot that is kept, the one after which its part began, and the one before that: parts
        # are deleted at a rotation, and a disk that hung makes a part of all that was written meanwhile.
        self._snapshots = deque([0], maxlen=most.kept_snapshots + 3)
        """Bytes of all lines before each of the last snapshots."""

    def observe(self, event: dict[str, Any] | Moment, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, Moment):
            for name, count, most in (
                ("attempts are open", event.attempts, self._most_attempts),
                ("transfers wait", event.streams, self._most_streams),
                ("events and lines wait", event.queues, 2000),
                ("messages wait for a session", event.outbox, MOST_MESSAGES),
                ("bytes are held by a link", event.link_bytes, self._most.link_bytes),
                (
                    "bytes of vectors are held by the syncer",
                    event.vector_bytes,
                    self._most.vector_bytes,
                ),
                ("bytes are in the journal", event.journal_bytes, self._most_journal_bytes),
            ):
                if count > most:
                    self._fail(f"{count} {name}, expected at most {most}", event.step, now)
            self._judge_downloads(event, now)
            return
        self._written += len(json.dumps(event, default=str)) + LINE_BYTES
        if event["event"] == "snapshot" and event["ok"]:
            self._snapshots.append(self._written)
        self._lines.append(now)
        while self._lines[0] < now - WINDOW_SECONDS:
            self._lines.popleft()
        if len(self._lines) > self._most_lines:
            self._fail(
                f"{len(self._lines)} lines within {WINDOW_SECONDS:g} s, expected at most {self._most_lines}",
                event.get("step", 0),
                now,
            )

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _judge_downloads(self, moment: Moment, now: float) -> None:
        most = int(self._downloads_per_second * max(1.0, now - self._judged_at))
        for name, learner in moment.learners.items():
            before = self._begun.get(name, {})
            for fragment, begun in learner.begun.items():
                count = begun - before.get(fragment, 0)
                if count > most:
                    self._fail(
                        f"{name} has begun {count} downloads of fragment {fragment} within "
                        f"{now - self._judged_at:g} s, expected at most {most}",
                        moment.step,
                        now,
                    )
            self._begun[name] = learner.begun
        self._judged_at = now

    @property
    def _most_journal_bytes(self) -> int:
        return self._most.journal_bytes + self._written - self._snapshots[0]

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("bounds", sentence, step=step, now=now)
