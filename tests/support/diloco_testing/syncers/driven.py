"""A whole syncer without thread, clock, socket or disk: the test is all of them. Real wire bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.codec import frames
from diloco.errors import DilocoError
from diloco.model.fragments import Layout, Tensor, cut
from diloco.spec import Checkpoint, RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.host import HostOverCoordinator
from diloco_syncer.coordinator import Coordinator, Event
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Applicant
from diloco_syncer.core.engine import Engine
from diloco_syncer.metrics import Metrics
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.rpc.receiver import UploadReceiver
from diloco_syncer.rpc.source import DownloadSource, open_download
from diloco_syncer.sessions import Session
from diloco_syncer.state import State
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.parameters import Parameters
from diloco_testing.learners.scripted import END, chunk, encoded

F32 = npt.NDArray[np.float32]


def driven_spec(**changes: Any) -> RunSpec:
    """With rate 1 and no momentum, one member's merge is Θ − v exactly; every step has a round."""
    fields: dict[str, Any] = {
        "job": "j", "steps": 1000, "fragments": 2, "interval": 2, "overlap": 1, "grace_max_steps": 0.0,
        "wire_up": "FP32", "wire_down": "FP32", "learners": {"eu": 4}, "merge": "Average",
        "outer_learning_rate": 1.0, "outer_momentum": 0.0, "outer_nesterov": False,
        "syncer_checkpoint": Checkpoint(every_steps=10**6, keep=3), **changes,
    }  # fmt: skip
    return RunSpec(**fields)


@dataclass
class DrivenWriter:
    """Keeps what it gets; the test decides what becomes of it."""

    snapshots: list[Snapshot] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)

    def snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def export(self, parameters: Parameters, *, step: int, tokens: int) -> None:
        self.exports.append(step)


class DrivenSyncer(HostOverCoordinator):
    """Coordinator and transfers around one queue; `now` is a number that the test sets."""

    def __init__(
        self, spec: RunSpec, *, engine: Engine | None = None, parameters: Parameters | None = None,
        fault: Callable[[str], None] = lambda point: None, coordinator: type[Coordinator] = Coordinator,
    ) -> None:  # fmt: skip
        self.now, self.wake = 0.0, 0.0
        self.lines: list[dict[str, Any]] = []
        self.queue: deque[Event] = deque()
        self.posted: list[Event] = []
        self.writer, self.spec, self.metrics = DrivenWriter(), spec, Metrics(0)
        self.state = State(
            engine=engine or Engine(spec=spec, epoch=1),
            admission=Admission(spec, layout=parameters.layout if parameters else None),
            parameters=parameters,
            model=None,
        )
        self.coordinator = coordinator(
            self.state, record=self.record, writer=self.writer, fault=fault
        )
        self.initial = InitialParameters(self)
        self.wake = self.coordinator.start(self.now)

    def post(self, event: Event) -> None:
        self.posted.append(event)
        self.queue.append(event)

    def record(self, event: str, **fields: object) -> None:
        self.lines.append({"event": event, **fields})

    def run(self, *events: Event) -> DrivenSyncer:
        """Process these events and all that follow from them without the passing of time."""
        self.queue.extend(events)
        while self.queue:
            self.wake = self.coordinator.handle(self.queue.popleft(), self.now)
            if not self.queue and self.wake <= self.now:
                self.wake = self.coordinator.handle(ev.Tick(), self.now)
        return self

    def merged(self) -> list[int]:
        """Global steps of the merges so far."""
        return [int(line["step"]) for line in self.lines if line["event"] == "merge"]


class DrivenLearner:
    """What the other end does, message by message."""

    def __init__(self, syncer: DrivenSyncer, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.syncer, self.name = syncer, name
        self.layout: Layout = cut(tensors, num_fragments=syncer.spec.fragments)
        self.local_step = 0
        applicant = Applicant(
            job="j", learner=name, region="eu", spec_hash=syncer.spec.hash, tensors=tensors
        )
        self.session: Session = syncer.coordinator.admit(applicant)
        self.incarnation = self.session.number
        syncer.run(
            ev.Hello(
                session=self.session.number,
                learner=name,
                region="eu",
                incarnation=self.incarnation,
                fresh=True,
                local_step=0,
                checkpoint_step=0,
            )
        )

    def received(self) -> list[pb.SyncerMessage | DilocoError | None]:
        """What its session has brought since the last call."""
        messages = []
        while not self.session.outbox.empty():
            messages.append(self.session.outbox.get_nowait())
        return messages

    def kinds(self) -> list[str]:
        """Kinds of these messages."""
        seen = [m for m in self.received() if isinstance(m, pb.SyncerMessage)]
        return [str(message.WhichOneof("kind")) for message in seen]

    def step(self) -> list[pb.Pull]:
        """Report one more step, offering everything; the pulls that follow."""
        self.local_step += 1
        rows = self.syncer.spec.fragments
        self.syncer.run(
            ev.Reported(
                session=self.session.number,
                learner=self.name,
                local_step=self.local_step,
                steps=(1,) * rows,
                tokens=(100,) * rows,
                offers=frozenset(range(rows)),
                total_tokens=100 * self.local_step,
                global_step=0,
                step_seconds=1.0,
                sync_seconds=0.0,
                loss=None,
            )
        )
        messages = [m for m in self.received() if isinstance(m, pb.SyncerMessage)]
        return [m.pull for m in messages if m.WhichOneof("kind") == "pull"]

    def initialise(self, thetas: list[F32]) -> None:
        """Upload Θ^(0)."""
        for fragment, theta_N in enumerate(thetas):
            pull = pb.Pull(fragment=fragment)
            upload = self.upload(pull, theta_N, content=bulk.INITIAL, base=None, norms=[])
            assert upload.send_all().replies[-1].done
        constants = self.header(
            pb.Pull(), content=bulk.CONSTANTS, format=bulk.RAW, elements=0, chunks=0
        )
        upload = DrivenUpload(self, constants, [])
        upload.send_all()
        self.syncer.run()
        assert upload.resume().replies[-1].done

    def header(self, pull: pb.Pull, **changes: Any) -> bulk.UploadHeader:
        """An honest header but for its norms, with changes."""
        fragment = self.layout.fragments[pull.fragment]
        fields: dict[str, Any] = {
            "epoch": 1, "learner": self.name, "incarnation": self.incarnation, "round": pull.round,
            "attempt": pull.attempt, "fragment": pull.fragment, "content": bulk.DELTA,
            "format": bulk.FP32, "base": pull.versions[0] if pull.versions else None,
            "local_step": self.local_step, "steps": 1, "tokens": 100,
            "elements": fragment.elements, "chunks": fragment.chunks, **changes,
        }  # fmt: skip
        return bulk.UploadHeader(**fields)

    def upload(self, pull: pb.Pull, values_N: F32, **changes: Any) -> DrivenUpload:
        """An upload of which nothing has been sent yet."""
        payloads, _, norms = encoded(self.layout.fragments[pull.fragment], values_N)
        header = self.header(pull, **{"norms": norms, **changes})
        return DrivenUpload(self, header, [chunk(i, p) for i, p in enumerate(payloads)])

    def download(self, pull: pb.Pull) -> DownloadSource:
        """The result of a round, or with an empty round the current version."""
        return open_download(
            self.syncer,
            bulk.DownloadRequest(
                epoch=1,
                learner=self.name,
                incarnation=self.incarnation,
                fragment=pull.fragment,
                round=pull.round,
                attempt=pull.attempt,
            ),
        )


class DrivenUpload:
    """One upload: messages that are left, and the replies so far."""

    def __init__(
        self, learner: DrivenLearner, header: bulk.UploadHeader, chunks: list[bytes]
    ) -> None:
        self.syncer = learner.syncer
        self.left = deque([frames.pack(frames.Kind.HEADER, 0, header.SerializeToString())])
        self.left.extend([*chunks, END])
        self.replies: list[bulk.UploadReply] = []
        self.cancelled = False
        self.receiver = UploadReceiver(
            self.syncer,
            self.syncer.initial,
            authorise=lambda learner: None,
            cancel=self._cancel,
            refuse=lambda learner, error: self.syncer.record(
                "refuse", learner=learner, reason=error.reason
            ),
        )

    def _cancel(self) -> None:
        self.cancelled = True

    def send(self, count: int) -> DrivenUpload:
        """Send up to that many messages, fewer if the receiver begins to wait."""
        for _ in range(count):
            if self.receiver.waiting is not None or not self.left:
                break
            self._keep(self.receiver.receive(self.left.popleft(), self.syncer.now))
        return self

    def send_all(self) -> DrivenUpload:
        """Send until the receiver waits, or everything is sent."""
        return self.send(len(self.left))

    def resume(self) -> DrivenUpload:
        """Ask again what it waited for."""
        self._keep(self.receiver.resume(self.syncer.now))
        return self

    def _keep(self, replies: list[bytes]) -> None:
        for message in replies:
            payload = frames.unpack(message).payload
            self.replies.append(bulk.UploadReply.FromString(bytes(payload)))
        if self.receiver.waiting is None:
            self.receiver.awaits(self.syncer.now)
