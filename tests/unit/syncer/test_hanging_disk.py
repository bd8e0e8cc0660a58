"""A disk that hangs below a running syncer, with its real threads: decisions never wait for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.codec import formats
from diloco.journal.background import BackgroundWriter
from diloco.journal.writer import JournalWriter
from diloco.model.fragments import Tensor
from diloco.runtime.disk import Data, LocalDisk, LocalFile, Mode
from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.coordinator import Event
from diloco_syncer.core.admission import Admission
from diloco_syncer.core.engine import Engine
from diloco_syncer.merging import streaming
from diloco_syncer.metrics import Metrics
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.runner import Runner
from diloco_syncer.state import State
from diloco_syncer.storage.store import Store
from diloco_testing.learners.scripted import random_delta, thetas_of
from diloco_testing.syncers.driven import DrivenLearner, driven_spec

SECONDS = 30.0
TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))


class HangingFile(LocalFile):
    """Writes and syncs wait until its disk answers."""

    def __init__(self, fd: int, answer: Callable[[], None]) -> None:
        super().__init__(fd)
        self._answer = answer

    def write(self, data: Data) -> int:
        self._answer()
        return super().write(data)

    def sync(self) -> None:
        self._answer()
        super().sync()


class HangingDisk(LocalDisk):
    """Files with this in their path hang when they are written, from `hang` to `end`."""

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self._within = ""
        self.waiting = threading.Event()
        """Something waits for the disk."""

    def hang(self, within: str) -> None:
        self._within = within
        self._answers.clear()

    def end(self) -> None:
        self._answers.set()

    def open(self, path: Path, mode: Mode, *, expected_bytes: int = 0) -> LocalFile:
        file = super().open(path, mode, expected_bytes=expected_bytes)

        def answer() -> None:
            if self._within in path.as_posix() and not self._answers.is_set():
                self.waiting.set()
                assert self._answers.wait(2 * SECONDS)

        hanging = HangingFile(file._fd, answer)
        file._fd = -1
        return hanging


class RunningSyncer:
    """A runner whose files are on such a disk; what `DrivenLearner` needs of a syncer."""

    def __init__(self, folder: Path, disk: HangingDisk, **changes: Any) -> None:
        # As the program does before it serves: a learner that sends nothing while they are compiled is gone.
        formats.warm_up()
        streaming.warm_up()
        self.folder, self.disk = folder, disk
        self.spec: RunSpec = driven_spec(
            syncer_checkpoint=Checkpoint(every_steps=1, keep=3), **changes
        )
        state = State(
            engine=Engine(spec=self.spec, epoch=1), admission=Admission(self.spec), parameters=None,
            model=None,
        )  # fmt: skip
        self.store = Store(folder / "snapshots", keep=3, disk=disk)
        events = BackgroundWriter(JournalWriter(folder / "events.jsonl", disk=disk))
        self.coordinator = self.runner = Runner(
            state, folder, store=self.store, events=events, metrics=Metrics(0)
        )
        self.runner._writer._disk = disk  # for the exported model
        self.initial = InitialParameters(self.runner)
        self.runner.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    @property
    def now(self) -> float:
        return time.monotonic()

    def run(self, *events: Event) -> None:
        """Post these events and wait until the thread that decides has handled them, within 10 s."""
        for event in events:
            self.runner.post(event)
        self.runner.ask(lambda state: None)

    def step(self) -> int:
        return self.runner.ask(lambda state: state.engine.step)

    def durable_step(self) -> int:
        """Of the newest durable snapshot; -1: there is none."""
        return self.runner.ask(lambda state: state.engine.durability.durable_step)

    def merges(self) -> list[int]:
        """Global steps of the whole merge lines that the disk has."""
        lines = (self.folder / "events.jsonl").read_text().rpartition("\n")[0].splitlines()
        return [line["step"] for line in map(json.loads, lines) if line["event"] == "merge"]


@pytest.fixture
def disk() -> Iterator[HangingDisk]:
    disk = HangingDisk()
    yield disk
    disk.end()


def until(what: Callable[[], object], expected: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {expected}"
        time.sleep(0.005)


def begin(folder: Path, disk: HangingDisk, **changes: Any) -> tuple[RunningSyncer, DrivenLearner]:
    syncer = RunningSyncer(folder, disk, **changes)
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    learner.initialise(thetas_of(learner))
    # `newest` is for the start: beside a thread that writes, a manifest may appear while it reads.
    until(lambda: syncer.durable_step() == 0, "the first snapshot")
    return syncer, learner


def train(syncer: RunningSyncer, learner: DrivenLearner, rounds: int) -> None:
    """So many rounds, from the report to the commit."""
    for _ in range(rounds):
        before = syncer.step()
        [pull] = learner.step()
        delta_N = random_delta(learner.layout.fragments[pull.fragment], 1)
        upload = learner.upload(pull, delta_N).send(1)
        syncer.run()
        upload.resume().send_all()
        syncer.run()
        assert upload.replies[-1].done, upload.replies
        assert syncer.step() == before + 1


def stop(syncer: RunningSyncer) -> None:
    syncer.disk.end()
    syncer.runner.stop()
    syncer.runner._events.close()


def test_13_a_disk_that_hangs_for_the_journal_delays_no_decision_and_loses_no_line(tmp_path, disk):
    syncer, learner = begin(tmp_path, disk)
    train(syncer, learner, 1)
    until(lambda: syncer.durable_step() == 1, "the snapshot of step 1")
    disk.hang("/events.jsonl")
    train(syncer, learner, 3)
    assert disk.waiting.wait(SECONDS)
    assert syncer.step() == 4
    assert syncer.durable_step() == 1, "no snapshot is durable before the lines of its merges"
    assert syncer.store.newest().step == 1
    disk.end()
    until(lambda: syncer.durable_step() == 4, "the snapshots since then")
    assert syncer.merges() == [1, 2, 3, 4]
    stop(syncer)


def test_13_a_disk_that_hangs_for_a_snapshot_delays_no_round_and_loses_no_durable_one(
    tmp_path, disk
):
    syncer, learner = begin(tmp_path, disk)
    train(syncer, learner, 1)
    until(lambda: syncer.durable_step() == 1, "the snapshot of step 1")
    disk.hang("/snapshots/")
    train(syncer, learner, 3)
    assert disk.waiting.wait(SECONDS)
    assert syncer.durable_step() == 1
    assert syncer.store.newest().step == 1, "the one before is intact"
    until(lambda: syncer.merges() == [1, 2, 3, 4], "the lines, which do not wait for it")
    disk.end()
    until(lambda: syncer.durable_step() == 4, "the newest snapshot")
    assert syncer.store.newest().step == 4
    stop(syncer)


def test_13_a_disk_that_hangs_for_the_export_delays_only_the_end_of_the_job(tmp_path, disk):
    syncer, learner = begin(tmp_path, disk, steps=3)
    train(syncer, learner, 2)
    disk.hang("/model/")
    train(syncer, learner, 1)
    assert disk.waiting.wait(SECONDS)
    late = DrivenLearner(syncer, "eu/1", TENSORS)
    assert "ready" in late.kinds(), "sessions, status and downloads are served"
    assert "complete" not in learner.kinds()
    assert not syncer.runner.ask(lambda state: state.engine.complete)
    waiting = syncer.runner.ask(lambda state: state.engine.waiting_for())
    assert waiting == "the model to be exported"
    disk.end()
    until(lambda: syncer.runner.ask(lambda state: state.engine.complete), "the job is complete")
    syncer.run()
    assert learner.kinds() == late.kinds() == ["complete"]
    model = syncer.runner.ask(lambda state: state.model)
    assert (model.step, Path(model.path).is_file()) == (3, True)
    stop(syncer)
