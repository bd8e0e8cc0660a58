"""
What the link hears (events) and what it does about it (decisions). Plain values, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_worker.core.inbox import Staged, Version
from diloco_worker.core.messages import TrainerState

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The trainer said its state."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """The syncer let us in."""

    epoch: int
    incarnation: int
    step: int
    steps: int
    local_step: int
    total_tokens: int
    heartbeat_seconds: float
    use_checkpoint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWanted:
    """This learner must upload Θ^(0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """Θ exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """These fragments may be asked for next."""

    step: int
    steps: int
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Upload this fragment."""

    round: int
    attempt: int
    fragment: int
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultComing:
    """A result is being made."""

    round: int
    attempt: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Global step T is done."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The session broke, or could not be opened."""

    text: str
    refused_exit: int = 0
    """Exit code when trying again cannot help; else 0."""
    pause_seconds: float = 0.0
    """Trying again sooner cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSent:
    """The upload of Θ^(0) came to its end."""

    request: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """A download came to its end."""

    wish: Download
    staged: Staged | None = None
    """None: it was not committed, or it broke."""
    error: str = ""
    """Why it broke; empty when it was just not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A staged fragment is in the inbox, or its bytes turned out to be no numbers."""

    fragment: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    Heard | Welcomed | InitialWanted | ModelReady | Opened | Pulled | ResultComing | Completed | Lost | InitialSent
    | Downloaded | Placed | Tick
)  # fmt: skip

# ---------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a session; Hello carries what this state says."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Report this state; a newer one may replace it before it leaves."""

    state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeartbeat:
    """Say that we are alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Say goodbye, then end the process."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfers:
    """The session they belong to is over."""


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
    Fetch the result of a round, or (round 0) what is current, in fp32; fragment P: the constants.
    """

    fragment: int
    round: int = 0
    attempt: int = 0
    tries: int = 1
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Decode a staged fragment into the inbox; answered by `Placed`."""

    staged: Staged
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Forget a staged fragment."""

    staged: Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Give the trainer what `Conversation.said` is when this is carried out."""


Decision = (
    Connect | SendReport | SendHeartbeat | Leave | CancelTransfers | Upload | UploadInitial | Download | Place | Drop
    | Tell
)  # fmt: skip
