"""
The one thread that owns the syncer's state: a queue, a clock and the health file around the coordinator.

Everything that may block (disk, network, merging) happens on other threads, which `post` events.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from diloco.errors import StorageError, UnavailableError
from diloco.journal.background import BackgroundWriter
from diloco.runtime.health import Health, HealthFile
from diloco.spec import RunSpec
from diloco_syncer.attempts import Attempts
from diloco_syncer.coordinator import Coordinator, Event, Fault, no_fault
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Applicant
from diloco_syncer.core.replay import ReplayEngine
from diloco_syncer.metrics import Metrics
from diloco_syncer.replaying import ReplayCoordinator
from diloco_syncer.sessions import Session, Sessions
from diloco_syncer.state import State, StateView
from diloco_syncer.storage import capture
from diloco_syncer.storage.mirror import Mirror
from diloco_syncer.storage.model_output import Output
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.writer import Writer

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS = 0.5
"""The engine sees the time at least this often, however many events keep it busy."""

LAST_COPY_SECONDS = 15.0
"""How long the end waits for the last snapshot to be copied to the object store."""

LAST_HEALTH_SECONDS = 1.0
"""How long the end waits for the disk to take the last state of the health file."""

_COUNTED = frozenset({"join", "leave", "merge"})
"""Lines of events.jsonl after which the metrics of the state are set at once."""


class Runner:
    """
    Feeds events to the coordinator on one thread.

    Other threads use `post`, `ask`, `admit` and `record`, read `facts`, and share `sessions`,
    `attempts` and `metrics`, which are thread-safe.

    Args:
        state: new or resumed; from `start` on it belongs to the runner's thread.
        directory: the run directory (events.jsonl, snapshots/, model/).
        store: where snapshots go.
        events: events.jsonl.
        metrics: counts what is recorded.
        health: written after each tick.
        mirror: copies snapshots; None: it does not exist.
        output: where the model is copied; None: nowhere.
        on_failure: called once if the thread ends with `failure`; any thread.
        fault: see `coordinator.Fault`.
    """

    def __init__(
        self, state: State, directory: Path, *, store: Store, events: BackgroundWriter, metrics: Metrics,
        health: HealthFile | None = None, mirror: Mirror | None = None, output: Output | None = None,
        on_failure: Callable[[], None] = lambda: None, fault: Fault = no_fault,
    ) -> None:  # fmt: skip
        self.spec: RunSpec = state.engine.spec
        self.metrics = metrics
        self.failure: str | None = None
        """Why the thread ended by itself: the process must end without another snapshot."""
        self._state, self._directory, self._events = state, directory, events
        self._health, self._on_failure = health or HealthFile(None), on_failure
        self._queue: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = Writer(
            self.spec, directory, store, record=self.record, post=self.post, journal=events,
            run=state.run, mirror=mirror, output=output,
        )  # fmt: skip
        self._mirror, self._output = mirror, output
        made = ReplayCoordinator if isinstance(state.engine, ReplayEngine) else Coordinator
        self._coordinator = made(state, record=self.record, writer=self._writer, fault=fault)
        self._wake = 0.0
        self._metrics_due = False
        self._unreported = ""
        self._deciding = True
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)

    def start(self) -> None:
        """Begin to process events."""
        self._wake = self._coordinator.start(time.monotonic())
        self._thread.start()
        if self._mirror is not None:
            self._mirror.start()

    def stop_deciding(self) -> None:
        """
        Process no event from now on; questions are answered until `stop`.

        Called before streams are ended: no learner is at fault for what breaks because of it.
        """
        self._deciding = False

    def stop(self) -> None:
        """End, then write the last snapshot; blocks until it is durable (SIGTERM)."""
        self._queue.put(None)
        self._thread.join()
        if self._output is not None:
            self._output.stop()
        if self.failure is not None:
            return  # a snapshot from a state that may be broken must not replace a good one
        self._report(lambda: self._write_health("stopping: writing the last snapshot", ready=False))
        self._writer.close()
        last = self._coordinator.last_snapshot()
        if last is not None:
            with contextlib.suppress(StorageError):  # recorded; earlier snapshots are intact
                self._writer.write(capture.with_position(last, self._events.position()))
        if self._mirror is not None:
            self._report(lambda: self._write_health("stopping: copying it", ready=False))
            self._mirror.stop(LAST_COPY_SECONDS)
        self.record("stop", step=self.facts.step)
        self._health.settle(LAST_HEALTH_SECONDS)

    # ------------------------------------------------------------ for other threads

    @property
    def facts(self) -> StateView:
        """One consistent view of the state."""
        return self._coordinator.facts

    @property
    def sessions(self) -> Sessions:
        """The open streams of learners."""
        return self._coordinator.sessions

    @property
    def attempts(self) -> Attempts:
        """The attempts of rounds that are running or were committed lately."""
        return self._coordinator.attempts

    def post(self, event: Event) -> None:
        """Queue an event; returns at once."""
        self._queue.put(event)

    def ask(self, question: Callable[[State], T], *, timeout_seconds: float = 10.0) -> T:
        """
        Run a question on the runner's thread, between events, and return its answer.

        Raises:
            UnavailableError: not within the timeout; the question will not run. Any error of the
                question itself.
        """
        return self._call(lambda: self._coordinator.ask(question), timeout_seconds)

    def admit(self, applicant: Applicant) -> Session:
        """
        Open a session for a learner that may join; its Hello event comes next.

        Raises:
            UnknownLearnerError, MismatchError, ConfigError: it was refused.
        """
        return self._call(lambda: self._coordinator.admit(applicant), 10.0)

    def record(self, event: str, **fields: object) -> None:
        """Append a line to events.jsonl and count it."""
        self._events.append({"epoch": self._state.engine.epoch, "event": event, **fields})
        self._metrics_due = self._metrics_due or event in _COUNTED
        try:
            self.metrics.event(event, fields)
        except Exception:  # a metric that fails must not undo what it counts
            log.exception("event %s could not be counted in the metrics", event)

    def _call(self, function: Callable[[], T], timeout_seconds: float) -> T:
        """Run a function on the runner's thread; its error is the caller's, not the thread's."""
        if self.failure is not None:
            raise UnavailableError("the syncer is stopping; connect again")
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                value = function()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        self._queue.put(run)
        try:
            return answer.result(timeout_seconds)
        except TimeoutError:
            if answer.cancel():
                raise UnavailableError(
                    f"the syncer was busy for {timeout_seconds:g} s; try again"
                ) from None
            return answer.result()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # A syncer without this thread would look alive and decide nothing: it must end.
            self.failure = f"{type(error).__name__}: {error}"
            log.critical("the syncer ends: %s", self.failure, exc_info=True)
            self._on_failure()

    def _loop(self) -> None:
        wake = tick = self._wake
        while True:
            event: Event | Callable[[], None] | None
            try:
                pause = max(0.0, min(wake, tick) - time.monotonic()) if self._deciding else None
                event = self._queue.get(timeout=pause)
            except queue.Empty:
                event = ev.Tick()
            if event is None:
                return
            if callable(event):
                event()
            if not self._deciding:
                continue
            if not callable(event):
                wake = self._coordinator.handle(event, time.monotonic())
            # WakeAt moves with every event: the reports of others must not hide a silent learner.
            ticked = time.monotonic() >= tick
            if ticked:
                wake = self._coordinator.handle(ev.Tick(), time.monotonic())
                tick = time.monotonic() + TICK_SECONDS
            if ticked or self._metrics_due:
                self._metrics_due = False
                self._report(lambda: self.metrics.update(self._state.engine))
            if ticked:
                self._report(self._write_state)

    def _report(self, action: Callable[[], None]) -> None:
        """Metrics and the health file: whatever is wrong with them, decisions continue."""
        try:
            action()
        except Exception as error:
            if self._unreported != (reason := repr(error)):  # else twice a second
                log.exception("metrics or health could not be updated; decisions continue")
            self._unreported = reason

    def _write_state(self) -> None:
        engine = self._state.engine
        self._write_health(engine.waiting_for() or f"serving, step {engine.step}")

    def _write_health(self, why: str, *, ready: bool = True) -> None:
        now = time.monotonic()
        self._health.write(Health(at=now, ready=ready, why=why, progress_at=now), now=not ready)
