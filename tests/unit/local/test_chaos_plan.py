"""The plan of faults and its schedule: what a seed determines, and how much is disturbed at once."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco_local.chaos.fault_plan import MAX_RATE, RATES, Options, lines, plan
from diloco_local.chaos.fault_schedule import Begin, End, Schedule, Skip
from diloco_local.faults import SYNCER, SYNCER_KINDS, Fault, Kind

rates = st.dictionaries(st.sampled_from(list(Kind)), st.floats(0, MAX_RATE))


@st.composite
def jobs(draw):
    learners = [f"eu/{index}" for index in range(draw(st.integers(1, 6)))]
    options = Options(
        seed=draw(st.integers(0, 1 << 40)), rates=draw(rates), spare=draw(st.integers(0, len(learners) - 1)),
        longest_seconds=draw(st.floats(1, 100)), minutes=draw(st.floats(0, 10)),
    )  # fmt: skip
    return learners, options


@given(jobs())
def test_a_plan_keeps_its_order_its_horizon_and_the_spared_learners(job):
    learners, options = job
    faults = plan(options, learners)
    assert faults == plan(options, learners)
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert list(faults) == sorted(faults, key=lambda fault: fault.at)
    for fault in faults:
        assert options.rates[fault.kind] > 0
        assert 0 <= fault.at < fault.until <= 60 * options.minutes
        assert (fault.target == SYNCER) is (fault.kind in SYNCER_KINDS)
        active = [other for other in faults if other.at <= fault.at < other.until]
        targets = [other.target for other in active]
        assert len(targets) == len(set(targets)), "a target has one fault at a time"
        assert len(set(targets) - {SYNCER}) <= len(learners) - options.spare


@given(jobs(), st.floats(0, 1))
def test_a_longer_plan_begins_with_the_same_faults(job, part):
    learners, options = job
    longer = plan(options, learners)
    shorter = plan(dataclasses.replace(options, minutes=options.minutes * part), learners)
    horizon = 60 * (options.minutes * part)
    expected = [
        dataclasses.replace(fault, until=min(fault.until, horizon))
        for fault in longer
        if fault.at < horizon
    ]
    assert list(shorter) == expected


def test_seeds_differ_and_the_faults_of_a_kind_do_not_depend_on_other_rates():
    learners = ["eu/0", "eu/1", "us/0", "us/1"]
    assert plan(Options(seed=1), learners) != plan(Options(seed=2), learners)
    alone = plan(Options(rates={Kind.CUT: RATES[Kind.CUT]}, spare=0), learners[:1] * 1)
    times = [fault.at for fault in plan(Options(spare=0), learners) if fault.kind is Kind.CUT]
    assert alone[0].at == pytest.approx(times[0])


def test_the_defaults_have_every_kind_and_about_as_many_faults_as_their_rates():
    faults = plan(Options(minutes=600), [f"eu/{index}" for index in range(8)])
    assert {fault.kind for fault in faults} == set(RATES) == set(Kind) - {Kind.DELETE}
    for kind, rate in RATES.items():
        count = sum(fault.kind is kind for fault in faults)
        assert count == pytest.approx(600 * rate, rel=0.35)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {Kind.KILL: -1.0}}, "--kill-rate -1: expected a number from 0 to 60"),
        ({"rates": {Kind.SYNCER_KILL: math.inf}}, "--syncer-kill-rate inf: expected"),
        ({"rates": {Kind.PAUSE: math.nan}}, "--pause-rate nan: expected"),
        ({"rates": {Kind.CUT: 61.0}}, "--cut-rate 61: expected"),
        ({"longest_seconds": 0.5}, "--longest 0.5: expected a number from 1"),
        ({"minutes": math.inf}, "--minutes inf: expected"),
        ({"spare": 5}, "--spare 5: expected a number of learners from 0 to 4"),
        ({"spare": 4}, "--spare 4: leaves none of the 4 learners for kill; give at most --spare 3"),
    ],
)
def test_options_out_of_bounds_are_refused_with_what_was_expected(change, message):
    with pytest.raises(ConfigError) as refused:
        Options(**change).check(4)
    assert message in str(refused.value)


def test_a_plan_of_the_syncer_alone_may_spare_all_learners():
    options = Options(rates={Kind.SYNCER_KILL: 1.0}, spare=4)
    options.check(4)
    assert plan(options, ["eu/0", "eu/1", "us/0", "us/1"])


def test_the_text_of_a_plan_has_one_line_per_fault():
    options = Options(seed=3, minutes=10)
    faults = plan(options, ["eu/0", "us/0"])
    first, *others = lines(faults, options, 2)
    assert (
        first
        == f"seed 3: {len(faults)} faults in 10 min of training, of at most 1 of 2 learners at once"
    )
    assert len(others) == len(faults)


# ---------------------------------------------------------------------------------- schedule


def fault(number, kind, target, at, until, amount=0.0):
    return Fault(number=number, kind=kind, target=target, at=at, until=until, amount=amount)


ALL = {"eu/0", "eu/1", "us/0"}


@given(jobs(), st.lists(st.tuples(st.floats(0, 50), st.sets(st.integers(0, 5))), max_size=30))
def test_whatever_trains_no_more_is_disturbed_than_allowed_and_every_fault_ends(job, turns):
    learners, options = job
    schedule, now = Schedule.of(plan(options, learners), spare=options.spare), 0.0
    begun, ended = [], []
    for seconds, places in turns:
        now += seconds
        training = {learners[place] for place in places if place < len(learners)}
        for decision in schedule.step(now, training=training, serves=True):
            if isinstance(decision, Begin):
                begun.append(decision.fault)
                assert decision.fault.target in training | {SYNCER}
                if decision.fault.target != SYNCER:
                    disturbed = {active.target for active in schedule.active}
                    assert len(training - disturbed) >= options.spare
            elif isinstance(decision, End):
                ended.append(decision.fault)
        assert all(active.until > now for active in schedule.active)
    ended += [decision.fault for decision in schedule.close()]
    assert sorted(f.number for f in begun) == sorted(f.number for f in ended)
    assert schedule.stopped(0.0) == frozenset()
    assert [schedule.link_fault(name) for name in learners] == [None] * len(learners)
    assert schedule.step(1e9, training=set(learners), serves=True) == []


def test_a_fault_that_would_disturb_too_much_is_skipped_with_the_reason():
    schedule = Schedule.of(
        [
            fault(1, Kind.PAUSE, "eu/0", 1, 9),
            fault(2, Kind.CUT, "eu/1", 2, 9),
            fault(3, Kind.KILL, "us/0", 3, 9),
            fault(4, Kind.SYNCER_KILL, SYNCER, 4, 9),
            fault(5, Kind.CUT, "eu/1", 5, 6),
        ],
        spare=2,
    )
    assert [type(d) for d in schedule.step(1, training=ALL, serves=True)] == [Begin]
    [skip] = schedule.step(2, training=ALL, serves=True)
    assert skip.reason == "only 1 other learners train undisturbed, and 2 are spared"
    [skip] = schedule.step(3, training={"eu/0", "eu/1"}, serves=True)
    assert skip.reason == "us/0 does not train"
    [skip] = schedule.step(4, training=ALL, serves=False)
    assert skip.reason == "the syncer does not serve"
    end, skip = schedule.step(20, training=ALL, serves=True)
    assert (type(end), type(skip)) == (End, Skip)
    assert skip.reason == "its time was over before it could begin"


def test_the_target_of_a_fault_that_is_withdrawn_counts_as_undisturbed():
    schedule = Schedule.of([fault(n, Kind.PAUSE, "eu/0", n, 9) for n in (1, 2, 3)], spare=2)
    [begin] = schedule.step(1, training=ALL, serves=True)
    [skip] = schedule.step(2, training=ALL, serves=True)
    assert skip.reason == "eu/0 is still disturbed"
    schedule.withdraw(begin.fault)
    assert schedule.stopped(0.0) == frozenset()
    assert [type(d) for d in schedule.step(3, training=ALL, serves=True)] == [Begin]
    assert [end.fault.number for end in schedule.close()] == [3]


def test_a_slow_learner_is_stopped_at_the_beginning_of_each_second_and_a_paused_one_always():
    faults = [fault(1, Kind.SLOW, "eu/0", 0, 9, amount=0.7), fault(2, Kind.PAUSE, "eu/1", 0, 9)]
    schedule = Schedule.of(faults, spare=1)
    schedule.step(0, training=ALL, serves=True)
    assert schedule.stopped(0.0) == schedule.stopped(0.69) == {"eu/0", "eu/1"}
    assert schedule.stopped(0.71) == {"eu/1"}
