"""
Uploads and downloads of a simulated link: what `BulkTransfers`, `Uploader` and `fetch` do on threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from diloco.errors import DilocoError
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_sim.behaviour import Behaviour
from diloco_sim.checkers.observations import Encoded
from diloco_sim.clock import Process, Timer
from diloco_sim.faults import Kind
from diloco_sim.memory import NOT_KNOWN, PlainMemory
from diloco_sim.network import Network
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.stream_errors import CANCELLED, error_of
from diloco_sim.wire import BULK
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Staged
from diloco_worker.link.assembly import Assembly, Outcome
from diloco_worker.link.buffers import BufferPool, most_idle_bytes, most_transfers
from diloco_worker.link.download import UNDECIDED_SECONDS, silent_seconds
from diloco_worker.link.encoder import REPORT_SECONDS, Encoder
from diloco_worker.link.placement import Placement
from diloco_worker.link.schedule import Schedule
from diloco_worker.link.transfer import CancelToken, Identity, initial_ended
from diloco_worker.link.upload_messages import UploadMessages

REPORT_POLL_SECONDS = 0.02
"""Longer than that of the programs: each costs an event."""

ENCODE_SECONDS = 0.002
"""From a pull to the first byte of the upload, at full speed."""


class Job(Protocol):
    """A transfer that was not started yet."""

    def start(self, cancel: CancelToken) -> None:
        """Begin; it ends with `Ended`, also if it is cancelled."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer has ended."""

    schedule: Schedule[Job]
    cancel: CancelToken
    event: ev.Event | None


class Channel:
    """
    A connection that is made when it is needed.

    Args:
        process: the client.
        network: connects it.
        server: the process to connect to.
        kind: CONTROL or BULK.
    """

    def __init__(self, process: Process, network: Network, server: Process, kind: int) -> None:
        self._process, self._network, self._server, self._kind = process, network, server, kind
        self._connection: Connection | None = None
        self._connecting = False
        self._waiting: list[tuple[Callable[[Connection], None], Callable[[str], None]]] = []

    def use(self, opened: Callable[[Connection], None], failed: Callable[[str], None]) -> None:
        """Call `opened` with a connection, or `failed` with a reason; perhaps at once."""
        if self._connection is not None and self._connection.alive:
            opened(self._connection)
            return
        self._waiting.append((opened, failed))
        if not self._connecting:
            self._connecting = True
            self._network.connect(
                self._process, self._server, self._kind, opened=self._opened, failed=self._failed
            )

    def sever(self, when: float) -> None:
        """Reset the present connection, if there is one, at this virtual time."""
        if self._connection is not None:
            self._connection.sever(when)

    def _opened(self, connection: Connection) -> None:
        self._connection, self._connecting = connection, False
        waiting, self._waiting = self._waiting, []
        for opened, _ in waiting:
            opened(connection)

    def _failed(self, reason: str) -> None:
        self._connecting = False
        waiting, self._waiting = self._waiting, []
        for _, failed in waiting:
            failed(reason)


class Transfers:
    """
    Runs transfers; each end is passed to `ended`, soon.

    Args:
        process: of the link.
        network: connects it.
        server: the syncer.
        memory: shared with the trainer.
        spec: of the job.
        behaviour: how it misbehaves.
        ended: takes the ends; pass each to `settle`.
        begun: counts the downloads of each fragment.
        observe: gets `Encoded`.
    """

    def __init__(
        self, process: Process, network: Network, server: Process, memory: PlainMemory, spec: RunSpec,
        behaviour: Behaviour, ended: Callable[[Ended], None], begun: Counter[int], observe: Callable[[object], None],
    ) -> None:  # fmt: skip
        self.process, self.behaviour, self.begun = process, behaviour, begun
        self._memory, self._ended, self._observe = memory, ended, observe
        self.buffers = BufferPool(most_idle_bytes=most_idle_bytes(memory.layout, spec))
        self.placement = Placement(memory, spec, self.buffers)
        self.encoder = Encoder(memory, spec, self.buffers)
        # Two connections: a download that waits for a merge must not delay an upload.
        self.up = Channel(process, network, server, BULK)
        self.down = Channel(process, network, server, BULK)
        self.uploads = Schedule[Job](most_transfers(spec), _start)
        self.downloads = Schedule[Job](most_transfers(spec), _start)

    def upload(self, pull: ev.Pulled, identity: Identity) -> None:
        """Answer a pull."""
        self.uploads.add(pull.fragment, _Upload(self, pull, identity))

    def observe_encoded(self, header: bulk.UploadHeader) -> None:
        """An upload was encoded just now: the inbox still has the base of a delta."""
        if header.HasField("base"):
            base = header.base.epoch, header.base.step
            base_N = self._memory.inbox(header.fragment)
        elif header.content == bulk.WHOLE:
            base, base_N = self._memory.loaded.get(header.fragment, NOT_KNOWN)
        else:
            return
        self._observe(Encoded(header, base, base_N))

    def upload_initial(self, decision: ev.UploadInitial, identity: Identity) -> None:
        """Upload Θ^(0)."""
        self.uploads.add("initial", _InitialUpload(self, decision, identity))

    def download(self, request: ev.Download, identity: Identity) -> None:
        """Download a fragment or the constants."""
        model = request.round == 0 and request.exact
        job = _Download(self, request, identity)
        self.downloads.add((request.fragment, model), job, round=request.round)

    def cancel_all(self) -> None:
        """Cancel every transfer."""
        self.uploads.cancel_all()
        self.downloads.cancel_all()

    def settle(self, ended: Ended) -> ev.Event | None:
        """The event of a transfer that has ended; None if there is none or it was cancelled."""
        counts = ended.schedule.ended(ended.cancel)
        if not counts and isinstance(ended.event, ev.Downloaded) and ended.event.staged:
            self.discard(ended.event.staged)
        return ended.event if counts else None

    def proceed(self) -> None:
        """Start the transfers that waited for others to end."""
        self.uploads.proceed()
        self.downloads.proceed()

    def discard(self, staged: Staged) -> None:
        """Release a staged fragment."""
        self.placement.discard(staged)

    def end(self, schedule: Schedule[Job], cancel: CancelToken, event: ev.Event | None) -> None:
        """A transfer has ended."""
        clock = self.process.clock
        clock.at(clock.now, self._ended, Ended(schedule, cancel, event), process=self.process)


def _start(job: Job, cancel: CancelToken) -> None:
    job.start(cancel)


def _forget(cancel: CancelToken) -> None:
    """Stopping it no longer has an effect. What it refers to refers back, and would wait for the garbage collection."""
    cancel.on_stop(lambda: None)


class _Sending:
    """One upload stream, until the syncer has all of the upload."""

    def __init__(
        self, transfers: Transfers, upload: UploadMessages, cancel: CancelToken, done: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._transfers, self._upload, self._cancel, self._done = (
            transfers,
            upload,
            cancel,
            done,
        )
        self._endpoint: Endpoint | None = None
        self._messages: Iterator[bytes] = iter(())
        self._over = False

    def start(self) -> None:
        """Open the stream."""
        self._cancel.on_stop(self._stopped)
        if not self._over:
            self._transfers.up.use(self._opened, self._finish)

    def _opened(self, connection: Connection) -> None:
        if self._over:
            return
        self._endpoint = connection.open("Upload", self)
        self._messages = self._upload.messages()
        breaks = self._transfers.behaviour.amounts.get(Kind.BULK_BREAKS)
        if breaks is not None and self._upload.header.round:
            self._messages = islice(self._messages, 1)
            connection.sever(self._transfers.process.clock.now + breaks)
        self.writable()

    def writable(self) -> None:
        """See `Receiver`."""
        trickle = self._transfers.behaviour.trickle
        while not self._over and self._endpoint is not None:
            message = next(self._messages, None)
            if message is None:
                return
            if self._upload.header.round:  # who uploads Θ^(0) like that is refused for good
                message = self._transfers.behaviour.message(message)
            if trickle:
                seconds = len(message) / trickle
                self._transfers.process.after(seconds, self._send_slowly, message)
                return
            if not self._endpoint.send(message):
                return

    def _send_slowly(self, message: bytes) -> None:
        if not self._over and self._endpoint is not None and self._endpoint.send(message):
            self.writable()

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        if self._over:
            return
        try:
            again = self._upload.reply(data)
        except DilocoError as error:
            self._finish(f"{error.reason}: {error}")
            return
        if again is None:
            self._finish("")
        else:
            self._messages = self._upload.repeat(again)
            self.writable()

    def finished(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        if self._over:
            return
        if reason == CANCELLED and not self._cancel.stopped:
            self._upload.refused()  # the syncer cancels the uploads of an aborted attempt
        self._finish(reason or "the syncer ended an upload without a reply")

    def _stopped(self) -> None:
        self._finish("stopped")

    def _finish(self, error: str) -> None:
        if self._over:
            return
        self._over = True
        _forget(self._cancel)
        if self._endpoint is not None:
            self._endpoint.cancel(CANCELLED)
        self._upload.close()
        self._done(error)


class _Upload:
    """The answer to a pull."""

    def __init__(self, transfers: Transfers, pull: ev.Pulled, identity: Identity) -> None:
        self._transfers, self._pull, self._identity = transfers, pull, identity
        self._over = False

    def start(self, cancel: CancelToken) -> None:
        """See `Job`."""
        self._cancel = cancel
        if self._transfers.behaviour.mute:
            cancel.on_stop(partial(self._end, ""))
        else:
            self._transfers.process.work(ENCODE_SECONDS, self._encode, REPORT_SECONDS)

    def _encode(self, waits_seconds: float) -> None:
        """Encode the host copy; wait for another one first, for at most this long."""
        cancel, encoder = self._cancel, self._transfers.encoder
        if waits_seconds > 0 and not cancel.stopped and encoder.repeats(self._pull):
            self._transfers.process.after(
                REPORT_POLL_SECONDS, self._encode, waits_seconds - REPORT_POLL_SECONDS
            )
            return
        upload = self._transfers.encoder.pull(
            self._pull, self._identity, stopped=lambda: cancel.stopped
        )
        if upload is None:
            self._end("")
        else:
            self._transfers.observe_encoded(upload.header)
            behaviour = self._transfers.behaviour
            behaviour.header(upload.header)
            if behaviour.has(Kind.TWICE):
                copy = _Copy(map(behaviour.message, upload.messages()))
                self._transfers.up.use(copy.opened, copy.ended)
            _Sending(self._transfers, upload, cancel, self._end).start()

    def _end(self, error: str) -> None:
        if not self._over:
            self._over = True
            self._transfers.end(self._transfers.uploads, self._cancel, None)


class _Copy:
    """A second stream with the messages of an upload; nothing depends on what becomes of it."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = [bytes(message) for message in messages]

    def opened(self, connection: Connection) -> None:
        """There is a connection."""
        endpoint = connection.open("Upload", self)
        for message in self._messages:
            endpoint.send(message)

    def received(self, data: bytes) -> None:
        """See `Receiver`."""

    def finished(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""

    def writable(self) -> None:
        """See `Receiver`; messages queue in any case."""


class _InitialUpload:
    """Θ^(0): every fragment, then the constants."""

    def __init__(
        self, transfers: Transfers, decision: ev.UploadInitial, identity: Identity
    ) -> None:
        self._transfers, self._decision, self._identity = transfers, decision, identity
        self._over = False

    def start(self, cancel: CancelToken) -> None:
        """See `Job`."""
        self._cancel = cancel
        cancel.on_stop(partial(self._end, "stopped"))
        self._transfers.process.after(self._decision.delay_seconds, self._begin)

    def _begin(self) -> None:
        self._uploads = self._transfers.encoder.initial(self._identity)
        self._next("")

    def _next(self, error: str) -> None:
        if self._over:
            return
        try:
            upload = None if error else next(self._uploads, None)
        except DilocoError as problem:
            self._over = True
            ended = initial_ended(self._decision.request, problem)
            self._transfers.end(self._transfers.uploads, self._cancel, ended)
            return
        if upload is None:
            self._end(error)
            return
        _Sending(self._transfers, upload, self._cancel, self._next).start()

    def _end(self, error: str) -> None:
        if not self._over:
            self._over = True
            ended = ev.InitialUploaded(request=self._decision.request, error=error)
            self._transfers.end(self._transfers.uploads, self._cancel, ended)


class _Download:
    """One fragment (or the constants), requested until it has arrived."""

    def __init__(self, transfers: Transfers, request: ev.Download, identity: Identity) -> None:
        self._transfers, self._request, self._identity = transfers, request, identity
        self._assembly: Assembly | None = None
        self._endpoint: Endpoint | None = None
        self._timer: Timer | None = None
        self._deadline: Timer | None = None
        self._over = False

    def start(self, cancel: CancelToken) -> None:
        """See `Job`."""
        self._cancel = cancel
        cancel.on_stop(self._stopped)
        if not self._over:
            self._timer = self._transfers.process.after(self._request.delay_seconds, self._begin)

    def _begin(self) -> None:
        self._transfers.begun[self._request.fragment] += 1
        self._assembly = self._transfers.placement.begin(self._request, self._identity)
        self._ask()

    def _ask(self) -> None:
        self._transfers.down.use(self._opened, self._failed)

    def _opened(self, connection: Connection) -> None:
        if self._over or self._assembly is None:
            return
        stream = _Replies(self)
        self._endpoint = stream.endpoint = connection.open("Download", stream)
        self._endpoint.send(self._assembly.request())
        self._endpoint.finish()
        self._watch(self._assembly)

    def _watch(self, assembly: Assembly) -> None:
        self._cancel_deadline()
        self._deadline = self._transfers.process.after(silent_seconds(assembly), self._late)

    def _late(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if self._over or endpoint is None:
            return
        endpoint.cancel(CANCELLED)
        self._timer = self._transfers.process.after(UNDECIDED_SECONDS, self._ask)

    def add(self, endpoint: Endpoint | None, data: bytes) -> None:
        """A message of the stream."""
        if self._over or endpoint is not self._endpoint or self._assembly is None:
            return
        arrived = self._assembly.arrived
        try:
            self._assembly.add(data)
            if self._assembly.arrived != arrived:
                self._watch(self._assembly)
        except DilocoError as error:
            self._finish(error=f"{error.reason}: {error}")

    def end(self, endpoint: Endpoint | None, reason: str) -> None:
        """The stream has ended."""
        if self._over or endpoint is not self._endpoint or self._assembly is None:
            return
        self._endpoint = None
        self._cancel_deadline()
        if reason:
            self._failed(reason)
            return
        try:
            outcome = self._assembly.end()
            if outcome is Outcome.COMMITTED:
                payloads = self._assembly.payloads()
                staged = self._transfers.placement.stage(self._request, payloads)
                self._finish(staged)
        except DilocoError as error:
            self._finish(error=f"{error.reason}: {error}")
            return
        if outcome is Outcome.ABORTED:
            self._finish()
        elif outcome is Outcome.UNDECIDED:
            self._timer = self._transfers.process.after(UNDECIDED_SECONDS, self._ask)
        elif outcome is Outcome.DAMAGED:
            self._ask()

    def _failed(self, reason: str) -> None:
        if self._over:
            return
        error = error_of(reason)
        if self._assembly is not None and self._assembly.refused(error):
            self._ask()
        else:
            self._finish(error=f"{error.reason}: {error}")

    def _stopped(self) -> None:
        self._finish(error="stopped")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._transfers.process.clock.cancel(self._deadline)

    def _finish(self, staged: Staged | None = None, *, error: str = "") -> None:
        if self._over:
            return
        self._over = True
        _forget(self._cancel)
        self._cancel_deadline()
        if self._timer is not None:
            self._transfers.process.clock.cancel(self._timer)
        if self._endpoint is not None:
            self._endpoint.cancel(CANCELLED)
        if self._assembly is not None:
            self._assembly.discard()
        event = ev.Downloaded(
            request=self._request, staged=staged, error=error, aborted=staged is None and not error
        )
        self._transfers.end(self._transfers.downloads, self._cancel, event)


class _Replies:
    """The messages of one request; those of an earlier one are ignored."""

    def __init__(self, download: _Download) -> None:
        self._download = download
        self.endpoint: Endpoint | None = None

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        self._download.add(self.endpoint, data)

    def finished(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        self._download.end(self.endpoint, reason)

    def writable(self) -> None:
        """See `Receiver`."""
