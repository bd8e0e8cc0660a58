"""Ways to break the ledger of data blocks, on both ends, as breaks.py has them for the rest."""

from __future__ import annotations

import pytest

from diloco_syncer.core.blocks import BlockLedger, FreeSerials, Holder
from diloco_testing.sim.breaks import finds
from diloco_worker.core.open_blocks import Blocks

Patch = pytest.MonkeyPatch


@finds("blocks", "while it is open at")
def blocks_leased_twice(patch: Patch) -> None:
    """What is leased below the end of the free serials stays free."""
    remove = FreeSerials.remove

    def keep_gaps(self: FreeSerials, serial: int) -> None:
        if serial >= self.rest:
            remove(self, serial)

    patch.setattr(FreeSerials, "remove", keep_gaps)


@finds("blocks", "is leased a pass before|while it is open at")
def passes_that_overlap(patch: Patch) -> None:
    """The next pass begins while blocks of the last one are open."""
    patch.setattr(BlockLedger, "_allowed", lambda self, serial: self.dataset is not None)


@finds("blocks", "free and .* open below|is not what the lines before it explain")
def blocks_lost(patch: Patch) -> None:
    """What a learner loses is never leased again."""
    patch.setattr(FreeSerials, "add", lambda self, serial: None)


@finds("durable", "other blocks of data")
def blocks_forgotten(patch: Patch) -> None:
    """A restart begins with the first block."""
    patch.setattr(BlockLedger, "from_json", classmethod(lambda cls, data: cls()))


@finds("blocks", "its loop began it")
def blocks_counted_too_early(patch: Patch) -> None:
    """A block counts as trained on with the first step with it."""

    def at_once(self: Blocks, local_step: int) -> None:
        self._in_use = False
        count(self, local_step)

    count = Blocks._count
    patch.setattr(Blocks, "stepped", at_once)


@finds("blocks", "has waited for a block")
def one_learner_without_blocks(patch: Patch) -> None:
    """Blocks are leased to all learners but one."""
    want = BlockLedger._want

    def leave_out(self: BlockLedger, learner: str, holder: Holder) -> None:
        if learner != "us/0":
            want(self, learner, holder)

    patch.setattr(BlockLedger, "_want", leave_out)
