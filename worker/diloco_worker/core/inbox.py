"""
Who may access a fragment's inbox, and what is written to it next. Pure.

The inbox of a fragment holds the version that the trainer has, or is about to apply: it is the base
of deltas. Per fragment:

    FREE --a download completes: place it--> PUBLISHED --the trainer applied it--> FREE

The link writes an inbox only while it is FREE; the trainer reads it only while it is PUBLISHED.
Meanwhile the newest completed download is held outside of the inbox; older ones are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Version = tuple[int, int]
"""(epoch, global step)."""


def version_of(pair: Sequence[int] | None) -> Version | None:
    """A version as JSON has it."""
    return None if pair is None else (int(pair[0]), int(pair[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A complete download that is not in the inbox yet; `ticket` identifies its buffer."""

    fragment: int
    version: Version
    ticket: int


@dataclass(slots=True)
class Slot:
    """The inbox of one fragment."""

    fragment: int
    published: int = 0
    """Generation in the inbox; 0: nothing was ever placed."""
    applied: int = 0
    """Generation that the trainer has applied."""
    version: Version | None = None
    """Newest version placed or held, or loaded from a checkpoint; older ones are discarded."""
    inbox: Version | None = field(init=False)
    """Version in the inbox, or about to be; None: nothing, or what no version of the syncer describes."""
    held: Staged | None = None
    of_history: bool = False
    """Whether the trainer's values, and those in the inbox, are of the syncer's history, as `Updates.starts` has it."""

    def __post_init__(self) -> None:
        self.inbox = self.version

    @property
    def free(self) -> bool:
        """Whether the link may write."""
        return self.applied == self.published

    def arrived(self, staged: Staged) -> tuple[Staged | None, Staged | None]:
        """
        Add a complete, committed download.

        Returns:
            (what to place now, what to discard).
        """
        if self.version is not None and staged.version <= self.version:
            return None, staged
        self.version = staged.version
        if self.free:
            return staged, None
        previous, self.held = self.held, staged
        return None, previous

    def forget(self) -> Staged | None:
        """What was received is of no history that the syncer knows; returns what to discard."""
        self.version, self.inbox, self.of_history = None, None, False
        staged, self.held = self.held, None
        return staged

    def placed(self) -> int:
        """The inbox was written: return its new generation, which the trainer may now read."""
        self.published += 1
        self.of_history = True
        return self.published

    def confirmed(self, applied: int) -> Staged | None:
        """The trainer reports the generation it has applied; return what may be placed now."""
        self.applied = max(self.applied, min(applied, self.published))
        if not self.free or self.held is None:
            return None
        staged, self.held = self.held, None
        return staged
