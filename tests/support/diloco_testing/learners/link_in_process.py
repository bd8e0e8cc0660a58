"""
A link and a syncer in the process of their trainer, in place of `LinkProcess`: decisions, encoder and memory are real.

`turn` lets the syncer announce fragments, pull some, and merge others, at random. What it pulled and what it merged is
kept, so that a test can compare it with what the model was.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diloco.codec import formats, frames
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.encoder import Encoder
from diloco_worker.link.transfer import Identity

IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What a pull got."""

    header: bulk.UploadHeader
    payload: bytes
    values_N: np.ndarray


class LinkInProcess:
    """
    Args:
        shared: the memory.
        spec: of the job; FP32 down.
        seed: of the syncer.
        forgets: how often the syncer pulls a fragment of which it has no version.
    """

    def __init__(
        self, shared: SharedMemory, spec: RunSpec, seed: int, *, forgets: float = 0.0
    ) -> None:
        self.shared, self.spec = shared, spec
        self._forgets = forgets
        self.pid: int | None = None
        self.reports: list[TrainerState] = []
        self.uploads: list[Upload] = []
        self.results: dict[tuple[int, int], np.ndarray] = {}
        """By (fragment, generation), what was placed in an inbox."""
        self.starts = self.refused = 0
        self._random, self._numbers = random.Random(seed), np.random.default_rng(seed)
        self._read: dict[int, np.ndarray] = {}
        """By fragment, the host copy that the link is reading, under the lock, over several steps."""
        self._versions: list[int] = [0] * len(shared.layout.fragments)
        self._step = 0
        self._state: TrainerState | None = None
        self._new: LinkState | None = None
        self._try_lock = shared.try_lock
        shared.try_lock = self._try_to_lock

    # ------------------------------------------------------------ as the trainer sees it

    def ensure(self, state: TrainerState, *, now: float) -> None:
        if self.pid is not None:
            return
        self.pid, self.starts = 1, self.starts + 1
        self._encoder = Encoder(self.shared, self.spec, BufferPool(most_idle_bytes=1 << 20))
        self._protocol = LinkProtocol(
            slots=[self._slot(p) for p in range(len(self.shared.layout.fragments))],
            has_constants=False, next_delay=lambda: 1.0, reset_delay=lambda: None, syncer="s:1",
        )  # fmt: skip
        self._handle(ev.TrainerUpdate(state=state))
        welcome = ev.Welcomed(
            epoch=1, incarnation=1, step=self._step, steps=10**6, local_step=0, total_tokens=0,
            heartbeat_seconds=9.0, use_checkpoint=False,
        )  # fmt: skip
        self._handle(welcome)
        self._handle(ev.ModelReady(versions=tuple((1, v) for v in self._versions)))

    def offer(self, state: TrainerState) -> None:
        self._state = state

    def newest(self, *, now: float) -> LinkState | None:
        if self._state is not None and self._random.random() < 0.8:
            state, self._state = self._state, None
            self._handle(ev.TrainerUpdate(state=state))
        new, self._new = self._new, None
        return new

    def wait(self, timeout_seconds: float) -> None:
        pass

    def leave(self, state: TrainerState) -> None:
        self.pid = None

    # ------------------------------------------------------------ as a test sees it

    def turn(self) -> None:
        """Between two steps: the syncer announces, pulls and merges."""
        self._step += 1
        fragments = len(self.shared.layout.fragments)
        announced = [(self._step // 3 + i) % fragments for i in range(self.spec.overlap + 1)]
        self._handle(ev.Opened(step=self._step, steps=10**6, fragments=tuple(announced)))
        self._end_reads()
        offers = [p for p in self.reports[-1].offers if p in announced] if self.reports else []
        if offers and self._random.random() < 0.7:
            self._pull(self._random.choice(offers))
        if self._random.random() < 0.5:
            self._merge(self._random.randrange(fragments))

    def die(self) -> None:
        """The link process ends; the trainer starts another."""
        self.pid, self._state, self._new = None, None, None

    def _pull(self, fragment: int) -> None:
        if fragment in self._read:
            return
        versions = tuple((1, v) for v in range(self._step + 1))
        if self._forgets and self._random.random() < self._forgets:
            versions = ()
        pull = ev.Pulled(round=self._step, attempt=1, fragment=fragment, versions=versions)
        upload = self._encoder.pull(pull, IDENTITY)
        assert upload is not None
        if upload.header.elements == 0:
            self.refused += (
                1  # the place of the copy was released: a device that is slow by many steps
            )
            return
        elements = self.shared.layout.fragments[fragment].elements
        values_N = np.empty(elements, np.float32)
        sent = [frames.unpack(message) for message in upload.messages()]
        chunks = [bytes(e.payload) for e in sent if e.kind == frames.Kind.CHUNK]
        payload = b"".join(chunks)
        formats.decode(upload.header.format, payload, values_N)
        upload.close()
        self.uploads.append(Upload(header=upload.header, payload=payload, values_N=values_N))
        if self._random.random() < 0.5:
            self._read[fragment] = self.shared.host(fragment).copy()

    def _end_reads(self) -> None:
        for fragment in [p for p in self._read if self._random.random() < 0.4]:
            before_N = self._read.pop(fragment)
            found_N = self.shared.host(fragment)
            assert found_N.tobytes() == before_N.tobytes(), "written while the link reads it"

    def _merge(self, fragment: int) -> None:
        """A result arrives."""
        self._versions[fragment] = self._step
        request = ev.Download(fragment=fragment, round=self._step)
        staged = Staged(fragment=fragment, version=(1, self._step), ticket=self._step)
        self._handle(ev.Downloaded(request=request, staged=staged))

    # ------------------------------------------------------------ decisions

    def _handle(self, event: ev.Event) -> None:
        pending = self._protocol.handle(event, 0.0)
        while pending:
            decision, *pending = pending
            match decision:
                case ev.NotifyTrainer():
                    self._new = self._protocol.link_state
                case ev.SendReport(state=state):
                    self.reports.append(state)
                case ev.Place():
                    pending = [*self._protocol.handle(self._place(decision), 0.0), *pending]
                case ev.Download(round=0):
                    version = (1, self._versions[decision.fragment])
                    staged = Staged(fragment=decision.fragment, version=version, ticket=0)
                    reply = ev.Downloaded(request=decision, staged=staged)
                    pending = [*pending, *self._protocol.handle(reply, 0.0)]
                case _:
                    pass

    def _place(self, decision: ev.Place) -> ev.Placed:
        fragment = decision.staged.fragment
        with self.shared.lock(fragment):
            self.shared.invalidate_inbox(fragment)
            inbox_N = self.shared.inbox(fragment)
            inbox_N[:] = np.nan
            inbox_N[:] = self._values(fragment)
            self.shared.publish(fragment, decision.generation, decision.staged.version)
        self.results[fragment, decision.generation] = inbox_N.copy()
        return ev.Placed(fragment=fragment)

    def _values(self, fragment: int) -> np.ndarray:
        described = self.shared.layout.fragments[fragment]
        values_N = np.zeros(described.elements, np.float32)
        for slot in described.slots:
            length = slot.tensor.length
            if slot.tensor.newest:  # digits
                values_N[slot.offset : slot.offset + length] = self._numbers.integers(0, 9, length)
            else:
                random_N = self._numbers.standard_normal(length, np.float32)
                values_N[slot.offset : slot.offset + length] = random_N
        return values_N

    def _slot(self, fragment: int) -> Slot:
        inbox = self.shared.inbox_state(fragment)
        return Slot(fragment=fragment, published=inbox.generation, version=inbox.version)

    @contextlib.contextmanager
    def _try_to_lock(self, fragment: int) -> Iterator[bool]:
        """Record locks do not exclude the threads of one process."""
        if fragment in self._read or self._random.random() < 0.05:
            yield False
            return
        with self._try_lock(fragment) as held:
            yield held
