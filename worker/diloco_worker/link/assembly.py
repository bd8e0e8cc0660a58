"""
Assembles a download from its messages: what to request, when it is complete. No I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from diloco.codec import formats, frames
from diloco.errors import DamagedError, DilocoError, ProtocolError, UnavailableError
from diloco.model.fragments import Fragment
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.link.transfer import RAW_CHUNK, U8, Identity

MAX_REPEATS = 5
"""How often damaged chunks are requested again."""

_MAX_RAW_BYTES = 1 << 40


class Outcome(Enum):
    """What the end of a stream means."""

    COMMITTED = auto()
    """All of it has arrived and counts: take `payloads`."""
    ABORTED = auto()
    """It will never count."""
    DAMAGED = auto()
    """Something is missing: request again at once."""
    UNDECIDED = auto()
    """The syncer has not decided about the round yet: request again after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to download."""

    identity: Identity
    """With an empty learner for an observer."""
    fragment: int
    """Index; P for the constants."""
    round: int = 0
    """0: the current version."""
    attempt: int = 0
    format: int
    expected: Fragment | None
    """The fragment, whose size must match; None: the constants."""
    or_current: bool = False
    """If the round is over, the current version will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """A fragment in its wire format: decode it with `decode_into`."""

    format: int
    version: tuple[int, int]
    step: int
    """Global step t when the stream began."""
    buffer: U8
    """Encoded chunks, one after the other; may be longer than `size_bytes`."""
    size_bytes: int


class Assembly:
    """
    One download: send `request`, `add` every message of its stream, then `end` states how to
    continue. The buffer belongs to the caller once `payloads` was called; `discard` releases it
    before.

    Args:
        wanted: what to download.
        acquire: returns a buffer of at least that many bytes.
        release: takes the buffer back.
    """

    def __init__(
        self, wanted: Wanted, acquire: Callable[[int], U8], release: Callable[[U8], None]
    ) -> None:
        self._wanted, self._acquire, self._release = wanted, acquire, release
        self._header: bulk.DownloadHeader | None = None
        self._trailer: bulk.DownloadTrailer | None
        self._intact: bool
        """No message of this stream was damaged."""
        self._newer: bool
        """This stream brings a newer version than the one before."""
        self.arrived = 0
        """Chunks, each counted once per version."""
        self._repeats = 0
        self._arrivals: frames.Arrivals | None = None
        self._buffer: U8 | None = None
        self._size_bytes: int

    def __str__(self) -> str:
        wanted = self._wanted
        of = f" for round {wanted.round}" if wanted.round else ""
        return f"download of fragment {wanted.fragment}{of}"

    @property
    def of_round(self) -> bool:
        """Whether it is the result of a round, which may still be merged."""
        return self._wanted.round > 0

    def request(self) -> bytes:
        """The message that requests everything that has not arrived; a stream of replies begins."""
        self._intact, self._newer, self._trailer = True, False, None
        missing = self._missing()
        # If only header or trailer are missing, chunk 0 is enough to get both again.
        chunks = missing or (() if self._header is None or not self._header.chunks else (0,))
        wanted = self._wanted
        request = bulk.DownloadRequest(
            epoch=wanted.identity.epoch, learner=wanted.identity.learner,
            incarnation=wanted.identity.incarnation, fragment=wanted.fragment, round=wanted.round,
            attempt=wanted.attempt, chunks=chunks, format=bulk.Format.ValueType(wanted.format),
        )  # fmt: skip
        return frames.pack(frames.Kind.HEADER, 0, request.SerializeToString())

    def add(self, message: bytes) -> None:
        """
        Process one message; a damaged one is requested again.

        Raises:
            ProtocolError: it is not what was requested.
        """
        try:
            envelope = frames.unpack(message)
        except DamagedError:
            self._intact = False
            return
        if envelope.kind == frames.Kind.HEADER:
            self._begin(bulk.DownloadHeader.FromString(bytes(envelope.payload)))
        elif envelope.kind == frames.Kind.TRAILER:
            self._trailer = bulk.DownloadTrailer.FromString(bytes(envelope.payload))
        elif envelope.kind == frames.Kind.CHUNK and self._header is not None:
            self._chunk(self._header, envelope.index, envelope.payload)

    def end(self) -> Outcome:
        """
        The stream has ended: how to continue.

        Raises:
            DamagedError: messages were damaged too often, or the stream ended early.
        """
        trailer = self._trailer
        if trailer is not None and trailer.aborted:
            return Outcome.ABORTED
        if trailer is not None and not trailer.committed:
            return Outcome.UNDECIDED
        if trailer is not None and self._header is not None and not self._missing():
            return Outcome.COMMITTED
        if trailer is not None and self._newer and self._intact:
            # What was requested is a part. If another part followed, the version could change again and again on a
            # slow link; the stream of a whole fragment has one version.
            self.discard()
            return Outcome.DAMAGED
        if trailer is None and self._intact:
            raise DamagedError(
                f"the download of fragment {self._wanted.fragment} ended without a trailer"
            )
        if self._repeats == MAX_REPEATS:
            raise DamagedError(
                f"fragment {self._wanted.fragment} still has damaged chunks after {MAX_REPEATS} repeats"
            )
        self._repeats += 1
        return Outcome.DAMAGED

    def refused(self, error: DilocoError) -> bool:
        """
        The syncer refused the request, or the connection broke.

        Returns:
            Whether to request again at once: the current version, because the round may be over.
        """
        if not self._wanted.or_current or not isinstance(error, UnavailableError):
            return False
        self.discard()
        self._wanted = dataclasses.replace(self._wanted, round=0, attempt=0, or_current=False)
        return True

    def payloads(self) -> Payloads:
        """
        The complete download, after COMMITTED.

        Raises:
            ProtocolError: it is not complete.
        """
        header, buffer = self._header, self._buffer
        if header is None or buffer is None or self._missing():
            raise ProtocolError(f"the download of fragment {self._wanted.fragment} is not complete")
        self._buffer = None
        return Payloads(
            format=header.format, version=(header.version.epoch, header.version.step), step=header.step,
            buffer=buffer, size_bytes=self._size_bytes,
        )  # fmt: skip

    def discard(self) -> None:
        """Release the buffer, unless `payloads` has given it away."""
        buffer, self._buffer = self._buffer, None
        self._header = self._arrivals = None
        if buffer is not None:
            self._release(buffer)

    def _missing(self) -> tuple[int, ...]:
        return self._arrivals.missing() if self._arrivals is not None else ()

    def _begin(self, header: bulk.DownloadHeader) -> None:
        if self._header is not None and _version(header) == _version(self._header):
            return  # a repetition; any other header means a newer version: start over
        wanted, expected = self._wanted, self._wanted.expected
        if (header.fragment, header.format) != (wanted.fragment, wanted.format):
            raise ProtocolError(
                f"fragment {header.fragment} came in format {header.format}, "
                f"expected {wanted.fragment} in format {wanted.format}"
            )
        if expected is None:
            if header.elements > _MAX_RAW_BYTES or header.chunks != -(
                -header.elements // RAW_CHUNK
            ):
                raise ProtocolError(
                    f"the constants came with {header.elements} bytes in {header.chunks} chunks"
                )
        elif (header.elements, header.chunks) != (expected.elements, expected.chunks):
            raise ProtocolError(
                f"fragment {header.fragment} came with {header.elements} values in {header.chunks} chunks, "
                f"expected {expected.elements} in {expected.chunks}"
            )
        self._newer = self._header is not None
        size_bytes = sum(self._span(header, i)[1] for i in range(header.chunks))
        if self._buffer is None or self._buffer.size < size_bytes:
            self.discard()
            self._buffer = self._acquire(size_bytes)
        self._header, self._size_bytes = header, size_bytes
        self._arrivals = frames.Arrivals(header.chunks)

    def _span(self, header: bulk.DownloadHeader, index: int) -> tuple[int, int]:
        """Offset of a chunk in the buffer, and its length."""
        if self._wanted.expected is None:
            lo = index * RAW_CHUNK
            return lo, min(header.elements, lo + RAW_CHUNK) - lo
        lo, hi = self._wanted.expected.chunk(index)
        return formats.encoded_bytes(header.format, lo), formats.encoded_bytes(
            header.format, hi - lo
        )

    def _chunk(self, header: bulk.DownloadHeader, index: int, payload: memoryview) -> None:
        if self._arrivals is None or self._buffer is None:
            return
        lo, size = self._span(header, index)
        if len(payload) != size:
            raise DamagedError(f"chunk {index} has {len(payload)} bytes, expected {size}")
        if self._arrivals.received(index):
            self.arrived += 1
            self._buffer[lo : lo + size] = np.frombuffer(payload, np.uint8)


def decode_into(payloads: Payloads, fragment: Fragment, out_N: npt.NDArray[np.float32]) -> None:
    """
    Decode a downloaded fragment into `out_N`, shape (elements,), fp32.

    Raises:
        NotFiniteError: a value is NaN or Inf; `out_N` holds garbage.
    """
    at = 0
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        size = formats.encoded_bytes(payloads.format, hi - lo)
        formats.decode(payloads.format, payloads.buffer[at : at + size], out_N[lo:hi])
        at += size


def _version(header: bulk.DownloadHeader) -> tuple[int, int, int]:
    return header.format, header.version.epoch, header.version.step
