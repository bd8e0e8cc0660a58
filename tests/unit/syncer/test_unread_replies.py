"""Peers that answer pings and do not read, and the real server: what of the syncer they hold, and how long."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from diloco.codec import frames
from diloco.errors import UnavailableError
from diloco.model.fragments import CHUNK, Tensor
from diloco.rpc import servers
from diloco.rpc.channels import channel
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.bulk import BulkService
from diloco_syncer.rpc.call_limits import QUERY_THREADS, CallLimits
from diloco_syncer.rpc.control import ControlService
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = (Tensor(name="a", shape=(CHUNK,), dtype="float32"),)
LARGE = (Tensor(name="a", shape=(16 * CHUNK,), dtype="float32"),)
STATUS, DOWNLOAD = "/diloco.v1.Syncer/GetStatus", "/diloco.v1.Bulk/Download"
UPLOAD = "/diloco.v1.Bulk/Upload"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
NEVER = 1000.0


class Unreading:
    """An HTTP/2 connection that grants no window for replies and acknowledges everything."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._lock, self._streams = threading.Lock(), 0
        no_window = struct.pack(">HI", 4, 0)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SETTINGS, 0, 0, no_window)
        self.ready = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def call(self, path: str, message: bytes) -> None:
        """Begin a call, and send its only message."""
        number, self._streams = 2 * self._streams + 1, self._streams + 1
        fields = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x",
            "content-type": "application/grpc", "te": "trailers",
        }  # fmt: skip
        headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._send(HEADERS, END_HEADERS, number, headers)
        self._send(DATA, END_STREAM, number, b"\0" + struct.pack(">I", len(message)) + message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        with self._lock:
            self._socket.sendall(head + payload)

    def _answer(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as received:
            while header := received.read(9):
                payload = received.read(int.from_bytes(header[:3], "big"))
                if header[3] in (SETTINGS, PING) and not header[4] & ACK:
                    self._send(header[3], ACK, 0, payload if header[3] == PING else b"")
                elif header[3] == SETTINGS:
                    self.ready.set()  # the server has seen that there is no window


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


class Served:
    """A real server over a driven syncer, with limits that a test chooses."""

    def __init__(self, tensors: tuple[Tensor, ...] = TENSORS, **limits: float) -> None:
        self.syncer = DrivenSyncer(driven_spec(learners={"eu": 12}, fragments=1, interval=1))
        self.learners = [DrivenLearner(self.syncer, f"eu/{i}", tensors) for i in range(12)]
        zeros = [np.zeros(f.elements, np.float32) for f in self.learners[0].layout.fragments]
        self.learners[0].initialise(zeros)
        refusals = RefusalLog(self.syncer.record)
        times = {"first_seconds": NEVER, "reply_seconds": NEVER, "frame_seconds": NEVER}
        self.limits = CallLimits(self.syncer.spec, refusals, **{**times, **limits})
        authorizer, runner = Authorizer(job="j", tls=False), Answering(self.syncer)
        self.bulk = BulkService(self.syncer, authorizer, self.limits)  # type: ignore[arg-type]
        control: Any = ControlService(
            runner, None, authorizer, self.limits, next_incarnation=lambda: 1  # type: ignore[arg-type]
        )  # fmt: skip
        handlers = [self.bulk.handler(), control.handler()]
        self._server = servers.server(handlers, max_workers=1)
        self.port = servers.bind(self._server, "127.0.0.1:0", None)
        self._server.start()
        self._peers: list[Unreading] = []

    def unreading(self) -> Unreading:
        peer = Unreading(self.port)
        self._peers.append(peer)
        assert peer.ready.wait(30)
        return peer

    def status(self) -> pb.StatusReply:
        """The answer to an honest client on a connection of its own."""
        with channel(f"127.0.0.1:{self.port}", tls=None, purpose="control") as wire:
            return SyncerStub(wire).GetStatus(pb.StatusRequest(), timeout=20)

    def download(self, learner: DrivenLearner, between: Callable[[], object] = lambda: None) -> int:
        """How many messages an honest learner receives; something happens after the first."""
        with channel(f"127.0.0.1:{self.port}", tls=None, purpose="bulk") as wire:
            messages = wire.unary_stream(DOWNLOAD)(request(learner), timeout=60)
            next(messages)
            between()
            return 1 + len(list(messages))

    def merge(self, learner: DrivenLearner) -> None:
        """One more version."""
        [pull] = learner.step()
        upload = learner.upload(pull, random_delta(learner.layout.fragments[0], 1)).send_all()
        self.syncer.run()
        upload.resume().send_all()
        self.syncer.run()

    def refused(self) -> list[tuple[str, str]]:
        lines = [line for line in self.syncer.lines if line["event"] == "refuse"]
        return [(line["learner"], line["detail"]) for line in lines]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._server.stop(None).wait(30)


class Answering:
    """The runner as queries use it."""

    def __init__(self, syncer: DrivenSyncer) -> None:
        self.spec, self.metrics, self._syncer = syncer.spec, syncer.metrics, syncer

    def ask(self, question: Callable[[Any], Any]) -> Any:
        return question(self._syncer.state)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def begin(*tensors: tuple[Tensor, ...], **limits: float) -> Served:
            served = Served(*tensors, **limits)
            stack.callback(served.close)
            return served

        yield begin


def request(learner: DrivenLearner) -> bytes:
    wanted = bulk.DownloadRequest(
        epoch=1, learner=learner.name, incarnation=learner.incarnation, fragment=0
    )
    return frames.pack(frames.Kind.HEADER, 0, wanted.SerializeToString())


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.005)


def test_a_peer_that_reads_no_status_does_not_keep_others_from_theirs(serve):
    served = serve()
    peer = served.unreading()
    for _ in range(2 * QUERY_THREADS):
        peer.call(STATUS, b"")
    until(lambda: sum(map(len, served.limits.queries.waiting.values())) == QUERY_THREADS // 4)
    assert served.status().job == "j"


def test_the_thread_of_a_reply_that_is_not_read_is_free_after_the_deadline(serve):
    served = serve(reply_seconds=0.3)
    peer = served.unreading()
    begun = time.monotonic()
    for _ in range(3):
        peer.call(STATUS, b"")
    until(lambda: len(served.refused()) == 3)
    assert time.monotonic() - begun >= 0.3
    assert set(served.refused()) == {("", "its reply was not read within 0.3 s")}
    assert served.limits.queries.waiting == {}
    executor = served.limits.queries.executor
    until(lambda: executor._calls == 0)


def test_a_refusal_that_is_not_read_frees_its_thread_as_well(serve):
    """It is of no learner, so that no limit of a learner counts it."""
    served = serve(reply_seconds=0.3)
    header = bulk.UploadHeader(epoch=1, learner="eu/0", incarnation=10**6)
    served.unreading().call(UPLOAD, frames.pack(frames.Kind.HEADER, 0, header.SerializeToString()))
    until(lambda: ("", "its reply was not read within 0.3 s") in served.refused())
    assert served.limits.bulk.waiting == {}


def test_members_that_do_not_read_their_downloads_leave_threads_for_the_others(serve):
    served = serve()
    *unreading, honest = served.learners
    most = served.limits._streams_per_learner
    for learner in unreading:
        peer = served.unreading()
        for _ in range(most):
            peer.call(DOWNLOAD, request(learner))
    until(lambda: sum(served.limits._open.values()) == most * len(unreading))
    assert served.download(honest) == 3
    wanted = bulk.DownloadRequest(epoch=1, fragment=0)
    observer = frames.pack(frames.Kind.HEADER, 0, wanted.SerializeToString())
    with channel(f"127.0.0.1:{served.port}", tls=None, purpose="bulk") as wire:
        assert len(list(wire.unary_stream(DOWNLOAD)(observer, timeout=20))) == 3


def test_a_download_of_which_nothing_is_read_ends_and_is_one_line(serve, caplog):
    served = serve(frame_seconds=0.3)
    served.unreading().call(DOWNLOAD, request(served.learners[3]))
    until(lambda: served.limits._open["eu/3"])
    until(lambda: not served.limits._open["eu/3"])
    [refused] = served.refused()
    assert refused == ("eu/3", "none of it was read within 0.3 s; request it again")
    assert caplog.text.count("refused a download of eu/3") == 1
    assert served.download(served.learners[3]) == 3


def test_a_download_that_is_not_read_ends_with_the_next_one_once_its_version_is_of_no_use(serve):
    """Each keeps a version, or all of a merge, in memory."""
    served = serve()
    slow, trains, honest = served.learners[3:6]
    served.unreading().call(DOWNLOAD, request(slow))
    until(lambda: served.bulk._downloads._open)
    served.merge(trains)
    assert served.download(honest) == 3
    assert served.limits._open["eu/3"] == 1, "a delta against the version before can be merged"
    served.merge(trains)
    assert served.download(honest) == 3
    until(lambda: not served.limits._open["eu/3"])
    assert not served.bulk._downloads._open


def test_a_download_that_is_read_completes_however_many_merges_it_takes(serve):
    served = serve(LARGE)
    slow, trains, honest = served.learners[3:6]

    def merges() -> None:
        for _ in range(3):
            served.merge(trains)
            assert served.download(honest) == 18
        assert served.limits._open["eu/3"] == 1, "there was more than all buffers between hold"

    assert served.download(slow, merges) == 18


def test_what_a_peer_has_read_fast_pays_for_thirty_seconds_without_progress(serve):
    served = serve(LARGE)
    parameters = served.syncer.state.parameters
    assert parameters is not None
    source = served.learners[3].download(pb.Pull(fragment=0))
    for _ in range(12):
        assert source.next_frame(0.0) is not None
    for _ in range(2):
        served.merge(served.learners[4])
    assert not source.may_end(parameters, 29.9)
    assert source.may_end(parameters, 30.1)


@pytest.mark.parametrize(("rate", "may_end"), [(2.0, False), (0.9, True), (0.0, True)])
def test_an_older_version_stays_for_a_peer_that_reads_as_fast_as_the_slowest_link(
    serve, rate, may_end
):
    served = serve(LARGE)
    parameters = served.syncer.state.parameters
    assert parameters is not None
    source, now = served.learners[3].download(pb.Pull(fragment=0)), 0.0
    for _ in range(3):
        for _ in range(4 if rate else 1):
            frame = source.next_frame(now)
            assert frame is not None
            now += len(frame) / (rate * MIN_BYTES_PER_SECOND) if rate else 10.0
        assert not source.may_end(parameters, now), "the syncer has this version still"
        if not rate:
            break
    for _ in range(2):
        served.merge(served.learners[4])
    assert source.may_end(parameters, now) is may_end
    before = served.learners[5].download(pb.Pull(fragment=0))
    assert not before.may_end(parameters, now + NEVER), "this one is current"


def test_an_older_version_stays_for_a_peer_that_reads_its_first_chunk_fast_enough(serve):
    """A chunk counts as read when all of it is: until then, the time that it takes over the slowest link does."""
    served = serve(LARGE)
    parameters = served.syncer.state.parameters
    assert parameters is not None
    source = served.learners[3].download(pb.Pull(fragment=0))
    header = source.next_frame(0.0)
    assert header is not None
    begun = len(header) / MIN_BYTES_PER_SECOND
    chunk = source.next_frame(begun)
    assert chunk is not None
    for _ in range(2):
        served.merge(served.learners[4])
    ends = begun + len(chunk) / MIN_BYTES_PER_SECOND
    assert not source.may_end(parameters, ends - 0.01)
    assert source.may_end(parameters, ends + 0.01)


class Passing:
    """A call whose cancelling a test sees."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_download_that_waits_for_a_merge_is_not_cancelled_and_one_that_is_not_read_is():
    """Only the time counts for which a frame finds no room."""
    lines: list[dict[str, Any]] = []
    refusals = RefusalLog(lambda event, **fields: lines.append(fields))
    limits = CallLimits(driven_spec(), refusals, first_seconds=0.4, frame_seconds=0.3)

    def pass_time() -> None:
        other = Passing()
        limits.cancel_later(other)  # type: ignore[arg-type]
        assert other.cancelled.wait(30)

    def source() -> Iterator[bytes]:
        for _ in range(2):
            pass_time()  # for the merge
            yield b"a chunk"

    download = Passing()
    sent = limits.sending(source(), download, "eu/0")  # type: ignore[arg-type]
    assert list(sent) == [b"a chunk"] * 2
    assert not download.cancelled.is_set()
    held = limits.sending(source(), download, "eu/0")  # type: ignore[arg-type]
    next(held)
    assert download.cancelled.wait(30), "the peer does not read this one"
    held.close()
    assert [line["reason"] for line in lines] == [UnavailableError.reason]


def test_an_honest_call_is_served_by_a_server_with_these_limits(serve):
    served = serve(reply_seconds=0.3, frame_seconds=0.3)
    assert served.status().job == "j"
    assert served.download(served.learners[1]) == 3
    assert served.refused() == []
