"""What the coordinator does with each decision, and what it keeps of each event."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from diloco.codec import formats
from diloco.errors import AbortedError, DilocoError, StaleIncarnationError, UnavailableError
from diloco.model.fragments import Tensor
from diloco.spec import Checkpoint
from diloco_syncer.attempts import Attempt
from diloco_syncer.coordinator import MERGE_WINDOW_BYTES, BrokenStateError, ParametersReceived
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Applicant
from diloco_syncer.core.engine import HEARTBEAT_SECONDS
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))


def fresh(**changes):
    return DrivenSyncer(driven_spec(**changes))


def begin(*, learners=1, **changes):
    syncer = fresh(**changes)
    joined = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(learners)]
    joined[0].initialise([random_delta(f, f.index, size=1.0) for f in joined[0].layout.fragments])
    for learner in joined:
        learner.received()
    return syncer, joined


def of_kind(learner, kind):
    messages = learner.received()
    return [getattr(m, kind) for m in messages if m.WhichOneof("kind") == kind]


def theta(syncer, fragment):
    return syncer.facts.parameters.current(fragment).theta_N


def test_before_the_first_event_others_may_read_what_it_begins_with():
    syncer = fresh()
    assert syncer.coordinator.facts.initialiser is None
    assert syncer.coordinator.facts.layout is None


def test_the_start_is_written_down_and_a_tick_is_due_at_once():
    syncer = fresh()
    assert syncer.coordinator.start(7.0) == 7.0
    assert syncer.lines[-1] == {
        "event": "start", "step": 0, "steps": 1000, "fragments": 2, "interval": 2, "quorum": 1,
        "spec": syncer.spec.hash, "learners": {"eu": 4},
    }  # fmt: skip


def test_the_next_tick_is_due_when_the_engine_asks_for_it():
    syncer = fresh()
    assert syncer.coordinator.handle(ev.Tick(), 3.0) == 3.0 + HEARTBEAT_SECONDS


def test_a_learner_is_welcomed_with_its_identity():
    syncer = fresh()
    syncer.state.run = "a"
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    [welcome] = of_kind(learner, "welcome")
    assert welcome.run == "a"
    assert (welcome.epoch, welcome.incarnation, welcome.step, welcome.steps) == (1, 1, 0, 1000)
    assert syncer.sessions.incarnation("eu/0") == 1


def test_the_first_learner_is_asked_for_the_initial_model():
    syncer = fresh()
    first, second = (DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(2))
    assert len(of_kind(first, "initialise")) == 1
    assert of_kind(second, "initialise") == []
    assert syncer.facts.initialiser == "eu/0"


def test_the_model_may_change_only_while_no_learner_is_connected_and_nothing_exists():
    other = (Tensor(name="other", shape=(7,), dtype="float32"), *TENSORS)
    syncer = fresh()
    first = DrivenLearner(syncer, "eu/0", TENSORS)
    with pytest.raises(DilocoError, match="a different model"):
        DrivenLearner(syncer, "eu/1", other)
    syncer.sessions.close(first.session)
    DrivenLearner(syncer, "eu/1", other)
    assert len(syncer.facts.layout.tensors) == 5
    syncer, [learner] = begin()
    syncer.sessions.close(learner.session)
    with pytest.raises(DilocoError, match="a different model"):
        DrivenLearner(syncer, "eu/1", other)


def test_an_incarnation_is_presented_again_only_as_the_engine_knows_it():
    syncer, [learner] = begin()
    mine = {
        "job": "j", "learner": "eu/0", "region": "eu", "spec_hash": syncer.spec.hash,
        "tensors": TENSORS,
    }  # fmt: skip
    session = syncer.coordinator.admit(Applicant(**mine, incarnation=learner.incarnation))
    assert syncer.coordinator.facts.layout is not None
    assert session.learner == "eu/0"
    with pytest.raises(StaleIncarnationError):
        syncer.coordinator.admit(Applicant(**mine, incarnation=learner.incarnation + 1))


def test_the_first_initial_model_stays_and_both_senders_learn_that_it_exists():
    syncer, _ = begin()
    parameters, adopted = syncer.facts.parameters, []
    syncer.run(
        ParametersReceived(
            learner="eu/0", parameters=object(), adopted=lambda: adopted.append(syncer.facts)
        )
    )
    assert [n["learner"] for n in syncer.lines if n["event"] == "initialised"] == ["eu/0"]
    assert syncer.facts.parameters is parameters
    assert [facts.parameters for facts in adopted] == [parameters]
    ParametersReceived(learner="eu/0", parameters=parameters).adopted()


def test_facts_are_those_after_the_event_when_its_sender_is_notified():
    syncer = fresh()
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    learner.initialise([random_delta(f, f.index, size=1.0) for f in learner.layout.fragments])
    [ready] = of_kind(learner, "ready")
    assert [(v.epoch, v.step) for v in ready.versions] == [(1, 0), (1, 0)]
    assert syncer.facts.parameters is syncer.state.parameters is not None


def test_a_session_ends_with_the_error_that_the_engine_names():
    syncer, [learner] = begin()
    again = DrivenLearner(syncer, "eu/0", TENSORS)
    errors = [m for m in learner.received() if isinstance(m, DilocoError)]
    assert [type(e) for e in errors] == [StaleIncarnationError]
    assert "joined again" in str(errors[0])
    syncer.coordinator._carry_out(ev.Close(session=again.session.number, reason="?", detail="why"))
    [error] = [m for m in again.received() if isinstance(m, DilocoError)]
    assert (type(error), str(error)) == (UnavailableError, "why")


def test_completion_reaches_a_learner_with_the_last_step():
    syncer, [learner] = begin()
    syncer.state.engine.scheduler.step = 7
    syncer.coordinator._carry_out(ev.AnnounceComplete(learner="eu/0"))
    assert [complete.step for complete in of_kind(learner, "complete")] == [7]


def test_announced_fragments_reach_their_learners_with_step_and_length_of_the_job():
    syncer, (first, second) = begin(learners=2)
    decision = ev.AnnounceFragments(learners=("eu/1",), step=5, fragments=(1, 0))
    syncer.coordinator._carry_out(decision)
    assert of_kind(first, "open") == []
    [opened] = of_kind(second, "open")
    assert (opened.step, opened.steps, list(opened.fragments)) == (5, 1000, [1, 0])


def test_a_pull_reaches_its_members_and_its_result_all_learners():
    syncer, (first, second) = begin(learners=2)
    [pull] = first.step()
    assert (pull.round, pull.attempt, pull.fragment, pull.probe) == (1, 1, 1, False)
    assert [(v.epoch, v.step) for v in pull.versions] == [(1, 0)]
    messages = second.received()
    kinds = [m.WhichOneof("kind") for m in messages]
    assert "pull" not in kinds
    [result] = [m.result for m in messages if m.WhichOneof("kind") == "result"]
    assert (result.round, result.attempt, result.fragment) == (1, 1, 1)
    attempt = syncer.attempts.get(1, 1)
    assert (attempt.fragment, attempt.version, attempt.probe) == (1, (1, 1), False)


def test_a_probe_reaches_its_learner_only_and_has_no_result():
    syncer, (first, second) = begin(learners=2)
    probe = ev.ProbeLearner(round=4, attempt=9, fragment=1, learner="eu/0")
    syncer.coordinator._carry_out(probe)
    [pull] = of_kind(first, "pull")
    assert (pull.round, pull.attempt, pull.fragment, pull.probe) == (4, 9, 1, True)
    assert second.received() == []
    attempt = syncer.attempts.get(4, 9)
    assert (attempt.fragment, attempt.version, attempt.probe) == (1, (1, 4), True)


@pytest.mark.parametrize(("up", "window"), [("FP32", 16), ("BF16", 32), ("Int4", 120)])
def test_a_member_may_be_ahead_by_so_many_bytes(monkeypatch, up, window):
    """As encoded: a chunk of a smaller format counts for less."""
    seen = {}

    class StopError(Exception):
        pass

    def merge(**arguments):
        seen.update(arguments)
        raise StopError

    monkeypatch.setattr("diloco_syncer.coordinator.FragmentMerge", merge)
    syncer, [learner] = begin(
        wire_up=up, wire_down="BF16", merge="Radial", outer_learning_rate=0.5, outer_momentum=0.25,
        outer_nesterov=True,
    )  # fmt: skip
    learner.step()
    with pytest.raises(StopError):
        syncer.coordinator._carry_out(
            ev.BeginMerge(round=1, attempt=1, fragment=1, contributions=())
        )
    chunk_bytes = formats.encoded_bytes(formats.format_of(up), 1 << 18)
    assert seen["window"] == MERGE_WINDOW_BYTES // chunk_bytes
    assert window - 8 <= seen["window"] <= window + 8
    assert (seen["merge"], seen["down"], seen["contributions"]) == ("Radial", formats.BF16, ())
    assert seen["outer"].factors == (0.5, 0.25, 1.0, 0.25)
    assert seen["fragment"] is syncer.facts.layout.fragments[1]
    current = syncer.facts.parameters.current(1)
    assert seen["theta_N"] is current.theta_N
    assert seen["momentum_N"] is current.momentum_N


def test_a_merge_needs_a_pull_and_a_commit_a_merge():
    syncer, [learner] = begin()
    with pytest.raises(AssertionError, match="a merge without a pull"):
        syncer.coordinator._carry_out(
            ev.BeginMerge(round=9, attempt=1, fragment=1, contributions=())
        )
    commit = ev.Commit(round=9, attempt=1, fragment=1, changed=True)
    with pytest.raises(AssertionError, match="a commit without a merge"):
        syncer.coordinator._carry_out(commit)
    learner.step()
    with pytest.raises(AssertionError, match="a commit without a merge"):
        syncer.coordinator._carry_out(ev.Commit(round=1, attempt=1, fragment=1, changed=True))


def test_a_commit_without_a_change_leaves_everything_as_it_is():
    syncer, [learner] = begin()
    before = theta(syncer, 1)
    syncer.coordinator._carry_out(ev.Commit(round=9, attempt=1, fragment=1, changed=False))
    assert theta(syncer, 1) is before
    assert of_kind(learner, "committed") == []


def test_a_commit_makes_a_new_version_that_is_sent_to_all_learners():
    syncer, (learner, other) = begin(learners=2)
    [pull] = learner.step()
    upload = learner.upload(pull, random_delta(learner.layout.fragments[1], 1))
    upload.send_all()
    syncer.run()
    upload.resume().send_all()
    syncer.run()
    assert syncer.facts.parameters.current(1).version == (1, 1)
    [committed] = of_kind(other, "committed")
    assert (committed.fragment, committed.version.epoch, committed.version.step) == (1, 1, 1)
    assert syncer.attempts.get(1, 1).outcome is True
    assert np.any(syncer.facts.parameters.current(1).theta_N)
    vectors = 2  # Θ and momentum of the fragment
    assert syncer.coordinator.vector_bytes == vectors * 4 * learner.layout.fragments[1].elements


def test_an_aborted_attempt_is_forgotten():
    syncer, [learner] = begin()
    learner.step()
    attempt = syncer.attempts.get(1, 1)
    syncer.coordinator._carry_out(ev.AbortMerge(round=1, attempt=1, reason="why"))
    assert syncer.attempts.get(1, 1) is None
    assert attempt.outcome is False
    with pytest.raises(AbortedError, match=r"^why$"):
        attempt.running()


def test_the_attempts_of_the_last_tau_plus_one_commits_stay_for_chunks_requested_again():
    attempts = fresh(overlap=2, fragments=4, interval=4).attempts
    for round_ in (1, 2, 3, 4):
        attempt = Attempt(
            round=round_, attempt=1, fragment=0, version=(1, round_), members=("eu/0",)
        )
        attempts.add(attempt)
        attempts.commit(attempt)
    assert [r for r in (1, 2, 3, 4) if attempts.get(r, 1)] == [2, 3, 4]


def test_an_orderly_end_keeps_what_is_not_durable_yet():
    assert fresh().coordinator.last_snapshot() is None, "nothing exists"
    syncer, _ = begin()
    assert syncer.coordinator.last_snapshot().step == 0
    syncer.run(ev.SnapshotDone(step=0))
    assert syncer.coordinator.last_snapshot() is None, "it is durable"
    syncer.state.engine.scheduler.step = 1
    last = syncer.coordinator.last_snapshot()
    assert (last.step, last.epoch) == (1, syncer.state.engine.epoch)
    assert last.meta["engine"] == syncer.state.engine.to_json()
    syncer.coordinator._break("test")
    assert syncer.coordinator.last_snapshot() is None
    with pytest.raises(BrokenStateError, match="test"):
        syncer.coordinator.handle(ev.Tick(), 0.0)


def test_a_question_may_change_what_the_engine_does_not_own_and_is_visible_at_once():
    syncer, _ = begin()

    def forget(state):
        state.parameters = None
        return 42

    assert syncer.coordinator.ask(forget) == 42
    assert syncer.facts.parameters is None


def test_an_exported_model_is_kept_with_its_place_and_digest():
    syncer, _ = begin()
    syncer.run(ev.Exported(step=9, path="model", sha256="abc"))
    model = syncer.state.model
    assert (model.path, model.sha256, model.step) == ("model", "abc", 9)


def test_the_disk_gets_snapshots_and_the_last_model_with_the_tokens_of_all():
    syncer, [learner] = begin()
    learner.step()
    assert [s.step for s in syncer.writer.snapshots] == [0]
    exports = []
    syncer.writer.export = lambda parameters, **rest: exports.append((parameters, rest))
    syncer.coordinator._carry_out(ev.Finish(step=5))
    assert exports == [(syncer.state.parameters, {"step": 5, "tokens": 100})]


def test_every_decision_is_observed_before_it_is_carried_out():
    seen = []
    syncer = fresh()
    syncer.coordinator._observe = seen.append
    DrivenLearner(syncer, "eu/0", TENSORS)
    kinds = [type(d).__name__ for d in seen]
    assert kinds.index("Admit") < kinds.index("RequestInitial")
    assert kinds[-1] == "WakeAt"


def test_a_line_after_which_a_person_must_act_is_logged_as_a_warning_and_no_merge_at_all(caplog):
    caplog.set_level(logging.INFO, logger="diloco_syncer.coordinator")
    syncer = fresh()
    for event in ("halt", "join", "merge"):
        syncer.coordinator._carry_out(ev.Log(event=event, fields={}))
    assert [line["event"] for line in syncer.lines[-3:]] == ["halt", "join", "merge"]
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "halt {}"), ("INFO", "join {}"),
    ]  # fmt: skip


def test_the_numbers_of_learners_in_force_decide_who_is_admitted():
    syncer, _ = begin()
    syncer.run(ev.LimitsChanged(learners={"eu": 1}))
    with pytest.raises(UnavailableError, match="beyond the 1 learners of region eu"):
        DrivenLearner(syncer, "eu/1", TENSORS)


def test_the_model_of_a_session_counts_before_its_first_message_was_processed():
    syncer = fresh()
    stated = {"job": "j", "region": "eu", "spec_hash": syncer.spec.hash}
    syncer.coordinator.admit(Applicant(**stated, learner="eu/0", tensors=TENSORS))
    with pytest.raises(UnavailableError, match="a different model than another learner"):
        syncer.coordinator.admit(Applicant(**stated, learner="eu/1", tensors=TENSORS[1:]))


def test_a_snapshot_is_preceded_by_the_state_of_the_blocks_that_it_holds():
    """So the audit can compare what is in it with all lines before (diloco audit, "Blocks of data")."""
    syncer, [learner] = begin(syncer_checkpoint=Checkpoint(every_steps=1, keep=3))
    number = learner.session.number
    blocks = {
        "session": number,
        "learner": "eu/0",
        "items": 30,
        "size": 10,
        "open": (),
        "trained": (),
    }
    syncer.run(ev.SnapshotDone(step=0), ev.BlocksStated(**blocks, wanted=2))
    before = len(syncer.lines)
    [pull] = learner.step()
    upload = learner.upload(pull, random_delta(learner.layout.fragments[pull.fragment], 1)).send(1)
    syncer.run()
    upload.resume().send_all()
    syncer.run()
    assert [snapshot.step for snapshot in syncer.writer.snapshots] == [0, 1]
    assert [line["event"] for line in syncer.lines[before:]] == ["merge", "data"]
    assert syncer.lines[-1]["open"] == [{"first": 0, "count": 2}]


def test_leases_are_sent_to_the_learner_that_they_are_for():
    syncer, [first, second] = begin(learners=2)
    stated = ev.BlocksStated(
        session=second.session.number, learner="eu/1", items=30, size=10, wanted=2, open=(), trained=()
    )  # fmt: skip
    syncer.run(stated)
    [leases] = of_kind(second, "leases")
    assert list(leases.serials) == [0, 1]
    assert of_kind(first, "leases") == []


def test_a_syncer_that_starts_states_the_blocks_of_its_snapshot():
    syncer, [learner] = begin()
    stated = ev.BlocksStated(
        session=learner.session.number, learner="eu/0", items=30, size=10, wanted=2, open=(), trained=()
    )  # fmt: skip
    syncer.run(stated)
    syncer.coordinator.start(9.0)
    assert [line["event"] for line in syncer.lines[-2:]] == ["start", "data"]
    assert syncer.lines[-1]["open"] == [{"first": 0, "count": 2}]
