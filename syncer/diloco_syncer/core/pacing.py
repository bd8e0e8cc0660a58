"""
When the next global step may start, and how long a grace window is. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EMA_FACTOR = 0.5
"""Weight of the newest measurement. Paper leaves this open (docs/algorithm.md, "Grace window")."""

PACE_LAG_STEPS = 2
"""How far a learner's position may fall behind before it is moved up."""


def ema(old: float | None, new: float) -> float:
    """Exponential moving average; the first measurement stands for itself."""
    return new if old is None else old + EMA_FACTOR * (new - old)


@dataclass(slots=True)
class Pace:
    """
    Keeps the global step from running ahead of the fastest learner.

    Paper leaves this open (docs/algorithm.md, "Pacing"). Each learner has a position on the scale of global
    steps that advances by one with each of its steps. The next global step may start when a learner's position
    has reached it. A slower learner is moved up to at most PACE_LAG_STEPS behind, so that it can take over soon
    when the fastest is gone, yet two learners half a step out of phase do not start two global steps per local
    step. Steps cannot be saved up: while the syncer waits for a quorum, positions stay at most one ahead.
    """

    step: int
    """Last global step that was started."""
    positions: dict[str, int] = field(default_factory=dict)
    _ahead: set[str] = field(init=False)
    """Learners whose position has reached the next global step."""

    def __post_init__(self) -> None:
        self._ahead = {name for name, position in self.positions.items() if position > self.step}

    def join(self, learner: str) -> None:
        """A learner (re)joins at the current global step."""
        self.positions[learner] = self.step
        self._ahead.discard(learner)

    def leave(self, learner: str) -> None:
        """A learner no longer counts."""
        self.positions.pop(learner, None)
        self._ahead.discard(learner)

    def stepped(self, learner: str, steps: int) -> None:
        """A learner made `steps` local steps."""
        if learner in self.positions:
            behind = max(self.positions[learner], self.step - PACE_LAG_STEPS)
            self.positions[learner] = min(behind + steps, self.step + 1)
            if self.positions[learner] > self.step:
                self._ahead.add(learner)

    def may_start(self) -> bool:
        """Whether the next global step may start."""
        return bool(self._ahead)

    def start(self) -> int:
        """Start the next global step and return it."""
        self.step += 1
        self._ahead.clear()  # no learner is more than one step ahead
        return self.step


@dataclass(slots=True, kw_only=True)
class Grace:
    """
    The adaptive grace window (paper 3.2, Eq 3): min(cap, γ · (τ·ξ_step − (ξ_quorum + ξ_sync))), never negative.

    Paper leaves this open: the EMA factor, the start, whose ξ_step. ξ_step is that of the *fastest* learner that
    is training: it sets the pace (see `Pace`), so the slack that a round may use is counted in its steps.
    Measured with the slowest instead: one learner slowed 5× stretches every round to its own step (docs/adr/0005).
    """

    overlap: int
    max_steps: float
    safety: float
    quorum_seconds: float | None = None
    """ξ_quorum: from the start of a round to its quorum."""
    sync_seconds: float | None = None
    """ξ_sync: from the pull to the commit."""

    def reached_quorum(self, seconds: float) -> None:
        """Include one round's time to quorum."""
        self.quorum_seconds = ema(self.quorum_seconds, seconds)

    def synced(self, seconds: float) -> None:
        """Include one round's time from pull to commit."""
        self.sync_seconds = ema(self.sync_seconds, seconds)

    def window(self, step_seconds: float | None) -> float:
        """Seconds to wait after the quorum, given ξ_step (None: not known yet)."""
        if self.max_steps == 0:
            return 0.0
        cap = self.max_steps * step_seconds if step_seconds is not None else self.max_steps
        if step_seconds is None or self.quorum_seconds is None or self.sync_seconds is None:
            return cap
        slack = self.overlap * step_seconds - (self.quorum_seconds + self.sync_seconds)
        return max(0.0, min(cap, self.safety * slack))
