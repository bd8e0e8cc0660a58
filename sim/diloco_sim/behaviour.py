"""How a simulated learner misbehaves; what it states is changed where its link sends it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb


@dataclass(slots=True)
class Behaviour:
    """How a learner misbehaves now."""

    mute: int = 0
    """More than 0: it never uploads."""
    trickle: float = 0.0
    """More than 0: it uploads that many bytes per second."""
    stale: int = 0
    """More than 0: it applies no result and repeats its report."""
    wrong_round: int = 0
    """More than 0: it uploads to another round, or another attempt."""
    tokens: float = 1.0
    """Factor of the tokens that it states."""
    steps: float = 1.0
    """Factor of the steps that it states."""
    norms: float = 1.0
    """Factor of the norms that it states."""

    def header(self, header: bulk.UploadHeader) -> None:
        """Change what an upload to a round states."""
        header.tokens = int(header.tokens * self.tokens)
        header.steps = int(header.steps * self.steps)
        if self.norms != 1:
            header.norms[:] = [norm * self.norms for norm in header.norms]
        if self.wrong_round:
            header.round += header.local_step % 2
            header.attempt += 1 - header.local_step % 2

    def report(self, report: pb.Report, previous: pb.Report | None) -> pb.Report:
        """What it reports instead of the truth."""
        if self.stale and previous is not None:
            return previous
        if self.tokens != 1:
            report.tokens[:] = [int(tokens * self.tokens) for tokens in report.tokens]
            report.total_tokens = int(report.total_tokens * self.tokens)
        if self.steps != 1:
            report.steps[:] = [int(steps * self.steps) for steps in report.steps]
        return report
