"""Counters of the store: no number is used twice."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco.errors import StorageError
from diloco_syncer.storage import counters
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.store import Store


def test_incarnations_continue_after_known_ones_when_the_counter_is_lost(tmp_path: Path):
    store = Store(tmp_path, keep=1)
    assert store.next_incarnation() == 1
    (tmp_path / "incarnation").unlink()
    assert store.next_incarnation(at_least=7) == 8
    assert store.next_incarnation(at_least=7) == 9


def test_epochs_and_incarnations_only_grow_over_restarts(tmp_path: Path):
    epochs, incarnations = [], []
    for _ in range(3):
        store = Store(tmp_path, keep=1)
        epochs.append(store.next_epoch())
        incarnations += [store.next_incarnation(), store.next_incarnation()]
    assert epochs == [1, 2, 3]
    assert incarnations == [1, 2, 3, 4, 5, 6]


def test_incarnations_of_many_threads_are_distinct(tmp_path: Path):
    store = Store(tmp_path, keep=1)
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.extend(store.next_incarnation() for _ in range(10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 41))


def test_a_lost_epoch_file_does_not_bring_back_an_epoch_with_snapshots(tmp_path: Path):
    store = Store(tmp_path, keep=1)
    store.write(Snapshot(step=5, epoch=7, arrays={}, meta={}))
    assert store.next_epoch() == 8


def test_a_damaged_counter_is_named_and_not_overwritten(tmp_path: Path):
    (tmp_path / "epoch").write_text("seven\n")
    with pytest.raises(StorageError, match="holds 'seven', expected a whole number"):
        Store(tmp_path, keep=1).next_epoch()
    assert (tmp_path / "epoch").read_text() == "seven\n"


def test_a_byte_that_changes_at_rest_in_a_counter_costs_nothing(tmp_path: Path):
    store = Store(tmp_path, keep=1)
    for _ in range(12):
        store.next_incarnation()
    path = tmp_path / "incarnation"
    intact = path.read_bytes()
    for at in range(len(intact)):
        for byte in range(256):
            damaged = intact[:at] + bytes([byte]) + intact[at + 1 :]
            assert counters.decode(damaged) == 12, damaged
    path.write_bytes(intact[:1] + b"9" + intact[2:])
    again = Store(tmp_path, keep=1)
    assert (again.issued_incarnations(), again.next_incarnation()) == (12, 13)
    assert path.read_bytes() == counters.encode(13)


def test_the_error_for_a_counter_that_is_damaged_everywhere_states_what_to_write(tmp_path: Path):
    store = Store(tmp_path / "snapshots", keep=1)
    store.next_incarnation()
    path = store.root / "incarnation"
    path.write_bytes(b"\0" * path.stat().st_size)
    store = Store(store.root, keep=1)
    with pytest.raises(StorageError) as refused:
        store.next_incarnation()
    for part in (str(path), f'every "incarnation" in events*.jsonl of {tmp_path}', "1024 larger"):
        assert part in str(refused.value)
    path.write_text("2000\n")
    assert store.next_incarnation() == 2001


@pytest.mark.parametrize(
    "damage", [None, b"", b"12", b"1\n1\n1\n", b"not a number\n" * 3], ids=repr
)
def test_a_counter_that_is_damaged_while_the_syncer_runs_is_written_again(
    tmp_path: Path, damage: bytes | None
):
    path = tmp_path / "incarnation"
    path.write_bytes(counters.encode(40))
    store = Store(tmp_path, keep=1)
    assert store.issued_incarnations() == 40
    path.unlink() if damage is None else path.write_bytes(damage)
    assert store.next_incarnation() == 41
    assert path.read_bytes() == counters.encode(41)
    path.unlink() if damage is None else path.write_bytes(damage)
    assert store.next_incarnation() == 42
    assert Store(tmp_path, keep=1).issued_incarnations() == 42


def test_a_larger_number_that_a_person_writes_while_the_syncer_runs_counts(tmp_path: Path):
    store = Store(tmp_path, keep=1)
    assert store.next_incarnation() == 1
    (tmp_path / "incarnation").write_text("100\n")
    assert store.next_incarnation() == 101
