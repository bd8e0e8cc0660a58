"""The engine in virtual time: which learners are merged, when, and what happens when learners join and leave."""

import dataclasses
import functools
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diloco.model.fragments import due
from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, LATE_HEARTBEATS, Engine
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND, START_SECONDS
from diloco_testing.properties import examples
from diloco_testing.syncers.virtual_job import VirtualJob


def spec_of(**changes):
    values = {"job": "t", "steps": 40, "fragments": 4, "interval": 4, "learners": {"eu": 4}}
    return RunSpec(**{**values, **changes})


def world_of(seconds, *, join=True, delay=lambda what: 0.0, **changes):
    learners = {f"eu/{i}": s for i, s in enumerate(seconds)}
    world = VirtualJob(spec_of(**changes), learners, delay=delay)
    if join:
        for name in learners:
            world.join(name)
    return world


def assert_audit_clean(world, *, quorum):
    """What docs/manifest.md ("Run directory") promises of events.jsonl, checked from its lines alone."""
    newest, living = {}, {}
    last = 0
    for line in map(json.loads, world.lines):
        if line["event"] == "join":
            living[line["learner"]] = line["incarnation"]
        if line["event"] != "merge":
            continue
        assert line["step"] > last
        last = line["step"]
        assert line["fragment"] == due(
            line["step"], num_fragments=world.spec.fragments, interval=world.spec.interval
        )
        assert len(line["members"]) >= quorum
        assert len({m["learner"] for m in line["members"]}) == len(line["members"])
        for m in line["members"]:
            assert m["incarnation"] == living[m["learner"]], "an old incarnation was merged"
            report = (m["learner"], m["incarnation"], line["fragment"])
            assert m["step"] > newest.get(report, -1), "merged twice"
            newest[report] = m["step"]
            expected = m["tokens"] ** 2 / m["steps"] if m["steps"] else 0.0
            assert m["weight"] == expected


def test_all_learners_at_one_speed_are_in_every_merge_and_the_job_completes():
    world = world_of([1.0] * 4)
    world.run(100)
    assert world.finished_at is not None
    assert [m["step"] for m in world.merges()] == list(range(1, 41))
    assert all(len(m["members"]) == 4 for m in world.merges()[1:])
    assert world.finished_at == pytest.approx(40.0)
    assert_audit_clean(world, quorum=1)


def test_in_steady_state_a_fragment_is_pulled_every_h_local_steps():
    world = world_of([1.0, 1.0])
    world.run(100)
    late = [m for m in world.merges() if m["step"] > 8]
    assert {member["steps"] for m in late for member in m["members"]} == {4}


def test_global_step_follows_the_fastest_learner_although_another_is_five_times_slower():
    world = world_of([1.0, 5.0], steps=100)
    world.run(1000)
    assert world.finished_at == pytest.approx(100.0, rel=0.05)
    slow = [m for m in world.merges() if any(x["learner"] == "eu/1" for x in m["members"])]
    assert len(slow) >= 15, "the slow learner still contributes about once per step of its own"
    assert_audit_clean(world, quorum=1)


def test_two_learners_half_a_step_out_of_phase_do_not_double_the_pace():
    world = world_of([1.0, 1.0], join=False, steps=60)
    world.join("eu/0")
    world.at(0.5, lambda: world.join("eu/1"))
    world.run(1000)
    assert world.finished_at == pytest.approx(60.0, rel=0.06)


def test_slow_learners_set_the_pace_when_the_fastest_is_gone():
    world = world_of([1.0, 3.0], steps=40)
    world.at(20.0, lambda: world.die("eu/0"))
    world.run(1000)
    # 20 steps at 1 per second, then 20 at 1 per 3 seconds, after at most three steps of transition.
    assert world.finished_at is not None
    assert world.finished_at < 20 + 20 * 3 + 4 * 3
    assert_audit_clean(world, quorum=1)


def test_grace_window_waits_for_a_learner_that_is_a_little_slower_but_never_over_a_step():
    def windows(grace):
        world = world_of([1.0, 1.18], steps=60, grace_max_steps=grace)
        world.run(1000)
        late = [m for m in world.merges() if m["step"] > 4]
        # One report, one merge: the slower learner can be in 1/1.18 of the merges, and is.
        full = sum(len(m["members"]) == 2 for m in late) / len(late)
        assert full == pytest.approx(1 / 1.18, abs=0.03)
        return [m["graceSeconds"] for m in late]

    with_grace = windows(1.0)
    assert 0.5 < max(with_grace) <= 1.0 + 1e-6
    assert set(windows(0.0)) == {0.0}


def test_the_syncer_waits_for_the_quorum_while_learners_train_on():
    world = world_of([1.0, 1.0], quorum=2)
    world.at(10.1, lambda: world.die("eu/1"))
    world.at(30.1, lambda: world.join("eu/1"))
    world.run(200)
    steps = [m for m in world.merges() if m["time"] <= 30.0]
    assert max(m["step"] for m in steps) == 10
    assert world.learners["eu/0"].local_step >= 29, "the survivor trained on"
    assert world.finished_at is not None
    assert_audit_clean(world, quorum=2)
    # Steps made while waiting are not saved up: the syncer does not race through the missed ones.
    assert world.finished_at > 55


def test_one_report_never_fills_a_quorum_twice():
    world = world_of([1.0, 1.0, 100.0], quorum=3, steps=5)
    world.run(350)
    assert [m["step"] for m in world.merges()] == [1, 2, 3]
    assert_audit_clean(world, quorum=3)


def test_a_member_lost_while_merging_is_left_out_and_the_round_is_tried_again():
    world = world_of([1.0, 1.0, 1.0], delay=lambda what: 0.3 if what == "merge" else 0.0)
    world.at(10.15, lambda: world.die("eu/2"))
    world.run(100)
    retried = [m for m in world.merges() if m["attempt"] > 1]
    assert [len(m["members"]) for m in retried] == [2]
    assert world.finished_at is not None
    assert_audit_clean(world, quorum=1)


def test_below_quorum_after_a_loss_the_round_goes_back_to_collecting():
    world = world_of([1.0, 1.0], quorum=2, delay=lambda what: 0.3 if what == "merge" else 0.0)
    world.at(10.15, lambda: world.die("eu/1"))
    world.at(14.0, lambda: world.join("eu/1"))
    world.run(100)
    assert world.finished_at is not None
    assert all(len(m["members"]) == 2 for m in world.merges())
    assert_audit_clean(world, quorum=2)


def test_a_member_that_drops_out_with_a_reason_is_refused_and_logged():
    engine = Engine(spec=spec_of(learners={"eu": 3}, quorum=2), epoch=1)
    names = ("eu/0", "eu/1", "eu/2")
    for session, name in enumerate(names, start=1):
        engine.handle(hello(name, session), 0.0)
    engine.handle(ev.Initialised(learner="eu/0"), 0.0)
    for session, name in enumerate(names, start=1):
        engine.handle(reported(name, session, 1, offers=frozenset()), 0.9)
    engine.handle(reported("eu/2", 3, 2), 1.0)
    engine.handle(reported("eu/0", 1, 2), 1.0)
    out = engine.handle(reported("eu/1", 2, 2), 1.0)
    pull = next(d for d in out if isinstance(d, ev.Pull))
    assert pull.learners == names
    out = engine.handle(
        ev.Dropped(learner="eu/1", round=1, attempt=1, reason="NotFinite", detail="NaN"), 1.1
    )
    assert any(isinstance(d, ev.Log) and d.fields["reason"] == "NotFinite" for d in out)
    assert not begins(engine.handle(contribution("eu/0", 1, 2), 1.2))
    out = engine.handle(contribution("eu/2", 3, 2), 1.2)
    assert [m.learner for m in begins(out)[0].contributions] == ["eu/0", "eu/2"]


def test_an_attempt_that_fails_for_all_members_is_repeated_after_longer_and_longer_pauses():
    engine, now, pulls = started(), 1.0, [1.0]
    for attempt in range(1, 14, 2):  # going back to collecting counts as well
        dropped = ev.Dropped(learner="eu/0", round=1, attempt=attempt, reason="Damaged", detail="")
        engine.handle(dropped, now)
        out = engine.handle(reported("eu/0", 1, attempt + 1), now)
        assert not [d for d in out if isinstance(d, ev.Pull)]
        now = next(d.seconds for d in reversed(out) if isinstance(d, ev.WakeAt))
        while not [d for d in engine.handle(ev.Tick(), now) if isinstance(d, ev.Pull)]:
            now += 0.01
            engine.learners.by_name["eu/0"].last_seen = now
        pulls.append(now)
    pauses = [b - a for a, b in itertools.pairwise(pulls)]
    assert all(b >= a - 0.02 for a, b in itertools.pairwise(pauses))
    assert pauses[0] < 0.2 < 2.0 < pauses[-1] <= 5.1


def hello(name, session, *, presented=0, checkpoint=0):
    return ev.Hello(
        session=session, learner=name, region="eu", incarnation=presented or session,
        fresh=not presented, local_step=0, checkpoint_step=checkpoint,
    )  # fmt: skip


def reported(name, session, local_step, *, offers=frozenset(range(4)), steps=1, tokens=10):
    return ev.Reported(
        session=session, learner=name, local_step=local_step, steps=(steps,) * 4,
        tokens=(tokens,) * 4, offers=offers, total_tokens=10 * local_step, global_step=0,
        step_seconds=1.0, sync_seconds=0.0, loss=1.0,
    )  # fmt: skip


def contribution(name, incarnation, local_step, *, round=1, attempt=1, steps=1, tokens=10):  # noqa: A002
    return Contribution(
        learner=name, incarnation=incarnation, round=round, attempt=attempt,
        local_step=local_step, steps=steps, tokens=tokens, base=(1, 0), format=1, norms=(),
    )  # fmt: skip


def started(*, tokens=10, **changes):
    """An engine with one learner that has been pulled for round 1."""
    engine = Engine(spec=spec_of(learners={"eu": 1}, **changes), epoch=1)
    engine.handle(hello("eu/0", 1), 0.0)
    engine.handle(ev.Initialised(learner="eu/0"), 0.0)
    out = engine.handle(reported("eu/0", 1, 1, tokens=tokens), 1.0)
    assert any(isinstance(d, ev.Pull) for d in out)
    return engine


def test_a_contribution_of_an_older_incarnation_is_not_merged():
    engine = started()
    assert not begins(engine.handle(contribution("eu/0", 99, 1), 1.0))
    assert begins(engine.handle(contribution("eu/0", 1, 1), 1.0))


def begins(decisions):
    return [d for d in decisions if isinstance(d, ev.BeginMerge)]


def test_a_round_waits_for_a_slow_member_while_its_upload_is_fast_enough():
    engine, now, received = started(), 1.0, 0
    for _ in range(100):
        now, received = now + 2.0, received + 2 * int(MIN_BYTES_PER_SECOND)
        progress = ev.Progress(learner="eu/0", round=1, attempt=1, received_bytes=received)
        assert not aborts(engine.handle(progress, now))
        engine.handle(ev.Heartbeat(session=1, learner="eu/0"), now)
        assert not aborts(engine.handle(ev.Tick(), now))
    out = wait_with_heartbeats(engine, now, START_SECONDS + 1)
    assert aborts(out)


def wait_with_heartbeats(engine, now, seconds):
    """Let time pass in steps of a second while the learner is connected; returns all decisions."""
    out = []
    for passed in range(1, int(seconds) + 1):
        out += engine.handle(ev.Heartbeat(session=1, learner="eu/0"), now + passed)
        out += engine.handle(ev.Tick(), now + passed)
    return out


def aborts(decisions):
    return [d for d in decisions if isinstance(d, ev.AbortMerge)]


def test_a_contribution_to_another_attempt_is_not_merged():
    engine = started()
    assert not begins(engine.handle(contribution("eu/0", 1, 1, attempt=2), 1.0))
    assert not begins(engine.handle(contribution("eu/0", 1, 1, round=2), 1.0))


def test_all_weights_zero_closes_the_round_without_a_change():
    engine = started(tokens=0)
    out = engine.handle(contribution("eu/0", 1, 1, tokens=0), 1.0)
    commit = next(d for d in out if isinstance(d, ev.Commit))
    assert not commit.changed
    assert not begins(out)
    assert engine.step == 1


def test_a_replaced_incarnation_that_joins_again_is_refused():
    engine = started()
    out = engine.handle(hello("eu/0", 2), 2.0)
    assert any(isinstance(d, ev.Close) and d.session == 1 for d in out)
    out = engine.handle(hello("eu/0", 3, presented=1), 3.0)
    close = next(d for d in out if isinstance(d, ev.Close))
    assert (close.session, close.reason) == (3, "StaleIncarnation")


def test_of_two_processes_that_start_at_once_the_older_incarnation_is_refused():
    """Incarnations are assigned concurrently: the newer may arrive first."""
    engine = started()
    engine.handle(hello("eu/0", 7), 2.0)
    out = engine.handle(hello("eu/0", 6), 2.0)
    close = next(d for d in out if isinstance(d, ev.Close))
    assert (close.session, close.reason) == (6, "StaleIncarnation")
    assert engine.learners.by_name["eu/0"].incarnation == 7


def test_a_stream_that_broke_keeps_its_incarnation():
    engine = started()
    engine.handle(ev.Left(session=1, learner="eu/0", reason="StreamEnded"), 2.0)
    out = engine.handle(hello("eu/0", 2, presented=1), 3.0)
    assert next(d for d in out if isinstance(d, ev.Admit)).incarnation == 1


def test_reports_of_a_session_that_was_replaced_do_not_count():
    engine = started()
    engine.handle(hello("eu/0", 2), 2.0)
    engine.handle(reported("eu/0", 1, 50), 2.5)
    assert engine.learners.by_name["eu/0"].local_step == 1


def test_a_silent_learner_leaves_after_three_heartbeats():
    engine = started()
    limit = 1.0 + HEARTBEAT_SECONDS * LATE_HEARTBEATS
    for now in (2.0, 4.0, 6.0, limit):
        out = engine.handle(ev.Tick(), now)
        assert not [d for d in out if isinstance(d, ev.Close)]
    out = engine.handle(ev.Tick(), limit + 0.01)
    assert [d.session for d in out if isinstance(d, ev.Close)] == [1]
    assert [d for d in out if isinstance(d, ev.AbortMerge)], "its round does not wait for it"


def test_when_the_initialiser_is_gone_the_next_learner_is_asked():
    engine = Engine(spec=spec_of(), epoch=1)
    engine.handle(hello("eu/0", 1), 0.0)
    engine.handle(hello("eu/1", 2), 0.0)
    out = engine.handle(ev.Left(session=1, learner="eu/0", reason="StreamEnded"), 1.0)
    assert [d.learner for d in out if isinstance(d, ev.RequestInitial)] == ["eu/1"]


def test_own_checkpoint_is_used_only_when_at_most_h_steps_old():
    engine = Engine(spec=spec_of(), epoch=1, start_step=20, initialised=True)
    fresh = next(
        d for d in engine.handle(hello("eu/0", 1, checkpoint=16), 0.0) if isinstance(d, ev.Admit)
    )
    stale = next(
        d for d in engine.handle(hello("eu/1", 2, checkpoint=15), 0.0) if isinstance(d, ev.Admit)
    )
    assert (fresh.use_checkpoint, stale.use_checkpoint) == (True, False)


def test_commits_are_in_order_even_when_a_later_round_is_merged_first():
    engine = started()
    engine.handle(contribution("eu/0", 1, 1), 1.0)
    engine.handle(reported("eu/0", 1, 2), 2.0)
    assert begins(engine.handle(contribution("eu/0", 1, 2, round=2), 2.0))
    later = ev.Merged(round=2, attempt=1, delta_norm=1, bytes_up=1, bytes_result=1)
    assert not [d for d in engine.handle(later, 2.1) if isinstance(d, ev.Commit)]
    first = ev.Merged(round=1, attempt=1, delta_norm=1, bytes_up=1, bytes_result=1)
    out = engine.handle(first, 2.2)
    assert [d.round for d in out if isinstance(d, ev.Commit)] == [1, 2]


def test_a_snapshot_is_taken_after_the_last_of_several_commits():
    engine = started(syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    engine.handle(ev.SnapshotDone(step=0), 1.0)
    engine.handle(contribution("eu/0", 1, 1), 1.0)
    engine.handle(reported("eu/0", 1, 2), 2.0)
    engine.handle(contribution("eu/0", 1, 2, round=2), 2.0)
    for round_ in (2, 1):
        merged = ev.Merged(round=round_, attempt=1, delta_norm=1, bytes_up=1, bytes_result=1)
        out = engine.handle(merged, 2.1)
    done = [d for d in out if isinstance(d, ev.Commit | ev.TakeSnapshot)]
    assert [type(d) for d in done] == [ev.Commit, ev.Commit, ev.TakeSnapshot]
    assert done[-1].step == engine.step == 2


def test_at_most_tau_rounds_are_in_flight():
    world = world_of([1.0] * 2, delay=lambda what: 2.5 if what == "merge" else 0.0, overlap=2)
    most = 0
    while world.finished_at is None:
        world.run(world.now + 0.25)
        world.now += 0.25
        most = max(most, len(world.engine.scheduler.in_flight))
        assert world.now < 500
    assert most == 2


def test_fewer_fragments_than_interval_steps_still_reach_t():
    world = world_of([1.0], fragments=2, interval=8, steps=21)
    world.run(100)
    assert world.engine.step == 21
    assert [m["step"] for m in world.merges()] == [4, 8, 12, 16, 20]
    assert [m["fragment"] for m in world.merges()] == [1, 0, 1, 0, 1]


def test_snapshots_are_taken_every_t_c_steps_and_never_two_at_once():
    world = world_of(
        [1.0],
        steps=40,
        syncer_checkpoint=Checkpoint(every_steps=10, keep=2),
        delay=lambda what: 3.0 if what == "snapshot" else 0.0,
    )
    world.run(100)
    taken = [d.step for _, d in world.decisions if isinstance(d, ev.TakeSnapshot)]
    assert taken == [0, 10, 20, 30, 40]


def test_a_resumed_engine_continues_and_does_not_use_a_report_of_the_epoch_before_again():
    world = world_of([1.0, 1.0])
    world.run(20.5)
    state = json.loads(json.dumps(world.engine.to_json()))
    world.run(25.5)
    engine = Engine.resume(world.spec, epoch=2, state=state)
    engine.learners.replay(map(json.loads, world.lines))
    assert engine.step == state["step"]
    member = engine.learners.by_name["eu/0"]
    assert member.used_reports.newest == 25
    assert member.local_step == 25
    out = engine.handle(hello("eu/0", 1, presented=member.incarnation), 0.0)
    assert next(d for d in out if isinstance(d, ev.Admit)).incarnation == member.incarnation


def test_restarts_are_the_last_hellos_and_outlive_the_syncer():
    world = world_of([1.0])
    for session, restarts in ((70, 2), (71, 3)):
        rejoin = dataclasses.replace(hello("eu/0", session), restarts=restarts)
        world.engine.handle(rejoin, 1.0)
        assert world.engine.learners.by_name["eu/0"].restarts == restarts
    state = json.loads(json.dumps(world.engine.to_json()))
    again = Engine.resume(world.spec, epoch=2, state=state)
    assert again.learners.by_name["eu/0"].restarts == 3


def test_a_late_joiner_gets_everything_it_needs_when_the_job_is_complete():
    world = world_of([1.0], steps=4)
    world.run(100)
    out = world.engine.handle(hello("eu/3", 77), 200.0)
    assert {type(d) for d in out} >= {ev.Admit, ev.AnnounceReady, ev.AnnounceComplete}


histories = st.lists(
    st.tuples(st.floats(0.1, 60.0), st.sampled_from(["die", "join", "blip"]), st.integers(0, 3)),
    max_size=25,
)


@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(
    history=histories,
    quorum=st.integers(1, 3),
    overlap=st.integers(1, 3),
    grace=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**16),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 1.18, 3.0]), min_size=4, max_size=4),
)
def test_any_history_merges_a_report_at_most_once_and_never_below_quorum(
    history, quorum, overlap, grace, seed, speeds
):
    rng = random.Random(seed)
    spec = {"quorum": quorum, "overlap": overlap, "grace_max_steps": grace, "steps": 60}
    world = world_of(speeds, delay=lambda what: rng.choice([0.0, 0.05, 0.4, 1.7]), **spec)

    def blip(name):
        if world.learners[name].alive:
            world.die(name)
            world.join(name, reconnect=True)

    for when, what, who in history:
        name = f"eu/{who}"
        action = {
            "die": lambda n=name: world.die(n),
            "join": lambda n=name: world.join(n),
            "blip": lambda n=name: blip(n),
        }[what]
        world.at(when, action)
    for who in range(4):  # whatever happened, in the end everyone is there
        world.at(61.0, lambda n=f"eu/{who}": world.join(n))
    world.run(5000.0)
    assert_audit_clean(world, quorum=quorum)
    assert world.finished_at is not None, "the job completes once enough learners are back"
    assert world.engine.step == 60


def test_virtual_time_without_delays_equals_plain_training():
    """One learner, outer lr 1, no momentum, fp32: the syncer returns what it received."""
    rng = np.random.default_rng(3)
    initial = [rng.standard_normal(64).astype(np.float32) for _ in range(4)]
    target = [rng.standard_normal(64).astype(np.float32) for _ in range(4)]

    def gradient_step(theta):
        for p in range(4):
            theta[p] -= np.float32(0.05) * (theta[p] - target[p])

    def merge(theta, thetas, weights):
        assert len(thetas) == len(weights) == 1
        delta = theta - thetas[0]
        return theta - np.float32(1.0) * delta

    spec = spec_of(outer_learning_rate=1.0, outer_momentum=0.0, wire_up="FP32", wire_down="FP32",
                   learners={"eu": 1})  # fmt: skip
    world = VirtualJob(
        spec, {"eu/0": 1.0}, initial=initial, train=lambda me: gradient_step(me.theta), merge=merge
    )
    world.join("eu/0")
    world.run(100)
    plain = [a.copy() for a in initial]
    for _ in range(40):
        gradient_step(plain)
    assert world.finished_at is not None
    assert len(world.merges()) == 40
    for p in range(4):
        scale = np.maximum(np.abs(plain[p]), np.abs(initial[p]))
        mine = world.learners["eu/0"].theta[p]
        assert np.all(np.abs(mine - plain[p]) <= 10 * np.spacing(scale.astype(np.float32)))


def paced(lengths, *, seconds=(1.0, 1.0, 0.05), **changes):
    """Global steps between 5 s and 105 s of a job with P = 1 and H = 50; a step of 0.05 s is 20 times as fast."""
    world = world_of(list(seconds), steps=5000, fragments=1, interval=50, overlap=1, **changes)
    world.lengths = lengths
    world.run(5.0)  # who reports first is alone until then
    before = world.engine.step
    world.run(105.0)
    return world.engine.step - before


@functools.cache
def honest_pace(learners):
    """Global steps of that many learners of one speed that upload what they have learned."""
    return paced({}, seconds=(1.0,) * learners)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 0.05), (1.0, 0.05)])
def test_the_fastest_learner_sets_the_pace_from_its_first_merge_on(seconds):
    first_round = 50
    assert paced({}, seconds=seconds) > (100 - first_round) / 0.05


@pytest.mark.parametrize(
    ("seconds", "length"),
    [
        *(((1.0, 1.0, 0.05), length) for length in (0.0, 1e-13, 0.05)),
        *(((1.0, 1.0, 1.0, 0.05, 0.05), length) for length in (0.0, 1e-13, 0.05)),
        *(((1.0, 0.05), length) for length in (0.0, 1e-13)),  # of two, any length confirms
    ],
)
def test_a07_a_learner_whose_uploads_do_not_confirm_its_steps_does_not_accelerate_the_job(
    seconds, length
):
    # defect a07: it reports 20 times as often as the others, and uploads next to nothing
    claiming = {f"eu/{i}": length for i, s in enumerate(seconds) if s < 1}
    honest = honest_pace(len(seconds))
    assert honest <= paced(claiming, seconds=seconds) <= 1.05 * honest


def test_a_job_continues_although_no_upload_confirms_its_steps():
    assert paced(dict.fromkeys(("eu/0", "eu/1", "eu/2"), 0.0), seconds=(1.0, 1.0, 1.0)) > 30


def test_a_false_step_duration_does_not_shrink_the_grace_window_of_the_others():
    def late_merges(stated):
        world = world_of([1.0, 1.18, 1.0], steps=60)
        misbehaving = world.learners["eu/2"]
        original = world._send

        def send(event, learner, what):
            if learner is misbehaving and isinstance(event, ev.Reported):
                event = dataclasses.replace(event, step_seconds=stated)
            original(event, learner, what)

        world._send = send
        world.run(1000)
        late = [m for m in world.merges() if m["step"] > 4]
        return sum(any(x["learner"] == "eu/1" for x in m["members"]) for m in late) / len(late)

    assert late_merges(1e-9) == late_merges(1.0) > 0.8
