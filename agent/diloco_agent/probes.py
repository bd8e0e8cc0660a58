"""
The kubelet's probes.

Pure. Startup: has the program begun to work? Readiness: does it work now? Liveness: can only a new
container help? Liveness never depends on another machine: an unreachable syncer makes a learner
unready and restarts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.runtime.health import Health
from diloco_agent.policy import Role, State

STALE_SECONDS = 15.0
"""A program reports its health every second; without a report for this long it is not ready."""

STALLED_SECONDS = 60.0
"""Liveness fails when the agent's loop, which runs twice a second, has stalled for this long."""

STARTING_SECONDS = 300.0
"""Without a health report, a program counts as started after this: a user's own loop may load data
for hours before it joins. Shorter than the startup probe's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What one iteration of the agent's loop observed."""

    role: Role
    rank: int
    """Of this pod among those of its learner."""
    state: State
    message: str
    """Why the program does not run, when it does not."""
    exited: bool
    """The program exited at least once in this container."""
    started_at: float
    """Start of its current run."""
    health: Health | None
    """Latest report of this run; None before the first."""
    looped_at: float
    stuck_seconds: float
    """A program without progress for this long is stuck."""
    waits: bool = False
    """The program is not started before the other pods of its learner are ready."""

    @property
    def silent(self) -> bool:
        """
        Whether it reports no health and works while it runs: an evaluator, and every pod of a
        learner except the first, which alone joins the job.
        """
        return self.role is Role.EVALUATOR or self.rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a probe."""

    ok: bool
    message: str


def started(facts: ProcessFacts, now: float) -> Reply:
    """`/startz`."""
    if facts.health is not None:
        return Reply(ok=True, message=facts.health.why)
    if facts.exited or facts.waits:
        return Reply(ok=True, message=facts.message)  # the supervisor starts it, not the kubelet
    if facts.state is State.WAITING:
        return Reply(ok=False, message=facts.message)
    if facts.silent or now - facts.started_at >= STARTING_SECONDS:
        return Reply(ok=True, message="started")
    return Reply(ok=False, message="started, no health report yet")


def ready(facts: ProcessFacts, now: float) -> Reply:
    """`/readyz`."""
    if facts.state is not State.RUNNING:
        return Reply(ok=False, message=facts.message)
    if facts.silent:
        return Reply(ok=True, message="running")
    if facts.health is None:
        return Reply(ok=False, message="started, no health report yet")
    silence = now - facts.health.at
    if silence > STALE_SECONDS:
        return Reply(ok=False, message=f"no health report for {silence:.0f} s")
    return Reply(ok=facts.health.ready, message=facts.health.why)


def alive(facts: ProcessFacts, now: float) -> Reply:
    """`/livez`."""
    stalled = now - facts.looped_at
    if stalled > STALLED_SECONDS:
        return Reply(ok=False, message=f"the agent's loop has been stalled for {stalled:.0f} s")
    # An evaluator reports problems with its scores, and no progress.
    health = facts.health if facts.role is not Role.EVALUATOR else None
    if facts.state is State.RUNNING and health is not None:
        quiet = now - min(health.at, health.progress_at)
        if quiet > facts.stuck_seconds:
            return Reply(ok=False, message=f"no progress for {quiet:.0f} s: {health.why}")
    return Reply(ok=True, message="alive")


PROBES = {"/startz": started, "/readyz": ready, "/livez": alive}
