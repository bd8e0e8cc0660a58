"""Downloads at their edges: constants, short chunks, repeated headers, the buffer."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.codec import formats, frames
from diloco.errors import DamagedError, ProtocolError
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.plain_memory import PlainMemory
from diloco_testing.syncers.streams import COMMITTED, wanted
from diloco_worker.core import events as ev
from diloco_worker.link.assembly import Assembly, Outcome, Payloads, Wanted
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.placement import Placement
from diloco_worker.link.transfer import RAW_CHUNK, Identity

LAYOUT = cut([Tensor(name=n, shape=(CHUNK + 128,), dtype="float32") for n in "ab"], num_fragments=2)
FRAGMENT = LAYOUT.fragments[1]
IDENTITY = Identity(learner="eu/0", epoch=3, incarnation=2)


def constants(size=RAW_CHUNK + 5):
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, size, dtype=np.uint8)


def header_of(elements, chunks, *, version=(3, 0), **changes):
    fields = {
        "fragment": 2, "format": bulk.RAW, "elements": elements, "chunks": chunks, "step": 40,
        "version": pb.Version(epoch=version[0], step=version[1]), **changes,
    }  # fmt: skip
    return frames.pack(frames.Kind.HEADER, 0, bulk.DownloadHeader(**fields).SerializeToString())


def chunk(index, payload):
    return frames.pack(frames.Kind.CHUNK, index, np.ascontiguousarray(payload))


TRAILER = frames.pack(frames.Kind.TRAILER, 0, COMMITTED.SerializeToString())


def assembly_of(expected=None, *, fragment=2, fmt=formats.RAW, pool=None):
    pool = pool or BufferPool(most_idle_bytes=0)
    asked = Wanted(identity=IDENTITY, fragment=fragment, format=fmt, expected=expected)
    return Assembly(asked, pool.acquire, pool.release), pool


def test_constants_arrive_in_chunks_of_which_the_last_is_short():
    data = constants()
    assembly, _ = assembly_of()
    request = assembly.request()
    assert (frames.unpack(request).kind, frames.unpack(request).index) == (frames.Kind.HEADER, 0)
    assert list(wanted(request).chunks) == []
    for message in (
        header_of(data.size, 2), chunk(1, data[RAW_CHUNK:]), chunk(0, data[:RAW_CHUNK]), TRAILER,
    ):  # fmt: skip
        assembly.add(message)
    assert assembly.end() is Outcome.COMMITTED
    found = assembly.payloads()
    assert (found.size_bytes, found.version, found.step) == (data.size, (3, 0), 40)
    assert found.format == formats.RAW
    np.testing.assert_array_equal(found.buffer[: data.size], data)


def test_a_model_without_constants_has_nothing_to_send_and_is_complete():
    assembly, _ = assembly_of()
    assembly.request()
    assembly.add(header_of(0, 0))
    assert list(wanted(assembly.request()).chunks) == []
    assembly.add(TRAILER)
    assert assembly.end() is Outcome.COMMITTED
    assert assembly.payloads().size_bytes == 0


@pytest.mark.parametrize("size", [RAW_CHUNK - 1, RAW_CHUNK + 1])
def test_a_chunk_of_another_length_is_damage(size):
    assembly, _ = assembly_of()
    assembly.request()
    assembly.add(header_of(RAW_CHUNK + 5, 2))
    with pytest.raises(DamagedError, match=f"chunk 0 has {size} bytes, expected {RAW_CHUNK}"):
        assembly.add(chunk(0, np.zeros(size, np.uint8)))


def test_the_largest_constants_are_not_refused_for_their_size_alone():
    pool = BufferPool(most_idle_bytes=0)
    asked = Wanted(identity=IDENTITY, fragment=2, format=formats.RAW, expected=None)
    acquired = []

    def acquire(size_bytes):
        acquired.append(size_bytes)
        return np.empty(0, np.uint8)

    assembly = Assembly(asked, acquire, pool.release)
    assembly.request()
    assembly.add(header_of(1 << 40, (1 << 40) // RAW_CHUNK))
    assert acquired == [1 << 40]
    with pytest.raises(ProtocolError, match="constants"):
        assembly.add(header_of((1 << 40) + 1, (1 << 40) // RAW_CHUNK + 1, version=(3, 1)))


def test_a_chunk_before_its_header_is_ignored_and_requested_again():
    data = constants(10)
    assembly, _ = assembly_of()
    assembly.request()
    assembly.add(chunk(0, data))
    assembly.add(TRAILER)
    with pytest.raises(ProtocolError, match="not complete"):
        assembly.payloads()


def test_a_repeated_header_keeps_what_has_arrived_and_a_repeated_chunk_changes_nothing():
    data = constants()
    assembly, _ = assembly_of()
    assembly.request()
    assembly.add(header_of(data.size, 2))
    assembly.add(chunk(0, data[:RAW_CHUNK]))
    assembly.add(header_of(data.size, 2))
    assembly.add(chunk(0, np.zeros(RAW_CHUNK, np.uint8)))
    assert list(wanted(assembly.request()).chunks) == [1]
    assembly.add(chunk(1, data[RAW_CHUNK:]))
    np.testing.assert_array_equal(assembly.payloads().buffer[: data.size], data)


@pytest.mark.parametrize("version", [(4, 0), (3, 1)])
def test_another_version_starts_over_in_the_same_buffer(version):
    data, acquired = constants(10), []

    def acquire(size_bytes):
        acquired.append(size_bytes)
        return np.empty(size_bytes, np.uint8)

    asked = Wanted(identity=IDENTITY, fragment=2, format=formats.RAW, expected=None)
    assembly = Assembly(asked, acquire, lambda buffer: None)
    assembly.request()
    assembly.add(header_of(10, 1))
    assembly.add(chunk(0, data))
    assembly.add(header_of(10, 1, version=version))
    assert acquired == [10]
    assert list(wanted(assembly.request()).chunks) == [0]
    assembly.add(chunk(0, data))
    assert assembly.payloads().version == version


def test_a_longer_version_gets_a_longer_buffer_and_gives_the_short_one_back():
    assembly, pool = assembly_of()
    assembly.request()
    assembly.add(header_of(10, 1))
    assembly.add(header_of(RAW_CHUNK, 1, version=(3, 1)))
    assert pool.used_bytes == RAW_CHUNK
    assembly.discard()
    assert pool.held_bytes == 0


def test_the_buffer_is_handed_over_once():
    assembly, pool = assembly_of()
    assembly.request()
    assembly.add(header_of(10, 1))
    assembly.add(chunk(0, constants(10)))
    assembly.payloads()
    with pytest.raises(ProtocolError, match="not complete"):
        assembly.payloads()
    assembly.discard()
    assert pool.used_bytes == 10, "it belongs to the caller"


def test_without_a_trailer_but_with_damage_everything_missing_is_requested_again():
    assembly, _ = assembly_of()
    assembly.request()
    message = header_of(10, 1)
    assembly.add(message[:-1] + bytes([message[-1] ^ 1]))
    assert assembly.end() is Outcome.DAMAGED
    assembly.request()
    with pytest.raises(DamagedError, match="fragment 2 ended without a trailer"):
        assembly.end()


def test_chunks_of_a_fragment_lie_one_after_the_other_as_encoded():
    values = np.arange(FRAGMENT.elements, dtype=np.float32)
    assembly, _ = assembly_of(FRAGMENT, fragment=1, fmt=formats.BF16)
    request = wanted(assembly.request())
    assert (request.fragment, request.format, request.round) == (1, formats.BF16, 0)
    header = header_of(
        FRAGMENT.elements, FRAGMENT.chunks, fragment=1, format=bulk.BF16, version=(3, 9)
    )
    assembly.add(header)
    encoded = []
    for index in range(FRAGMENT.chunks):
        lo, hi = FRAGMENT.chunk(index)
        out = np.empty(formats.encoded_bytes(formats.BF16, hi - lo), np.uint8)
        formats.encode(formats.BF16, values[lo:hi], out)
        encoded.append(out)
    for index in (1, 0):
        assembly.add(chunk(index, encoded[index]))
    found = assembly.payloads()
    assert found.size_bytes == 2 * FRAGMENT.elements
    np.testing.assert_array_equal(found.buffer[: found.size_bytes], np.concatenate(encoded))


# ---------------------------------------------------------------- placement


def placement_of(*, constants_bytes=8, down="BF16"):
    memory = PlainMemory(LAYOUT, constants_bytes=constants_bytes)
    pool = BufferPool(most_idle_bytes=0)
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1, wire_down=down)
    return Placement(memory, spec, pool), memory, pool


def payloads_of(pool, data, *, fmt=formats.RAW, version=(3, 7)):
    buffer = pool.acquire(data.size + 3)
    buffer[: data.size] = data
    return Payloads(format=fmt, version=version, step=9, buffer=buffer, size_bytes=data.size)


@pytest.mark.parametrize(
    ("request_", "fmt", "attempt"),
    [
        (ev.Download(fragment=1), formats.FP32, 0),
        (ev.Download(fragment=1, exact=False), formats.BF16, 0),
        (ev.Download(fragment=1, round=4, attempt=2), formats.BF16, 2),
        (ev.Download(fragment=2), formats.RAW, 0),
    ],
)
def test_a_request_names_who_asks_for_what_in_which_format(request_, fmt, attempt):
    placement, _, _ = placement_of()
    asked = wanted(placement.begin(request_, IDENTITY).request())
    assert (asked.learner, asked.epoch, asked.incarnation) == ("eu/0", 3, 2)
    assert (asked.fragment, asked.round, asked.attempt, asked.format) == (
        request_.fragment, request_.round, attempt, fmt,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("round_", "tries", "or_current"), [(4, 1, False), (4, 2, True), (1, 2, True), (0, 2, False)]
)
def test_from_the_second_try_of_a_round_the_current_version_will_do(round_, tries, or_current):
    placement, _, _ = placement_of()
    request = ev.Download(fragment=1, round=round_, tries=tries)
    assert placement.begin(request, IDENTITY)._wanted.or_current is or_current


def test_constants_are_copied_to_where_the_trainer_reads_them():
    placement, memory, pool = placement_of(constants_bytes=8)
    data = constants(8)
    staged = placement.stage(ev.Download(fragment=2), payloads_of(pool, data))
    np.testing.assert_array_equal(memory.constants, data)
    assert (staged.fragment, staged.version) == (2, (3, 7))
    placement.discard(staged)
    assert pool.used_bytes == 0


def test_each_download_has_a_ticket_of_its_own():
    placement, _, pool = placement_of()
    tickets = [
        placement.stage(ev.Download(fragment=0), payloads_of(pool, constants(4))).ticket
        for _ in range(3)
    ]
    assert len(set(tickets)) == 3


def test_a_placed_fragment_is_published_and_its_buffer_released():
    placement, memory, pool = placement_of()
    values = np.arange(FRAGMENT.elements, dtype=np.float32)
    data = payloads_of(pool, values.view(np.uint8), fmt=formats.FP32)
    staged = placement.stage(ev.Download(fragment=1), data)
    assert placement.place(ev.Place(staged=staged, generation=5)) == ev.Placed(fragment=1)
    np.testing.assert_array_equal(memory.inbox(1), values)
    assert (memory.inbox_state(1).generation, memory.inbox_state(1).version) == (5, (3, 7))
    assert pool.used_bytes == 0


def test_a_fragment_that_cannot_be_decoded_leaves_an_inbox_that_is_not_read():
    placement, memory, pool = placement_of()
    memory.publish(1, 4, (3, 1))
    values = np.full(FRAGMENT.elements, np.nan, np.float32)
    data = payloads_of(pool, values.view(np.uint8), fmt=formats.FP32)
    staged = placement.stage(ev.Download(fragment=1), data)
    placed = placement.place(ev.Place(staged=staged, generation=5))
    assert placed.fragment == 1
    assert placed.error
    assert (memory.inbox_state(1).generation, memory.inbox_state(1).version) == (4, None)
    assert pool.used_bytes == 0


@pytest.mark.parametrize(("round_", "of"), [(0, ""), (12, " for round 12")])
def test_a_download_is_named_by_its_fragment_and_the_round_that_it_is_the_result_of(round_, of):
    pool = BufferPool(most_idle_bytes=0)
    asked = Wanted(
        identity=IDENTITY, fragment=1, round=round_, format=formats.FP32, expected=FRAGMENT
    )
    assert str(Assembly(asked, pool.acquire, pool.release)) == f"download of fragment 1{of}"


def test_a_message_of_another_kind_is_no_chunk_of_a_download():
    data = constants(10)
    assembly, _ = assembly_of()
    assembly.request()
    assembly.add(header_of(10, 1))
    assembly.add(frames.pack(frames.Kind.END, 0, data))
    assert assembly.arrived == 0
    assembly.add(chunk(0, data))
    assembly.add(TRAILER)
    assert (assembly.end(), assembly.arrived) == (Outcome.COMMITTED, 1)
