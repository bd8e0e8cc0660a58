"""The pods of a learner as one unit: agents in virtual time, whose processes form one collective."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_agent.policy import (
    ExitContainer,
    Exited,
    Kill,
    Limits,
    Policy,
    Role,
    Start,
    State,
    StopRequested,
    Terminate,
    Tick,
)
from diloco_agent.unit import FOLLOW_SECONDS, LOST_SECONDS, SETTLE_SECONDS, Follower, Leader, Report
from diloco_testing.properties import examples

TURN = 0.25
BROKEN = "Connection closed by peer"
BACK_SECONDS = LOST_SECONDS + FOLLOW_SECONDS + 2 * SETTLE_SECONDS
"""After any incident all ranks run again by then, if their pods are there."""


@dataclass
class Pod:
    """A pod of the learner: its agent, and its process as the collective leaves it."""

    rank: int
    policy: Policy
    running: str = ""
    """The run that its process executes."""
    breaks_at: float | None = None
    """When it notices that the collective is broken; None: it is whole, or the process hangs."""
    exit: tuple[float, int] | None = None
    """When its process exits, and with what code."""
    silent_until: float = 0.0
    """Its node is cut off until then."""
    ended: ExitContainer | None = None
    starts: list[str] = field(default_factory=list)


def _exited(code):
    """Exit code 0 is that of a complete job."""
    left = "Complete" if code == 0 else ""
    return Exited(code=code, last_line=BROKEN if code == 1 else "", left=left)


class Learner:
    """All pods of one learner; `delays` is how long each process takes to notice a lost rank."""

    def __init__(self, size=2, limit=None, delays=None, **limits):
        self.limits = Limits(leave_seconds=55, learner_restarts=limit, **limits)
        self.delays = delays or [0.3] * size
        self.now, self.size = 0.0, size
        self._boots = itertools.count()
        self.pods = [self.make(rank) for rank in range(size)]

    def make(self, rank):
        boot = f"b{next(self._boots)}"
        unit = Follower(boot=boot, rank=rank) if rank else Leader(boot=boot, size=self.size)
        return Pod(rank, Policy(role=Role.LEARNER, name="eu/0", limits=self.limits, unit=unit))

    @property
    def crashes(self):
        return self.pods[0].policy.crashes

    @property
    def whole(self):
        """All ranks execute one run."""
        runs = {pod.running for pod in self.pods}
        return len(runs) == 1 and "" not in runs and all(
            pod.policy.state is State.RUNNING for pod in self.pods
        )  # fmt: skip

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.turn()

    def until_whole(self, seconds=BACK_SECONDS):
        end = self.now + seconds
        while not self.whole:
            assert self.now < end, [(p.policy.state, p.policy.message) for p in self.pods]
            self.turn()

    def turn(self):
        self.now = round(self.now + TURN, 6)
        for pod in self.pods:
            if pod.ended is None:
                self.events(pod)
        self.exchange()
        self.collective()

    def events(self, pod):
        if pod.exit is not None and pod.exit[0] <= self.now:
            code, pod.exit, pod.running, pod.breaks_at = pod.exit[1], None, "", None
            self.handle(pod, _exited(code))
        self.handle(pod, Tick())

    def handle(self, pod, event):
        for decision in pod.policy.handle(event, self.now):
            match decision:
                case Start():
                    unit = pod.policy.unit
                    pod.running = unit.running
                    pod.starts.append(unit.running)
                    pod.exit = pod.breaks_at = None
                case Terminate():
                    pass  # a rank in a broken collective ignores SIGTERM, or cannot act on it
                case Kill():
                    pod.exit = (self.now, -9)
                case ExitContainer():
                    pod.ended, pod.running = decision, ""

    def exchange(self):
        leader = self.pods[0]
        for pod in self.pods[1:]:
            cut = max(pod.silent_until, leader.silent_until) > self.now
            if not cut and pod.ended is None and leader.ended is None:
                pod.policy.unit.ready_to_start = pod.policy.waits
                report = Report.of(pod.policy.unit.report.to_json())
                leader.policy.unit.receive_report(report, self.now)
                pod.policy.unit.receive_order(leader.policy.unit.order(pod.rank), self.now)

    def collective(self):
        """A process whose run lacks a rank notices after its delay, unless that is None: it hangs."""
        for pod in self.pods:
            lacks = any(other.running != pod.running for other in self.pods)
            young = any(other.starts[-1:] != [pod.running] for other in self.pods)
            if pod.running and lacks and not young and pod.breaks_at is None:
                delay = self.delays[pod.rank]
                pod.breaks_at = float("inf") if delay is None else self.now + delay
            if pod.breaks_at is not None and pod.breaks_at <= self.now and pod.exit is None:
                pod.exit = (self.now, 1)

    def exits(self, rank, code):
        if self.pods[rank].running:
            self.pods[rank].exit = (self.now, code)

    def replace(self, rank):
        """The pod is gone at once, and another takes its place."""
        self.pods[rank] = self.make(rank)


def trained(size=2, **how):
    learner = Learner(size, **how)
    learner.until_whole()
    learner.run(10)
    assert learner.whole
    return learner


def test_no_rank_starts_before_every_pod_reports():
    learner = Learner(3)
    learner.pods[2].silent_until = 100.0
    learner.run(99)
    assert [pod.starts for pod in learner.pods] == [[], [], []]
    assert (
        learner.pods[0].policy.message
        == "waiting for the other pods of its learner: rank 2 does not report"
    )
    learner.until_whole()
    assert {len(pod.starts) for pod in learner.pods} == {1}


delays = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))


@settings(max_examples=examples(40))
@given(rank=st.integers(0, 3), delays=st.lists(delays, min_size=4, max_size=4), early=st.booleans())
def test_a_crash_of_one_rank_is_one_fault_in_whatever_order_the_others_exit(rank, delays, early):
    learner = trained(4, delays=delays)
    learner.exits(rank, 1)
    if early:
        for pod in learner.pods:
            pod.exit = pod.exit or (learner.now, 1)
    learner.run(BACK_SECONDS)
    learner.until_whole()
    assert learner.crashes == 1
    assert {len(pod.starts) for pod in learner.pods} == {2}
    assert not any(pod.ended for pod in learner.pods)


@settings(max_examples=examples(40))
@given(rank=st.integers(0, 3), delays=st.lists(delays, min_size=4, max_size=4))
def test_a_kill_from_outside_is_not_a_fault_in_whatever_order_the_others_exit(rank, delays):
    learner = trained(4, delays=delays, limit=0)
    learner.exits(rank, -9)
    learner.run(BACK_SECONDS)
    learner.until_whole()
    assert learner.crashes == 0
    assert {len(pod.starts) for pod in learner.pods} == {2}


@pytest.mark.parametrize(("code", "crashes"), [(75, 0), (1, 1)])
def test_a_syncer_that_is_unavailable_is_not_a_fault_of_the_learner(code, crashes):
    learner = trained(2, limit=1)
    learner.exits(0, code)
    learner.run(BACK_SECONDS)
    learner.until_whole()
    assert learner.crashes == crashes
    assert {len(pod.starts) for pod in learner.pods} == {2}


@settings(max_examples=examples(40))
@given(rank=st.integers(0, 3), delays=st.lists(delays, min_size=4, max_size=4))
def test_a_replaced_pod_restarts_the_whole_learner_and_does_not_count_as_a_fault(rank, delays):
    learner = trained(4, delays=delays, limit=0)
    learner.replace(rank)
    learner.run(BACK_SECONDS)
    learner.until_whole()
    assert learner.crashes == 0
    runs = {pod.starts[-1] for pod in learner.pods}
    assert len(runs) == 1


@settings(max_examples=examples(40))
@given(
    order=st.permutations(range(4)),
    pauses=st.lists(st.sampled_from([0.0, 1.0, 5.0, 20.0, 120.0]), min_size=4, max_size=4),
    delays=st.lists(delays, min_size=4, max_size=4),
)
def test_pods_replaced_in_any_order_and_at_any_pace_never_count(order, pauses, delays):
    """As a routine image change by a controller that replaces pod after pod."""
    learner = trained(4, delays=delays, limit=0)
    for rank, pause in zip(order, pauses, strict=True):
        learner.replace(rank)
        learner.run(pause)
    learner.until_whole()
    assert learner.crashes == 0
    assert not any(pod.ended for pod in learner.pods)


def test_a_peer_that_is_preempted_again_and_again_never_fails_the_learner():
    learner = trained(2, limit=3)
    for _ in range(10):
        learner.replace(1)
        learner.until_whole()
        learner.run(70)
    assert learner.crashes == 0
    assert learner.whole


@pytest.mark.parametrize("rank", [0, 1])
def test_the_restart_limit_counts_incidents_of_the_learner(rank):
    learner = trained(2, limit=2)
    for count in (1, 2):
        learner.exits(rank, 1)
        learner.run(1)
        learner.until_whole()
        assert learner.crashes == count
    learner.exits(rank, 1)
    learner.run(BACK_SECONDS)
    ended = learner.pods[0].ended
    assert ended is not None
    assert ended.reason == "RestartLimit"
    assert ended.message.startswith("learner eu/0 crashed 3 times")
    assert BROKEN in ended.message
    assert learner.pods[1].ended is None, "one pod reports it"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_that_never_joins_fails_whichever_of_its_ranks_crashes(rank):
    learner = trained(2, crash_loop_exits=3, never_joined_seconds=0)
    for _ in range(3):
        assert learner.pods[0].ended is None
        learner.exits(rank, 1)
        learner.run(BACK_SECONDS)
    ended = learner.pods[0].ended
    assert ended is not None
    assert ended.reason == "NeverJoined"
    assert ended.message.startswith("learner eu/0 ended 3 times and never joined the job")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_hang_are_ended_by_a_decision_when_a_pod_is_lost(rank):
    learner = trained(3, delays=[None, None, None])
    lost_at = learner.now
    learner.pods[rank].silent_until = float("inf")
    others = [pod for pod in learner.pods if pod.rank != rank]
    while any(pod.running for pod in others):
        learner.turn()
        assert learner.now - lost_at < LOST_SECONDS + FOLLOW_SECONDS + 2
    learner.replace(rank)
    learner.until_whole()
    assert learner.crashes == 0


def test_a_pod_that_is_stopped_ends_the_run_before_its_process_is_gone():
    learner = trained(2)
    learner.handle(learner.pods[1], StopRequested())
    assert learner.pods[1].policy.state is State.TERMINATING
    learner.run(2 * TURN)
    leader = learner.pods[0].policy
    assert leader.state is State.RESTARTING
    assert (
        leader.message == "restarting with the other pods of its learner: rank 1 is being stopped"
    )
    # Both processes still run: rank 0 has the time to leave and to write its checkpoint.
    learner.run(FOLLOW_SECONDS + 5)
    assert learner.pods[0].running
    learner.exits(0, 0)
    learner.exits(1, 0)
    learner.turn()
    assert learner.pods[1].ended is not None
    learner.replace(1)
    learner.until_whole()
    assert learner.crashes == 0


def test_a_stopped_leader_ends_the_processes_of_the_others():
    learner = trained(2)
    learner.handle(learner.pods[0], StopRequested())
    learner.run(2 * TURN)
    assert learner.pods[1].policy.state is State.RESTARTING
    learner.exits(0, 0)
    learner.turn()
    learner.run(FOLLOW_SECONDS + 1)
    assert not learner.pods[1].running


def test_a_finished_learner_stays_finished_until_its_steps_may_be_raised():
    learner = trained(2, done_seconds=300.0, delays=[None, None])
    learner.exits(0, 0)
    learner.exits(1, 0)
    learner.run(290)
    assert [len(pod.starts) for pod in learner.pods] == [1, 1]
    assert learner.pods[0].policy.message == "done"
    learner.until_whole(60)
    assert learner.crashes == 0


def test_a_rank_that_fails_while_the_others_are_done_counts_nothing():
    learner = trained(2, delays=[None, None])
    learner.exits(0, 0)
    learner.run(2)
    learner.exits(1, 1)
    learner.run(60)
    assert learner.crashes == 0
    assert learner.pods[0].policy.message == "done"


@settings(max_examples=examples(40))
@given(steps=st.lists(
    st.tuples(
        st.sampled_from(["exit", "kill", "replace", "cut"]), st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 2.0, 10.0, 60.0]),
    ), max_size=8,
))  # fmt: skip
def test_after_any_faults_the_learner_comes_back_with_at_most_one_fault_for_each_crash(steps):
    learner = trained(3)
    for what, rank, pause in steps:
        match what:
            case "exit":
                learner.exits(rank, 1)
            case "kill":
                learner.exits(rank, -9)
            case "replace":
                learner.replace(rank)
            case "cut":
                learner.pods[rank].silent_until = learner.now + 20.0
        learner.run(pause)
    learner.run(BACK_SECONDS + 65)
    learner.until_whole(60 + BACK_SECONDS)
    assert learner.crashes <= sum(what == "exit" for what, _, _ in steps)


def test_a_report_survives_its_way_as_json():
    report = Follower(boot="b", rank=3).report
    assert Report.of(report.to_json()) == report


@pytest.mark.parametrize("data", [None, [], {}, {"rank": "x"}, 5])
def test_what_is_not_a_report_is_refused(data):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Report.of(data)
