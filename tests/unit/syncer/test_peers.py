"""Which learners a new process may ask for the state of its optimizers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ProtocolError
from diloco.rpc.peer_address import is_address
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.core.learners import Ejection, LearnerRecord, LearnerRecords
from diloco_syncer.core.peers import MOST, offered
from diloco_syncer.rpc import status, telemetry
from diloco_testing.syncers.engine_job import Job, of

H = 4


REPORT = ev.Reported(
    session=1, learner="", local_step=1, steps=(), tokens=(), offers=frozenset(), total_tokens=1, global_step=1,
    step_seconds=1.0, sync_seconds=0.0, loss=None,
)  # fmt: skip


def record(name: str, *, address: str = "h:1", first: int = 0, **changes) -> LearnerRecord:
    """A learner that trains."""
    values = {"session": 1, "report": REPORT, **changes}
    return LearnerRecord(
        name=name, region=name[:2], peer_address=address, first_choices=first, **values
    )


def joining(name: str, first_peer: str) -> LearnerRecord:
    """A learner that was to ask this one first, and does not train yet."""
    return record(name, address="", report=None, first_peer=first_peer)


def choose(records, newcomer, *, step=H):
    known = LearnerRecords({r.name: r for r in records})
    return [p.learner for p in offered(known, newcomer, step=step, interval=H)]


def names(records, newcomer="eu/9", *, step=H, **changes):
    return choose(records, record(newcomer, report=None, **changes), step=step)


def test_those_of_the_same_region_come_first_then_those_that_were_chosen_least():
    able = [record("us/0"), record("eu/0", first=2), record("eu/1", first=1), record("us/1")]
    assert names(able) == ["eu/1", "eu/0", "us/0"]
    assert names(able, "us/9") == ["us/0", "us/1", "eu/0"]
    # Each first choice was counted.
    assert [r.first_choices for r in able] == [1, 2, 2, 0]


def test_a_learner_without_an_address_and_the_newcomer_itself_are_no_peers():
    own = record("eu/0")
    assert choose([own, record("eu/1", address="")], own) == []


def test_one_that_others_ask_now_comes_after_those_that_none_asks():
    able = [record("eu/0"), record("eu/1", first=5)]
    assert names([*able, joining("us/0", "eu/0")]) == ["eu/1", "eu/0"]
    both = [joining("us/0", "eu/0"), joining("us/1", "eu/1")]
    assert names([*able, *both]) == ["eu/0", "eu/1"]
    # The region still comes first, and one that trains or is gone asks no more.
    assert names([record("us/5"), record("eu/0"), joining("us/0", "eu/0")]) == ["eu/0", "us/5"]
    asked_before = [
        record("us/0", address="", first_peer="eu/0"),
        record("us/1", session=None, report=None, first_peer="eu/0"),
    ]
    assert names([record("eu/0"), record("eu/1", first=9), *asked_before]) == ["eu/0", "eu/1"]


def test_the_next_newcomer_gets_another_first_peer_while_the_one_before_it_waits():
    able = [record("eu/0"), record("eu/1")]
    first = record("eu/8", address="", report=None)
    assert choose([*able, first], first) == ["eu/0", "eu/1"]
    assert first.first_peer == "eu/0"
    able[0].first_choices = 0
    assert names([*able, first]) == ["eu/1", "eu/0"]


def test_a_learner_of_another_cluster_is_no_peer():
    able = [
        record("eu/0", cluster="east"),
        record("eu/1", cluster="west"),
        record("us/0", cluster="east"),
    ]
    assert names(able, cluster="east") == ["eu/0", "us/0"]
    assert names(able, cluster="west") == ["eu/1"]
    assert names(able) == []


def test_one_that_is_not_healthy_is_no_peer_even_if_no_other_is_left():
    ejected = record("eu/1", ejection=Ejection(reason="Slow", probe_at=0.0, failed_at=0.0))
    gone, silent = record("eu/2", session=None), record("eu/3", report=None)
    # If every learner hangs, they count for the quorum, but not as peers.
    assert names([record("eu/0", hangs=True), ejected, gone, silent]) == []


@pytest.mark.parametrize(("step", "found"), [(0, []), (H - 1, []), (H, ["eu/0"])])
def test_before_the_first_interval_no_learner_has_moments_of_value(step, found):
    assert names([record("eu/0")], step=step) == found


def test_a_process_that_began_without_state_is_no_peer_for_h_steps():
    # Its moments may be of its first steps, and those of the newcomer's own old checkpoint better.
    restarted = record("eu/0")
    choose([], restarted, step=10)
    assert names([restarted, record("us/0")], step=9 + H) == ["us/0"]
    assert names([restarted, record("us/0")], step=10 + H) == ["eu/0", "us/0"]
    # A session that continues, or a recent checkpoint, changes nothing.
    assert offered(None, restarted, step=30, interval=H) == ()
    assert names([restarted], step=31) == ["eu/0"]


def test_a_restart_of_the_syncer_knows_which_process_began_without_state():
    restarted = record("eu/0")
    choose([], restarted, step=10)
    found = LearnerRecords.from_json(LearnerRecords({"eu/0": restarted}).to_json())
    assert found.by_name["eu/0"].began_at == 10


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


STATED = {
    "source": "Peer", "peer": "eu/1", "step": 8, "age": 2, "bytes": 1 << 30, "seconds": 1.25, "problem": "",
}  # fmt: skip


def recovery_of(**changes):
    message = pb.LearnerMessage(recovery=pb.Recovery(**{**STATED, **changes}))
    return telemetry.received(message.SerializeToString(), session=1, learner="eu/0", fragments=100)


def test_texts_of_a_recovery_are_shortened_and_its_seconds_are_numbers():
    event = recovery_of(peer="x" * 1000, problem="y\x1b" * 1000, seconds=float("nan"))
    assert 0 < len(event.peer) < 200
    assert 0 < len(event.problem) <= 1000
    assert "\x1b" not in event.problem
    assert event.seconds == 0.0


@pytest.mark.parametrize(
    "changes", [{"source": "Other"}, {"step": 1 << 50}, {"age": 1 << 50}, {"bytes": 1 << 60}]
)
def test_a_recovery_beyond_a_bound_is_refused(changes):
    with pytest.raises(ProtocolError, match="recovery"):
        recovery_of(**changes)


def test_a_recovery_is_one_line_for_each_incarnation_with_what_the_process_stated(job):
    admit = hello(job, "c")
    event = dataclasses.replace(recovery_of(), session=admit.session, learner="c")
    [line] = of(ev.Log, job(event))
    assert (line.event, line.fields) == ("recovery", {
        "learner": "c", "incarnation": admit.incarnation, "step": 10, "source": "Peer", "peer": "eu/1",
        "stateStep": 8, "age": 2, "bytes": 1 << 30, "seconds": 1.25, "problem": "",
    })  # fmt: skip
    assert of(ev.Log, job(event)) == [], "repeated in the same session"
    session = hello(job, "c", fresh=False).session
    assert of(ev.Log, job(dataclasses.replace(event, session=session))) == [], (
        "repeated after a reconnect"
    )
    assert job["c"].recovery == event
    again = hello(job, "c")
    assert job["c"].recovery is None
    assert of(ev.Log, job(event)) == [], "of the session that was replaced"
    assert of(ev.Log, job(dataclasses.replace(event, session=again.session)))


def test_the_status_of_a_learner_shows_its_recovery(job):
    admit = hello(job, "c")
    assert not status.learner_status(job.engine, job["c"], 0.0).HasField("recovery")
    job(dataclasses.replace(recovery_of(), session=admit.session, learner="c"))
    assert status.learner_status(job.engine, job["c"], 0.0).recovery == pb.Recovery(**STATED)
