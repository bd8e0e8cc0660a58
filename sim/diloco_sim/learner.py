"""
A simulated learner: a trainer process around the real `TrainerCore`, and its link process (uplink.py).

    <region>/<index>          the link process, which is what the network connects
    <region>/<index>+trainer  the trainer; the link process dies with it
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco.errors import EXIT_TRY_AGAIN
from diloco.model.fragments import Layout
from diloco.spec import RunSpec
from diloco_sim.behaviour import Behaviour
from diloco_sim.checkers.observations import Began, BlockTaken, LearnerMoment, Refused, Saved
from diloco_sim.clock import Process
from diloco_sim.faults import Kind
from diloco_sim.memory import U64, Model, PlainMemory, Received, ToyModel
from diloco_sim.network import Network
from diloco_sim.peer_streams import PeerDirectory
from diloco_sim.pipe import Pipe
from diloco_sim.uplink import Uplink
from diloco_worker.core import trainer as core
from diloco_worker.core.block_wait import BlockWait
from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.core.open_blocks import Data
from diloco_worker.core.recovery import LocalCheckpoint
from diloco_worker.link.peer_client import FAILED

TRAINER = "+trainer"
"""Suffix of the name of the trainer process."""

POLL_SECONDS = 0.2
"""As in diloco_worker/joined.py."""

CONNECT_SECONDS = 600.0
RESTART_SECONDS = 2.0
"""Pause of the supervisor after a process that ended."""
LEAVE_SECONDS = 5.0
"""Timeout for a link to leave the job, as in diloco_worker/ipc/link_process.py."""
CHECKPOINT_SECONDS = 0.2
"""From the start of a local checkpoint until it is durable."""

Checkpoint = tuple[core.SaveCheckpoint, Any, Received]
"""A local checkpoint: what it is of, the model, and what the model began from."""


class SimulatedLearner:
    """
    One learner over all its incarnations.

    Args:
        name: "<region>/<index>".
        network: connects it.
        server: the syncer.
        spec: of the job.
        layout: of the model.
        new_model: makes what it trains; called at each start of the trainer.
        source: of its random numbers.
        step_seconds: of one step at full speed.
        tokens: of one step.
        checkpoint_every: local steps between own checkpoints; None: none.
        observe: gets what checkers observe.
        data: what its loop takes blocks of; None: it takes none.
        block_steps: that it makes with a block.
        peers: it answers others that ask for the state of its optimizers, and asks them; the model is a toy.
    """

    def __init__(
        self, name: str, network: Network, server: Process, *, spec: RunSpec, layout: Layout,
        new_model: Callable[[], Model], source: random.Random, step_seconds: float, tokens: int,
        checkpoint_every: int | None, observe: Callable[[object], None],
        data: Data | None = None, block_steps: int = 1, peers: bool = False,
    ) -> None:  # fmt: skip
        clock = network.clock
        self.name, self.spec, self.layout = name, spec, layout
        self.link_process, self.process = clock.process(name), clock.process(name + TRAINER)
        self.behaviour = Behaviour()
        self.speed = 1.0
        """Factor of the duration of a step."""
        self.absences = 0
        """More than 0: it has not started yet, or has left for a while."""
        self.refused = self.done = False
        self.step_seconds = step_seconds
        self._network, self._server, self._source = network, server, source
        self._new_model = new_model
        self._tokens, self._checkpoint_every = tokens, checkpoint_every
        self._observe = observe
        self._data, self._block_steps = data, block_steps
        self._saved: Checkpoint | None = None
        """The newest own checkpoint; survives everything but faults of its disk."""
        self._first_saved: Checkpoint | None = None
        self._damaged = False
        """The newest own checkpoint cannot be loaded."""
        self._directory = PeerDirectory() if peers else None
        self._terminated = self._leaving = False
        self._continue: Callable[[], None] | None = None
        """What it does when the link has stated something, or after a while; None: it does not wait."""
        self._waits_since: float | None = None
        """For a block of data."""
        self._steps_left = 0
        """With the block in use."""
        self._polls = self._code = 0
        self._loss: float | None = None
        """The newest that is finite."""
        self.begun: Counter[int] = Counter()
        """Downloads of each fragment."""
        self.uplink: Uplink | None = None
        self.process.observers.append(self)
        self.link_process.observers.append(self)

    # ------------------------------------------------------------ processes

    def boot(self) -> None:
        """The trainer process starts."""
        if self.done or self.refused or self.absences:
            self.process.crash()
            return
        self._terminated = self._leaving = False
        self._continue, self._waits_since, self._steps_left = None, None, 0
        self.memory = PlainMemory(self.layout)
        self.model = self._new_model()
        if self._directory is not None:
            self._directory.sent = None
        self._show_checkpoints()
        found, saved = None, self._saved
        if saved is not None:
            found = LocalCheckpoint(
                local_step=saved[0].local_step,
                global_step=saved[0].global_step,
                run=saved[0].run,
                start=str(saved[0].facts.get("start", "")),
            )
        self.core = core.TrainerCore(
            name=self.name,
            fragments=len(self.layout.fragments),
            found=found,
            checkpoint_every=self._checkpoint_every,
            connect_timeout_seconds=CONNECT_SECONDS,
        )
        self._block_wait = BlockWait(self.core, name=self.name, timeout_seconds=CONNECT_SECONDS)
        self._from_link: Pipe[LinkState] = Pipe(self.process, self._line)
        if not self.link_process.alive:
            self.link_process.start()
        self.start_link()
        self._join()

    def start_link(self) -> None:
        """The link process starts; nothing without a trainer."""
        if not self.process.alive or self._leaving:
            return
        self._from_link = Pipe(self.process, self._line)
        self.uplink = Uplink(
            self.link_process, self._network, self._server, name=self.name, spec=self.spec,
            memory=self.memory, to_trainer=self._from_link, source=self._source,
            behaviour=self.behaviour, left=self._left, begun=self.begun,
            observe=self._observe, directory=self._directory,
        )  # fmt: skip
        self.uplink.from_trainer.offer(self.core.state())

    def moment(self) -> LearnerMoment:
        """What can be seen from outside."""
        uplink = self.uplink
        state = uplink.protocol.link_state if uplink is not None else None
        connected = state is not None and state.connected and state.phase is Phase.TRAINING
        versions = (
            tuple(inbox.version for inbox in self.memory.inboxes) if uplink is not None else ()
        )
        trains = self.process.alive and self.core.joined and not self.core.closed
        peers = uplink.peers if uplink is not None else None
        return LearnerMoment(
            connected=connected, done=self.done, versions=versions, begun={**self.begun},
            waits_since=self._waits_since if self.process.alive else None,
            local_step=self.core.ledger.local_step if trains else None,
            asks=state is not None and state.peer_pending,
            serves=peers is not None and peers.serving is not None,
        )  # fmt: skip

    @property
    def link_bytes(self) -> int:
        """Buffers of its transfers."""
        return self.uplink.transfers.buffers.held_bytes if self.uplink is not None else 0

    def terminate(self) -> None:
        """SIGTERM."""
        self._terminated = True

    def restart(self) -> None:
        """Its supervisor ends the trainer and starts it again."""
        if self.process.alive and not self._leaving:
            self._end(1)

    def find(self, kind: Kind) -> None:
        """The trainer ends, and finds this on its disk when it starts again; one of `faults.CHECKPOINT`."""
        match kind:
            case Kind.CHECKPOINT_LOST:
                self._saved = None
            case Kind.CHECKPOINT_OLD:
                self._saved = self._first_saved
            case Kind.CHECKPOINT_FOREIGN if self._saved is not None:
                saved, *rest = self._saved
                self._saved = (replace(saved, run="another"), *rest)
            case Kind.CHECKPOINT_DAMAGED:
                self._damaged = self._saved is not None
        self.restart()

    def come_back(self) -> None:
        """It is no longer absent."""
        self._terminated = False
        if not self._leaving:
            self._restart()

    def crashed(self, process: Process, *, power: bool) -> None:
        """The link dies with the trainer."""
        self.uplink = None
        if process is self.process:
            self._leaving = False
            self.link_process.crash(power=power)

    def paused(self, process: Process) -> None:
        """Its events wait."""

    def resumed(self, process: Process) -> None:
        """Its events follow."""

    def _end(self, code: int) -> None:
        """The trainer process ends; its supervisor starts another one if that can help."""
        self.process.crash()
        self._leaving = False
        if code == EXIT_TRY_AGAIN or not (self.done or self.refused or self.absences):
            clock = self.process.clock
            clock.at(clock.now + RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if not self.process.alive:
            self.process.start()
            self.boot()

    # ------------------------------------------------------------ joining

    def _await(self, then: Callable[[], None]) -> None:
        """Continue when the link has stated something, and after a while in any case."""
        self._continue = then
        self._polls += 1
        self.process.after(POLL_SECONDS, self._poll, self._polls)

    def _line(self) -> None:
        if (then := self._continue) is not None:
            self._continue = None
            then()

    def _poll(self, number: int) -> None:
        if number == self._polls:
            self._line()

    def _join(self) -> None:
        life = self.process.life
        while not (self.core.joined or self.core.closed):
            state = self._from_link.newest()
            actions = self.core.join(state, now=self.process.now, terminated=self._terminated)
            self._carry_out(actions)
            if self.process.life != life:
                return
            if any(isinstance(action, core.AwaitLink) for action in actions):
                self._await(self._join)
                return
        if self._directory is not None and self.core.joined:
            link = self.core.link_state
            self._observe(Began(self.name, link.incarnation, link.step, self._moments.tobytes()))
        self._next_step()

    # ------------------------------------------------------------ training

    def _next_step(self) -> None:
        life = self.process.life
        if not self.core.closed:
            state = self._from_link.newest()
            self._carry_out(self.core.check(state, terminated=self._terminated))
        if self.core.closed or self.process.life != life:
            return
        if self._data is not None and not self._steps_left:
            self._begin_block(self._block_wait.take(self._data))
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        self.model.begin(
            local_step=self.core.ledger.local_step, global_step=self.core.link_state.step
        )
        self.process.work(self.step_seconds * self.speed, self._stepped)

    def _begin_block(self, serial: int | None = None) -> None:
        """As `JoinedLearner.take_block`; the first step with the block follows."""
        life = self.process.life
        while True:
            state = self._from_link.newest()
            self._carry_out(self.core.check(state, terminated=self._terminated))
            if self.core.closed or self.process.life != life:
                return
            if serial is None:
                serial = self._block_wait.retry()
            if serial is not None:
                break
            if self._waits_since is None:
                self._waits_since = self.process.clock.now
            actions = self._block_wait.wait(now=self.process.now)
            self._carry_out(actions)
            if self.process.life != life:
                return
            if any(isinstance(action, core.AwaitLink) for action in actions):
                self._await(self._begin_block)
                return
        self._waits_since = None
        self._steps_left = self._block_steps
        self._observe(BlockTaken(self.name, serial, self.core.ledger.local_step))
        self._begin_step()

    def _stepped(self) -> None:
        loss = self.model.step()
        self._steps_left = max(0, self._steps_left - 1)
        now, life = self.process.now, self.process.life
        actions = self.core.step(self._tokens, self._from_link.newest(), now=now)
        copied = self._carry_out(actions)
        if self.process.life != life:
            return
        finite = math.isfinite(loss)
        self._loss = loss if finite else self._loss
        self._carry_out(self.core.copied(copied, loss=self._loss, finite=finite))
        self.core.line(now=now, queued_seconds=0.0)
        self.core.ended(now=now)
        self._next_step()

    # ------------------------------------------------------------ actions

    def _carry_out(self, actions: Sequence[core.Action]) -> list[int]:
        copied: list[int] = []
        for action in actions:
            match action:
                case core.CopyFragment(fragment, copy):
                    values = self.model.values[fragment]
                    if copy.base:  # who uploads Θ^(0) that is not finite is refused for good
                        values = self.behaviour.copied(values, copy.local_step)
                    self.memory.host(fragment)[:] = values
                    self.memory.copies[fragment] = copy
                    self.model.copied(fragment, copy.local_step)
                    copied.append(fragment)
                case core.ApplyFragment() if self.behaviour.stale:
                    pass
                case core.ApplyFragment(fragment):
                    self.memory.loaded.pop(fragment, None)
                    self._apply(fragment)
                case core.Send(state):
                    if self.uplink is not None:
                        self.uplink.from_trainer.offer(state)
                case core.SaveCheckpoint():
                    self._save(action)
                case core.CopyModel(copies):
                    for fragment, copy in enumerate(copies):
                        self.memory.host(fragment)[:] = self.model.values[fragment]
                        self.memory.copies[fragment] = copy
                case core.ApplyModel(fragments):
                    for fragment in fragments:
                        self._apply(fragment)
                case core.LoadCheckpoint():
                    self._load()
                case core.LoadOptimizers():
                    self._load_optimizers()
                case core.LoadPeerState():
                    self._load_peer_state()
                case core.Leave():
                    self._leave(action)
                case core.Exit(code, text):
                    self._exit(code, text)
                    return copied
                case core.AwaitLink() | core.AwaitCheckpoint() | core.ShowProgress():
                    pass
        return copied

    def _apply(self, fragment: int) -> None:
        self.model.values[fragment][:] = self.memory.inbox(fragment)
        if (version := self.memory.inbox_state(fragment).version) is not None:
            self.model.received(fragment, version)

    def _save(self, action: core.SaveCheckpoint) -> None:
        values, life = self.model.copy(), self.process.life
        received = self.memory.received(self.core.applied)
        if self._directory is not None:
            step, local_step, moments = (
                action.global_step,
                action.local_step,
                self._moments.tobytes(),
            )
            self._observe(Saved(self.name, local_step, step, moments))

        def durable() -> None:
            if self.process.life == life:
                self._saved, self._damaged = (action, values, received), False
                self._first_saved = self._first_saved or self._saved
                self._show_checkpoints()

        clock = self.process.clock
        clock.at(clock.now + CHECKPOINT_SECONDS, durable, process=self.process)
        self.core.checkpoint_started(action.local_step)

    def _load(self) -> None:
        if self._saved is None or self._damaged:
            self._carry_out(self.core.checkpoint_unusable("it is gone, or damaged"))
            return
        action, values, received = self._saved
        self.model.load(values)
        self.memory.loaded = {**received}
        facts: Mapping[str, Any] = action.facts
        self._carry_out(self.core.checkpoint_loaded(facts, now=self.process.now))

    def _load_optimizers(self) -> None:
        if self._saved is None or self._damaged:
            self._carry_out(self.core.optimizers_unusable("it is gone, or damaged"))
            return
        self.model.load_optimizers(self._saved[1])
        self._carry_out(self.core.optimizers_loaded())

    def _load_peer_state(self) -> None:
        if self._directory is None:
            raise AssertionError("peers are not used")
        try:
            self._moments[:] = self._directory.of_peer()
        except FAILED as error:
            self._carry_out(self.core.peer_state_unusable(str(error)))
        else:
            self._carry_out(self.core.peer_state_loaded())
        finally:
            self._directory.sent = None

    @property
    def _moments(self) -> U64:
        if not isinstance(self.model, ToyModel):
            raise TypeError("only a toy takes the state of its optimizers from a peer")
        return self.model.moments

    def _show_checkpoints(self) -> None:
        """To its link, which answers others with them."""
        if self._directory is not None:
            newest, first = (None if self._damaged else self._saved), self._first_saved
            self._directory.saved = (newest[0], newest[1][1]) if newest is not None else None
            self._directory.first = (first[0], first[1][1]) if first is not None else None

    def _exit(self, code: int, text: str) -> None:
        if code != EXIT_TRY_AGAIN:
            self.refused = True
            self._observe(Refused(self.name, text))
        self._code = code

    def _leave(self, action: core.Leave) -> None:
        self._leaving = True
        self._code = EXIT_TRY_AGAIN if self.core.link_state.refused_exit else 0
        if self.core.link_state.complete:
            self.done = True
        if self.uplink is not None:
            self.uplink.from_trainer.offer(action.state)
            self.process.after(LEAVE_SECONDS, self._left)
        else:
            self._left()

    def _left(self) -> None:
        """The link has left the job, or did not in time."""
        if self._leaving and self.process.alive:
            self._end(self._code)
