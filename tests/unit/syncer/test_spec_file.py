"""What the syncer makes of each version of its spec document."""

import dataclasses

import pytest

from diloco.spec import RunSpec
from diloco_syncer import spec_file
from diloco_syncer.spec_file import SpecFile
from diloco_testing.syncers.process import until

SPEC = RunSpec(
    job="j", steps=10, fragments=2, interval=2, overlap=1, quorum=2, learners={"eu": 2, "us": 1}
)


class Followed:
    """A document on the disk, and what was passed on."""

    def __init__(self, path):
        self.path = path
        self.changes, self.refusals = [], []
        path.write_text(SPEC.to_json())
        self.file = SpecFile(
            path.read_text, SPEC.to_json(), SPEC,
            changed=self.changes.append, refused=lambda error: self.refusals.append(str(error)),
        )  # fmt: skip

    def write(self, **learners):
        self.path.write_text(dataclasses.replace(SPEC, learners=learners).to_json())
        return self

    def check(self, times=1):
        for _ in range(times):
            self.file.check()
        return self


@pytest.fixture
def document(tmp_path):
    return Followed(tmp_path / "spec.json")


def test_the_document_of_the_start_is_nothing_new(document):
    document.check(3)
    assert document.changes == document.refusals == []


def test_each_change_is_passed_on_once(document):
    document.write(eu=3, us=1).check(3)
    document.write(eu=1, us=1).check(3)
    assert document.changes == [{"eu": 3, "us": 1}, {"eu": 1, "us": 1}]
    assert document.refusals == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "FileNotFoundError"),
        (lambda path: path.write_text(path.read_text()[:40]), "not JSON"),
        (lambda path: path.write_text(""), "not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "UnicodeDecodeError"),
        (lambda path: (path.unlink(), path.mkdir()), "IsADirectoryError"),
    ],
)
def test_a_document_that_cannot_be_read_changes_nothing_and_is_reported_once(
    document, damage, message
):
    damage(document.path)
    document.check(3)
    assert document.changes == []
    assert len(document.refusals) == 1
    assert message in document.refusals[0]


def test_numbers_below_the_quorum_change_nothing_and_the_next_good_ones_do(document):
    document.write(eu=1).check(2)
    assert (document.changes, len(document.refusals)) == ([], 1)
    document.write(eu=5).check(2)
    assert (document.changes, len(document.refusals)) == ([{"eu": 5}], 1)


def test_a_document_that_becomes_readable_again_is_passed_on(document):
    text = document.path.read_text()
    document.path.unlink()
    document.check()
    document.path.write_text(text)
    document.check()
    assert document.changes == [SPEC.learners], "the engine knows that these are in force"


def test_the_thread_survives_a_version_that_raises_and_sees_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_file, "READ_SECONDS", 0.01)
    path = tmp_path / "spec.json"
    path.write_text(SPEC.to_json())
    seen = []

    def changed(learners):
        seen.append(learners)
        if len(seen) == 1:
            raise RuntimeError("of the receiver")

    file = SpecFile(path.read_text, SPEC.to_json(), SPEC, changed=changed, refused=seen.append)
    file.follow()
    try:
        for number in (3, 4):
            path.write_text(dataclasses.replace(SPEC, learners={"eu": number}).to_json())
            until(lambda wanted={"eu": number}: wanted in seen, expected="it is passed on")
    finally:
        file.stop()
