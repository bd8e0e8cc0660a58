"""
A learner that follows the test, right or wrong: real gRPC to a real syncer, no torch.

`Model` is what the test expects Θ to be: float64, by the formulas of the paper, none of our code.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from diloco.codec import formats, frames
from diloco.errors import DilocoError
from diloco.model.fragments import Fragment, Layout, Tensor, cut
from diloco.rpc.channels import channel
from diloco.rpc.identity import server_name
from diloco.rpc.status_codes import error_of
from diloco.rpc.tensor_info import to_proto
from diloco.rpc.tls import Tls
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_testing.syncers.process import RealSyncer

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
PATIENCE_SECONDS = 30.0

TENSORS = (
    Tensor(name="a", shape=(400, 1000), dtype="float32"),
    Tensor(name="b", shape=(350, 1000), dtype="float32"),
    Tensor(name="c", shape=(260, 1000), dtype="float32"),
    Tensor(name="d", shape=(333,), dtype="float32"),
    Tensor(name="emb", shape=(50, 64), dtype="float32", embedding=True),
)
"""Cut in two fragments of several chunks each; some tensors lie across a chunk's edge."""


def random_delta(fragment: Fragment, seed: int, *, size: float = 0.01) -> F32:
    """Normal values, zeros in the padding."""
    out_N = np.zeros(fragment.elements, np.float32)
    rng = np.random.default_rng(seed)
    for slot in fragment.slots:
        n = slot.tensor.elements
        out_N[slot.offset : slot.offset + n] = size * rng.standard_normal(n)
    return out_N


def thetas_of(learner: Any) -> list[F32]:
    """Parameters for every fragment of `learner.layout`."""
    return [random_delta(f, 50 + f.index, size=1.0) for f in learner.layout.fragments]


def encoded(
    fragment: Fragment, values_N: F32, fmt: int = bulk.FP32
) -> tuple[list[bytes], F32, list[float]]:
    """Payloads of all chunks, what they decode to, and its norm per tensor."""
    payloads, decoded_N = [], np.zeros_like(values_N)
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        out = np.zeros(formats.encoded_bytes(fmt, hi - lo), np.uint8)
        formats.encode(fmt, values_N[lo:hi], out)
        formats.decode(fmt, out, decoded_N[lo:hi])
        payloads.append(out.tobytes())
    norms = [
        float(np.linalg.norm(decoded_N[s.offset : s.end].astype(np.float64)))
        for s in fragment.slots
    ]
    return payloads, decoded_N, norms


def chunk(index: int, payload: bytes) -> bytes:
    """One message."""
    return frames.pack(frames.Kind.CHUNK, index, payload)


END = frames.pack(frames.Kind.END, 0)


class Stream:
    """One upload stream, message by message."""

    def __init__(self, method: Any) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = method(iter(self._messages.get, None), timeout=PATIENCE_SECONDS)
        self._replies = iter(self._call)

    def send(self, *messages: bytes) -> Stream:
        for message in messages:
            self._messages.put(message)
        return self

    def close(self) -> Stream:
        """Nothing more will be sent."""
        self._messages.put(None)
        return self

    def cancel(self) -> None:
        """Cut it."""
        self._call.cancel()
        self._messages.put(None)

    def reply(self) -> bulk.UploadReply:
        """The next reply; raises the DilocoError that ended the stream."""
        try:
            message = next(self._replies)
        except StopIteration:
            raise AssertionError("the syncer ended the upload without a word") from None
        except grpc.RpcError as error:
            raise error_of(error) from None
        return bulk.UploadReply.FromString(bytes(frames.unpack(message).payload))

    def last_reply(self) -> bulk.UploadReply:
        """The next reply, which is the last: gRPC's thread that sends the messages ends as well."""
        try:
            return self.reply()
        finally:
            self.close()


class ScriptedLearner:
    """One process of a learner; a context manager."""

    def __init__(
        self, syncer: RealSyncer, name: str = "eu/0", *, tensors: Iterable[Tensor] = TENSORS,
        tls: Tls | None = None, bulk_tls: Tls | None = None,
    ) -> None:  # fmt: skip
        self.syncer, self.name, self.spec = syncer, name, syncer.spec
        self.layout: Layout = cut(tensors, num_fragments=self.spec.fragments)
        self.local_step = self.total_tokens = 0
        self.step_seconds = 0.01
        """Seconds per step in its reports."""
        self.epoch = self.incarnation = 0
        self.welcome = pb.Welcome()
        name = server_name(self.spec.job)
        self._control = channel(syncer.endpoint, tls=tls, purpose="control", server_name=name)
        self._bulk = channel(syncer.endpoint, tls=bulk_tls or tls, purpose="bulk", server_name=name)
        self._outbox: queue.SimpleQueue[pb.LearnerMessage | None] = queue.SimpleQueue()
        self._inbox: dict[str, queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        self.ended: queue.Queue[DilocoError | None] = queue.Queue()
        """How the session ended."""
        self._call: Any = None
        self.beating = threading.Event()
        """Cleared: no more heartbeats."""
        self.beating.set()
        self._over = threading.Event()

    def __enter__(self) -> ScriptedLearner:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        self._control.close()
        self._bulk.close()

    # ------------------------------------------------------------ control

    def hello(self, **changes: Any) -> pb.Hello:
        """The Hello of an honest learner, with changes."""
        tensors = [to_proto(t) for t in self.layout.tensors]
        fields: dict[str, Any] = {
            "job": self.spec.job, "learner": self.name, "region": self.name.partition("/")[0],
            "spec_hash": self.spec.hash, "tensors": tensors, "local_step": self.local_step, **changes,
        }  # fmt: skip
        return pb.Hello(**fields)

    def begin(self, first: pb.LearnerMessage) -> None:
        """Open the session with this message."""
        self._outbox.put(first)
        self._call = SyncerStub(self._control).Session(iter(self._outbox.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def join(self, **changes: Any) -> ScriptedLearner:
        """Hello and Welcome; raises the DilocoError of a refusal."""
        self.begin(pb.LearnerMessage(hello=self.hello(**changes)))
        self.welcome = self.expect("welcome")
        self.epoch, self.incarnation = self.welcome.epoch, self.welcome.incarnation
        self.local_step = self.welcome.local_step
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _beat(self) -> None:
        while not self._over.wait(0.5):
            if self.beating.is_set():
                self.send(heartbeat=pb.Heartbeat())

    def _read(self) -> None:
        try:
            for message in self._call:
                kind = message.WhichOneof("kind")
                self._of(kind).put(getattr(message, kind))
            self.ended.put(None)
        except grpc.RpcError as error:
            self.ended.put(error_of(error))

    def _of(self, kind: str) -> queue.Queue[Any]:
        with self._lock:
            return self._inbox.setdefault(kind, queue.Queue())

    def expect(self, kind: str, *, seconds: float = PATIENCE_SECONDS) -> Any:
        """The next message of this kind; raises the error that ended the session instead."""
        waited = 0.0
        while waited < seconds:
            try:
                return self._of(kind).get(timeout=0.1)
            except queue.Empty:
                waited += 0.1
            if not self.ended.empty():
                error = self.ended.get()
                self.ended.put(error)
                raise error or AssertionError(f"the session ended before {kind}")
        raise AssertionError(f"{self.name}: no {kind} within {seconds} s")

    def send(self, **kind: Any) -> None:
        """A message on the session."""
        self._outbox.put(pb.LearnerMessage(**kind))

    def step(self, *, steps: int = 1, tokens: int = 100) -> None:
        """Report one more local step, offering everything."""
        self.local_step += 1
        self.total_tokens += tokens
        rows = len(self.layout.fragments)
        report = pb.Report(
            local_step=self.local_step, steps=[steps] * rows, tokens=[tokens] * rows, offers=range(rows),
            total_tokens=self.total_tokens,
            step_seconds=self.step_seconds,
        )  # fmt: skip
        self.send(report=report)

    def pull(self, *, step: bool = True) -> pb.Pull:
        """Report a step and return the pull that follows."""
        if step:
            self.step()
        return self.expect("pull")

    # ------------------------------------------------------------ bulk

    def header(self, pull: pb.Pull, **changes: Any) -> bulk.UploadHeader:
        """An honest header of a delta against the current version (but for its norms), with changes."""
        fragment = self.layout.fragments[pull.fragment]
        fields: dict[str, Any] = {
            "epoch": self.epoch, "learner": self.name, "incarnation": self.incarnation, "round": pull.round,
            "attempt": pull.attempt, "fragment": pull.fragment, "content": bulk.DELTA, "format": bulk.FP32,
            "base": pull.versions[0] if pull.versions else None, "local_step": self.local_step,
            "steps": 1, "tokens": 100, "elements": fragment.elements, "chunks": fragment.chunks, **changes,
        }  # fmt: skip
        return bulk.UploadHeader(**fields)

    def stream(self, header: bulk.UploadHeader | None = None) -> Stream:
        """Open an upload."""
        stream = Stream(self._bulk.stream_stream("/diloco.v1.Bulk/Upload"))
        if header is not None:
            stream.send(frames.pack(frames.Kind.HEADER, 0, header.SerializeToString()))
        return stream

    def sent(self, pull: pb.Pull, delta_N: F32, *, fmt: int = bulk.FP32, **changes: Any) -> Stream:
        """A whole upload as it should be, or with another header."""
        payloads, _, norms = encoded(self.layout.fragments[pull.fragment], delta_N, fmt)
        stream = self.stream(self.header(pull, **{"norms": norms, "format": fmt, **changes}))
        return stream.send(*(chunk(i, p) for i, p in enumerate(payloads)), END)

    def upload(
        self, pull: pb.Pull, delta_N: F32, *, fmt: int = bulk.FP32, **changes: Any
    ) -> bulk.UploadReply:
        """`sent`, and its last reply."""
        return self.sent(pull, delta_N, fmt=fmt, **changes).last_reply()

    def initialise(self, thetas: list[F32], constants: bytes = b"", *, asked: bool = True) -> None:
        """Upload Θ^(0) as the syncer asked; fewer fragments: only those, and no constants."""
        if asked:
            self.expect("initialise")
        for fragment, theta_N in zip(self.layout.fragments, thetas, strict=False):
            reply = self.upload(
                pb.Pull(fragment=fragment.index), theta_N, content=bulk.INITIAL, base=None, norms=[]
            )
            assert reply.done, reply
        if len(thetas) == len(self.layout.fragments):
            reply = self.constants(constants)
            assert reply.done, reply

    def constants(self, blob: bytes, **changes: Any) -> bulk.UploadReply:
        """Upload the constants."""
        size = 1 << 20
        pieces = [blob[at : at + size] for at in range(0, len(blob), size)]
        fields: dict[str, Any] = {
            "epoch": self.epoch, "learner": self.name, "incarnation": self.incarnation,
            "content": bulk.CONSTANTS, "format": bulk.RAW, "elements": len(blob), "chunks": len(pieces), **changes,
        }  # fmt: skip
        stream = self.stream(bulk.UploadHeader(**fields))
        return stream.send(*(chunk(i, p) for i, p in enumerate(pieces)), END).last_reply()

    def download(
        self, fragment: int, **request: Any
    ) -> tuple[bulk.DownloadHeader, bytes, bulk.DownloadTrailer]:
        """Header, all payloads in order, trailer; raises the DilocoError that it ends with."""
        fields = {
            "epoch": self.epoch,
            "learner": self.name,
            "incarnation": self.incarnation,
            **request,
        }
        wanted = bulk.DownloadRequest(fragment=fragment, **fields)
        return self.ask(frames.pack(frames.Kind.HEADER, 0, wanted.SerializeToString()))

    def ask(self, request: bytes) -> tuple[bulk.DownloadHeader, bytes, bulk.DownloadTrailer]:
        """A download by its raw request."""
        call = self._bulk.unary_stream("/diloco.v1.Bulk/Download")(
            request, timeout=PATIENCE_SECONDS
        )
        try:
            envelopes = [frames.unpack(message) for message in call]
        except grpc.RpcError as error:
            raise error_of(error) from None
        header = bulk.DownloadHeader.FromString(bytes(envelopes[0].payload))
        trailer = bulk.DownloadTrailer.FromString(bytes(envelopes[-1].payload))
        return header, b"".join(bytes(e.payload) for e in envelopes[1:-1]), trailer

    def theta(self, fragment: int) -> F32:
        """The current version in fp32."""
        header, payload, trailer = self.download(fragment, format=bulk.FP32)
        assert trailer.committed
        return np.frombuffer(payload, np.float32, header.elements)


class Model:
    """What Θ and momentum must be: float64, one fragment after the other."""

    def __init__(self, layout: Layout, spec: RunSpec, thetas: list[F32]) -> None:
        self.layout, self.spec = layout, spec
        self.theta: list[F64] = [t.astype(np.float64) for t in thetas]
        self.momentum: list[F64] = [np.zeros(t.size) for t in thetas]

    def merge(self, fragment: int, *members: tuple[float, F32]) -> F64:
        """One round of (weight, delta): average or RDA, then SGD with Nesterov momentum; Θ after it."""
        total = sum(w for w, _ in members)
        delta_N = np.zeros(self.theta[fragment].size)
        for slot in self.layout.fragments[fragment].slots:
            here = slice(slot.offset, slot.end)
            rows = [(w / total, v[here].astype(np.float64)) for w, v in members]
            delta_N[here] = sum(w * v for w, v in rows)
            if self.spec.merge == "Radial" and not slot.average:
                direction = sum(w * v / np.linalg.norm(v) for w, v in rows)
                length = sum(w * np.linalg.norm(v) for w, v in rows)
                delta_N[here] = length * direction / np.linalg.norm(direction)
        mu, lr = self.spec.outer_momentum, self.spec.outer_learning_rate
        self.momentum[fragment] = mu * self.momentum[fragment] + delta_N
        step_N = (
            delta_N + mu * self.momentum[fragment]
            if self.spec.outer_nesterov
            else self.momentum[fragment]
        )
        self.theta[fragment] = self.theta[fragment] - lr * step_N
        return self.theta[fragment]

    def check(self, learner: ScriptedLearner) -> None:
        """The syncer holds this model, to the rounding of fp32 (which does not add up from check to check)."""
        for index in range(len(self.theta)):
            seen_N = learner.theta(index)
            np.testing.assert_allclose(seen_N, self.theta[index], rtol=1e-6, atol=2e-7)
            self.theta[index] = seen_N.astype(np.float64)


def good_round(learner: ScriptedLearner, model: Model | None = None, *, seed: int = 0) -> pb.Pull:
    """Report, upload, wait for the commit; the model follows."""
    pull = learner.pull()
    delta_N = random_delta(learner.layout.fragments[pull.fragment], seed)
    reply = learner.upload(pull, delta_N)
    assert reply.done, reply
    committed(learner, pull)
    if model is not None:
        model.merge(pull.fragment, (1.0, delta_N))
    return pull


def committed(learner: ScriptedLearner, pull: pb.Pull) -> bulk.DownloadHeader:
    """Follow the announced result of a round to its committed end."""
    while True:
        result = learner.expect("result")
        if (result.round, result.attempt) == (pull.round, pull.attempt):
            break
    header, _, trailer = learner.download(pull.fragment, round=pull.round, attempt=pull.attempt)
    assert trailer.committed, trailer.reason
    return header
