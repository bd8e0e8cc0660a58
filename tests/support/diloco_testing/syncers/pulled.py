"""Learners of a `DrivenSyncer` that were pulled together, and nothing sent yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco.model.fragments import CHUNK, Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, DrivenUpload, driven_spec

TENSORS = (
    Tensor(name="a", shape=(7 * CHUNK,), dtype="float32"),
    Tensor(name="b", shape=(300,), dtype="float32"),
)
"""In one fragment of eight chunks."""

WINDOW = 4
"""Chunks of it that a member may be ahead of the slowest if `MERGE_WINDOW_BYTES` is 1."""


@dataclass
class Pulled:
    """eu/0, eu/1, …, and the pull that all of them have."""

    syncer: DrivenSyncer
    learners: list[DrivenLearner]
    pull: pb.Pull

    def upload(self, index: int, **changes: Any) -> DrivenUpload:
        """Of which nothing has been sent yet."""
        learner = self.learners[index]
        return learner.upload(
            self.pull, random_delta(learner.layout.fragments[0], index), **changes
        )

    def whole(self, index: int = 1) -> DrivenUpload:
        """An upload of the whole fragment, which is staged until it is complete."""
        return self.upload(index, content=bulk.WHOLE, base=None, norms=[])

    def progress(self, learner: str) -> list[ev.Progress]:
        """What was reported of its uploads to rounds."""
        events = [e for e in self.syncer.posted if isinstance(e, ev.Progress)]
        return [e for e in events if e.learner == learner and e.round]

    def heartbeats(self) -> None:
        """One of each learner."""
        sessions = [(x.session.number, x.name) for x in self.learners]
        beats = [ev.Heartbeat(session=number, learner=name) for number, name in sessions]
        self.syncer.run(*beats, ev.Tick())

    def wait(self, seconds: float) -> None:
        """Heartbeats every tenth of a second."""
        for _ in range(round(10 * seconds)):
            self.syncer.now += 0.1
            self.heartbeats()


def pulled_together(count: int) -> Pulled:
    """All of so many learners, after their first step."""
    syncer = DrivenSyncer(driven_spec(fragments=1, interval=1, quorum=count))
    learners = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(count)]
    learners[0].initialise([random_delta(f, 9) for f in learners[0].layout.fragments])
    for learner in learners:
        learner.received()
    *_, [pull] = [learner.step() for learner in learners]
    return Pulled(syncer, learners, pull)


def finish(*uploads: DrivenUpload) -> None:
    """Send everything that is left, at once."""
    while any(not upload.receiver.done for upload in uploads):
        for upload in uploads:
            upload.resume().send_all()
