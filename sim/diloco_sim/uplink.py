"""
The link process of a simulated learner: the real `LinkProtocol`, encoder and placement on virtual streams.

What `Link` and `Session` do with threads and gRPC is done here with events of the virtual clock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from diloco.runtime.backoff import Backoff
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.behaviour import Behaviour
from diloco_sim.checkers.observations import Asked
from diloco_sim.clock import Process, Timer
from diloco_sim.faults import Kind
from diloco_sim.memory import PlainMemory
from diloco_sim.network import Network
from diloco_sim.peer_streams import PeerDirectory, SimulatedPeers, address_of
from diloco_sim.pipe import Pipe
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.stream_errors import CANCELLED, error_of
from diloco_sim.transfers import Channel, Ended, Transfers
from diloco_sim.wire import CONTROL
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.peer_recovery import PeerRecovery
from diloco_worker.link.link import GOODBYE_SECONDS, RECONNECT_SECONDS
from diloco_worker.link.peer_server import Facts
from diloco_worker.link.session import blocks, event_of, hello, lost_of, recovery, report
from diloco_worker.link.transfer import Identity
from diloco_worker.settings import LearnerSettings


class Uplink:
    """
    One link process, from its start to its end.

    Args:
        process: runs it.
        network: connects it.
        server: the syncer.
        name: of the learner.
        spec: of the job.
        memory: shared with the trainer.
        to_trainer: takes the states for the trainer.
        source: for back-off.
        behaviour: how it misbehaves.
        left: called when it has left the job.
        begun: counts the downloads of each fragment.
        observe: gets what checkers observe.
        directory: what it has for peers, and of them; None: peers are not used.
    """

    def __init__(
        self, process: Process, network: Network, server: Process, *, name: str, spec: RunSpec,
        memory: PlainMemory, to_trainer: Pipe[LinkState], source: random.Random, behaviour: Behaviour,
        left: Callable[[], None], begun: Counter[int], observe: Callable[[object], None],
        directory: PeerDirectory | None = None,
    ) -> None:  # fmt: skip
        self.process, self._observe = process, observe
        self.from_trainer: Pipe[TrainerState] = Pipe(process, self._read)
        self._spec, self._memory, self._to_trainer, self._left = spec, memory, to_trainer, left
        self._settings = LearnerSettings(
            job=spec.job, learner=name, syncer=server.name, spec=Path("spec.json")
        )
        self._control = Channel(process, network, server, CONTROL)
        self._session: _Session | None = None
        self.transfers = Transfers(
            process, network, server, memory, spec, behaviour, self._transfer_ended, begun, observe
        )
        self._identity = Identity(learner=name, epoch=0, incarnation=0)
        backoff = Backoff(*RECONNECT_SECONDS, source)
        self.protocol = LinkProtocol(
            slots=[self._slot(index) for index in range(len(memory.layout.fragments))],
            has_constants=bool(memory.layout.constants),
            next_delay=backoff.next,
            reset_delay=backoff.reset,
            syncer=server.name,
            recovery=PeerRecovery(interval=spec.interval) if directory is not None else None,
        )
        self._of_trainer: TrainerState | None = None
        self.peers: SimulatedPeers | None = None
        if directory is not None:
            self.peers = SimulatedPeers(
                process, network, name=name, spec=spec, layout=memory.layout, directory=directory,
                facts=self._facts(), behaviour=behaviour, post=self.handle,
            )  # fmt: skip
        self._reported: pb.Report | None = None
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._ended = False

    def _facts(self) -> Facts:
        """As `Link` states them."""
        return Facts(
            run=lambda: self.protocol.link_state.run,
            step=lambda: self.protocol.link_state.step,
            saves=lambda: self._of_trainer is not None and self._of_trainer.saves,
            step_seconds=lambda: self._of_trainer.step_seconds if self._of_trainer else 0.0,
            uploading=lambda: self.transfers.uploads.running > 0,
            wanted=lambda step: self.handle(ev.PeerAsks(step=step)),
        )

    def _slot(self, fragment: int) -> Slot:
        inbox = self._memory.inbox_state(fragment)
        return Slot(fragment=fragment, published=inbox.generation, version=inbox.version)

    # ------------------------------------------------------------ events

    def _read(self) -> None:
        state = self.from_trainer.newest()
        if state is not None:
            self._of_trainer = state
            self.handle(ev.TrainerUpdate(state=state))

    def _transfer_ended(self, ended: Ended) -> None:
        event = self.transfers.settle(ended)
        if event is not None:
            self.handle(event)
        if not self._ended:
            self.transfers.proceed()

    def session_event(self, session: _Session, event: ev.Event) -> None:
        """An event of a session; ignored if it was replaced."""
        if session is self._session:
            self.handle(event)

    def handle(self, event: ev.Event) -> None:
        """Decide and act, as `Link._handle` does."""
        if self._ended:
            return
        if isinstance(event, ev.Welcomed):
            if event.start_id != self._identity.start_id:
                # What of it the learner then keeps of another history, it may send whole.
                self._memory.loaded.clear()
            self._identity = Identity(
                learner=self._settings.learner, epoch=event.epoch, incarnation=event.incarnation,
                start_id=event.start_id,
            )  # fmt: skip
        now = self.process.now
        pending = self.protocol.handle(event, now)
        while pending:
            decision, *pending = pending
            if isinstance(decision, ev.Leave):
                self._leave(decision.reason)
                return
            if isinstance(decision, ev.Place):
                placed = self.transfers.placement.place(decision)
                pending = [*self.protocol.handle(placed, now), *pending]
            else:
                self._carry_out(decision)
        self._schedule()

    def _schedule(self) -> None:
        due = self.protocol.wake_at
        if due is None:
            return
        if self._timer is not None and self._timer.pending:
            if self._timer_at <= due:
                return
            self.process.clock.cancel(self._timer)
        self._timer_at = due
        self._timer = self.process.at(due, self._ticked)

    def _ticked(self) -> None:
        due = self.protocol.wake_at
        if due is not None and self.process.now >= due:
            self.handle(ev.Tick())
        else:
            self._schedule()

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.NotifyTrainer():
                self._to_trainer.offer(self.protocol.link_state)
            case ev.Connect():
                self._connect(decision.state)
            case ev.SendReport():
                if self._session is not None:
                    behaviour = self.transfers.behaviour
                    stated = behaviour.report(report(decision.state), self._reported)
                    self._reported = stated
                    self._session.state(pb.LearnerMessage(report=stated))
            case ev.SendBlocks():
                if self._session is not None:
                    message = blocks(decision.blocks)
                    self.transfers.behaviour.blocks(message)
                    self._session.state(pb.LearnerMessage(blocks=message))
            case ev.SendRecovery():
                if self._session is not None:
                    self._session.send(recovery(decision.recovery))
            case ev.SendHeartbeat():
                if self._session is not None:
                    self._session.send(pb.LearnerMessage(heartbeat=pb.Heartbeat()))
            case ev.CancelTransfers():
                self.transfers.cancel_all()
            case ev.Upload():
                self.transfers.upload(decision.pull, self._identity)
                breaks = self.transfers.behaviour.amounts.get(Kind.CONTROL_BREAKS)
                if breaks is not None:
                    self._control.sever(self.process.clock.now + breaks)
            case ev.UploadInitial():
                self.transfers.upload_initial(decision, self._identity)
            case ev.Download():
                self.transfers.download(decision, self._identity)
            case ev.Discard():
                self.transfers.discard(decision.staged)
            case ev.AskPeer(number=number, peer=peer, step=step) if self.peers is not None:
                self._observe(Asked(self._settings.learner, peer.learner, number, step))
                self.peers.ask(decision)
            case ev.DropPeer(number=number) if self.peers is not None:
                self.peers.drop(number)
            case ev.AskPeer() | ev.DropPeer():
                raise AssertionError("peers are not used")
            case ev.Place() | ev.Leave():
                raise AssertionError("handled by the event loop")

    # ------------------------------------------------------------ the session

    def _connect(self, state: TrainerState) -> None:
        if self._session is not None:
            self._session.close()
        settings, layout = self._settings, self._memory.layout
        address = address_of(settings.learner) if self.peers is not None else ""
        first = hello(settings, self._spec, layout, state, {"restarts": "0"}, peer_address=address)
        session = self._session = _Session(self, first)
        self._control.use(session.opened, session.failed)

    def _leave(self, reason: str) -> None:
        self._ended = True
        session = self._session
        if session is None:
            self._left()
            return
        session.send(pb.LearnerMessage(goodbye=pb.Goodbye(reason=reason)))
        session.finish()
        self.process.after(GOODBYE_SECONDS, self._left)

    def session_over(self, session: _Session) -> None:
        """A stream has ended."""
        if self._ended and session is self._session:
            self._left()


class _Session:
    """The learner's end of a session; newer reports and blocks replace those that were not sent yet."""

    def __init__(self, uplink: Uplink, first: pb.Hello) -> None:
        self._uplink = uplink
        self._first: list[pb.LearnerMessage] = [pb.LearnerMessage(hello=first)]
        """Messages for which there is no stream yet."""
        self._endpoint: Endpoint | None = None
        self._over = self._finishing = False
        self._unsent: dict[str, pb.LearnerMessage] = {}
        """Of each kind that is replaced, the newest."""

    def opened(self, connection: Connection) -> None:
        """There is a connection."""
        if self._over:
            return
        endpoint = self._endpoint = connection.open("Session", self)
        for message in self._first:
            endpoint.send(message.SerializeToString())
        if self._finishing:
            endpoint.finish()
        self._flush()

    def failed(self, reason: str) -> None:
        """There is no connection."""
        self.ended(reason)

    def send(self, message: pb.LearnerMessage) -> None:
        """Send a message."""
        if self._endpoint is None:
            self._first.append(message)
        else:
            self._endpoint.send(message.SerializeToString())

    def state(self, message: pb.LearnerMessage) -> None:
        """Send a report or blocks, in place of any that were not sent yet."""
        waits = bool(self._unsent)
        self._unsent[str(message.WhichOneof("kind"))] = message
        if not waits:
            self._flush()

    def _flush(self) -> None:
        if not self._unsent or self._endpoint is None or self._over:
            return
        if self._endpoint.outbox:  # the link is cut or slow
            self._uplink.process.after(0.05, self._flush)
            return
        for kind in sorted(self._unsent):
            self._endpoint.send(self._unsent.pop(kind).SerializeToString())

    def finish(self) -> None:
        """Send no more."""
        self._finishing = True
        if self._endpoint is not None:
            self._endpoint.finish()

    def close(self) -> None:
        """End the stream now."""
        self._over = True
        if self._endpoint is not None:
            self._endpoint.cancel(CANCELLED)

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        event = event_of(pb.SyncerMessage.FromString(data))
        if event is not None and not self._over:
            self._uplink.session_event(self, event)

    def finished(self) -> None:
        """See `Receiver`."""

    def writable(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        if self._over:
            return
        self._over = True
        lost = ev.SessionLost(text="the syncer ended the session")
        self._uplink.session_event(self, lost_of(error_of(reason)) if reason else lost)
        self._uplink.session_over(self)
