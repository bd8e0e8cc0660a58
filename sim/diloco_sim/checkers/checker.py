"""The interface of a checker, and the set of checkers of a world."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol


class Violation(Exception):  # noqa: N818  # the run is at fault, not the program
    """A promise was broken."""

    def __init__(self, checker: str, sentence: str, *, step: int, now: float) -> None:
        super().__init__(f"{checker}: {sentence} (global step {step}, {now:.3f} s)")
        self.checker, self.sentence, self.step, self.now = checker, sentence, step, now

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle`: a world may run in another process."""
        return partial(type(self), step=self.step, now=self.now), (self.checker, self.sentence)


class Checker(Protocol):
    """Judges what happens, as it happens."""

    @property
    def observes(self) -> tuple[type, ...]:
        """Types of the events that it needs; `dict` are lines of events.jsonl."""

    def observe(self, event: Any, now: float) -> None:
        """
        An event happened.

        Raises:
            Violation: it should not have.
        """

    def finish(self, now: float) -> None:
        """
        The run is over.

        Raises:
            Violation: something should have happened.
        """


class Checkers:
    """Passes each event to the checkers that need it."""

    def __init__(self, checkers: Iterable[Checker]) -> None:
        self._all = tuple(checkers)
        self._by_type: dict[type, tuple[Checker, ...]] = {}
        for checker in self._all:
            for kind in checker.observes:
                self._by_type[kind] = (*self._by_type.get(kind, ()), checker)

    def observe(self, event: object, now: float) -> None:
        """
        An event happened.

        Raises:
            Violation: of the first checker that finds it.
        """
        for checker in self._by_type.get(type(event), ()):
            checker.observe(event, now)

    def finish(self, now: float) -> None:
        """
        The run is over.

        Raises:
            Violation: of the first checker that finds it.
        """
        for checker in self._all:
            checker.finish(now)
