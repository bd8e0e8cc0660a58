"""The engine event by event: who is asked, when exactly, and what is remembered of it."""

import pytest

from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.delivery import START_SECONDS
from diloco_syncer.core.engine import (
    HEARTBEAT_SECONDS,
    OWN_PAUSE_SECONDS,
    STUCK_SECONDS,
    STUCK_STEPS,
    Engine,
)
from diloco_syncer.core.initialisation import STALL_SECONDS
from diloco_syncer.core.rounds import RETRY_SECONDS, Phase


class Job:
    """An engine with learners a, b, c, … whose sessions and incarnations are 1, 2, 3, …; Θ exists."""

    def __init__(self, names="ab", *, initialised=True, now=0.0, **changes):
        values = {
            "job": "t", "steps": 100, "fragments": 4, "interval": 4, "overlap": 2, "quorum": 1,
            "learners": {"eu": 9}, "syncer_checkpoint": Checkpoint(every_steps=1000, keep=2),
        }  # fmt: skip
        self.engine = Engine(spec=RunSpec(**{**values, **changes}), epoch=1)
        self.names, self.now = names, now
        for name in names:
            self.hello(name)
        if initialised:
            self(ev.Initialised(learner="a"))
            self(ev.SnapshotDone(step=0))

    def __call__(self, event, *, at=None):
        self.now = self.now if at is None else at
        return self.engine.handle(event, self.now)

    def session(self, name):
        return self.names.index(name) + 1

    def __getitem__(self, name):
        return self.engine.learners.by_name[name]

    @property
    def rounds(self):
        return self.engine.scheduler.in_flight

    def hello(self, name, *, session=None, incarnation=None, fresh=True, checkpoint=0, **rest):
        mine = self.session(name)
        return self(
            ev.Hello(
                session=session or mine, learner=name, region="eu", incarnation=incarnation or mine,
                fresh=fresh, local_step=0, checkpoint_step=checkpoint,
            ),
            **rest,
        )  # fmt: skip

    def left(self, name, **rest):
        return self(ev.Left(session=self.session(name), learner=name, reason="Gone"), **rest)

    def report(self, name, local_step, *, at=None, **changes):
        values = {
            "session": self.session(name), "learner": name, "local_step": local_step, "steps": (),
            "tokens": (), "offers": frozenset(range(4)), "total_tokens": 10 * local_step,
            "global_step": 0, "step_seconds": 1.0, "sync_seconds": 0.0, "loss": None,
        }  # fmt: skip
        return self(ev.Reported(**{**values, **changes}), at=at)

    def meet(self):
        """Everybody trains, and nobody offers anything yet: round 1 waits for the first to do so."""
        for name in self.names:
            self.report(name, 0, offers=frozenset())
        return self

    def report_all(self, local_step):
        return [d for name in self.names for d in self.report(name, local_step)]

    def heartbeats(self, *, at):
        return [
            d
            for n in self.names
            for d in self(ev.Heartbeat(session=self.session(n), learner=n), at=at)
        ]

    def wait(self, until):
        """Heartbeats and ticks every second; returns what was decided meanwhile."""
        out = []
        while self.now < until:
            out += self.heartbeats(at=min(until, self.now + 1.0))
            out += self(ev.Tick())
        return out

    def contribute(self, name, *, round=1, attempt=1, local_step=1, steps=1, tokens=10, at=None):  # noqa: A002
        return self(
            Contribution(
                learner=name, incarnation=self.session(name), round=round, attempt=attempt,
                local_step=local_step, steps=steps, tokens=tokens, base=(1, 0), format=1, norms=(),
            ),
            at=at,
        )  # fmt: skip

    def merged(self, *, round=1, attempt=1, at=None):  # noqa: A002
        return self(
            ev.Merged(round=round, attempt=attempt, delta_norm=1.0, bytes_up=7, bytes_result=5),
            at=at,
        )

    def merge(self, *names, round, local_step, attempt=1):  # noqa: A002
        for name in names:
            self.contribute(name, round=round, attempt=attempt, local_step=local_step)
        return self.merged(round=round, attempt=attempt)

    def dropped(self, name, *, round=1, attempt=1, reason="Damaged"):  # noqa: A002
        return self(
            ev.Dropped(learner=name, round=round, attempt=attempt, reason=reason, detail="x")
        )


def of(kind, decisions):
    return [d for d in decisions if isinstance(d, kind)]


def pulls(decisions):
    return [(d.round, d.attempt, d.learners) for d in of(ev.Pull, decisions)]


def logs(event, decisions):
    return [d.fields for d in of(ev.Log, decisions) if d.event == event]


def wake(decisions):
    [it] = of(ev.WakeAt, decisions)
    return it.seconds


# ---------------------------------------------------------------- quorum and grace


def test_after_the_quorum_a_round_waits_exactly_its_window_for_the_others():
    job = Job(now=5.0)
    job.report("b", 1, offers=frozenset(), at=5.0)
    out = job.report("a", 1, at=5.5)
    assert pulls(out) == []
    assert wake(out) == 6.5, "a cap of one step of a second"
    assert pulls(job(ev.Tick(), at=6.4)) == []
    assert pulls(job(ev.Tick(), at=6.5)) == [(1, 1, ("a",))]
    job.contribute("a")
    [line] = logs("merge", job.merged(at=7.0))
    assert (line["quorumSeconds"], line["graceSeconds"], line["syncSeconds"]) == (0.5, 1.0, 0.5)
    assert job.engine.scheduler.last_window_seconds == 1.0


def test_a_round_does_not_wait_when_everybody_is_ready():
    job = Job(now=5.0, overlap=1).meet()
    job.report("a", 1, at=5.0)
    assert pulls(job.report("b", 1, at=5.25)) == [(1, 1, ("a", "b"))]
    for name in "ba":
        job.contribute(name)
    [line] = logs("merge", job.merged(at=5.5))
    assert line["graceSeconds"] == 0.25
    assert line["bytesDown"] == 10, "to each that is connected"


def test_a_round_that_falls_below_the_quorum_in_its_window_begins_to_collect_again():
    job = Job("abc", quorum=2)
    job.report("c", 1, offers=frozenset())
    job.report("a", 1)
    job.report("b", 1)
    assert job.rounds[0].phase is Phase.GRACE
    job.left("b", at=0.5)
    assert (job.rounds[0].phase, job.rounds[0].deadline) == (Phase.COLLECTING, None)
    assert pulls(job.report("c", 2, at=2.0)) == [(1, 1, ("a", "c"))]
    assert job.rounds[0].quorum_at == 2.0, "not of the first time"


@pytest.mark.parametrize("offers", [frozenset(), frozenset({0, 2, 3})])
def test_a_learner_that_does_not_offer_the_fragment_is_not_ready(offers):
    job = Job("a")
    assert pulls(job.report("a", 1, offers=offers)) == []
    assert pulls(job.report("a", 2)) == [(1, 1, ("a",))]


def test_a_report_that_a_round_has_pulled_is_not_ready_for_the_next_round():
    job = Job("ab").meet()
    assert pulls(job.report_all(1)) == [(1, 1, ("a", "b"))]
    job.report("b", 2)
    assert [r.step for r in job.rounds] == [1, 2]
    assert job.rounds[1].phase is Phase.GRACE, "a has nothing new: b alone is ready"
    assert pulls(job(ev.Tick(), at=1.0)) == [(2, 1, ("b",))]


def test_the_window_shrinks_by_what_quorum_and_sync_took():
    job = Job("ab", grace_max_steps=5.0, overlap=1, now=1.0).meet()
    job.report_all(1)
    job.merge("a", "b", round=1, local_step=1)
    scheduler = job.engine.scheduler
    job.report("a", 2, at=2.0)
    assert (scheduler.grace.quorum_seconds, scheduler.grace.sync_seconds) == (0.5, 0.0)
    assert scheduler.last_window_seconds == pytest.approx(0.8 * (1.0 - 0.5))
    job.report("b", 2, at=2.2)
    for name in "ab":
        job.contribute(name, round=2, local_step=2)
    job.merged(round=2, at=2.6)
    job.report("a", 3, at=3.0)
    assert scheduler.grace.sync_seconds == pytest.approx(0.2)
    assert scheduler.last_window_seconds == pytest.approx(0.8 * (1.0 - 0.45 - 0.2))


# ---------------------------------------------------------------- members


def test_what_is_credited_is_bounded_by_h_the_rounds_in_flight_and_the_pace():
    job = Job("a", interval=4, overlap=2)
    job.report("a", 1)
    [begin] = of(ev.BeginMerge, job.contribute("a", steps=1000, tokens=10_000))
    assert [(c.steps, c.tokens) for c in begin.contributions] == [(4 + 2 * 2 + 2, 100)]


def test_a_second_header_of_a_member_a_stranger_or_another_attempt_changes_nothing():
    job = Job("abc", quorum=2)
    job.report("c", 1, offers=frozenset())
    job.report("a", 1)
    job.report("b", 1)
    job.wait(1.0)
    assert sorted(job.rounds[0].members) == ["a", "b"]
    assert of(ev.BeginMerge, job.contribute("c")) == []
    assert "c" not in job.rounds[0].contributions
    job.contribute("a", attempt=2)
    assert job.rounds[0].contributions == {}
    job.contribute("a")
    [begin] = of(ev.BeginMerge, job.contribute("b"))
    assert [c.learner for c in begin.contributions] == ["a", "b"]
    assert of(ev.BeginMerge, job.contribute("a")) == [], "it is merging already"


def test_a_member_that_uploads_a_used_report_is_left_out_and_named():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job["a"].claims.add(1)
    out = job.contribute("a")
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"], line["step"], line["fragment"]) == (
        "a", "ReportUsed", 1, 1,
    )  # fmt: skip
    [begin] = of(ev.BeginMerge, job.contribute("b"))
    assert [c.learner for c in begin.contributions] == ["b"]
    assert job["a"].ejection is None, "its report was used, it did nothing wrong"


def test_a_member_lost_while_pulling_leaves_the_attempt_to_the_others():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    assert of(ev.BeginMerge, job.contribute("a")) == []
    out = job.left("b")
    [begin] = of(ev.BeginMerge, out)
    assert (begin.attempt, [c.learner for c in begin.contributions]) == (1, ["a"])
    assert of(ev.AbortMerge, out) == []


def test_a_member_lost_while_merging_costs_one_attempt():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.contribute("a")
    job.contribute("b")
    out = job.left("b", at=0.5)
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    assert pulls(out) == [(1, 2, ("a",))]
    assert of(ev.BeginMerge, job.contribute("a", attempt=1)) == []
    [begin] = of(ev.BeginMerge, job.contribute("a", attempt=2))
    assert begin.attempt == 2
    assert of(ev.Commit, job.merged(attempt=1)) == [], "that was the attempt before"
    [commit] = of(ev.Commit, job.merged(attempt=2))
    assert (commit.round, commit.attempt, commit.fragment, commit.changed) == (1, 2, 1, True)


def test_below_the_quorum_the_others_are_released_and_pulled_again_after_a_pause():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.dropped("b")
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    assert job["a"].fresh, "its report was not merged: it counts again"
    assert not job["b"].fresh, "the same report would fail again"
    assert wake(out) == pytest.approx(2 * RETRY_SECONDS)
    assert pulls(job.report("b", 2, at=RETRY_SECONDS)) == []
    assert pulls(job(ev.Tick(), at=2 * RETRY_SECONDS)) == [(1, 3, ("a", "b"))]


def test_a_learner_that_leaves_while_a_round_collects_costs_no_attempt():
    job = Job("ab", quorum=2)
    job.report("a", 1)
    out = job.left("a")
    assert of(ev.AbortMerge, out) == []
    assert job.rounds[0].attempt == 0
    [line] = logs("leave", out)
    assert line == {"learner": "a", "incarnation": 1, "reason": "Gone"}


def test_a_member_of_a_merged_round_that_waits_for_its_turn_may_still_be_lost():
    job = Job("ab").meet()
    for step in (1, 2):
        job.report_all(step)
    for name in "ab":
        job.contribute(name, round=2, local_step=2)
    assert of(ev.Commit, job.merged(round=2)) == []
    out = job.left("b")
    assert (2, 1) in [(d.round, d.attempt) for d in of(ev.AbortMerge, out)]
    assert (2, 2, ("a",)) in pulls(out)


def test_a_member_that_does_not_deliver_is_ejected_from_every_round_that_waits_for_it():
    job = Job("abc").meet()
    for step in (1, 2):
        job.report_all(step)
    for round_ in (1, 2):
        for name in "ab":
            job.contribute(name, round=round_, local_step=round_)
    out = job.dropped("c", round=1, reason="NotFinite")
    assert logs("eject", out)[0]["learner"] == "c"
    assert [line["reason"] for line in logs("refuse", out)] == ["NotFinite"]
    assert [d.round for d in of(ev.BeginMerge, out)] == [1, 2]
    assert job.rounds[0].failure == "c: NotFinite"


def test_a_member_that_is_ejected_stays_in_a_round_to_which_it_has_delivered():
    job = Job("abc").meet()
    for step in (1, 2):
        job.report_all(step)
    job.contribute("c", round=2, local_step=2)
    done = ev.Progress(learner="c", round=2, attempt=1, received_bytes=9, done=True)
    job(done)
    job.dropped("c", round=1)
    assert sorted(job.rounds[1].members) == ["a", "b", "c"]


def test_a_member_without_a_header_is_late_and_one_with_a_header_has_stalled():
    job = Job("ab").meet()
    job.report_all(1)
    job.contribute("a")
    hold = job.engine.scheduler.hold_seconds()
    assert hold == 4.0, "twice τ steps of a second"
    job.wait(3.0)
    out = job.wait(hold)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("b", "AnswerLate")
    assert "delivered 0 bytes of fragment 1 in 4.0 s" in line["detail"]

    job = Job("ab").meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    job(ev.Progress(learner="a", round=1, attempt=1, received_bytes=10, done=True))
    out = job.wait(hold)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("b", "Stalled")


def test_all_members_that_are_late_at_once_are_written_down():
    job = Job("abcd").meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    out = job.wait(4.0)
    assert [line["learner"] for line in logs("refuse", out)] == ["c", "d"]
    assert [line["learner"] for line in logs("eject", out)] == ["c", "d"]
    [begin] = of(ev.BeginMerge, out)
    assert [c.learner for c in begin.contributions] == ["a", "b"]


def test_the_engine_wakes_for_the_first_member_that_can_be_late():
    job = Job("a")
    out = job.report("a", 1)
    assert wake(out) == HEARTBEAT_SECONDS
    job.wait(START_SECONDS - 1)
    assert wake(job.heartbeats(at=START_SECONDS - 1.0)) == START_SECONDS


def test_a_commit_is_remembered_with_its_members_and_time():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    job.merged(at=0.5)
    scheduler = job.engine.scheduler
    assert (scheduler.merges, scheduler.commits, scheduler.last_members) == (1, 1, 2)
    assert (scheduler.last_merge_at, job.engine.step) == (0.5, 1)
    assert (job["a"].merged_round, job["a"].merges, job["a"].delivered_in_row) == (1, 1, 1)
    assert job["a"].claims.merged == {1}
    assert job.engine.staleness(job["a"]) == 0


def test_a_round_without_weight_commits_without_a_change_and_its_reports_are_used():
    job = Job("a")
    job.report("a", 1)
    out = job.contribute("a", steps=0, tokens=0)
    assert [d.reason for d in of(ev.AbortMerge, out)] == ["all weights are zero"]
    [commit] = of(ev.Commit, out)
    assert not commit.changed
    [line] = logs("merge", out)
    assert (line["deltaNorm"], line["bytesUp"], line["bytesDown"]) == (0.0, 0, 0)
    assert not job["a"].fresh


def test_a_pull_that_cannot_be_carried_out_is_repeated_after_a_pause_and_says_why():
    job = Job("a")
    [pull] = of(ev.Pull, job.report("a", 1))
    out = job(ev.Failed(decision=pull, reason="boom"))
    assert logs("error", out) == [{"decision": "Pull", "reason": "boom"}]
    assert [(d.attempt, d.reason) for d in of(ev.AbortMerge, out)] == [(1, "boom")]
    assert job.rounds[0].failure == "boom"
    assert pulls(job(ev.Tick(), at=2 * RETRY_SECONDS)) == [(1, 3, ("a",))]
    assert of(ev.AbortMerge, job(ev.Failed(decision=pull, reason="late"))) == []


# ---------------------------------------------------------------- pace and announcements


def test_the_global_step_follows_the_steps_of_a_report():
    job = Job("a", fragments=1, interval=4, overlap=1)
    for step in (1, 2, 3):
        job.report("a", step)
    assert job.engine.step == 3, "no fragment is due before step 4"
    job.report("a", 4)
    assert (job.engine.step, [r.step for r in job.rounds]) == (3, [4])


def test_no_round_begins_after_the_last_step():
    job = Job("a", steps=2, overlap=1)
    for step in (1, 2):
        job.report("a", step)
        job.merge("a", round=step, local_step=step)
    job.report("a", 3)
    assert (job.engine.step, job.rounds) == (2, [])


def test_the_lag_of_a_learner_is_measured_against_the_steps_that_were_started():
    job = Job("a")
    job.report("a", 1)
    job.report("a", 2)
    assert job.engine.scheduler.pace.step == 2
    job.report("a", 3, global_step=0)
    assert job["a"].lag == 2.0


def test_a_new_session_is_announced_everything_again():
    job = Job("a")
    out = job.hello("a", session=8, fresh=False)
    assert [d.learners for d in of(ev.AnnounceFragments, out)] == [("a",)]
    assert of(ev.AnnounceFragments, job(ev.Tick())) == []
    [announced] = [ev.AnnounceFragments(learners=("a",), step=0, fragments=(1, 2, 3))]
    out = job(ev.Failed(decision=announced, reason="boom"))
    assert of(ev.AnnounceFragments, out) == [announced]
    assert of(ev.Close, out) == []


# ---------------------------------------------------------------- sessions


def test_a_hello_is_answered_with_its_identity_and_written_down():
    job = Job("a")
    job.report("a", 5)
    out = job.hello("a", session=9, incarnation=4)
    assert of(ev.Admit, out) == [
        ev.Admit(
            session=9, learner="a", incarnation=4, local_step=5, use_checkpoint=False,
            total_tokens=50,
        )
    ]  # fmt: skip
    assert logs("join", out) == [
        {"learner": "a", "incarnation": 4, "step": 0, "fresh": True, "localStep": 5}
    ]
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "StaleIncarnation")
    assert of(ev.AnnounceReady, out) == [ev.AnnounceReady(learner="a")]
    assert of(ev.AnnounceComplete, out) == []


def test_a_replaced_member_is_lost_to_its_rounds():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.contribute("a")
    out = job.hello("b", session=9, incarnation=9)
    assert [[c.learner for c in d.contributions] for d in of(ev.BeginMerge, out)] == [["a"]]


def test_a_refused_incarnation_is_written_down():
    job = Job("a")
    job.hello("a", session=9, incarnation=9)
    out = job.hello("a", session=10, incarnation=3)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("a", "StaleIncarnation")
    assert "incarnation 3 of a was replaced by 9" in line["detail"]
    assert of(ev.Close, out)[0].detail == line["detail"]
    assert of(ev.Admit, out) == []


@pytest.mark.parametrize(
    ("checkpoint", "fresh", "used"),
    [
        (20, True, True), (16, True, True), (15, True, False), (21, True, False),
        (20, False, False),
    ],
)  # fmt: skip
def test_a_checkpoint_is_used_by_a_fresh_process_if_it_is_at_most_h_steps_old(
    checkpoint, fresh, used
):
    job = Job("a")
    job.engine.scheduler.step = 20
    [admit] = of(
        ev.Admit, job.hello("a", session=9, incarnation=1, fresh=fresh, checkpoint=checkpoint)
    )
    assert admit.use_checkpoint is used


def test_no_checkpoint_is_used_before_the_model_exists_nor_one_of_step_0():
    assert not of(ev.Admit, Job("a").hello("a", session=9, checkpoint=0))[0].use_checkpoint
    job = Job("a", initialised=False)
    job.engine.scheduler.step = 20
    assert not of(ev.Admit, job.hello("a", session=9, checkpoint=20))[0].use_checkpoint


def test_a_learner_whose_session_begins_anew_is_asked_again_for_the_initial_model():
    job = Job("ab", initialised=False)
    assert job.engine.initialiser == "a"
    out = job.hello("a", session=9, fresh=False)
    assert [d.learner for d in of(ev.RequestInitial, out)] == ["a"]
    assert wake(out) == HEARTBEAT_SECONDS
    assert of(ev.AnnounceReady, out) == []
    assert of(ev.RequestInitial, job.left("b")) == [], "a is asked already"


def test_the_initial_model_is_made_durable_and_announced_to_everybody_once():
    job = Job("ab", initialised=False)
    out = job(ev.Initialised(learner="a"), at=1.0)
    assert logs("initialised", out) == [{"learner": "a"}]
    assert [d.step for d in of(ev.TakeSnapshot, out)] == [0]
    assert [d.learner for d in of(ev.AnnounceReady, out)] == ["a", "b"]
    assert job.engine.initialiser is None
    again = job(ev.Initialised(learner="b"), at=1.0)
    assert [type(d) for d in again] == [ev.WakeAt]


def test_a_learner_that_was_not_asked_cannot_fail_the_initial_model():
    job = Job("ab", initialised=False)
    out = job(ev.InitialFailed(learner="b", reason="NotFinite", detail="NaN"))
    assert of(ev.Close, out) == logs("refuse", out) == []
    out = job(ev.InitialFailed(learner="a", reason="NotFinite", detail="NaN"))
    assert [(d.session, d.reason, d.detail) for d in of(ev.Close, out)] == [(1, "NotFinite", "NaN")]


def test_bytes_of_the_initial_model_are_its_progress():
    job = Job("a", initialised=False)
    job.wait(STALL_SECONDS - 1)
    job(ev.Progress(learner="a", round=0, attempt=0, received_bytes=1 << 24))
    assert job.engine.initialisation.deadline > STALL_SECONDS


def test_a_heartbeat_counts_for_the_current_session_only():
    job = Job("a")
    job(ev.Heartbeat(session=7, learner="a"), at=2.0)
    assert job["a"].last_seen == 0.0
    job(ev.Heartbeat(session=1, learner="a"), at=2.0)
    assert job["a"].last_seen == 2.0
    job(ev.Heartbeat(session=1, learner="never seen"), at=2.0)


def test_a_session_that_is_closed_for_silence_is_told_why_and_leaves():
    job = Job("a")
    for now in (2.0, 4.0, 6.0):
        out = job(ev.Tick(), at=now)
    assert of(ev.Close, out) == []
    out = job(ev.Tick(), at=6.5)
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "Unavailable")
    assert "for 6.5 s" in close.detail
    assert [line["reason"] for line in logs("leave", out)] == ["HeartbeatLate"]
    assert not job["a"].training


@pytest.mark.parametrize("kind", ["Admit", "AnnounceReady", "AnnounceComplete", "RequestInitial"])
def test_a_session_that_cannot_be_served_starts_over(kind):
    job = Job("a")
    decision = {
        "Admit": ev.Admit(
            session=1, learner="a", incarnation=1, local_step=0, use_checkpoint=False, total_tokens=0
        ),
        "AnnounceReady": ev.AnnounceReady(learner="a"),
        "AnnounceComplete": ev.AnnounceComplete(learner="a"),
        "RequestInitial": ev.RequestInitial(learner="a"),
    }[kind]  # fmt: skip
    out = job(ev.Failed(decision=decision, reason="boom"))
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "Unavailable")
    assert "boom" in close.detail
    job.left("a")
    assert of(ev.Close, job(ev.Failed(decision=decision, reason="boom"))) == []


def test_a_line_that_cannot_be_written_is_no_reason_for_another_line():
    job = Job("a")
    out = job(ev.Failed(decision=ev.Log(event="join", fields={}), reason="full"))
    assert [type(d) for d in out] == [ev.WakeAt]


# ---------------------------------------------------------------- the syncer's own pause


def test_a_pause_of_the_syncer_begins_above_three_seconds():
    job = Job("a")
    job.heartbeats(at=1.0)
    assert logs("pause", job(ev.Tick(), at=1.0 + OWN_PAUSE_SECONDS)) == []
    out = job(ev.Tick(), at=1.56789 + 2 * OWN_PAUSE_SECONDS)
    assert logs("pause", out) == [{"seconds": 3.568}]
    assert job["a"].last_seen == pytest.approx(1.0 + 3.56789)


def test_a_pause_is_given_back_to_whom_the_initial_model_was_asked_of_and_to_rounds():
    job = Job("a", initialised=False)
    before = job.engine.initialisation.deadline
    assert of(ev.RequestInitial, job(ev.Tick(), at=50.0)) == []
    assert job.engine.initialisation.deadline == before + 50.0
    job = Job("a")
    job.report("a", 1)
    job(ev.Tick(), at=50.0)
    assert job.rounds[0].members["a"].deadline == 50.0 + START_SECONDS


def test_a_pause_is_given_back_to_probes():
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    out = job.wait(5.0)
    [probe] = of(ev.ProbeLearner, out)
    before = job["c"].ejection.probe.delivery.deadline
    job(ev.Tick(), at=105.0)
    assert job["c"].ejection.probe.delivery.deadline == before + 100.0
    out = job(ev.Failed(decision=probe, reason="boom"))
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(probe.round, probe.attempt)]
    assert job["c"].ejections == 2
    assert of(ev.AbortMerge, job(ev.Failed(decision=probe, reason="boom"))) == []


def probed():
    """A job of three, of which c is ejected and probed at second 5."""
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    [probe] = of(ev.ProbeLearner, job.wait(5.0))
    return job, {"learner": "c", "round": probe.round, "attempt": probe.attempt}


def test_a_probe_that_is_delivered_brings_the_learner_back():
    job, mine = probed()
    assert logs("readmit", job(ev.Progress(**mine, received_bytes=5))) == []
    out = job(ev.Progress(**mine, received_bytes=9, done=True))
    assert logs("readmit", out) == [{"learner": "c"}]
    assert job["c"].ejection is None
    assert job.rounds[0].members.keys() == {"a", "b"}, "its round had begun"


def test_a_probe_that_is_dropped_is_repeated_after_twice_the_time():
    job, mine = probed()
    out = job(ev.Dropped(**mine, reason="Damaged", detail="x"))
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [
        (mine["round"], mine["attempt"])
    ]
    assert job["c"].ejection.probe_at == 5.0 + 10.0
    assert logs("refuse", out) == []


# ---------------------------------------------------------------- what it waits for


def test_what_is_missing_is_said():
    job = Job("", initialised=False)
    assert job.engine.waiting_for() == "the first learner to upload the initial model"
    job = Job("ab", initialised=False)
    assert job.engine.waiting_for() == "a to upload the initial model"
    job = Job("ab", quorum=2)
    job.report("a", 1)
    assert job.engine.waiting_for() == "2 training learners for the quorum; there are 1"
    job.report("b", 1)
    assert job.engine.waiting_for() == ""


def test_ejected_learners_are_named_when_the_quorum_is_short():
    job = Job("abc", quorum=2, overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    job.left("a")
    assert job.engine.waiting_for() == (
        "2 training learners for the quorum; there are 1; ejected: c (Damaged)"
    )


def stuck_after(job, since):
    """The second at which the engine begins to call itself stuck."""
    for second in range(1, 200):
        job.wait(since + second)
        if job.engine.waiting_for():
            return second
    raise AssertionError("never")


def test_a_job_is_stuck_when_a_merge_takes_longer_than_anything_explains():
    job = Job("a", fragments=2, interval=4, overlap=1)
    job.report("a", 1)
    # A round each second step, one in flight: up to three steps between merges, of one second.
    assert stuck_after(job, 0.0) == STUCK_SECONDS + STUCK_STEPS * 3 + 1
    assert "no round began" in job.engine.waiting_for()
    job.report("a", 2)
    text = job.engine.waiting_for()
    assert "a merge of fragment 1 (step 2, Pulling)" in text
    assert "last failure" not in text
    job.rounds[0].failure = "a: Damaged"
    assert job.engine.waiting_for().endswith("; last failure: a: Damaged")


def test_being_stuck_is_counted_from_the_last_merge():
    job = Job("a")
    job.report("a", 1)
    job.wait(20.0)
    job.merge("a", round=1, local_step=1)
    assert job.engine.waiting_for() == ""
    assert stuck_after(job, 20.0) == STUCK_SECONDS + STUCK_STEPS * 3 + 1


# ---------------------------------------------------------------- the end, and after it


def finished(**changes):
    job = Job("a", steps=1, overlap=1, **changes)
    job.report("a", 1)
    return job, job.merge("a", round=1, local_step=1)


def test_the_last_commit_is_followed_by_snapshot_model_and_the_good_news():
    job, out = finished()
    assert [(d.step, d.engine["step"]) for d in of(ev.TakeSnapshot, out)] == [(1, 1)]
    assert not job.engine.complete
    assert job.engine.durable_step == 0
    job(ev.Exported(step=1))
    assert not job.engine.complete, "nothing was asked to be exported"
    out = job(ev.SnapshotDone(step=1))
    assert of(ev.Finish, out) == [ev.Finish(step=1)]
    out = job(ev.Failed(decision=ev.Finish(step=1), reason="full"))
    assert job.engine.waiting_for().endswith("last failure: full")
    assert wake(out) == HEARTBEAT_SECONDS
    out = job.wait(5.0)
    assert of(ev.Finish, out) == [ev.Finish(step=1)]
    out = job(ev.Exported(step=1))
    assert logs("complete", out) == [{"step": 1, "tokens": 10}]
    assert of(ev.AnnounceComplete, out) == [ev.AnnounceComplete(learner="a")]
    assert job.engine.complete
    assert job.engine.waiting_for() == ""


def test_a_snapshot_that_cannot_begin_is_tried_again_when_its_back_off_is_over():
    job, out = finished()
    [snapshot] = of(ev.TakeSnapshot, out)
    job.now = 1.0
    out = job(ev.Failed(decision=snapshot, reason="full"))
    assert logs("error", out) == [{"decision": "TakeSnapshot", "reason": "full"}]
    assert of(ev.TakeSnapshot, job.wait(5.0)) == []
    out = job(ev.Heartbeat(session=1, learner="a"), at=5.5)
    assert wake(out) == 6.0
    assert [d.step for d in of(ev.TakeSnapshot, job(ev.Tick(), at=6.0))] == [1]


def test_a_snapshot_is_considered_once_per_commit():
    job = Job("a", syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    job.report("a", 1)
    assert len(of(ev.TakeSnapshot, job.merge("a", round=1, local_step=1))) == 1
    job(ev.SnapshotDone(step=1))
    assert of(ev.TakeSnapshot, job(ev.Tick())) == []


def test_a_resumed_engine_knows_its_step_merges_tokens_and_what_is_durable():
    job, _ = finished()
    state = job.engine.to_json()
    again = Engine.resume(job.engine.spec, epoch=2, state=state)
    assert (again.step, again.epoch, again.durable_step, again.tokens) == (1, 2, 1, 10)
    assert again.scheduler.merges == 1
    assert again.scheduler.pace.step == 1
    assert not again.complete
    assert of(ev.Finish, again.handle(ev.Tick(), 0.0)) == [ev.Finish(step=1)]


def test_a_resumed_engine_counts_to_its_next_snapshot_from_the_one_that_it_resumed_from():
    checkpoint = Checkpoint(every_steps=3, keep=2)
    job = Job("a", overlap=1, syncer_checkpoint=checkpoint)
    state = {**job.engine.to_json(), "step": 10}
    job.engine = Engine.resume(job.engine.spec, epoch=2, state=state)
    job.hello("a")
    found = []
    for step in (11, 12, 13):
        job.report("a", step)
        found += of(ev.TakeSnapshot, job.merge("a", round=step, local_step=step))
    assert [d.step for d in found] == [13]


def test_a_job_that_was_exported_before_is_complete_from_the_start():
    job, _ = finished()
    spec, state = job.engine.spec, job.engine.to_json()
    assert Engine.resume(spec, epoch=2, state=state, exported=True).complete
    longer = RunSpec(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "steps": 5})
    assert not Engine.resume(longer, epoch=2, state=state, exported=True).complete


def test_staleness_is_the_steps_since_the_last_merge_of_a_learner():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.merge("a", "b", round=1, local_step=1)
    job.report_all(2)
    job.contribute("a", round=2, local_step=2)
    job.dropped("b", round=2)
    job.merged(round=2)
    assert job.engine.step == 2
    assert (job.engine.staleness(job["a"]), job.engine.staleness(job["b"])) == (0, 1)


def test_a_learner_that_was_never_merged_is_as_stale_as_the_job_is_old():
    job = Job("a", fragments=1, overlap=1)
    for step in (1, 2, 3):
        job.report("a", step)
    assert job.engine.staleness(job["a"]) == 3
