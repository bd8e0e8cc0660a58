"""
Carries the engine's decisions out: on the state, the sessions, the attempts, and through two ports.

    event ─► engine.handle(event, now) ─► decisions ─► state, sessions, attempts
                    ▲                          │       record (a line of events.jsonl)
                    └── Failed, if carrying ◄──┘       writer (snapshots, the model), which
                        one out raised                 reports back with events

No thread, clock, socket or disk: the runner and the simulator drive the same object. The caller
calls from one thread at a time; `facts`, `sessions` and `attempts` may be read by any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from diloco.codec import formats
from diloco.errors import BY_REASON, UnavailableError
from diloco.journal.records import Recorder
from diloco.model.fragments import CHUNK
from diloco.spec import RunSpec
from diloco_syncer import learner_messages
from diloco_syncer.attempts import Attempt, Attempts
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Applicant, Refused
from diloco_syncer.core.blocks import data_line
from diloco_syncer.core.contribution import Version
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging.buffers import Buffers
from diloco_syncer.merging.streaming import FragmentMerge
from diloco_syncer.sessions import Session, Sessions
from diloco_syncer.state import State, StateView
from diloco_syncer.storage.capture import ExportedModel, Snapshot, capture
from diloco_syncer.storage.parameters import FragmentParameters, Parameters

log = logging.getLogger(__name__)
T = TypeVar("T")

MERGE_WINDOW_BYTES = 16 << 20
"""How far a member may be ahead of the slowest, as encoded: bounds memory to this × members."""

_WARNINGS = frozenset({"error", "halt", "unchanged"})
"""Lines of events.jsonl after which a person must act, or that are a fault of the syncer."""

_FREQUENT = frozenset({"merge", "lease", "trained"})
"""Lines of events.jsonl that the log does not repeat."""

Fault = Callable[[str], None]
"""Called with a named point: the class of a decision before it is carried out, or of an event
before the engine processes it. A test raises there."""


class BrokenStateError(Exception):
    """
    Engine and Θ may disagree: nothing may be decided, merged or made durable from here on.

    The process must end; its successor resumes from the newest snapshot.
    """


class StorageWriter(Protocol):
    """Writes in the order of the calls, in the background; each call returns at once."""

    def snapshot(self, snapshot: Snapshot) -> None:
        """Make it durable together with the present size of events.jsonl; then SnapshotDone."""

    def export(self, parameters: Parameters, *, step: int, tokens: int) -> None:
        """Write the model; then Exported or ExportFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersReceived:
    """A learner has uploaded every part of Θ^(0)."""

    learner: str
    parameters: Parameters
    adopted: Callable[[], object] = lambda: None
    """Called once Θ exists: these parameters, or others that came before."""


Event = ev.Event | ParametersReceived


Observe = Callable[[ev.Decision], None]
"""Called with every decision before it is carried out."""


def no_fault(point: str) -> None:
    """Let everything happen."""


def not_observed(decision: ev.Decision) -> None:
    """An observer that does nothing."""


class Coordinator:
    """
    The syncer without threads.

    Args:
        state: new or resumed; belongs to the coordinator from now on.
        record: for lines of events.jsonl.
        writer: for snapshots and the exported model.
        fault: see `Fault`.
        observe: see `Observe`.
    """

    def __init__(
        self, state: State, *, record: Recorder, writer: StorageWriter, fault: Fault = no_fault,
        observe: Observe = not_observed,
    ) -> None:  # fmt: skip
        self.spec: RunSpec = state.engine.spec
        self.facts = StateView.of(state)
        self.sessions = Sessions()
        self.attempts = Attempts(keep_committed=self.spec.overlap + 1)
        self._state, self._record, self._writer = state, record, writer
        self._fault, self._observe = fault, observe
        self._buffers = Buffers()
        self._wake = float("-inf")
        self._failed: list[ev.Failed] = []
        self._broken = ""

    @property
    def vector_bytes(self) -> int:
        """Of the vectors that merges of this process have made and that still exist."""
        return self._buffers.held_bytes

    # ------------------------------------------------------------ entry

    def start(self, now: float) -> float:
        """Record the start; returns when a Tick is due."""
        engine = self._state.engine
        self._record(
            "start",
            step=engine.step,
            steps=self.spec.steps,
            fragments=self.spec.fragments,
            interval=self.spec.interval,
            quorum=self.spec.quorum,
            spec=self.spec.hash,
            learners=self.spec.learners,
        )
        self._record_blocks(engine.blocks.to_json())
        return now

    def handle(self, event: Event, now: float) -> float:
        """
        Process one event and carry out what follows from it.

        A decision that cannot be carried out does not stop the others of its batch. The engine
        receives a Failed for it before the next event, for which a Tick is due at once.

        Args:
            event: what happened.
            now: monotonic seconds; never smaller than in the call before.

        Returns:
            When the next Tick is due, in monotonic seconds.

        Raises:
            BrokenStateError: the engine raised, or a merge that it counts could not be committed.
        """
        if self._broken:
            raise BrokenStateError(self._broken)
        failed, self._failed = self._failed, []
        for each in (*failed, event):
            self._process(each, now)
        return now if self._failed else self._wake

    def admit(self, applicant: Applicant) -> Session:
        """
        Open a session for a learner that may join; its Hello event comes next.

        Raises:
            UnknownLearnerError, UnavailableError, MismatchError, ConfigError: it was refused.
        """
        engine = self._state.engine
        decision = self._state.admission.handle(
            applicant,
            layout_fixed=self._state.parameters is not None,
            issued={record.name: record.incarnation for record in engine.learners},
            limits=engine.limits,
            # A session that is open, and whose Hello the engine has not seen, counts too.
            holder=(engine.initialiser or "another learner") if len(self.sessions) else "",
            preceding=engine.initialisation.preceding([applicant.learner]),
        )
        if isinstance(decision, Refused):
            if decision.waits:
                engine.waits(applicant.learner)
            raise decision.error
        # Opened here, not by the caller: from now on this model counts.
        session = self.sessions.open(applicant.learner)
        self.facts = StateView.of(self._state)
        return session

    def ask(self, question: Callable[[State], T]) -> T:
        """The answer of a question to the state; it may change what the engine does not own."""
        answer = question(self._state)
        self.facts = StateView.of(self._state)
        return answer

    def last_snapshot(self) -> Snapshot | None:
        """The state between two events, for an orderly end; None: nothing is left to keep."""
        engine, parameters = self._state.engine, self._state.parameters
        if self._broken or parameters is None or engine.durability.durable_step >= engine.step:
            return None
        return self._capture(parameters, engine.to_json(), step=engine.step)

    # ------------------------------------------------------------ one event

    def _process(self, event: Event, now: float) -> None:
        for_engine = self._note(event)
        name = type(for_engine).__name__
        try:
            self._fault(name)
            decisions = self._state.engine.handle(for_engine, now)
        except Exception as error:
            raise self._break(f"the engine cannot process {name}: {error!r}") from error
        # Before any decision is carried out: a learner may react to it at once.
        self.facts = StateView.of(self._state)
        if isinstance(event, ParametersReceived):
            event.adopted()
        for decision in decisions:
            self._observe(decision)
            if isinstance(decision, ev.WakeAt):
                self._wake = decision.seconds
            else:
                self._attempt_to_carry_out(decision)

    def _note(self, event: Event) -> ev.Event:
        """Keep what an event brings besides its meaning for the engine."""
        match event:
            case ParametersReceived():
                if self._state.parameters is None:
                    if event.parameters.layout != self._state.admission.layout:
                        return ev.Tick()  # too late: the model of another learner counts meanwhile
                    self._state.parameters = event.parameters
                    self._state.admission.source = event.parameters.source
                return ev.Initialised(learner=event.learner)
            case ev.Exported():
                self._state.model = ExportedModel(
                    path=event.path, sha256=event.sha256, step=event.step
                )
        return event

    def _attempt_to_carry_out(self, decision: ev.Decision) -> None:
        name = type(decision).__name__
        try:
            self._fault(name)
            self._carry_out(decision)
        except Exception as error:
            if isinstance(decision, ev.Commit):
                # The engine counts this merge and its line is written: it cannot be undone.
                raise self._break(f"{decision} cannot be carried out: {error!r}") from error
            log.exception("%s could not be carried out", name)
            self._failed.append(ev.Failed(decision=decision, reason=repr(error)))

    def _break(self, reason: str) -> BrokenStateError:
        self._broken = reason
        return BrokenStateError(reason)

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Log():
                self._record(decision.event, **decision.fields)
                if decision.event not in _FREQUENT:
                    level = logging.WARNING if decision.event in _WARNINGS else logging.INFO
                    log.log(level, "%s %s", decision.event, decision.fields)
            case ev.Admit(learner=learner, incarnation=incarnation, session=number):
                self.sessions.make_current(learner, incarnation=incarnation, number=number)
                state = self._state
                message = learner_messages.welcome(
                    decision, state.engine, run=state.run, start_id=state.start_id,
                    snapshot_start_id=state.snapshot_start_id,
                )  # fmt: skip
                self.sessions.send(learner, message)
            case ev.Close():
                error = BY_REASON.get(decision.reason, UnavailableError)(decision.detail)
                self.sessions.end(decision.session, error)
            case ev.RequestInitial():
                self.sessions.send(decision.learner, learner_messages.INITIALISE)
            case ev.AnnounceReady():
                self.sessions.send(
                    decision.learner,
                    learner_messages.ready(self._state.parameters, decision.learner),
                )
            case ev.AnnounceComplete():
                self.sessions.send(
                    decision.learner, learner_messages.complete(self._state.engine.step)
                )
            case ev.AnnounceFragments():
                message = learner_messages.fragments(decision, steps=self.spec.steps)
                for learner in decision.learners:
                    self.sessions.send(learner, message)
            case ev.LeaseBlocks():
                self.sessions.send(decision.learner, learner_messages.leases(decision))
            case ev.Pull():
                self._pull(decision)
            case ev.ProbeLearner():
                self._probe(decision)
            case ev.BeginMerge():
                self._begin(decision)
            case ev.AbortMerge():
                self.attempts.abort(decision.round, decision.attempt, decision.reason)
            case ev.Commit():
                self._commit(decision)
            case ev.TakeSnapshot():
                self._record_blocks(decision.engine.get("blocks"))
                self._writer.snapshot(
                    self._capture(self._parameters(), decision.engine, step=decision.step)
                )
            case ev.Finish():
                self._writer.export(
                    self._parameters(), step=decision.step, tokens=self._state.engine.tokens
                )
            case ev.WakeAt() | ev.ShowVersion() | ev.BeginEpoch():
                raise AssertionError("handled with its batch, or by a replay")

    def _record_blocks(self, state: Mapping[str, Any] | None) -> None:
        for line in data_line(state):
            self._record(line.event, **line.fields)

    def _parameters(self) -> Parameters:
        if self._state.parameters is None:
            raise AssertionError("there are no parameters yet")
        return self._state.parameters

    # ------------------------------------------------------------ rounds

    def _pull(self, decision: ev.Pull) -> None:
        self.attempts.add(
            Attempt(
                round=decision.round,
                attempt=decision.attempt,
                fragment=decision.fragment,
                version=(self._state.engine.epoch, decision.round),
                members=decision.learners,
            )
        )
        self._send_pull(decision)

    def _send_pull(self, decision: ev.Pull) -> None:
        message = learner_messages.pull(decision, self._parameters())
        for learner in decision.learners:
            self.sessions.send(learner, message)
        # Now, not when all have contributed: a far learner's request travels while it encodes.
        self.sessions.send_all(learner_messages.result(decision))

    def _probe(self, decision: ev.ProbeLearner) -> None:
        message = learner_messages.pull(decision, self._parameters())
        self.attempts.add(
            Attempt(
                round=decision.round,
                attempt=decision.attempt,
                fragment=decision.fragment,
                version=(self._state.engine.epoch, decision.round),
                members=(decision.learner,),
                probe=True,
            )
        )
        self.sessions.send(decision.learner, message)

    def _begin(self, decision: ev.BeginMerge) -> None:
        attempt = self.attempts.get(decision.round, decision.attempt)
        if attempt is None:
            raise AssertionError("a merge without a pull")
        parameters, spec = self._parameters(), self.spec
        current = parameters.current(decision.fragment)
        fragment = parameters.layout.fragments[decision.fragment]
        chunk_bytes = formats.encoded_bytes(formats.of_fragment(spec.wire_up, fragment), CHUNK)
        merge = FragmentMerge(
            fragment=fragment,
            theta_N=current.theta_N,
            momentum_N=current.momentum_N,
            contributions=decision.contributions,
            merge=spec.merge,
            outer=OuterOptimizer(
                learning_rate=spec.outer_learning_rate,
                momentum=spec.outer_momentum,
                nesterov=spec.outer_nesterov,
            ),
            down=formats.of_fragment(spec.wire_down, fragment),
            window=max(4, MERGE_WINDOW_BYTES // chunk_bytes),
            buffers=self._buffers,
        )
        attempt.begin(merge)

    def _commit(self, decision: ev.Commit) -> None:
        if not decision.changed:
            return  # its attempt was aborted: Θ does not change
        attempt = self.attempts.get(decision.round, decision.attempt)
        merge = attempt.running() if attempt is not None else None
        if attempt is None or merge is None:
            raise AssertionError("a commit without a merge")
        result = merge.result()
        self._parameters().commit(
            decision.fragment,
            FragmentParameters(
                theta_N=result.theta_N, momentum_N=result.momentum_N, version=attempt.version
            ),
        )
        self.attempts.commit(attempt)
        self._announce(decision.fragment, attempt.version)

    def _announce(self, fragment: int, version: Version) -> None:
        self.sessions.send_all(learner_messages.committed(fragment, version))

    # ------------------------------------------------------------ disk

    def _capture(self, parameters: Parameters, engine: dict[str, object], *, step: int) -> Snapshot:
        epoch = self._state.engine.epoch
        return capture(parameters, engine, spec=self.spec, epoch=epoch, step=step)
