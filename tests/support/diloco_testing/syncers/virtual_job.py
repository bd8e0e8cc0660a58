"""
A syncer engine and N learners in virtual time, without processes, sockets or threads.

Everything the engine decides happens after a delay that a test chooses; learners step, exit and restart at times
that a test chooses. `lines` is what events.jsonl would hold, so the audit can check any history.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diloco.codec.formats import FP32
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.engine import Engine

REPEAT_SECONDS = 1.0
"""How long the link waits for a copy that it has not uploaded for another fragment."""


@dataclass
class FakeLearner:
    """Steps at its own speed and keeps Algorithm 1's counters."""

    name: str
    step_seconds: float
    tokens_per_step: int = 10
    alive: bool = False
    ready: bool = False
    session: int = 0
    incarnation: int = 0
    local_step: int = 0
    total_tokens: int = 0
    stepped: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    offers: tuple[int, ...] = ()
    global_step: int = 0
    announced_until: float = 0.0
    arrived: list[int] = field(default_factory=list)
    theta: list[Any] = field(default_factory=list)
    inbox: dict[int, Any] = field(default_factory=dict)
    generation: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    """Fragment → t_m of its last upload."""


class VirtualJob:
    """Runs engine and learners together; `run(until)` advances virtual time."""

    def __init__(
        self,
        spec: RunSpec,
        learners: dict[str, float],
        *,
        delay: Callable[[str], float] = lambda what: 0.0,
        train: Callable[[FakeLearner], None] | None = None,
        initial: list[np.ndarray] | None = None,
        merge: Callable[..., np.ndarray] | None = None,
    ) -> None:
        self.spec, self.delay, self.train = spec, delay, train
        self.engine = Engine(spec=spec, epoch=1)
        self.learners = {n: FakeLearner(name=n, step_seconds=s) for n, s in learners.items()}
        self.now = 0.0
        self.lengths: dict[str, float] = {}
        """Norm per √step of a learner's deltas; 1 unless given."""
        self.lines: list[str] = []
        self.decisions: list[tuple[float, ev.Decision]] = []
        self.finished_at: float | None = None
        self.theta = [a.copy() for a in initial] if initial is not None else []
        self._merge = merge
        self._payloads: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._results: dict[tuple[int, int], np.ndarray] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._wake = 0.0
        self._log("start", steps=spec.steps, fragments=spec.fragments, interval=spec.interval,
                  quorum=spec.quorum, step=0)  # fmt: skip

    # ------------------------------------------------------------ time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), what))

    def run(self, until: float, *, most_events: int = 30_000) -> None:
        for _ in range(most_events):
            if not self._heap or self._heap[0][0] > until or self.finished_at is not None:
                return
            self.now, _, what = heapq.heappop(self._heap)
            what()
        raise AssertionError(f"more than {most_events} events by {self.now} s: a hot loop")

    # ------------------------------------------------------------ learners

    def join(self, name: str, *, reconnect: bool = False) -> None:
        learner = self.learners[name]
        learner.alive, learner.ready = True, False
        learner.generation += 1
        learner.session = next(self._sessions)
        self.post(
            ev.Hello(
                session=learner.session,
                learner=name,
                region=name.split("/")[0],
                incarnation=learner.incarnation if reconnect else next(self._incarnations),
                fresh=not reconnect,
                local_step=0,
                checkpoint_step=0,
            )
        )

    def die(self, name: str, *, reason: str = "StreamEnded") -> None:
        learner = self.learners[name]
        if learner.alive:
            learner.alive = False
            learner.generation += 1
            self.post(ev.Left(session=learner.session, learner=name, reason=reason))

    def _begin_training(self, learner: FakeLearner) -> None:
        learner.ready = True
        learner.steps = [0] * self.spec.fragments
        learner.tokens = [0] * self.spec.fragments
        learner.inbox.clear()
        learner.arrived.clear()
        learner.theta = [a.copy() for a in self.theta]
        self._next_step(learner, learner.generation)

    def _next_step(self, learner: FakeLearner, generation: int) -> None:
        self.at(self.now + learner.step_seconds, lambda: self._step(learner, generation))

    def _step(self, learner: FakeLearner, generation: int) -> None:
        if learner.generation != generation or self.finished_at is not None:
            return
        if self.train is not None:
            self.train(learner)
        learner.local_step += 1
        learner.total_tokens += learner.tokens_per_step
        learner.stepped.append(self.now)
        for p in range(self.spec.fragments):
            learner.steps[p] += 1
            learner.tokens[p] += learner.tokens_per_step
        report = ev.Reported(
            session=learner.session,
            learner=learner.name,
            local_step=learner.local_step,
            steps=tuple(learner.steps),
            tokens=tuple(learner.tokens),
            offers=frozenset(learner.offers),
            total_tokens=learner.total_tokens,
            global_step=learner.global_step,
            step_seconds=learner.step_seconds,
            sync_seconds=0.0,
            loss=None,
        )
        copies = {p: learner.theta[p].copy() for p in learner.offers} if learner.theta else {}
        frozen = (learner.local_step, tuple(learner.steps), tuple(learner.tokens), copies)
        learner.host = frozen  # type: ignore[attr-defined]
        self._send(report, learner, "report")
        # A nanosecond later: whatever the report set off without delay is pending by then (Algorithm 1, step 3).
        self.at(self.now + 1e-9, lambda: self._apply(learner, generation))

    def _apply(self, learner: FakeLearner, generation: int) -> None:
        if learner.generation != generation:
            return
        for p in learner.arrived:
            learner.steps[p] = learner.tokens[p] = 0
            if p in learner.inbox:
                learner.theta[p] = learner.inbox.pop(p)
        learner.arrived.clear()
        self._next_step(learner, generation)

    # ------------------------------------------------------------ the wire

    def _send(self, event: ev.Event, learner: FakeLearner, what: str) -> None:
        """A message of a learner; lost if the learner restarted before it arrives."""
        generation, wait = learner.generation, self.delay(what)

        def arrive() -> None:
            if learner.generation == generation:
                self.post(event)

        if wait == 0:
            arrive()
        else:
            self.at(self.now + wait, arrive)

    def post(self, event: ev.Event) -> None:
        """Hand an event to the engine and let its decisions happen."""
        for decision in self.engine.handle(event, self.now):
            self.decisions.append((self.now, decision))
            self._carry_out(decision)

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Log():
                self._log(decision.event, **decision.fields)
            case ev.Admit():
                self.learners[decision.learner].incarnation = decision.incarnation
                mine = self.learners[decision.learner]
                mine.local_step = max(mine.local_step, decision.local_step)
            case ev.RequestInitial():
                learner = self.learners[decision.learner]
                self._send(ev.Initialised(learner=learner.name), learner, "initial")
            case ev.AnnounceReady():
                learner = self.learners[decision.learner]
                if not learner.ready:
                    self._begin_training(learner)
            case ev.AnnounceFragments():
                for name in decision.learners:
                    self._announced(self.learners[name], decision)
            case ev.Pull():
                for name in decision.learners:
                    self._pulled(self.learners[name], decision)
            case ev.ProbeLearner():
                self._probed(self.learners[decision.learner], decision)
            case ev.BeginMerge():
                self._merging(decision)
            case ev.AbortMerge():
                self._payloads.pop((decision.round, decision.attempt), None)
                self._results.pop((decision.round, decision.attempt), None)
            case ev.Commit():
                self._committed(decision)
            case ev.TakeSnapshot():
                done = ev.SnapshotDone(step=decision.step)
                self.at(self.now + self.delay("snapshot"), lambda: self.post(done))
            case ev.Finish():
                self.post(ev.Exported(step=1))
            case ev.AnnounceComplete():
                self.finished_at = self.finished_at or self.now
            case ev.WakeAt():
                self._wake_at(decision.seconds)

    def _announced(self, learner: FakeLearner, decision: ev.AnnounceFragments) -> None:
        generation = learner.generation

        def arrive() -> None:
            if learner.generation == generation:
                learner.offers, learner.global_step = decision.fragments, decision.step

        wait = self.delay("announce")
        if wait == 0 and learner.announced_until <= self.now:
            arrive()
            return
        # A stream keeps the order of its messages.
        learner.announced_until = max(learner.announced_until, self.now + wait)
        self.at(learner.announced_until, arrive)

    def _wake_at(self, when: float) -> None:
        self._wake = when

        def tick() -> None:
            if self._wake == when:
                for learner in self.learners.values():  # heartbeats of the living
                    if learner.alive:
                        self.post(ev.Heartbeat(session=learner.session, learner=learner.name))
                self.post(ev.Tick())

        self.at(when, tick)

    def _pulled(self, learner: FakeLearner, pull: ev.Pull) -> None:
        generation = learner.generation

        def contribute() -> None:
            if learner.generation != generation:
                return
            local_step, steps, tokens, copies = learner.host  # type: ignore[attr-defined]
            others = (t for p, t in learner.sent.items() if p != pull.fragment)
            if local_step in others and self.now < deadline:
                self.at(self.now + 0.05, contribute)  # as the link: the next copy comes soon
                return
            learner.sent[pull.fragment] = local_step
            if copies:
                key = (pull.round, pull.attempt)
                self._payloads.setdefault(key, {})[learner.name] = copies[pull.fragment]
            contribution = Contribution(
                learner=learner.name, incarnation=learner.incarnation, round=pull.round,
                attempt=pull.attempt, local_step=local_step, steps=steps[pull.fragment],
                tokens=tokens[pull.fragment], base=(1, 0), format=FP32, norms=(),
            )  # fmt: skip
            self._send(contribution, learner, "contribution")

        arrives = self.now + self.delay("pull")
        deadline = arrives + REPEAT_SECONDS
        self.at(arrives, contribute)

    def _probed(self, learner: FakeLearner, probe: ev.ProbeLearner) -> None:
        done = ev.Progress(
            learner=learner.name,
            round=probe.round,
            attempt=probe.attempt,
            received_bytes=1,
            done=True,
        )
        generation = learner.generation

        def deliver() -> None:
            if learner.generation == generation:
                self._send(done, learner, "contribution")

        self.at(self.now + self.delay("pull"), deliver)

    def _merging(self, begin: ev.BeginMerge) -> None:
        key = (begin.round, begin.attempt)
        if self._merge is not None:
            payloads = self._payloads[key]
            self._results[key] = self._merge(
                self.theta[begin.fragment],
                [payloads[c.learner] for c in begin.contributions],
                [c.weight for c in begin.contributions],
            )
        for contribution in begin.contributions:
            self.post(
                ev.Progress(
                    learner=contribution.learner, round=begin.round, attempt=begin.attempt,
                    received_bytes=1, done=True,
                )
            )  # fmt: skip
        merged = self._merged(begin)
        self.at(self.now + self.delay("merge"), lambda: self.post(merged))

    def _merged(self, begin: ev.BeginMerge) -> ev.Merged:
        """The merge is done; every delta was as long as its steps explain, or as `lengths` states."""
        return ev.Merged(
            round=begin.round, attempt=begin.attempt, delta_norm=1.0, bytes_up=0, bytes_result=0,
            confirmed=tuple(
                ev.ConfirmedNorm(
                    learner=c.learner, deviation=0.0,
                    norm=self.lengths.get(c.learner, 1.0) * math.sqrt(c.steps),
                )
                for c in begin.contributions
            ),
        )  # fmt: skip

    def _committed(self, commit: ev.Commit) -> None:
        result = self._results.pop((commit.round, commit.attempt), None)
        if result is not None:
            self.theta[commit.fragment] = result
        if not commit.changed:
            return
        for learner in self.learners.values():
            if learner.alive and learner.ready:
                self._deliver(learner, commit.fragment, result)

    def _deliver(self, learner: FakeLearner, fragment: int, result: np.ndarray | None) -> None:
        generation = learner.generation

        def arrive() -> None:
            if learner.generation == generation:
                learner.arrived.append(fragment)
                if result is not None:
                    learner.inbox[fragment] = result.copy()

        self.at(self.now + self.delay("result"), arrive)

    def _log(self, event: str, **fields: Any) -> None:
        self.lines.append(json.dumps({"time": self.now, "epoch": 1, "event": event, **fields}))

    # ------------------------------------------------------------ what tests check

    def merges(self) -> list[dict[str, Any]]:
        """Merge lines so far."""
        return [line for line in map(json.loads, self.lines) if line["event"] == "merge"]
