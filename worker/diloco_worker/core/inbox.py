"""
Who may touch a fragment's inbox, and what goes into it next. Pure.

The inbox of a fragment holds the version the trainer has, or is about to take: it is the base of
deltas. Per fragment:

    FREE --a download arrives: place it--> PUBLISHED --the trainer applied it--> FREE

The link writes an inbox only while it is FREE; the trainer reads it only while it is PUBLISHED.
What arrives meanwhile is held back outside of the inbox, and only the newest of it.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]
"""(epoch, global step)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A complete download that is not in the inbox yet; `ticket` names its buffer."""

    fragment: int
    version: Version
    ticket: int


@dataclass(slots=True)
class Slot:
    """One fragment's inbox."""

    fragment: int
    published: int = 0
    """Generation that lies in the inbox; 0: nothing was ever placed."""
    applied: int = 0
    """Generation that the trainer has applied."""
    version: Version | None = None
    """Newest version placed or held; an older one is never taken after it."""
    held: Staged | None = None

    @property
    def free(self) -> bool:
        """The link may write."""
        return self.applied == self.published

    def arrived(self, staged: Staged) -> tuple[Staged | None, Staged | None]:
        """
        A download is complete and committed.

        Returns:
            (what to place now, what to throw away).
        """
        if self.version is not None and staged.version <= self.version:
            return None, staged
        self.version = staged.version
        if self.free:
            return staged, None
        old, self.held = self.held, staged
        return None, old

    def placed(self) -> int:
        """The inbox was written: its new generation, which the trainer may now read."""
        self.published += 1
        return self.published

    def confirmed(self, applied: int) -> Staged | None:
        """The trainer says what it has applied; returns what may be placed now."""
        self.applied = max(self.applied, min(applied, self.published))
        if not self.free or self.held is None:
            return None
        staged, self.held = self.held, None
        return staged
