"""
With which state the optimizers of a process began, for the syncer, which writes it to events.jsonl. Pure.

See docs/adr/0033-moments-from-a-peer.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diloco_worker.core.messages import LinkState

Source = Literal["Checkpoint", "Peer", "OldCheckpoint", "None"]
"""
Checkpoint: its own recent checkpoint, with the parameters; Peer: another learner; OldCheckpoint: its own, of whatever
age; None: new state. The last three with the parameters of the syncer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """What the newest local checkpoint is of."""

    local_step: int
    global_step: int
    run: str = ""
    """Name of the run; "": not known."""
    start: str = ""
    """The last start of the syncer that its versions are of; "": not stated."""


def began(source: Source, link_state: LinkState, *, step: int = 0, why: str = "") -> dict[str, Any]:
    """
    The fields of a Recovery (syncer.proto).

    Args:
        source: where the state of the optimizers comes from.
        link_state: when the process begins to train.
        step: global step of that state; 0: there is none.
        why: no peer's, or none at all.

    Returns:
        Nothing for a process that begins with the job, which has no state to lose.
    """
    if link_state.step <= 0:
        return {}
    of_peer = source == "Peer"
    return {
        "source": source,
        "peer": link_state.peer if of_peer else "",
        "step": step,
        "age": max(0, link_state.step - step) if step else 0,
        "bytes": link_state.peer_bytes if of_peer else 0,
        "seconds": link_state.peer_seconds,
        "problem": why,
    }
