"""
The syncer's one thread of decisions: events in, decisions out.

Everything that may block (disk, network, merging) happens in other threads, which put events into `post`.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diloco.errors import ALL_ERRORS, DilocoError, StorageError, UnavailableError
from diloco.fragments import Layout
from diloco.health import Health, HealthFile
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer import state
from diloco_syncer.attempt import Attempt
from diloco_syncer.core import events as ev
from diloco_syncer.core.buffers import Buffers
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, Engine
from diloco_syncer.core.merge import FragmentMerge, Member, MemberError
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.metrics import Metrics
from diloco_syncer.store import EventLog, Store
from diloco_syncer.theta import Held, Theta

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS = 0.5
"""How often the engine looks at the clock at least, however many events keep it busy."""

MERGE_WINDOW_BYTES = 16 << 20
"""How far a member may be ahead of the slowest, as encoded: bounds memory to this × members."""

_ERRORS = {error.reason: error for error in ALL_ERRORS}


@dataclass(slots=True, kw_only=True)
class Session:
    """One open stream of one learner."""

    number: int
    learner: str
    outbox: queue.SimpleQueue[pb.SyncerMessage | DilocoError | None] = field(
        default_factory=queue.SimpleQueue
    )
    """Messages in order; an error ends the stream with its status, None ends it plainly."""


class Runner:
    """
    Owns engine and Θ.

    Args:
        spec: the job.
        directory: the run directory (events.jsonl, snapshots/, model/).
        engine: fresh or resumed.
        theta: what the snapshot held; None for a fresh job.
        stall_seconds: a member that sends nothing for so long while others wait for it is dropped
            from the merge.
        health: where each turn leaves a sign of life.
    """

    def __init__(
        self, spec: RunSpec, directory: Path, *, engine: Engine, theta: Theta | None,
        store: Store, events: EventLog, metrics: Metrics, stall_seconds: float = 20.0,
        health: HealthFile | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.directory = spec, directory
        self.engine, self.theta, self.store, self.events = engine, theta, store, events
        self.metrics, self.stall_seconds = metrics, stall_seconds
        self._health = health or HealthFile(None)
        self.layout: Layout | None = theta.layout if theta else None
        self.sessions: dict[int, Session] = {}
        self.model: tuple[str, str] = state.exported(directory)
        self.snapshot_step = engine.step if theta else 0
        self.evaluation: tuple[int, float] = (0, 0.0)
        self.differing: dict[str, str] = {}
        """Learner → hash of the spec for which its last Hello was refused."""
        self.bytes_up = self.bytes_down = 0
        self._living: dict[str, tuple[int, int]] = {}
        """learner → (incarnation, session): read by the bulk threads."""
        self._attempts: OrderedDict[tuple[int, int], Attempt] = OrderedDict()
        self._queue: queue.SimpleQueue[ev.Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._buffers = Buffers()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self.finished = threading.Event()
        """Set once the job is complete and its model exported."""

    # ------------------------------------------------------------ for other threads

    def start(self) -> None:
        """Begin to take events."""
        self._thread.start()
        if self.engine.complete and not self.model[0]:
            self._disk.submit(self._finish, self.engine.step)
        elif self.engine.complete:
            self.finished.set()

    def post(self, event: ev.Event) -> None:
        """Hand an event to the engine; returns at once."""
        self._queue.put(event)

    def ask(self, question: Callable[[], T], *, timeout_seconds: float = 10.0) -> T:
        """Run a question on the runner's thread, between events, and return its answer."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._queue.put(run)
        return answer.result(timeout_seconds)

    def open_session(self, learner: str) -> Session:
        """Register a stream; its Hello event comes next."""
        session = Session(number=next(self._numbers), learner=learner)
        with self._lock:
            self.sessions[session.number] = session
        return session

    def close_session(self, session: Session, reason: str) -> None:
        """A stream is over."""
        with self._lock:
            self.sessions.pop(session.number, None)
        self.post(ev.Left(session=session.number, learner=session.learner, reason=reason))

    def living_incarnation(self, learner: str) -> int | None:
        """The incarnation whose session is open now; None: nobody."""
        with self._lock:
            entry = self._living.get(learner)
            return entry[0] if entry else None

    def attempt(self, round_: int, attempt: int) -> Attempt | None:
        """An attempt that is running or was committed lately."""
        with self._lock:
            return self._attempts.get((round_, attempt))

    def count_down(self, learner: str, size: int) -> None:
        """Bulk bytes were sent to a learner; "" for an observer."""
        with self._lock:
            self.bytes_down += size
        self.metrics.sent(learner.partition("/")[0], size)

    def stop(self) -> None:
        """Last snapshot, then end; blocks until it is durable (SIGTERM)."""
        self._queue.put(None)
        self._thread.join()
        self._sign("ending: last snapshot", ready=False)
        self._disk.shutdown(wait=True)
        if self.theta is not None and not self.engine.complete:
            self._write_snapshot(self.engine.step, *self._snapshot_state())
        self.record("stop", step=self.engine.step)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        wake = tick = time.monotonic()
        while True:
            event: ev.Event | Callable[[], None] | None
            try:
                event = self._queue.get(timeout=max(0.0, min(wake, tick) - time.monotonic()))
            except queue.Empty:
                event = ev.Tick()
            if event is None:
                return
            if callable(event):
                event()
            else:
                wake = self._handle(event, wake)
            # WakeAt moves on with every event: the reports of others must not hide a silent learner.
            if time.monotonic() >= tick:
                self._drop_stalled()
                wake = self._handle(ev.Tick(), wake)
                tick = time.monotonic() + TICK_SECONDS
                self._sign(self.engine.waiting_for() or f"serving, step {self.engine.step}")

    def _sign(self, why: str, *, ready: bool = True) -> None:
        """Leave a sign of life; the last one whatever the time."""
        now = time.monotonic()
        self._health.write(Health(at=now, ready=ready, why=why, progress_at=now), now=not ready)

    def _handle(self, event: ev.Event, wake: float) -> float:
        """Let the engine decide and carry it out; returns when it wants to be woken."""
        try:
            for decision in self.engine.handle(event, time.monotonic()):
                if isinstance(decision, ev.WakeAt):
                    wake = decision.seconds
                else:
                    self._carry_out(decision)
        except Exception:
            log.exception("event %r could not be handled; going on", type(event).__name__)
        return wake

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Log():
                self._log(decision)
            case ev.Admit():
                self._admit(decision)
            case ev.Close():
                error = _ERRORS.get(decision.reason, UnavailableError)(decision.detail)
                self._end(decision.session, error)
            case ev.AskInitial():
                self._say(decision.learner, pb.SyncerMessage(initialise=pb.Initialise()))
            case ev.SayReady():
                self._say(decision.learner, self._ready())
            case ev.SayComplete():
                if self.finished.is_set():
                    self._say(decision.learner, self._complete(self.engine.step))
            case ev.Announce():
                open_ = pb.Open(
                    step=decision.step, fragments=decision.fragments, steps=self.spec.steps
                )
                self._say_all(pb.SyncerMessage(open=open_))
            case ev.PullFrom():
                self._pull(decision)
            case ev.BeginMerge():
                self._begin(decision)
            case ev.AbortMerge():
                self._abort(decision)
            case ev.Commit():
                self._commit(decision)
            case ev.TakeSnapshot():
                self._disk.submit(self._snapshot, decision.step, *self._snapshot_state())
            case ev.Finish():
                self._disk.submit(self._finish, decision.step)
            case ev.WakeAt():
                raise AssertionError("taken by the loop")

    def _log(self, decision: ev.Log) -> None:
        self.record(decision.event, **decision.fields)
        if decision.event != "merge":
            log.info("%s %s", decision.event, decision.fields)
        else:
            self.bytes_up += int(decision.fields["bytesUp"])

    # ------------------------------------------------------------ sessions

    def _say(self, learner: str, message: pb.SyncerMessage) -> None:
        with self._lock:
            entry = self._living.get(learner)
            session = self.sessions.get(entry[1]) if entry else None
        if session is not None:
            session.outbox.put(message)

    def _say_all(self, message: pb.SyncerMessage) -> None:
        with self._lock:
            living = {number for _, number in self._living.values()}
            sessions = [s for n, s in self.sessions.items() if n in living]
        for session in sessions:
            session.outbox.put(message)

    def _end(self, number: int, error: DilocoError) -> None:
        with self._lock:
            session = self.sessions.get(number)
            for learner, (_, living) in list(self._living.items()):
                if living == number:
                    del self._living[learner]
        if session is not None:
            session.outbox.put(error)

    def _admit(self, decision: ev.Admit) -> None:
        with self._lock:
            self._living[decision.learner] = (decision.incarnation, decision.session)
        self._say(
            decision.learner,
            pb.SyncerMessage(
                welcome=pb.Welcome(
                    epoch=self.engine.epoch,
                    incarnation=decision.incarnation,
                    step=self.engine.step,
                    steps=self.spec.steps,
                    local_step=decision.local_step,
                    heartbeat_seconds=HEARTBEAT_SECONDS,
                    use_checkpoint=decision.use_checkpoint,
                    total_tokens=decision.total_tokens,
                )
            ),
        )

    def _ready(self) -> pb.SyncerMessage:
        held = self.theta.all() if self.theta else []
        versions = [pb.Version(epoch=h.version[0], step=h.version[1]) for h in held]
        return pb.SyncerMessage(ready=pb.Ready(versions=versions))

    @staticmethod
    def _complete(step: int) -> pb.SyncerMessage:
        return pb.SyncerMessage(complete=pb.Complete(step=step))

    # ------------------------------------------------------------ rounds

    def _pull(self, decision: ev.PullFrom) -> None:
        if self.theta is None:
            raise AssertionError("a round without parameters")
        attempt = Attempt(
            round=decision.round,
            attempt=decision.attempt,
            fragment=decision.fragment,
            version=(self.engine.epoch, decision.round),
        )
        with self._lock:
            self._attempts[(decision.round, decision.attempt)] = attempt
        versions = [pb.Version(epoch=e, step=s) for e, s in self.theta.versions(decision.fragment)]
        message = pb.SyncerMessage(
            pull=pb.Pull(
                round=decision.round,
                attempt=decision.attempt,
                fragment=decision.fragment,
                versions=versions,
            )
        )
        for learner in decision.learners:
            self._say(learner, message)
        # Now, not when all have answered: a far learner's request then travels while it encodes.
        result = pb.Result(
            round=decision.round, attempt=decision.attempt, fragment=decision.fragment
        )
        self._say_all(pb.SyncerMessage(result=result))

    def _begin(self, decision: ev.BeginMerge) -> None:
        attempt = self.attempt(decision.round, decision.attempt)
        if attempt is None or self.theta is None or self.layout is None:
            raise AssertionError("a merge without a pull")
        try:
            merge = self._merge_of(decision, attempt, self.theta, self.layout)
        except MemberError as error:
            self._drop(attempt, error.learner, error.reason, str(error))
            return
        attempt.begin(merge)

    def _merge_of(
        self, decision: ev.BeginMerge, attempt: Attempt, theta: Theta, layout: Layout
    ) -> FragmentMerge:
        held = theta.held(decision.fragment)
        return FragmentMerge(
            fragment=layout.fragments[decision.fragment],
            theta_N=held.theta_N,
            momentum_N=held.momentum_N,
            members=tuple(
                Member(
                    learner=m.learner,
                    weight=m.weight,
                    format=attempt.deliveries[m.learner].format,
                    norms=attempt.deliveries[m.learner].norms,
                )
                for m in decision.members
            ),
            merge=self.spec.merge,
            outer=OuterOptimizer(
                learning_rate=self.spec.outer_learning_rate,
                momentum=self.spec.outer_momentum,
                nesterov=self.spec.outer_nesterov,
            ),
            down=state.down_format(self.spec),
            window=max(4, MERGE_WINDOW_BYTES // state.chunk_bytes(self.spec)),
            buffers=self._buffers,
        )

    def _abort(self, decision: ev.AbortMerge) -> None:
        with self._lock:
            attempt = self._attempts.pop((decision.round, decision.attempt), None)
        if attempt is not None:
            attempt.finish(committed=False, why=decision.reason)

    def _commit(self, decision: ev.Commit) -> None:
        attempt = self.attempt(decision.round, decision.attempt)
        if not decision.changed:
            return  # its attempt was aborted: Θ stays as it is
        if attempt is None or self.theta is None:
            raise AssertionError("a commit without a merge")
        result = attempt.merge(timeout_seconds=0).result()
        self.theta.commit(
            decision.fragment,
            Held(theta_N=result.theta_N, momentum_N=result.momentum_N, version=attempt.version),
        )
        attempt.finish(committed=True)
        with self._lock:
            over = [key for key, a in self._attempts.items() if a.over]
            # Kept a little longer: a learner may ask again for a chunk that arrived damaged.
            for key in over[: -(self.spec.overlap + 1)]:
                del self._attempts[key]

    def _drop_stalled(self) -> None:
        with self._lock:
            attempts = list(self._attempts.values())
        for attempt in attempts:
            for learner in attempt.stalled(now=time.monotonic(), limit_seconds=self.stall_seconds):
                detail = f"nothing came from {learner} for {self.stall_seconds:g} s"
                self._drop(attempt, learner, "Stalled", detail)

    def _drop(self, attempt: Attempt, learner: str, reason: str, detail: str) -> None:
        self.post(
            ev.Dropped(
                learner=learner,
                round=attempt.round,
                attempt=attempt.attempt,
                reason=reason,
                detail=detail,
            )
        )

    # ------------------------------------------------------------ disk

    def _snapshot_state(self) -> tuple[Theta, dict[str, Any], dict[str, Any]]:
        """What a snapshot needs, taken on the runner's thread: references and small values only."""
        if self.theta is None:
            raise AssertionError("a snapshot without parameters")
        arrays, facts = self.theta.to_snapshot()
        meta = {
            "spec": self.spec.hash,
            "engine": self.engine.to_json(),
            "theta": facts,
            "eventsBytes": state.size_of(self.directory / "events.jsonl"),
        }
        return self.theta, arrays, meta

    def _snapshot(
        self, step: int, theta: Theta, arrays: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        done = False
        try:
            done = self._write_snapshot(step, theta, arrays, meta)
        finally:
            self.post(ev.SnapshotDone(step=step if done else None))

    def _write_snapshot(
        self, step: int, theta: Theta, arrays: dict[str, Any], meta: dict[str, Any]
    ) -> bool:
        begun = time.monotonic()
        try:
            state.write_snapshot(self.store, step, self.engine.epoch, arrays, meta)
        except StorageError as error:
            log.error("snapshot of step %d: %s", step, error)
            self.record("snapshot", step=step, ok=False, detail=str(error))
            return False
        self.snapshot_step = max(self.snapshot_step, step)
        self.record("snapshot", step=step, ok=True, seconds=round(time.monotonic() - begun, 3))
        return True

    def _finish(self, step: int) -> None:
        try:
            theta, arrays, meta = self.ask(self._snapshot_state)
            self._write_snapshot(step, theta, arrays, meta)
            tokens = self.ask(lambda: self.engine.tokens)
            self.model = state.export(self.directory, theta, self.spec, step=step, tokens=tokens)
            log.info("model of step %d is in %s", step, self.model[0])
        except StorageError as error:
            log.error("model of step %d: %s", step, error)
            self.record("export", step=step, ok=False, detail=str(error))
        self.finished.set()
        self.ask(lambda: self._say_all(self._complete(step)))

    def record(self, event: str, **fields: object) -> None:
        """One line of events.jsonl, and what the metrics make of it."""
        self.events.append({"epoch": self.engine.epoch, "event": event, **fields})
        self.metrics.event(event, fields, self.engine)
