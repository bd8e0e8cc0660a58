"""The engine of a replay: what it waits for, and what it never does by itself."""

from dataclasses import replace

import pytest

from diloco.journal.replay import Peer, plan_of
from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.replay import ReplayEngine
from diloco_syncer.core.rounds import RETRY_SECONDS
from diloco_testing.local.tapes import initialised, member, merge, process, start, tapes

SPEC = RunSpec(job="j", steps=3, fragments=2, interval=3, overlap=2, quorum=1, learners={"eu": 1, "us": 1})  # fmt: skip
EVENTS = [
    start(steps=3),
    initialised("us/0"),
    merge(1, member("eu/0", 2), clock={"eu/0": 2, "us/0": 1}),
    merge(2, member("eu/0", 4), member("us/0", 3)),
    merge(3, member("us/0", 4, base=1)),
]
TAPES = tapes(
    eu_0=process("eu/0", 6, results={3: [(1, 1)], 5: [(0, 2)]}),
    us_0=process("us/0", 5, results={3: [(1, 1)], 5: [(0, 2)]}),
)


class Driven:
    """A replay engine with two learners, driven by hand."""

    def __init__(self, *, learners=("eu/0", "us/0"), initial=True, plan=None, spec=SPEC):
        plan = plan or plan_of(EVENTS, TAPES, feedback=False)
        self.engine = ReplayEngine.of(spec, plan)
        self.now, self.decisions = 0.0, []
        for number, name in enumerate(learners, 1):
            self.hello(name, number)
        if initial:
            self.handle(ev.Initialised(learner="us/0"))

    def handle(self, event, seconds=0.1):
        self.now += seconds
        found = self.engine.handle(event, self.now)
        self.decisions += found
        return found

    def hello(self, name, number, *, restarts=0, fresh=True):
        return self.handle(ev.Hello(
            session=number, learner=name, region=name[:2], incarnation=number, fresh=fresh, local_step=0,
            checkpoint_step=0, restarts=restarts,
        ))  # fmt: skip

    def report(self, name, local_step):
        session = self.engine.learners.by_name[name].session
        return self.handle(ev.Reported(
            session=session, learner=name, local_step=local_step, steps=(1, 1), tokens=(8, 8),
            offers=frozenset(), total_tokens=8 * local_step, global_step=0, step_seconds=0.1, sync_seconds=0.0,
            loss=None,
        ))  # fmt: skip

    def contribute(self, pull, name, local_step, base=(1, 0)):
        number = self.engine.learners.by_name[name].incarnation
        return self.handle(Contribution(
            learner=name, incarnation=number, round=pull.round, attempt=pull.attempt, local_step=local_step,
            steps=9, tokens=99, base=base, format=1, norms=(1.0,),
        ))  # fmt: skip

    def merged(self, pull):
        return self.handle(ev.Merged(
            round=pull.round, attempt=pull.attempt, delta_norm=1.0, bytes_up=1, bytes_result=1, sizes=(1.0, 1.0),
        ))  # fmt: skip


def of(decisions, kind):
    return [each for each in decisions if isinstance(each, kind)]


def pulls(decisions):
    return [(pull.round, pull.learners) for pull in of(decisions, ev.Pull)]


def test_only_the_learner_of_the_tape_is_asked_for_the_initial_model():
    driven = Driven(learners=("eu/0",), initial=False)
    assert of(driven.decisions, ev.RequestInitial) == []
    assert of(driven.hello("us/0", 2), ev.RequestInitial) == [ev.RequestInitial(learner="us/0")]


def test_a_round_pulls_its_members_when_all_learners_are_as_far_as_they_were():
    driven = Driven()
    assert pulls(driven.report("eu/0", 2)) == []  # us/0 had made a step
    assert pulls(driven.report("us/0", 1)) == [(1, ("eu/0",))]


def test_no_learner_that_was_no_member_is_pulled_however_long_the_round_takes():
    driven = Driven()
    driven.report("us/0", 50)
    for _ in range(100):
        driven.handle(ev.Tick(), seconds=2.0)
        driven.handle(ev.Heartbeat(session=1, learner="eu/0"), seconds=0.1)
        driven.handle(ev.Heartbeat(session=2, learner="us/0"), seconds=0.1)
    assert pulls(driven.decisions) == []


def test_several_rounds_are_in_flight_as_before_and_commit_in_order():
    driven = Driven()
    driven.report("us/0", 3)
    [first] = of(driven.report("eu/0", 2), ev.Pull)
    [second] = of(driven.report("eu/0", 4), ev.Pull)
    assert (second.round, second.learners) == (2, ("eu/0", "us/0"))
    driven.contribute(second, "eu/0", 4)
    driven.contribute(second, "us/0", 3)
    assert of(driven.merged(second), ev.Commit) == []
    driven.contribute(first, "eu/0", 2)
    assert [commit.round for commit in of(driven.merged(first), ev.Commit)] == [1, 2]


def test_the_time_to_the_quorum_is_that_until_all_learners_were_as_far():
    driven = Driven()
    driven.report("us/0", 1)
    begun = driven.engine.scheduler.in_flight[0].started
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    seconds = driven.now - begun
    driven.contribute(pull, "eu/0", 2)
    [line] = [log.fields for log in of(driven.merged(pull), ev.Log) if log.event == "merge"]
    assert line["quorumSeconds"] == round(seconds, 6)


def test_counters_are_those_of_the_tape():
    driven = Driven()
    driven.report("us/0", 1)
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    [begin] = of(driven.contribute(pull, "eu/0", 2), ev.BeginMerge)
    assert [(c.steps, c.tokens, c.weight) for c in begin.contributions] == [(1, 8, 64.0)]


def committed_first():
    driven = Driven()
    driven.report("us/0", 1)
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    driven.contribute(pull, "eu/0", 2)
    return driven, driven.merged(pull)


def test_a_version_is_shown_to_those_that_applied_it_when_it_exists():
    driven, decisions = committed_first()
    shown = of(decisions, ev.ShowVersion)
    assert [(s.learner, s.fragment, s.version, s.announced) for s in shown] == [
        ("eu/0", 1, (1, 1), True),
        ("us/0", 1, (1, 1), True),
    ]
    initial = of(driven.decisions, ev.ShowVersion)[:4]
    assert {(s.learner, s.fragment, s.version, s.announced) for s in initial} == {
        (name, fragment, (1, 0), False) for name in ("eu/0", "us/0") for fragment in (0, 1)
    }


def test_no_result_is_shown_to_a_process_that_may_still_download_the_model():
    driven = Driven()
    driven.engine.scheduler._plan[1] = replace(driven.engine.scheduler._plan[1], clock={})
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    driven.contribute(pull, "eu/0", 2)
    assert [s.learner for s in of(driven.merged(pull), ev.ShowVersion)] == ["eu/0"]
    shown = of(driven.report("us/0", 0), ev.ShowVersion)  # as it begins
    assert [(s.learner, s.version) for s in shown] == [("us/0", (1, 1))]


def test_a_version_is_not_shown_while_a_copy_of_before_may_still_be_sent():
    # Of this process, a copy of fragment 0 from local step 3 is merged in step 2, and it applied that in step 5.
    late = tapes(
        eu_0=process("eu/0", 6, results={3: [(1, 1)], 5: [(0, 2)]}),
        us_0=process("us/0", 5, results={4: [(1, 1)], 5: [(0, 2)]}),
    )
    events = [
        *EVENTS[:-1],
        merge(3, member("us/0", 4, base=0)),
    ]  # it was copied before version 1 came
    driven = Driven(plan=plan_of(events, late, feedback=False))
    driven.report("us/0", 1)
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    driven.contribute(pull, "eu/0", 2)
    shown = of(driven.merged(pull), ev.ShowVersion)
    assert [s.learner for s in shown] == ["eu/0"]


def test_the_global_step_is_announced_and_no_fragment_to_keep():
    _, decisions = committed_first()
    [announced] = of(decisions, ev.AnnounceFragments)
    assert (announced.step, announced.fragments, announced.learners) == (1, (), ("eu/0", "us/0"))
    driven, _ = committed_first()
    assert of(driven.handle(ev.Tick()), ev.AnnounceFragments) == [], "once"


@pytest.mark.parametrize("how", ["dropped", "left"])
def test_a_member_that_cannot_deliver_is_waited_for_and_never_replaced(how):
    driven = Driven()
    driven.report("us/0", 1)
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    if how == "dropped":
        driven.handle(
            ev.Dropped(learner="eu/0", round=1, attempt=1, reason="StreamBroken", detail="x")
        )
    else:
        driven.handle(ev.Left(session=1, learner="eu/0", reason="StreamEnded"))
        assert pulls(driven.handle(ev.Tick(), seconds=2.0)) == []
        driven.hello("eu/0", 1, fresh=False)
        driven.report("eu/0", 3)
    driven.handle(ev.Tick(), seconds=1.0)
    again = of(driven.decisions, ev.Pull)[-1]
    assert (again.round, again.learners) == (1, pull.learners)
    assert again.attempt > pull.attempt
    lines = of(driven.decisions, ev.Log)
    assert "eject" not in {line.event for line in lines}
    refused = {"learner": "eu/0", "reason": "StreamBroken", "detail": "x", "step": 1}
    found = [line.fields for line in lines if line.event == "refuse"]
    assert found == ([refused] if how == "dropped" else [])


def test_a_learner_that_leaves_costs_no_round_that_it_is_no_member_of():
    driven = Driven()
    driven.report("us/0", 1)
    driven.report("eu/0", 2)
    assert of(driven.handle(ev.Left(session=2, learner="us/0", reason="x")), ev.AbortMerge) == []
    assert (
        len(of(driven.handle(ev.Left(session=1, learner="eu/0", reason="x")), ev.AbortMerge)) == 1
    )


def of_a_peer(*, local_step):
    """eu/0 took its optimizers' state from the checkpoint of us/0 of this local step and global step 2."""
    plan = plan_of(EVENTS, TAPES, feedback=False)
    plan.lives["eu/0", 0].peer = Peer(learner="us/0", local_step=local_step, step=2)
    return Driven(learners=("us/0",), plan=plan)


def test_a_process_that_took_its_state_from_a_peer_waits_until_that_has_made_the_checkpoint():
    driven = of_a_peer(local_step=3)
    driven.report("us/0", 2)
    [close] = of(driven.hello("eu/0", 7), ev.Close)
    assert (close.reason, close.detail) == (
        "Unavailable",
        "us/0 has not reached local step 3; connect again",
    )
    driven.report("us/0", 3)
    [admit] = of(driven.hello("eu/0", 8), ev.Admit)
    assert ([peer.learner for peer in admit.peers], admit.step) == (["us/0"], 2)


def test_a_peer_that_is_not_connected_is_waited_for():
    driven = of_a_peer(local_step=3)
    driven.report("us/0", 3)
    driven.handle(ev.Left(session=1, learner="us/0", reason="StreamEnded"))
    assert of(driven.hello("eu/0", 7), ev.Admit) == []
    driven.hello("us/0", 2, fresh=False)
    driven.report("us/0", 3)
    assert len(of(driven.hello("eu/0", 8), ev.Admit)) == 1


def test_an_upload_that_the_syncer_cannot_receive_is_asked_for_again():
    driven = Driven()
    driven.report("us/0", 1)
    [pull] = of(driven.report("eu/0", 2), ev.Pull)
    [begin] = of(driven.contribute(pull, "eu/0", 2), ev.BeginMerge)
    failed = ev.Failed(decision=begin, reason="MemoryError", learner="eu/0")
    [abort] = of(driven.handle(failed), ev.AbortMerge)
    assert (abort.round, abort.attempt, abort.reason) == (1, pull.attempt, "MemoryError")
    assert driven.engine.scheduler.in_flight[0].retry_at == driven.now + RETRY_SECONDS
    assert pulls(driven.handle(ev.Tick(), seconds=1.0)) == [(1, ("eu/0",))]


def test_a_round_that_is_due_again_now_has_no_deadline():
    driven = Driven()
    driven.report("us/0", 1)
    driven.report("eu/0", 2)
    driven.handle(ev.Dropped(learner="eu/0", round=1, attempt=1, reason="StreamBroken", detail="x"))
    scheduler = driven.engine.scheduler
    retry_at = scheduler.in_flight[0].retry_at
    assert scheduler.deadlines(driven.now) == [retry_at]
    assert scheduler.deadlines(retry_at) == []


def test_a_process_that_the_tape_does_not_have_is_refused():
    driven = Driven(learners=("us/0",))
    [close] = of(driven.hello("eu/0", 7, restarts=3), ev.Close)
    assert (close.reason, close.detail) == (
        "Config",
        "the tape has no process of eu/0 after 3 restarts",
    )


def test_a_process_may_continue_its_session_with_a_syncer_that_has_not_met_it():
    driven = Driven(learners=("us/0",))
    found = driven.hello("eu/0", 2, fresh=False)
    assert len(of(found, ev.Admit)) == 1
    assert of(found, ev.AnnounceReady) == [ev.AnnounceReady(learner="eu/0")]


def test_a_process_begins_with_the_counters_of_the_tape_and_asks_no_peer():
    driven = Driven()
    [first, _] = of(driven.decisions, ev.Admit)
    assert (first.local_step, first.total_tokens, first.use_checkpoint, first.peers) == (0, 0, False, ())  # fmt: skip


def test_ready_is_sent_again_in_a_new_session_and_nothing_is_shown_twice():
    driven, _ = committed_first()
    driven.handle(ev.Left(session=1, learner="eu/0", reason="StreamEnded"))
    decisions = driven.hello("eu/0", 1, fresh=False)
    assert of(decisions, ev.AnnounceReady) == [ev.AnnounceReady(learner="eu/0")]
    assert of(decisions, ev.ShowVersion) == []


def begun_earlier(driven):
    """us/0 had made 6 steps; its next process begins after step 3, since the rest was no longer known."""
    driven.report("us/0", 6)
    driven.handle(ev.Left(session=2, learner="us/0", reason="StreamEnded"))
    driven.hello("us/0", 3, restarts=1)


def test_a_process_that_makes_steps_again_is_shown_its_results_one_at_a_time():
    again = process(
        "us/0", 7, incarnation=3, restarts=1, after=3, found=3, results={5: [(1, 1)], 6: [(1, 3)]}
    )
    found = tapes(
        eu_0=process("eu/0", 9, results={3: [(1, 1)], 5: [(0, 2)], 7: [(1, 3)]}),
        us_0=[*process("us/0", 6, ended=False), *again],
    )
    rounds = [merge(n, member("eu/0", 2 * n, base=n - 2 if n > 2 else 0)) for n in (1, 2, 3)]
    driven = Driven(plan=plan_of([*EVENTS[:2], *rounds], found, feedback=False))
    begun_earlier(driven)
    for local_step in (2, 4, 6):
        [pull] = of(driven.report("eu/0", local_step), ev.Pull)
        driven.contribute(pull, "eu/0", local_step)
        driven.merged(pull)
    assert [s.version for s in of(driven.report("us/0", 3), ev.ShowVersion)] == [(1, 1)]
    assert of(driven.report("us/0", 4), ev.ShowVersion) == []
    assert [s.version for s in of(driven.report("us/0", 5), ev.ShowVersion)] == [(1, 3)]


def test_a_peer_that_makes_steps_again_is_waited_for_until_it_has_made_the_checkpoint():
    plan = plan_of(EVENTS, TAPES, feedback=False)
    plan.lives["us/0", 1] = replace(plan.lives["us/0", 0])
    plan.lives["eu/0", 0].peer = Peer(learner="us/0", local_step=5, step=2)
    driven = Driven(learners=("us/0",), plan=plan)
    driven.report("us/0", 6)
    driven.handle(ev.Left(session=1, learner="us/0", reason="StreamEnded"))
    driven.hello("us/0", 3, restarts=1)
    driven.report("us/0", 4)
    assert of(driven.hello("eu/0", 7), ev.Admit) == []
    driven.report("us/0", 5)
    assert len(of(driven.hello("eu/0", 8), ev.Admit)) == 1


# ------------------------------------------------------------ restarts of the syncer

# Killed after step 2, with the snapshot of step 0: us/0 applies the result of step 2 when the next epoch has begun.
RESTARTED = [
    *EVENTS[:4],
    start(steps=3, epoch=2),
    merge(1, member("eu/0", 6, base=None)),
    merge(2, member("us/0", 5, base=0)),
]
LATE = tapes(
    eu_0=process("eu/0", 9, results={3: [(1, 1)], 5: [(0, 2)], 8: [(1, 1, 2)]}),
    us_0=process("us/0", 9, results={3: [(1, 1)], 7: [(0, 2)], 8: [(1, 1, 2), (0, 2, 2)]}),
)


def restarted(**more):
    """Two learners when both merges of the first epoch are committed."""
    driven = Driven(plan=plan_of(RESTARTED, LATE, feedback=False), **more)
    driven.report("us/0", 3)
    [first] = of(driven.report("eu/0", 2), ev.Pull)
    [second] = of(driven.report("eu/0", 4), ev.Pull)
    for pull, name, local_step in (
        (first, "eu/0", 2),
        (second, "eu/0", 4),
        (second, "us/0", 3),
    ):
        driven.contribute(pull, name, local_step)
    driven.merged(first)
    driven.merged(second)
    return driven


def again(driven):
    """The epoch that begins; both learners connect to it."""
    begun = driven.handle(ev.Tick())
    driven.hello("eu/0", 1, fresh=False)
    driven.hello("us/0", 2, fresh=False)
    return begun


def test_an_epoch_begins_when_all_merges_before_it_are_committed():
    driven = restarted()
    assert (driven.engine.epoch, driven.engine.step) == (1, 2)
    begun = again(driven)
    assert [(c.session, c.reason) for c in of(begun, ev.Close)] == [(1, "Unavailable"), (2, "Unavailable")]  # fmt: skip
    assert of(begun, ev.BeginEpoch) == [ev.BeginEpoch(versions={}, initial=(1, 0))]
    assert of(begun, ev.Log) == [], "a syncer that is killed writes none"
    assert (driven.engine.epoch, driven.engine.step) == (2, 0)
    assert [admit.local_step for admit in of(driven.decisions, ev.Admit)] == [0, 0, 0, 0]
    assert of(driven.handle(ev.Tick()), ev.BeginEpoch) == [], "once"


def test_an_epoch_begins_at_once_by_the_time_that_the_engine_asks_for():
    driven = restarted()
    assert of(driven.decisions, ev.WakeAt)[-1].seconds == driven.now


def test_the_rounds_of_an_epoch_have_its_members_and_their_bases():
    driven = restarted()
    assert [*driven.engine.members(2)] == [("eu/0", (1, 0)), ("us/0", (1, 0))]
    again(driven)
    assert [*driven.engine.members(1)] == [("eu/0", None)]
    assert pulls(driven.report("us/0", 4)) == []
    assert pulls(driven.report("us/0", 5)) == [(2, ("us/0",))]
    assert pulls(driven.report("eu/0", 6)) == [(1, ("eu/0",))]


def test_a_result_of_the_epoch_that_ended_is_shown_to_those_that_applied_it_later():
    driven = restarted()
    before = [(s.learner, s.version) for s in of(driven.decisions, ev.ShowVersion) if s.announced]
    # us/0 sends a copy of fragment 0 of local step 5 to epoch 2: until then its inbox must not change.
    assert before == [("eu/0", (1, 1)), ("us/0", (1, 1)), ("eu/0", (1, 2))]
    again(driven)
    driven.report("us/0", 6)
    driven.report("eu/0", 6)
    [second, first] = of(driven.decisions, ev.Pull)[-2:]
    driven.contribute(first, "eu/0", 6, base=None)
    driven.contribute(second, "us/0", 5)
    driven.merged(first)
    shown = of(driven.merged(second), ev.ShowVersion)
    assert [(s.learner, s.fragment, s.version) for s in shown] == [("us/0", 0, (1, 2))]
    shown = of(driven.report("us/0", 7), ev.ShowVersion)
    assert [(s.learner, s.fragment, s.version) for s in shown] == [("us/0", 0, (2, 2))]


def test_a_snapshot_is_only_taken_of_what_no_later_epoch_undoes():
    every = replace(SPEC, syncer_checkpoint=Checkpoint(every_steps=1, keep=3))
    driven = restarted(spec=every)
    driven.handle(ev.SnapshotDone(step=0))
    again(driven)
    assert [taken.step for taken in of(driven.decisions, ev.TakeSnapshot)] == [0]
    driven.report("us/0", 6)
    driven.report("eu/0", 6)
    [_, first] = of(driven.decisions, ev.Pull)[-2:]
    driven.contribute(first, "eu/0", 6, base=None)
    [taken] = of(driven.merged(first), ev.TakeSnapshot)
    assert (taken.step, taken.engine["merges"]) == (1, 1)


def test_a_last_step_that_a_later_epoch_undoes_does_not_end_the_job():
    driven = restarted(spec=replace(SPEC, steps=2))
    driven.handle(ev.Tick(), seconds=0.0)
    assert [driven.engine.epoch, driven.engine.step] == [2, 0]
    driven.handle(ev.SnapshotDone(step=0))
    assert [taken.step for taken in of(driven.decisions, ev.TakeSnapshot)] == [0]
    assert of(driven.decisions, ev.Finish) == []


def test_an_epoch_without_a_merge_ends_when_the_model_exists():
    events = [*EVENTS[:2], start(steps=3, epoch=2), *RESTARTED[2:4]]
    found = tapes(eu_0=process("eu/0", 6, results={3: [(1, 1, 2)]}), us_0=process("us/0", 5))
    driven = Driven(plan=plan_of(events, found, feedback=False), initial=False)
    assert of(driven.handle(ev.Tick()), ev.BeginEpoch) == []
    driven.handle(ev.Initialised(learner="us/0"))
    assert len(of(again(driven), ev.BeginEpoch)) == 1
    driven.report("us/0", 1)
    assert pulls(driven.report("eu/0", 2)) == [(1, ("eu/0",))]


def test_a_process_whose_session_ended_before_it_was_welcomed_is_shown_nothing_twice():
    driven = restarted()
    driven.handle(ev.Tick())
    found = driven.hello("eu/0", 1)  # it has no incarnation yet, so it is a fresh one again
    assert of(found, ev.AnnounceReady) == [ev.AnnounceReady(learner="eu/0")]
    assert of(found, ev.ShowVersion) == []


def test_the_job_is_complete_after_the_last_round():
    driven, _ = committed_first()
    driven.report("us/0", 3)
    [pull] = of(driven.report("eu/0", 4), ev.Pull)
    driven.contribute(pull, "eu/0", 4)
    driven.contribute(pull, "us/0", 3)
    driven.merged(pull)
    [pull] = of(driven.report("us/0", 4), ev.Pull)
    driven.contribute(pull, "us/0", 4, base=(1, 1))
    driven.merged(pull)
    assert driven.engine.step == 3
    [snapshot] = of(driven.handle(ev.SnapshotDone(step=0)), ev.TakeSnapshot)
    assert snapshot.step == 3
    assert of(driven.handle(ev.SnapshotDone(step=3)), ev.Finish) == [ev.Finish(step=3)]
