"""
Uploads: encode a fragment from the shared memory, stream it, send again what arrived damaged.

A fragment is encoded whole before its first byte leaves (the header carries the norms of what is
sent), under the fragment's lock; the lock is free again while the bytes travel, however slow the
network is.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from diloco import wire
from diloco.errors import ALL_ERRORS, NotFiniteError, ProtocolError
from diloco.fragments import CHUNK, Fragment
from diloco.spec import RunSpec
from diloco.transport import error_of
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_worker.core.events import Pulled
from diloco_worker.settings import Fault
from diloco_worker.shared import Shared
from diloco_worker.transfer import U8, Buffers, Cancel, Identity

log = logging.getLogger(__name__)

F32 = npt.NDArray[np.float32]

METHOD = "/diloco.v1.Bulk/Upload"
RAW_CHUNK = CHUNK * 4
"""Bytes of one chunk of the constants."""

_ERRORS = {error.reason: error for error in ALL_ERRORS}


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """Error feedback of an upload of which nobody knows yet whether it was merged."""

    round: int
    residual_N: F32


class Uploader:
    """
    Sends fragments; safe to use from several threads for different fragments.

    Args:
        channel: gives the bulk channel of its own; another one after certificates changed.
        shared: where host copies and bases are.
        spec: gives the upward format.
        faults: harm to do on purpose (tests).
    """

    def __init__(
        self,
        channel: Callable[[], grpc.Channel],
        shared: Shared,
        spec: RunSpec,
        *,
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self._channel = channel
        self._shared = shared
        self._format = wire.format_of(spec.wire_up)
        largest = max(f.elements for f in shared.layout.fragments)
        self._buffers = Buffers(wire.encoded_bytes(wire.FP32, largest))
        self._scratch = Buffers(2 * 4 * CHUNK)
        self._feedback = spec.error_feedback and self._format != wire.FP32
        self._residuals: dict[int, F32] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._epoch = 0
        self._faults = [f for f in faults if f.point == "upload"]
        self._uploads = 0

    def pull(self, pull: Pulled, identity: Identity, cancel: Cancel) -> None:
        """
        Answer a pull from the newest host copy.

        A delta against what was last received where the syncer still has that version; else the
        whole fragment. A delta that is not finite is not sent: a header that says so goes out
        instead, and the round goes on without us.

        Raises:
            DilocoError: refused, or the connection broke.
            NotFiniteError: the fragment holds NaN or Inf.
        """
        fragment = self._shared.layout.fragments[pull.fragment]
        buffer = self._buffers.take()
        try:
            with self._shared.hold(pull.fragment):
                header, residual_N = self._encode(pull, fragment, buffer, identity)
            if any(not math.isfinite(n) for n in header.norms):
                self._decline(header, cancel)
            if header.elements == 0:
                self._send(header, [], cancel)
                return
            self._send(header, _parts(fragment, header.format, buffer), cancel)
            if residual_N is not None:
                self._candidates[pull.fragment] = _Candidate(
                    round=pull.round, residual_N=residual_N
                )
        finally:
            self._buffers.give(buffer)

    def initial(self, identity: Identity, cancel: Cancel) -> None:
        """
        Upload every host copy as Θ^(0), and the constants.

        Raises:
            DilocoError: refused, or the connection broke; start over.
        """
        buffer = self._buffers.take()
        try:
            for fragment in self._shared.layout.fragments:
                header = bulk.UploadHeader(
                    epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
                    fragment=fragment.index, content=bulk.INITIAL, format=bulk.FP32,
                    elements=fragment.elements, chunks=fragment.chunks,
                )  # fmt: skip
                with self._shared.hold(fragment.index):
                    self._whole(fragment, buffer)
                self._send(header, _parts(fragment, wire.FP32, buffer), cancel)
        finally:
            self._buffers.give(buffer)
        data = self._shared.constants
        pieces = [data[lo : lo + RAW_CHUNK] for lo in range(0, data.size, RAW_CHUNK)]
        header = bulk.UploadHeader(
            epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
            content=bulk.CONSTANTS, format=bulk.RAW, elements=data.size, chunks=len(pieces),
        )  # fmt: skip
        self._send(header, pieces, cancel)

    # ------------------------------------------------------------ encoding, under the fragment's lock

    def _encode(
        self, pull: Pulled, fragment: Fragment, buffer: U8, identity: Identity
    ) -> tuple[bulk.UploadHeader, F32 | None]:
        copy = self._shared.copy(fragment.index)
        inbox = self._shared.inbox_state(fragment.index)
        header = bulk.UploadHeader(
            epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
            round=pull.round, attempt=pull.attempt, fragment=pull.fragment, local_step=copy.local_step,
            steps=copy.steps, tokens=copy.tokens, elements=fragment.elements, chunks=fragment.chunks,
            content=bulk.DELTA, format=bulk.FP32,
        )  # fmt: skip
        if copy.local_step == 0:
            # Nothing was ever copied, so nothing can have been offered: let the syncer refuse it at
            # once.
            log.warning("pull of fragment %d of which there is no host copy", fragment.index)
            header.elements = header.chunks = 0
            return header, None
        base = inbox.version if copy.base == inbox.generation else None
        residual_N: F32 | None = None
        try:
            if base is None or base not in pull.versions:
                self._forget(fragment.index)
                self._whole(fragment, buffer)
                header.content = bulk.WHOLE
                return header, None
            residual_N = self._residual(pull, fragment, identity)
            norms = self._delta(fragment, buffer, residual_N)
        except NotFiniteError as error:
            log.warning("fragment %d at local step %d: %s", fragment.index, copy.local_step, error)
            header.norms.extend([math.nan] * len(fragment.slots))
            return header, None
        header.format = bulk.Format.ValueType(self._format)
        header.base.CopyFrom(pb.Version(epoch=base[0], step=base[1]))
        header.norms.extend(norms)
        return header, residual_N

    def _whole(self, fragment: Fragment, buffer: U8) -> None:
        host_N = self._shared.host(fragment.index)
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            wire.encode(wire.FP32, host_N[lo:hi], buffer[4 * lo :])

    def _delta(self, fragment: Fragment, buffer: U8, residual_N: F32 | None) -> list[float]:
        """
        Encode base − θ chunk by chunk; returns the norm per tensor of what the other side will
        decode.
        """
        base_N, host_N = self._shared.inbox(fragment.index), self._shared.host(fragment.index)
        squares = [0.0] * len(fragment.slots)
        scratch = self._scratch.take()
        delta, decoded = (
            scratch[: 4 * CHUNK].view(np.float32),
            scratch[4 * CHUNK :].view(np.float32),
        )
        slot, at = 0, 0
        try:
            for index in range(fragment.chunks):
                lo, hi = fragment.chunk(index)
                np.subtract(base_N[lo:hi], host_N[lo:hi], out=delta[: hi - lo])
                part_N = None if residual_N is None else residual_N[lo:hi]
                size = wire.encode(self._format, delta[: hi - lo], buffer[at:], residual_N=part_N)
                payload, at = buffer[at : at + size], at + size
                while slot < len(fragment.slots) and fragment.slots[slot].offset < hi:
                    edge = fragment.slots[slot]
                    begin, end = max(lo, edge.offset), min(hi, edge.end)
                    if begin < end:
                        part = (begin - lo, end - lo)
                        squares[slot] += wire.decode(
                            self._format, payload, decoded[: end - begin], part=part
                        )
                    if edge.end > hi:
                        break
                    slot += 1
        finally:
            self._scratch.give(scratch)
        return [math.sqrt(s) for s in squares]

    def _residual(self, pull: Pulled, fragment: Fragment, identity: Identity) -> F32 | None:
        """
        A copy of the fragment's error feedback, to be used up by this upload.

        An upload counts once a later round is pulled; a round that is pulled again was not merged.
        """
        if not self._feedback:
            return None
        if identity.epoch != self._epoch:
            self._epoch = identity.epoch
            self._residuals.clear()
            self._candidates.clear()
        candidate = self._candidates.pop(fragment.index, None)
        if candidate is not None and pull.round > candidate.round:
            self._residuals[fragment.index] = candidate.residual_N
        known_N = self._residuals.get(fragment.index)
        return np.zeros(fragment.elements, np.float32) if known_N is None else known_N.copy()

    def _forget(self, fragment: int) -> None:
        self._residuals.pop(fragment, None)
        self._candidates.pop(fragment, None)

    # ------------------------------------------------------------ sending

    def _decline(self, header: bulk.UploadHeader, cancel: Cancel) -> None:
        """Say that this fragment cannot be merged: norms of NaN, no chunks."""
        self._send(header, [], cancel)
        raise NotFiniteError(f"fragment {header.fragment} was not sent: it holds NaN or Inf")

    def _send(self, header: bulk.UploadHeader, parts: list[U8], cancel: Cancel) -> None:
        """
        Stream one upload until the syncer has all of it.

        Raises:
            DilocoError: refused, or the connection broke.
        """
        if cancel.stopped:
            return
        asks: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        harm = _Harm(self._harms() if header.round else [])
        method: Any = self._channel().stream_stream(METHOD)  # bytes in, bytes out: no serializers
        call = method(_requests(header, parts, asks, harm))
        cancel.on_stop(call.cancel)
        try:
            for message in call:
                reply = bulk.UploadReply.FromString(bytes(wire.unpack(message).payload))
                if reply.refused:
                    raise _ERRORS.get(reply.refused, ProtocolError)(reply.detail)
                if reply.done:
                    return
                asks.put(tuple(reply.again))
            raise ProtocolError(
                "the syncer ended an upload without a word; expected `done` or a reason"
            )
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            asks.put(None)
            call.cancel()

    def _harms(self) -> list[Fault]:
        """What befalls the next answer to a pull."""
        self._uploads += 1
        return [f for f in self._faults if f.times is None or self._uploads <= f.times]


def _parts(fragment: Fragment, fmt: int, buffer: U8) -> list[U8]:
    """The payload of every chunk, as views into the buffer."""
    parts, at = [], 0
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        size = wire.encoded_bytes(fmt, hi - lo)
        parts.append(buffer[at : at + size])
        at += size
    return parts


def _requests(
    header: bulk.UploadHeader,
    parts: list[U8],
    asks: queue.SimpleQueue[tuple[int, ...] | None],
    harm: _Harm,
) -> Iterator[bytes]:
    yield wire.pack(wire.Kind.HEADER, 0, header.SerializeToString())
    yield from harm.messages(header, parts)
    yield wire.pack(wire.Kind.END, 0)
    while (again := asks.get()) is not None:
        for index in again:
            if index < len(parts):
                yield wire.pack(wire.Kind.CHUNK, index, parts[index])
        yield wire.pack(wire.Kind.END, 0)


class _Harm:
    """
    The chunks of a first transmission, harmed as the faults say (tests); unharmed without any.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = {f.harm: f for f in faults}

    def messages(self, header: bulk.UploadHeader, parts: list[U8]) -> Iterator[bytes]:
        order = list(range(len(parts)))
        if self._faults:
            for harm in self._faults:
                log.warning("fault upload:%s in fragment %d", harm, header.fragment)
            order = order[::-1] if "reorder" in self._faults else order
            order = [i for i in order for _ in range(2)] if "repeat" in self._faults else order
        for index in order:
            message = wire.pack(wire.Kind.CHUNK, index, self._payload(header, index, parts[index]))
            yield self._damaged(index, len(parts), message) if self._faults else message

    def _payload(self, header: bulk.UploadHeader, index: int, payload: U8) -> U8:
        if "nan" not in self._faults or index != self._faults["nan"].value:
            return payload
        harmed = payload.copy()
        # The first value, or where a format has scales the first scale, becomes NaN; the checksum
        # is right.
        harmed[:4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        if header.format == bulk.BF16:
            harmed[:2] = (0xC0, 0x7F)
        return harmed

    def _damaged(self, index: int, count: int, message: bytes) -> bytes:
        corrupt, truncate = self._faults.get("corrupt-chunk"), self._faults.get("truncate")
        if corrupt is not None and index == min(corrupt.value, count - 1):
            return message[:-1] + bytes([message[-1] ^ 1])
        if truncate is not None and index == count - 1:
            return message[: len(message) // 2]
        return message
