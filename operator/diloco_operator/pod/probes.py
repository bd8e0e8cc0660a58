"""
What the kubelet's probes are told. Pure.

Startup asks whether the program has begun to live, readiness whether it does its work now, liveness
whether only a new container could help. Liveness never depends on another machine: a syncer that
cannot be reached makes a learner unready and restarts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.health import Health
from diloco_operator.pod.policy import Role, State

STALE_SECONDS = 15.0
"""A program leaves a sign of life each second; after so long without one it is not ready."""

TURN_SECONDS = 60.0
"""The supervisor's loop turns twice a second."""

STARTING_SECONDS = 300.0
"""A program that lives so long without a sign of life is no longer starting: a user's own loop may
load data for hours before it joins. Less than the startup probe's patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one turn of the supervisor's loop saw."""

    role: Role
    rank: int
    """Of this pod among those of its learner."""
    state: State
    why: str
    """While it does not run: what it waits for."""
    died: bool
    """The program ended at least once in this container."""
    started_at: float
    """Beginning of its life."""
    health: Health | None
    """Newest sign of this life."""
    turned_at: float
    stuck_seconds: float
    """A program without progress for so long is stuck."""

    @property
    def silent(self) -> bool:
        """
        It leaves no signs of life, and does its work while it runs: an evaluator, and every pod of a
        learner but the first, which alone joins the job.
        """
        return self.role is Role.EVALUATOR or self.rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a probe is told."""

    ok: bool
    why: str


def started(facts: Facts, now: float) -> Answer:
    """`/startz`."""
    if facts.health is not None:
        return Answer(ok=True, why=facts.health.why)
    if facts.died:
        return Answer(ok=True, why=facts.why)  # from here on restarts are the supervisor's business
    if facts.state is State.WAITING:
        return Answer(ok=False, why=facts.why)
    if facts.silent or now - facts.started_at >= STARTING_SECONDS:
        return Answer(ok=True, why="started")
    return Answer(ok=False, why="started, no sign of life yet")


def ready(facts: Facts, now: float) -> Answer:
    """`/readyz`."""
    if facts.state is not State.RUNNING:
        return Answer(ok=False, why=facts.why)
    if facts.silent:
        return Answer(ok=True, why="running")
    if facts.health is None:
        return Answer(ok=False, why="started, no sign of life yet")
    silence = now - facts.health.at
    if silence > STALE_SECONDS:
        return Answer(ok=False, why=f"no sign of life for {silence:.0f} s")
    return Answer(ok=facts.health.ready, why=facts.health.why)


def alive(facts: Facts, now: float) -> Answer:
    """`/livez`."""
    standing = now - facts.turned_at
    if standing > TURN_SECONDS:
        return Answer(ok=False, why=f"the supervisor's loop has not turned for {standing:.0f} s")
    if facts.state is State.RUNNING and facts.health is not None:
        quiet = now - min(facts.health.at, facts.health.progress_at)
        if quiet > facts.stuck_seconds:
            return Answer(ok=False, why=f"no progress for {quiet:.0f} s: {facts.health.why}")
    return Answer(ok=True, why="alive")


PROBES = {"/startz": started, "/readyz": ready, "/livez": alive}
