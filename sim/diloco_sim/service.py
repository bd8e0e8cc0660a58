"""
The gRPC services of a simulated syncer: sessions, uploads and downloads over simulated streams.

Limits of threads and streams (rpc/call_limits.py) and identities (rpc/authorizer.py) are not simulated.
"""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from diloco.codec import frames
from diloco.errors import DamagedError, DilocoError, ProtocolError
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.checkers.observations import Received, ReportArrived
from diloco_sim.clock import Process, Timer
from diloco_sim.disk import Completion, SimulatedDisk
from diloco_sim.stream import Endpoint
from diloco_sim.stream_errors import CANCELLED, reason_of
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Applicant
from diloco_syncer.core.engine import HEARTBEAT_SECONDS
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc import telemetry
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.rpc.receiver import UploadReceiver
from diloco_syncer.rpc.source import DownloadSource, open_download
from diloco_syncer.rpc.transfers import Host, Waiting, unpack
from diloco_syncer.sessions import Session

HELD_MESSAGES = 64
"""Of a session that its connection takes before it carries them: the window of gRPC's flow control, about."""


class Server(Host, Protocol):
    """The syncer as the service uses it."""

    process: Process
    disk: SimulatedDisk
    observe: Callable[[object], None]

    def admit(self, applicant: Applicant) -> Session:
        """Open a session; raises a DilocoError if it is refused."""

    def next_incarnation(self) -> int:
        """A number never used before; uses the disk."""

    def run(self) -> None:
        """Handle all events and what follows from them now."""


class _Transfer(Protocol):
    def proceed(self) -> bool:
        """Continue if that is possible now; whether anything happened."""


class Service:
    """All open streams of one start of a syncer."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.refusals = RefusalLog(server.record, clock=lambda: server.process.now)
        self.initial = InitialParameters(server)
        self.sessions: dict[int, SessionStream] = {}
        """By number."""
        self.transfers: dict[_Transfer, None] = {}
        """Those that wait for the syncer."""
        self.changed = False
        """An attempt or a merge has changed since they were asked whether they can continue."""

    def opened(
        self, endpoint: Endpoint, method: str
    ) -> SessionStream | UploadStream | DownloadStream:
        """See `Listener`."""
        if method == "Session":
            return SessionStream(self, endpoint)
        return (UploadStream if method == "Upload" else DownloadStream)(self, endpoint)

    def proceed(self) -> bool:
        """Send what the coordinator queued, and continue transfers; whether anything happened."""
        for session in [s for s in self.sessions.values() if s.outbox.qsize()]:
            session.send()
        if not self.changed:
            return False
        self.changed = False
        happened = [transfer.proceed() for transfer in list(self.transfers)]
        return any(happened)


class SessionStream:
    """One session: what `ControlService.session` does."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._server, self._endpoint = service, service.server, endpoint
        self._session: Session | None = None
        self.outbox: queue.SimpleQueue[pb.SyncerMessage | DilocoError | None]
        """Of the session, once it has joined."""
        self._hello: pb.Hello | None = None
        self._joined = False
        self._incarnation = 0
        self._waiting: deque[bytes] = deque()
        """Messages that came before the Hello was handled."""
        self._over = False
        self._left = False
        self._sent_at = 0.0

    @property
    def unsent(self) -> int:
        """Messages that wait for the coordinator's turn, or for the connection."""
        return self.outbox.qsize() + len(self._endpoint.outbox)

    # ------------------------------------------------------------ messages

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        if self._over:
            return
        if self._hello is None:
            self._begin(data)
        elif not self._joined:
            self._waiting.append(data)
        else:
            self._receive(data)
        self._server.run()

    def finished(self) -> None:
        """See `Receiver`."""
        self.ended("StreamEnded")

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        if self._over:
            return
        self._over = True
        self._endpoint.end()
        if self._joined:
            self._leave("StreamEnded")
        self._server.run()

    def writable(self) -> None:
        """See `Receiver`; messages queue in any case."""

    # ------------------------------------------------------------ joining

    def _begin(self, data: bytes) -> None:
        learner = ""
        try:
            self._hello = telemetry.hello(data)
            learner = self._hello.learner
            applicant = telemetry.applicant(self._hello)
            _ = applicant.model
            self._session = self._server.admit(applicant)
        except DilocoError as error:
            self._service.refusals.refuse("a session", learner, error)
            self._end(error)
            return
        if self._hello.incarnation:
            self._join(self._hello.incarnation)
            return
        done = self._server.disk.call(self._server.next_incarnation)
        process = self._server.process
        process.clock.at(done.done_at, self._numbered, done, process=process)

    def _numbered(self, done: Completion[int]) -> None:
        if done.value is not None:
            self._join(done.value)
        elif isinstance(done.error, DilocoError) and self._session is not None:
            self._server.sessions.close(self._session)
            self._service.refusals.refuse("a session", self._session.learner, done.error)
            self._end(done.error)
        else:
            raise AssertionError("no incarnation") from done.error
        self._server.run()

    def _join(self, incarnation: int) -> None:
        session, hello = self._session, self._hello
        if session is None or hello is None:
            raise AssertionError("a session without a Hello")
        self._joined, self._incarnation = True, incarnation
        self.outbox = session.outbox
        self._service.sessions[session.number] = self
        self._server.post(telemetry.joined(hello, session=session.number, incarnation=incarnation))
        if self._over:  # the learner has gone meanwhile
            self._leave("StreamEnded")
            return
        self._beat()
        while self._waiting and not self._over:
            self._receive(self._waiting.popleft())

    def _receive(self, data: bytes) -> None:
        session, server = self._session, self._server
        if session is None:
            raise AssertionError("a message before the Hello")
        self._show(data, session.learner)
        try:
            event = telemetry.received(
                data, session=session.number, learner=session.learner, fragments=server.spec.fragments
            )  # fmt: skip
        except DilocoError as error:
            self._service.refusals.refuse("a message", session.learner, error)
            self._leave(error.reason)
            self._end(error)
            return
        if isinstance(event, ev.Left):
            self._leave(event.reason)
            self._end(None)
        else:
            server.post(event)

    def _show(self, data: bytes, learner: str) -> None:
        """For the checkers: a Report as it arrived, read independently of the syncer."""
        try:
            message = pb.LearnerMessage.FromString(data)
        except DecodeError:
            return
        if message.HasField("report"):
            self._server.observe(ReportArrived(learner, self._incarnation, message.report))

    # ------------------------------------------------------------ the other direction

    def send(self) -> None:
        """Send what the coordinator queued."""
        session = self._session
        if session is None or self._over:
            return
        while not self._over and len(self._endpoint.outbox) < HELD_MESSAGES:
            try:
                message = session.outbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, pb.SyncerMessage):
                self._send(message)
            else:
                self._leave("StreamEnded")
                self._end(message)

    def _send(self, message: pb.SyncerMessage) -> None:
        self._sent_at = self._server.process.now
        self._endpoint.send(message.SerializeToString())

    def _beat(self) -> None:
        """Send a heartbeat if there was nothing else to send for a while."""
        if self._over:
            return
        process = self._server.process
        due = self._sent_at + HEARTBEAT_SECONDS
        if process.now >= due:
            self._send(pb.SyncerMessage(heartbeat=pb.Heartbeat()))
            due = process.now + HEARTBEAT_SECONDS
        process.at(due, self._beat)

    # ------------------------------------------------------------ the end

    def _leave(self, reason: str) -> None:
        session = self._session
        if session is None or self._left:
            return
        self._left = True
        self._server.sessions.close(session)
        self._service.sessions.pop(session.number, None)
        left = ev.Left(session=session.number, learner=session.learner, reason=reason)
        self._server.post(left)

    def _end(self, error: DilocoError | None) -> None:
        self._over = True
        self._endpoint.end(reason_of(error) if error is not None else "")


class UploadStream:
    """One upload: what `Uploads.upload` does."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._server, self._endpoint = service, service.server, endpoint
        self._messages: deque[bytes | None] = deque()
        self._over = False
        self._timer: Timer | None = None
        self._timer_seconds = 0.0
        self._header: bulk.UploadHeader | None = None
        self._chunks: dict[int, bytes] = {}
        # A circle would keep the merge in memory, as no real upload does.
        itself = weakref.ref(self)
        self._receiver = UploadReceiver(
            service.server,
            service.initial,
            authorise=lambda learner: None,
            cancel=lambda: stream._cancel() if (stream := itself()) is not None else None,
            refuse=partial(service.refusals.refuse, "an upload"),
        )

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        self._messages.append(data)
        self.proceed()
        self._server.run()

    def finished(self) -> None:
        """See `Receiver`."""
        self._messages.append(None)
        self.proceed()
        self._server.run()

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        if not self._over:
            self._close()
            self._receiver.lost()
            self._server.run()

    def writable(self) -> None:
        """See `Receiver`."""

    def proceed(self) -> bool:
        """Receive as many messages as possible now; whether anything happened."""
        happened = False
        receiver, now = self._receiver, self._server.process.now
        waiting = receiver.waiting
        if waiting is not None and not self._over:
            if _has_happened(waiting):  # what it adds now makes room for others
                happened = self._service.changed = True
            self._reply(receiver.resume(now))
        while self._messages and not self._over and receiver.waiting is None:
            message = self._messages.popleft()
            if self._keep(message) == frames.Kind.CHUNK:
                self._service.changed = True
            self._reply(receiver.receive(message, now))
            happened = True
        if receiver.waiting is None and not self._over:
            receiver.awaits(now)
        if not self._over:
            self._wait()
        return happened or self._over

    def _wait(self) -> None:
        """Ask again later, as the thread of a stream does, and read no more until then."""
        waiting = self._receiver.waiting
        if waiting is None:
            self._service.transfers.pop(self, None)
            return
        self._service.transfers[self] = None
        if self._timer is not None and self._timer.pending:
            if self._timer_seconds <= waiting.seconds:
                return
            self._server.process.clock.cancel(self._timer)
        self._timer = self._server.process.after(waiting.seconds, self._resume)
        self._timer_seconds = waiting.seconds

    def _resume(self) -> None:
        self.proceed()
        self._server.run()

    def _reply(self, replies: list[bytes]) -> None:
        for reply in replies:
            self._endpoint.send(reply)
        if self._receiver.done and not self._over:
            self._close()
            self._endpoint.end()

    def _cancel(self) -> None:
        if not self._over:
            self._close()
            self._endpoint.cancel(CANCELLED)
            self._receiver.lost()

    def _close(self) -> None:
        self._over = True
        self._service.transfers.pop(self, None)
        if self._timer is not None:
            self._server.process.clock.cancel(self._timer)

    def _keep(self, message: bytes | None) -> frames.Kind | None:
        """For the checkers: what was received, read independently of the receiver; returns its kind."""
        if message is None:
            return None
        try:
            envelope = frames.unpack(message)
        except (DamagedError, ProtocolError):
            return None
        if envelope.kind == frames.Kind.HEADER and self._header is None:
            self._header = bulk.UploadHeader.FromString(bytes(envelope.payload))
            self._server.observe(Received(self._header, self._chunks))
        elif envelope.kind == frames.Kind.CHUNK:
            self._chunks.setdefault(envelope.index, bytes(envelope.payload))
        return envelope.kind


def _has_happened(waiting: Waiting) -> bool:
    """Whether a thread that waits for this would continue now."""
    try:
        return bool(waiting.until(0.0))
    except DilocoError:
        return True  # which `resume` raises again, and refuses the upload


class DownloadStream:
    """One download: what `Downloads.download` does."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._server, self._endpoint = service, service.server, endpoint
        self._source: DownloadSource | None = None
        self._over = self._blocked = False
        self._timer: Timer | None = None

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        if self._source is not None or self._over:
            return
        try:
            self._source = open_download(self._server, unpack(data, bulk.DownloadRequest))
        except DilocoError as error:
            self._close()
            self._endpoint.end(reason_of(error))
            return
        self.proceed()

    def finished(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        self._close()

    def writable(self) -> None:
        """See `Receiver`."""
        self._blocked = False
        self.proceed()

    def proceed(self) -> bool:
        """Send what there is; whether anything happened."""
        source, happened = self._source, False
        while source is not None and not self._over and not self._blocked:
            frame = source.next_frame(self._server.process.now)
            if frame is not None:
                happened = True
                self._blocked = not self._endpoint.send(frame)
            elif source.over:
                self._close()
                self._endpoint.end()
            elif (waiting := source.waiting) is not None:
                self._service.transfers[self] = None
                if self._timer is None or not self._timer.pending:
                    self._timer = self._server.process.after(waiting.seconds, self.proceed)
                return happened
        return happened

    def _close(self) -> None:
        self._over = True
        self._service.transfers.pop(self, None)
        if self._timer is not None:
            self._server.process.clock.cancel(self._timer)
