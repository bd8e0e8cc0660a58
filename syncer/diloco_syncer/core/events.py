"""
What the engine is told (events) and what it wants done (decisions). Plain values, nothing else.

A learner is named "<region>/<index>"; one life of its process is an incarnation. A round is named by the global step it
is for; an attempt counts how often that round has been pulled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Version = tuple[int, int]
"""(epoch, global step) of the commit that made a fragment; (epoch, 0) is Θ^(0)."""

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A learner opened a session and its model and spec were found to agree with the job's."""

    session: int
    learner: str
    region: str
    presented_incarnation: int
    """What the process had before its stream broke; 0 on a fresh start."""
    fresh_incarnation: int
    """A number never given before, for a fresh start."""
    local_step: int
    checkpoint_step: int
    restarts: int = 0
    """Lives of the learner before this one, as its supervisor counts them."""


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
class Heard:
    """A heartbeat."""

    session: int
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialised:
    """Θ^(0) was uploaded completely by this learner."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A member's upload has begun (or, if it had to be staged, ended): its facts are known."""

    learner: str
    incarnation: int
    round: int
    attempt: int
    local_step: int
    steps: int
    tokens: int
    base: Version | None
    """None: the fragment came whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressing:
    """A member's upload that must be complete before it counts as an answer is coming in."""

    learner: str
    round: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A member cannot deliver for this attempt: damaged, not finite, stalled, refused."""

    learner: str
    round: int
    attempt: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Every chunk of every member is merged and verified; nothing is visible yet."""

    round: int
    attempt: int
    delta_norm: float
    bytes_up: int
    bytes_result: int
    """Encoded size of the result, for one learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDone:
    """A snapshot became durable, or could not (step None)."""

    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    Hello
    | Left
    | Reported
    | Heard
    | Initialised
    | Answered
    | Progressing
    | Dropped
    | Merged
    | SnapshotDone
    | Tick
)

# ---------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Welcome this session."""

    session: int
    learner: str
    incarnation: int
    local_step: int
    use_checkpoint: bool
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End this session with a reason of the error tree."""

    session: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskInitial:
    """This learner uploads Θ^(0)."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SayReady:
    """Tell this learner that Θ exists and which versions are current."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SayComplete:
    """Tell this learner that the job is done."""

    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell every learner the global step and which fragments can be asked for next, soonest first."""

    step: int
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFrom:
    """Ask these learners for this fragment."""

    round: int
    attempt: int
    fragment: int
    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One member of a merge as it goes into the audit."""

    learner: str
    incarnation: int
    local_step: int
    steps: int
    tokens: int
    weight: float
    base: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginMerge:
    """Merge what these members upload and announce the result to all learners."""

    round: int
    attempt: int
    fragment: int
    members: tuple[MemberFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortMerge:
    """Forget this attempt: a member was lost."""

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
    """False: all weights were zero, Θ stays as it is (decision 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Write the state as of now durably, in the background."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Global step T is done: last snapshot, export, then tell everyone that is connected."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One line of events.jsonl."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Tick at this monotonic time at the latest."""

    seconds: float


Decision = (
    Admit
    | Close
    | AskInitial
    | SayReady
    | SayComplete
    | Announce
    | PullFrom
    | BeginMerge
    | AbortMerge
    | Commit
    | TakeSnapshot
    | Finish
    | Log
    | WakeAt
)
