"""
What uploads and downloads have in common: messages in frames, the check of the sender, chunks in.

No I/O and no waiting: a transfer that cannot proceed shows what it is `Waiting` for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from diloco.codec import formats, frames
from diloco.errors import DamagedError, ProtocolError, StaleEpochError, StaleIncarnationError
from diloco.model.fragments import CHUNK, Fragment
from diloco.runtime.formatting import shorten
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.attempts import Attempts
from diloco_syncer.coordinator import Event
from diloco_syncer.metrics import Metrics
from diloco_syncer.sessions import Sessions
from diloco_syncer.state import StateView

CHUNK_BYTES = formats.encoded_bytes(formats.FP32, CHUNK) + (64 << 10)
"""
Most bytes of a bulk message: a chunk in its largest format, and a little for the frame. A header fits as
well: its norms are 8 bytes for each tensor of a fragment.
"""

MAX_REPEATS = 3
"""How often missing or damaged chunks of one upload are requested again."""

MAX_DETAIL = 500
"""Characters of a log line that a peer chose parts of."""

F32 = npt.NDArray[np.float32]
M = TypeVar("M", bound=Message)


class Host(Protocol):
    """The syncer as transfers use it: the runner, or the simulator."""

    @property
    def spec(self) -> RunSpec:
        """The job's."""

    @property
    def facts(self) -> StateView:
        """The current facts."""

    @property
    def sessions(self) -> Sessions:
        """Which incarnation of a learner is current."""

    @property
    def attempts(self) -> Attempts:
        """The running ones, and those committed lately."""

    @property
    def metrics(self) -> Metrics:
        """Counts bytes."""

    def post(self, event: Event) -> None:
        """Queue an event for the coordinator."""

    def record(self, event: str, **fields: object) -> None:
        """Append a line to events.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a transfer cannot proceed now. Ask it again after any change."""

    until: Callable[[float], object]
    """Blocks until there may be a change, at most that many seconds; for threads only."""
    seconds: float
    """How long to block before asking again."""


def check_size(message: bytes) -> None:
    """
    Bound a message of a peer.

    Raises:
        ProtocolError: it has more than CHUNK_BYTES.
    """
    if len(message) > CHUNK_BYTES:
        raise ProtocolError(
            f"a bulk message of {len(message)} bytes, expected at most {CHUNK_BYTES}"
        )


def pack(kind: frames.Kind, message: Message) -> bytes:
    """A protobuf message in a frame."""
    return frames.pack(kind, 0, message.SerializeToString())


def unpack(frame: bytes, message: type[M]) -> M:
    """
    The protobuf message in a HEADER frame.

    Raises:
        DamagedError, ProtocolError.
    """
    envelope = frames.unpack(frame)
    if envelope.kind != frames.Kind.HEADER:
        raise ProtocolError(f"a transfer begins with {envelope.kind.name}; send a header first")
    try:
        return message.FromString(bytes(envelope.payload))
    except DecodeError as error:
        raise DamagedError(f"the {message.DESCRIPTOR.name} cannot be read: {error}") from None


def check_sender(host: Host, sender: bulk.UploadHeader | bulk.DownloadRequest) -> None:
    """
    Check that the sender is the current incarnation of a learner of this epoch.

    Raises:
        StaleEpochError, StaleIncarnationError.
    """
    epoch = host.facts.epoch
    if sender.epoch != epoch:
        raise StaleEpochError(
            f"the transfer is for epoch {sender.epoch}, but this is epoch {epoch}; send Hello again"
        )
    current = host.sessions.incarnation(sender.learner)
    if sender.incarnation != current:
        joined = "it has not joined" if current is None else f"incarnation {current} has joined"
        raise StaleIncarnationError(
            f"a transfer of incarnation {sender.incarnation} of {sender.learner}, but {joined}; "
            "send Hello first"
        )


def reply(
    *, done: bool = False, again: tuple[int, ...] = (), refused: str = "", detail: str = ""
) -> bytes:
    """A packed UploadReply."""
    message = bulk.UploadReply(done=done, again=again, refused=refused, detail=detail)
    return pack(frames.Kind.TRAILER, message)


class Chunks:
    """
    The chunks of one upload: each is taken once, in any order; missing and damaged ones are
    requested again.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._arrivals = frames.Arrivals(count)
        self._repeats = 0
        self.again: tuple[int, ...] = ()
        """What to request again after the last message."""
        self.complete = False
        """The sender has ended, and nothing is missing."""
        self.damage = ""
        """What to log about the chunks that were damaged since the last message `again`."""
        self._damaged = 0
        self._last_damage = ""

    def receive(self, message: bytes) -> tuple[int, memoryview] | None:
        """
        Index and payload of the new chunk in a message; None: check `again` and `complete`.

        Raises:
            DamagedError: a chunk stayed damaged.
            ProtocolError: neither a chunk of this upload nor its end.
        """
        self.again = ()
        try:
            envelope = frames.unpack(message)
        except DamagedError as error:
            # Missing at the end, and requested again. A peer chooses how many there are, so they
            # are logged together, once per repeat.
            self._damaged += 1
            self._last_damage = shorten(str(error), MAX_DETAIL)
            if not self._arrivals.missing():
                # Only the end was left, and the sender waits for the reply to it.
                self._end()
            return None
        if envelope.kind == frames.Kind.CHUNK:
            new = self._arrivals.received(envelope.index)
            return (envelope.index, envelope.payload) if new else None
        if envelope.kind != frames.Kind.END:
            raise ProtocolError(
                f"{envelope.kind.name} in the middle of an upload; expected a chunk"
            )
        self._end()
        return None

    def ended_early(self) -> str:
        """What is missing of a stream that ended before `complete`."""
        return f"the upload ended {len(self._arrivals.missing())} chunks early"

    def _end(self) -> None:
        missing = self._arrivals.missing()
        self.damage = ""
        if self._damaged:
            self.damage = f"{self._damaged} damaged chunks, the last: {self._last_damage}"
            self._damaged = 0
        if missing and self._repeats == MAX_REPEATS:
            raise DamagedError(
                f"chunks {list(missing[:8])} were still missing or damaged after "
                f"{self._repeats} repeats"
            )
        self._repeats += bool(missing)
        self.again, self.complete = missing, not missing


def decode_chunk(fmt: int, fragment: Fragment, index: int, payload: memoryview, out_N: F32) -> None:
    """
    Decode one chunk to its place in a fragment of shape (N,).

    Raises:
        DamagedError: its length does not fit the format.
    """
    lo, hi = fragment.chunk(index)
    expected = formats.encoded_bytes(fmt, hi - lo)
    if len(payload) != expected:
        raise DamagedError(f"chunk {index} has {len(payload)} bytes, expected {expected}")
    formats.decode(fmt, payload, out_N[lo:hi])
