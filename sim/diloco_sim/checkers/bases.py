"""
A delta is against the parameters that the syncer has under the version that it names, and the parameters of a local
checkpoint began from them.

After an older copy of the syncer's files was restored, versions of two histories have the same numbers. A delta
against one that was lost would be merged into parameters that its learner did not train from.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from diloco.codec import formats
from diloco.model.fragments import Fragment, Layout
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Committed, Encoded, Received, Resumed
from diloco_syncer.storage.parameters import FragmentParameters

F32 = npt.NDArray[np.float32]
Version = tuple[int, int]

REMEMBERED = 256
"""Deltas that were encoded; most arrive at once, and those of broken streams never."""


class Bases:
    """
    Compares what learners hold with what this start of the syncer began with or has committed.

    It identifies parameters by their values, as they are and as learners decode them; histories that made the
    same are one.

    Args:
        spec: of the job.
        layout: of the model.
    """

    observes = (Resumed, Committed, Encoded, Received)

    def __init__(self, spec: RunSpec, layout: Layout) -> None:
        self._down, self._layout = spec.wire_down, layout
        self._versions: dict[tuple[int, Version], frozenset[bytes]] = {}
        """Fragment and version of the syncer → digests of its values."""
        self._encoded: OrderedDict[tuple[str | int, ...], tuple[Version, bytes]] = OrderedDict()
        """What was encoded (`_encoding`) → the base of its delta and the digest of that, newest last."""
        self._epoch = 0
        self.compared = 0
        """Deltas."""

    def observe(self, event: Resumed | Committed | Encoded | Received, now: float) -> None:
        """See `Checker`."""
        match event:
            case Resumed():
                self._epoch = event.epoch
                self._versions.clear()
                if event.parameters is not None:
                    for index, fragment in enumerate(event.parameters.all()):
                        self._keep(index, fragment)
            case Committed():
                self._keep(event.commit.fragment, event.fragment)
            case Encoded():
                self._encoded[_encoding(event.header)] = event.base, _digest(event.base_N)
                if len(self._encoded) > REMEMBERED:
                    self._encoded.popitem(last=False)
            case Received(header=header):
                if header.content in (bulk.DELTA, bulk.WHOLE) and header.epoch == self._epoch:
                    self._received(header, now)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _keep(self, index: int, fragment: FragmentParameters) -> None:
        theta_N, layout = fragment.theta_N, self._layout.fragments[index]
        decoded_N = _decoded(formats.of_fragment(self._down, layout), theta_N, layout)
        digests = frozenset((_digest(theta_N), _digest(decoded_N)))
        self._versions[index, fragment.version] = digests

    def _received(self, header: bulk.UploadHeader, now: float) -> None:
        base, digest = self._encoded.get(_encoding(header), ((0, 0), b""))
        known = self._versions.get((header.fragment, base))
        if not digest or known is None:
            return  # not encoded for this round, or against a version that the syncer does not have
        self.compared += 1
        if digest not in known:
            what = "a delta" if header.content == bulk.DELTA else "the parameters of a checkpoint"
            raise Violation(
                "bases",
                f"{header.learner} sends {what} of fragment {header.fragment} against {base} of another history",
                step=header.round,
                now=now,
            )


def _encoding(header: bulk.UploadHeader) -> tuple[str | int, ...]:
    """A learner that states another round must not be taken for what it encoded for that one, before a restart."""
    return (
        *(header.learner, header.incarnation, header.epoch),
        *(header.round, header.attempt, header.fragment),
    )


def _decoded(fmt: int, theta_N: F32, fragment: Fragment) -> F32:
    """What a learner has once it has received these values."""
    decoded_N = np.empty_like(theta_N)
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        payload = np.empty(formats.encoded_bytes(fmt, hi - lo), np.uint8)
        formats.encode(fmt, theta_N[lo:hi], payload)
        formats.decode(fmt, payload, decoded_N[lo:hi])
    return decoded_N


def _digest(values_N: F32) -> bytes:
    return hashlib.blake2b(values_N.data, digest_size=16).digest()
