"""
The blocks of data that this learner has, from the syncer's leases to what was trained on. Pure.

A block is begun when the loop takes it. It is trained on once the loop takes the next one and has made a step
since it began; otherwise, so if one batch has items of several blocks, with the next step. What is trained
on is stated until the syncer's leases no longer have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_STATED = 32
"""As the syncer bounds them: what was begun and went to another learner comes on top of the leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the program takes blocks of."""

    items: int
    size: int
    """Items of a block; the last one may have fewer."""
    ahead: int
    """Blocks to have besides the one in use."""


@dataclass(slots=True, kw_only=True)
class Blocks:
    """The blocks of one process."""

    data: Data
    asked: int = 0
    """How often the loop waited; it makes the link repeat what it stated already."""
    _waiting: list[int] = field(default_factory=list)
    _begun: list[tuple[int, int]] = field(default_factory=list)
    """Serial of each block that is begun and not trained on, and t_m at that time; the newest is in use."""
    _in_use: bool = False
    _trained: list[tuple[int, int, int]] = field(default_factory=list)

    def leased(self, serials: Sequence[int]) -> None:
        """All blocks that are open here, as the syncer has it."""
        mine = set(serials)
        self._trained = [block for block in self._trained if block[0] in mine]
        known = {serial for serial, _ in self._begun} | {block[0] for block in self._trained}
        self._waiting = [serial for serial in serials if serial not in known]

    def take(self, local_step: int) -> int | None:
        """The loop has all items of the block in use, and takes the next one; None: there is none yet."""
        self.ended(local_step)
        if not self._waiting:
            return None
        serial = self._waiting.pop(0)
        self._begun.append((serial, local_step))
        self._in_use = True
        return serial

    def ended(self, local_step: int) -> None:
        """The loop has all items of the block in use."""
        self._in_use = False
        self._count(local_step)

    def stepped(self, local_step: int) -> None:
        """The loop made a step, now `local_step`."""
        self._count(local_step)

    def _count(self, local_step: int) -> None:
        ended = self._begun[:-1] if self._in_use else self._begun
        done = [(serial, begin, local_step) for serial, begin in ended if begin < local_step]
        self._trained += done
        gone = {block[0] for block in done}
        self._begun = [each for each in self._begun if each[0] not in gone]

    def to_json(self) -> dict[str, Any]:
        """For the link."""
        return {
            "items": self.data.items,
            "size": self.data.size,
            "wanted": self.data.ahead + 1,
            "open": [*(serial for serial, _ in self._begun), *self._waiting][:MAX_STATED],
            "trained": [[*block] for block in self._trained[:MAX_STATED]],
            "asked": self.asked,
        }
