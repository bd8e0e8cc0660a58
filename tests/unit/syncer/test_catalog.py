"""What an object store holds of a job's snapshots, and what follows from it: pure."""

from itertools import permutations

import pytest

from diloco.errors import StorageError
from diloco_syncer.storage import catalog
from diloco_syncer.storage.catalog import Claim, Copy, Manifest
from diloco_syncer.storage.copy_schedule import CopySchedule


def copy(claim: int, number: int, step: int | None = None) -> Copy:
    return Copy(claim=claim, number=number, epoch=1, step=number * 10 if step is None else step)


def names_of(*copies: Copy) -> set[str]:
    return {name for each in copies for name in (each.data, each.manifest)}


def test_a_snapshot_counts_only_with_its_manifest_and_a_later_claim_counts_more():
    rolled_back, newest = copy(2, 3, step=30), copy(1, 9, step=90)
    names = names_of(rolled_back, newest) | {
        copy(3, 4).data,
        "snapshots/notes.txt",
        "claims/000009.json",
    }
    assert catalog.complete(names) == [rolled_back, newest]


def test_the_newest_complete_snapshots_stay_and_manifests_are_deleted_before_their_data():
    copies = [copy(1, number) for number in range(1, 6)]
    deleted = catalog.outdated(names_of(*copies), keep=2, kept=[])
    assert deleted == [name for each in copies[:3] for name in (each.manifest, each.data)]


def test_the_last_verified_snapshot_stays_and_what_may_be_on_its_way():
    old, verified, unfinished, newest = copy(1, 1), copy(1, 2), copy(1, 3), copy(2, 4)
    coming = copy(2, 5)
    names = names_of(old, verified, newest) | {unfinished.data, coming.data}
    deleted = catalog.outdated(names, keep=1, kept=[verified, None])
    assert deleted == [old.manifest, old.data, unfinished.data]


def test_nothing_is_deleted_while_no_snapshot_is_complete():
    assert catalog.outdated({copy(1, 1).data, copy(1, 2).data}, keep=1, kept=[None]) == []


def test_whatever_was_interrupted_while_outdated_snapshots_were_deleted_what_stays_can_be_restored():
    copies = [copy(1, number) for number in range(1, 5)]
    names = names_of(*copies)
    for deleted in catalog.outdated(set(names), keep=1, kept=[]):
        names.remove(deleted)
        for each in catalog.complete(names):
            assert each.data in names


@pytest.mark.parametrize(
    ("newest", "restores", "may"),
    [(None, False, True), ("own", False, True), ("other", False, False), ("other", True, True),
     ("", False, False)],
)  # fmt: skip
def test_a_directory_writes_where_it_wrote_last_or_where_it_was_restored_from(
    newest, restores, may
):
    claim = None if newest is None else Claim(number=3, directory=newest, start="s")
    assert catalog.may_claim(claim, directory="own", restores=restores) is may


def test_a_claim_is_read_back_and_a_damaged_one_is_of_no_directory():
    claim = Claim(number=7, directory="d", start="s")
    assert Claim.decode(7, claim.encode()) == claim
    for damaged in (b"", b"[]", b'{"directory": 1}', claim.encode()[:-1]):
        assert Claim.decode(7, damaged) == Claim(number=7, directory="", start="")
    for order in permutations(["claims/000002.json", "claims/000010.json", "claims/x"]):
        assert catalog.newest_claim(order) == 10
        assert catalog.older_claims(order, 10) == ["claims/000002.json"]


BODY = {"startId": "a", "file": "f", "headerSha256": "h", "meta": {"spec": "s"}}


def test_a_manifest_is_read_back_and_one_bit_that_differs_is_noticed():
    manifest = Manifest(run="r", body=BODY)
    data = manifest.encode()
    assert Manifest.decode("m", data) == manifest
    assert (manifest.spec, manifest.identity) == ("s", ("a", "f", "h"))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(StorageError, match=r"^m: "):
            Manifest.decode("m", bytes(damaged))


def test_a_manifest_of_another_format_is_refused():
    data = Manifest(run="r", body=BODY).encode()
    other = Manifest.decode("m", data)
    content = {"format": 2, "run": other.run, "manifest": dict(other.body)}
    text = catalog.canonical({"copy": content, "sha256": catalog._sha(content)}).encode()
    with pytest.raises(StorageError, match="not in format 1"):
        Manifest.decode("m", text)


# ---------------------------------------------------------------- when


def schedule() -> CopySchedule:
    return CopySchedule(place="s3://b/j")


def test_nothing_is_due_before_a_snapshot_is_written_and_one_copy_runs_at_a_time():
    it = schedule()
    assert (it.is_idle, it.due_in(5)) == (True, None)
    it.written()
    assert (it.is_idle, it.due_in(5)) == (False, 0)
    it.begin(5)
    assert (it.is_idle, it.due_in(6)) == (False, None)
    it.written()  # meanwhile: the newest follows when this one has ended
    it.done(48)
    assert (it.is_idle, it.due_in(7), it.step) == (False, 0, 48)


def test_a_failed_copy_is_repeated_after_a_delay_that_doubles_up_to_five_minutes():
    it, now, waits = schedule(), 0.0, []
    it.written()
    for _ in range(9):
        it.begin(now)
        it.failed("no route", now)
        waits.append(it.due_in(now))
        now += waits[-1]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    it.written()
    assert it.due_in(now - 100) == 100  # another snapshot does not shorten the wait
    it.begin(now)
    it.done(96)
    assert it.state(now).problem == ""
    it.written()
    it.begin(now)
    it.failed("no route", now)
    assert it.due_in(now) == 5


def test_the_problem_is_a_sentence_with_place_reason_and_next_attempt():
    it = schedule()
    it.written()
    it.begin(0)
    assert it.state(1).problem == ""
    it.failed("no route", 1)
    assert it.state(2).problem == (
        "copying a snapshot to s3://b/j failed once: no route; next attempt in 4 s"
    )
    it.begin(6)
    assert it.state(16).problem.endswith("no route; next attempt in progress for 10 s")
    it.failed("no route", 16)
    assert "failed 2 times in a row" in it.state(16).problem
    assert not it.state(16).lasting
    it.begin(30)
    it.failed("no route", 30)
    assert it.state(30).lasting


def test_a_fenced_syncer_copies_nothing_more():
    it = schedule()
    it.written()
    it.begin(0)
    it.fence("another syncer")
    it.written()
    assert (it.due_in(1), it.is_idle, it.state(1).problem) == (None, True, "another syncer")
    assert it.state(1).lasting
