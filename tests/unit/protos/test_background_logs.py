"""Log lines and health files whose readers or disks hang: the threads that write them do not wait."""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from diloco.runtime import files, logs
from diloco.runtime.health import BackgroundHealthFile, Health, read

PATIENCE_SECONDS = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def test_a_pipe_that_is_not_read_holds_no_caller_and_the_dropped_lines_are_counted(root):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as pipe:
        logs.configure_logging(json=False, name="syncer", stream=stream, background=True)
        log, lines = logging.getLogger("diloco_test"), logs.CAPACITY + 2000

        def fill() -> None:
            for number in range(lines):
                log.info("line %d", number)

        caller = threading.Thread(target=fill, daemon=True)
        caller.start()
        caller.join(PATIENCE_SECONDS)
        assert not caller.is_alive()
        seen, dropped = [], 0
        while len(seen) + dropped < lines:
            line = pipe.readline()
            if "dropped" in line:
                dropped += int(line.split('message="')[1].split()[0])
            else:
                seen.append(line)
        assert len(seen) + dropped == lines
        assert dropped > 0
        assert "line 0" in seen[0]


def test_lines_that_are_dropped_while_the_thread_is_about_to_report_are_counted(root, monkeypatch):
    due, full, report = (
        threading.Event(),
        threading.Event(),
        logs._BackgroundHandler._report_dropped,
    )

    def report_late(handler: logs._BackgroundHandler) -> None:
        due.set()
        full.wait(PATIENCE_SECONDS)
        report(handler)

    monkeypatch.setattr(logs._BackgroundHandler, "_report_dropped", report_late)
    stream = io.StringIO()
    logs.configure_logging(json=False, name="syncer", stream=stream, background=True)
    log = logging.getLogger("diloco_test")
    log.info("line")
    assert due.wait(PATIENCE_SECONDS)
    for _ in range(logs.CAPACITY + 10):
        log.info("line")
    full.set()
    until(lambda: "dropped" in stream.getvalue())
    assert '"10 lines of the log were dropped' in stream.getvalue()
    assert stream.getvalue().count("message=line") == 1 + logs.CAPACITY


def test_the_end_of_the_process_writes_the_lines_that_wait(root):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as pipe:
        logs.configure_logging(json=False, name="syncer", stream=stream, background=True)
        logging.getLogger("diloco_test").critical("the syncer ends")
        root.handlers[0].flush()
        os.set_blocking(reading, False)
        assert "the syncer ends" in pipe.readline()


def test_a_health_file_on_a_disk_that_hangs_holds_no_caller_and_the_newest_state_is_written(
    tmp_path, monkeypatch
):
    hangs, entered, replace = threading.Event(), threading.Event(), files.replace

    def hanging(*arguments: object, **more: object) -> None:
        entered.set()
        hangs.wait(PATIENCE_SECONDS)
        replace(*arguments, **more)

    monkeypatch.setattr(files, "replace", hanging)
    path = tmp_path / "health.json"
    file = BackgroundHealthFile(path)
    states = [Health(at=at, ready=True, why="serving", progress_at=at) for at in (1.0, 3.0, 5.0)]
    file.write(states[0])
    assert entered.wait(PATIENCE_SECONDS)
    file.write(states[1])
    file.write(states[2])
    assert not path.exists()
    file.settle(0.01)
    assert not path.exists(), "it waits no longer than it must"
    hangs.set()
    file.settle(PATIENCE_SECONDS)
    assert read(path) == states[2]


def test_the_next_write_is_due_after_a_second_although_the_disk_hangs(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(files, "replace", lambda *_, **__: hangs.wait(PATIENCE_SECONDS))
    file = BackgroundHealthFile(tmp_path / "health.json")
    for at in (1.0, 2.0, 3.0):
        file.write(Health(at=at, ready=True, why="serving", progress_at=at))
        assert file.due_at() == at + 1.0, "a caller that sleeps until then would not sleep"
    hangs.set()


def test_the_last_state_of_a_process_that_ends_is_in_its_health_file(tmp_path):
    for attempt in range(50):
        path = tmp_path / f"health-{attempt}.json"
        file = BackgroundHealthFile(path)
        last = Health(at=1.0, ready=False, why="stopping", progress_at=1.0)
        file.write(last)
        file.settle(PATIENCE_SECONDS)
        assert read(path) == last


def test_without_a_health_file_nothing_waits():
    file = BackgroundHealthFile(None)
    begun = time.monotonic()
    file.settle(PATIENCE_SECONDS)
    assert time.monotonic() - begun < PATIENCE_SECONDS / 2
