"""
Downloads: one fragment (or the constants) into a buffer, every chunk checked, damaged ones asked
for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from diloco import wire
from diloco.errors import DamagedError, ProtocolError
from diloco.fragments import CHUNK, Fragment
from diloco.transport import error_of
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.transfer import U8, Cancel, Identity

METHOD = "/diloco.v1.Bulk/Download"

MOST_REPEATS = 5
"""How often damaged chunks are asked for again."""

_MOST_RAW_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """A fragment as it travelled: decode it with `decode_into`."""

    format: int
    version: tuple[int, int]
    step: int
    """Global step t when the stream began."""
    buffer: U8
    """Encoded chunks one after the other; longer than they are."""
    size_bytes: int


def fetch(
    channel: grpc.Channel,
    *,
    identity: Identity,
    fragment: int,
    round: int,  # noqa: A002
    attempt: int,
    fmt: int,
    expected: Fragment | None,
    take_buffer: Callable[[int], U8],
    cancel: Cancel,
) -> Payloads | None:
    """
    Download one fragment.

    Args:
        channel: bulk channel.
        identity: learner "" for an observer.
        fragment: index; P for the constants.
        round: 0 for what is current.
        attempt: of that round.
        fmt: FORMAT_UNSPECIFIED for the job's.
        expected: how long it must be; None: the constants.
        take_buffer: gives a buffer of at least so many bytes.
        cancel: stops it.

    Returns:
        The payloads; None when the round was not committed.

    Raises:
        DilocoError: the syncer refused, the connection broke, or chunks stayed damaged.
    """
    transfer = _Transfer(expected, take_buffer)
    method: Any = channel.unary_stream(METHOD)  # bytes in, bytes out: no serializers
    wanted: tuple[int, ...] = ()
    for _ in range(1 + MOST_REPEATS):
        request = bulk.DownloadRequest(
            epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation, fragment=fragment,
            round=round, attempt=attempt, chunks=wanted, format=bulk.Format.ValueType(fmt),
        )  # fmt: skip
        call = method(wire.pack(wire.Kind.HEADER, 0, request.SerializeToString()))
        cancel.on_stop(call.cancel)
        transfer.intact = True
        try:
            for message in call:
                transfer.heard(message)
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()
        if transfer.committed is False:
            return None
        if transfer.committed and transfer.header is not None and not transfer.missing():
            return transfer.payloads(transfer.header)
        if transfer.committed is None and transfer.intact:
            raise DamagedError(f"the download of fragment {fragment} ended without a trailer")
        # Chunk 0 alone brings header and trailer anew when only those were damaged.
        wanted = transfer.missing() or (() if transfer.header is None else (0,))
    raise DamagedError(f"fragment {fragment} still has damaged chunks after {MOST_REPEATS} repeats")


def decode_into(
    payloads: Payloads, fragment: Fragment, out_N: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> None:
    """
    The values of a downloaded fragment.

    Raises:
        NotFiniteError: a value is NaN or Inf; `out_N` holds garbage.
    """
    at = 0
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        size = wire.encoded_bytes(payloads.format, hi - lo)
        wire.decode(payloads.format, payloads.buffer[at : at + size], out_N[lo:hi])
        at += size


class _Transfer:
    """Puts messages together over several requests."""

    def __init__(self, expected: Fragment | None, take_buffer: Callable[[int], U8]) -> None:
        self._expected, self._take_buffer = expected, take_buffer
        self.header: bulk.DownloadHeader | None = None
        self.committed: bool | None = None
        self.intact = True
        """No message of the last stream was damaged."""
        self._arrivals: wire.Arrivals | None = None
        self._buffer: U8 | None = None
        self._size_bytes = 0

    def missing(self) -> tuple[int, ...]:
        """Chunks to ask for again."""
        return self._arrivals.missing() if self._arrivals is not None else ()

    def heard(self, message: bytes) -> None:
        """Take one message in; a damaged one counts as not heard."""
        try:
            envelope = wire.unpack(message)
        except DamagedError:
            self.intact = False
            return
        if envelope.kind == wire.Kind.HEADER:
            self._begin(bulk.DownloadHeader.FromString(bytes(envelope.payload)))
        elif envelope.kind == wire.Kind.TRAILER:
            self.committed = bulk.DownloadTrailer.FromString(bytes(envelope.payload)).committed
        elif envelope.kind == wire.Kind.CHUNK and self.header is not None:
            self._chunk(self.header, envelope.index, envelope.payload)

    def _begin(self, header: bulk.DownloadHeader) -> None:
        if self.header is not None and _what(header) == _what(self.header):
            return  # a repeat of the same thing; else it is newer by now: start over
        if self._expected is None:
            if header.format != bulk.RAW or header.elements > _MOST_RAW_BYTES:
                raise ProtocolError(f"the constants came as format {header.format}, expected RAW")
        elif (header.elements, header.chunks) != (self._expected.elements, self._expected.chunks):
            raise ProtocolError(
                f"fragment {header.fragment} came with {header.elements} values in {header.chunks} chunks, "
                f"expected {self._expected.elements} in {self._expected.chunks}"
            )
        self.header = header
        self._arrivals = wire.Arrivals(header.chunks)
        self._size_bytes = sum(self._span(header, i)[1] for i in range(header.chunks))
        if self._buffer is None:
            self._buffer = self._take_buffer(self._size_bytes)

    def _span(self, header: bulk.DownloadHeader, index: int) -> tuple[int, int]:
        """Where a chunk lies in the buffer, and its length."""
        if self._expected is None:
            lo = index * CHUNK * 4
            return lo, min(header.elements, lo + CHUNK * 4) - lo
        lo, hi = self._expected.chunk(index)
        return wire.encoded_bytes(header.format, CHUNK) * index, wire.encoded_bytes(
            header.format, hi - lo
        )

    def _chunk(self, header: bulk.DownloadHeader, index: int, payload: memoryview) -> None:
        if self._arrivals is None or self._buffer is None:
            return
        lo, size = self._span(header, index)
        if len(payload) != size:
            raise DamagedError(f"chunk {index} has {len(payload)} bytes, expected {size}")
        if self._arrivals.heard(index):
            self._buffer[lo : lo + size] = np.frombuffer(payload, np.uint8)

    def payloads(self, header: bulk.DownloadHeader) -> Payloads:
        """All that arrived."""
        if self._buffer is None:
            raise DamagedError("a download without a header")
        return Payloads(
            format=header.format, version=(header.version.epoch, header.version.step), step=header.step,
            buffer=self._buffer, size_bytes=self._size_bytes,
        )  # fmt: skip


def _what(header: bulk.DownloadHeader) -> tuple[int, int, int]:
    return header.format, header.version.epoch, header.version.step
