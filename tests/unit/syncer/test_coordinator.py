"""The syncer without threads: decisions carried out, faults while doing so, snapshots, the end."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.model.fragments import Tensor, cut
from diloco.spec import Checkpoint
from diloco_syncer.coordinator import BrokenStateError
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
from diloco_syncer.storage.parameters import Parameters
from diloco_testing.learners.scripted import random_delta, thetas_of
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))


class Faults:
    """Raises at named points, as often as asked."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def __call__(self, point: str) -> None:
        if self.left.get(point, 0) > 0:
            self.left[point] -= 1
            raise MemoryError(f"Unable to allocate 1.6 GiB at {point}")


class RecordingEngine(Engine):
    """The engine, and what it was given."""

    def handle(self, event, now):
        self.__dict__.setdefault("seen", []).append(event)
        return super().handle(event, now)


def begin(spec=None, *, learners=1, fault=lambda point: None):
    spec = spec or driven_spec()
    syncer = DrivenSyncer(spec, engine=RecordingEngine(spec=spec, epoch=1), fault=fault)
    joined = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(learners)]
    joined[0].initialise(thetas_of(joined[0]))
    for learner in joined:
        assert "ready" in learner.kinds()
    return syncer, joined


def deliver(syncer, learner, pull, delta_N):
    """A whole upload of the only member, up to its commit if its turn has come."""
    upload = learner.upload(pull, delta_N)
    upload.send_all()
    syncer.run()
    upload.resume().send_all()
    assert upload.replies[-1].done, upload.replies
    syncer.run()


def theta(syncer, fragment):
    return syncer.facts.parameters.current(fragment).theta_N


def test_a_round_from_report_to_commit():
    syncer, [learner] = begin()
    [pull] = learner.step()
    delta_N = random_delta(learner.layout.fragments[pull.fragment], 1)
    before_N = theta(syncer, pull.fragment).copy()
    deliver(syncer, learner, pull, delta_N)
    np.testing.assert_allclose(theta(syncer, pull.fragment), before_N - delta_N, atol=1e-6)
    assert syncer.merged() == [1]


def test_09_a_learner_that_joins_during_a_merge_receives_the_version_of_its_commit():
    """Its Ready named the version before; without the commit it would train on that forever."""
    syncer, [learner] = begin()
    [pull] = learner.step()
    upload = learner.upload(pull, random_delta(learner.layout.fragments[pull.fragment], 1)).send(1)
    syncer.run()
    late = DrivenLearner(syncer, "eu/1", TENSORS)
    [ready] = [m.ready for m in late.received() if m.WhichOneof("kind") == "ready"]
    assert ready.versions[pull.fragment].step == 0
    upload.resume().send_all()
    syncer.run()
    [commit] = [m.committed for m in late.received() if m.WhichOneof("kind") == "committed"]
    version = (commit.version.epoch, commit.version.step)
    assert (commit.fragment, version) == (pull.fragment, (1, pull.round))
    assert syncer.facts.parameters.current(pull.fragment).version == version


def test_a_refused_applicant_opens_no_session():
    syncer, _ = begin()
    other = (Tensor(name="other", shape=(5,), dtype="float32"), *TENSORS)
    with pytest.raises(Exception, match="a different model"):
        DrivenLearner(syncer, "eu/1", other)
    assert len(syncer.sessions) == 1


# ---------------------------------------------------------------- faults


def test_the_welcome_names_the_run_and_the_starts_whose_versions_count():
    syncer = DrivenSyncer(driven_spec())
    state = syncer.state
    state.run, state.start_id, state.snapshot_start_id = (
        "this run",
        "this start",
        "an earlier start",
    )
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    [welcome] = [m.welcome for m in learner.received() if m.WhichOneof("kind") == "welcome"]
    assert welcome.run == "this run"
    assert (welcome.start_id, welcome.snapshot_start_id) == ("this start", "an earlier start")


@pytest.mark.parametrize("point", ["BeginMerge", "Pull", "AnnounceFragments", "Log"])
def test_a_decision_that_cannot_be_carried_out_is_reported_to_the_engine_before_anything_else(
    point,
):
    fault = Faults()
    syncer, [learner] = begin(fault=fault)
    fault.left[point] = 1
    pulls = learner.step()
    if pulls:
        learner.upload(pulls[0], random_delta(learner.layout.fragments[0], 1)).send_all()
        syncer.run(ev.Dropped(learner="eu/0", round=1, attempt=9, reason="", detail=""))
    if fault.left[point]:
        DrivenLearner(syncer, "eu/1", TENSORS)  # a join is logged and announced
    assert fault.left[point] == 0, "the fault happened"
    seen = syncer.state.engine.__dict__["seen"]
    [failed] = [event for event in seen if isinstance(event, ev.Failed)]
    assert type(failed.decision).__name__ == point
    assert "1.6 GiB" in failed.reason


def test_the_other_decisions_of_a_batch_are_carried_out():
    fault = Faults()
    syncer, [learner] = begin(fault=fault)
    fault.left["AnnounceReady"] = 1
    second = DrivenLearner(syncer, "eu/1", TENSORS)
    kinds = second.kinds()
    assert "welcome" in kinds
    assert "ready" not in kinds
    assert "open" in kinds
    assert learner.step()


def test_a_tick_is_due_at_once_after_a_failed_decision():
    fault = Faults()
    syncer, [learner] = begin(fault=fault)
    fault.left["Pull"] = 1
    learner.local_step += 1
    wake = syncer.coordinator.handle(
        ev.Reported(
            session=learner.session.number, learner="eu/0", local_step=1, steps=(1, 1), tokens=(9, 9),
            offers=frozenset((0, 1)), total_tokens=9, global_step=0, step_seconds=1.0,
            sync_seconds=0.0, loss=None,
        ),
        7.0,
    )  # fmt: skip
    assert wake == 7.0
    assert syncer.coordinator.handle(ev.Tick(), 7.0) > 7.0


def test_an_engine_that_raises_breaks_the_syncer_for_good():
    fault = Faults()
    syncer, [learner] = begin(fault=fault)
    fault.left["Reported"] = 1
    with pytest.raises(BrokenStateError, match="cannot process Reported: MemoryError"):
        learner.step()
    with pytest.raises(BrokenStateError):
        syncer.run(ev.Tick())
    assert syncer.coordinator.last_snapshot() is None


def test_a_merge_that_is_counted_and_not_committed_is_never_made_durable():
    fault = Faults()
    spec = driven_spec(syncer_checkpoint=Checkpoint(every_steps=1, keep=3))
    syncer, [learner] = begin(spec, fault=fault)
    syncer.run(ev.SnapshotDone(step=0))
    [pull] = learner.step()
    before_N, snapshots = theta(syncer, pull.fragment), len(syncer.writer.snapshots)
    fault.left["Commit"] = 1
    with pytest.raises(BrokenStateError, match="Commit"):
        deliver(syncer, learner, pull, random_delta(learner.layout.fragments[pull.fragment], 1))
    assert theta(syncer, pull.fragment) is before_N
    assert len(syncer.writer.snapshots) == snapshots
    assert syncer.coordinator.last_snapshot() is None


# ---------------------------------------------------------------- snapshots


def restored(snapshot, spec):
    parameters = Parameters.from_snapshot(
        dict(snapshot.arrays), snapshot.meta["theta"], spec, keep_old=4
    )
    return Engine.resume(spec, epoch=2, state=dict(snapshot.meta["engine"])), parameters


def test_a_snapshot_is_the_state_at_its_commit_boundary_with_several_rounds_in_flight():
    """Round 2 is merged before round 1, and round 3 is on its way when both are committed."""
    spec = driven_spec(
        fragments=4, interval=4, overlap=3, syncer_checkpoint=Checkpoint(every_steps=1, keep=3)
    )
    syncer, [learner] = begin(spec)
    syncer.run(ev.SnapshotDone(step=0))
    expected = {0: thetas_of(learner)}
    pulls, deltas = [], {}
    for number in range(1, 9):
        pulls += learner.step()
        deltas[number] = random_delta(learner.layout.fragments[(number - 1) % 4], number)
    assert [p.round for p in pulls[:3]] == [1, 2, 3]
    uploads = {}
    for pull in pulls[:3]:
        uploads[pull.round] = learner.upload(pull, deltas[pull.round], local_step=pull.round).send(
            1
        )
        syncer.run()
    for step in (2, 1):
        uploads[step].resume().send_all()
        assert uploads[step].replies[-1].done
        syncer.run()
    assert syncer.merged() == [1, 2]
    assert syncer.state.engine.scheduler.in_flight
    at = {p.round: p.fragment for p in pulls}
    for step in (1, 2):
        expected[step] = [t.copy() for t in expected[step - 1]]
        expected[step][at[step]] -= deltas[step]
    [snapshot] = syncer.writer.snapshots[1:]
    assert snapshot.step == 2
    # What happens after the boundary, before the writer gets to it, is not in the snapshot.
    uploads[3].resume().send_all()
    syncer.run()
    learner.step()
    assert syncer.merged() == [1, 2, 3]
    engine, parameters = restored(snapshot, spec)
    assert (engine.step, engine.scheduler.merges) == (2, 2)
    for fragment, theta_N in enumerate(expected[2]):
        np.testing.assert_allclose(parameters.current(fragment).theta_N, theta_N, atol=1e-6)
    versions = [parameters.current(p).version for p in range(4)]
    assert sorted(step for _, step in versions) == [0, 0, 1, 2]


def test_a_snapshot_names_the_step_that_it_holds_when_the_next_steps_have_no_round():
    """P < H: the engine moves on to steps without a fragment while it decides about a commit."""
    spec = driven_spec(
        fragments=2, interval=8, overlap=1, syncer_checkpoint=Checkpoint(every_steps=1, keep=3)
    )
    syncer, [learner] = begin(spec)
    syncer.run(ev.SnapshotDone(step=0))
    pulls = []
    while not pulls:
        pulls = learner.step()
    for _ in range(3):
        learner.step()
    deliver(syncer, learner, pulls[0], random_delta(learner.layout.fragments[pulls[0].fragment], 1))
    snapshot = syncer.writer.snapshots[-1]
    assert snapshot.step == pulls[0].round
    assert snapshot.meta["engine"]["step"] == snapshot.step
    assert snapshot.meta["engine"]["merges"] == 1
    assert syncer.state.engine.step > snapshot.step, "the engine is further by now"


# ---------------------------------------------------------------- the end


def complete(steps=1):
    """One learner trained the last step; its snapshot is with the writer."""
    spec = driven_spec(steps=steps)
    syncer, [learner] = begin(spec)
    syncer.run(ev.SnapshotDone(step=0))
    for _ in range(steps):
        [pull] = learner.step()
        deliver(syncer, learner, pull, random_delta(learner.layout.fragments[pull.fragment], 1))
    assert syncer.writer.exports == []
    assert syncer.writer.snapshots[-1].step == steps
    learner.received()
    return syncer, learner


DONE = ev.SnapshotDone(step=1)
EXPORTED = ev.Exported(step=1, path="model.safetensors", sha256="00")


def test_learners_receive_complete_when_snapshot_and_model_are_durable():
    syncer, learner = complete()
    syncer.run(DONE)
    assert syncer.writer.exports == [1]
    assert "complete" not in learner.kinds()
    assert not syncer.state.engine.complete
    syncer.run(EXPORTED)
    assert "complete" in learner.kinds()
    assert (syncer.state.engine.complete, syncer.state.model.sha256) == (True, "00")


@pytest.mark.parametrize(
    "failure",
    [
        (DONE, ev.ExportFailed(reason="No space left")),
        (ev.SnapshotDone(step=None, reason="No space left"),),
    ],
)
def test_a_job_whose_model_or_snapshot_was_not_written_is_not_complete(failure):
    syncer, learner = complete()
    syncer.run(*failure)
    late = DrivenLearner(syncer, "eu/1", TENSORS)
    assert "complete" not in learner.kinds() + late.kinds()
    assert "No space left" in syncer.state.engine.waiting_for()
    for _ in range(8):  # it is tried again
        syncer.now += 1.0
        beats = [ev.Heartbeat(session=x.session.number, learner=x.name) for x in (learner, late)]
        syncer.run(*beats, ev.Tick())
    syncer.run(DONE, EXPORTED)
    assert "complete" in learner.kinds()
    assert "complete" in late.kinds()


def test_a_job_at_its_end_without_a_model_exports_it_after_a_restart():
    spec = driven_spec(steps=5)
    layout = cut(TENSORS, num_fragments=2)
    thetas = [np.zeros(f.elements, np.float32) for f in layout.fragments]
    engine = Engine(spec=spec, epoch=2, initialised=True, start_step=5)
    parameters = Parameters(layout, thetas, [(1, 4), (1, 5)])
    syncer = DrivenSyncer(spec, engine=engine, parameters=parameters)
    syncer.run(ev.Tick())
    assert [snapshot.step for snapshot in syncer.writer.snapshots] == [5]
    syncer.run(ev.SnapshotDone(step=5))
    assert syncer.writer.exports == [5]
    assert not syncer.state.engine.complete
