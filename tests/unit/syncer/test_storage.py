"""The store: after any failure of the disk or the process, the newest complete snapshot is restored."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco.errors import DamagedError, StorageError
from diloco.journal.writer import JournalWriter
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.durable import RawTensor
from diloco_syncer.storage.model import export_model, raw_tensors
from diloco_syncer.storage.store import CHOICE, Store

POINTS_BEFORE_IT_COUNTS = [
    "before-data",
    "in-data",
    "after-data",
    "after-rename",
    "before-manifest",
]
POINTS_AFTER = ["after-manifest", "before-delete", "after-delete"]


def snapshot(step: int, *, epoch: int = 1, elements: int = 5) -> Snapshot:
    rng = np.random.default_rng(step)
    return Snapshot(
        step=step,
        epoch=epoch,
        arrays={
            "theta.0": rng.standard_normal(elements, dtype=np.float32),
            "momentum.0": rng.standard_normal((2, 3), dtype=np.float32),
            "constants": rng.integers(0, 256, 7, dtype=np.uint8),
            "nothing": np.zeros(0, np.float32),
            "scalar": np.float32(step).reshape(()),
        },
        meta={"tokens": step * 10, "learners": {"eu/0": [1, 2.5, None]}},
    )


def assert_same(found: Snapshot | None, expected: Snapshot) -> None:
    assert found is not None
    assert (found.step, found.epoch, found.meta) == (
        expected.step,
        expected.epoch,
        expected.meta,
    )
    assert list(found.arrays) == list(expected.arrays)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape


def files(root: Path, suffix: str) -> list[Path]:
    return sorted(root.glob(f"*{suffix}"))


def run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def two_snapshots(tmp_path: Path) -> Store:
    """A store that holds steps 1 and 2."""
    store = Store(tmp_path / "snapshots", keep=3)
    store.write(snapshot(1))
    store.write(snapshot(2))
    return store


def test_what_was_written_is_read_back(two_snapshots: Store):
    assert_same(Store(two_snapshots.root, keep=3).newest(), snapshot(2))


def test_an_empty_directory_has_no_snapshot(tmp_path: Path):
    assert Store(tmp_path / "new" / "deep", keep=1).newest() is None


def test_large_arrays_of_odd_sizes_are_restored(tmp_path: Path):
    # Beyond one piece the file is written past the page cache, in pages.
    store = Store(tmp_path, keep=1)
    for elements in (2 << 20, (2 << 20) + 1, (5 << 20) - 333):
        written = snapshot(elements, elements=elements)
        store.write(written)
        assert_same(store.newest(), written)


def test_arrays_that_are_not_contiguous_are_written_in_order(tmp_path: Path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    store = Store(tmp_path, keep=1)
    store.write(Snapshot(step=1, epoch=1, arrays={"a": array}, meta={}))
    found = store.newest()
    assert found is not None
    np.testing.assert_array_equal(found.arrays["a"], array)


def test_the_data_file_is_ordinary_safetensors(two_snapshots: Store):
    loaded = load_file(files(two_snapshots.root, ".safetensors")[-1])
    np.testing.assert_array_equal(loaded["theta.0"], snapshot(2).arrays["theta.0"])


def boundaries(data: Path) -> list[int]:
    blob = data.read_bytes()
    header = int.from_bytes(blob[:8], "little")
    ends = [entry["data_offsets"][1] for entry in json.loads(blob[8 : 8 + header]).values()]
    edges = {0, 1, 7, 8, 9, 8 + header // 2, 8 + header - 1, 8 + header, len(blob) - 1}
    edges |= {8 + header + end + by for end in ends for by in (-1, 0, 1)}
    return sorted(edge for edge in edges if edge < len(blob))


STRIDES = [11, pytest.param(1, marks=pytest.mark.slow)]
"""Every byte, and so many of them as `make check` has time for; all bits come in turn."""


def test_a_data_file_cut_at_any_boundary_is_skipped_by_name(
    two_snapshots: Store, caplog: pytest.LogCaptureFixture
):
    data = files(two_snapshots.root, ".safetensors")[-1]
    whole = data.read_bytes()
    cuts = boundaries(data)
    assert len(cuts) > 12
    for cut in cuts:
        caplog.clear()
        data.write_bytes(whole[:cut])
        assert_same(two_snapshots.newest(), snapshot(1))
        assert data.name in caplog.text
        assert f"has {cut} bytes, expected {len(whole)}" in caplog.text


def test_a_data_file_with_bytes_behind_its_end_is_skipped(two_snapshots: Store):
    with files(two_snapshots.root, ".safetensors")[-1].open("ab") as file:
        file.write(b"\0")
    assert_same(two_snapshots.newest(), snapshot(1))


@pytest.mark.parametrize("stride", STRIDES)
def test_a_manifest_cut_anywhere_is_skipped_by_name(
    two_snapshots: Store, caplog: pytest.LogCaptureFixture, stride: int
):
    manifest = files(two_snapshots.root, ".json")[-1]
    whole = manifest.read_bytes()
    for cut in range(0, len(whole), stride):
        caplog.clear()
        manifest.write_bytes(whole[:cut])
        assert_same(two_snapshots.newest(), snapshot(1))
        assert manifest.name in caplog.text


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_one_bit_flipped_anywhere_is_noticed(two_snapshots: Store, suffix: str, stride: int):
    path = files(two_snapshots.root, suffix)[-1]
    whole = path.read_bytes()
    for place in range(0, len(whole), stride):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert_same(two_snapshots.newest(), snapshot(1))


def test_a_missing_manifest_is_skipped_by_name(
    two_snapshots: Store, caplog: pytest.LogCaptureFixture
):
    manifest = files(two_snapshots.root, ".json")[-1]
    manifest.unlink()
    assert_same(two_snapshots.newest(), snapshot(1))
    assert manifest.name in caplog.text


def test_missing_data_is_skipped(two_snapshots: Store):
    files(two_snapshots.root, ".safetensors")[-1].unlink()
    assert_same(two_snapshots.newest(), snapshot(1))


def test_the_manifest_of_another_snapshot_is_not_used(
    two_snapshots: Store, caplog: pytest.LogCaptureFixture
):
    older, newer = files(two_snapshots.root, ".json")
    newer.write_bytes(older.read_bytes())
    assert_same(two_snapshots.newest(), snapshot(1))
    assert f"is the manifest of {older.stem}.safetensors" in caplog.text


def test_06_snapshots_that_all_are_damaged_are_not_overwritten_by_a_new_job(two_snapshots: Store):
    data = files(two_snapshots.root, ".safetensors")
    for path in data:
        path.write_bytes(b"")
    with pytest.raises(StorageError) as refused:
        two_snapshots.start()
    assert f"none of its {len(data)} snapshots can be read" in str(refused.value)
    assert all(path.name in str(refused.value) for path in data)
    assert "write 0 to" in str(refused.value)


def test_06_a_disk_that_cannot_be_read_for_a_moment_ends_the_start(
    two_snapshots: Store, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = sorted(two_snapshots.root.iterdir())
    with monkeypatch.context() as sick:
        sick.setattr(os, "preadv", refuse)
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            Store(two_snapshots.root, keep=3).start()
    assert sorted(two_snapshots.root.iterdir()) == before
    assert_same(Store(two_snapshots.root, keep=3).start(), snapshot(2))


def test_06_the_newest_snapshot_is_not_skipped_when_only_its_disk_refuses(
    two_snapshots: Store, monkeypatch: pytest.MonkeyPatch
):
    """It may be intact, and the older one lacks merges that learners have received."""
    newest, read = files(two_snapshots.root, ".safetensors")[-1], os.preadv

    def refuse(fd: int, *arguments: object) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(newest):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, *arguments)

    with monkeypatch.context() as sick:
        sick.setattr(os, "preadv", refuse)
        with pytest.raises(StorageError, match=rf"{newest.name}: {os.strerror(errno.EIO)}.*older"):
            Store(two_snapshots.root, keep=3).start()
        (two_snapshots.root / CHOICE).write_text("1")
        assert_same(Store(two_snapshots.root, keep=3).start(), snapshot(1))


def test_a_first_snapshot_that_was_never_completed_does_not_stop_the_next_start(tmp_path: Path):
    (tmp_path / "000001-epoch-1-step-0.safetensors").write_bytes(b"part")
    assert Store(tmp_path, keep=1).start() is None


def test_a_header_that_names_no_known_tensors_counts_as_damage(
    two_snapshots: Store, monkeypatch: pytest.MonkeyPatch
):
    """Its SHA-256 is right: another version of the program wrote it."""

    def unknown(*_: object) -> None:
        raise DamagedError("safetensors: the header cannot be read")

    monkeypatch.setattr("diloco_syncer.storage.store.parse", unknown)
    with pytest.raises(StorageError, match="the header cannot be read"):
        two_snapshots.start()


def test_a_person_may_start_from_an_older_snapshot_once(two_snapshots: Store):
    """Each start before the next snapshot is such a start: learners must replace what they have."""
    two_snapshots.write(snapshot(3))
    two_snapshots.root.joinpath("from-snapshot").write_text("1\n")
    for _ in range(2):
        store = Store(two_snapshots.root, keep=3)
        found = store.start()
        assert_same(found, snapshot(1))
        assert found is not None
        assert found.chosen
        assert (two_snapshots.root / "from-snapshot").exists()
    aside = sorted(path.name for path in (two_snapshots.root / "set-aside").iterdir())
    assert [name.rpartition("-")[2] for name in aside] == [
        "2.json", "2.safetensors", "3.json", "3.safetensors"
    ]  # fmt: skip
    store.write(snapshot(2, epoch=2))
    assert not list(two_snapshots.root.glob("from-snapshot*"))
    found = Store(two_snapshots.root, keep=3).start()
    assert_same(found, snapshot(2, epoch=2))
    assert found is not None
    assert not found.chosen


def test_a_choice_that_a_person_makes_after_the_start_is_for_the_next_one(two_snapshots: Store):
    two_snapshots.root.joinpath("from-snapshot").write_text("1")
    store = Store(two_snapshots.root, keep=3)
    store.start()
    two_snapshots.root.joinpath("from-snapshot").write_text("0")
    store.write(snapshot(3, epoch=2))
    store.write(snapshot(4, epoch=2))
    assert Store(two_snapshots.root, keep=3).start() is None


def test_a_chosen_snapshot_stays_as_long_as_the_file_that_names_it(
    two_snapshots: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    choice = two_snapshots.root / "from-snapshot"
    choice.write_text("1")
    store, rename = Store(two_snapshots.root, keep=1), os.replace
    store.start()

    def refuse(source: Path, target: Path) -> None:
        if source == choice:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as sick:
        sick.setattr(os, "replace", refuse)
        for step in (2, 3):
            store.write(snapshot(step, epoch=2))
            assert store.verify()
    assert "from-snapshot: cannot be deleted, delete it" in caplog.text
    assert [path.stem.rpartition("-")[2] for path in files(two_snapshots.root, ".json")] == [
        "1",
        "3",
    ]
    store.write(snapshot(4, epoch=2))
    assert not choice.exists()
    assert [path.stem.rpartition("-")[2] for path in files(two_snapshots.root, ".json")] == [
        "3",
        "4",
    ]


def test_a_person_may_begin_anew_without_losing_a_file(two_snapshots: Store):
    data = files(two_snapshots.root, ".safetensors")
    for path in data:
        path.write_bytes(b"")
    count = len(list(two_snapshots.root.iterdir()))
    two_snapshots.root.joinpath("from-snapshot").write_text("0")
    for _ in range(2):
        store = Store(two_snapshots.root, keep=3)
        assert store.start() is None
        assert len(list((two_snapshots.root / "set-aside").iterdir())) == count
    store.write(snapshot(0, epoch=2))
    assert_same(Store(two_snapshots.root, keep=3).start(), snapshot(0, epoch=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [("7", "there are snapshots of steps 2, 1"), ("new", "holds 'new', expected the step")],
)
def test_a_choice_that_cannot_be_carried_out_stays_and_is_explained(
    two_snapshots: Store, text: str, message: str
):
    choice = two_snapshots.root / "from-snapshot"
    choice.write_text(text)
    with pytest.raises(StorageError, match=message):
        two_snapshots.start()
    assert choice.read_text() == text


def test_the_last_verified_snapshot_outlives_newer_ones_that_are_damaged(tmp_path: Path):
    Store(tmp_path, keep=2).write(snapshot(1))
    store = Store(tmp_path, keep=2)
    assert_same(store.start(), snapshot(1))
    for step in (2, 3, 4):
        store.write(snapshot(step))
        with files(tmp_path, ".safetensors")[-1].open("r+b") as file:
            file.write(b"\xff")
        # Read back only when retention would delete the verified one.
        assert store.verify() is (step == 2)
    assert_same(Store(tmp_path, keep=2).newest(), snapshot(1))


def test_a_snapshot_read_back_replaces_the_last_verified(tmp_path: Path):
    Store(tmp_path, keep=1).write(snapshot(1))
    store = Store(tmp_path, keep=1)
    assert_same(store.start(), snapshot(1))
    store.write(snapshot(2, elements=3 << 20))
    assert len(files(tmp_path, ".json")) == 2
    assert store.verify()
    assert [path.stem.rpartition("-")[2] for path in files(tmp_path, ".json")] == ["2"]


CRASH = """
import os, signal, sys
from pathlib import Path
import numpy as np
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.store import CHOICE, Store
root, point = Path(sys.argv[1]), sys.argv[2]
def fault(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)
arrays = {"theta.0": np.full(5, 3, np.float32)}
Store(root, keep=2, fault=fault).write(Snapshot(step=3, epoch=1, arrays=arrays, meta={}))
"""


@pytest.mark.parametrize("point", POINTS_BEFORE_IT_COUNTS + POINTS_AFTER)
@pytest.mark.slow
def test_killed_at_any_step_leaves_a_whole_snapshot_and_no_rubbish(tmp_path: Path, point: str):
    store = Store(tmp_path, keep=2)
    for step in (1, 2):
        store.write(snapshot(step))
    assert run_child(CRASH, tmp_path, point).returncode == -signal.SIGKILL

    after = Store(tmp_path, keep=2)
    found = after.newest()
    assert found is not None
    assert found.step == (2 if point in POINTS_BEFORE_IT_COUNTS else 3)
    assert not files(tmp_path, ".tmp")
    after.write(snapshot(4))
    assert_same(after.newest(), snapshot(4))
    assert len(files(tmp_path, ".json")) == len(files(tmp_path, ".safetensors")) == 2


@pytest.mark.parametrize("point", POINTS_BEFORE_IT_COUNTS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_at_any_step_costs_only_this_snapshot(
    two_snapshots: Store, point: str, code: int
):
    def fault(name: str) -> None:
        if name == point:
            raise OSError(code, os.strerror(code))

    before = sorted(two_snapshots.root.iterdir())
    with pytest.raises(StorageError, match=os.strerror(code)):
        Store(two_snapshots.root, keep=1, fault=fault).write(snapshot(3))
    assert sorted(two_snapshots.root.iterdir()) == before
    assert_same(two_snapshots.newest(), snapshot(2))


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from diloco.errors import StorageError
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.store import CHOICE, Store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
arrays = {"theta.0": np.zeros(int(sys.argv[2]), np.float32)}
try:
    Store(Path(sys.argv[1]), keep=1).write(Snapshot(step=3, epoch=1, arrays=arrays, meta={}))
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("elements", [30_000, 3_000_000])
@pytest.mark.slow
def test_a_file_beyond_the_limit_is_refused_with_the_reason(two_snapshots: Store, elements: int):
    before = sorted(two_snapshots.root.iterdir())
    child = run_child(LIMITED, two_snapshots.root, elements)
    assert os.strerror(errno.EFBIG) in child.stdout
    assert sorted(two_snapshots.root.iterdir()) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_keeps_the_snapshots_that_were_there(small_disk: Path):
    store = Store(small_disk, keep=3)
    first, second = (snapshot(step, elements=100_000) for step in (1, 2))
    store.write(first)
    store.write(second)
    before = sorted(small_disk.iterdir())
    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)):
        store.write(snapshot(3, elements=100_000))
    assert sorted(small_disk.iterdir()) == before
    assert_same(store.newest(), second)


def test_events_continue_when_a_full_disk_has_room_again(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    ballast = small_disk / "ballast"
    log = JournalWriter(small_disk / "events.jsonl")
    log.append({"event": "first"})
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        ballast.write_bytes(bytes(2 << 20))
    for _ in range(3):
        log.append({"event": "lost", "detail": "x" * 5000})
    assert log.lost == 3
    assert caplog.text.count("lines are being lost") == 1
    ballast.unlink()
    log.append({"event": "last"})
    log.close()
    lines = (small_disk / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["event"] == "first"
    assert json.loads(lines[-1])["event"] == "last"


def test_old_snapshots_are_deleted_only_after_the_new_one_is_complete(tmp_path: Path):
    seen: list[list[str]] = []

    def fault(point: str) -> None:
        if point == "before-delete":
            seen.append([f.name for f in files(tmp_path, ".json")])

    store = Store(tmp_path, keep=2, fault=fault)
    for step in (1, 2, 3, 4):
        store.write(snapshot(step))
    assert [len(names) for names in seen] == [1, 2, 3, 3]
    assert [f.stem.rpartition("-")[2] for f in files(tmp_path, ".json")] == ["3", "4"]
    assert len(files(tmp_path, ".safetensors")) == 2


def test_a_rewound_step_of_a_later_epoch_is_the_newest(tmp_path: Path):
    store = Store(tmp_path, keep=3)
    store.write(snapshot(96, epoch=1))
    store.write(snapshot(48, epoch=2))
    assert_same(store.newest(), snapshot(48, epoch=2))


def test_the_same_step_can_be_written_twice(tmp_path: Path):
    store = Store(tmp_path, keep=3)
    store.write(snapshot(1))
    store.write(snapshot(1))
    assert len(files(tmp_path, ".json")) == 2


def test_the_exported_model_loads_and_its_facts_match_the_file(tmp_path: Path):
    bf16 = RawTensor(dtype="bfloat16", shape=(2,), data=b"\x80\x3f\x00\x40")
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    sha256 = export_model(
        tmp_path / "model", {"w": weight, "mask": bf16}, {"step": 9, "specHash": "ab"}
    )
    blob = (tmp_path / "model" / "model.safetensors").read_bytes()
    facts = json.loads((tmp_path / "model" / "model.json").read_text())
    assert facts["step"] == 9
    assert facts["bytes"] == len(blob)
    assert facts["sha256"] == sha256 == hashlib.sha256(blob).hexdigest()
    tensors = raw_tensors(blob)
    assert tensors["mask"] == bf16
    np.testing.assert_array_equal(np.frombuffer(tensors["w"].data, "<f4").reshape(2, 3), weight)


def test_a_failed_export_leaves_the_older_model(tmp_path: Path):
    export_model(tmp_path, {"w": np.zeros(3, np.float32)}, {"step": 1})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fault(point: str) -> None:
        if point == "after-data":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)):
        export_model(tmp_path, {"w": np.ones(3, np.float32)}, {"step": 2}, fault=fault)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_crash_in_the_middle_of_an_export_leaves_no_facts_of_another_file(tmp_path: Path):
    class Crash(BaseException):
        pass

    def fault(point: str) -> None:
        if point == "before-manifest":
            raise Crash

    export_model(tmp_path, {"w": np.zeros(3, np.float32)}, {"step": 1})
    with pytest.raises(Crash):
        export_model(tmp_path, {"w": np.ones(3, np.float32)}, {"step": 2}, fault=fault)
    assert not (tmp_path / "model.json").exists()


def test_a_blob_that_is_not_safetensors_is_refused():
    with pytest.raises(DamagedError, match="safetensors"):
        raw_tensors(b"not at all safetensors")
