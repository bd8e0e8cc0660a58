"""A disk in memory: what survives which crash, how long it takes, and how it fails."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import StorageError
from diloco.runtime import disk as files
from diloco.runtime.disk import Disk, Mode
from diloco_sim.clock import Clock
from diloco_sim.disk import WRITEBACK_SECONDS, SimulatedDisk, Weakness
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.store import Store
from diloco_testing.properties import seeds

ROOT = Path("/run/snapshots")


class DiskWorld:
    def __init__(self, seed: int = 1, **options: float) -> None:
        self.clock = Clock()
        self.process = self.clock.process("syncer")
        self.disk = SimulatedDisk(self.clock, random.Random(seed), **options)
        self.disk.attach(self.process)
        self.disk.make_directory(ROOT)

    def crash(self, *, power: bool) -> None:
        self.process.crash(power=power)
        self.process.start()

    def store(self) -> Store:
        return Store(ROOT, keep=2, disk=self.disk)

    def read(self, name: str) -> bytes | None:
        disk: Disk = self.disk
        return None if disk.size(ROOT / name) is None else files.read(disk, ROOT / name)


def append(disk: SimulatedDisk, name: str, data: bytes) -> None:
    with disk.open(ROOT / name, Mode.APPEND) as file:
        assert file.write(data) == len(data)


def snapshot(step: int) -> Snapshot:
    values = np.full(1000, step, np.float32)
    return Snapshot(step=step, epoch=1, arrays={"theta": values}, meta={"step": step})


def test_operations_behave_as_on_a_real_disk():
    world = DiskWorld()
    files.replace(world.disk, ROOT / "a", "old")
    files.replace(world.disk, ROOT / "a", b"new")
    append(world.disk, "b", b"x\n")
    append(world.disk, "b", b"yz\n")
    assert (world.read("a"), world.read("b")) == (b"new", b"x\nyz\n")
    assert sorted(world.disk.names(ROOT)) == ["a", "b"]
    with world.disk.open(ROOT / "b", Mode.APPEND) as file:
        file.truncate(2)
        data = bytearray(9)
        assert (file.size(), file.read_into(memoryview(data), 1)) == (2, 1)
        file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.size()
    world.disk.remove(ROOT / "b")
    world.disk.remove(ROOT / "b")
    assert world.disk.size(ROOT / "b") is None
    for missing in (
        lambda: world.disk.open(ROOT / "b", Mode.READ),
        lambda: world.disk.rename(ROOT / "b", ROOT / "c"),
        lambda: world.disk.names(Path("/elsewhere")),
    ):
        with pytest.raises(FileNotFoundError):
            missing()


def test_a_killed_process_loses_nothing_that_it_had_written():
    world = DiskWorld()
    append(world.disk, "log", b"line\n")
    world.crash(power=False)
    assert world.read("log") == b"line\n"


def test_a_power_failure_keeps_what_was_synced_and_a_prefix_of_the_rest():
    lengths, names = set(), set()
    for seed in range(60):
        world = DiskWorld(seed)
        files.replace(world.disk, ROOT / "synced", b"safe")
        with world.disk.open(ROOT / "synced", Mode.APPEND) as file:
            file.write(b"and more")
        append(world.disk, "new", b"never synced")
        world.crash(power=True)
        content = world.read("synced")
        assert content is not None
        assert b"safeand more".startswith(content)
        assert content.startswith(b"safe")
        lengths.add(len(content))
        names.add(world.read("new") is not None)
    assert {4, 12} < lengths
    assert names == {True, False}


def test_a_rename_that_was_not_synced_may_be_lost_and_is_never_half_done():
    seen = set()
    for seed in range(40):
        world = DiskWorld(seed)
        files.replace(world.disk, ROOT / "a", b"old")
        with world.disk.open(ROOT / "a.tmp", Mode.CREATE) as file:
            file.write(b"new")
            file.sync()
        world.disk.rename(ROOT / "a.tmp", ROOT / "a", durable=False)
        world.crash(power=True)
        seen.add(world.read("a"))
    assert seen == {b"old", b"new"}


def test_what_is_old_enough_was_written_by_the_kernel():
    world = DiskWorld()
    append(world.disk, "log", b"old\n")
    world.clock.run(WRITEBACK_SECONDS + 1)
    world.crash(power=True)
    assert world.read("log") == b"old\n"


def test_a_call_takes_virtual_time_and_returns_at_once():
    world = DiskWorld(bandwidth=1e6)
    store = world.store()
    completion = world.disk.call(store.write, snapshot(1))
    assert completion.error is None
    assert completion.done_at == pytest.approx(4 * 2e-3 + 4500 / 1e6, rel=0.2)
    assert world.clock.now == 0.0
    later = world.disk.call(store.write, snapshot(2), begin=5.0)
    assert later.done_at > 5.0


def test_a_thread_of_the_disk_runs_one_call_after_the_other():
    world = DiskWorld(bandwidth=1e6)
    store, thread = world.store(), world.disk.thread(world.process)
    done: list[tuple[float, object]] = []
    for step in (1, 2):
        thread.call(store.write, snapshot(step), done=lambda c: done.append((world.clock.now, c)))
    world.clock.run(1.0)
    assert [c.done_at for _, c in done] == [when for when, _ in done]
    assert done[1][0] == pytest.approx(2 * done[0][0], rel=0.1)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("seed", seeds(4, range(10)))
def test_a_crash_at_any_time_of_a_write_leaves_the_old_snapshot_or_the_new(seed, power):
    """The real `Store.write`, cut at 40 moments of its virtual duration."""
    for moment in range(40):
        world = DiskWorld(seed, bandwidth=1e6)
        store = world.store()
        store.write(snapshot(1))
        world.clock.run(100.0)
        completion = world.disk.call(store.write, snapshot(2))
        world.clock.run(100.0 + (completion.done_at - 100.0) * moment / 39)
        world.crash(power=power)
        again = world.store()
        found = again.newest()
        assert found is not None
        assert found.step in (1, 2)
        assert found.arrays["theta"][0] == found.step
        assert found.step == 1 or moment > 20
        assert found.step == 2 or moment < 39
        again.write(snapshot(3))
        assert again.newest().step == 3


def test_a_call_of_another_thread_is_not_undone_with_one_that_is_ahead():
    """An incarnation that was issued while a snapshot was being written stays issued."""
    for power in (False, True):
        world = DiskWorld(bandwidth=1e4)
        store = world.store()
        completion = world.disk.call(store.write, snapshot(1))
        assert completion.done_at > 0.3
        issued = world.disk.call(store.next_incarnation)
        assert issued.value == 1
        world.clock.run(0.2)
        world.crash(power=power)
        again = world.store()
        assert again.newest() is None
        assert again.next_incarnation() == 2


def test_durable_is_what_survives_now_and_not_what_a_call_will_have_written():
    world = DiskWorld(bandwidth=1e6)
    completion = world.disk.call(files.replace, world.disk, ROOT / "model", b"x" * 1000)
    assert world.disk.durable(ROOT / "model") is None
    world.clock.run(completion.done_at)
    assert world.disk.durable(ROOT / "model") == b"x" * 1000
    append(world.disk, "model", b"y")
    assert world.disk.durable(ROOT / "model") is None
    assert world.disk.durable(ROOT / "other") is None


def test_a_slow_disk_takes_longer_and_a_hanging_one_waits():
    for weakness, amount, least, most in (
        (Weakness.SLOW, 100.0, 0.4, 0.9),
        (Weakness.HANG, 1.0, 60.0, 60.1),
    ):
        world = DiskWorld()
        store = world.store()
        world.disk.weaken(weakness, 0.001, 60.0, amount)
        completion = world.disk.call(store.write, snapshot(1))
        assert completion.error is None
        assert least < completion.done_at < most


def test_of_several_slow_times_the_slowest_counts():
    def seconds(*amounts):
        world = DiskWorld()
        store = world.store()
        for amount in amounts:
            world.disk.weaken(Weakness.SLOW, 0.001, 60.0, amount)
        return world.disk.call(store.write, snapshot(1)).done_at

    assert seconds(50.0, 100.0) == seconds(100.0, 50.0) == seconds(100.0)


def test_a_full_disk_refuses_and_the_store_cleans_up():
    world = DiskWorld()
    store = world.store()
    store.write(snapshot(1))
    world.disk.weaken(Weakness.FULL, 0.0, 9.0)
    completion = world.disk.call(store.write, snapshot(2))
    assert isinstance(completion.error, StorageError)
    assert "No space left" in str(completion.error)
    world.clock.run(9.0)
    assert store.newest().step == 1
    store.write(snapshot(2))
    assert store.newest().step == 2


def test_capacity_counts_what_is_there():
    world = DiskWorld(capacity_bytes=10_000)
    store = world.store()
    store.write(snapshot(1))
    errors = [world.disk.call(store.write, snapshot(step)).error for step in range(2, 6)]
    assert any(error is not None and "No space left" in str(error) for error in errors)
    assert store.newest().step >= 1
    with world.disk.open(ROOT / "rest", Mode.CREATE) as file:
        assert 0 < file.write(bytes(20_000)) < 10_000
        with pytest.raises(OSError, match="No space left"):
            file.write(b"x")
    world.disk.remove(ROOT / "rest")
    append(world.disk, "rest", b"x")


def test_a_failed_sync_loses_what_it_should_have_written_although_the_next_succeeds():
    world = DiskWorld(3)
    with world.disk.open(ROOT / "file", Mode.CREATE) as file:
        file.write(b"abcd")
        world.disk.weaken(Weakness.FAIL, 0.0, 1.0)
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
        world.clock.run(2.0)
        file.write(b"efgh")
        file.sync()
    world.disk.rename(ROOT / "file", ROOT / "kept")
    assert world.read("kept") == b"abcdefgh"
    world.crash(power=True)
    assert world.read("kept") == b"\0\0\0\0efgh"


def test_a_disk_that_forgets_syncs_loses_them():
    seen = set()
    for seed in range(20):
        world = DiskWorld(seed)
        files.replace(world.disk, ROOT / "a", b"old")
        world.disk.weaken(Weakness.FORGET, 0.0, 1.0)
        files.replace(world.disk, ROOT / "a", b"new")
        world.crash(power=True)
        seen.add(world.read("a"))
    assert b"old" in seen
    assert len(seen) > 1


def test_a_flipped_bit_is_found_by_the_store():
    world = DiskWorld()
    store = world.store()
    store.write(snapshot(1))
    store.write(snapshot(2))
    path = world.disk.flip("000002")
    assert path is not None
    assert store.newest().step == 1
    assert world.disk.flip("no such file") is None


def test_a_disk_repeats_itself():
    def play() -> list[object]:
        world = DiskWorld(7)
        world.disk.weaken(Weakness.FAIL, 0.0, 1e9, 0.02)
        seen: list[object] = []
        for step in range(30):
            completion = world.disk.call(lambda s: world.store().write(snapshot(s)), step)
            seen.append((completion.done_at, repr(completion.error)))
            world.clock.run(world.clock.now + 0.005)
            world.crash(power=step % 3 == 0)
        return seen

    assert play() == play()
