"""
Facts that the engine receives (events) and actions that it requests (decisions). Plain values, nothing else.

A learner is named "<region>/<index>"; each start of its process is an incarnation. A round is named by its global
step; an attempt counts how often that round has been pulled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_syncer.core.contribution import Contribution

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A learner opened a session and was admitted (core/admission.py)."""

    session: int
    learner: str
    region: str
    incarnation: int
    """What the process had before its stream broke, or a number never used before."""
    fresh: bool
    """The process has just started: this is a new incarnation."""
    local_step: int
    checkpoint_step: int
    restarts: int = 0
    """Restarts of its process, as its supervisor counts them."""
    peer: str = ""
    """Its address, as gRPC names it."""
    certificate: str = ""
    """Serial number of its certificate, hexadecimal; "": no TLS."""
    peer_address: str = ""
    """host:port on which it answers other learners; "": it does not."""
    cluster: str = ""
    """The network that this address is of: learners of another one cannot reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A session ended, on purpose or not."""

    session: int
    learner: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Metadata of a learner after one of its steps (paper Algorithm 1, step 2)."""

    session: int
    learner: str
    local_step: int
    steps: tuple[int, ...]
    """c_steps per fragment."""
    tokens: tuple[int, ...]
    """c_tokens per fragment."""
    offers: frozenset[int]
    """Fragments it can be pulled for as of local_step."""
    total_tokens: int
    global_step: int
    step_seconds: float
    sync_seconds: float
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """With which state the optimizers of a process began; not at the beginning of the job."""

    session: int
    learner: str
    source: str
    """One of SOURCES."""
    peer: str = ""
    """The learner whose state it is."""
    state_step: int = 0
    """Global step of that state."""
    age: int = 0
    """Global steps between that and the start."""
    bytes: int = 0
    """That came from the peer."""
    seconds: float = 0.0
    """From the first request to a peer until the last answer."""
    problem: str = ""
    """Why no peer's, in one sentence."""


SOURCES = ("Checkpoint", "Peer", "OldCheckpoint", "None")
"""Its own recent checkpoint, another learner, its own checkpoint of whatever age, new state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBlock:
    """A block whose items a learner stepped on."""

    serial: int
    begin: int
    """t_m before the first of these steps."""
    end: int
    """t_m after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStated:
    """A learner takes blocks of data (core/blocks.py); complete, it replaces what the learner stated before."""

    session: int
    learner: str
    items: int
    """Of the dataset."""
    size: int
    """Items of a block."""
    wanted: int
    """How many it wants open."""
    open: tuple[int, ...]
    """Serials that it has and has not trained on completely."""
    trained: tuple[TrainedBlock, ...]
    """Those that it was sent after it had stated them are left out."""

    @property
    def local_step(self) -> int:
        """The largest t_m that it states."""
        return max((block.end for block in self.trained), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A learner is alive and has nothing to report."""

    session: int
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialised:
    """Θ^(0) was uploaded completely by this learner."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialFailed:
    """The upload of Θ^(0) ended without a usable model."""

    learner: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a learner's upload has come; posted a few times a second while it runs."""

    learner: str
    round: int
    """0: of Θ^(0)."""
    attempt: int
    received_bytes: int
    """Payload received in this attempt so far."""
    awaited_seconds: float = 0.0
    """For how long the syncer has waited for messages of the upload since its header."""
    expected_seconds: float = 0.0
    """How long that would be for all of them, at the rate until the upload was first held back; 0: it was not."""
    waiting: bool = False
    """It cannot continue before slower members do: the window of the merge is full."""
    done: bool = False
    """Everything has arrived."""


STREAM_BROKEN = "StreamBroken"
"""Reason of a `Dropped`: the connection broke, and nothing that the member sent is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A member cannot deliver for this attempt: damaged, not finite, stalled, refused, broken."""

    learner: str
    round: int
    attempt: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedNorm:
    """The norm of what arrived of one member, beside what its header stated."""

    learner: str
    norm: float
    """‖v‖ of the whole fragment."""
    deviation: float
    """Largest difference of a tensor's norm from the stated one, relative to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Every chunk of every member is merged and verified; nothing is visible yet."""

    round: int
    attempt: int
    delta_norm: float
    bytes_up: int
    bytes_result: int
    """Encoded size of the result, for one learner."""
    confirmed: tuple[ConfirmedNorm, ...] = ()
    """Of the members of positive weight, in the order of their names."""
    sizes: tuple[float, float] = (0.0, 0.0)
    """Root of the mean square of the fragment of Θ, before and after."""
    digests: bytes = b""
    """Of Θ and momentum of the fragment, for the tape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDone:
    """A snapshot attempt ended."""

    step: int | None
    """Global step that is durable now; None: the attempt failed."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The model of a job at step T is written."""

    step: int
    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed:
    """The model could not be written."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A decision could not be carried out."""

    decision: Decision
    reason: str
    learner: str = ""
    """The member without which it can be; empty: not even without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged:
    """The spec document has other numbers of learners (core/learner_limits.py)."""

    learners: Mapping[str, int]
    """Region → number of its learners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    Hello
    | Left
    | Reported
    | BlocksStated
    | Recovered
    | Heartbeat
    | Initialised
    | InitialFailed
    | Contribution
    | Progress
    | Dropped
    | Merged
    | SnapshotDone
    | Exported
    | ExportFailed
    | Failed
    | LimitsChanged
    | Tick
)

# ---------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A learner that answers others."""

    learner: str
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Welcome this session."""

    session: int
    learner: str
    incarnation: int
    local_step: int
    use_checkpoint: bool
    total_tokens: int
    peers: tuple[PeerAddress, ...] = ()
    """To ask for the state of their optimizers, best first."""
    step: int | None = None
    """Global step that the state of a peer must be of, or a later one; None: the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End this session with a reason of the error tree."""

    session: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInitial:
    """Request Θ^(0) from this learner."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceReady:
    """Notify this learner that Θ exists, with the current versions."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceComplete:
    """Notify this learner that the job is complete."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceFragments:
    """Send these learners the global step and the fragments that may be pulled next, soonest first."""

    learners: tuple[str, ...]
    step: int
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBlocks:
    """Send this learner the serials of all blocks that are open there."""

    learner: str
    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Request this fragment from these learners."""

    round: int
    attempt: int
    fragment: int
    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLearner:
    """Request a fragment from an ejected learner, to be received and discarded (core/ejection.py)."""

    round: int
    attempt: int
    fragment: int
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginMerge:
    """Merge what these members upload."""

    round: int
    attempt: int
    fragment: int
    contributions: tuple[Contribution, ...]
    """In the order of learner names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortMerge:
    """Discard this attempt."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Make the merged fragment the current one, write the audit line, let downloads end as committed."""

    round: int
    attempt: int
    fragment: int
    changed: bool
    """False: all weights were zero, Θ does not change (docs/algorithm.md, "Weights")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Make the state as of this decision durable, in the background; `SnapshotDone` follows."""

    step: int
    engine: dict[str, Any]
    """`Engine.to_json()` at the commit of `step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The snapshot of step T is durable: export the model; `Exported` or `ExportFailed` follows."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowVersion:
    """Of a replay: this learner may have this version of a fragment from now on, and no newer one."""

    learner: str
    fragment: int
    version: tuple[int, int]
    """(epoch, global step) of the commit that made it."""
    announced: bool
    """False: it is part of the model that a new process downloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """Of a replay: the syncer was started again here, from a snapshot that had these versions."""

    versions: Mapping[int, tuple[int, int]]
    """By fragment."""
    initial: tuple[int, int]
    """Of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One line of events.jsonl."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Tick at this monotonic time or before."""

    seconds: float


Decision = (
    Admit
    | Close
    | RequestInitial
    | AnnounceReady
    | AnnounceComplete
    | AnnounceFragments
    | LeaseBlocks
    | Pull
    | ProbeLearner
    | BeginMerge
    | AbortMerge
    | Commit
    | TakeSnapshot
    | Finish
    | ShowVersion
    | BeginEpoch
    | Log
    | WakeAt
)
