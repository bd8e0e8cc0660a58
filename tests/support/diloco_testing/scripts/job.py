"""
The syncer's real engine with learners and a disk that do what a script commands, in virtual time.

Learners answer at once unless a command changes that. Announcements, heartbeats and wake-ups are
not shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
from diloco_testing.syncers.virtual_job import FakeLearner, VirtualJob

ROUTINE = frozenset({"merge", "snapshot"})
"""Lines of events.jsonl that a decision shows as well."""


class ScriptedJob(VirtualJob):
    """A job whose learners step, and whose uploads and disk make progress, only as a script commands."""

    def __init__(self, spec: RunSpec, names: Sequence[str]) -> None:
        super().__init__(spec, dict.fromkeys(names, 1.0), delay=self._delay)
        self.shown: list[str] = []
        self.quiet = False
        """Show no rounds: they are counted by `shares`."""
        self.held: dict[str, str] = {}
        """Learners whose uploads stop before the `header`, or before the `data`."""
        self.spoiled: dict[str, str] = {}
        """Learners whose uploads are refused, and why."""
        self.late: list[tuple[str, Callable[[], None]]] = []
        """What held learners will do when they are released."""
        self.far: dict[str, float] = {}
        """Seconds that a message to or from a learner takes."""
        self.failing: dict[str, str] = {}
        """Kinds of decisions that cannot be carried out, once, and why."""
        self.disk = ""
        """Why the disk refuses; `slow`: it has not answered yet; empty: it writes at once."""
        self.writing: list[ev.TakeSnapshot | ev.Finish] = []
        self.durable: dict[str, Any] | None = None
        self.durable_lines = 0
        self.captured_lines: dict[int, int] = {}
        self.grows = False
        """The next merge makes Θ grow implausibly."""
        self.survivor = ""
        """The learner whose process survived the end of its session: its counters continue."""
        self.members: Counter[str] = Counter()
        self.counted = 0
        self._asked: str | None = None

    def _delay(self, what: str) -> float:
        return self.far.get(self._asked or "", 0.0)

    def show(self, text: str, *, routine: bool = False) -> None:
        """One line of output."""
        if not (routine and self.quiet):
            self.shown.append(f"t={round(self.now, 1):g} {text}")

    # ------------------------------------------------------------ learners

    def learner(self, name: str) -> FakeLearner:
        """A learner of the job, new if it was not mentioned before."""
        return self.learners.setdefault(name, FakeLearner(name=name, step_seconds=1.0))

    def _next_step(self, learner: FakeLearner, generation: int) -> None:
        """A script commands when learners step."""

    def _begin_training(self, learner: FakeLearner) -> None:
        steps, tokens = learner.steps, learner.tokens
        super()._begin_training(learner)
        if learner.name == self.survivor and steps:
            learner.steps, learner.tokens = steps, tokens

    def steps(self, name: str) -> None:
        """One local step."""
        learner = self.learner(name)
        self._step(learner, learner.generation)

    def _send(self, event: ev.Event, learner: FakeLearner, what: str) -> None:
        self._asked = learner.name
        super()._send(event, learner, what)
        self._asked = None

    def _announced(self, learner: FakeLearner, decision: ev.AnnounceFragments) -> None:
        self._asked = learner.name
        super()._announced(learner, decision)
        self._asked = None

    def second(self) -> None:
        """Heartbeats and, as the runner does however many events arrive, a Tick."""
        for learner in self.learners.values():
            if learner.alive:
                self.post(ev.Heartbeat(session=learner.session, learner=learner.name))
        self.post(ev.Tick())

    # ------------------------------------------------------------ uploads

    def _pulled(self, learner: FakeLearner, pull: ev.Pull) -> None:
        if learner.name in self.spoiled:
            reason = self.spoiled[learner.name]
            dropped = ev.Dropped(
                learner=learner.name, round=pull.round, attempt=pull.attempt, reason=reason,
                detail=f"the upload of {learner.name}: {reason}",
            )  # fmt: skip
            self.at(self.now, lambda: self.post(dropped))
        elif self.held.get(learner.name) == "header":
            self.late.append(
                (learner.name, lambda: super(ScriptedJob, self)._pulled(learner, pull))
            )
        else:
            self._asked = learner.name
            super()._pulled(learner, pull)
            self._asked = None

    def _probed(self, learner: FakeLearner, probe: ev.ProbeLearner) -> None:
        if learner.name in self.held or learner.name in self.spoiled:
            return
        super()._probed(learner, probe)

    def _merging(self, begin: ev.BeginMerge) -> None:
        waited = [c.learner for c in begin.contributions if self.held.get(c.learner) == "data"]
        for contribution in begin.contributions:
            if contribution.learner not in waited:
                self._delivered(contribution.learner, begin)

        def finish() -> None:
            for name in waited:
                self._delivered(name, begin)
            self.post(self._merged(begin))

        if waited:
            self.late.append((waited[0], finish))
        else:
            self.at(self.now, finish)

    def _merged(self, begin: ev.BeginMerge) -> ev.Merged:
        merged, grows = super()._merged(begin), self.grows
        self.grows = False
        return replace(merged, sizes=(1.0, 100.0)) if grows else merged

    def _delivered(self, name: str, begin: ev.BeginMerge) -> None:
        self.post(
            ev.Progress(
                learner=name, round=begin.round, attempt=begin.attempt, received_bytes=1, done=True
            )
        )

    def progress(self, name: str, received_bytes: int) -> None:
        """Bytes of what a learner uploads have arrived."""
        rounds = [(r.step, r.attempt) for r in self.engine.scheduler.in_flight] or [(0, 0)]
        for step, attempt in rounds:
            self.post(
                ev.Progress(
                    learner=name, round=step, attempt=attempt, received_bytes=received_bytes
                )
            )

    def release(self, name: str) -> None:
        """What this learner held back arrives now."""
        self.held.pop(name, None)
        due = [what for held, what in self.late if held == name]
        self.late = [(held, what) for held, what in self.late if held != name]
        for what in due:
            what()

    # ------------------------------------------------------------ the disk

    def written(self) -> None:
        """The disk answers to everything that waits for it."""
        waiting, self.writing = self.writing, []
        for decision in waiting:
            self._write(decision)

    def _write(self, decision: ev.TakeSnapshot | ev.Finish) -> None:
        if self.disk == "slow":
            self.writing.append(decision)
        elif isinstance(decision, ev.TakeSnapshot):
            step = None if self.disk else decision.step
            if not self.disk:
                self.durable = decision.engine
                self.durable_lines = self.captured_lines[decision.step]
            self.post(ev.SnapshotDone(step=step, reason=self.disk))
        elif self.disk:
            self.post(ev.ExportFailed(reason=self.disk))
        else:
            self.post(ev.Exported(step=decision.step))

    # ------------------------------------------------------------ decisions

    def _carry_out(self, decision: ev.Decision) -> None:
        kind = type(decision).__name__
        if kind in self.failing:
            reason = self.failing.pop(kind)
            self.show(f"{kind} fails: {reason}")
            self.post(ev.Failed(decision=decision, reason=reason))
            return
        if text := describe(decision):
            routine = isinstance(decision, ev.Pull | ev.BeginMerge | ev.Commit)
            self.show(text, routine=routine)
        if isinstance(decision, ev.Log) and decision.event == "merge":
            self._count(decision.fields)
        if isinstance(decision, ev.RequestInitial) and decision.learner in self.held:
            return
        if isinstance(decision, ev.TakeSnapshot | ev.Finish):
            if isinstance(decision, ev.TakeSnapshot):
                self.captured_lines[decision.step] = len(self.lines)
            self.at(self.now, lambda: self._write(decision))
            return
        super()._carry_out(decision)

    def _count(self, line: dict[str, Any]) -> None:
        self.counted += 1
        self.members.update(member["learner"] for member in line["members"])

    # ------------------------------------------------------------ the syncer's own faults

    def crash(self) -> None:
        """The syncer is killed; its successor starts from what is durable."""
        epoch = self.engine.epoch + 1
        if self.durable is None:
            self.engine = Engine(spec=self.spec, epoch=epoch)
        else:
            self.engine = Engine.resume(self.spec, epoch=epoch, state=self.durable)
        since = self.durable_lines
        lines = [json.loads(line) for line in self.lines[since:]]
        self.engine.learners.replay(self.engine.scheduler.replayed(lines))
        self._wake, self.late, self.writing = -1.0, [], []
        for learner in self.learners.values():
            learner.alive = learner.ready = False
            learner.generation += 1

    def stop(self) -> None:
        """The syncer ends and writes the state that it has; its successor starts from that."""
        self.durable, self.durable_lines = self.engine.to_json(), len(self.lines)
        self.crash()

    def pause(self, seconds: float) -> None:
        """The syncer is paused, and receives what was sent to it only afterwards."""
        self._wake = -1.0
        self.now += seconds
        self.post(ev.Tick())


def describe(decision: ev.Decision) -> str:
    """One line for people; empty: not shown."""
    match decision:
        case ev.Admit():
            checkpoint = ", with its own checkpoint" if decision.use_checkpoint else ""
            return (
                f"admit {decision.learner} as incarnation {decision.incarnation} "
                f"at local step {decision.local_step}{checkpoint}"
            )
        case ev.Close():
            return f"close session {decision.session}: {decision.reason}"
        case ev.RequestInitial():
            return f"request the initial model from {decision.learner}"
        case ev.AnnounceReady():
            return f"the model is ready for {decision.learner}"
        case ev.AnnounceComplete():
            return f"the job is complete for {decision.learner}"
        case ev.Pull():
            return (
                f"pull fragment {decision.fragment} for step {decision.round}, "
                f"attempt {decision.attempt}: {' '.join(decision.learners)}"
            )
        case ev.ProbeLearner():
            return f"probe {decision.learner} with fragment {decision.fragment}"
        case ev.BeginMerge():
            return f"merge for step {decision.round}: {_reports(decision.contributions)}"
        case ev.AbortMerge():
            probe = decision.attempt >= 1 << 20
            what = "probe" if probe else f"step {decision.round}, attempt {decision.attempt}"
            return f"abort {what}: {decision.reason}"
        case ev.Commit():
            unchanged = "" if decision.changed else ", without a change"
            return f"commit step {decision.round}, fragment {decision.fragment}{unchanged}"
        case ev.TakeSnapshot():
            return f"snapshot of step {decision.step}, engine at step {decision.engine['step']}"
        case ev.Finish():
            return f"export the model of step {decision.step}"
        case ev.Log() if decision.event not in ROUTINE | {"join"}:
            fields = {k: v for k, v in decision.fields.items() if k != "detail"}
            return f"event {decision.event}: {' '.join(f'{k}={v}' for k, v in fields.items())}"
    return ""


def _reports(contributions: Sequence[Any]) -> str:
    return " ".join(f"{c.learner}@{c.local_step}" for c in contributions)
