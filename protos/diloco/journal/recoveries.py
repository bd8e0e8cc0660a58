"""
With which state the optimizers of each process began, from events.jsonl alone. Pure.

    a process that states a recovery had joined, and so had the learner whose state it took, which is another one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from diloco.journal.records import Recovery
from diloco.runtime import formatting

MEANINGS = {
    "Checkpoint": "its own recent checkpoint",
    "Peer": "the optimizers' state of a peer",
    "OldCheckpoint": "the optimizers' state of its own old checkpoint",
    "None": "new optimizers' state",
}
"""Source → with what a process continues."""

MAX_KEPT = 1000
"""The newest ones are kept."""


@dataclass(slots=True)
class RecoveryBook:
    """All recoveries so far."""

    newest: dict[tuple[str, int], Recovery] = field(default_factory=dict)
    """The last MAX_KEPT, by learner and incarnation."""
    counts: Counter[str] = field(default_factory=Counter)
    """By source."""
    bytes: int = 0
    """That peers have sent."""

    def add(
        self, recovery: Recovery, joined: Collection[tuple[str, int]], *, complete: bool
    ) -> Iterator[str]:
        """
        Take a line; yields what is wrong with it.

        Args:
            recovery: the line.
            joined: learner and incarnation of all lines `join` before it.
            complete: no such line is missing.
        """
        process = recovery.learner, recovery.incarnation
        who = f"{recovery.learner} (incarnation {recovery.incarnation})"
        if complete and process not in joined:
            yield f"{who} began to train without having joined"
        if recovery.peer == recovery.learner:
            yield f"{who} took the optimizers' state of itself"
        elif recovery.peer and complete and all(name != recovery.peer for name, _ in joined):
            yield f"{who} took the optimizers' state of {recovery.peer}, which never joined"
        if process in self.newest:
            return  # a syncer that restarts writes it again
        self.newest[process] = recovery
        self.counts[recovery.source] += 1
        self.bytes += max(0, recovery.bytes)
        if len(self.newest) > MAX_KEPT:
            del self.newest[next(iter(self.newest))]

    def sentence(self) -> str:
        """All of them in one sentence; "": there were none."""
        if not self.counts:
            return ""
        total = sum(self.counts.values())
        parts = [
            f"{number} with {MEANINGS.get(source, source)}"
            for source, number in sorted(self.counts.items(), key=lambda item: -item[1])
        ]
        sent = f" Peers sent {formatting.size(self.bytes)}." if self.bytes else ""
        processes = "process" if total == 1 else "processes"
        return f"Recovery: {total} {processes} began after step 0: {', '.join(parts)}.{sent}"
