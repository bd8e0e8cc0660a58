"""Which learners a new process may ask for the state of its optimizers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.rpc.peer_address import is_address
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.core.learners import LearnerRecord
from diloco_syncer.core.peers import MOST, offered
from diloco_syncer.rpc import telemetry
from diloco_testing.syncers.engine_job import Job, of

H = 4


def record(name: str, *, address: str = "h:1", first: int = 0) -> LearnerRecord:
    return LearnerRecord(
        name=name, region=name[:2], peer_address=address, first_choices=first,
    )  # fmt: skip


def names(able, newcomer="eu/9", *, step=H):
    return [p.learner for p in offered(able, record(newcomer), step=step, interval=H)]


def test_those_of_the_same_region_come_first_then_those_that_were_chosen_least():
    able = [record("us/0"), record("eu/0", first=2), record("eu/1", first=1), record("us/1")]
    assert names(able) == ["eu/1", "eu/0", "us/0"]
    assert names(able, "us/9") == ["us/0", "us/1", "eu/0"]
    # Each first choice was counted.
    assert [r.first_choices for r in able] == [1, 2, 2, 0]


def test_a_learner_without_an_address_and_the_newcomer_itself_are_no_peers():
    own = record("eu/0")
    assert offered([own, record("eu/1", address="")], own, step=H, interval=H) == ()


@pytest.mark.parametrize(("step", "found"), [(0, []), (H - 1, []), (H, ["eu/0"])])
def test_before_the_first_interval_no_learner_has_moments_of_value(step, found):
    assert names([record("eu/0")], step=step) == found


def test_a_process_that_began_without_state_is_no_peer_for_h_steps():
    # Its moments may be of its first steps, and those of the newcomer's own old checkpoint better.
    restarted = record("eu/0")
    offered([], restarted, step=10, interval=H)
    assert names([restarted, record("us/0")], step=9 + H) == ["us/0"]
    assert names([restarted, record("us/0")], step=10 + H) == ["eu/0", "us/0"]
    # A session that continues, or a recent checkpoint, changes nothing.
    assert offered(None, restarted, step=30, interval=H) == ()
    assert names([restarted], step=31) == ["eu/0"]


@given(st.lists(st.sampled_from(["eu/1", "eu/2", "us/1", "us/2", "us/3"]), unique=True))
def test_the_order_of_the_records_does_not_matter(order):
    known = sorted(names([record(name) for name in order]))
    assert len(known) == min(MOST, len(order))
    assert names([record(name) for name in order]) == names([record(n) for n in sorted(order)])


# ---------------------------------------------------------------- the engine


def hello(job, name, *, fresh=True, checkpoint=0, address="h:1"):
    incarnation = 100 + job.engine.learners.by_name[name].incarnation
    event = ev.Hello(
        session=incarnation, learner=name, region="eu", incarnation=incarnation, fresh=fresh,
        local_step=0, checkpoint_step=checkpoint, peer_address=address,
    )  # fmt: skip
    [admit] = of(ev.Admit, job(event))
    return admit


@pytest.fixture
def job():
    """A job of global step 10 in which a and b train and can be asked."""
    job = Job("abc")
    for name in "ab":
        session = hello(job, name).session
        job.report(name, 1, session=session)
        job[name].began_at = 0
    job.engine.scheduler.step = 10
    return job


def test_a_process_that_starts_without_a_recent_checkpoint_gets_peers(job):
    assert hello(job, "c").peers == (ev.PeerAddress("a", "h:1"), ev.PeerAddress("b", "h:1"))
    assert hello(job, "c", checkpoint=5).peers == (
        ev.PeerAddress("b", "h:1"),
        ev.PeerAddress("a", "h:1"),
    )


def test_a_process_with_a_recent_checkpoint_or_that_reconnects_gets_none(job):
    assert hello(job, "c", checkpoint=6).use_checkpoint
    assert hello(job, "c", checkpoint=6).peers == ()
    assert hello(job, "c", fresh=False).peers == ()


def test_one_that_joins_is_left_out_until_it_has_reported(job):
    hello(job, "b")
    assert [p.learner for p in hello(job, "c").peers] == ["a"]


def test_one_that_hangs_is_left_out(job):
    job["a"].hangs = True
    job.engine.learners.changed()
    assert [p.learner for p in hello(job, "c").peers] == ["b"]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", True), ("[::1]:80", True), ("a-0.b.svc:65535", True), ("", False), ("a:0", False),
        ("a:65536", False), ("unix:/tmp/a", False), ("a b:80", False), (":80", False), ("a" * 300 + ":1", False),
    ],
)  # fmt: skip
def test_only_host_and_port_are_an_address(text, expected):
    assert is_address(text) is expected
    event = telemetry.joined(pb.Hello(peer_address=text), session=1, incarnation=1)
    assert event.peer_address == (text if expected else "")


def test_the_source_of_the_optimizers_state_is_shortened():
    report = pb.Report(local_step=1, steps=[1], tokens=[1], recovered_from="x" * 5000)
    event = telemetry.reported(report, session=1, learner="eu/0", fragments=1)
    assert 0 < len(event.recovered_from) < 1000
