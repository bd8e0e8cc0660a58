"""A download over gRPC that brings nothing for too long: what is requested again, and when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from diloco.codec import formats
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco_syncer.core import upload_limits
from diloco_syncer.rpc import source
from diloco_testing.syncers.streams import damaged, stream, wanted
from diloco_worker.link import download
from diloco_worker.link.assembly import Assembly, Wanted, decode_into
from diloco_worker.link.buffers import MAX_TRANSFERS
from diloco_worker.link.transfer import CancelToken, Identity

[FRAGMENT] = cut([Tensor(name="a", shape=(2 * CHUNK,), dtype="float32")], num_fragments=1).fragments
IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)
TIMEOUT_SECONDS = 30


def assembly_of(round_=0):
    asked = Wanted(
        identity=IDENTITY, fragment=0, round=round_, format=formats.BF16, expected=FRAGMENT
    )
    return Assembly(asked, lambda size: np.empty(size, np.uint8), lambda buffer: None)


class Syncer:
    """Answers each request with the next of `versions`; the first stream brings one chunk and then nothing."""

    def __init__(self, *versions: tuple[int, int]) -> None:
        self.versions, self.requests = list(versions), []
        self.cancelled = threading.Event()
        """The first stream."""
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
        version = self.versions.pop(0)
        values = np.full(FRAGMENT.elements, version[1], np.float32)
        messages = list(stream(request, FRAGMENT, values, version=version))
        if len(self.requests) > 1:
            yield from messages
            return
        context.add_callback(self.cancelled.set)
        yield from messages[:2]
        assert self.cancelled.wait(TIMEOUT_SECONDS)

    def close(self):
        self.channel.close()
        self._server.stop(None).wait(TIMEOUT_SECONDS)


def fetched(syncer, monkeypatch):
    """The first stream may be silent for three checks after its chunk; the others as long as they like."""
    assembly, cancel = assembly_of(), CancelToken()
    add, wait = assembly.add, cancel.wait

    def added(message):
        add(message)
        monkeypatch.setattr(
            download, "SILENT_SECONDS", 0.03 if assembly.arrived == 1 else float("inf")
        )

    def paused(seconds):
        monkeypatch.setattr(download, "SILENT_SECONDS", float("inf"))
        return wait(seconds)

    monkeypatch.setattr(download, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(download, "SILENT_SECONDS", float("inf"))
    monkeypatch.setattr(assembly, "add", added)
    monkeypatch.setattr(cancel, "wait", paused)
    try:
        payloads = download.fetch(syncer.channel, assembly, cancel)
        assert syncer.cancelled.wait(TIMEOUT_SECONDS)
    finally:
        syncer.close()
    values_N = np.empty(FRAGMENT.elements, np.float32)
    decode_into(payloads, FRAGMENT, values_N)
    return payloads.version, set(values_N)


def test_what_a_stream_has_not_brought_in_time_is_requested_again(monkeypatch):
    syncer = Syncer((1, 5), (1, 5))
    assert fetched(syncer, monkeypatch) == ((1, 5), {5.0})
    assert [[*request.chunks] for request in syncer.requests] == [[], [1]]


def test_a_version_that_is_newer_by_then_is_downloaded_whole(monkeypatch):
    syncer = Syncer((1, 5), (1, 9), (1, 9))
    assert fetched(syncer, monkeypatch) == ((1, 9), {9.0})
    assert [[*request.chunks] for request in syncer.requests] == [[], [1], []]


def checks(silence, most):
    """How many checks it takes until the stream is ended."""
    return next(n for n in range(1, most + 2) if n > most or silence.check())


def test_a_slow_stream_may_take_any_time_as_long_as_chunks_come_and_a_trickle_ends():
    assembly, limit = assembly_of(), int(download.SILENT_SECONDS)
    silence = download.Silence(assembly)
    header, first, second, _ = stream(
        assembly.request(), FRAGMENT, np.zeros(FRAGMENT.elements, np.float32), version=(1, 5)
    )
    assembly.add(header)
    for chunk in (first, second):
        assert checks(silence, limit - 1) == limit
        assembly.add(chunk)
        assert not silence.check()
    for trickle in [header, first, damaged(second)] * (limit // 6):
        assert not silence.check()
        assembly.add(trickle)
    assert checks(silence, limit) == limit - limit // 6 * 3
    assert silence.expired


@pytest.mark.parametrize(("round_", "more"), [(0, 0.0), (7, source.OUTPUT_SECONDS)])
def test_a_chunk_has_the_time_of_an_upload_and_that_of_a_result_also_waits_for_its_merge(
    round_, more
):
    streams = MAX_TRANSFERS + 1
    limit = upload_limits.START_SECONDS + streams * CHUNK * 4 / upload_limits.MIN_BYTES_PER_SECOND
    assert download.silent_seconds(assembly_of(round_)) == limit + more == 102.0 + more


def test_the_constants_whose_size_is_not_known_have_the_same_limit():
    asked = Wanted(identity=IDENTITY, fragment=1, format=formats.RAW, expected=None)
    assert download.silent_seconds(Assembly(asked, np.empty, print)) == download.SILENT_SECONDS
