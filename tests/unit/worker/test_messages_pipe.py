"""Messages between trainer and link: the newest replaces older ones, and sending never blocks."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.ipc.pipe import Pipe


@pytest.fixture
def pipes():
    a, b = (Pipe(s) for s in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_states_are_restored_from_their_lines():
    trainer = TrainerState(
        steps=[1, 2],
        tokens=[3, 4],
        offers=[1],
        applied=[0, 1],
        loss=0.5,
        leaving="x",
        versions=[[1, 5], None],
        starts=["a", "b"],
    )
    assert TrainerState.from_line(trainer.to_line()) == trainer
    link = LinkState(
        phase=Phase.APPLY_MODEL, open=[1], ready=[[0, 3]], versions=[], starts=["a"], text="a\nb"
    )
    assert LinkState.from_line(link.to_line()) == link
    assert link.to_line().count(b"\n") == 1


def test_only_the_newest_line_is_received(pipes):
    a, b = pipes
    for number in range(5):
        a.offer(b"%d\n" % number)
    assert b.newest() == b"4"
    assert b.newest() is None


def test_a_peer_that_does_not_read_never_blocks_the_sender_and_gets_the_newest_line_later(pipes):
    a, b = pipes
    for number in range(5000):
        a.offer(b"%d " % number + b"x" * 1000 + b"\n")
    got = []
    while not a.flush() or not got or not got[-1].startswith(b"4999 "):
        line = b.newest()
        if line is not None:
            got.append(line)
    assert len(got) < 50
    assert all(len(line.partition(b" ")[2]) == 1000 for line in got)


def test_the_last_line_is_received_before_the_end_of_the_peer(pipes):
    a, b = pipes
    a.offer(b"bye\n")
    a.close()
    assert b.newest() == b"bye"
    with pytest.raises(EOFError):
        b.newest()


def test_a_program_with_a_thousand_open_files_still_waits():
    """Without it, trainer and link would ask again and again, as fast as they can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    near, far = socket.socketpair()
    try:
        high = socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, 1200))
        with contextlib.closing(Pipe(high)) as pipe, far:
            assert not pipe.wait(0.1)
            far.send(b"x\n")
            assert pipe.wait(60.0)
    finally:
        near.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sending_to_a_closed_peer_is_harmless(pipes):
    a, b = pipes
    b.close()
    a.offer(b"x\n")
    assert a.flush()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_lines_are_reassembled_wherever_they_are_split(sizes):
    left, right = socket.socketpair()
    pipe = Pipe(right)
    data = b"".join(b"%d:%s\n" % (n, b"y" * size) for n, size in enumerate(sizes))
    last = None
    for at in range(0, len(data), 7):
        left.sendall(data[at : at + 7])
        last = pipe.newest() or last
    assert last == b"%d:%s" % (len(sizes) - 1, b"y" * sizes[-1])
    left.close()
    pipe.close()
