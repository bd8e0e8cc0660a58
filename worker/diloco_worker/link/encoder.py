"""
Encodes uploads: a delta, a whole fragment or the initial model, with the error feedback. No I/O.

A fragment is encoded completely before its first byte is sent (the header carries the norms of what
is sent), under the fragment's lock; the lock is released before sending, however slow the network
is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco.codec import formats
from diloco.errors import NotFiniteError, UnavailableError
from diloco.model.digests import digests
from diloco.model.fragments import CHUNK, Fragment
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_worker.core.events import Pulled
from diloco_worker.core.ledger import HostCopy
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.faults import FaultInjector
from diloco_worker.link.memory import Memory
from diloco_worker.link.transfer import RAW_CHUNK, U8, Identity
from diloco_worker.link.upload_messages import UploadMessages
from diloco_worker.settings import Fault

log = logging.getLogger(__name__)

MOST_NAMES = 8
"""Of tensors in one sentence."""

F32 = npt.NDArray[np.float32]

REPORT_SECONDS = 1.0
"""How long an upload waits while `Encoder.repeats`; then it takes what there is."""

REPORT_POLL_SECONDS = 0.005

MOST_NAMES = 8
"""Of buffers, in one line."""


@dataclass(slots=True, kw_only=True)
class _Unconfirmed:
    """Error feedback after an upload that may or may not have been merged."""

    round: int
    residual_N: F32 | None
    """None: the upload ended incomplete, so it cannot have been merged."""
    upload: UploadMessages


class Encoder:
    """
    Makes the `UploadMessages` of each upload; safe to use from several threads. Close all of them.

    Args:
        memory: holds host copies, bases and constants.
        spec: gives the format.
        buffers: for the encoded fragments.
        faults: faults to inject (tests).
    """

    def __init__(
        self, memory: Memory, spec: RunSpec, buffers: BufferPool, *, faults: tuple[Fault, ...] = ()
    ) -> None:
        self._memory, self._buffers = memory, buffers
        self._spec = spec
        self._residuals: dict[int, F32] = {}
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._start = (0, "")
        """Epoch and start of the syncer that the feedback is of."""
        self._sent: dict[int, int] = {}
        """Fragment → t_m of its last upload for a round."""
        self._zero: set[int] = set()
        """Fragments of parameters whose last delta was all zeros."""
        self._zeros = 0
        """Such deltas in a row."""
        self._replaced: set[str] = set()
        """Buffers whose values that are not finite were logged."""
        self._faults = FaultInjector(faults)

    @property
    def unchanged(self) -> int:
        """
        How many deltas of parameters in a row, at least two of each fragment, were all zeros; 0: fewer.

        Any thread may ask. Paper leaves this open: a program whose model does not change has no part in the result.
        """
        parameters = sum(not f.buffers for f in self._memory.layout.fragments)
        zeros = self._zeros
        return zeros if zeros >= 2 * parameters and len(self._zero) == parameters else 0

    def pull(
        self, pull: Pulled, identity: Identity, *, stopped: Callable[[], bool] = lambda: False
    ) -> UploadMessages | None:
        """
        Answer a pull from the newest host copy.

        A delta against what was last received if the syncer still has that version; else the whole
        fragment, which is as precise as the delta if a device has encoded that. For a delta of parameters that is not
        finite, only a header, with norms of NaN, so the round continues without this learner. Of buffers, values that
        are not finite are replaced by those that were last received.

        Args:
            pull: what the syncer wants.
            identity: of this learner.
            stopped: whether a newer pull has replaced this one; that may have been encoded already,
                with the feedback of this one.

        Returns:
            The upload; None if it was stopped.
        """
        fragment = self._memory.layout.fragments[pull.fragment]
        with self._memory.lock(pull.fragment):
            return None if stopped() else self._encode(pull, fragment, identity)

    def repeats(self, pull: Pulled) -> bool:
        """
        Whether the host copy is of a step that was uploaded for another fragment already, or from before the result
        that is in the inbox.

        The syncer merges a report once. The trainer copies an open fragment after each of its steps,
        so a copy of the next step comes soon. One from before a result that was received is not a learner's
        displacement from what it received last (paper Algorithm 1): it holds steps that the result holds already, and
        against the current parameters it would undo what the others did.
        """
        with self._memory.lock(pull.fragment):
            copy, inbox = (
                self._memory.host_copy(pull.fragment), self._memory.inbox_state(pull.fragment),
            )  # fmt: skip
            received = inbox.version is not None
            # What a device encoded is the difference from a received version.
            older = copy.base != inbox.generation if received else copy.format != 0
            if copy.local_step and older:
                return True
        # Uploads of other fragments add to it meanwhile, each under the lock of its own; `copy` is atomic.
        sent = self._sent.copy()
        others = (step for fragment, step in sent.items() if fragment != pull.fragment)
        return not pull.probe and copy.local_step in others

    def initial(self, identity: Identity) -> Iterator[UploadMessages]:
        """Every host copy as Θ^(0), then the constants. Close each before the next is taken."""
        for fragment in self._memory.layout.fragments:
            header = bulk.UploadHeader(
                epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
                fragment=fragment.index, content=bulk.INITIAL, format=bulk.FP32,
                elements=fragment.elements, chunks=fragment.chunks,
            )  # fmt: skip
            buffer = self._buffers.acquire(formats.encoded_bytes(formats.FP32, fragment.elements))
            try:
                with self._memory.lock(fragment.index):
                    if self._memory.host_copy(fragment.index).format:
                        raise UnavailableError(f"fragment {fragment.index} was merged meanwhile")
                    host_N = self._memory.host(fragment.index)
                    try:
                        self._whole(fragment, buffer, host_N)
                    except NotFiniteError:
                        raise NotFiniteError(_not_finite(fragment, host_N)) from None
            except BaseException:
                self._buffers.release(buffer)
                raise
            yield self._upload(header, fragment, buffer)
        data = self._memory.constants
        pieces = [data[lo : lo + RAW_CHUNK] for lo in range(0, data.size, RAW_CHUNK)]
        header = bulk.UploadHeader(
            epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
            content=bulk.CONSTANTS, format=bulk.RAW, elements=data.size, chunks=len(pieces),
        )  # fmt: skip
        yield UploadMessages(header, pieces)

    # ------------------------------------------------------------ under the fragment's lock

    def _encode(self, pull: Pulled, fragment: Fragment, identity: Identity) -> UploadMessages:
        copy = self._memory.host_copy(fragment.index)
        inbox = self._memory.inbox_state(fragment.index)
        header = bulk.UploadHeader(
            epoch=identity.epoch, learner=identity.learner, incarnation=identity.incarnation,
            round=pull.round, attempt=pull.attempt, fragment=pull.fragment, local_step=copy.local_step,
            steps=copy.steps, tokens=copy.tokens, elements=fragment.elements, chunks=fragment.chunks,
            content=bulk.DELTA, format=bulk.FP32,
        )  # fmt: skip
        if copy.local_step == 0 or self._without_base(fragment.index, copy):
            # The fragment was never offered, or has been overwritten since: let the syncer refuse it at once.
            log.warning("pull of fragment %d, which has no host copy", fragment.index)
            header.elements = header.chunks = 0
            return self._upload(header, fragment, None)
        if not pull.probe:
            self._sent[fragment.index] = copy.local_step
        base = inbox.version if copy.base == inbox.generation else None
        if base is None or base not in pull.versions:
            if not pull.probe:
                self._residuals.pop(fragment.index, None)
                self._unconfirmed.pop(fragment.index, None)
            header.content, base = bulk.WHOLE, None
        else:
            header.format = bulk.Format.ValueType(self._format(fragment))
        buffer = self._buffers.acquire(formats.encoded_bytes(header.format, fragment.elements))
        try:
            host_N = self._memory.host(fragment.index)
            if not (pull.probe or copy.format):
                header.digests = digests(fragment, host_N)
            if fragment.buffers and inbox.version is not None:
                host_N = self._finite(fragment, host_N)
            if base is None:
                self._whole(
                    fragment, buffer, self._restored(fragment, host_N) if copy.format else host_N
                )
                return self._upload(header, fragment, buffer)
            # A probe is discarded: it must not consume the feedback.
            residual_N = None if pull.probe else self._residual(pull, fragment, identity)
            payload = _payload(fragment, copy.format, host_N) if copy.format else None
            norms = self._delta(fragment, buffer, host_N, residual_N, payload)
        except NotFiniteError as error:
            self._buffers.release(buffer)
            log.warning("fragment %d at local step %d: %s", fragment.index, copy.local_step, error)
            header.content = bulk.DELTA
            header.format = bulk.Format.ValueType(self._format(fragment))
            header.norms.extend([math.nan] * len(fragment.slots))
            return self._upload(header, fragment, None)
        except BaseException:
            self._buffers.release(buffer)
            raise
        header.base.CopyFrom(pb.Version(epoch=base[0], step=base[1]))
        header.norms.extend(norms)
        if not (pull.probe or fragment.buffers):
            self._count_zeros(fragment.index, norms)
        upload = self._upload(header, fragment, buffer)
        if residual_N is not None:
            self._unconfirmed[fragment.index] = _Unconfirmed(
                round=pull.round, residual_N=residual_N, upload=upload
            )
        return upload

    def _count_zeros(self, fragment: int, norms: list[float]) -> None:
        if any(norms):
            self._zero.clear()
            self._zeros = 0
        else:
            self._zero.add(fragment)
            self._zeros += 1

    def _upload(
        self, header: bulk.UploadHeader, fragment: Fragment, buffer: U8 | None
    ) -> UploadMessages:
        """The upload of an encoded fragment; None: the header alone."""

        def close(upload: UploadMessages) -> None:
            if buffer is not None:
                self._buffers.release(buffer)
            entry = self._unconfirmed.get(fragment.index)
            if entry is not None and entry.upload is upload and not upload.complete:
                entry.residual_N = None

        parts = [] if buffer is None else _parts(fragment, header.format, buffer)
        effects = self._faults.next_upload() if header.round else None
        return UploadMessages(header, parts, effects=effects, close=close)

    def _format(self, fragment: Fragment) -> int:
        """Of a delta."""
        return formats.of_fragment(self._spec.wire_up, fragment)

    def _finite(self, fragment: Fragment, host_N: F32) -> F32:
        """
        Buffers, with the values of the inbox where theirs are not finite.

        The result of the merge overwrites them. If the learner were refused, a job that needs it for its
        quorum would stop, though its parameters are finite.
        """
        finite_N = np.isfinite(host_N)
        if finite_N.all():
            return host_N
        slots = [s for s in fragment.slots if not finite_N[s.offset : s.end].all()]
        names = [s.tensor.name for s in slots if s.tensor.name not in self._replaced]
        if names:
            self._replaced.update(names)
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            log.warning(
                "values of %s%s are NaN or Inf: those last received are sent in their place; check the inputs of "
                "these layers. This line appears once for each buffer",
                ", ".join(names[:MOST_NAMES]), more,
            )  # fmt: skip
        return np.where(finite_N, host_N, self._memory.inbox(fragment.index))

    def _without_base(self, fragment: int, copy: HostCopy) -> bool:
        """Whether a device encoded the delta, and the inbox no longer holds what it is the difference from."""
        inbox = self._memory.inbox_state(fragment)
        return copy.format != 0 and (inbox.version is None or inbox.generation != copy.base)

    def _restored(self, fragment: Fragment, host_N: F32) -> F32:
        """The values of which a device encoded the delta, as precise as that is."""
        values_N = np.empty(fragment.elements, np.float32)
        fmt = self._format(fragment)
        parts = _parts(fragment, fmt, _payload(fragment, fmt, host_N))
        for index, part in enumerate(parts):
            lo, hi = fragment.chunk(index)
            formats.decode(fmt, part, values_N[lo:hi])
        return np.subtract(self._memory.inbox(fragment.index), values_N, out=values_N)

    def _whole(self, fragment: Fragment, buffer: U8, host_N: F32) -> None:
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            formats.encode(formats.FP32, host_N[lo:hi], buffer[4 * lo :])

    def _delta(
        self,
        fragment: Fragment,
        buffer: U8,
        host_N: F32,
        residual_N: F32 | None,
        encoded: U8 | None,
    ) -> list[float]:
        """
        Encode base − θ chunk by chunk, unless a device has; return the norm per tensor of what the syncer will decode.
        """
        base_N = self._memory.inbox(fragment.index)
        fmt, squares = self._format(fragment), [0.0] * len(fragment.slots)
        # 2 MiB at most: malloc keeps pages of that size (diloco/runtime/malloc.py).
        delta, decoded = np.empty((2, min(CHUNK, fragment.elements)), np.float32)
        slot, at = 0, 0
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            if encoded is None:
                np.subtract(base_N[lo:hi], host_N[lo:hi], out=delta[: hi - lo])
                part_N = None if residual_N is None else residual_N[lo:hi]
                size = formats.encode(fmt, delta[: hi - lo], buffer[at:], residual_N=part_N)
            else:
                size = formats.encoded_bytes(fmt, hi - lo)
                buffer[at : at + size] = encoded[at : at + size]
            payload, at = buffer[at : at + size], at + size
            while slot < len(fragment.slots) and fragment.slots[slot].offset < hi:
                edge = fragment.slots[slot]
                begin, end = max(lo, edge.offset), min(hi, edge.end)
                if begin < end:
                    part = (begin - lo, end - lo)
                    squares[slot] += formats.decode(fmt, payload, decoded[: end - begin], part=part)
                if edge.end > hi:
                    break
                slot += 1
        return [math.sqrt(s) for s in squares]

    def _residual(self, pull: Pulled, fragment: Fragment, identity: Identity) -> F32 | None:
        """
        A copy of the fragment's error feedback, for this upload to consume and replace.

        An upload counts as merged once it was sent and a later round is pulled; a round that is
        pulled again was aborted. The syncer's `done` does not decide: after the merge it can get
        lost, or the next pull can overtake it.
        """
        if not self._spec.error_feedback or self._format(fragment) == formats.FP32:
            return None
        start = (identity.epoch, identity.start_id)
        if start != self._start:
            self._start = start
            self._residuals.clear()
            self._unconfirmed.clear()
        previous = self._unconfirmed.pop(fragment.index, None)
        if (
            previous is not None and pull.round > previous.round
            and previous.upload.complete and previous.residual_N is not None
        ):  # fmt: skip
            self._residuals[fragment.index] = previous.residual_N
        known_N = self._residuals.get(fragment.index)
        return np.zeros(fragment.elements, np.float32) if known_N is None else known_N.copy()


def _payload(fragment: Fragment, fmt: int, host_N: F32) -> U8:
    """
    What a device encoded, in place of a host copy.

    Raises:
        NotFiniteError: it could not encode all of it.
    """
    data, size = host_N.view(np.uint8), formats.encoded_bytes(fmt, fragment.elements)
    bad = int(data[size : size + 8].view("<u4")[0])
    if bad:
        raise NotFiniteError(f"{bad} blocks hold NaN, Inf or a value too large for the format")
    return data[:size]


def _not_finite(fragment: Fragment, host_N: F32) -> str:
    """Which tensors of an initial model no learner can begin with."""
    names = [
        slot.tensor.name
        for slot in fragment.slots
        if not np.isfinite(host_N[slot.offset : slot.end]).all()
    ]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    verb = "hold" if len(names) > 1 else "holds"
    return (
        f"{', '.join(names[:MOST_NAMES])}{more} {verb} NaN or Inf; give what is trained finite values before "
        "Learner.connect, and let what is not, such as a mask, be a buffer or frozen"
    )


def _parts(fragment: Fragment, fmt: int, buffer: U8) -> list[U8]:
    """Each chunk's payload, as a view into the buffer."""
    parts, at = [], 0
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        size = formats.encoded_bytes(fmt, hi - lo)
        parts.append(buffer[at : at + size])
        at += size
    return parts
