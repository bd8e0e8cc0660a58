"""Downloads without a connection: what is requested again, and what the end of a stream means."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.codec import formats, frames
from diloco.errors import DamagedError, ProtocolError, StaleIncarnationError, UnavailableError
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.syncers.streams import ABORTED, COMMITTED, UNDECIDED, damaged, stream, wanted
from diloco_worker.link.assembly import MAX_REPEATS, Assembly, Outcome, Wanted, decode_into
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.transfer import Identity

FRAGMENT = cut(
    [Tensor(name="a", shape=(2 * CHUNK + 128,), dtype="float32")], num_fragments=1
).fragments[0]
VALUES = np.arange(FRAGMENT.elements, dtype=np.float32)
ASKED = Wanted(
    identity=Identity(learner="eu/0", epoch=1, incarnation=2), fragment=0, round=7, attempt=2,
    format=formats.FP32, expected=FRAGMENT,
)  # fmt: skip


@pytest.fixture
def buffers():
    return BufferPool(most_idle_bytes=0)


@pytest.fixture
def assembly(buffers):
    return Assembly(ASKED, buffers.acquire, buffers.release)


def feed(assembly, *, version=(1, 7), trailer=COMMITTED, damage=(), only=None):
    """Request, and process the reply; returns the request."""
    request = assembly.request()
    messages = stream(request, FRAGMENT, VALUES, version=version, trailer=trailer)
    for index, message in enumerate(messages):
        if only is None or index in only:
            assembly.add(damaged(message) if index in damage else message)
    return wanted(request)


def decoded(assembly):
    payloads, out = assembly.payloads(), np.empty(FRAGMENT.elements, np.float32)
    decode_into(payloads, FRAGMENT, out)
    return payloads, out


def test_a_committed_download_is_complete_and_hands_its_buffer_over(assembly, buffers):
    request = feed(assembly)
    assert (request.round, request.attempt, list(request.chunks)) == (7, 2, [])
    assert (request.learner, request.epoch, request.incarnation) == ("eu/0", 1, 2)
    assert assembly.end() is Outcome.COMMITTED
    payloads, values = decoded(assembly)
    np.testing.assert_array_equal(values, VALUES)
    assert payloads.version == (1, 7)
    assembly.discard()
    assert buffers.used_bytes == payloads.size_bytes == 4 * FRAGMENT.elements


def test_an_aborted_download_leaves_no_buffer(assembly, buffers):
    feed(assembly, trailer=ABORTED)
    assert assembly.end() is Outcome.ABORTED
    assembly.discard()
    assert buffers.held_bytes == 0


def test_14_an_undecided_download_is_requested_again_for_the_same_round_and_attempt(assembly):
    feed(assembly, trailer=UNDECIDED)
    for _ in range(2 * MAX_REPEATS):  # a slow merge is no damage: no limit
        assert assembly.end() is Outcome.UNDECIDED
        request = feed(assembly, trailer=UNDECIDED)
        assert (request.round, request.attempt, list(request.chunks)) == (7, 2, [0])
    assert assembly.end() is Outcome.UNDECIDED
    feed(assembly)
    assert assembly.end() is Outcome.COMMITTED
    np.testing.assert_array_equal(decoded(assembly)[1], VALUES)


def test_chunks_that_an_undecided_stream_did_not_bring_are_requested(assembly):
    feed(assembly, trailer=UNDECIDED, only=(0, 1, 4))
    assert assembly.end() is Outcome.UNDECIDED
    assert list(feed(assembly, trailer=COMMITTED).chunks) == [1, 2]
    assert assembly.end() is Outcome.COMMITTED


@pytest.mark.parametrize(
    ("damage", "again"), [((2,), [1]), ((1, 3), [0, 2]), ((0,), []), ((4,), [0])]
)
def test_only_what_was_damaged_is_requested_again(assembly, damage, again):
    feed(assembly, damage=damage)
    assert assembly.end() is Outcome.DAMAGED
    assert list(feed(assembly).chunks) == again
    assert assembly.end() is Outcome.COMMITTED
    np.testing.assert_array_equal(decoded(assembly)[1], VALUES)


def test_a_trailer_counts_for_its_own_stream_only(assembly):
    feed(assembly, damage=(2,))
    assert assembly.end() is Outcome.DAMAGED
    request = assembly.request()
    *messages, trailer = stream(request, FRAGMENT, VALUES, version=(1, 7))
    for message in (*messages, damaged(trailer)):
        assembly.add(message)
    assert assembly.end() is Outcome.DAMAGED


def test_damage_without_end_is_an_error(assembly):
    for _ in range(MAX_REPEATS):
        feed(assembly, damage=(1,))
        assert assembly.end() is Outcome.DAMAGED
    feed(assembly, damage=(1,))
    with pytest.raises(DamagedError, match="still has damaged chunks"):
        assembly.end()


def test_a_stream_that_ends_early_is_an_error(assembly):
    feed(assembly, trailer=None)
    with pytest.raises(DamagedError, match="without a trailer"):
        assembly.end()


def test_a_newer_version_starts_over(assembly):
    feed(assembly, damage=(2,))
    assembly.end()
    feed(assembly, version=(1, 8))
    assert assembly.end() is Outcome.DAMAGED
    assert list(feed(assembly, version=(1, 9)).chunks) == []
    assert assembly.end() is Outcome.COMMITTED
    assert decoded(assembly)[0].version == (1, 9)


def test_a_version_that_changes_is_no_damage(assembly):
    for step in range(4 * MAX_REPEATS):  # and each time the stream of the whole breaks off
        feed(assembly, version=(1, step), only=(0, 1))
        feed(assembly, version=(1, step + 1))
        assert assembly.end() is Outcome.DAMAGED
    feed(assembly, version=(1, 99))
    assert assembly.end() is Outcome.COMMITTED


def test_a_chunk_counts_as_arrived_once_for_each_version(assembly):
    feed(assembly, damage=(2,))
    assert assembly.arrived == 2
    [header, *chunks, _trailer] = stream(assembly.request(), FRAGMENT, VALUES, version=(1, 7))
    for message in (header, *chunks, *chunks):
        assembly.add(message)
    assert assembly.arrived == 3
    assembly.add(next(iter(stream(assembly.request(), FRAGMENT, VALUES, version=(1, 8)))))
    for message in chunks:
        assembly.add(message)
    assert assembly.arrived == 4


@pytest.mark.parametrize(
    "changes", [{"fragment": 1}, {"format": bulk.BF16}, {"elements": 128}, {"chunks": 4}]
)
def test_a_header_of_something_else_is_refused_without_a_buffer(assembly, buffers, changes):
    header = bulk.DownloadHeader(
        fragment=0, format=bulk.FP32, elements=FRAGMENT.elements, chunks=FRAGMENT.chunks
    )
    header.MergeFrom(bulk.DownloadHeader(**changes))
    assembly.request()
    with pytest.raises(ProtocolError):
        assembly.add(frames.pack(frames.Kind.HEADER, 0, header.SerializeToString()))
    assert buffers.held_bytes == 0


@pytest.mark.parametrize(("elements", "chunks"), [(1 << 41, 1 << 21), (10, 2), (0, 1)])
def test_impossible_constants_are_refused_without_a_buffer(buffers, elements, chunks):
    asked = Wanted(identity=ASKED.identity, fragment=1, format=formats.RAW, expected=None)
    assembly = Assembly(asked, buffers.acquire, buffers.release)
    header = bulk.DownloadHeader(fragment=1, format=bulk.RAW, elements=elements, chunks=chunks)
    assembly.request()
    with pytest.raises(ProtocolError, match="constants"):
        assembly.add(frames.pack(frames.Kind.HEADER, 0, header.SerializeToString()))
    assert buffers.held_bytes == 0


def test_a_round_that_is_over_is_replaced_by_the_current_version_where_that_will_do(buffers):
    def refused(error, *, or_current):
        asked = Wanted(
            identity=ASKED.identity, fragment=0, round=7, attempt=2, format=formats.FP32,
            expected=FRAGMENT, or_current=or_current,
        )  # fmt: skip
        assembly = Assembly(asked, buffers.acquire, buffers.release)
        feed(assembly, only=(0, 1))
        return assembly, assembly.refused(error)

    assembly, again = refused(UnavailableError("the round is over"), or_current=True)
    assert again
    assert buffers.held_bytes == 0
    request = feed(assembly)
    assert (request.round, request.attempt, list(request.chunks)) == (0, 0, [])
    assert assembly.end() is Outcome.COMMITTED
    assert not assembly.refused(UnavailableError("no model"))
    assert not refused(UnavailableError("the round is over"), or_current=False)[1]
    assert not refused(StaleIncarnationError("replaced"), or_current=True)[1]
