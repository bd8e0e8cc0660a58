"""
Events that reach the link, and its decisions. Plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_worker.core.inbox import Staged, Version
from diloco_worker.core.messages import TrainerState


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A learner that answers others."""

    learner: str
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The state of a peer's optimizers, which is complete in the directory of this learner."""

    learner: str
    local_step: int
    global_step: int
    bytes: int = 0
    """That were received."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUpdate:
    """The trainer sent its state."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """The syncer accepted the session."""

    epoch: int
    incarnation: int
    step: int
    steps: int
    local_step: int
    total_tokens: int
    heartbeat_seconds: float
    use_checkpoint: bool
    run: str = ""
    """Name of the run; "": not stated."""
    start_id: str = ""
    """Of the syncer's start; "": not stated."""
    snapshot_start_id: str = ""
    """Of the start that wrote the snapshot which this one began from; "": none, or not stated."""
    peers: tuple[PeerAddress, ...] = ()
    """Learners to ask for the state of their optimizers, best first."""
    leases_blocks: bool = True
    """The syncer answers blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialRequested:
    """This learner must upload Θ^(0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """Θ exists."""

    versions: tuple[Version, ...] = ()
    """Current version of each fragment; empty: not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A fragment has this version now."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The syncer may pull these fragments next."""

    step: int
    steps: int
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The syncer pulls this fragment."""

    round: int
    attempt: int
    fragment: int
    versions: tuple[Version, ...]
    """Versions that the syncer still has, so a delta may be against any of them."""
    probe: bool = False
    """The upload will be discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultAnnounced:
    """The syncer merges this fragment; its result can be downloaded."""

    round: int
    attempt: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """All blocks of data that are open at this learner."""

    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Global step T is reached."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """The session broke, or could not be opened."""

    text: str
    refused_exit: int = 0
    """Exit code if a retry cannot help; else 0."""
    pause_seconds: float = 0.0
    """Minimum pause before the next session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialUploaded:
    """The upload of Θ^(0) ended."""

    request: int
    error: str = ""
    refused_exit: int = 0
    """Not 0: it can never succeed, and the learner ends with this exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """A download ended."""

    request: Download
    staged: Staged | None = None
    """None: the round was aborted, or the download failed."""
    error: str = ""
    """Why it failed; empty if it did not."""
    aborted: bool = False
    """The syncer aborted the attempt: its result will never count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A staged fragment is in the inbox, or could not be decoded."""

    fragment: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswered:
    """A request to a peer ended."""

    number: int
    state: PeerState | None = None
    error: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAsks:
    """A peer waits for a local checkpoint of this global step or a later one."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    TrainerUpdate | Welcomed | InitialRequested | ModelReady | Committed | Opened | Pulled | ResultAnnounced | Leased
    | Completed | SessionLost | InitialUploaded | Downloaded | Placed | PeerAnswered | PeerAsks | Tick
)  # fmt: skip

# ---------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a session; its Hello is made from this state."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Report this state; a newer report may replace it before it is sent."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlocks:
    """State the blocks of this learner; a newer statement may replace it before it is sent."""

    blocks: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRecovery:
    """State with which state the optimizers began (core/recovery.py)."""

    recovery: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeartbeat:
    """Send a heartbeat to the syncer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Send Goodbye, then end the process."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfers:
    """Cancel every transfer: the session they belong to is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Answer a pull."""

    pull: Pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInitial:
    """Upload every fragment and the constants as Θ^(0)."""

    request: int
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """
    Download the result of a round, or (round 0) the current version; fragment P: the constants.
    """

    fragment: int
    round: int = 0
    attempt: int = 0
    exact: bool = True
    """Of the current version: in fp32, else in the job's format."""
    tries: int = 1
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Decode a staged fragment into the inbox; `Placed` follows."""

    staged: Staged
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Release a staged fragment."""

    staged: Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPeer:
    """Ask a peer for the state of its optimizers; `PeerAnswered` follows unless it is dropped."""

    number: int
    peer: PeerAddress
    step: int
    """t_s: the state must be of this global step or a later one."""
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPeer:
    """End the request of this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyTrainer:
    """Send `LinkProtocol.link_state`, as it is when this is carried out, to the trainer."""


Decision = (
    Connect | SendReport | SendBlocks | SendRecovery | SendHeartbeat | Leave | CancelTransfers | Upload | UploadInitial
    | Download | Place | Discard | AskPeer | DropPeer | NotifyTrainer
)  # fmt: skip
