"""
How a simulated learner misbehaves, and whether its connections break; what it states is changed where its link
sends it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from diloco.codec import formats, frames
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.faults import Fault, Kind
from diloco_sim.memory import F32

UNKNOWN_FIELD = b"\xc0\x3e\x01"
"""Field 1000, which no message of this release has, with the value 1."""

_FORMATS = (formats.FP32, formats.BF16, formats.INT8, formats.INT4)


@dataclass(slots=True)
class Behaviour:
    """How a learner misbehaves now."""

    counts: dict[Kind, int] = field(default_factory=dict)
    """Of each kind without an amount, how many of its faults last."""
    amounts: dict[Kind, float] = field(default_factory=dict)
    """Of each kind with an amount, that of the newest fault that lasts."""

    def change(self, fault: Fault, begins: bool) -> None:
        """A fault of `faults.MISBEHAVIOUR` or `faults.BREAKS` begins or ends."""
        kind = fault.kind
        if fault.amount:
            if begins:
                self.amounts[kind] = fault.amount
            else:
                self.amounts.pop(kind, None)
            return
        self.counts[kind] = self.counts.get(kind, 0) + (1 if begins else -1)

    @property
    def mute(self) -> bool:
        """It never uploads."""
        return self.has(Kind.MUTE)

    @property
    def stale(self) -> bool:
        """It applies no result and repeats its report."""
        return self.has(Kind.STALE)

    @property
    def trickle(self) -> float:
        """More than 0: it uploads that many bytes per second."""
        return self.amounts.get(Kind.TRICKLE, 0.0)

    @property
    def _honest(self) -> bool:
        """It never did anything but what it should: asked often, and mostly so."""
        return not (self.amounts or self.counts)

    def has(self, kind: Kind) -> bool:
        """It misbehaves like this now."""
        if self._honest:
            return False
        return self.counts.get(kind, 0) > 0 or kind in self.amounts

    def header(self, header: bulk.UploadHeader) -> None:
        """Change what an upload to a round states."""
        if self._honest:
            return
        amounts = self.amounts
        header.tokens = int(header.tokens * amounts.get(Kind.LIE_TOKENS, 1.0))
        header.steps = int(header.steps * amounts.get(Kind.LIE_STEPS, 1.0))
        if Kind.LIE_NORMS in amounts:
            header.norms[:] = [norm * amounts[Kind.LIE_NORMS] for norm in header.norms]
        if self.has(Kind.WRONG_ROUND):
            header.round += header.local_step % 2
            header.attempt += 1 - header.local_step % 2
        if self.has(Kind.WRONG_FORMAT):
            others = [format_ for format_ in _FORMATS if format_ != header.format]
            header.format = bulk.Format.ValueType(others[header.local_step % len(others)])
        header.local_step += int(amounts.get(Kind.AHEAD, 0))
        if self.has(Kind.NEWER):
            header.MergeFromString(UNKNOWN_FIELD)

    def copied(self, values_N: F32, local_step: int) -> F32:
        """What it takes for a host copy of its parameters at a local step."""
        if self._honest:
            return values_N
        if Kind.HUGE in self.amounts:
            return values_N * np.float32(self.amounts[Kind.HUGE])
        if self.has(Kind.NAN) and local_step % 2:
            return np.full_like(values_N, np.nan)
        return values_N

    def message(self, message: bytes) -> bytes:
        """What it sends instead of a message of an upload: NaN, with the norms of what was there."""
        if not self.has(Kind.NAN):
            return message
        envelope = frames.unpack(message)
        if envelope.kind != frames.Kind.CHUNK:
            return message
        payload = bytearray(envelope.payload)
        payload[:4] = b"\xff" * 4  # the first values, or the scale of a block
        return frames.pack(frames.Kind.CHUNK, envelope.index, payload)

    def blocks(self, blocks: pb.Blocks) -> None:
        """Change what it states of its blocks of data."""
        if self._honest:
            return
        if self.has(Kind.BLOCKS_KEPT):
            blocks.open.extend(block.serial for block in blocks.trained)
            del blocks.trained[:]
        if self.has(Kind.BLOCKS_FALSE):
            first = max([0, *blocks.open, *(block.serial for block in blocks.trained)]) + 1
            blocks.trained.add(serial=first, begin=1, end=2)
            blocks.open.append(first + 1)

    def report(self, report: pb.Report, previous: pb.Report | None) -> pb.Report:
        """What it reports instead of the truth."""
        if self._honest:
            return report
        if self.stale and previous is not None:
            return previous
        amounts = self.amounts
        if (factor := amounts.get(Kind.LIE_TOKENS)) is not None:
            report.tokens[:] = [int(tokens * factor) for tokens in report.tokens]
            report.total_tokens = int(report.total_tokens * factor)
        if (factor := amounts.get(Kind.LIE_STEPS)) is not None:
            report.steps[:] = [int(steps * factor) for steps in report.steps]
        if (factor := amounts.get(Kind.LIE_SECONDS)) is not None:
            impossible = {0: math.nan, 1: math.inf, 2: -1.0}.get(report.local_step % 8)
            report.step_seconds = report.step_seconds * factor if impossible is None else impossible
            report.sync_seconds = report.sync_seconds * factor if impossible is None else impossible
        report.local_step += int(amounts.get(Kind.AHEAD, 0))
        if self.has(Kind.NEWER):
            report.MergeFromString(UNKNOWN_FIELD)
        return report
