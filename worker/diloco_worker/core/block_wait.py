"""
What a learner does until it has a block of data: it states what it wants, waits, and ends after a limit. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.errors import EXIT_REFUSED, EXIT_TRY_AGAIN
from diloco_worker.core.open_blocks import Blocks, Data
from diloco_worker.core.trainer import (
    PROGRESS_SECONDS,
    Action,
    AwaitLink,
    Exit,
    Send,
    ShowProgress,
    TrainerCore,
)


class BlockWait:
    """
    Takes blocks for one training process.

    Args:
        core: of the process.
        name: of the learner, for messages.
        timeout_seconds: how long to wait for a block.
    """

    def __init__(self, core: TrainerCore, *, name: str, timeout_seconds: float) -> None:
        self._core, self._name, self._timeout_seconds = core, name, timeout_seconds
        self._since: float | None = None
        """Since when the loop waits; None: it does not."""
        self._progress_at: float

    def take(self, data: Data) -> int | None:
        """
        The loop has all items of the block in use: the serial of the next one, None if there is none yet.

        Raises:
            ValueError: the program takes blocks of something else already.
        """
        core = self._core
        if core.blocks is None:
            core.blocks = Blocks(data=data)
            core.blocks.leased(core.link_state.leases or ())
        elif core.blocks.data != data:
            raise ValueError(f"blocks of {data}, expected those of {core.blocks.data} as before")
        self._since = None
        return self.retry()

    def retry(self) -> int | None:
        """The serial of the next block; None: there is none yet, or this learner has left."""
        core = self._core
        if core.blocks is None or core.closed:
            return None
        return core.blocks.take(core.ledger.local_step)

    def wait(self, *, now: float) -> Sequence[Action]:
        """There is none yet."""
        core = self._core
        if core.closed:
            return []
        state = core.link_state
        if state.connected and not state.leases_blocks:
            text = "the syncer is older than this learner, and leases no blocks; use the same version for both"
            return [*core.close("interrupted"), Exit(EXIT_REFUSED, f"{self._name}: {text}")]
        if self._since is None:
            self._since, self._progress_at = now, now + PROGRESS_SECONDS
            return [Send(core.state(offers=core.offers))]
        waited = now - self._since
        why = state.text or "all blocks are at other learners"
        text = f"{self._name}: waiting for a block of data: {why}"
        if waited >= self._timeout_seconds:
            end = Exit(EXIT_TRY_AGAIN, f"{text}; none within {waited:.0f} s; trying again may help")
            return [*core.close("interrupted"), end]
        if now < self._progress_at:
            return [AwaitLink()]
        self._progress_at = now + PROGRESS_SECONDS
        if core.blocks is not None:
            core.blocks.asked += (
                1  # what was leased may have been taken back while this process was stopped
            )
        shown = ShowProgress(f"{text} ({waited:.0f} s)")
        return [shown, Send(core.state(offers=core.offers)), AwaitLink()]
