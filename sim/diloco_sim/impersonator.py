"""
Sessions that a member opens besides its own, with a Hello that must be refused.

Certificates are not simulated: what an impersonator states is refused by what the syncer knows of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from diloco.model.fragments import Layout, Tensor, cut
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.checkers.observations import Admitted
from diloco_sim.clock import Process
from diloco_sim.network import Network
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.stream_errors import CANCELLED
from diloco_sim.transfers import Channel
from diloco_sim.wire import CONTROL
from diloco_worker.core.messages import TrainerState
from diloco_worker.link.session import hello
from diloco_worker.settings import LearnerSettings

EVERY_SECONDS = 2.0

FOREIGN_INCARNATION = 1 << 20
"""No world issues so many."""


class Impersonator:
    """
    Opens a session every few seconds, one at a time, until it is stopped or its process ends.

    Args:
        process: of the member's link.
        network: connects it.
        server: the syncer.
        name: of the member.
        spec: of the job.
        layout: of the model.
        observe: gets `Admitted`.
        model_is_known: whether the syncer has parameters: before, any model may be that of the job.
    """

    def __init__(
        self, process: Process, network: Network, server: Process, *, name: str, spec: RunSpec,
        layout: Layout, observe: Callable[[object], None], model_is_known: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._process, self._name, self._observe = process, name, observe
        self._channel = Channel(process, network, server, CONTROL)
        self._model_is_known = model_is_known
        self._settings = LearnerSettings(
            job=spec.job, learner=name, syncer=server.name, spec=Path("spec.json")
        )
        self._spec, self._layout = spec, layout
        self._numbers = count()
        self._open: _Attempt | None = None
        self._stopped = False
        if process.alive:
            self._begin()

    def stop(self) -> None:
        """Open no further session."""
        self._stopped = True
        self._close()

    def _begin(self) -> None:
        self._close()
        if self._stopped:
            return
        first = self._hello(next(self._numbers))
        if first is not None:
            attempt = self._open = _Attempt(first, self._welcomed)
            self._channel.use(attempt.opened, attempt.failed)
        self._process.after(EVERY_SECONDS, self._begin)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _welcomed(self, first: pb.Hello) -> None:
        if list(first.tensors) == list(self._of(self._layout).tensors) or self._model_is_known():
            self._observe(Admitted(first.learner, first.incarnation))

    def _of(self, layout: Layout) -> pb.Hello:
        state = TrainerState()
        return hello(self._settings, self._spec, layout, state, {"restarts": "0"})

    def _hello(self, number: int) -> pb.Hello | None:
        """One of the Hellos that must be refused; None: it would not have to be now."""
        first = self._of(self._layout)
        region = first.region
        match number % 5:
            case 0:
                first.incarnation = FOREIGN_INCARNATION
            case 1:
                first.learner = f"{region}/99"
            case 2 if self._model_is_known():
                return self._of(_other(self._layout, self._spec))
            case 2:
                return None
            case 3:
                first.region, first.learner = "xx", "xx/0"
            case _:
                first.job = "another"
        return first


def _other(layout: Layout, spec: RunSpec) -> Layout:
    """A model of the same tensors, one of which is larger."""
    first, *rest = layout.tensors
    larger = Tensor(name=first.name, shape=(first.elements + 1,), dtype=first.dtype)
    return cut([larger, *rest], num_fragments=spec.fragments)


class Twin(Impersonator):
    """A second process of the member, with the same name and a fresh start; what it states is true."""

    def _hello(self, number: int) -> pb.Hello:
        return self._of(self._layout)

    def _welcomed(self, first: pb.Hello) -> None:
        """It may join: the member itself is replaced."""


class _Attempt:
    """One session."""

    def __init__(self, first: pb.Hello, welcomed: Callable[[pb.Hello], None]) -> None:
        self._first, self._welcomed = first, welcomed
        self._endpoint: Endpoint | None = None
        self._over = False

    def opened(self, connection: Connection) -> None:
        """There is a connection."""
        if not self._over:
            self._endpoint = connection.open("Session", self)
            self._endpoint.send(pb.LearnerMessage(hello=self._first).SerializeToString())

    def failed(self, reason: str) -> None:
        """There is no connection."""
        self._over = True

    def close(self) -> None:
        """End the stream."""
        if not self._over and self._endpoint is not None:
            self._endpoint.cancel(CANCELLED)
        self._over = True

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        if pb.SyncerMessage.FromString(data).WhichOneof("kind") == "welcome":
            self._welcomed(self._first)

    def finished(self) -> None:
        """See `Receiver`."""

    def writable(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        self._over = True
