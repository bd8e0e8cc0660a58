"""The heartbeat that programs write for their container's first process."""

from __future__ import annotations

import json

import pytest

from diloco.runtime.health import Health, HealthFile, read


def health(at):
    return Health(at=at, ready=True, why="serving, step 7", progress_at=at - 1)


def test_what_is_written_is_what_is_read_in_the_agreed_format(tmp_path):
    path = tmp_path / "health.json"
    HealthFile(path).write(health(10.0))
    assert read(path) == health(10.0)
    assert json.loads(path.read_text()) == {
        "at": 10.0, "ready": True, "why": "serving, step 7", "progressAt": 9.0,
        "joined": False, "left": "", "problem": "",
    }  # fmt: skip


def test_the_file_of_an_earlier_release_is_read(tmp_path):
    path = tmp_path / "health.json"
    path.write_text('{"at": 10, "ready": true, "why": "serving, step 7", "progressAt": 9}')
    assert read(path) == health(10.0)


def test_only_the_file_itself_remains(tmp_path):
    path = tmp_path / "health.json"
    HealthFile(path).write(health(10.0))
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]


def test_at_most_one_a_second_unless_it_is_the_last(tmp_path):
    path = tmp_path / "health.json"
    file = HealthFile(path)
    file.write(health(10.0))
    assert file.due_at() == 11.0
    file.write(health(10.9))
    assert read(path) == health(10.0)
    file.write(health(11.0))
    assert read(path) == health(11.0)
    file.write(health(11.1), now=True)
    assert read(path) == health(11.1)


def test_without_a_path_nothing_is_written_and_nothing_is_due():
    file = HealthFile(None)
    file.write(health(10.0))
    assert file.due_at() is None


@pytest.mark.parametrize(
    "content",
    [
        None, "", "{", "[]", '{"at": 1}', '{"at": "x", "ready": 1}', "[" * 9000,
        f'{{"at": 1{400 * "0"}, "ready": true, "why": "", "progressAt": 9}}',
    ],
    ids=range(8),
)  # fmt: skip
def test_what_cannot_be_read_is_no_heartbeat(tmp_path, content):
    path = tmp_path / "health.json"
    if content is not None:
        path.write_text(content)
    assert read(path) is None


def test_a_failed_write_is_logged_once_and_raises_nothing(tmp_path, caplog):
    file = HealthFile(tmp_path / "missing" / "health.json")
    file.write(health(10.0))
    file.write(health(12.0))
    assert len(caplog.records) == 1
