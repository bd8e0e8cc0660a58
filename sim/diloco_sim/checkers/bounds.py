"""What the syncer holds is bounded, whatever happens: attempts, queues, transfers, lines per second."""

from __future__ import annotations

from collections import deque
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Moment

WINDOW_SECONDS = 10.0
LINES_PER_LEARNER = 40
"""Lines of events.jsonl within the window for each learner: joins, leaves, refusals."""
LINES_PER_MERGE = 4
"""A merge has one; its attempts may have been refused and repeated."""


class Bounds:
    """
    Args:
        learners: of the job.
        overlap: τ.
        merges_per_second: of the schedule at full speed.
        most_link_bytes: of the buffers of a link.
    """

    observes = (dict, Moment)

    def __init__(
        self, learners: int, overlap: int, merges_per_second: float, most_link_bytes: int
    ) -> None:
        self._most_link_bytes = most_link_bytes
        self._most_attempts = 2 * (overlap + 1) + learners
        self._most_streams = learners * (4 * overlap + 8)
        merges = WINDOW_SECONDS * merges_per_second
        self._most_lines = int(
            LINES_PER_LEARNER * (learners + 1) + LINES_PER_MERGE * merges * (1 + learners)
        )
        self._lines: deque[float] = deque()

    def observe(self, event: dict[str, Any] | Moment, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, Moment):
            for name, count, most in (
                ("attempts are open", event.attempts, self._most_attempts),
                ("transfers wait", event.streams, self._most_streams),
                ("events and lines wait", event.queues, 2000),
                ("messages wait for a session", event.outbox, 200),
                ("bytes are held by a link", event.link_bytes, self._most_link_bytes),
            ):
                if count > most:
                    self._fail(f"{count} {name}, expected at most {most}", event.step, now)
            return
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

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("bounds", sentence, step=step, now=now)
