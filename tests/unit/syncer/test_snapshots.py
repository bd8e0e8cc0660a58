"""Snapshots and the journal fit each other: nothing that a start reads is rotated away."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import StorageError
from diloco.journal import reader
from diloco.journal.background import BackgroundWriter
from diloco.journal.parts import Position
from diloco.journal.writer import JournalWriter
from diloco.model.fragments import Tensor, cut
from diloco.runtime.disk import Data, LocalFile
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
from diloco_syncer.storage import capture, snapshots
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.writer import Writer

SPEC = RunSpec(job="j", steps=10, fragments=1, interval=1, overlap=1, learners={"eu": 2})
LAYOUT = cut([Tensor(name="a", shape=(4,), dtype="float32")], num_fragments=1)


def parameters() -> Parameters:
    return Parameters(LAYOUT, [np.zeros(LAYOUT.fragments[0].elements, np.float32)], [(1, 0)])


def taken(step: int, events: Position, *, halted: str = ""):
    engine = Engine(spec=SPEC, epoch=1, start_step=step, initialised=True)
    engine.scheduler.halted = halted
    state = capture.capture(parameters(), engine.to_json(), spec=SPEC, epoch=1, step=step)
    return capture.with_position(state, events)


def resumed(directory: Path, store: Store, *, epoch: int):
    """As a start does it."""
    snapshot = store.start()
    run = store.run(begins=snapshot is None)
    return snapshots.resume(SPEC, directory, snapshot, epoch=epoch, run=run)


def join(learner: str, incarnation: int) -> dict[str, object]:
    return {
        "epoch": 1, "event": "join", "learner": learner, "incarnation": incarnation, "localStep": 3
    }  # fmt: skip


def test_a_start_reads_the_lines_after_its_snapshot_in_all_parts(tmp_path: Path):
    store = Store(tmp_path / "snapshots", keep=2)
    log = JournalWriter(tmp_path / "events.jsonl")
    log.append(join("eu/0", 1))
    store.write(taken(1, log.position()))
    log.append(join("eu/0", 2))
    log.rotate(needed=snapshots.needed_part(store), part_bytes=1, total_bytes=1)
    log.append(join("eu/1", 3))
    log.rotate(needed=snapshots.needed_part(store), part_bytes=1, total_bytes=1)
    log.close()
    engine, theta = resumed(tmp_path, Store(store.root, keep=2), epoch=2)
    assert theta is not None
    found = {learner.name: learner.incarnation for learner in engine.learners}
    assert found == {"eu/0": 2, "eu/1": 3}


def test_a_journal_with_a_flipped_bit_does_not_keep_the_syncer_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    journal = JournalWriter(tmp_path / "events.jsonl")
    journal.append(join("eu/0", 3))
    journal.append(join("eu/1", 4))
    journal.close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"localStep"', b'"mocalStep"', 1))
    store = Store(tmp_path / "snapshots", keep=1)
    engine, _ = resumed(tmp_path, store, epoch=2)
    assert [record.name for record in engine.learners] == ["eu/1"]
    assert "events.jsonl: damaged lines were left out (1)" in caplog.text


def test_parts_are_deleted_when_no_kept_snapshot_needs_them(tmp_path: Path):
    store = Store(tmp_path / "snapshots", keep=1)
    log = JournalWriter(tmp_path / "events.jsonl")
    for step in range(1, 5):
        log.append(join("eu/0", step))
        store.write(taken(step, log.position()))
        log.rotate(needed=snapshots.needed_part(store), part_bytes=1, total_bytes=1)
    log.close()
    names = sorted(path.name for path in tmp_path.glob("events*"))
    assert names == ["events.4.jsonl", "events.jsonl"]


def test_no_snapshot_is_durable_before_the_lines_of_its_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Store(tmp_path / "snapshots", keep=1)
    log = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    answers = [False, True]
    monkeypatch.setattr(log._writer, "sync", lambda: answers.pop(0))
    done: queue.SimpleQueue[ev.SnapshotDone] = queue.SimpleQueue()
    lines: list[dict[str, object]] = []
    writer = Writer(
        SPEC, tmp_path, store, record=lambda event, **fields: lines.append({"event": event, **fields}),
        post=done.put, journal=log, run="r",
    )  # fmt: skip
    writer.snapshot(taken(1, Position()))
    refused = done.get(timeout=280)
    assert refused.step is None
    assert "events.jsonl before it are not durable" in refused.reason
    assert (lines[0]["event"], lines[0]["ok"], lines[0]["detail"]) == (
        "snapshot", False, refused.reason
    )  # fmt: skip
    assert store.newest() is None
    writer.snapshot(taken(2, Position()))
    assert done.get(timeout=280).step == 2
    writer.close()
    log.close()


def test_a_snapshot_waits_until_the_number_of_lost_lines_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Store(tmp_path / "snapshots", keep=1)
    log = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    write, room = LocalFile.write, [0]

    def writing(file: LocalFile, data: Data) -> int:
        if not room[0] and b'"event"' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(LocalFile, "write", writing)
    writer = Writer(
        SPEC, tmp_path, store, record=lambda event, **fields: None, post=lambda event: None,
        journal=log, run="r",
    )  # fmt: skip
    log.append({"event": "merge", "step": 1})
    with pytest.raises(StorageError, match="before it are not durable"):
        writer.write(taken(1, Position()))
    assert store.newest() is None
    room[0] = 1
    writer.write(taken(1, Position()))
    assert [row["events"] for row in reader.read(tmp_path / "events.jsonl")] == [{"merge": 1}]
    writer.close()
    log.close()


@pytest.mark.parametrize("refused", [False, True])
def test_lines_are_durable_before_a_snapshot_and_rotated_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
):
    calls: list[object] = []
    store = Store(tmp_path / "snapshots", keep=1)
    log = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    monkeypatch.setattr(log, "sync", lambda seconds: calls.append("sync") or True)
    monkeypatch.setattr(log, "rotate", lambda **given: calls.append(given))
    write = store.write

    def writing(snapshot):
        calls.append("write")
        if refused:
            raise StorageError("full")
        return write(snapshot)

    monkeypatch.setattr(store, "write", writing)
    writer = Writer(
        SPEC, tmp_path, store, record=lambda event, **fields: None, post=lambda event: None,
        journal=log, run="r",
    )  # fmt: skip
    with pytest.raises(StorageError) if refused else contextlib.nullcontext():
        writer.write(taken(1, Position(7, 0)))
    heading = {"epoch": 1, "fragments": 1, "interval": 1}
    rotation = [] if refused else [{"needed": 7, "heading": heading}]
    assert calls == ["sync", "write", *rotation]
    writer.close()
    log.close()


def test_a_snapshot_that_a_person_chose_is_newer_than_what_learners_hold(tmp_path: Path):
    store = Store(tmp_path / "snapshots", keep=5)
    for step in (4, 8):
        store.write(taken(step, Position(part=1, offset=0)))
    _, theta = resumed(tmp_path, Store(store.root, keep=5), epoch=2)
    assert theta is not None
    assert theta.current(0).version == (1, 0), "learners may be ahead: their steps are kept"
    (store.root / "from-snapshot").write_text("4")
    engine, theta = resumed(tmp_path, Store(store.root, keep=5), epoch=3)
    assert theta is not None
    assert (engine.step, theta.current(0).version) == (4, (3, 0))
    assert engine.durability.committed(4), "the next commit makes that durable"
    for epoch in (4, 5):
        again = Store(store.root, keep=5)
        engine, theta = resumed(tmp_path, again, epoch=epoch)
        assert theta is not None
        assert theta.current(0).version == (epoch, 0), (
            "no commit came in between: learners may lack it"
        )
    again.write(taken(5, Position(part=1, offset=0)))
    engine, theta = resumed(tmp_path, Store(store.root, keep=5), epoch=6)
    assert theta is not None
    assert (engine.step, theta.current(0).version) == (5, (1, 0)), "as it was written"


HALT = {"epoch": 1, "event": "halt", "step": 5, "fragment": 0, "reason": "Θ would grow"}


@pytest.mark.parametrize("written", ["line", "snapshot"])
def test_a_halt_outlives_restarts_until_a_person_chooses_the_snapshot(tmp_path: Path, written: str):
    store = Store(tmp_path / "snapshots", keep=5)
    store.write(taken(4, Position(part=1, offset=0)))
    events = JournalWriter(tmp_path / "events.jsonl")
    events.append(HALT)
    after = Position(part=1, offset=(tmp_path / "events.jsonl").stat().st_size)
    events.close()
    if written == "snapshot":
        store.write(taken(5, after, halted="Θ would grow"))
    for epoch in (2, 3):
        engine, _ = resumed(tmp_path, Store(store.root, keep=5), epoch=epoch)
        assert engine.waiting_for().startswith("manual action: Θ would grow; ")
        assert engine.to_json()["halted"] == "Θ would grow"
    newest = 5 if written == "snapshot" else 4
    (store.root / "from-snapshot").write_text(str(newest))
    for epoch in (4, 5):
        again = Store(store.root, keep=5)
        engine, _ = resumed(tmp_path, again, epoch=epoch)
        assert (engine.step, engine.scheduler.halted) == (newest, "")
    again.write(taken(6, after))
    engine, _ = resumed(tmp_path, Store(store.root, keep=5), epoch=6)
    assert (engine.step, engine.scheduler.halted) == (6, ""), "the file is gone"


def test_a_job_that_a_person_starts_over_is_not_halted(tmp_path: Path):
    store = Store(tmp_path / "snapshots", keep=5)
    store.write(taken(4, Position(part=1, offset=0), halted="Θ would grow"))
    events = JournalWriter(tmp_path / "events.jsonl")
    events.append(HALT)
    events.close()
    (store.root / "from-snapshot").write_text("0")
    engine, _ = resumed(tmp_path, Store(store.root, keep=5), epoch=2)
    assert (engine.initialised, engine.scheduler.halted) == (False, "")


def test_a_halt_without_a_reason_in_its_line_is_still_one():
    engine = Engine(spec=SPEC, epoch=1, start_step=4, initialised=True)
    assert [*engine.scheduler.replayed([{"event": "halt"}])] == [{"event": "halt"}]
    assert engine.scheduler.halted


def test_a_snapshot_of_an_earlier_version_states_no_halt():
    state = Engine(spec=SPEC, epoch=1, start_step=4, initialised=True).to_json()
    del state["halted"]
    assert Engine.resume(SPEC, epoch=2, state=state).scheduler.halted == ""


def run_of_a_start(root: Path) -> str:
    store = Store(root, keep=2)
    found = store.start()
    return store.run(begins=found is None)


def test_the_name_of_the_run_stays_while_starts_continue_from_a_snapshot(tmp_path: Path):
    first = run_of_a_start(tmp_path)
    assert len(first) == 32
    Store(tmp_path, keep=2).write(taken(4, Position(1, 0)))
    assert run_of_a_start(tmp_path) == run_of_a_start(tmp_path) == first


@pytest.mark.parametrize("why", ["no snapshot", "chosen", "started over", "damaged"])
def test_the_run_is_another_one_when_its_parameters_are(tmp_path: Path, why: str):
    first = run_of_a_start(tmp_path)
    if why != "no snapshot":
        Store(tmp_path, keep=2).write(taken(4, Position(1, 0)))
        assert run_of_a_start(tmp_path) == first
    if why in ("chosen", "started over"):
        (tmp_path / "from-snapshot").write_text("4" if why == "chosen" else "0")
    if why == "damaged":
        (tmp_path / "run").write_bytes(b"\xff" * 40)
    second = run_of_a_start(tmp_path)
    assert len(second) == 32
    assert second != first


def test_a_start_has_a_name_of_its_own_and_knows_which_start_wrote_its_snapshot(tmp_path: Path):
    first = Store(tmp_path, keep=2)
    assert first.start() is None
    assert (len(first.start_id), first.snapshot_start_id) == (32, "")
    first.write(taken(4, Position(1, 0)))
    second, third = Store(tmp_path, keep=2), Store(tmp_path, keep=2)
    for store in (second, third):
        assert store.start() is not None
        assert store.snapshot_start_id == first.start_id
    assert len({first.start_id, second.start_id, third.start_id}) == 3
    second.write(taken(5, Position(1, 0)))
    (tmp_path / "from-snapshot").write_text("4")
    assert third.start() is not None
    assert third.snapshot_start_id == first.start_id, "the one that a person chose"


def test_a_restored_copy_counts_epochs_again_under_another_name(tmp_path: Path):
    store = Store(tmp_path / "volume", keep=2)
    assert store.next_epoch() == 1
    store.write(taken(4, Position(1, 0)))
    shutil.copytree(tmp_path / "volume", tmp_path / "copy")
    lost = Store(tmp_path / "volume", keep=2)
    restored = Store(tmp_path / "copy", keep=2)
    assert lost.next_epoch() == restored.next_epoch() == 2
    assert lost.start_id != restored.start_id


def test_a_run_that_cannot_be_named_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFile, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        run_of_a_start(tmp_path)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- the exported model


def exported(directory: Path, step: int) -> None:
    """What a process of the current run writes at the end."""
    run = (directory / "snapshots/run").read_text().strip()
    snapshots.export(directory, parameters(), SPEC, step=step, tokens=0, run=run)


def a_run_that_is_complete(directory: Path) -> Store:
    store = Store(directory / "snapshots", keep=5)
    resumed(directory, store, epoch=1)
    for step in (9, 10):
        store.write(taken(step, Position(1, 0)))
    exported(directory, SPEC.steps)
    return store


def test_a_job_is_complete_after_a_restart_with_the_model_of_its_run(tmp_path: Path):
    root = a_run_that_is_complete(tmp_path).root
    engine, _ = resumed(tmp_path, Store(root, keep=5), epoch=2)
    assert engine.complete


@pytest.mark.parametrize("choice", ["9", "0"])
def test_a_job_that_was_rolled_back_is_not_complete_with_the_model_that_a_person_rejected(
    tmp_path: Path, choice: str
):
    root = a_run_that_is_complete(tmp_path).root
    (root / "from-snapshot").write_text(choice)
    again = Store(root, keep=5)
    engine, _ = resumed(tmp_path, again, epoch=2)
    assert not engine.complete
    run = again.run(begins=False)
    assert snapshots.exported(tmp_path, run=run) is None, "the status shows no rejected model"
    again.write(taken(10, Position(1, 0)))  # the end of the job, killed before the export
    engine, _ = resumed(tmp_path, Store(root, keep=5), epoch=3)
    assert engine.step == SPEC.steps
    assert not engine.complete
    exported(tmp_path, SPEC.steps)
    engine, _ = resumed(tmp_path, Store(root, keep=5), epoch=4)
    assert engine.complete


def test_a_job_whose_snapshots_were_restored_is_not_complete_with_the_model_of_its_lost_history(
    tmp_path: Path,
):
    root = a_run_that_is_complete(tmp_path).root
    for path in root.glob("*10*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = Store(root, keep=5)
    engine, _ = resumed(tmp_path, again, epoch=2)
    assert engine.step == 9
    run = again.run(begins=False)
    assert snapshots.exported(tmp_path, run=run) is None, "the status shows no lost model"
    again.write(taken(10, Position(1, 0)))  # the end of the job, killed before the export
    engine, _ = resumed(tmp_path, Store(root, keep=5), epoch=3)
    assert engine.step == SPEC.steps
    assert not engine.complete


def test_a_model_that_an_earlier_version_exported_still_counts(tmp_path: Path):
    root = a_run_that_is_complete(tmp_path).root
    facts = tmp_path / "model/model.json"
    stated = json.loads(facts.read_text())
    del stated["run"]
    facts.write_text(json.dumps(stated))
    engine, _ = resumed(tmp_path, Store(root, keep=5), epoch=2)
    assert engine.complete


@pytest.mark.parametrize("facts", ["[]", "{}", '{"sha256": "a", "step": "x"}', "\udcff"])
def test_facts_of_a_model_that_are_damaged_describe_none(tmp_path: Path, facts: str):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.json").write_bytes(facts.encode(errors="surrogateescape"))
    assert snapshots.exported(tmp_path, run="r") is None
