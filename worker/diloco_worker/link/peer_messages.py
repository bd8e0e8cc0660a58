"""
The messages of a request to a peer at both ends, without a connection or a file (docs/adr/0033). Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from diloco.errors import StorageError
from diloco.v1 import peer_pb2 as pb
from diloco_worker.core import events as ev
from diloco_worker.core.peer_files import (
    BYTES_PER_ELEMENT,
    MOST_MANIFEST_BYTES,
    SMALL_BYTES,
    Selection,
    received,
)
from diloco_worker.core.sealed import unsealed

CHUNK_BYTES = 1 << 20

# ---------------------------------------------------------------- the peer


def refusal(
    request: pb.PeerRequest, *, job: str, layout: str, run: str, step: int, interval: int
) -> str:
    """
    Why a request cannot be served; "": it can.

    Args:
        request: from a learner.
        job: of the peer.
        layout: digest of the layout of its model.
        run: that it is in.
        step: the newest global step that it knows.
        interval: H.
    """
    if request.job != job or request.layout != layout:
        return "it trains another model"
    if request.run != run:
        return "it is in another run of the job"
    if request.step > step + interval:
        # Nothing serves it soon, and no later request would be served before it.
        return f"it is at global step {step}, far before {request.step}"
    return ""


def answers(manifest: Mapping[str, Any], request: pb.PeerRequest) -> bool:
    """Whether a local checkpoint is what a request asks for; one of several processes is not."""
    same = (manifest["digest"], manifest["run"]) == (request.layout, request.run)
    return same and int(manifest["global_step"]) >= request.step and "pieces" not in manifest


def chunks(
    selection: Selection, read: Callable[[int, int], bytes], size: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """
    The manifest, the header and the tensors in pieces.

    Args:
        selection: of a checkpoint.
        read: returns the bytes of its file from a position on, at most so many.
        size: of a piece.
    """
    for text in (selection.manifest, selection.header):
        for lo in range(0, len(text), size):
            yield text[lo : lo + size]
    for lo, hi in selection.ranges:
        at = lo
        while at < hi:
            piece = read(at, min(size, hi - at))
            if not piece:
                raise StorageError(f"the file ends at byte {at}")
            at += len(piece)
            yield piece


def parts(
    manifest: Mapping[str, Any], selection: Selection, pieces: Iterable[bytes]
) -> Iterator[pb.PeerPart]:
    """The answer to a request: a header, `pieces`, a trailer."""
    header = pb.PeerHeader(
        local_step=int(manifest["local_step"]), global_step=int(manifest["global_step"]),
        manifest_bytes=len(selection.manifest), tensors_bytes=selection.tensors_bytes,
    )  # fmt: skip
    yield pb.PeerPart(header=header)
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
        yield pb.PeerPart(chunk=piece)
    yield pb.PeerPart(trailer=pb.PeerTrailer(sha256=whole.hexdigest()))


# ---------------------------------------------------------------- the newcomer


class Arrival:
    """
    An answer as it arrives.

    Args:
        request: what was asked for.
        layout: digest of the layout of this learner's model.
        elements: of its trained tensors.
    """

    def __init__(self, request: ev.AskPeer, *, layout: str, elements: int) -> None:
        self._request, self._layout = request, layout
        self._most_bytes = SMALL_BYTES + BYTES_PER_ELEMENT * elements
        self._header: pb.PeerHeader | None = None
        self._manifest = bytearray()
        self._whole, self._tensors, self._written = hashlib.sha256(), hashlib.sha256(), 0
        self._stated = ""
        self.over = False
        """The last message has arrived."""

    def add(self, part: pb.PeerPart) -> bytes:
        """
        The next message.

        Returns:
            What it has of the file of tensors.

        Raises:
            StorageError: it is not what a peer sends.
        """
        header = self._header
        if header is None:
            self._header = self._checked(part.header)
            return b""
        if part.WhichOneof("kind") != "chunk":
            self.over, self._stated = True, part.trailer.sha256
            return b""
        self._whole.update(part.chunk)
        lacking = header.manifest_bytes - len(self._manifest)
        self._manifest += part.chunk[:lacking]
        rest = part.chunk[lacking:]
        self._written += len(rest)
        if self._written > header.tensors_bytes:
            raise StorageError(f"it sent more than the {header.tensors_bytes} bytes that it stated")
        self._tensors.update(rest)
        return rest

    def end(self) -> tuple[bytes, ev.PeerState]:
        """
        No further message arrives.

        Returns:
            The manifest to write beside the tensors, and what the state is of.

        Raises:
            StorageError, KeyError, TypeError, ValueError: it is not what was asked for.
        """
        header = self._header if self._header is not None else self._checked(pb.PeerHeader())
        intact = self._stated == self._whole.hexdigest()
        if not intact or self._written != header.tensors_bytes:
            raise StorageError(f"{self._written} bytes of tensors arrived damaged or incomplete")
        text = received(
            bytes(self._manifest), sha256=self._tensors.hexdigest(), tensors_bytes=self._written,
            digest=self._layout, run=self._request.run, step=self._request.step,
        )  # fmt: skip
        manifest = unsealed(text)  # not the header, which neither a digest nor a check covers
        return text, ev.PeerState(
            learner=self._request.peer.learner,
            local_step=int(manifest["local_step"]),
            global_step=int(manifest["global_step"]),
            bytes=len(self._manifest) + self._written,
        )

    def _checked(self, header: pb.PeerHeader) -> pb.PeerHeader:
        if not 0 < header.manifest_bytes <= MOST_MANIFEST_BYTES:
            raise StorageError(f"it states a manifest of {header.manifest_bytes} bytes")
        if not 0 < header.tensors_bytes <= self._most_bytes:
            raise StorageError(
                f"it states {header.tensors_bytes} bytes of tensors, expected at most {self._most_bytes}"
            )
        return header
