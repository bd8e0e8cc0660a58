"""Messages to a learner that does not read them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from diloco.errors import UnavailableError
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer import learner_messages
from diloco_syncer.core import events as ev
from diloco_syncer.refusals import MAX_DETAIL, MAX_TRACE, RefusalLog
from diloco_syncer.rpc import telemetry
from diloco_syncer.rpc.control import ControlService
from diloco_syncer.sessions import MAX_QUEUED, Session, Sessions

HEARTBEAT = pb.LearnerMessage(heartbeat=pb.Heartbeat()).SerializeToString()


class Runner:
    """What a session needs of a runner."""

    def __init__(self) -> None:
        self.posted: list[ev.Event] = []
        self.sessions = Sessions()
        self.spec: Any = type("Spec", (), {"fragments": 2})

    def post(self, event: ev.Event) -> None:
        self.posted.append(event)


class CallLimits:
    """Keeps refusals."""

    def __init__(self) -> None:
        self.refusals, self.seen = self, []

    def refuse(self, what: str, learner: str, error: Exception) -> None:
        self.seen.append((learner, error))


def fill(sessions: Sessions, count: int) -> Session:
    session = sessions.open("eu/0")
    sessions.make_current("eu/0", incarnation=1, number=session.number)
    for step in range(count):
        sessions.send_all(learner_messages.complete(step))
    return session


def test_a_session_that_is_not_read_ends_with_a_reason_and_keeps_no_message():
    sessions = Sessions()
    session = fill(sessions, MAX_QUEUED)
    assert (session.outbox.qsize(), session.unread) == (MAX_QUEUED, None)
    for step in range(10):
        sessions.send("eu/0", learner_messages.complete(step))
    assert session.outbox.qsize() == 1
    error = session.outbox.get()
    assert isinstance(error, UnavailableError)
    assert "eu/0 has not read" in str(error)


def test_its_next_heartbeat_makes_it_leave_and_frees_the_thread_that_writes_to_it():
    runner, limits, cancelled = Runner(), CallLimits(), []
    session = fill(runner.sessions, MAX_QUEUED + 1)
    control = ControlService(runner, None, None, limits, next_incarnation=lambda: 1)
    control._read(session, iter([HEARTBEAT, HEARTBEAT]), lambda: cancelled.append(True))
    [left] = runner.posted
    assert (left.learner, left.reason) == ("eu/0", "Unavailable")
    assert limits.seen == [("eu/0", session.unread)]
    assert cancelled == [True]


def test_a_session_that_is_read_is_not_cancelled():
    runner, cancelled = Runner(), []
    session = fill(runner.sessions, MAX_QUEUED)
    control = ControlService(runner, None, None, CallLimits(), next_incarnation=lambda: 1)
    control._read(session, iter([HEARTBEAT]), lambda: cancelled.append(True))
    assert isinstance(runner.posted[0], ev.Heartbeat)
    assert cancelled == []


def test_the_stream_of_a_session_that_the_syncer_ends_is_ended_once():
    sessions, ended = Sessions(), []
    session = fill(sessions, 0)
    session.on_end = lambda: ended.append(session.outbox.qsize())
    for _ in range(2):
        sessions.end(session.number, UnavailableError("late"))
    assert ended == [1], "after its reason"
    other = fill(sessions, 0)
    other.on_end = lambda: ended.append(0)
    sessions.close(other)
    sessions.end(other.number, UnavailableError("late"))
    assert ended == [1], "that stream has ended by itself"


def read_one(runner: Runner, lines: list, requests: Any) -> Session:
    """Read the stream of a session to its end, with real refusals."""
    session = fill(runner.sessions, 0)
    refusals = RefusalLog(lambda event, **fields: lines.append(fields))
    limits = SimpleNamespace(refusals=refusals)
    control = ControlService(runner, None, None, limits, next_incarnation=lambda: 1)
    control._read(session, requests, lambda: None)
    return session


def test_an_error_of_the_syncer_in_a_message_is_logged_with_its_trace_and_ends_the_session(
    monkeypatch, caplog
):
    def defect(request: bytes, **_: object) -> None:
        raise ZeroDivisionError("at a named point\n" * 10_000)

    monkeypatch.setattr(telemetry, "received", defect)
    runner, lines = Runner(), []
    session = read_one(runner, lines, iter([HEARTBEAT]))
    error = session.outbox.get()
    assert isinstance(error, UnavailableError)
    assert "met an error of the syncer (ZeroDivisionError); see its log" in str(error)
    assert [left.reason for left in runner.posted] == ["Unavailable"]
    assert [(line["learner"], line["reason"]) for line in lines] == [("eu/0", "Unavailable")]
    [record] = caplog.records
    assert (record.levelname, "in defect" in record.trace) == ("ERROR", True)
    assert "at a named point" in record.getMessage()
    assert len(record.getMessage()) + len(record.trace) < 2 * MAX_DETAIL + MAX_TRACE


def test_a_stream_whose_peer_is_gone_is_no_error(caplog):
    def gone() -> Any:
        yield HEARTBEAT
        raise grpc.RpcError

    runner, lines = Runner(), []
    session = read_one(runner, lines, gone())
    assert session.outbox.get() is None
    assert [getattr(event, "reason", "") for event in runner.posted] == ["", "StreamEnded"]
    assert lines == caplog.records == []


def test_a_session_whose_reader_cannot_be_started_ends_and_leaves(monkeypatch):
    runner, limits = Runner(), CallLimits()
    session = fill(runner.sessions, 0)
    limits.sessions, limits.first = None, lambda *_: b""
    control = ControlService(runner, None, None, limits, next_incarnation=lambda: 1)
    monkeypatch.setattr(control, "_join", lambda first, context: session)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def nothing(*_):
        return None

    context = SimpleNamespace(cancel=nothing, set_trailing_metadata=nothing, abort=nothing)
    with pytest.raises(UnavailableError, match="can't start new thread; connect again"):
        next(control.session(iter(()), context))
    assert [event.reason for event in runner.posted] == ["StreamEnded"]
    assert len(runner.sessions) == 0
