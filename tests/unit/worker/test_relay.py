"""One connection between two machines: a pair of sockets here."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from diloco_testing.local.fake_run import until
from diloco_worker.ipc import relay
from diloco_worker.ipc.relay import Kind, Message, Relay

OWN, OTHER = b"a" * relay.SECRET_BYTES, b"b" * relay.SECRET_BYTES


class End:
    """One end, and what was reported to it."""

    def __init__(self, sock: socket.socket, beat: bytes = b"", *, fault: bool = False) -> None:
        self.messages: list[Message] = []
        self.lost: list[str] = []
        self.fault = fault
        self.relay = Relay(sock, handle=self.handle, lost=self.lost.append, beat=lambda: beat)

    def handle(self, message: Message) -> None:
        if self.fault:
            raise ValueError("a fault")
        self.messages.append(message)

    def kinds(self) -> list[Kind]:
        return [message.kind for message in self.messages]


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    yield pair
    for sock in pair:
        sock.close()


def test_messages_arrive_in_order_with_their_numbers_and_bytes(sockets):
    near, far = (End(sock) for sock in sockets)
    sent = [Message(Kind.PLAN, (n, 2**63, 7), b"x" * n) for n in (1, 0, relay.SMALL_BYTES + 1)]
    for message in sent:
        near.relay.send(message)
    for end in (near, far):
        end.relay.start()
    until(lambda: len(far.messages) >= 3, "messages")
    assert far.messages[:3] == sent
    assert near.lost == far.lost == []


def test_small_messages_go_before_the_rest_of_a_bulk_transfer(sockets):
    near, far = (End(sock) for sock in sockets)
    first = threading.Event()

    def bulk():
        for n in range(50):
            if n == 1:
                near.relay.send(Message(Kind.PLAN))
            first.set()
            yield Message(Kind.PART, (0, 0, n), b"y" * 1000)

    near.relay.send_bulk(bulk())
    near.relay.start()
    far.relay.start()
    until(lambda: len(far.messages) == 51, "messages")
    assert far.kinds().index(Kind.PLAN) == 2
    assert [m.numbers[2] for m in far.messages if m.kind is Kind.PART] == [*range(50)]
    near.relay.close()
    far.relay.close()


def test_a_beat_shows_that_an_end_is_there_and_a_silent_peer_is_lost(sockets, monkeypatch):
    monkeypatch.setattr(relay, "BEAT_SECONDS", 0.02)
    near, far = (End(sock, b"rows") for sock in sockets)
    near.relay.start()
    far.relay.start()
    until(lambda: far.kinds().count(Kind.BEAT) > 2, "beats")
    assert far.messages[0].data == b"rows"
    near.relay.close()
    far.relay.close()


def test_a_peer_that_sends_nothing_is_lost(sockets, monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.1)
    near = End(sockets[0])
    near.relay.start()
    until(lambda: near.lost, "the loss")
    assert near.lost == ["nothing came for 0 s"]


def test_a_peer_that_has_left_may_close_its_end(sockets):
    near, far = (End(sock) for sock in sockets)
    near.relay.start()
    far.relay.start()
    far.relay.send(Message(Kind.LEFT))
    far.relay.close()
    sockets[1].close()
    until(lambda: Kind.LEFT in near.kinds(), "the goodbye")
    near.relay.send(Message(Kind.PLAN))
    time.sleep(0.05)
    assert near.lost == []


def test_a_peer_that_closes_its_end_before_it_left_is_lost(sockets):
    near = End(sockets[0])
    near.relay.start()
    sockets[1].close()
    until(lambda: near.lost, "the loss")
    assert near.lost == ["the connection was closed"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (relay._HEAD.pack(99, 0, 0, 0, 0), "99 is not a valid Kind"),
        (relay._HEAD.pack(Kind.PLAN, relay.MAX_BYTES + 1, 0, 0, 0), "expected at most 16777216"),
        (relay._HEAD.pack(Kind.PLAN, 0, 0, 0, 0), "a fault"),
    ],
)
def test_what_is_not_expected_ends_the_connection_with_the_reason(sockets, data, why):
    near = End(sockets[0], fault=True)
    near.relay.start()
    sockets[1].sendall(data)
    until(lambda: near.lost, "the loss")
    assert near.lost[0].startswith("it sent what was not expected: ")
    assert why in near.lost[0]


def test_after_close_no_message_is_handled(sockets):
    near = End(sockets[0])
    near.relay.start()
    near.relay.close()
    sockets[1].sendall(relay._HEAD.pack(Kind.PLAN, 0, 0, 0, 0))
    time.sleep(0.05)
    assert near.messages == []
    assert near.lost == []


# ---------------------------------------------------------------- how a connection begins


def begun(sockets, greeting) -> list:
    """What both ends return, or their errors."""
    found: list = [None, None]

    def first():
        try:
            found[0] = relay.welcome(sockets[0], own=OWN, other=OTHER)
        except OSError as error:
            found[0] = error
            sockets[0].close()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        greeting(sockets[1])
    except OSError as error:
        found[1] = error
    thread.join()
    return found


def test_both_ends_prove_that_they_know_their_secret(sockets):
    def greeting(sock):
        relay.greet(sock, 3, own=OTHER, other=OWN)

    assert begun(sockets, greeting) == [3, None]


def test_an_untrusted_peer_with_another_secret_is_refused(sockets):
    def greeting(sock):
        relay.greet(sock, 3, own=b"c" * relay.SECRET_BYTES, other=OWN)

    first, second = begun(sockets, greeting)
    assert "does not know the secret of this learner" in str(first)
    assert isinstance(second, OSError)


def test_a_first_machine_with_another_secret_is_refused(sockets):
    def greeting(sock):
        relay.greet(sock, 3, own=OTHER, other=b"c" * relay.SECRET_BYTES)

    assert "does not know the secret" in str(begun(sockets, greeting)[1])


def test_another_version_and_what_is_no_relay_are_refused(sockets):
    def greeting(sock):
        sock.sendall(relay._HELLO.pack(b"dilocorl", relay.VERSION + 1, 1, OTHER))

    assert "no relay of this version" in str(begun(sockets, greeting)[0])


def test_an_untrusted_peer_that_sends_a_little_at_a_time_is_dropped(sockets, monkeypatch):
    monkeypatch.setattr(relay, "HELLO_SECONDS", 0.1)
    sockets[1].sendall(b"d")
    began = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        relay.welcome(sockets[0], own=OWN, other=OTHER)
    assert time.monotonic() - began < 5
