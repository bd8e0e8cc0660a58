"""What checkers observe besides lines and decisions. Plain values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core.events import Commit
from diloco_syncer.storage.parameters import FragmentParameters, Parameters


@dataclass(frozen=True, slots=True)
class Resumed:
    """A syncer has started."""

    epoch: int
    step: int
    parameters: Parameters | None
    """None: there was no snapshot."""
    spec: RunSpec
    engine: Mapping[str, Any]
    """`Engine.to_json()`."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A snapshot of this state is to be written."""

    epoch: int
    step: int
    fragments: list[FragmentParameters]
    engine: Mapping[str, Any]
    """`Engine.to_json()`."""


@dataclass(frozen=True, slots=True)
class Received:
    """An upload has begun to arrive."""

    header: bulk.UploadHeader
    chunks: dict[int, bytes]
    """Payloads, as encoded; filled as they arrive."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A learner has encoded a delta, or a whole fragment."""

    header: bulk.UploadHeader
    """Of the upload, before a learner that lies changes it."""
    base: tuple[int, int]
    """The version that it is against, or that the parameters of a local checkpoint began from; (0, 0): not known."""
    base_N: npt.NDArray[np.float32]
    """What the learner has of that version; valid while it is observed."""


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """A Report has arrived in a session, before the syncer judges it."""

    learner: str
    incarnation: int
    report: pb.Report


@dataclass(frozen=True, slots=True)
class Committed:
    """A fragment after its commit."""

    commit: Commit
    fragment: FragmentParameters


@dataclass(frozen=True, slots=True)
class Refused:
    """A learner ended because the syncer refused it for good."""

    learner: str
    text: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """A session was opened for a Hello that must be refused."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BlockTaken:
    """The loop of a learner begins a block of data."""

    learner: str
    serial: int
    local_step: int
    """t_m before the first step with it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A learner begins a local checkpoint."""

    learner: str
    local_step: int
    global_step: int
    moments: bytes
    """The state of its optimizers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The link of a learner asks another one for the state of its optimizers."""

    learner: str
    peer: str
    number: int
    """Of the requests of this link process, from 1."""
    step: int
    """The state must be of this global step or a later one."""


@dataclass(frozen=True, slots=True)
class Began:
    """A process of a learner begins to train."""

    learner: str
    incarnation: int
    step: int
    """Global step."""
    moments: bytes
    """The state of its optimizers."""


@dataclass(frozen=True, slots=True)
class Flipped:
    """A bit of a file of the syncer has flipped at rest."""

    path: str


@dataclass(frozen=True, slots=True)
class Copied:
    """The files of the syncer were copied."""

    copy: Hashable


@dataclass(frozen=True, slots=True)
class Restored:
    """The syncer's machine has ended, and its files are those of that copy."""

    copy: Hashable


@dataclass(frozen=True, slots=True)
class LearnerMoment:
    """One learner at a moment."""

    connected: bool
    """In a session, with a loaded model."""
    done: bool
    """It has left because the job is complete."""
    versions: tuple[tuple[int, int] | None, ...]
    """Of each fragment in its inbox."""
    begun: Mapping[int, int] = field(default_factory=dict)
    """Fragment, or P for the constants → downloads that were begun so far."""
    waits_since: float | None = None
    """Since when its loop waits for a block of data; None: it does not."""
    local_step: int | None = None
    """None: it does not train."""
    asks: bool = False
    """It waits for the state of a peer."""
    serves: bool = False
    """It answers one that asks for its state."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The world at a moment, every few virtual seconds."""

    quiet: bool
    """All faults are over."""
    healthy_since: float | None
    """Since when a quorum of learners and the syncer have had no fault; None: one of them has one."""
    step: int
    learners: dict[str, LearnerMoment]
    attempts: int
    """Attempts that the syncer knows."""
    queues: int
    """Events and lines that wait in the syncer."""
    streams: int
    """Transfers that wait in the syncer."""
    state: str = ""
    """Of the job, as the syncer shows it; empty: the syncer is down."""
    waiting_for: str = ""
    """Likewise."""
    outbox: int = 0
    """Messages that wait for the slowest session."""
    link_bytes: int = 0
    """The most that the link of a learner holds in buffers of transfers."""
    vector_bytes: int = 0
    """Of the vectors that merges have made and the syncer holds."""
    journal_bytes: int = 0
    """Of all parts of events.jsonl on the disk."""
