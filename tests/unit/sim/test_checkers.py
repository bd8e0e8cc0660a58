"""Each checker accepts the histories of the real engine, and finds a history that breaks its promise."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from diloco.spec import RunSpec
from diloco_sim.checkers.checker import Checker, Checkers, Violation
from diloco_sim.checkers.completion import Completion
from diloco_sim.checkers.durable import REMEMBERED, Durable
from diloco_sim.checkers.incarnations import Incarnations
from diloco_sim.checkers.observations import Captured, Copied, Restored
from diloco_sim.checkers.quorum import Quorum
from diloco_sim.checkers.reports import Reports
from diloco_sim.checkers.rounds import Rounds
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_testing.syncers.virtual_job import VirtualJob

Event = Any


def start(epoch: int = 1, step: int = 0) -> Event:
    return {"event": "start", "epoch": epoch, "step": step}


def join(learner: str, incarnation: int, *, fresh: bool = True) -> Event:
    return {
        "event": "join",
        "epoch": 1,
        "learner": learner,
        "incarnation": incarnation,
        "fresh": fresh,
        "step": 0,
    }


def leave(learner: str, incarnation: int) -> Event:
    return {"event": "leave", "epoch": 1, "learner": learner, "incarnation": incarnation}


def merge(step: int, *members: tuple[str, int, int], fragment: int = 0, epoch: int = 1) -> Event:
    """Members are (learner, incarnation, t_m)."""
    lines = [{"learner": m, "incarnation": i, "step": t} for m, i, t in members]
    return {"event": "merge", "epoch": epoch, "step": step, "fragment": fragment, "members": lines}


def pull(round_: int, attempt: int = 1, fragment: int = 0, learners: str = "ab") -> Event:
    return ev.Pull(round=round_, attempt=attempt, fragment=fragment, learners=tuple(learners))


def begin(round_: int, attempt: int = 1, fragment: int = 0, learners: str = "ab") -> Event:
    contributions = tuple(
        Contribution(
            learner=learner, incarnation=1, round=round_, attempt=attempt, local_step=1, steps=1,
            tokens=1, base=(1, 0), format=1, norms=(),
        )
        for learner in learners
    )  # fmt: skip
    return ev.BeginMerge(
        round=round_, attempt=attempt, fragment=fragment, contributions=contributions
    )


def abort(round_: int, attempt: int = 1) -> Event:
    return ev.AbortMerge(round=round_, attempt=attempt, reason="lost")


def commit(round_: int, attempt: int = 1, fragment: int = 0, *, changed: bool = True) -> Event:
    return ev.Commit(round=round_, attempt=attempt, fragment=fragment, changed=changed)


def saved(step: int, *, ok: bool = True) -> Event:
    return {"event": "snapshot", "epoch": 1, "step": step, "ok": ok}


def announce(learner: str = "a") -> Event:
    return ev.AnnounceComplete(learner=learner)


def feed(checker: Checker, events: tuple[Event, ...]) -> None:
    checkers = Checkers([checker])
    for now, event in enumerate(events):
        checkers.observe(event, float(now))
    checkers.finish(float(len(events)))


A = ("a", 1, 5)

GOOD: list[tuple[Checker, tuple[Event, ...]]] = [
    (Reports(), (merge(1, A, ("b", 2, 5)), merge(2, ("a", 1, 6), ("b", 2, 7)))),
    (Reports(), (merge(1, A), merge(2, ("a", 3, 5)))),
    (Reports(), (start(), merge(1, A), merge(2, ("a", 1, 6)), start(2, 1), merge(2, ("a", 1, 6)))),
    (Quorum(2), (merge(1, A, ("b", 2, 5)), begin(1))),
    (Incarnations(), (start(), join("a", 1), merge(1, A), join("a", 2), merge(2, ("a", 2, 1)))),
    (Incarnations(), (start(), join("a", 1), leave("a", 1), join("a", 1, fresh=False), merge(1, A))),
    (Incarnations(), (start(), join("a", 1), join("a", 2), leave("a", 1), merge(1, ("a", 2, 5)))),
    (Rounds(1), (pull(1), begin(1), commit(1), pull(2, fragment=1), begin(2, 1, 1), commit(2, 1, 1))),
    (Rounds(2), (pull(1), pull(2, fragment=1), begin(2, 1, 1), begin(1), commit(1), commit(2, 1, 1))),
    (Rounds(1), (pull(1), abort(1), pull(1, 2), begin(1, 2, 0, "a"), commit(1, 2))),
    (Rounds(1), (pull(1), abort(1), commit(1, changed=False), pull(5))),
    (Rounds(1), (pull(1), start(2, 0), pull(1), begin(1), commit(1))),
    (Completion(40, lambda: True, expected=True), (saved(20), saved(40), announce())),
    (Completion(40, lambda: False), (saved(20),)),
]  # fmt: skip

BAD: list[tuple[str, Checker, tuple[Event, ...]]] = [
    ("is merged at global step 2, it was merged at 1", Reports(), (merge(1, A), merge(2, A, fragment=1))),
    ("is merged at global step 1", Reports(), (merge(1, A, A),)),
    ("it was merged at 2 before", Reports(undone=False), (merge(2, ("a", 1, 6)), start(2, 1), merge(3, ("a", 1, 6)))),
    ("it was merged at 1 before", Reports(), (merge(1, ("a", 1, 6)), start(2, 1), merge(2, ("a", 1, 6)))),
    ("has 1 learners, the quorum is 2", Quorum(2), (merge(1, A),)),
    ("has 1 learners, the quorum is 2", Quorum(2), (merge(1, A, ("a", 1, 6)),)),
    ("has 1 learners, the quorum is 2", Quorum(2), (begin(1, learners="a"),)),
    ("of a is merged, 2 is connected", Incarnations(), (start(), join("a", 1), join("a", 2), merge(1, A))),
    ("a is merged while it is not connected", Incarnations(), (start(), join("a", 1), leave("a", 1), merge(1, A))),
    ("a is merged while it is not connected", Incarnations(), (start(), join("a", 1), start(2), merge(1, A, epoch=2))),
    ("incarnation 1 of a joins after 2", Incarnations(), (start(), join("a", 2), join("a", 1, fresh=False))),
    ("has incarnation 1 of its predecessor", Incarnations(), (start(), join("a", 1), join("a", 1))),
    ("a merge of epoch 1 in epoch 2", Incarnations(), (start(), start(2), join("a", 1), merge(1, A))),
    ("epoch 2 comes after 2", Incarnations(), (start(2), start(2))),
    ("fragment 0 is pulled while round 1 of it runs", Rounds(2), (pull(1), pull(5))),
    ("fragment 0 is pulled while round 1 of it runs", Rounds(2), (pull(1), abort(1), pull(5))),
    ("rounds 1, 2 are in flight, at most 1 may be", Rounds(1), (pull(1), pull(2, fragment=1))),
    ("attempt 1 is pulled after attempt 1", Rounds(1), (pull(1), abort(1), pull(1))),
    ("begins before the one before it ended", Rounds(1), (pull(1), pull(1, 2))),
    ("pulls a learner twice", Rounds(1), (pull(1, learners="aa"),)),
    ("is merged and does not run", Rounds(1), (begin(1),)),
    ("is merged and does not run", Rounds(1), (pull(1), abort(1), begin(1))),
    ("c is merged and was not pulled", Rounds(1), (pull(1), begin(1, learners="ac"))),
    ("a learner is merged twice", Rounds(1), (pull(1), begin(1, learners="aa"))),
    ("fragment 0 is committed without a round", Rounds(1), (commit(1),)),
    ("fragment 0 is committed without a round", Rounds(1), (pull(1), begin(1), commit(1), commit(1))),
    ("is committed and does not run", Rounds(1), (pull(1), begin(1), abort(1), commit(1))),
    ("is committed and does not run", Rounds(1), (pull(1), commit(1, changed=False))),
    ("it is committed before round 1", Rounds(2), (pull(1), pull(2, fragment=1), begin(2, 1, 1), commit(2, 1, 1))),
    ("round 1 is pulled after 2 was committed", Rounds(2), (pull(2), begin(2), commit(2), pull(1))),
    ("newest durable snapshot is of step 20 of 40", Completion(40, lambda: True), (saved(20), announce())),
    ("snapshot is of step 20 of 40", Completion(40, lambda: True), (saved(20), saved(40, ok=False), announce())),
    ("before the model is durable", Completion(40, lambda: False), (saved(40), announce())),
    ("the job is not complete", Completion(40, lambda: True, expected=True), (saved(40),)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_a_good_history_passes(number):
    checker, events = GOOD[number]
    feed(checker, events)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_history_is_a_violation(number):
    sentence, checker, events = BAD[number]
    with pytest.raises(Violation) as found:
        feed(checker, events)
    assert sentence in found.value.sentence
    assert found.value.checker in type(checker).__name__.lower()
    assert f"{found.value.now:.3f} s" in str(found.value)


class CheckedJob(VirtualJob):
    """The real engine and scripted learners, under all checkers."""

    checkers: Checkers

    def _carry_out(self, decision: ev.Decision) -> None:
        if isinstance(decision, ev.Log):
            line = {"epoch": 1, "event": decision.event, **decision.fields}
            self.checkers.observe(json.loads(json.dumps(line)), self.now)
        elif not isinstance(decision, ev.AnnounceComplete):
            self.checkers.observe(decision, self.now)
        super()._carry_out(decision)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_real_engine_passes(seed, delay_seconds):
    source = random.Random(seed)
    learners = {f"eu/{i}": source.uniform(0.5, 2.0) for i in range(4)}
    spec = RunSpec(job="t", steps=60, fragments=4, interval=4, learners={"eu": 4}, quorum=2)
    job = CheckedJob(spec, learners, delay=lambda _: source.uniform(0.0, delay_seconds))
    job.checkers = Checkers([Reports(), Quorum(2), Incarnations(), Rounds(spec.overlap)])
    job.checkers.observe(start(), 0.0)
    for name in learners:
        job.join(name)
    for _ in range(6):
        name, when = source.choice(list(learners)), source.uniform(5.0, 60.0)
        job.at(when, lambda n=name: job.die(n))
        job.at(when + source.uniform(0.1, 9.0), lambda n=name: job.join(n))
    job.run(400)
    job.checkers.finish(job.now)
    assert len(job.merges()) > 30


def test_a_checker_sees_only_what_it_asked_for():
    checkers = Checkers([Quorum(2), Reports()])
    checkers.observe(ev.Tick(), 0.0)
    checkers.observe(pull(1), 0.0)
    with pytest.raises(
        Violation, match=r"quorum: the merge has 1 learners.*global step 3, 1\.500 s"
    ):
        checkers.observe(merge(3, A), 1.5)


def test_durable_forgets_what_no_restart_finds_also_after_a_copy_was_restored():
    checker = Durable()
    for step in range(1, 4 * REMEMBERED):
        checker.observe(Captured(1, step, [], {}), step)
        checker.observe({"event": "snapshot", "ok": True, "step": step, "epoch": 1}, step)
        if step == 10:
            checker.observe(Copied("copy"), step)
        elif step == 20:
            checker.observe(Restored("copy"), step)
    assert len(checker._captured) <= REMEMBERED + 2
