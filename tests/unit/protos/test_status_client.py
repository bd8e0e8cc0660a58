"""Asking a syncer for its status, over real connections."""

import contextlib
import threading

import grpc
import pytest

from diloco.errors import DilocoError, UnavailableError
from diloco.rpc import servers
from diloco.rpc.status_client import SyncerClient
from diloco.v1 import syncer_pb2, syncer_pb2_grpc


class FakeSyncer(syncer_pb2_grpc.SyncerServicer):
    def __init__(self) -> None:
        self.answer = threading.Event()
        self.text = ""
        self.compression = grpc.Compression.NoCompression

    def GetStatus(self, request, context):  # noqa: N802
        self.answer.wait(10)
        context.set_compression(self.compression)
        return syncer_pb2.StatusReply(job="job", step=7, waiting_for=self.text)

    def Failed(self, request, context):  # noqa: N802
        self.text = f"{request.reason}: {request.message}"
        return syncer_pb2.FailedReply()

    def RegionFailed(self, request, context):  # noqa: N802
        self.text = f"{request.region}: {request.reason}: {request.message}"
        return syncer_pb2.RegionFailedReply()


@pytest.fixture
def syncer():
    fake = FakeSyncer()
    server = servers.server(max_workers=2)
    syncer_pb2_grpc.add_SyncerServicer_to_server(fake, server)
    port = servers.bind(server, "127.0.0.1:0", None)
    server.start()
    fake.endpoint = f"127.0.0.1:{port}"
    yield fake
    fake.answer.set()
    server.stop(None).wait(10)


def test_the_answer_is_the_syncers(syncer):
    syncer.answer.set()
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        assert client.status(timeout_seconds=10).step == 7


def test_a_failure_reaches_the_syncer(syncer):
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        client.failed("DeadlineExceeded", "ran too long", timeout_seconds=10)
    assert syncer.text == "DeadlineExceeded: ran too long"


def test_a_failure_of_a_region_reaches_the_syncer(syncer):
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        client.region_failed("us", "LearnerRefused", "all failed", timeout_seconds=10)
    assert syncer.text == "us: LearnerRefused: all failed"


def test_a_failure_cannot_be_reported_to_a_syncer_that_is_not_there():
    with (
        contextlib.closing(SyncerClient("127.0.0.1:1")) as client,
        pytest.raises(UnavailableError, match="UNAVAILABLE"),
    ):
        client.failed("DeadlineExceeded", "", timeout_seconds=10)


def test_a_syncer_that_does_not_answer_in_time_is_unavailable(syncer):
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        with pytest.raises(UnavailableError):
            client.status(timeout_seconds=0.2)
        syncer.answer.set()
        assert client.status(timeout_seconds=10).job == "job"


def test_a_syncer_that_is_not_there_is_unavailable():
    with (
        contextlib.closing(SyncerClient("127.0.0.1:1")) as client,
        pytest.raises(UnavailableError, match="UNAVAILABLE"),
    ):
        client.status(timeout_seconds=10)


@pytest.mark.parametrize(
    "compression",
    [
        grpc.Compression.NoCompression,
        pytest.param(grpc.Compression.Gzip, marks=pytest.mark.slow),
    ],
)
def test_a13_an_answer_that_no_status_needs_is_refused_before_it_is_held(syncer, compression):
    """The program that answers is the job's own; the operator asks for all namespaces."""
    syncer.text, syncer.compression = "A" * (64 << 20), compression
    syncer.answer.set()
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        with pytest.raises(DilocoError):
            client.status(timeout_seconds=20)
        syncer.text, syncer.compression = "", grpc.Compression.NoCompression
        assert client.status(timeout_seconds=20).step == 7


def test_a13_a_compressed_answer_is_refused_whatever_its_size(syncer):
    syncer.text, syncer.compression = "A" * 10_000, grpc.Compression.Gzip
    syncer.answer.set()
    with contextlib.closing(SyncerClient(syncer.endpoint)) as client:
        with pytest.raises(DilocoError):
            client.status(timeout_seconds=20)
