"""
The states that trainer and link exchange. Pure.

Every message is the complete state of its sender and replaces all earlier ones, so a lost, late or
skipped message costs nothing, and neither side ever waits to send.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """State of the link, and what the trainer must do before it can train."""

    CONNECTING = "connecting"
    """There is no session yet."""
    WAITING = "waiting"
    """Welcomed; a learner must upload Θ^(0) first."""
    DOWNLOADING = "downloading"
    APPLY_MODEL = "apply-model"
    """The whole model is in the inbox: apply it."""
    LOAD_CHECKPOINT = "load-checkpoint"
    """Load the local checkpoint."""
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Trainer → link, after every step and whenever a field below changes."""

    incarnation: int = 0
    """Given to the previous link by the syncer; 0 before the first Welcome."""
    epoch: int = 0
    """The newest epoch that the link reported."""
    starts: Sequence[str] = ()
    """`LinkState.starts` of the previous link."""
    checkpoint_local_step: int = 0
    checkpoint_step: int = 0
    """Global step of the local checkpoint; 0: none."""
    checkpoint_start: str = ""
    """The last start of the syncer that the versions of the local checkpoint are of; "": not stated."""
    model_loaded: bool = False
    """The model holds the job's parameters: Θ, or the local checkpoint."""
    stepped: bool = False
    """This process has made a step: the fields below are a report."""
    local_step: int = 0
    global_step: int = 0
    steps: Sequence[int] = ()
    """c_steps per fragment."""
    tokens: Sequence[int] = ()
    """c_tokens per fragment."""
    offers: Sequence[int] = ()
    """Fragments whose host copy was taken at `local_step`."""
    applied: Sequence[int] = ()
    """
    Per fragment, the newest inbox generation in the parameters; the link may overwrite that inbox.
    """
    versions: Sequence[Sequence[int] | None] = ()
    """Per fragment, (epoch, global step) of what the parameters received last; null: not known."""
    total_tokens: int = 0
    start_local_step: int = 0
    """`local_step` when this process began to train."""
    start_total_tokens: int = 0
    """`total_tokens` at that time."""
    loss: float | None = None
    step_seconds: float = 0.0
    sync_seconds: float = 0.0
    """Of the previous step."""
    saves: bool = False
    """Whether it writes local checkpoints."""
    recovery: dict[str, Any] = field(default_factory=dict)
    """With which state the optimizers began (core/recovery.py); empty: not yet, or at the beginning of the job."""
    total_sync_seconds: float = 0.0
    """Time that this process has taken from the training loop."""
    initial_copied: int = 0
    """The newest `LinkState.initial_requested` for which all host copies and constants are ready."""
    problem: str = ""
    """What is wrong with the work of this learner (core/step_checks.py); empty: nothing."""
    problem_text: str = ""
    """The same in one sentence."""
    blocks: dict[str, Any] = field(default_factory=dict)
    """`Blocks.to_json` (core/open_blocks.py); empty: the program takes none."""
    leaving: str = ""
    """Why this learner leaves now; empty: it stays."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return _line(self)

    @classmethod
    def from_line(cls, line: bytes) -> TrainerState:
        """The inverse of `to_line`."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """Link → trainer, whenever a field below changes."""

    phase: Phase = Phase.CONNECTING
    connected: bool = False
    epoch: int = 0
    incarnation: int = 0
    step: int = 0
    """Global step t."""
    steps: int = 0
    """T."""
    local_step: int = 0
    """Where this learner's data continues, from Welcome."""
    total_tokens: int = 0
    """Total tokens of this learner on record at the syncer, from Welcome."""
    run: str = ""
    """Name of the run, from Welcome; "": not stated."""
    starts: Sequence[str] = ()
    """
    The syncer's starts that the versions of the inboxes, and of what was received before, are of, newest last; empty:
    not known.
    """
    open: Sequence[int] = ()
    """Fragments to keep host copies of, soonest first."""
    ready: Sequence[Sequence[int]] = ()
    """(fragment, generation) that are in the inbox and not applied yet."""
    versions: Sequence[Sequence[int] | None] = ()
    """Per fragment, (epoch, global step) of what is in the inbox; null: nothing."""
    leases: Sequence[int] | None = None
    """Serials of all blocks that are open at this learner; None: this link was sent none."""
    leases_blocks: bool = True
    """Whether the syncer leases blocks, as far as it is known."""
    initial_requested: int = 0
    """Counts the requests for the initial model; 0: none."""
    peer_pending: bool = False
    """A peer is being asked for the state of its optimizers: wait for it before training."""
    peer: str = ""
    """The learner whose state has arrived; empty: none."""
    peer_local_step: int = 0
    peer_step: int = 0
    """What that state is of: local and global step."""
    peer_bytes: int = 0
    """What its peer has sent."""
    peer_seconds: float = 0.0
    """From the first request to a peer until the last answer; 0: none was asked."""
    peer_problem: str = ""
    """Why none has arrived, in one sentence; empty: none is needed, or it has."""
    checkpoint_wanted: int = 0
    """A peer waits for a local checkpoint of this global step or a later one; 0: none does."""
    complete: bool = False
    refused_exit: int = 0
    """Exit code if the syncer refuses this process; else 0."""
    text: str = ""
    """One sentence for users: what the link waits for, or why it was refused."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return _line(self)

    @classmethod
    def from_line(cls, line: bytes) -> LinkState:
        """The inverse of `to_line`."""
        data = json.loads(line)
        data["phase"] = Phase(data["phase"])
        return cls(**data)


def _line(state: Any) -> bytes:
    # dataclasses.asdict copies deeply, which would be most of the cost of a step.
    data = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
