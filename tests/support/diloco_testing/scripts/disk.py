"""
Commands that drive what the syncer writes: snapshots, events.jsonl, and versions of parameters
(docs/testing.md, "Golden scripts"). The disk is that of the simulator, in virtual time.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco.errors import DilocoError
from diloco.journal import reader
from diloco.journal.parts import parts
from diloco.journal.writer import JournalWriter
from diloco.model.fragments import Tensor, cut
from diloco.runtime import disk as files
from diloco.spec import Checkpoint, RunSpec
from diloco_sim.clock import Clock
from diloco_sim.disk import Completion, SimulatedDisk, Weakness
from diloco_sim.journal import Journal
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
from diloco_syncer.storage import capture, snapshots
from diloco_syncer.storage.parameters import FragmentParameters, Parameters
from diloco_syncer.storage.store import CHOICE, Store
from diloco_syncer.storage.writer import Writer
from diloco_testing.scripts.golden import split

DIRECTORY = Path("/run")
SNAPSHOTS = DIRECTORY / "snapshots"
EVENTS = DIRECTORY / snapshots.EVENTS


class DiskScript(logging.Handler):
    """Carries out the commands of one script; shows warnings of the syncer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shown: list[str] = []
        self.clock = Clock()
        self.process = self.clock.process("syncer")
        self.disk = SimulatedDisk(self.clock, random.Random(0))
        self.disk.attach(self.process)
        self.disk.make_directory(DIRECTORY)

    def __call__(self, words: Sequence[str]) -> list[str]:
        name, *rest = words
        plain, options = split(rest)
        self.shown = []
        command: Callable[..., None] = getattr(self, f"_{name}")
        logger = logging.getLogger("diloco_syncer")
        logger.addHandler(self)
        try:
            command(*plain, **options)
            self.clock.run(self.clock.now + 0.1)
        except DilocoError as error:
            self.show(f"the syncer ends: {error}")
        finally:
            logger.removeHandler(self)
        return self.shown

    def emit(self, record: logging.LogRecord) -> None:
        self.show(f"log: {record.getMessage()}")

    def show(self, text: str) -> None:
        """One line of output."""
        self.shown.append(f"t={round(self.disk.time, 1):g} {text}")

    # ------------------------------------------------------------ the syncer

    def _job(self, fragments: str = "4", keep: str = "2", part: str = "1000000") -> None:
        """A job that begins."""
        count = int(fragments)
        self.spec = RunSpec(
            job="j", steps=10_000, fragments=count, interval=count, overlap=1, learners={"eu": 1},
            syncer_checkpoint=Checkpoint(every_steps=1, keep=int(keep)),
        )  # fmt: skip
        tensors = [Tensor(name=f"w{i}", shape=(8,), dtype="float32") for i in range(count)]
        self.layout, self.part_bytes = cut(tensors, num_fragments=count), int(part)
        self._start()

    def _start(self) -> None:
        """A syncer starts on what the disk has."""
        store = Store(SNAPSHOTS, keep=self.spec.syncer_checkpoint.keep, disk=self.disk)
        epoch = store.next_epoch()
        engine, found = snapshots.resume(
            self.spec, DIRECTORY, store.start(), epoch=epoch, run="r", disk=self.disk
        )
        thetas = [np.zeros(f.elements, np.float32) for f in self.layout.fragments]
        self.parameters = found or Parameters(self.layout, thetas, [(epoch, 0)] * len(thetas))
        self.epoch, self.step = epoch, engine.step
        writer = JournalWriter(EVENTS, disk=self.disk)
        self.journal = Journal(writer, self.disk, self.process, self.part_bytes)
        self.thread = self.disk.thread(self.process)
        self.writer = Writer(
            self.spec, DIRECTORY, store, record=lambda event, **_: None, post=self._post,
            journal=self.journal, run="r", disk=self.disk, thread=self, clock=lambda: self.disk.time,
        )  # fmt: skip
        used = {record.name: record.local_step for record in engine.learners}.get("eu/0", 0)
        self.journal.append({"event": "start", "epoch": epoch, "step": self.step})
        self.journal.append({"epoch": epoch, **_join(used)})
        self.show(f"epoch {epoch} begins at step {self.step}, eu/0 at local step {used}")

    def submit(self, function: Callable[..., None], /, *args: Any) -> object:
        """As the thread of the `Writer` does it."""
        return self.thread.call(function, *args, done=_raise)

    def shutdown(self, wait: bool = True) -> None:
        """Nothing to wait for."""

    def _post(self, event: ev.Event) -> None:
        assert isinstance(event, ev.SnapshotDone)
        text = f"refused: {event.reason}" if event.step is None else f"durable: step {event.step}"
        self.clock.at(self.disk.time, self.show, f"snapshot {text}", process=self.process)

    def _merge(self, count: str) -> None:
        """So many merges, one right after the other."""
        for _ in range(int(count)):
            self.step += 1
            fragment = self.step % self.spec.fragments
            before = self.parameters.current(fragment)
            merged = FragmentParameters(
                theta_N=before.theta_N + 1, momentum_N=before.momentum_N, version=(self.epoch, self.step)
            )  # fmt: skip
            self.parameters.commit(fragment, merged)
            member = {"learner": "eu/0", "incarnation": 1, "step": self.step}
            self.journal.append(
                {"event": "merge", "epoch": self.epoch, "step": self.step, "members": [member]}
            )
        self.show(
            f"merged up to step {self.step}; lines that wait for the disk: {self.journal.waiting}"
        )

    def _snapshot(self) -> None:
        engine = Engine(spec=self.spec, epoch=self.epoch, start_step=self.step, initialised=True)
        engine.learners.replay([_join(self.step)])
        self.writer.snapshot(
            capture.capture(
                self.parameters, engine.to_json(), spec=self.spec, epoch=self.epoch, step=self.step
            )
        )

    def _crash(self, power: str = "no") -> None:
        """The process ends, or its whole machine; the next one starts."""
        self.process.crash(power=power == "yes")
        self.process.start()
        self._start()

    # ------------------------------------------------------------ the disk

    def _wait(self, seconds: str) -> None:
        self.clock.run(self.clock.now + float(seconds))

    def _disk(self, weakness: str, seconds: str) -> None:
        """It hangs, is full or fails, so long."""
        self.disk.weaken(Weakness(weakness), self.clock.now, self.clock.now + float(seconds))

    def _flip(self, name: str) -> None:
        """A bit flips at rest, in a file whose name contains this."""
        path = self.disk.flip(name)
        if path is None:
            raise ValueError(f"no file of the disk contains {name} in its name")
        self.show(f"a bit of {path} flips")

    def _choose(self, step: str) -> None:
        """A person's decision."""
        files.replace(self.disk, SNAPSHOTS / CHOICE, step)

    # ------------------------------------------------------------ what is seen

    def _files(self) -> None:
        names = sorted(n for n in self.disk.names(SNAPSHOTS) if n.endswith(".json"))
        self.show(f"snapshots: {' '.join(names) or 'none'}")

    def _lines(self) -> None:
        """What events.jsonl has, and in how many parts."""
        rows = list(reader.read(EVENTS, disk=self.disk))
        counts = Counter(row["event"] for row in rows if "event" in row)
        dropped = [row["lines"] for row in rows if row.get("event") == "dropped"]
        first = next((row["step"] for row in rows if row.get("event") == "merge"), None)
        self.show(
            f"parts: {len(parts(EVENTS, disk=self.disk))}; merges: {counts['merge']}, from step {first} on"
            + (f"; dropped: {dropped}" if dropped else "")
        )

    def _versions(self, fragment: str) -> None:
        found = self.parameters.versions(int(fragment))
        steps = " ".join(f"step {step}" for _, step in found)
        self.show(f"a delta of fragment {fragment} may be based on: {steps}")


def _join(local_step: int) -> dict[str, Any]:
    return {"event": "join", "learner": "eu/0", "incarnation": 1, "localStep": local_step}


def _raise(done: Completion[None]) -> None:
    if done.error is not None:
        raise done.error
