"""What the engine keeps up to date event by event equals what it would compute over all learners."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.codec.formats import FP32
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.readiness import Readiness
from diloco_testing.properties import examples
from diloco_testing.syncers.virtual_job import VirtualJob


class CheckedJob(VirtualJob):
    """Compares after every event; some uploads fail, so that rounds are repeated."""

    compared = 0

    def post(self, event: ev.Event) -> None:
        super().post(event)
        self.compared += 1
        learners, scheduler = self.engine.learners, self.engine.scheduler
        for round_ in scheduler.in_flight:
            pending = [d.deadline for d in round_.members.values() if d.pending]
            assert round_.pending == len(pending)
            found = round_.next_deadline(1e9, 0.0, self.now)
            assert (
                found is None if not pending or not round_.transferring else found <= min(pending)
            )
        open_ = next((r for r in scheduler.in_flight if r.open), None)
        if open_ is not None and self.now >= open_.retry_at:
            fresh = Readiness(learners).ready(open_.fragment)
            assert scheduler._readiness.ready(open_.fragment) == fresh
        self.compare_probes()
        pace = scheduler.pace
        assert pace.may_start() == any(p > pace.step for p in pace.positions.values())
        kept = learners._speeds()
        learners._measured = None
        assert kept == learners._speeds()

    def compare_probes(self) -> None:
        """A probe that is due has begun, if there is something to upload; the next is in time."""
        ejections = self.engine.ejections
        records = [r for r in self.engine.learners.ejected() if not r.ejection.probe]
        due = {record.name: ejections._due(record.ejection) for record in records}
        assert all(self.now < due[r.name] or not r.report.offers for r in records)
        later = [at for at in due.values() if at > self.now]
        assert not later or min(ejections.deadlines(self.now)) <= min(later)


@settings(max_examples=examples(60))
@given(
    history=st.lists(
        st.tuples(
            st.floats(0.1, 40.0),
            st.sampled_from(["die", "join", "blip", "drop"]),
            st.integers(0, 3),
        ),
        max_size=20,
    ),
    quorum=st.integers(1, 3),
    overlap=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_after_every_event_of_any_history_the_kept_answers_are_right(
    history, quorum, overlap, seed
):
    rng = random.Random(seed)
    spec = RunSpec(
        job="t", steps=40, fragments=8, interval=8, overlap=overlap, quorum=quorum,
        learners={"eu": 4},
    )  # fmt: skip
    speeds = {f"eu/{i}": rng.choice([0.5, 1.0, 1.2, 3.0]) for i in range(4)}
    job = CheckedJob(spec, speeds, delay=lambda what: rng.choice([0.0, 0.05, 0.4, 1.7]))

    def drop(name):
        for round_ in job.engine.scheduler.in_flight:
            if name in round_.members:
                job.post(
                    ev.Dropped(
                        learner=name, round=round_.step, attempt=round_.attempt,
                        reason="NotFinite", detail="NaN",
                    )
                )  # fmt: skip
                return

    def act(what, name):
        if what in ("die", "blip"):
            job.die(name)
        if what == "join" or (what == "blip" and not job.learners[name].alive):
            job.join(name, reconnect=what == "blip" and job.learners[name].incarnation > 0)
        if what == "drop":
            drop(name)

    for name in speeds:
        job.join(name)
    for when, what, who in history:
        job.at(when, lambda what=what, name=f"eu/{who}": act(what, name))
    job.run(60.0)
    assert job.compared >= len(speeds)


def reported(engine, session, local_step, *, now, step_seconds=1.0):
    event = ev.Reported(
        session=session, learner=f"eu/{session}", local_step=local_step, steps=(1,) * 4,
        tokens=(1,) * 4, offers=frozenset(range(4)), total_tokens=local_step, global_step=engine.scheduler.pace.step,
        step_seconds=step_seconds, sync_seconds=0.0, loss=None,
    )  # fmt: skip
    return engine.handle(event, now)


def engine_of(learners, **spec):
    engine = Engine(
        spec=RunSpec(job="t", steps=40, fragments=4, interval=4, learners={"eu": learners}, **spec),
        epoch=1,
    )
    for session in range(learners):
        hello = ev.Hello(
            session=session, learner=f"eu/{session}", region="eu", incarnation=session + 1,
            fresh=True, local_step=0, checkpoint_step=0,
        )  # fmt: skip
        engine.handle(hello, 0.0)
    engine.handle(ev.Initialised(learner="eu/0"), 0.0)
    return engine


def test_a_report_that_an_upload_of_another_round_has_overtaken_is_not_counted():
    engine = engine_of(2, quorum=2, overlap=2)
    reported(engine, 0, 1, now=1.0)
    [pull] = [d for d in reported(engine, 1, 1, now=1.1) if isinstance(d, ev.Pull)]
    reported(engine, 0, 2, now=2.0)  # counts for the second round, which waits for eu/1
    part = Contribution(
        learner="eu/0", incarnation=1, round=pull.round, attempt=pull.attempt, local_step=2,
        steps=1, tokens=1, base=(1, 0), format=FP32, norms=(1.0,),
    )  # fmt: skip
    engine.handle(part, 2.1)  # the pull reached eu/0 after its second step
    out = reported(engine, 1, 2, now=2.2)
    assert not [d for d in out if isinstance(d, ev.Pull)], "a quorum of one fresh report"
    out = reported(engine, 0, 3, now=3.0)
    assert [d.learners for d in out if isinstance(d, ev.Pull)] == [("eu/0", "eu/1")]


def test_the_fastest_learner_is_another_one_after_it_has_slowed_down():
    engine = engine_of(2)
    reported(engine, 0, 1, now=1.0, step_seconds=1.0)
    reported(engine, 1, 1, now=1.0, step_seconds=2.0)
    engine.learners.confirm({"eu/0": True, "eu/1": True})
    assert engine.learners.fastest_step_seconds() == 1.0
    for step in range(2, 12):
        reported(engine, 0, step, now=float(step), step_seconds=9.0)
    assert engine.learners.fastest_step_seconds() == 2.0
