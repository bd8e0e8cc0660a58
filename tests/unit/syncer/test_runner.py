"""What other threads get from the runner: answers, admissions, facts, attempts."""

import errno
import json
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from diloco.errors import AbortedError, ProtocolError, UnavailableError
from diloco.journal.background import BackgroundWriter
from diloco.journal.writer import JournalWriter
from diloco.model.fragments import Tensor, cut
from diloco.rpc.tensor_info import to_proto
from diloco.runtime.health import HealthFile
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.attempts import Attempt, Attempts, MemberUpload
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Applicant
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.refusals import FULL_REFUSALS
from diloco_syncer.metrics import Metrics
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.call_limits import CallLimits
from diloco_syncer.rpc.control import ControlService
from diloco_syncer.runner import TICK_SECONDS, Runner
from diloco_syncer.state import State
from diloco_syncer.storage import capture
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.writer import Writer

SPEC = RunSpec(job="j", steps=10, fragments=1, interval=1, overlap=1, learners={"eu": 2})


def applicant(learner, *shape):
    tensor = Tensor(name="a", shape=shape, dtype="float32")
    return Applicant(
        job="j", learner=learner, region="eu", spec_hash=SPEC.hash, tensors=(tensor,)
    )  # fmt: skip


@pytest.fixture
def runner(tmp_path):
    state = State(
        engine=Engine(spec=SPEC, epoch=1), admission=Admission(SPEC), parameters=None, model=None
    )
    store = Store(tmp_path / "snapshots", keep=1)
    events = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    return Runner(state, tmp_path, store=store, events=events, metrics=Metrics(0))


def test_a_question_that_was_not_answered_in_time_does_not_run_later(runner):
    ran = []
    with pytest.raises(UnavailableError, match="busy"):
        runner.ask(lambda state: ran.append(1), timeout_seconds=0.01)
    runner.start()
    assert runner.ask(lambda state: state.engine.epoch) == 1
    assert ran == []
    runner.stop()


def test_the_error_of_a_question_reaches_its_caller(runner):
    runner.start()
    with pytest.raises(ZeroDivisionError):
        runner.ask(lambda state: 1 // state.engine.step)
    runner.stop()


def test_the_model_of_an_open_session_counts_until_it_ends(runner):
    runner.start()
    assert runner.facts.layout is None
    session = runner.admit(applicant("eu/0", 3))
    layout = runner.facts.layout
    assert layout.tensors[0].shape == (3,), "published before the answer"
    with pytest.raises(UnavailableError, match="a different model"):
        runner.admit(applicant("eu/1", 4))
    assert runner.facts.layout == layout
    runner.sessions.close(session)
    runner.admit(applicant("eu/1", 4))
    assert runner.facts.layout.tensors[0].shape == (4,)
    runner.stop()


def test_a_session_that_gets_no_incarnation_does_not_fix_the_model(runner, tmp_path):
    def failing() -> int:
        raise ValueError("the counter is not text")

    control = ControlService(
        runner, BackgroundWriter(JournalWriter(tmp_path / "eval.jsonl")), Authorizer(job="j", tls=False),
        CallLimits(SPEC, RefusalLog(runner.record)), next_incarnation=failing,
    )  # fmt: skip
    tensors = [to_proto(t) for t in applicant("eu/0", 3).tensors]
    hello = pb.Hello(job="j", learner="eu/0", region="eu", spec_hash=SPEC.hash, tensors=tensors)
    runner.start()
    first = pb.LearnerMessage(hello=hello).SerializeToString()
    ended_call = SimpleNamespace(is_active=lambda: False, peer=lambda: "ipv4:10.0.0.1:1")
    with pytest.raises(ValueError, match="not text"):
        next(control.session(iter([first]), ended_call))
    assert len(runner.sessions) == 0
    runner.stop()


def test_a_flood_of_reported_failures_does_not_fill_the_log(runner, tmp_path, caplog):
    """Any member may report its region, and the newest report is in the status."""
    control = ControlService(
        runner, BackgroundWriter(JournalWriter(tmp_path / "eval.jsonl")), Authorizer(job="j", tls=False),
        CallLimits(SPEC, RefusalLog(runner.record)), next_incarnation=lambda: 1,
    )  # fmt: skip
    call = SimpleNamespace(is_active=lambda: True, peer=lambda: "ipv4:10.0.0.1:1")
    runner.start()
    with caplog.at_level("INFO", logger="diloco_syncer.rpc.control"):
        for number in range(100):
            region = pb.RegionFailure(region="eu", reason="R", message=f"{number}", learners=1)
            job = pb.Failure(reason="R", message=f"{number}")
            assert list(control.region_failed(iter([region.SerializeToString()]), call))
            assert list(control.failed(iter([job.SerializeToString()]), call))
    assert runner.ask(lambda state: state.region_failures) == {"eu": ("R", "99", 1)}
    assert runner.ask(lambda state: state.failure) == ("R", "99")
    lines = [line for line in caplog.messages if "reported" in line]
    assert len(lines) == 2 * FULL_REFUSALS
    runner.stop()


def test_an_export_that_fails_unexpectedly_leaves_its_reason(tmp_path):
    lines, posted = [], []
    writer = Writer(
        SPEC, tmp_path, Store(tmp_path / "snapshots", keep=1),
        record=lambda event, **fields: lines.append((event, fields)), post=posted.append,
        journal=BackgroundWriter(JournalWriter(tmp_path / "events.jsonl")), run="r",
    )  # fmt: skip
    damaged = SimpleNamespace(named=dict, constants=b"no safetensors")
    writer.export(damaged, step=10, tokens=100)
    writer.close()
    [(event, fields)] = lines
    assert (event, fields["ok"]) == ("export", False)
    assert "safetensors" in fields["detail"]
    assert posted == [ev.ExportFailed(reason=fields["detail"])]


def an_attempt(round_=1):
    members = ("eu/0", "eu/1", "eu/2")
    return Attempt(round=round_, attempt=1, fragment=0, version=(1, round_), members=members)


def an_upload(learner, ended):
    upload = MemberUpload(learner, lambda: ended.append(upload))
    return upload


def test_only_the_newest_committed_attempts_stay():
    attempts = Attempts(keep_committed=2)
    made = [an_attempt(r) for r in range(1, 5)]
    for attempt in made:
        attempts.add(attempt)
    for attempt in made[:3]:
        attempts.commit(attempt)
    assert [attempts.get(r, 1) for r in range(1, 5)] == [None, *made[1:]]


def test_an_aborted_attempt_refuses_members_and_ends_their_streams():
    attempts, ended = Attempts(keep_committed=2), []
    attempt, upload = an_attempt(), an_upload("eu/0", ended)
    attempts.add(attempt)
    attempt.join(upload)
    attempts.abort(1, 1, "a member left")
    assert ended == [upload]
    assert attempts.get(1, 1) is None
    with pytest.raises(AbortedError, match="a member left"):
        attempt.join(an_upload("eu/1", ended))
    with pytest.raises(AbortedError, match="a member left"):
        attempt.running()


def test_a_commit_ends_the_uploads_that_were_not_merged_and_later_those_that_do_not_end():
    attempts, ended, attempt = Attempts(keep_committed=2), [], an_attempt()
    attempts.add(attempt)
    merged, delivered, left = (an_upload(f"eu/{i}", ended) for i in range(3))
    for upload in (merged, delivered, left):
        attempt.join(upload)
    merged.contributed = delivered.contributed = True
    attempt.delivered(delivered)
    attempts.commit(attempt)
    assert ended == [left], "the end of the merged one may be on its way"
    for round_ in (2, 3):
        later = an_attempt(round_)
        attempts.add(later)
        attempts.commit(later)
    assert ended[1:] == [merged, left]


def test_a_newer_upload_of_a_member_replaces_the_older_and_no_other_learner_may_upload():
    attempt, ended = an_attempt(), []
    first, second, third = (an_upload("eu/0", ended) for _ in range(3))
    attempt.join(first)
    assert attempt.wait_for_merge(0, first) is False
    attempt.join(second)
    assert (ended, first.replaced, second.replaced) == ([first], True, False)
    assert attempt.wait_for_merge(0, first) is True
    attempt.leave(first)
    attempt.finish(committed=False, reason="why")
    assert ended == [first, second], "the end of the older leaves the newer registered"
    other = an_attempt()
    other.delivered(third)
    with pytest.raises(AbortedError, match="delivered to this round already"):
        other.join(second)
    with pytest.raises(ProtocolError, match="eu/9 is not a member of round 1 attempt 1"):
        other.join(an_upload("eu/9", ended))


def test_a_thread_that_waits_for_the_merge_continues_when_its_upload_is_replaced():
    attempt, ended = an_attempt(), []
    first = an_upload("eu/0", ended)
    attempt.join(first)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(attempt.wait_for_merge(30, first)))
    thread.start()
    attempt.join(an_upload("eu/0", ended))
    thread.join(10)
    assert waited == [True]


# ---------------------------------------------------------------- faults


def until(what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.005)


def parameters_of(spec=SPEC):
    layout = cut([Tensor(name="a", shape=(3,), dtype="float32")], num_fragments=1)
    return Parameters(layout, [np.zeros(layout.fragments[0].elements, np.float32)], [(1, 0)])


def begun(tmp_path, *, fault=lambda point: None, engine=None, health=None, on_failure=None):
    """A syncer whose parameters exist."""
    parameters = parameters_of()
    state = State(
        engine=engine or Engine(spec=SPEC, epoch=1, initialised=True),
        admission=Admission(SPEC, layout=parameters.layout), parameters=parameters, model=None,
    )  # fmt: skip
    return Runner(
        state, tmp_path, store=Store(tmp_path / "snapshots", keep=3),
        events=BackgroundWriter(JournalWriter(tmp_path / "events.jsonl")), metrics=Metrics(0), fault=fault,
        health=health, on_failure=on_failure or (lambda: None),
    )  # fmt: skip


def recorded(tmp_path, event):
    """Lines of events.jsonl; they are written in the background."""
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def test_an_engine_that_raises_ends_the_runner_with_its_reason_and_without_a_snapshot(
    tmp_path, caplog
):
    def fault(point: str) -> None:
        if point == "Heartbeat":
            raise ZeroDivisionError("at a named point")

    ended = threading.Event()
    runner = begun(tmp_path, fault=fault, on_failure=ended.set)
    runner.start()
    assert runner.ask(lambda state: state.engine.step) == 0
    runner.post(ev.Heartbeat(session=1, learner="eu/0"))
    assert ended.wait(30)
    assert "the engine cannot process Heartbeat" in runner.failure
    assert "at a named point" in caplog.text
    with pytest.raises(UnavailableError, match="the syncer is stopping"):
        runner.ask(lambda state: state.engine.step)
    runner.stop()
    assert list((tmp_path / "snapshots").glob("*.json")) == []
    assert recorded(tmp_path, "stop") == []


def test_a_runner_that_is_stopped_leaves_a_snapshot(tmp_path):
    runner = begun(tmp_path)
    runner.start()
    runner.stop()
    assert runner.failure is None
    assert len(list((tmp_path / "snapshots").glob("*.json"))) == 1


def test_a_runner_that_is_about_to_stop_answers_questions_and_processes_no_event(tmp_path):
    seen = []
    runner = begun(tmp_path, fault=seen.append)
    runner.start()
    until(lambda: seen.count("Tick") > 1)
    runner.stop_deciding()
    assert runner.ask(lambda state: state.engine.step) == 0
    processed = len(seen)
    runner.post(ev.Heartbeat(session=1, learner="eu/0"))
    time.sleep(3 * TICK_SECONDS)
    assert runner.ask(lambda state: state.engine.step) == 0
    assert seen[processed:] == []
    runner.stop()
    until(lambda: recorded(tmp_path, "stop"))
    assert len(list((tmp_path / "snapshots").glob("*.json"))) == 1


@pytest.mark.parametrize("broken", ["metrics", "health", "counter"])
def test_metrics_and_health_that_raise_do_not_end_the_decisions(
    tmp_path, monkeypatch, caplog, broken
):
    raised = []

    def raising(*given: object, **named: object) -> None:
        raised.append(given)
        raise OSError("cannot")

    health = HealthFile(tmp_path / "health.json")
    runner = begun(tmp_path, health=health)
    name = {"metrics": "update", "health": "write", "counter": "event"}[broken]
    monkeypatch.setattr(health if broken == "health" else runner.metrics, name, raising)
    runner.start()
    until(lambda: raised)
    runner.record("refuse", learner="", reason="Protocol", detail="")
    asked = len(raised)
    if broken != "counter":
        until(lambda: len(raised) > asked + 1)
    assert runner.ask(lambda state: state.engine.step) == 0
    runner.stop()
    assert runner.failure is None
    until(lambda: recorded(tmp_path, "stop"))
    assert len(list((tmp_path / "snapshots").glob("*.json"))) == 1
    if broken != "counter":
        assert caplog.text.count("decisions continue") == 1, "not twice a second"


# ---------------------------------------------------------------- the end of a job


def finishing(tmp_path):
    """The last step is done; snapshot and model are not written."""
    return begun(
        tmp_path, engine=Engine(spec=SPEC, epoch=2, initialised=True, start_step=SPEC.steps)
    )


def test_a_job_completes_however_late_the_runner_is(tmp_path):
    runner, held = finishing(tmp_path), threading.Event()
    runner.start()
    asking = threading.Thread(target=runner.ask, args=(lambda state: held.wait(60),))
    asking.start()
    try:
        until(lambda: list((tmp_path / "snapshots").glob("*.json")))
    finally:
        held.set()
        asking.join(60)
    until(lambda: runner.ask(lambda state: state.engine.complete))
    assert runner.ask(lambda state: state.model).sha256
    runner.stop()


def test_a_job_whose_disk_is_full_at_the_end_is_not_complete(tmp_path, monkeypatch):
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    runner = finishing(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    runner.start()
    session = runner.admit(applicant("eu/0", 3))
    runner.post(
        ev.Hello(
            session=session.number, learner="eu/0", region="eu", incarnation=1, fresh=True,
            local_step=0, checkpoint_step=0,
        )
    )  # fmt: skip
    until(lambda: recorded(tmp_path, "snapshot"))
    assert "No space left" in recorded(tmp_path, "snapshot")[0]["detail"]
    assert "No space left" in runner.ask(lambda state: state.engine.waiting_for())
    assert runner.ask(lambda state: (state.engine.complete, state.model)) == (False, None)
    kinds = []
    while not session.outbox.empty():
        kinds.append(session.outbox.get().WhichOneof("kind"))
    assert "welcome" in kinds
    assert "complete" not in kinds
    runner.stop()


def test_a_snapshot_records_the_position_of_the_journal_at_its_capture(tmp_path):
    journal = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    writer = Writer(
        SPEC, tmp_path, store := Store(tmp_path / "snapshots", keep=1),
        record=lambda event, **fields: None, post=lambda event: None, journal=journal, run="r",
    )  # fmt: skip
    held = threading.Event()
    journal.append({"event": "before"})
    assert journal.flush(30)
    position = journal.position()
    writer._pool.submit(held.wait, 60)  # the disk is busy
    writer.snapshot(capture.capture(parameters_of(), {}, spec=SPEC, epoch=1, step=1))
    journal.append({"event": "afterwards"})
    held.set()
    writer.close()
    journal.close()
    assert store.newest().meta["events"] == {"part": position.part, "offset": position.offset}
    assert position.offset > 0


def test_a_snapshot_that_fails_unexpectedly_leaves_its_reason_and_comes_back_as_an_event(tmp_path):
    def fault(point: str) -> None:
        raise MemoryError(f"at {point}")

    lines, posted = [], []
    journal = BackgroundWriter(JournalWriter(tmp_path / "events.jsonl"))
    writer = Writer(
        SPEC, tmp_path, Store(tmp_path / "snapshots", keep=1, fault=fault),
        record=lambda event, **fields: lines.append((event, fields)), post=posted.append,
        journal=journal, run="r",
    )  # fmt: skip
    writer.snapshot(capture.capture(parameters_of(), {}, spec=SPEC, epoch=1, step=1))
    writer.close()
    journal.close()
    [(event, fields)] = lines
    assert posted == [ev.SnapshotDone(step=None, reason=fields["detail"])]
    assert (event, fields["ok"]) == ("snapshot", False)
    assert "at before-data" in fields["detail"]
