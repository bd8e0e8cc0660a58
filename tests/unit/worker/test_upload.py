"""Error feedback: which uploads consume it, with or without a reply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from diloco.codec import formats, frames
from diloco.errors import DilocoError
from diloco.model.fragments import Tensor, cut
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners.plain_memory import PlainMemory
from diloco_worker.core.events import Pulled
from diloco_worker.ipc.shared_memory import HostCopy, SharedMemory
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.encoder import Encoder
from diloco_worker.link.transfer import CancelToken, Identity
from diloco_worker.link.upload import Uploader

LAYOUT = cut([Tensor(name="a", shape=(256,), dtype="float32")], num_fragments=1)
IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)


class BrokenError(grpc.RpcError):
    """The connection broke."""


class Stream:
    """The syncer's end of uploads: each takes the next outcome."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.received: list[bytes] = []

    def stream_stream(self, _: str) -> Stream:
        return self

    def __call__(self, requests: Iterator[bytes]) -> Stream:
        self.requests = requests
        return self

    def cancel(self) -> None:
        pass

    def code(self) -> grpc.StatusCode:
        aborted = self.outcome == "aborted"
        return grpc.StatusCode.CANCELLED if aborted else grpc.StatusCode.UNAVAILABLE

    def __iter__(self) -> Iterator[bytes]:
        self.outcome = outcome = self.outcomes.pop(0)
        self.received = []
        for message in self.requests:
            envelope = frames.unpack(message)
            if envelope.kind == frames.Kind.CHUNK:
                if outcome == "broken":
                    raise BrokenError
                self.received.append(bytes(envelope.payload))
            if envelope.kind == frames.Kind.END:
                break
        if outcome in ("reply lost", "aborted"):
            raise BrokenError
        refused = "Aborted" if outcome == "refused" else ""
        reply = bulk.UploadReply(done=not refused, refused=refused)
        yield frames.pack(frames.Kind.TRAILER, 0, reply.SerializeToString())


@pytest.fixture
def make_upload():
    """A function that makes another `upload`."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(uploading())


@pytest.fixture
def upload(make_upload):
    """A function that uploads the same delta for a round and returns what the syncer decodes."""
    return make_upload()


@contextlib.contextmanager
def uploading() -> Iterator[Callable[..., np.ndarray]]:
    shared = SharedMemory.create(LAYOUT, constants_bytes=0)
    shared.inbox(0)[:] = np.random.default_rng(0).standard_normal(256, np.float32)
    shared.publish(0, 1, (1, 0))
    shared.set_host_copy(0, HostCopy(local_step=3, steps=3, tokens=30, base=1))
    stream = Stream()
    spec = RunSpec(
        job="j", steps=9, fragments=1, interval=1, overlap=1, wire_up="Int4", error_feedback=True
    )
    uploader = Uploader(lambda: stream, Encoder(shared, spec, BufferPool(most_idle_bytes=1 << 20)))

    def pull(
        round_: int, outcome: str = "done", *, cancelled: bool = False, probe: bool = False,
        versions: tuple[tuple[int, int], ...] = ((1, 0),), identity: Identity = IDENTITY,
    ) -> np.ndarray:  # fmt: skip
        stream.outcomes.append(outcome)
        cancel = CancelToken()
        if cancelled:
            cancel.stop()
        event = Pulled(round=round_, attempt=1, fragment=0, versions=versions, probe=probe)
        try:
            uploader.pull(event, identity, cancel)
        except DilocoError:
            assert outcome != "done"
        decoded = np.zeros(256, np.float32)
        if len(stream.received) == 1 and versions:
            payload = np.frombuffer(stream.received[0], np.uint8)
            formats.decode(formats.format_of("Int4"), payload, decoded)
        return decoded

    yield pull
    shared.close()


@pytest.mark.parametrize("outcome", ["done", "reply lost"])
def test_an_upload_that_was_sent_completely_consumes_the_feedback(upload, outcome):
    first = upload(1, outcome)
    assert not np.array_equal(first, upload(2))


@pytest.mark.parametrize("outcome", ["broken", "refused", "aborted"])
def test_an_upload_that_failed_consumes_no_feedback(upload, outcome):
    first = upload(1)
    upload(2, outcome)
    second = upload(3)
    assert not np.array_equal(first, second)
    upload(3, outcome)  # the round is pulled again
    np.testing.assert_array_equal(second, upload(4))


def test_a_replaced_upload_leaves_the_feedback_to_the_newer_one(upload):
    first = upload(2)
    upload(1, cancelled=True)
    assert not np.array_equal(first, upload(3))


@pytest.mark.parametrize("versions", [((1, 0),), ()])
def test_a_probe_leaves_the_feedback_as_it_is(make_upload, versions):
    probed, plain = make_upload(), make_upload()
    for round_ in (1, 2, 3):
        np.testing.assert_array_equal(probed(round_), plain(round_))
        for probe in (0, round_, round_ + 1):
            probed(probe, probe=True, versions=versions)


@pytest.mark.parametrize("changes", [{"epoch": 2}, {"start_id": "b"}])
def test_the_feedback_of_another_start_of_the_syncer_is_not_added(upload, changes):
    """A restored copy of the syncer's volume counts the same epochs again."""
    first = upload(1)
    assert not np.array_equal(first, upload(2))
    np.testing.assert_array_equal(first, upload(3, identity=replace(IDENTITY, **changes)))


def test_one_report_is_not_uploaded_for_two_fragments():
    """The syncer would refuse the second: a report is merged once, into whatever fragment."""
    tensors = [Tensor(name=name, shape=(256,), dtype="float32") for name in "ab"]
    memory = PlainMemory(cut(tensors, num_fragments=2))
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1)
    encoder = Encoder(memory, spec, BufferPool(most_idle_bytes=1 << 20))
    memory.copies = [HostCopy(local_step=3, steps=3, tokens=30, base=0)] * 2
    first, second = (
        Pulled(round=round_, attempt=1, fragment=round_ - 1, versions=((1, 0),))
        for round_ in (1, 2)
    )
    assert not encoder.repeats(first)
    encoder.pull(first, IDENTITY).close()
    assert encoder.repeats(second)
    assert not encoder.repeats(first), "the same round may be pulled again"
    memory.copies[1] = HostCopy(local_step=4, steps=4, tokens=40, base=0)
    assert not encoder.repeats(second)


@pytest.mark.parametrize("content", [bulk.DELTA, bulk.WHOLE])
def test_statistics_that_are_not_finite_are_sent_as_they_were_last_received(content, caplog):
    tensors = [
        Tensor(name="weight", shape=(8,), dtype="float32"),
        Tensor(name="mean", shape=(4,), dtype="float32", buffer=True),
        Tensor(name="var", shape=(4,), dtype="float32", buffer=True),
    ]
    memory = PlainMemory(cut(tensors, num_fragments=2))
    memory.inbox(1)[:], memory.host(1)[:] = 5.0, 7.0
    memory.host(1)[129:131] = np.nan, np.inf  # of var
    memory.publish(1, 1, (1, 4))
    memory.copies = [HostCopy(local_step=3, steps=3, tokens=30, base=1)] * 2
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1)
    encoder = Encoder(memory, spec, BufferPool(most_idle_bytes=1 << 20))
    versions = ((1, 4),) if content == bulk.DELTA else ((1, 9),)
    for round_ in (1, 2):
        pull = Pulled(round=round_, attempt=1, fragment=1, versions=versions)
        upload = encoder.pull(pull, IDENTITY)
        assert upload.header.content == content
        chunk = frames.unpack(list(upload.messages())[1])
        sent = np.frombuffer(chunk.payload, np.float32)
        expected = [-2, 0, 0, -2] if content == bulk.DELTA else [7, 5, 5, 7]
        np.testing.assert_array_equal(sent[128:132], expected)
        np.testing.assert_array_equal(sent[:4], -2 if content == bulk.DELTA else 7)
        assert np.isfinite(list(upload.header.norms)).all()
        upload.close()
    assert caplog.text.count("values of var are NaN or Inf") == 1


def test_an_upload_of_another_fragment_meanwhile_does_not_end_the_check_for_repeats():
    memory = PlainMemory(LAYOUT)
    memory.copies = [HostCopy(local_step=3, steps=3, tokens=30, base=0)]
    spec = RunSpec(job="j", steps=9, fragments=1, interval=1, overlap=1)
    encoder = Encoder(memory, spec, BufferPool(most_idle_bytes=1 << 20))
    pull = Pulled(round=1, attempt=1, fragment=0, versions=((1, 0),))

    class Meanwhile(int):
        """A local step; another thread uploads a further fragment when it is compared."""

        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            encoder._sent[len(encoder._sent) + 1] = 8
            return int(self) == other

    encoder._sent.update({1: Meanwhile(7), 2: Meanwhile(3)})
    assert encoder.repeats(pull)


def test_deltas_of_a_model_that_never_changes_are_counted_once_there_are_two_of_each_fragment():
    """As of a program that trains a copy of the parameters; statistics may change without them."""
    tensors = [
        *(Tensor(name=name, shape=(128,), dtype="float32") for name in "ab"),
        Tensor(name="mean", shape=(4,), dtype="float32", buffer=True),
    ]
    memory = PlainMemory(cut(tensors, num_fragments=3))
    spec = RunSpec(job="j", steps=9, fragments=3, interval=3, overlap=1)
    encoder = Encoder(memory, spec, BufferPool(most_idle_bytes=1 << 20))
    memory.copies = [HostCopy(local_step=3, steps=3, tokens=30, base=1)] * 3
    for fragment in range(3):
        memory.publish(fragment, 1, (1, 4))

    def counts(*fragments: int, probe: bool = False) -> list[int]:
        found = []
        for fragment in fragments:
            pull = Pulled(round=1, attempt=1, fragment=fragment, versions=((1, 4),), probe=probe)
            encoder.pull(pull, IDENTITY).close()
            found.append(encoder.unchanged)
        return found

    buffers = next(f.index for f in memory.layout.fragments if f.buffers)
    a, b = (f.index for f in memory.layout.fragments if not f.buffers)
    memory.host(buffers)[0] = 1.0
    assert counts(a, b, a, buffers) == [0, 0, 0, 0]
    assert counts(b, probe=True) == [0]
    assert counts(b, a) == [4, 5]
    memory.host(b)[5] = 1e-20
    assert counts(b, a) == [0, 0]
    memory.host(b)[5] = 0
    assert counts(a, a, a, b) == [0, 0, 0, 5], "one fragment of several may rest"


def test_a_copy_from_before_a_received_result_is_uploaded_only_if_none_follows():
    """It holds steps that the result holds already: against Θ of now, it would undo what the others did."""
    memory = PlainMemory(LAYOUT)
    memory.copies = [HostCopy(local_step=3, steps=3, tokens=30, base=1)]
    memory.publish(0, 1, (1, 4))
    spec = RunSpec(job="j", steps=9, fragments=1, interval=1, overlap=1)
    encoder = Encoder(memory, spec, BufferPool(most_idle_bytes=1 << 20))
    pull = Pulled(round=9, attempt=1, fragment=0, versions=((1, 8), (1, 4)))
    assert not encoder.repeats(pull)
    memory.publish(0, 2, (1, 8))
    assert encoder.repeats(pull)
    with contextlib.closing(encoder.pull(pull, IDENTITY)) as upload:
        assert upload.header.content == bulk.WHOLE, "a program may rest for long, and has its part"
    memory.copies = [HostCopy(local_step=4, steps=1, tokens=10, base=2)]
    assert not encoder.repeats(pull)
    with contextlib.closing(encoder.pull(pull, IDENTITY)) as upload:
        assert upload.header.content == bulk.DELTA
        assert (upload.header.base.epoch, upload.header.base.step) == (1, 8)
