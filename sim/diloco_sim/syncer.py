"""
A syncer process: the real coordinator, engine, admission, store and transfers, with virtual shells.

    boot ─► store.next_epoch, snapshots.resume, journal ─► serve ─► crash
     ▲        (on the simulated disk)                     ├─► stop ─►│
     └──────────────── its supervisor starts it again ◄──────────────┘

What threads, queues and gRPC do in `Runner`, `ControlService`, `Uploads` and `Downloads` is done here
with events of the virtual clock; what a message means is decided by the same functions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import DilocoError, StorageError
from diloco.journal.parts import PART_BYTES
from diloco.journal.writer import JournalWriter
from diloco.spec import RunSpec
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Captured, Committed, Resumed
from diloco_sim.clock import Process, Timer
from diloco_sim.disk import Completion, DiskThread, SimulatedDisk
from diloco_sim.host import HostOverCoordinator
from diloco_sim.journal import Journal
from diloco_sim.network import Network
from diloco_sim.service import Service
from diloco_syncer.coordinator import BrokenStateError, Coordinator, Event, ParametersReceived
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Applicant
from diloco_syncer.core.engine import Engine
from diloco_syncer.metrics import Metrics
from diloco_syncer.runner import TICK_SECONDS
from diloco_syncer.sessions import Session
from diloco_syncer.spec_file import READ_SECONDS, SpecFile
from diloco_syncer.state import State
from diloco_syncer.storage import capture, snapshots
from diloco_syncer.storage.capture import ExportedModel
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.writer import Writer

DIRECTORY = Path("/run-directory")

SNAPSHOTS = DIRECTORY / "snapshots"

RUN = "simulated"
"""Name of the run: no person chooses a snapshot."""

RESTART_SECONDS = 1.0
"""Pause of the supervisor after a start that failed."""

Observe = Callable[[object], None]
"""Takes what checkers observe."""

PostedOrAsked = Event | Callable[[], None]

_MOVING = (ev.BeginMerge, ev.AbortMerge, ev.Commit)
"""Decisions after which a transfer that waits may continue."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a start finds on the disk."""

    store: Store
    journal: JournalWriter
    engine: Engine
    parameters: Parameters | None
    model: ExportedModel | None
    issued: int
    """Largest incarnation so far."""


class SimulatedSyncer:
    """
    One syncer over all its starts.

    Args:
        process: runs it.
        network: it listens there.
        disk: survives crashes.
        spec: of the job.
        observe: gets lines, decisions, and what checkers/observations.py has.
        part_bytes: size from which on events.jsonl is rotated.
    """

    def __init__(
        self, process: Process, network: Network, disk: SimulatedDisk, spec: RunSpec, observe: Observe,
        part_bytes: int = PART_BYTES,
    ) -> None:  # fmt: skip
        self.process, self.spec, self.disk = process, spec, disk
        self.document = spec.to_json()
        """The spec document, which `write` replaces."""
        self.serving: Server | None = None
        """None: it starts, or is down."""
        self.refusal: DilocoError | None = None
        """Why the last start failed, if the program refused; None: it did not."""
        self.absences = 0
        """More than 0: it was ended in an orderly way, and is not started again yet."""
        self.part_bytes = part_bytes
        self._network, self._observe = network, observe
        disk.attach(process)
        disk.make_directory(DIRECTORY)
        process.observers.append(self)

    def boot(self) -> None:
        """The process starts."""
        if self.absences:
            self.process.crash()
            return
        done = self.disk.call(self._open)
        self.process.clock.at(done.done_at, self._opened, done, process=self.process)

    def leave(self) -> None:
        """SIGTERM: it ends once its last snapshot is written, or has failed."""
        self.absences += 1
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.stop(self._ended)
        elif self.absences == 1:
            self._ended()

    def come_back(self) -> None:
        """It may start again."""
        self.absences -= 1
        self._start_again()

    def _ended(self) -> None:
        self.process.crash()
        self._start_again()

    def _start_again(self) -> None:
        if not (self.absences or self.process.alive):
            self.process.start()
            self.boot()

    def write(self, document: str) -> None:
        """Replace the spec document."""
        self.document = document
        if self.serving is not None:
            self.serving.check_later()

    # ------------------------------------------------------------ the process

    def crashed(self, process: Process, *, power: bool) -> None:
        """Nothing in memory survives."""
        self.serving = None

    def paused(self, process: Process) -> None:
        """Its events wait."""

    def resumed(self, process: Process) -> None:
        """Its events follow."""

    def _open(self) -> _Opened:
        disk = self.disk
        spec = self.spec = RunSpec.from_json(self.document)
        store = Store(SNAPSHOTS, keep=spec.syncer_checkpoint.keep, disk=disk)
        epoch = store.next_epoch()
        journal = JournalWriter(DIRECTORY / snapshots.EVENTS, disk=disk)
        engine, parameters = snapshots.resume(
            spec, DIRECTORY, store.start(), epoch=epoch, run=RUN, disk=disk
        )
        return _Opened(
            store=store,
            journal=journal,
            engine=engine,
            parameters=parameters,
            model=snapshots.exported(DIRECTORY, run=RUN, disk=disk),
            issued=store.issued_incarnations(),
        )

    def _opened(self, done: Completion[_Opened]) -> None:
        if done.value is None:
            if not isinstance(done.error, DilocoError | OSError):
                raise AssertionError("the start failed unexpectedly") from done.error
            self.refusal = done.error if isinstance(done.error, DilocoError) else None
            self.process.after(RESTART_SECONDS, self.boot)
            return
        self.refusal = None
        self.serving = Server(self, done.value, self._observe)
        self._network.listen(self.process, self.serving.service)
        self.serving.begin()


class Server(HostOverCoordinator):
    """
    One start of a syncer, from its first event to its end: what `Runner` is in a real process.

    Implements `diloco_syncer.rpc.transfers.Host`.
    """

    def __init__(self, owner: SimulatedSyncer, opened: _Opened, observe: Observe) -> None:
        self.process, self.spec, self.disk = owner.process, owner.spec, owner.disk
        self.metrics = Metrics(0)
        self.observe = observe
        engine, parameters = opened.engine, opened.parameters
        newest = max((learner.incarnation for learner in engine.learners), default=0)
        self._newest, self._store = newest, opened.store
        self.state = State(
            engine=engine,
            admission=Admission(
                self.spec,
                layout=parameters.layout if parameters else None,
                source=parameters.source if parameters else "",
                issued_before=max(newest, opened.issued),
            ),
            parameters=parameters,
            model=opened.model,
            run=RUN,
            start_id=opened.store.start_id,
            snapshot_start_id=opened.store.snapshot_start_id,
        )
        self.journal = Journal(opened.journal, self.disk, self.process, owner.part_bytes)
        self._thread = self.disk.thread(self.process)
        self._writer = Writer(
            self.spec, DIRECTORY, opened.store, record=self._record_later, post=self._post_later,
            journal=self.journal, run=RUN, disk=self.disk, thread=_Thread(self._thread),
            clock=lambda: self.disk.time,
        )  # fmt: skip
        self.coordinator = Coordinator(
            self.state, record=self.record, writer=self._writer, observe=self._decided
        )
        self.service = Service(self)
        self.events: deque[PostedOrAsked] = deque()
        self._spec_file = SpecFile(
            lambda: owner.document, self.spec.to_json(), self.spec,
            changed=self._limits_changed,
            refused=lambda error: self.record("refuse", learner="", reason=error.reason),
        )  # fmt: skip
        self._busy = False
        self._commits: list[ev.Commit] = []
        self._wake = self._tick = self.process.now
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def begin(self) -> None:
        """Serve."""
        engine = self.state.engine
        facts = engine.to_json()
        self.observe(Resumed(engine.epoch, engine.step, self.state.parameters, self.spec, facts))
        self._wake = self.coordinator.start(self.process.now)
        self.check_later()
        self._schedule()

    def stop(self, ended: Callable[[], None]) -> None:
        """End as `Runner.stop` does: no event is processed from now on; `ended` is called at the end."""
        self._busy = True
        last = self.coordinator.last_snapshot()
        if last is not None and self.state.parameters is not None:
            engine = self.state.engine
            fragments = self.state.parameters.all()
            self.observe(Captured(engine.epoch, engine.step, fragments, engine.to_json()))

        def write() -> None:
            if last is not None:
                with contextlib.suppress(StorageError):  # recorded; earlier snapshots are intact
                    self._writer.write(capture.with_position(last, self.journal.position()))

        def written(done: Completion[None]) -> None:
            _raise(done)
            self.record("stop", step=self.facts.step)
            ended()

        self._thread.call(write, done=written)

    def check_later(self) -> None:
        """Check the spec document at the latest time at which the thread of a real process does."""
        self.process.after(READ_SECONDS, self._spec_file.check)

    def _limits_changed(self, learners: Mapping[str, int]) -> None:
        self.post(ev.LimitsChanged(learners=learners))
        self.run()

    # ------------------------------------------------------------ Host

    def post(self, event: Event) -> None:
        """See `Host`."""
        self.events.append(event)

    def record(self, event: str, **fields: object) -> None:
        """See `Host`."""
        line = {"epoch": self.state.engine.epoch, "event": event, **fields}
        self.observe(line)
        self.journal.append({"time": round(self.process.wall, 3), **line})

    # ------------------------------------------------------------ for the service

    def admit(self, applicant: Applicant) -> Session:
        """Open a session; raises a DilocoError if it is refused."""
        return self.coordinator.admit(applicant)

    def next_incarnation(self) -> int:
        """A number never used before; uses the disk."""
        return self._store.next_incarnation(at_least=self._newest)

    def run(self) -> None:
        """Handle all events and what follows from them now."""
        if self._busy:
            return
        self._busy = True
        try:
            changed = True
            while changed or self.events:
                while self.events:
                    self._handle(self.events.popleft())
                changed = self.service.proceed()
        finally:
            self._busy = False
        self._schedule()

    # ------------------------------------------------------------ the loop

    def _handle(self, event: PostedOrAsked) -> None:
        if callable(event):
            event()
            return
        now = self.process.now
        if isinstance(event, ParametersReceived):
            self.service.changed = True
        try:
            self._wake = self.coordinator.handle(event, now)
        except BrokenStateError as error:
            raise Violation(
                "broken", str(error), step=self.facts.step, now=self.process.clock.now
            ) from error
        commits, self._commits = self._commits, []
        parameters = self.state.parameters
        for commit in commits:
            if parameters is not None:
                self.observe(Committed(commit, parameters.current(commit.fragment)))

    def _schedule(self) -> None:
        """Wake when a Tick is due."""
        due = min(self._wake, self._tick)
        if self._timer is not None and self._timer.pending:
            if self._timer_at <= due:
                return
            self.process.clock.cancel(self._timer)
        self._timer_at = due
        self._timer = self.process.at(due, self._ticked)

    def _ticked(self) -> None:
        now = self.process.now
        if now >= min(self._wake, self._tick):
            if now >= self._tick:
                self._tick = now + TICK_SECONDS
            self.events.append(ev.Tick())
            self._wake = max(self._wake, now)
        self.run()

    def _decided(self, decision: ev.Decision) -> None:
        if isinstance(decision, ev.WakeAt):
            return
        if isinstance(decision, _MOVING):
            self.service.changed = True
        self.observe(decision)
        if isinstance(decision, ev.Commit):
            self._commits.append(decision)
        elif isinstance(decision, ev.TakeSnapshot) and self.state.parameters is not None:
            epoch = self.state.engine.epoch
            fragments = self.state.parameters.all()
            self.observe(Captured(epoch, decision.step, fragments, decision.engine))

    # ------------------------------------------------------------ the thread that writes

    def _record_later(self, event: str, **fields: object) -> None:
        """The disk is ahead of the clock: this happens when the clock has caught up."""
        self._later(lambda: self.record(event, **fields))

    def _post_later(self, event: ev.Event) -> None:
        self._later(lambda: self.post(event))

    def _later(self, action: Callable[[], None]) -> None:
        def happen() -> None:
            action()
            self.run()

        self.process.clock.at(self.disk.time, happen, process=self.process)


class _Thread:
    """The thread of a `Writer`."""

    def __init__(self, thread: DiskThread) -> None:
        self._thread = thread

    def submit(self, function: Callable[..., None], /, *args: Any) -> object:
        return self._thread.call(function, *args, done=_raise)

    def shutdown(self, wait: bool = True) -> None:
        return None


def _raise(done: Completion[None]) -> None:
    if done.error is not None:
        raise done.error
