"""
A syncer controlled by a test: real gRPC on 127.0.0.1, no decisions of its own.

It records what it receives (hellos, reports, uploads) and serves what the test puts into `theta` and `results`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from diloco.codec import formats, frames
from diloco.errors import DilocoError
from diloco.model.fragments import CHUNK, Layout, cut
from diloco.rpc import servers, status_codes
from diloco.rpc.tensor_info import from_proto
from diloco.rpc.tls import Tls
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1 import syncer_pb2_grpc


@dataclass
class Upload:
    """One upload as it arrived."""

    header: bulk.UploadHeader
    payloads: dict[int, bytes] = field(default_factory=dict)
    damaged: int = 0
    order: list[int] = field(default_factory=list)

    def values(self, layout: Layout) -> np.ndarray:
        fragment = layout.fragments[self.header.fragment]
        out = np.zeros(fragment.elements, np.float32)
        for index, payload in self.payloads.items():
            lo, hi = fragment.chunk(index)
            formats.decode(self.header.format, payload, out[lo:hi])
        return out


@dataclass
class Result:
    """What the download of a round returns."""

    values: np.ndarray
    version: tuple[int, int]
    committed: bool = True
    undecided: int = 0
    """How many downloads end before the round is decided."""
    gate: threading.Event | None = None
    """The trailer waits for it."""


class ScriptedSyncer(syncer_pb2_grpc.SyncerServicer):
    """Use as a context manager; `port` to dial."""

    def __init__(
        self, spec: RunSpec, *, port: int = 0, epoch: int = 1, initialised: bool = False,
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.epoch, self.initialised = spec, epoch, initialised
        self.welcome: dict[str, Any] = {}
        """Fields of Welcome that differ from the default."""
        self.complete = False
        self.refusal: DilocoError | None = None
        self.hellos: list[pb.Hello] = []
        self.reports: list[pb.Report] = []
        self.heartbeats = 0
        self.goodbyes: list[str] = []
        self.uploads: list[Upload] = []
        self.layout: Layout | None = None
        self.theta: list[np.ndarray] = []
        self.versions: list[tuple[int, int]] = []
        self.constants = b""
        self.results: dict[tuple[int, int], Result] = {}
        self.downloads: list[bulk.DownloadRequest] = []
        self.damage: Callable[[int, bytes], bytes] | None = None
        """Called with index and message of every chunk of a download; returns what is sent."""
        self.acknowledge = threading.Event()
        """Uploads get their reply when it is set, as it is at first."""
        self.acknowledge.set()
        self.step = 0
        self.incarnations = 0
        self.changed = threading.Condition()
        self._outbox: queue.SimpleQueue[pb.SyncerMessage | DilocoError | None] = queue.SimpleQueue()
        self._server = servers.server(
            [
                grpc.method_handlers_generic_handler(
                    "diloco.v1.Bulk",
                    {
                        "Upload": grpc.stream_stream_rpc_method_handler(self._upload),
                        "Download": grpc.unary_stream_rpc_method_handler(self._download),
                    },
                )
            ],
            max_workers=32,
        )
        syncer_pb2_grpc.add_SyncerServicer_to_server(self, self._server)
        self.port = servers.bind(self._server, f"127.0.0.1:{port}", tls)

    def __enter__(self) -> ScriptedSyncer:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._outbox.put(None)
        self._server.stop(0).wait()

    # ------------------------------------------------------------ for tests

    def wait(self, condition: Callable[[], Any], *, timeout_seconds: float = 90.0) -> Any:
        """Wait until `condition` is true; return its value."""
        deadline = time.monotonic() + timeout_seconds
        with self.changed:
            while not (value := condition()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError("the condition did not become true in time")
                self.changed.wait(min(left, 0.1))
        return value

    def send(self, **message: Any) -> None:
        self._outbox.put(pb.SyncerMessage(**message))

    def open(self, *fragments: int) -> None:
        self.send(open=pb.Open(step=self.step, fragments=fragments, steps=self.spec.steps))

    def pull(self, fragment: int, *, round_: int, attempt: int = 1, versions: Any = None) -> Upload:
        """Pull a fragment and return its upload."""
        seen = len(self.uploads)
        known = [self.versions[fragment]] if versions is None else versions
        self.send(
            pull=pb.Pull(
                round=round_,
                attempt=attempt,
                fragment=fragment,
                versions=[pb.Version(epoch=e, step=s) for e, s in known],
            )
        )
        return self.wait(lambda: self.uploads[seen:])[0]

    def commit(
        self,
        fragment: int,
        values: np.ndarray,
        *,
        round_: int,
        attempt: int = 1,
        undecided: int = 0,
    ) -> Result:
        """Create a result and announce it."""
        version = (self.epoch, round_)
        result = Result(values=values.astype(np.float32), version=version, undecided=undecided)
        self.results[(round_, attempt)] = result
        self.theta[fragment], self.versions[fragment] = result.values, version
        self.step = round_
        self.announce(fragment, round_=round_, attempt=attempt)
        return result

    def announce(self, fragment: int, *, round_: int, attempt: int = 1) -> None:
        self.send(result=pb.Result(round=round_, attempt=attempt, fragment=fragment))

    def end_session(self, error: DilocoError | None = None) -> None:
        self._outbox.put(error)

    # ------------------------------------------------------------ control

    def Session(self, request_iterator: Any, context: Any) -> Iterator[pb.SyncerMessage]:  # noqa: N802
        with status_codes.aborting(context):
            hello = next(request_iterator).hello
            with self.changed:
                self.hellos.append(hello)
                self.changed.notify_all()
            if self.refusal is not None:
                raise self.refusal
            self.layout = cut(
                [from_proto(t) for t in hello.tensors],
                num_fragments=self.spec.fragments,
                constants=[from_proto(t) for t in hello.constants],
                average=self.spec.average_parameters,
            )
            if not hello.incarnation:
                self.incarnations += 1
            self._outbox = queue.SimpleQueue()
            welcome = {
                "epoch": self.epoch,
                "incarnation": hello.incarnation or self.incarnations,
                "step": self.step,
                "steps": self.spec.steps,
                "local_step": hello.local_step,
                "heartbeat_seconds": 0.2,
                "compares_frozen": True,
                **self.welcome,
            }
            yield pb.SyncerMessage(welcome=pb.Welcome(**welcome))
            if self.initialised:
                yield self._ready()
            else:
                yield pb.SyncerMessage(initialise=pb.Initialise())
            outbox = self._outbox
            if self.complete:
                yield pb.SyncerMessage(complete=pb.Complete(step=self.spec.steps))
            threading.Thread(
                target=self._read, args=(request_iterator, outbox), daemon=True
            ).start()
            while (message := outbox.get()) is not None:
                if isinstance(message, DilocoError):
                    raise message
                yield message

    def _ready(self) -> pb.SyncerMessage:
        versions = [pb.Version(epoch=e, step=s) for e, s in self.versions]
        return pb.SyncerMessage(ready=pb.Ready(versions=versions))

    def _read(self, messages: Any, outbox: Any) -> None:
        try:
            for message in messages:
                with self.changed:
                    kind = message.WhichOneof("kind")
                    if kind == "report":
                        self.reports.append(message.report)
                    elif kind == "heartbeat":
                        self.heartbeats += 1
                    elif kind == "goodbye":
                        self.goodbyes.append(message.goodbye.reason)
                    self.changed.notify_all()
        except Exception:
            pass
        outbox.put(None)

    # ------------------------------------------------------------ bulk

    def _upload(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with status_codes.aborting(context):
            header = bulk.UploadHeader.FromString(bytes(frames.unpack(next(messages)).payload))
            upload = Upload(header=header)
            if header.chunks or (header.elements == 0 and header.content == bulk.CONSTANTS):
                if any(n != n for n in header.norms):
                    with self.changed:
                        self.uploads.append(upload)
                        self.changed.notify_all()
                    yield _reply(bulk.UploadReply(refused="NotFinite", detail="a norm is NaN"))
                    return
                yield from self._chunks(messages, upload)
            if header.content in (bulk.INITIAL, bulk.CONSTANTS):
                self._initial(upload)
            with self.changed:
                self.uploads.append(upload)
                self.changed.notify_all()
            while not self.acknowledge.wait(0.1):
                if not context.is_active():
                    return
            yield _reply(bulk.UploadReply(done=True))

    def _chunks(self, messages: Iterator[bytes], upload: Upload) -> Iterator[bytes]:
        for message in messages:
            try:
                envelope = frames.unpack(message)
            except DilocoError:
                upload.damaged += 1
                continue
            if envelope.kind == frames.Kind.END:
                missing = sorted(set(range(upload.header.chunks)) - set(upload.payloads))
                if not missing:
                    return
                yield _reply(bulk.UploadReply(again=missing))
            else:
                upload.order.append(envelope.index)
                upload.payloads[envelope.index] = bytes(envelope.payload)

    def _initial(self, upload: Upload) -> None:
        assert self.layout is not None
        count = len(self.layout.fragments)
        if not self.theta:
            self.theta = [np.zeros(0, np.float32)] * count
            self.versions = [(self.epoch, 0)] * count
        if upload.header.content == bulk.CONSTANTS:
            self.constants = b"".join(upload.payloads[i] for i in sorted(upload.payloads))
            self.initialised = True
            self._outbox.put(self._ready())
        else:
            self.theta[upload.header.fragment] = upload.values(self.layout)

    def _download(self, request: bytes, context: Any) -> Iterator[bytes]:
        with status_codes.aborting(context):
            wanted = bulk.DownloadRequest.FromString(bytes(frames.unpack(request).payload))
            with self.changed:
                self.downloads.append(wanted)
                self.changed.notify_all()
            assert self.layout is not None
            if wanted.fragment == len(self.layout.fragments):
                yield from self._constants()
                return
            fragment = self.layout.fragments[wanted.fragment]
            result = self.results.get((wanted.round, wanted.attempt)) or Result(
                values=self.theta[wanted.fragment], version=self.versions[wanted.fragment]
            )
            fmt = wanted.format or formats.format_of(self.spec.wire_down)
            yield _header(
                fragment.index, fmt, fragment.elements, fragment.chunks, result.version, self.step
            )
            buffer = np.empty(formats.encoded_bytes(fmt, CHUNK), np.uint8)
            for index in wanted.chunks or range(fragment.chunks):
                lo, hi = fragment.chunk(index)
                size = formats.encode(fmt, result.values[lo:hi], buffer)
                message = frames.pack(frames.Kind.CHUNK, index, buffer[:size])
                yield self.damage(index, message) if self.damage else message
            if result.gate is not None:
                result.gate.wait(30)
            if result.undecided:
                result.undecided -= 1
                trailer = bulk.DownloadTrailer(reason="not decided yet")
            else:
                trailer = bulk.DownloadTrailer(
                    committed=result.committed, aborted=not result.committed
                )
            yield frames.pack(frames.Kind.TRAILER, 0, trailer.SerializeToString())

    def _constants(self) -> Iterator[bytes]:
        assert self.layout is not None
        size = CHUNK * 4
        pieces = [self.constants[i : i + size] for i in range(0, len(self.constants), size)]
        yield _header(
            len(self.layout.fragments), formats.RAW, len(self.constants), len(pieces), (1, 0), 0
        )
        for index, piece in enumerate(pieces):
            yield frames.pack(frames.Kind.CHUNK, index, piece)
        trailer = bulk.DownloadTrailer(committed=True)
        yield frames.pack(frames.Kind.TRAILER, 0, trailer.SerializeToString())


def _reply(reply: bulk.UploadReply) -> bytes:
    return frames.pack(frames.Kind.TRAILER, 0, reply.SerializeToString())


def _header(
    fragment: int, fmt: int, elements: int, chunks: int, version: tuple[int, int], step: int
) -> bytes:
    header = bulk.DownloadHeader(
        fragment=fragment,
        format=bulk.Format.ValueType(fmt),
        elements=elements,
        chunks=chunks,
        version=pb.Version(epoch=version[0], step=version[1]),
        step=step,
    )
    return frames.pack(frames.Kind.HEADER, 0, header.SerializeToString())
