"""`diloco audit` passes on what is left of events.jsonl when the run is over, all epochs together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diloco.journal.audit import audit_parts
from diloco_sim.checkers.checker import Violation

NO_START = "comes before any start"


class Audited:
    """
    Stricter than `Reports`: a merge that a restart undid still counts if its line was written.

    Args:
        lines: of events.jsonl on the disk, each with its place; None: they cannot be trusted.
        refused: whether the disk may have refused a line. If it was the first one, the schedule is not
            known, and the audit reports that it cannot check it.
    """

    observes: tuple[type, ...] = ()

    def __init__(
        self, lines: Callable[[], Iterable[tuple[str, str]] | None],
        refused: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._lines, self._refused = lines, refused

    def observe(self, event: object, now: float) -> None:
        """See `Checker`."""

    def finish(self, now: float) -> None:
        """See `Checker`."""
        lines = self._lines()
        found = audit_parts(lines).violations if lines is not None else ()
        if self._refused():
            found = tuple(text for text in found if NO_START not in text)
        if found:
            raise Violation("audited", found[0], step=0, now=now)
