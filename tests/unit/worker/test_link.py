"""The loop of the link: what ends it, with which reason, and what does not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diloco.model.fragments import Tensor, cut
from diloco.runtime import files, health
from diloco.spec import RunSpec
from diloco_worker.core import events as ev
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.ipc.pipe import Pipe
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.link import link as module
from diloco_worker.link.bulk import Ended
from diloco_worker.link.link import Link
from diloco_worker.link.transfer import CancelToken
from diloco_worker.settings import LearnerSettings

LAYOUT = cut([Tensor(name="a", shape=(256,), dtype="float32")], num_fragments=1)
SPEC = RunSpec(job="j", steps=9, fragments=1, interval=1, overlap=1)
TIMEOUT_SECONDS = 30


@pytest.fixture
def shared():
    memory = SharedMemory.create(LAYOUT, constants_bytes=0)
    yield memory
    memory.close()


@pytest.fixture
def trainer():
    """The trainer's end of the socket, and the link's."""
    ours, theirs = socket.socketpair()
    with theirs, ours:  # ours is closed first: end of file ends the thread that listens
        yield Pipe(ours), Pipe(theirs)


@pytest.fixture
def link(shared, trainer, tmp_path):
    config = LearnerSettings(
        job="j", learner="eu/0", syncer="127.0.0.1:1", spec=tmp_path / "spec.json",
        health_file=tmp_path / "health.json",
    )  # fmt: skip
    return Link(config, SPEC, shared, trainer[1])


def raising(*_args, **_kwargs):
    raise RuntimeError("a defect")


def running(link) -> queue.Queue:
    """Run the link on a thread; the queue takes what it returns."""
    returned: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: returned.put(link.run()), daemon=True).start()
    return returned


def newest(pipe: Pipe) -> LinkState:
    pipe.wait(TIMEOUT_SECONDS)
    line = pipe.newest()
    assert line is not None
    return LinkState.from_line(line)


def test_an_unexpected_exception_of_a_decision_ends_the_link_with_its_reason(link, trainer):
    link._protocol.handle = raising
    trainer[0].offer(TrainerState().to_line())
    returned = running(link)
    reason = returned.get(timeout=TIMEOUT_SECONDS)
    assert "RuntimeError('a defect')" in reason
    state = newest(trainer[0])
    assert (state.text, state.connected) == (reason, False)


@pytest.mark.parametrize("method", ["_connect", "_carry_out"])
def test_a_decision_that_cannot_be_carried_out_ends_the_link(link, trainer, method):
    setattr(link, method, raising)
    trainer[0].offer(TrainerState().to_line())
    assert "a defect" in running(link).get(timeout=TIMEOUT_SECONDS)


def test_a_line_of_the_trainer_that_cannot_be_read_ends_the_link(link, trainer):
    trainer[0].offer(b"{}[]\n")
    assert "JSONDecodeError" in running(link).get(timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("broken", ["report", "observe", "leave"])
def test_a_broken_health_file_or_metric_does_not_end_the_link(link, trainer, broken):
    setattr(link._health, broken, raising)
    link._metrics.observe = raising
    decided = threading.Event()
    handle = link._protocol.handle

    def watched(event, now):
        if isinstance(event, ev.TrainerUpdate) and event.state.local_step == 2:
            decided.set()
        return handle(event, now)

    link._protocol.handle = watched
    returned = running(link)
    state = TrainerState(model_loaded=True, stepped=True, local_step=1, applied=[0])
    trainer[0].offer(state.to_line())
    newest(trainer[0])
    trainer[0].offer(dataclasses.replace(state, local_step=2).to_line())
    assert decided.wait(TIMEOUT_SECONDS)
    assert returned.empty()
    trainer[0].offer(dataclasses.replace(state, leaving="Complete").to_line())
    assert returned.get(timeout=TIMEOUT_SECONDS) == ""


def test_late_fragments_are_logged_when_they_begin_to_be_and_when_none_is_left(link, caplog):
    names = iter(["", "a", "a, b", "b", "", ""])

    def next_state(_event, _now):
        link._protocol.late = next(names)
        return []

    link._protocol.handle = next_state
    for _ in range(6):
        assert link._handle(ev.Tick())
    assert [record.message for record in caplog.records] == [
        "a",
        "every fragment may be offered again",
    ]


def test_a_health_file_on_a_disk_that_hangs_delays_no_decision(
    link, trainer, tmp_path, monkeypatch
):
    answers, decided, replace = threading.Event(), threading.Event(), files.replace

    def hanging(*arguments, **more):
        assert answers.wait(TIMEOUT_SECONDS * 4)
        replace(*arguments, **more)

    def watched(event, now):
        if isinstance(event, ev.TrainerUpdate) and event.state.local_step == 2:
            decided.set()
        return handle(event, now)

    monkeypatch.setattr(files, "replace", hanging)
    monkeypatch.setattr(module, "LAST_HEALTH_SECONDS", TIMEOUT_SECONDS)
    handle, link._protocol.handle = link._protocol.handle, watched
    returned = running(link)
    state = TrainerState(model_loaded=True, stepped=True, local_step=1, applied=[0])
    trainer[0].offer(state.to_line())
    newest(trainer[0])
    trainer[0].offer(dataclasses.replace(state, local_step=2).to_line())
    assert decided.wait(TIMEOUT_SECONDS)
    answers.set()
    trainer[0].offer(dataclasses.replace(state, leaving="Complete").to_line())
    assert returned.get(timeout=TIMEOUT_SECONDS) == ""
    last = health.read(tmp_path / "health.json")
    assert last is not None
    assert last.why == "has left the job: Complete"


@pytest.mark.parametrize("event", [ev.Downloaded(request=ev.Download(fragment=0)), None])
def test_a_waiting_transfer_starts_once_the_result_of_another_was_decided_about(link, event):
    order = []
    link._transfers.settle = lambda ended: order.append("settle") or ended.event
    link._transfers.proceed = lambda: order.append("proceed")
    link._protocol.handle = lambda event, now: order.append("handle") or []
    schedule = link._transfers._downloads
    link._events.put(Ended(schedule=schedule, cancel=CancelToken(), event=event))
    assert link._turn()
    assert order == (["settle", "handle", "proceed"] if event else ["settle", "proceed"])


def test_idle_buffers_are_freed_after_a_pause_and_cost_no_wake_up_afterwards(link):
    buffers = link._transfers.buffers
    assert link._sweep(0.0) is None
    buffers.release(buffers.acquire(100))
    due = link._sweep(1.0)
    assert due is not None
    later = link._sweep(due)
    assert buffers.held_bytes == 100  # it was used since the last sweep
    assert link._sweep(later) is None
    assert buffers.held_bytes == 0


FAILING_PROCESS = """
import threading, time
import diloco_worker.link.__main__ as program
from diloco_worker.core.link_protocol import LinkProtocol

def fail(self, event, now):
    threading.Thread(target=time.sleep, args=(1000,)).start()  # a transfer that waits
    raise RuntimeError("a defect")

LinkProtocol.handle = fail
program.main()
"""


FLOODING_PROCESS = """
import os
import diloco_worker.link.__main__ as program
from diloco.runtime import logs
from diloco_worker.core.link_protocol import LinkProtocol

logs.FLUSH_SECONDS = float(os.environ["FLUSH"])

def fail(self, event, now):
    for number in range(int(os.environ["LINES"])):
        program.log.info("line %d of the flood", number)
    raise RuntimeError("a defect")

LinkProtocol.handle = fail
program.main()
"""


@contextlib.contextmanager
def process(code: str, shared: SharedMemory, directory: Path, **environment: str):
    """A link process that runs this code, with standard error as a pipe; and the trainer's end of its socket."""
    (directory / "spec.json").write_text(SPEC.to_json())
    environment = {
        **os.environ, "DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/0", "DILOCO_SYNCER": "127.0.0.1:1",
        "DILOCO_SPEC": str(directory / "spec.json"), "DILOCO_STATE": str(directory), **environment,
    }  # fmt: skip
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = Pipe(ours)
        pipe.offer(TrainerState().to_line())
        started = subprocess.Popen(
            [
                sys.executable, "-c", code, "--memory", str(shared.fd), "--socket",
                str(theirs.fileno()), "--parent", str(os.getpid()),
            ],
            pass_fds=(shared.fd, theirs.fileno()), env=environment, cwd=Path.cwd(),
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with started:
            try:
                yield started, pipe
            finally:
                started.kill()


@pytest.mark.slow
def test_the_process_of_a_failed_link_ends_although_threads_still_wait(shared, tmp_path):
    with process(FAILING_PROCESS, shared, tmp_path) as (link, pipe):
        _, log = link.communicate(timeout=280)
        assert link.returncode == 1, log
        assert "a defect" in log
        assert "a defect" in newest(pipe).text


@pytest.mark.slow
def test_a_log_that_is_not_read_holds_neither_the_link_nor_its_end(shared, tmp_path):
    with process(FLOODING_PROCESS, shared, tmp_path, LINES="5000", FLUSH="0.5") as (link, pipe):
        pipe.wait(120)
        assert "a defect" in newest(pipe).text
        assert link.wait(120) == 1


@pytest.mark.slow
def test_the_last_lines_of_a_link_that_ends_are_in_its_log(shared, tmp_path):
    with process(FLOODING_PROCESS, shared, tmp_path, LINES="1000", FLUSH="100") as (link, pipe):
        pipe.wait(120)
        time.sleep(0.3)  # the pipe is full, and an end that does not wait for it is over
        _, log = link.communicate(timeout=120)
        assert log.count("of the flood") == 1000
        assert "unexpected error; the link process ends" in log.splitlines()[-1]
