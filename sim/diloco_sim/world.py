"""
One seed, one world: the real cores of a syncer and its learners under a plan of faults, judged by checkers.

    description.sample(seed) ─► World(description).run() ─► Outcome

The faults of the plan are over at `quiet_at`; what follows is the quiet period, in which everything
must recover and the job must come to its end.
"""

from __future__ import annotations

import gc
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from diloco.journal import reader
from diloco.spec import RunSpec
from diloco_sim.checkers.audited import Audited
from diloco_sim.checkers.bases import Bases
from diloco_sim.checkers.block_fates import BlockFates
from diloco_sim.checkers.bounds import Bounds
from diloco_sim.checkers.checker import Checker, Checkers, Violation
from diloco_sim.checkers.completion import Completion
from diloco_sim.checkers.credits import Credits
from diloco_sim.checkers.durable import Durable
from diloco_sim.checkers.incarnations import Incarnations
from diloco_sim.checkers.journalled import Journalled
from diloco_sim.checkers.limits import Limits
from diloco_sim.checkers.liveness import Liveness
from diloco_sim.checkers.observations import (
    Began,
    Captured,
    Committed,
    Encoded,
    Moment,
    Received,
    ReportArrived,
    Resumed,
    Saved,
)
from diloco_sim.checkers.quorum import Quorum
from diloco_sim.checkers.recovered import Recovered
from diloco_sim.checkers.replay import Replay
from diloco_sim.checkers.reports import Reports
from diloco_sim.checkers.rounds import Rounds
from diloco_sim.checkers.status import Status
from diloco_sim.chunks import small_chunks
from diloco_sim.clock import Clock, OverrunError, Process
from diloco_sim.description import SYNCER, Description, regions
from diloco_sim.disk import SimulatedDisk
from diloco_sim.faults import CHECKPOINT, LINK, MISBEHAVIOUR, Fault, Kind
from diloco_sim.impersonator import Impersonator, Twin
from diloco_sim.injector import Injector
from diloco_sim.learner import TRAINER, SimulatedLearner
from diloco_sim.lost_merges import LostMerges
from diloco_sim.memory import Model, ToyModel, seed_of
from diloco_sim.network import Network
from diloco_sim.seeds import fork
from diloco_sim.syncer import DIRECTORY, SNAPSHOTS, SimulatedSyncer
from diloco_syncer.core.events import Log, TakeSnapshot
from diloco_syncer.rpc import status
from diloco_syncer.storage import snapshots

TRACED = 200
"""Events that a failing world shows."""

SLICE_SECONDS = 5.0
"""Virtual seconds between two judgements of liveness and bounds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    description: Description
    violation: Violation | None
    seconds: float
    """Virtual."""
    events: int
    digest: int
    """Worlds with equal digests did the same."""
    merges: int
    injected: dict[Kind, int]
    """Faults that took effect."""
    trace: tuple[str, ...]
    """The last events of a world that broke a promise."""
    stopped: str
    """Why the syncer refuses to start until a person decides; empty: it does not."""

    @property
    def ok(self) -> bool:
        """No promise was broken."""
        return self.violation is None


class World:
    """
    A world before and while it runs.

    Args:
        description: what it is made of.
        checkers: further ones.
        new_model: what the learner of this name trains, called at each of its starts; None: a toy.
    """

    def __init__(
        self, description: Description, *, checkers: Iterable[Checker] = (),
        new_model: Callable[[str], Model] | None = None,
    ) -> None:  # fmt: skip
        self.of = description
        source = random.Random(description.seed)
        of_network, of_disk, of_model = fork(source), fork(source), fork(source)
        self.clock = Clock()
        self.network = Network(
            self.clock, of_network, latency=description.latency, bandwidth=description.bandwidth
        )
        self.spec = description.job
        self.disk = SimulatedDisk(self.clock, of_disk)
        process = self.clock.process(SYNCER)
        self.syncer = SimulatedSyncer(
            process, self.network, self.disk, self.spec, self.observe, description.part_bytes
        )  # fmt: skip
        start, layout = seed_of(of_model), description.layout
        self.learners: dict[str, SimulatedLearner] = {}
        for index, name in enumerate(description.names):
            of_learner = fork(source)
            moments, target = description.moments, seed_of(of_learner)
            toy = partial(ToyModel, layout, start=start, target=target, moments=moments)
            self.learners[name] = SimulatedLearner(
                name, self.network, process, spec=self.spec, layout=layout,
                new_model=partial(new_model, name) if new_model is not None else toy,
                source=of_learner, step_seconds=description.step_seconds[index],
                tokens=description.tokens(index), checkpoint_every=description.checkpoint_every,
                observe=self.observe, data=description.data, block_steps=description.block_steps,
                peers=moments > 0,
            )  # fmt: skip
        self._health = description.health
        self.halt = ""
        """Why the syncer no longer merges anything."""
        self._scales: list[Fault] = []
        """Changes of the number of learners that last."""
        self._impersonators: dict[tuple[str, Kind], Impersonator] = {}
        """By the name of the member that they belong to, and what they do."""
        self._written_at = 0.0
        """When the spec document was last replaced."""
        self.merges = 0
        self._lost_merges = LostMerges(self.spec)
        self._found: Violation | None = None
        self.trace: deque[tuple[float, object]] = deque(maxlen=TRACED)
        self._checkers = Checkers([*self.own_checkers(), *checkers])
        self.injector = Injector(
            description.plan, clock=self.clock, network=self.network, disks={SYNCER: self.disk},
            restart=self._restart, world=self._change,
            observe=self.observe, worth_a_copy=self._has_snapshot,
        )  # fmt: skip

    def own_checkers(self) -> list[Checker]:
        """Those that every world has."""
        spec, of = self.spec, self.of
        false = frozenset(fault.target for fault in of.plan.only(Kind.BLOCKS_FALSE))
        return [
            *([BlockFates(of.blocks, of.block_steps, of.block_wait, false)] if of.blocks else []),
            *([Recovered(spec.interval, of.longest_step, self._health.of)] if of.moments else []),
            Quorum(spec.quorum),
            Rounds(spec.overlap),
            Reports(),
            Incarnations(),
            Limits(self._wanted_limits),
            Completion(spec.steps, self.model_is_durable, expected=True),
            Replay(spec, of.layout),
            Credits(
                spec,
                false={f.target for f in of.plan.only(*LIES)},
                delayed=self._delayed(),
            ),
            Bases(spec, of.layout),
            Durable(),
            Liveness(spec.steps, of.bounds, of.too_slow),
            Status(spec.quorum, of.explained_gap.seconds),
            Journalled(self.whole_journal),
            Audited(self.journal_lines, self.refused_lines),
            Bounds(of.most),
        ]

    def _delayed(self) -> set[str]:
        """Learners whose Reports a connection, or a paused process, delays at some time."""
        still = {f.target.removesuffix(TRAINER) for f in self.of.plan.only(Kind.PAUSE, Kind.SLOW)}
        if SYNCER in still:
            return set(self.of.names)
        still.update(f.target for f in self.of.plan.only(Kind.CONTROL_BREAKS))
        return still.union(*((f.target, f.peer) for f in self.of.plan.only(*LINK)))

    # ------------------------------------------------------------ running

    def run(self) -> Outcome:
        """Run it to its end."""
        violation = None
        with (
            _quiet(),
            _rare_collections(),
            small_chunks(self.of.chunk_elements, self.of.window_bytes),
        ):
            try:
                self._run()
            except Violation as found:
                violation = found
            except OverrunError as error:
                violation = Violation("bounds", str(error), step=self.step, now=self.clock.now)
        return Outcome(
            description=self.of,
            violation=violation,
            seconds=self.clock.now,
            events=self.clock.events,
            digest=self.clock.digest,
            merges=self.merges,
            injected=dict(self.injector.injected),
            trace=() if violation is None else self.shown(),
            stopped=str(self.syncer.refusal or self.halt),
        )

    def _run(self) -> None:
        self.syncer.boot()
        for name, learner in self.learners.items():
            if any(f.kind is Kind.LATE and f.target == name for f in self.of.plan):
                learner.process.crash()
            else:
                learner.boot()
        most_seconds = self.deadline
        while not self.over and self.clock.now < most_seconds:
            self.clock.run(self.clock.now + SLICE_SECONDS, most_events=MAX_EVENTS)
            self.observe(self.moment())
            if self._found is not None:
                raise self._found
            if self.stopped:
                return
        self._checkers.finish(self.clock.now)

    @property
    def over(self) -> bool:
        """The job is complete and every learner has left."""
        return all(learner.done for learner in self.learners.values())

    @property
    def stopped(self) -> bool:
        """A person has to decide, and all faults are over."""
        return self._waits_for_a_person and self.clock.now >= self.of.quiet_at

    @property
    def _waits_for_a_person(self) -> bool:
        """
        It is legal that merges end: a bit has flipped, and since then the syncer refuses
        to start, or the parameters would grow implausibly where a member misbehaved, the job may diverge,
        or start after start lost merges.
        """
        injected = self.injector.injected
        flipped = Kind.DISK_FLIP in injected and self.syncer.refusal is not None
        misbehaved = any(kind in injected for kind in MISBEHAVIOUR)
        explained = misbehaved or self.of.may_diverge or self._lost_merges.may_halt
        return flipped or (bool(self.halt) and explained)

    def _healthy_since(self) -> float | None:
        """See `Moment`; None as well while a person has to decide."""
        return None if self._waits_for_a_person else self._health.since(self.clock.now)

    @property
    def deadline(self) -> float:
        """When the job must be complete."""
        of = self.of
        return of.quiet_at + of.bounds.merge + 4 * of.steps * of.slowest

    @property
    def step(self) -> int:
        """The global step of the running syncer; 0: it is down."""
        serving = self.syncer.serving
        return serving.facts.step if serving is not None else 0

    def observe(self, event: object) -> None:
        """Something happened: pass it to the checkers."""
        if self._found is not None:
            return
        now = self.clock.now
        if not isinstance(event, _UNTRACED):
            # As text what refers to vectors: the trace must not keep them from being used again.
            self.trace.append((now, _text(event) if isinstance(event, Committed) else event))
        match event:
            case {"event": "merge", "step": int(step), "fragment": int(fragment)}:
                self.merges += 1
                self._lost_merges.merged(step, fragment)
            case {"event": "snapshot", "ok": True, "step": int(step)} if not self.halt:
                self._lost_merges.durable(step)
            case Resumed(step=step, engine=engine):
                self._lost_merges.started(step)
                self.halt = engine["halted"]
            case {"event": "halt", "reason": reason}:
                self.halt = str(reason)
        try:
            self._checkers.observe(event, now)
        except Violation as found:
            # Not raised here: the coordinator survives a line that cannot be recorded.
            self._found = found
            self.clock.stop()

    def moment(self) -> Moment:
        """What can be seen from outside."""
        serving = self.syncer.serving
        sessions = serving.service.sessions.values() if serving else ()
        return Moment(
            quiet=self.clock.now >= self.of.quiet_at,
            healthy_since=self._healthy_since(),
            step=self.step,
            learners={name: learner.moment() for name, learner in self.learners.items()},
            attempts=len(serving.attempts) if serving else 0,
            queues=len(serving.events) + serving.journal.waiting if serving else 0,
            streams=len(serving.service.transfers) if serving else 0,
            state=status.phase(serving.state) if serving else "",
            waiting_for=serving.state.engine.waiting_for() if serving else "",
            outbox=max((session.unsent for session in sessions), default=0),
            link_bytes=max(learner.link_bytes for learner in self.learners.values()),
            vector_bytes=serving.coordinator.vector_bytes if serving else 0,
            journal_bytes=self.disk.file_bytes(DIRECTORY, f"{snapshots.EVENTS.split('.')[0]}."),
        )

    def model_is_durable(self) -> bool:
        """The exported model would survive a power failure now."""
        model = DIRECTORY / "model"
        names = ("model.safetensors", "model.json")
        return all(self.disk.durable(model / name) is not None for name in names)

    def journal_lines(self) -> Iterator[tuple[str, str]] | None:
        """All lines of events.jsonl, each with its place; None: a bit may have flipped in one."""
        if Kind.DISK_FLIP in self.injector.injected:
            return None
        return reader.lines(DIRECTORY / snapshots.EVENTS, disk=self.disk)

    def _has_snapshot(self) -> bool:
        """A copy without one would start the job over, as an empty volume does."""
        return any(n.endswith(".json") for n in self.disk.copy().get(str(SNAPSHOTS), ()))

    def whole_journal(self) -> Iterator[tuple[str, str]] | None:
        """The same; None as well if the disk may have refused a line."""
        return None if self.refused_lines() else self.journal_lines()

    def refused_lines(self) -> bool:
        """Whether the disk may have refused a line."""
        injected = self.injector.injected
        return Kind.DISK_FULL in injected or Kind.DISK_FAIL in injected

    def shown(self) -> tuple[str, ...]:
        """The last events as text."""
        return tuple(f"{now:11.4f} {_text(event)}" for now, event in self.trace)

    # ------------------------------------------------------------ faults

    def _restart(self, process: Process) -> None:
        if process is self.syncer.process:
            self.syncer.boot()
            return
        learner = self.learners[process.name.removesuffix(TRAINER)]
        if process is learner.process:
            learner.boot()
        else:
            learner.start_link()

    def _change(self, fault: Fault, begins: bool) -> None:
        """Membership, misbehaviour, broken connections, and what learners find on their disks."""
        if fault.kind is Kind.SCALE:
            self._scale(fault, begins)
            return
        if fault.kind is Kind.LEAVE and fault.target == SYNCER:
            (self.syncer.leave if begins else self.syncer.come_back)()
            return
        targets = [self.learners[fault.target]] if fault.target in self.learners else []
        for learner in targets:
            match fault.kind:
                case Kind.LATE | Kind.LEAVE:
                    self._away(learner, begins)
                case Kind.SPEED:
                    learner.speed *= fault.amount if begins else 1 / fault.amount
                case _ if fault.kind not in CHECKPOINT:
                    self._misbehave(learner, fault, begins)
                case _ if begins:
                    learner.find(fault.kind)

    def _misbehave(self, learner: SimulatedLearner, fault: Fault, begins: bool) -> None:
        learner.behaviour.change(fault, begins)
        if fault.kind in (Kind.IMPERSONATE, Kind.TWIN):
            impersonator = self._impersonators.pop((learner.name, fault.kind), None)
            if impersonator is not None:
                impersonator.stop()
            if begins:
                kind = Twin if fault.kind is Kind.TWIN else Impersonator
                self._impersonators[learner.name, fault.kind] = kind(
                    learner.link_process, self.network, self.syncer.process, name=learner.name,
                    spec=self.spec, layout=self.of.layout, observe=self.observe,
                    model_is_known=self._model_is_known,
                )  # fmt: skip
        elif fault.kind is Kind.AHEAD and not begins:
            # A position never moves back: only a new process of the learner takes part again.
            learner.restart()

    def _model_is_known(self) -> bool:
        serving = self.syncer.serving
        return serving is not None and serving.state.parameters is not None

    def _scale(self, fault: Fault, begins: bool) -> None:
        """Another number of learners in the manifest: pods and the spec document follow, in either order."""
        if begins:
            self._scales.append(fault)
        else:
            self._scales.remove(fault)
        late = self.clock.now + KUBELET_SECONDS
        first, second = self._scale_pods, self._write_spec
        if int(fault.begin * 1000) % 2:
            first, second = second, first
        first(fault, begins)
        self.clock.at(late, second, fault, begins)

    def _scale_pods(self, fault: Fault, begins: bool) -> None:
        for learner in list(self.learners.values())[_number(fault) :]:
            self._away(learner, begins)

    def _write_spec(self, fault: Fault, begins: bool) -> None:
        number = min([self.of.learners, *map(_number, self._scales)])
        self.syncer.write(replace(self.spec, learners=regions(number)).to_json())
        self._written_at = self.clock.now

    def _wanted_limits(self) -> dict[str, int] | None:
        """The numbers of learners in the document, once the syncer has had time to see them."""
        since = max(self._written_at, self.of.quiet_at)
        if self.syncer.serving is None or self.clock.now < since + 60.0:
            return None
        return RunSpec.from_json(self.syncer.document).learners

    def _away(self, learner: SimulatedLearner, begins: bool) -> None:
        if begins:
            learner.absences += 1
            learner.terminate()
            return
        learner.absences -= 1
        if not learner.absences:
            learner.come_back()


def _number(scale: Fault) -> int:
    """How many learners there are."""
    return max(1, int(scale.amount))


LIES = (Kind.LIE_TOKENS, Kind.LIE_STEPS, Kind.AHEAD)
"""Faults of members whose counters or position are false."""

_UNTRACED = (Captured, Encoded, Log, Moment, ReportArrived, Saved)

KUBELET_SECONDS = 3.0
"""Between the pods and the spec document: less than a kubelet takes, as a world may last ten seconds."""

MAX_EVENTS = 200_000
"""Events of one slice of virtual time."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of the real parts, which a trace replaces."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A world makes little cyclic garbage; looking for it takes a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _text(event: object) -> str:
    if isinstance(event, dict):
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        return f"line {event.get('event')} {rest}"[:400]
    if isinstance(event, TakeSnapshot):
        return f"TakeSnapshot step={event.step}"
    if isinstance(event, Received):
        header = event.header
        return (
            f"received of {header.learner} round={header.round} attempt={header.attempt} "
            f"fragment={header.fragment} t_m={header.local_step}"
        )
    if isinstance(event, Began):
        return f"{event.learner} begins as incarnation {event.incarnation} at step {event.step}"
    if isinstance(event, Resumed):
        return f"resumed epoch={event.epoch} step={event.step}"
    if isinstance(event, Committed):
        return f"committed {event.commit.fragment} {event.fragment.version}"
    return f"{event}"[:400]
