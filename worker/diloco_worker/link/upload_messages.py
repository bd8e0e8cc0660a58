"""
The messages of one upload: header, chunks, end, and what the syncer requests again. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diloco.codec import frames
from diloco.errors import BY_REASON, ProtocolError
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.link.faults import Effects
from diloco_worker.link.transfer import U8


class UploadMessages:
    """
    One upload: send `messages`, then `repeat` what each `reply` requests, until it requests nothing.

    The messages may be produced on another thread than the replies are processed on.

    Args:
        header: of the upload.
        parts: payload of each chunk.
        effects: faults of the first transmission (tests).
        close: called once by `close`; releases what `parts` are views of.
    """

    def __init__(
        self, header: bulk.UploadHeader, parts: list[U8], *, effects: Effects | None = None,
        close: Callable[[UploadMessages], None] | None = None,
    ) -> None:  # fmt: skip
        self.header = header
        self._parts, self._effects, self._close = parts, effects or Effects(), close
        self._sent = False
        """Everything was sent, including what the syncer requested again."""
        self._refused = False

    @property
    def complete(self) -> bool:
        """Whether the syncer can have all of it; it may not have replied yet."""
        return self._sent and not self._refused

    def messages(self) -> Iterator[bytes]:
        """The first transmission."""
        yield frames.pack(frames.Kind.HEADER, 0, self.header.SerializeToString())
        yield from self._effects.messages(self.header, self._parts)
        self._sent = True
        yield frames.pack(frames.Kind.END, 0)

    def repeat(self, chunks: tuple[int, ...]) -> Iterator[bytes]:
        """These chunks again; indices that do not exist are skipped."""
        for index in chunks:
            if index < len(self._parts):
                yield frames.pack(frames.Kind.CHUNK, index, self._parts[index])
        self._sent = True
        yield frames.pack(frames.Kind.END, 0)

    def reply(self, message: bytes) -> tuple[int, ...] | None:
        """
        Process a message of the syncer.

        Returns:
            The chunks to `repeat`; None: the upload is done.

        Raises:
            DilocoError: the syncer refused the upload.
        """
        reply = bulk.UploadReply.FromString(bytes(frames.unpack(message).payload))
        if reply.done:
            return None
        if reply.refused:
            self.refused()
            raise BY_REASON.get(reply.refused, ProtocolError)(reply.detail)
        self._sent = False
        return tuple(reply.again)

    def refused(self) -> None:
        """The syncer does not merge this upload; it cancels those of an aborted attempt."""
        self._refused = True

    def close(self) -> None:
        """End the upload, successful or not: release its buffer."""
        self._parts = []  # views of the buffer, which the pool may free
        close, self._close = self._close, None
        if close is not None:
            close(self)
