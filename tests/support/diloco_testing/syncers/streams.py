"""The syncer's messages of a download, without a connection."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diloco.codec import formats, frames
from diloco.model.fragments import Fragment
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb

COMMITTED = bulk.DownloadTrailer(committed=True)
ABORTED = bulk.DownloadTrailer(aborted=True)
UNDECIDED = bulk.DownloadTrailer()


def wanted(request: bytes) -> bulk.DownloadRequest:
    """What a request asks for."""
    return bulk.DownloadRequest.FromString(bytes(frames.unpack(request).payload))


def stream(
    request: bytes, fragment: Fragment, values: np.ndarray, *, version: tuple[int, int],
    trailer: bulk.DownloadTrailer | None = COMMITTED,
) -> Iterator[bytes]:  # fmt: skip
    """Header, the chunks that were requested, and the trailer if there is any."""
    asked = wanted(request)
    header = bulk.DownloadHeader(
        fragment=fragment.index, format=asked.format, elements=fragment.elements,
        chunks=fragment.chunks, version=pb.Version(epoch=version[0], step=version[1]),
    )  # fmt: skip
    yield frames.pack(frames.Kind.HEADER, 0, header.SerializeToString())
    for index in asked.chunks or range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        buffer = np.empty(formats.encoded_bytes(asked.format, hi - lo), np.uint8)
        formats.encode(asked.format, values[lo:hi], buffer)
        yield frames.pack(frames.Kind.CHUNK, index, buffer)
    if trailer is not None:
        yield frames.pack(frames.Kind.TRAILER, 0, trailer.SerializeToString())


def damaged(message: bytes) -> bytes:
    """The message with a flipped bit."""
    return message[:-1] + bytes([message[-1] ^ 1])
