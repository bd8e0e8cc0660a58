"""The learner's end of a session, without a network."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from diloco.v1 import syncer_pb2 as pb
from diloco_worker.core import events as ev
from diloco_worker.link.session import NOT_COMPARED, Session, event_of


class Call:
    """A stream that delivers one message, then raises an error of another kind than gRPC."""

    def __iter__(self) -> Iterator[pb.SyncerMessage]:
        yield pb.SyncerMessage(complete=pb.Complete(step=3))
        raise ValueError("at a named point")

    def cancel(self) -> None:
        pass


class Channel:
    def stream_stream(self, *given: object, **named: object) -> object:
        return lambda requests: Call()

    def unary_unary(self, *given: object, **named: object) -> object:
        return None


def test_an_unexpected_error_of_the_stream_loses_the_session_instead_of_the_thread():
    events: list[ev.Event] = []
    lost = threading.Event()

    def post(event: ev.Event) -> None:
        events.append(event)
        if isinstance(event, ev.SessionLost):
            lost.set()

    Session(Channel(), pb.Hello(), post)
    assert lost.wait(30)
    assert [type(event) for event in events] == [ev.Completed, ev.SessionLost]
    assert "at a named point" in events[-1].text


@pytest.mark.parametrize(
    ("hello", "left"),
    [
        (pb.Hello(tensors=[pb.TensorInfo(name="mean", buffer=True)]), True),
        (pb.Hello(frozen=b"x"), True),
        (pb.Hello(tensors=[pb.TensorInfo(name="weight")]), False),
    ],
)
def test_an_older_syncer_is_left_only_if_it_would_misunderstand_the_model(hello, left):
    class Older(Call):
        def __iter__(self) -> Iterator[pb.SyncerMessage]:
            yield pb.SyncerMessage(welcome=pb.Welcome(epoch=1))

    class OlderSyncer(Channel):
        def stream_stream(self, *given: object, **named: object) -> object:
            return lambda requests: Older()

    events: list[ev.Event] = []
    lost = threading.Event()

    def post(event: ev.Event) -> None:
        events.append(event)
        if isinstance(event, ev.SessionLost):
            lost.set()

    Session(OlderSyncer(), hello, post)
    assert lost.wait(30)
    assert (events == [NOT_COMPARED]) is left


@pytest.mark.parametrize(
    ("stated", "used"),
    [(2.0, 2.0), (0.1, 0.1), (0.0, 1.0), (1e-300, 1.0), (-1.0, 1.0), (math.nan, 1.0), (61.0, 1.0)],
)
def test_a_syncer_cannot_make_the_link_send_nothing_but_heartbeats(stated, used):
    welcome = pb.SyncerMessage(welcome=pb.Welcome(heartbeat_seconds=stated))
    event = event_of(welcome)
    assert isinstance(event, ev.Welcomed)
    assert event.heartbeat_seconds == used


def test_the_name_of_the_run_is_taken_from_welcome_within_limits():
    event = event_of(pb.SyncerMessage(welcome=pb.Welcome(run="a" * 5000)))
    assert isinstance(event, ev.Welcomed)
    assert event.run == "a" * 64


def test_a_report_that_was_not_sent_yet_comes_before_the_goodbye():
    ended, requests = threading.Event(), []

    class Waiting(Call):
        def __iter__(self) -> Iterator[pb.SyncerMessage]:
            ended.wait(30)
            return iter(())

        def cancel(self) -> None:
            ended.set()

    class Silent(Channel):
        def stream_stream(self, *given: object, **named: object) -> object:
            return lambda sent: requests.append(sent) or Waiting()

    session = Session(Silent(), pb.Hello(), lambda event: None)
    session.report(pb.Report(local_step=9))
    session.goodbye("SIGTERM")
    sent = [next(requests[0]).WhichOneof("kind") for _ in range(3)]
    assert sent == ["hello", "report", "goodbye"]
    session.close()
