"""A download over gRPC that takes too long: what is requested again, and when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from diloco.codec import formats
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco_syncer.core import upload_limits
from diloco_syncer.rpc import source
from diloco_testing.syncers.streams import stream, wanted
from diloco_worker.link import download
from diloco_worker.link.assembly import Assembly, Wanted, decode_into
from diloco_worker.link.transfer import CancelToken, Identity

[FRAGMENT] = cut([Tensor(name="a", shape=(2 * CHUNK,), dtype="float32")], num_fragments=1).fragments
IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)
TIMEOUT_SECONDS = 30


class Syncer:
    """Answers each request with the next of `versions`; the first stream exceeds its deadline after one chunk."""

    def __init__(self, *versions: tuple[int, int]) -> None:
        self.versions, self.requests = list(versions), []
        self.seconds: list[float] = []
        """Until the deadline of each request."""
        handler = grpc.unary_stream_rpc_method_handler(self._download)
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("diloco.v1.Bulk", {"Download": handler}),)
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def _download(self, request, context):
        self.requests.append(wanted(request))
        self.seconds.append(context.time_remaining())
        version = self.versions.pop(0)
        values = np.full(FRAGMENT.elements, version[1], np.float32)
        messages = list(stream(request, FRAGMENT, values, version=version))
        if len(self.requests) > 1:
            yield from messages
            return
        yield from messages[:2]
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "as gRPC ends it")

    def close(self):
        self.channel.close()
        self._server.stop(None).wait(TIMEOUT_SECONDS)


def fetched(syncer):
    asked = Wanted(identity=IDENTITY, fragment=0, format=formats.BF16, expected=FRAGMENT)
    assembly = Assembly(asked, lambda size: np.empty(size, np.uint8), lambda buffer: None)
    try:
        payloads = download.fetch(syncer.channel, assembly, CancelToken())
    finally:
        syncer.close()
    values_N = np.empty(FRAGMENT.elements, np.float32)
    decode_into(payloads, FRAGMENT, values_N)
    limit = download.allowed_seconds(assembly)
    # gRPC rounds a deadline up to three digits.
    assert all(0 < seconds <= 1.01 * limit for seconds in syncer.seconds), (limit, syncer.seconds)
    return payloads.version, set(values_N)


def test_what_a_stream_has_not_brought_in_time_is_requested_again():
    syncer = Syncer((1, 5), (1, 5))
    assert fetched(syncer) == ((1, 5), {5.0})
    assert [[*request.chunks] for request in syncer.requests] == [[], [1]]


def test_a_version_that_is_newer_by_then_is_downloaded_whole():
    syncer = Syncer((1, 5), (1, 9), (1, 9))
    assert fetched(syncer) == ((1, 9), {9.0})
    assert [[*request.chunks] for request in syncer.requests] == [[], [1], [0]]


@pytest.mark.parametrize(("round_", "more"), [(0, 0.0), (7, source.OUTPUT_SECONDS)])
def test_a_stream_has_the_time_of_an_upload_and_that_of_a_result_also_waits_for_its_merge(
    round_, more
):
    asked = Wanted(
        identity=IDENTITY, fragment=0, round=round_, format=formats.FP32, expected=FRAGMENT
    )
    size = 4 * FRAGMENT.elements
    limit = upload_limits.START_SECONDS + size / upload_limits.MIN_BYTES_PER_SECOND
    assert download.allowed_seconds(Assembly(asked, np.empty, print)) == limit + more


def test_the_constants_whose_size_is_not_known_have_no_limit():
    asked = Wanted(identity=IDENTITY, fragment=1, format=formats.RAW, expected=None)
    assert download.allowed_seconds(Assembly(asked, np.empty, print)) is None
