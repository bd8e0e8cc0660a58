"""
Commands that drive the syncer's engine (scripts/job.py; docs/testing.md, "Golden scripts").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_testing.scripts.golden import split
from diloco_testing.scripts.job import ScriptedJob


class SyncerScript:
    """Carries out the commands of one script."""

    def __init__(self) -> None:
        self.job: ScriptedJob

    def __call__(self, words: Sequence[str]) -> list[str]:
        name, *rest = words
        plain, options = split(rest)
        if name == "job":
            return self._job(options)
        self.job.shown = []
        self.job.quiet = options.pop("show", "") == "faults"
        command: Callable[..., Sequence[str] | None] = getattr(self, f"_{name.replace('-', '_')}")
        try:
            lines = command(*plain, **options) or []
            self._settle()
        except RuntimeError as error:
            lines = [f"the syncer ends: {error}"]
        return [*self.job.shown, *lines]

    def _settle(self, seconds: float = 1e-6) -> None:
        """Let this time pass, and carry out everything that follows."""
        until = self.job.now + seconds
        for number in range(1, int(seconds) + 1):
            self.job.at(self.job.now + number, self.job.second)
        self.job.run(until, most_events=10**6)
        self.job.now = until

    def _names(self, names: Sequence[str]) -> list[str]:
        connected = [n for n, learner in self.job.learners.items() if learner.alive]
        return connected if list(names) == ["all"] else list(names)

    def _job(self, options: dict[str, str]) -> list[str]:
        values: dict[str, Any] = {
            "job": "j", "steps": 10_000, "fragments": 4, "interval": 4, "overlap": 1, "quorum": 1,
            "learners": {"eu": 3},
            "syncer_checkpoint": Checkpoint(every_steps=10_000, keep=3),
        }  # fmt: skip
        for key, value in options.items():
            if key == "learners":
                values[key] = {r: int(n) for r, n in (x.split(":") for x in value.split(","))}
            elif key == "snapshots":
                values["syncer_checkpoint"] = Checkpoint(every_steps=int(value), keep=3)
            else:
                values[key] = float(value) if key == "grace_max_steps" else int(value)
        try:
            spec = RunSpec(**values)
        except Exception as error:
            return [f"refused: {error}"]
        names = [f"{region}/{i}" for region, n in spec.learners.items() for i in range(n)]
        self.job = ScriptedJob(spec, names)
        return []

    # ------------------------------------------------------------ learners

    def _join(self, *names: str) -> None:
        for name in names:
            self.job.learner(name)
            self.job.join(name)
            self._settle()

    def _reconnect(self, name: str) -> None:
        self.job.survivor = name
        self.job.join(name, reconnect=True)
        self._settle()
        self.job.survivor = ""

    def _leave(self, *names: str, reason: str = "StreamEnded") -> None:
        for name in names:
            self.job.die(name, reason=reason)

    def _freeze(self, *names: str) -> None:
        """A process stops: no heartbeats, no steps, and its connection stays open."""
        for name in names:
            self.job.learner(name).alive = False

    def _return(self, name: str, incarnation: str) -> None:
        """A process opens a session again with the incarnation that it was given."""
        self.job.post(
            ev.Hello(
                session=99, learner=name, region=name.split("/")[0], incarnation=int(incarnation),
                fresh=False, local_step=0, checkpoint_step=0,
            )
        )  # fmt: skip

    def _step(self, *names: str) -> None:
        for name in self._names(names):
            self.job.steps(name)

    def _alone(self, name: str, steps: str) -> None:
        """A learner without a session trains on."""
        learner = self.job.learner(name)
        for _ in range(int(steps)):
            learner.local_step += 1
            learner.total_tokens += learner.tokens_per_step
            learner.steps = [c + 1 for c in learner.steps]
            learner.tokens = [c + learner.tokens_per_step for c in learner.tokens]

    def _report(self, name: str) -> None:
        """The last step of this learner is reported again."""
        learner = self.job.learner(name)
        learner.local_step -= 1
        learner.total_tokens -= learner.tokens_per_step
        self.job.steps(name)

    def _train(self, seconds: str, spread: str = "0.001") -> None:
        """Every connected learner makes a step each second, one after the other."""
        job = self.job
        for number in range(1, int(seconds) + 1):
            for place, name in enumerate(self._names(["all"])):
                job.at(job.now + number + place * float(spread), lambda name=name: job.steps(name))
        self._settle(float(seconds) + 0.1 + float(spread))

    def _wait(self, seconds: str) -> None:
        self._settle(float(seconds))

    def _tokens(self, name: str, count: str) -> None:
        """Tokens that this learner trains on in each step from now on."""
        self.job.learner(name).tokens_per_step = int(count)

    def _far(self, name: str, seconds: str) -> None:
        self.job.far[name] = float(seconds)

    # ------------------------------------------------------------ uploads

    def _hold(self, name: str, before: str = "header") -> None:
        self.job.held[name] = before

    def _release(self, name: str) -> None:
        self.job.release(name)

    def _resume(self, name: str) -> None:
        """Later uploads arrive; what was held stays held."""
        self.job.held.pop(name)

    def _spoil(self, name: str, reason: str) -> None:
        self.job.spoiled[name] = reason

    def _heal(self, name: str) -> None:
        self.job.spoiled.pop(name)

    def _trickle(self, name: str, bytes_per_second: str, seconds: str) -> None:
        """Bytes of this learner arrive each second from now on, of every round in flight or of the model."""
        for number in range(1, int(seconds) + 1):
            received = number * int(bytes_per_second)
            self.job.at(
                self.job.now + number, lambda received=received: self.job.progress(name, received)
            )

    def _initialised(self, name: str) -> None:
        self.job.post(ev.Initialised(learner=name))

    def _not_finite(self, name: str) -> None:
        self.job.post(ev.InitialFailed(learner=name, reason="NotFinite", detail="NaN"))

    # ------------------------------------------------------------ disk and syncer

    def _disk(self, *reason: str) -> None:
        self.job.disk = "" if reason == ("ok",) else " ".join(reason)
        if self.job.disk != "slow":
            self.job.written()

    def _fail(self, decision: str, *reason: str) -> None:
        self.job.failing[decision] = " ".join(reason)

    def _pause(self, seconds: str) -> None:
        self.job.pause(float(seconds))

    def _grow(self) -> None:
        self.job.grows = True

    def _stop(self) -> list[str]:
        self.job.stop()
        return self._begun()

    def _crash(self) -> list[str]:
        self.job.crash()
        return self._begun()

    def _begun(self) -> list[str]:
        engine = self.job.engine
        return [f"epoch {engine.epoch} begins at step {engine.step}"]

    # ------------------------------------------------------------ what people ask

    def _status(self) -> list[str]:
        engine = self.job.engine
        waiting = engine.waiting_for()
        state = (
            "Complete" if engine.complete else f"Waiting for {waiting}" if waiting else "Training"
        )
        states = " ".join(f"{r.name}={r.state}" for r in engine.learners)
        in_flight = ", ".join(
            f"step {r.step} fragment {r.fragment} {r.phase.value}"
            for r in engine.scheduler.in_flight
        )
        return [
            f"state: {state}",
            f"step {engine.step}, durable {engine.durable_step}; {states}",
            f"in flight: {in_flight or 'nothing'}",
        ]

    def _shares(self) -> list[str]:
        """In how many of the merges since the last call each learner was a member."""
        job = self.job
        counted, members = job.counted, job.members
        job.counted, job.members = 0, Counter()
        shares = [
            f"{name} in {100 * members[name] / max(1, counted):.0f} %"
            for name in sorted(job.learners)
        ]
        return [f"{counted} merges: {', '.join(shares)}"]

    def _weights(self) -> list[str]:
        """The members of the last merge."""
        members = self.job.merges()[-1]["members"]
        total = math.fsum(m["weight"] for m in members)
        return [
            f"{m['learner']}@{m['step']}: {m['steps']} steps, {m['weight'] / total:.0%}"
            for m in members
        ]
