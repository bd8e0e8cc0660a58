"""
What trainer and link tell each other. Pure.

Every message is the whole truth of its sender, so one that is lost, late or merged with the next
costs nothing: the newest wins. That is what lets both sides send without ever waiting.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where the link stands; says what the trainer must do before it may train."""

    CONNECTING = "connecting"
    """No syncer yet."""
    WAITING = "waiting"
    """Welcomed; somebody must upload Θ^(0) first."""
    DOWNLOADING = "downloading"
    PLACED = "placed"
    """The whole model lies in the inbox: apply it."""
    LOAD = "load"
    """Take your own checkpoint."""
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Trainer → link, after every step and whenever something below changed."""

    incarnation: int = 0
    """What the last link was given; 0 before the first Welcome."""
    epoch: int = 0
    """The newest epoch it was told of."""
    checkpoint_local_step: int = 0
    checkpoint_step: int = 0
    """Global step of the local checkpoint; 0: none."""
    in_place: bool = False
    """The model holds what the job says: Θ, or the local checkpoint."""
    stepped: bool = False
    """At least one step was made since: the facts below are a report."""
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
    Per fragment, the newest inbox generation that is in the parameters; the link may overwrite it
    now.
    """
    total_tokens: int = 0
    began_local_step: int = 0
    """`local_step` when this process began to train."""
    began_total_tokens: int = 0
    """`total_tokens` then."""
    loss: float | None = None
    step_seconds: float = 0.0
    sync_seconds: float = 0.0
    """Of the step before."""
    total_sync_seconds: float = 0.0
    """Taken from the training loop by this process so far."""
    initial: int = 0
    """
    Answer to `LinkState.initialise`: all host copies and the constants are ready for that request.
    """
    leaving: str = ""
    """Why this learner leaves now; empty: it stays."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return _line(self)

    @classmethod
    def from_line(cls, line: bytes) -> TrainerState:
        """What `to_line` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """Link → trainer, whenever something below changed."""

    phase: Phase = Phase.CONNECTING
    connected: bool = False
    epoch: int = 0
    incarnation: int = 0
    step: int = 0
    """Global step t."""
    steps: int = 0
    """T."""
    local_step: int = 0
    """Where this learner's data continues, as the Welcome said."""
    total_tokens: int = 0
    """What the syncer had on record at the Welcome."""
    open: Sequence[int] = ()
    """Fragments of which host copies are wanted, soonest first."""
    ready: Sequence[Sequence[int]] = ()
    """(fragment, generation) that lie in the inbox and are not applied yet."""
    initialise: int = 0
    """Grows with every request for the initial model; 0: never asked."""
    complete: bool = False
    refused_exit: int = 0
    """Exit code when the syncer does not want this process; 0: it does."""
    text: str = ""
    """One sentence for people: what is waited for, or why it was refused."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return _line(self)

    @classmethod
    def from_line(cls, line: bytes) -> LinkState:
        """What `to_line` wrote."""
        data = json.loads(line)
        data["phase"] = Phase(data["phase"])
        return cls(**data)


def _line(state: Any) -> bytes:
    # dataclasses.asdict copies deeply, which would be most of the cost of a step.
    data = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
