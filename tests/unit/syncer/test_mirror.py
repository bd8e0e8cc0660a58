"""Copies of snapshots in an object store, and starts from them, under faults of the store and of other syncers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import ConfigError, StorageError
from diloco.runtime.disk import LocalDisk
from diloco_syncer.storage import catalog, object_store, restore
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.claims import FencedError, claim
from diloco_syncer.storage.mirror import Mirror
from diloco_syncer.storage.object_store import ObjectsError, StoppedError
from diloco_syncer.storage.store import CHOICE, Store
from diloco_testing.syncers.objects import MemoryObjects

SPEC = "0123456789abcdef"


def snapshot(step: int, *, epoch: int = 1) -> Snapshot:
    rng = np.random.default_rng(step)
    return Snapshot(
        step=step,
        epoch=epoch,
        arrays={
            "theta.0": rng.standard_normal(1000, dtype=np.float32),
            "nothing": np.zeros(0, np.float32),
            "momentum.0": rng.standard_normal((20, 3), dtype=np.float32),
        },
        meta={"spec": SPEC, "events": {"part": 3, "offset": 4567}},
    )


class Syncer:
    """A directory and its mirror, whose thread is this one: `copy` does what is due at this moment."""

    def __init__(self, directory: Path, objects: MemoryObjects, *, keep: int = 2) -> None:
        self.objects, self.keep = objects, keep
        self.store = Store(directory, keep=keep)
        self.lines: list[dict[str, Any]] = []
        self.now = 0.0
        self.mirror = self.mirror_of(None)

    def mirror_of(self, restored: restore.Restored | None) -> Mirror:
        return Mirror(
            self.objects, self.store, keep=self.keep, run="f" * 32,
            claimed=restored.claim if restored else None, verified=restored.copy if restored else None,
            record=lambda event, **fields: self.lines.append({"event": event, **fields}),
            clock=lambda: self.now,
        )  # fmt: skip

    def restored(self) -> restore.Restored:
        found = restore.restore(self.objects, self.store, spec=SPEC, stop=threading.Event())
        self.mirror = self.mirror_of(found)
        return found

    def write(self, step: int, *, epoch: int = 1) -> None:
        self.store.write(snapshot(step, epoch=epoch))
        self.mirror.snapshot_written()

    def copy(self) -> None:
        """One attempt, when it is due."""
        wait = self.mirror._schedule.due_in(self.now)
        assert wait is not None
        self.now += wait
        assert self.mirror._wait()
        self.mirror._attempt()

    @property
    def problem(self) -> str:
        return self.mirror.state().problem


@pytest.fixture
def objects() -> Iterator[MemoryObjects]:
    found = MemoryObjects()
    yield found
    assert found.unused == []


@pytest.fixture
def syncer(tmp_path: Path, objects: MemoryObjects) -> Syncer:
    return Syncer(tmp_path / "first", objects)


@pytest.fixture
def successor(tmp_path: Path, objects: MemoryObjects) -> Syncer:
    """With an empty directory."""
    return Syncer(tmp_path / "second", objects)


def steps(objects: MemoryObjects) -> list[int]:
    return [copy.step for copy in catalog.complete(objects.content)]


def assert_starts_from(syncer: Syncer, step: int) -> None:
    found = syncer.store.start()
    assert found is not None
    assert found.step == step
    for name, array in snapshot(step).arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


# ---------------------------------------------------------------- copies and restarts from them


def test_an_empty_directory_continues_from_the_newest_snapshot_of_the_store(syncer, successor):
    for step in (48, 96):
        syncer.write(step, epoch=3)
        syncer.copy()
    assert syncer.lines == [
        {"event": "copy", "step": step, "ok": True, "seconds": 0.0} for step in (48, 96)
    ]
    found = successor.restored()
    assert (found.copy.step, found.claim.number) == (96, 2)
    assert_starts_from(successor, 96)
    assert (
        successor.store.run(begins=False) == "f" * 32
    )  # local checkpoints of learners still count
    assert successor.store.snapshot_start_id == syncer.store.start_id
    assert successor.store.next_epoch() == 4


def test_after_a_restart_from_the_store_all_lines_of_the_new_directory_count(syncer, successor):
    syncer.write(48)
    syncer.copy()
    successor.restored()
    assert successor.store.start().meta["events"] == {"part": 1, "offset": 0}


def test_without_a_snapshot_anywhere_the_job_begins_at_step_0(successor, objects):
    assert successor.restored().copy is None
    assert successor.store.start() is None
    assert steps(objects) == []


def test_a_directory_with_a_snapshot_or_a_decision_of_a_person_is_not_empty(tmp_path, objects):
    store = Store(tmp_path / "a", keep=1)
    assert store.is_empty
    (store.root / CHOICE).write_text("0")
    assert not store.is_empty
    (store.root / CHOICE).unlink()
    store.write(snapshot(1))
    assert not store.is_empty


def test_only_the_newest_snapshot_is_copied_when_several_were_written_meanwhile(syncer, objects):
    for step in (1, 2, 3):
        syncer.write(step)
    syncer.copy()
    assert steps(objects) == [3]
    assert syncer.mirror._schedule.is_idle


def test_a_restart_does_not_copy_again_what_is_in_the_store(syncer, objects):
    syncer.write(48)
    syncer.copy()
    puts = objects.calls["put"]
    again = Syncer(syncer.store.root, objects)
    again.copy()
    assert (objects.calls["put"], again.lines, again.mirror.state().step) == (puts, [], 48)


def test_a_restart_copies_what_its_predecessor_did_not(syncer, objects):
    syncer.write(48)
    syncer.store.write(snapshot(96))
    again = Syncer(syncer.store.root, objects)
    again.copy()
    assert steps(objects) == [96]


def test_a_snapshot_that_a_person_chose_counts_more_than_the_rejected_ones(
    syncer, successor, objects
):
    for step in (48, 96):
        syncer.write(step)
        syncer.copy()
    (syncer.store.root / CHOICE).write_text("48")
    again = Syncer(syncer.store.root, objects)
    again.store.start()
    again.copy()
    assert successor.restored().copy.step == 48


# ---------------------------------------------------------------- retention


def test_the_store_keeps_the_newest_snapshots(syncer, objects):
    for step in range(1, 6):
        syncer.write(step)
        syncer.copy()
    assert steps(objects) == [5, 4]
    assert len(objects.content) == 2 * 2 + 1


def test_the_last_snapshot_that_was_read_back_is_never_deleted(syncer, objects):
    syncer.write(1)
    syncer.copy()
    assert steps(objects) == [1]
    for step in (2, 3):
        # Damaged on the way, as soon as it is there.
        objects.before("put_new snapshots/", lambda: objects.damage(newest_data(objects)))
        syncer.write(step)
        syncer.copy()
    assert 1 in steps(objects)
    syncer.write(4)
    syncer.copy()
    assert steps(objects) == [4, 3]


def newest_data(objects: MemoryObjects) -> str:
    return max(name for name in objects.content if name.endswith(".safetensors"))


def test_a_store_that_deletes_nothing_costs_no_snapshot(syncer, objects, caplog):
    objects.fail("remove ", times=10)
    for step in (1, 2, 3, 4):
        syncer = Syncer(syncer.store.root, objects)  # with a claim of its own
        syncer.write(step)
        syncer.copy()
    objects._faults.clear()
    assert 4 in steps(objects)
    assert "older snapshots stay in the object store" in caplog.text
    assert syncer.problem == ""


# ---------------------------------------------------------------- faults of the store

CALLS = ["names claims", "put_new claims/", "read claims/", "names snapshots", "put snapshots/",
         "put_new snapshots/"]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_whatever_fails_is_shown_and_repeated_and_the_store_has_a_whole_snapshot_or_none(
    syncer, successor, objects, call
):
    objects.fail(call, times=2)
    syncer.write(48)
    for attempt in (1, 2):
        syncer.copy()
        assert "503 SlowDown; next attempt in" in syncer.problem
        assert syncer.lines[-1]["ok"] is False
        assert steps(objects) == [], attempt
    syncer.write(96)
    syncer.copy()
    assert (steps(objects), syncer.problem) == ([96], "")
    assert successor.restored().copy.step == 96


def test_a_manifest_whose_reply_was_lost_counts(syncer, objects):
    write = objects.put_new

    def lost(name: str, data: bytes) -> bool:
        write(name, data)
        if name.startswith("snapshots/"):
            objects.put_new = write
            raise ObjectsError("connection reset")
        return True

    objects.put_new = lost
    syncer.write(48)
    syncer.copy()
    assert "connection reset" in syncer.problem
    syncer.copy()
    assert (steps(objects), syncer.problem, syncer.mirror.state().step) == ([48], "", 48)


def test_an_object_that_arrived_in_part_does_not_count(syncer, successor, objects):
    syncer.write(48)
    syncer.copy()
    objects.before(
        "names snapshots", lambda: None
    )  # the first listing of the next attempt, before its data
    objects.before("names snapshots", lambda: objects.content.update(
        {newest_data(objects): objects.content[newest_data(objects)][:-7]}
    ))  # fmt: skip
    syncer.write(96)
    syncer.copy()
    assert "bytes, expected" in syncer.problem
    assert successor.restored().copy.step == 48


def test_a_snapshot_that_is_damaged_on_the_disk_is_never_complete_in_the_store(syncer, objects):
    syncer.write(48)
    [path] = syncer.store.root.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    syncer.copy()
    assert "tensor momentum.0 has changed since it was written" in syncer.problem
    assert steps(objects) == []


def test_an_unexpected_error_of_the_library_ends_only_the_attempt(syncer, objects):
    objects.fail("put snapshots/", error=RuntimeError("panic"))
    syncer.write(48)
    syncer.copy()
    assert "RuntimeError: panic" in syncer.problem
    syncer.copy()
    assert steps(objects) == [48]


def test_a_store_that_hangs_delays_neither_the_caller_nor_the_end(tmp_path, objects):
    hangs, release = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    objects.before("put snapshots/", hang)
    syncer = Syncer(tmp_path / "a", objects)
    syncer.mirror.start()
    syncer.write(48)
    assert hangs.wait(60)
    for step in (96, 144):
        syncer.write(step)  # returns
    assert syncer.mirror.state().step == -1
    syncer.mirror.stop(0.01)
    release.set()
    syncer.mirror._thread.join(60)
    assert not syncer.mirror._thread.is_alive()


def test_an_orderly_end_copies_the_last_snapshot(tmp_path, objects):
    syncer = Syncer(tmp_path / "a", objects)
    syncer.mirror.start()
    syncer.write(48)
    syncer.mirror.stop(60)
    assert steps(objects) == [48]


def test_an_orderly_end_does_not_wait_for_the_next_attempt_but_makes_it(tmp_path, objects):
    syncer = Syncer(tmp_path / "a", objects)
    objects.fail("put snapshots/")
    syncer.write(48)
    syncer.copy()
    syncer.mirror.start()  # due in 5 s of a clock that does not move
    syncer.write(96)
    syncer.mirror.stop(60)
    assert steps(objects) == [96]


# ---------------------------------------------------------------- damage, found by a start


def a_store_with(syncer: Syncer, *snapshots: int) -> None:
    for step in snapshots:
        syncer.write(step)
        syncer.copy()


@pytest.mark.parametrize("at", [0, 9, -1])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_snapshot_is_skipped_with_a_sentence(
    syncer, successor, objects, caplog, suffix, at
):
    a_store_with(syncer, 48, 96)
    name = max(n for n in objects.content if n.startswith("snapshots/") and n.endswith(suffix))
    objects.damage(name, at)
    assert successor.restored().copy.step == 48
    assert (
        "snapshot skipped, trying the previous one: s3://bucket/runs/job/snapshots/" in caplog.text
    )
    assert_starts_from(successor, 48)


def test_data_that_is_missing_or_short_is_skipped(syncer, successor, objects, caplog):
    a_store_with(syncer, 48, 96)
    data = objects.content[newest_data(objects)]
    objects.content[newest_data(objects)] = data[:-1]
    assert successor.restored().copy.step == 48
    assert f"has {len(data) - 1} bytes, expected {len(data)}" in caplog.text
    del objects.content[newest_data(objects)]
    (successor.store.root / "kept").mkdir()
    third = Syncer(successor.store.root / "kept", objects)
    assert third.restored().copy.step == 48


def test_a_snapshot_without_a_manifest_is_no_snapshot(syncer, successor, objects):
    a_store_with(syncer, 48, 96)
    del objects.content[max(n for n in objects.content if n.endswith(".json"))]
    assert successor.restored().copy.step == 48


def test_a_job_never_begins_again_over_snapshots_that_cannot_be_read(syncer, successor, objects):
    a_store_with(syncer, 48, 96)
    for name in [n for n in objects.content if n.endswith(".safetensors")]:
        objects.damage(name)
    with pytest.raises(
        StorageError, match=r"none of its 2 snapshots can be read \(.*has changed.*;"
    ):
        successor.restored()
    assert successor.store.is_empty
    assert len(steps(objects)) == 2


def test_a_store_that_cannot_be_reached_is_asked_again_and_older_snapshots_are_not_used(
    syncer, successor, objects, monkeypatch
):
    monkeypatch.setattr(restore, "RETRY_SECONDS", 0.0)
    a_store_with(syncer, 48, 96)
    shown: list[str] = []
    objects.fail("names claims", times=2)
    objects.fail("read snapshots/", times=2)
    found = restore.restore(
        objects, successor.store, spec=SPEC, stop=threading.Event(), show=shown.append
    )
    assert found.copy.step == 96
    assert sum("cannot be read: s3://bucket/runs/job: 503" in text for text in shown) == 4
    assert shown[0] == "looking for snapshots in s3://bucket/runs/job"
    assert any("restoring the snapshot of step 96 from s3://" in text for text in shown)


@pytest.mark.parametrize(("error", "attempts"), [
    (ObjectsError("no route"), restore.ATTEMPTS),
    (ObjectsError("403 Forbidden", denied=True), 1),
])  # fmt: skip
def test_a_start_ends_with_the_reason_when_the_store_stays_unreachable(
    successor, objects, monkeypatch, error, attempts
):
    monkeypatch.setattr(restore, "RETRY_SECONDS", 0.0)
    objects.fail("names claims", times=attempts, error=error)
    with pytest.raises(ObjectsError, match=str(error)):
        successor.restored()


def test_a_start_that_waits_for_the_store_ends_when_it_is_stopped(successor, objects):
    stop = threading.Event()
    stop.set()
    objects.fail("names claims")
    with pytest.raises(StoppedError):
        restore.restore(objects, successor.store, spec=SPEC, stop=stop)


def test_the_snapshots_of_another_spec_are_refused(syncer, successor, objects):
    a_store_with(syncer, 48)
    with pytest.raises(ConfigError, match=f"belong to run spec {SPEC}, this job has another"):
        restore.restore(objects, successor.store, spec="another", stop=threading.Event())
    assert steps(objects) == [48]


def test_a_job_of_another_spec_does_not_end_the_copies_of_the_job_whose_name_it_has(
    syncer, successor, objects
):
    a_store_with(syncer, 48)
    with pytest.raises(ConfigError):
        restore.restore(objects, successor.store, spec="another", stop=threading.Event())
    syncer.write(96)
    syncer.copy()
    assert (steps(objects), syncer.problem) == ([96, 48], "")


def test_a_disk_that_fails_while_a_snapshot_is_restored_does_not_lead_to_an_older_one(
    syncer, successor, objects, monkeypatch
):
    a_store_with(syncer, 48, 96)
    rename, failures = LocalDisk.rename, [OSError(errno.ENOSPC, "No space left on device")]

    def full(disk: LocalDisk, source: Path, target: Path, **how: bool) -> None:
        if target.suffix == ".safetensors" and failures:
            raise failures.pop()
        rename(disk, source, target, **how)

    monkeypatch.setattr(LocalDisk, "rename", full)
    with pytest.raises(StorageError, match=r"restoring .*: No space left on device"):
        successor.restored()
    assert successor.store.is_empty
    assert successor.restored().copy.step == 96


@pytest.mark.parametrize(
    "call", ["names claims", "put_new claims/", "names snapshots", "read snapshots/"]
)
def test_a_start_that_ends_anywhere_can_be_repeated(syncer, successor, objects, call):
    class Killed(BaseException):
        pass

    a_store_with(syncer, 48)
    objects.fail(call, error=Killed())
    with pytest.raises(Killed):
        successor.restored()
    again = Syncer(successor.store.root, objects)
    assert again.store.is_empty
    assert again.restored().copy.step == 48
    assert_starts_from(again, 48)


def test_a_claim_or_manifest_of_any_size_is_not_read_into_memory(
    syncer, successor, objects, monkeypatch
):
    a_store_with(syncer, 48, 96)
    sizes = [len(data) for name, data in objects.content.items() if name.endswith(".json")]
    monkeypatch.setattr(object_store, "SMALL_BYTES", max(sizes))
    for folder in ("claims/", "snapshots/"):
        name = max(n for n in objects.content if n.startswith(folder) and n.endswith(".json"))
        objects.content[name] += bytes(10_000)
        objects.before(f"read {name}", lambda: pytest.fail("it was read"))
    assert successor.restored().copy.step == 48
    objects._faults.clear()


# ---------------------------------------------------------------- two syncers


def test_the_syncer_that_was_restored_last_writes_and_the_other_stops_and_deletes_nothing(
    syncer, successor, objects
):
    a_store_with(syncer, 48)
    successor.restored()
    before = dict(objects.content)
    syncer.write(96)
    syncer.copy()
    assert "another syncer has claimed it (claim 2, this one has 1)" in syncer.problem
    assert objects.content == before
    successor.write(60)
    successor.copy()
    assert steps(objects) == [60, 48]


def test_a_claim_that_comes_while_the_data_is_copied_leaves_it_incomplete(
    syncer, successor, objects
):
    a_store_with(syncer, 48)
    objects.before("put snapshots/", lambda: successor.restored())
    syncer.write(96)
    syncer.copy()
    assert "another syncer has claimed it" in syncer.problem
    assert steps(objects) == [48]
    successor.write(60)
    successor.copy()
    assert steps(objects) == [60, 48]
    assert not any("step-96" in name for name in objects.content)


def test_a_claim_that_comes_before_outdated_snapshots_are_deleted_keeps_them(
    syncer, successor, objects
):
    a_store_with(syncer, 1, 2)
    objects.before("put_new snapshots/", lambda: successor.restored())
    syncer.write(3)
    syncer.copy()
    assert set(steps(objects)) == {1, 2, 3}


def test_a_former_directory_that_comes_back_does_not_write_over_its_successor(
    syncer, successor, objects
):
    a_store_with(syncer, 48)
    successor.restored()
    successor.write(96)
    successor.copy()
    before = dict(objects.content)
    again = Syncer(syncer.store.root, objects)
    again.copy()
    assert "belongs to another syncer (claim 2)" in again.problem
    again.write(60)
    assert (objects.content, again.mirror._schedule.due_in(0)) == (before, None)


def test_a_person_hands_the_store_over_by_deleting_its_claims(syncer, successor, objects):
    a_store_with(syncer, 48)
    successor.restored()
    successor.write(96)
    successor.copy()
    for name in [n for n in objects.content if n.startswith("claims/")]:
        del objects.content[name]
    again = Syncer(syncer.store.root, objects)
    again.write(60)
    again.copy()
    assert steps(objects)[0] == 60
    third = Syncer(successor.store.root / "third", objects)
    assert third.restored().copy.step == 60


def test_two_starts_at_the_same_moment_have_different_claims(objects):
    claims = []
    objects.before("put_new claims/", lambda: claims.append(
        claim(objects, directory="b", start="b", restores=True)
    ))  # fmt: skip
    claims.append(claim(objects, directory="a", start="a", restores=True))
    assert [(c.number, c.directory) for c in claims] == [(1, "b"), (2, "a")]


def test_a_service_that_ignores_the_condition_of_a_write_gives_a_claim_to_one_of_two(objects):
    def overwritten() -> None:
        objects.content["claims/000001.json"] = catalog.Claim(
            number=1, directory="b", start="b"
        ).encode()

    objects.before("read claims/000001.json", overwritten)
    with pytest.raises(FencedError):
        claim(objects, directory="a", start="a", restores=False)
    assert claim(objects, directory="a", start="a", restores=True).number == 2
