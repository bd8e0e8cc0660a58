"""Whom a new process asks for the state of its optimizers, when it asks the next, and what the trainer does then."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_worker.core import events as ev
from diloco_worker.core import trainer as core
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.core.peer_pace import (
    LEAST_BYTES_PER_SECOND,
    MOST_BYTES_PER_SECOND,
    Pace,
    bytes_per_second,
)
from diloco_worker.core.peer_recovery import LEAST_SECONDS, PeerRecovery
from diloco_worker.core.recovery import LocalCheckpoint, began
from diloco_worker.link import session

H = 4
PEERS = (ev.PeerAddress("eu/1", "a:1"), ev.PeerAddress("us/0", "b:1"))
STATE = ev.PeerState(learner="eu/1", local_step=7, global_step=11, bytes=500)


class Process:
    """The link of a process that starts without a checkpoint, in a job of global step 10."""

    def __init__(self, *, peers=PEERS, recovery=True, checkpoint_step=0, use_checkpoint=False):
        self.now = 0.0
        self.core = LinkProtocol(
            slots=[Slot(fragment=0)], has_constants=False, next_delay=lambda: 1.0, reset_delay=lambda: None,
            syncer="s:1", recovery=PeerRecovery(interval=H) if recovery else None,
        )  # fmt: skip
        self(ev.TrainerUpdate(state=TrainerState(checkpoint_step=checkpoint_step)))
        self.welcome = ev.Welcomed(
            epoch=1, incarnation=2, step=10, steps=99, local_step=5, total_tokens=50, heartbeat_seconds=1.0,
            use_checkpoint=use_checkpoint, run="r", peers=peers,
        )  # fmt: skip
        self(self.welcome)
        self.begun = self(ev.ModelReady(versions=((1, 10),)))

    def __call__(self, event):
        return self.core.handle(event, self.now)

    @property
    def state(self):
        return self.core.link_state

    def download(self):
        staged = Staged(fragment=0, version=(1, 10), ticket=1)
        out = self(ev.Downloaded(request=ev.Download(fragment=0), staged=staged))
        return [*out, *self(ev.Placed(fragment=0))]

    def step(self, step):
        return self(ev.Opened(step=step, steps=99, fragments=(0,)))


def asked(decisions):
    return [(d.peer.learner, d.step, d.run) for d in decisions if isinstance(d, ev.AskPeer)]


def dropped(decisions):
    return [d.number for d in decisions if isinstance(d, ev.DropPeer)]


def test_it_asks_the_first_peer_while_it_downloads_the_model():
    process = Process()
    assert asked(process.begun) == [("eu/1", 10, "r")]
    assert [d.fragment for d in process.begun if isinstance(d, ev.Download)] == [0]
    process.download()
    assert (process.state.phase, process.state.peer_pending) == (Phase.APPLY_MODEL, True)
    assert "eu/1" in process.state.text
    process(ev.PeerAnswered(number=1, state=STATE))
    assert (process.state.peer, process.state.peer_pending) == ("eu/1", False)
    assert (process.state.peer_local_step, process.state.peer_step) == (7, 11)
    assert process.state.peer_bytes == 500


def test_after_a_refusal_it_asks_the_next_with_the_step_of_that_moment_then_none():
    process = Process()
    process.step(12)
    process.now = 1.5
    out = process(ev.PeerAnswered(number=1, error="damaged"))
    assert asked(out) == [("us/0", 12, "r")]
    process.now = 2.5
    out = process(ev.PeerAnswered(number=2, error="busy"))
    assert (asked(out), process.state.peer_pending, process.state.peer) == ([], False, "")
    assert (process.state.peer_problem, process.state.peer_seconds) == ("us/0: busy", 2.5)


def test_an_answer_that_takes_more_than_h_steps_and_a_minute_is_abandoned():
    process = Process()
    process.now = LEAST_SECONDS + 1
    assert asked(process.step(10 + H)) == []
    process.now = LEAST_SECONDS - 1
    assert asked(process.step(11 + H)) == []
    process.now = LEAST_SECONDS + 1
    out = process(ev.Tick())
    assert (dropped(out), asked(out)) == ([1], [("us/0", 11 + H, "r")])
    # The late answer does not count, the next one does.
    process(ev.PeerAnswered(number=1, state=STATE))
    assert process.state.peer_pending
    process(ev.PeerAnswered(number=2, state=STATE))
    assert process.state.peer == "eu/1"


def test_a_request_is_abandoned_after_a_minute_without_a_global_step():
    # The job may wait for this learner: with two learners and a stopped peer, no other learner trains.
    process = Process()
    process.now = 50.0
    process.step(11)
    process.now = LEAST_SECONDS + 1
    assert asked(process(ev.Tick())) == []
    process.now = 50.0 + LEAST_SECONDS + 1
    out = process(ev.Tick())
    assert (dropped(out), asked(out)) == ([1], [("us/0", 11, "r")])
    process.now += LEAST_SECONDS + 1
    assert dropped(process(ev.Tick())) == [2]
    assert not process.state.peer_pending
    assert "61 s" in process.state.peer_problem


def test_a_lost_session_does_not_end_the_request():
    process = Process()
    assert dropped(process(ev.SessionLost(text="x"))) == []
    assert process.state.peer_pending


def test_a_trainer_that_trains_or_leaves_ends_the_request():
    process = Process()
    assert dropped(process(ev.TrainerUpdate(state=TrainerState(leaving="SIGTERM")))) == [1]
    assert not process.state.peer_pending


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"peers": ()}, "the syncer named no learner to ask"), ({"recovery": False}, "")],
)
def test_without_peers_none_is_asked(changes, problem):
    process = Process(**changes)
    assert process.state.peer_problem == problem
    assert asked(process.begun) == []
    process.download()
    assert (process.state.phase, process.state.peer_pending) == (Phase.APPLY_MODEL, False)


def test_a_recent_checkpoint_of_its_own_comes_first():
    process = Process(checkpoint_step=9, use_checkpoint=True)
    assert process.begun == [ev.NotifyTrainer()]
    assert process.state.phase is Phase.LOAD_CHECKPOINT
    # It turns out to be unusable: now a peer is asked.
    assert asked(process(ev.TrainerUpdate(state=TrainerState()))) == [("eu/1", 10, "r")]


def sent(decisions):
    return [d.recovery for d in decisions if isinstance(d, ev.SendRecovery)]


def test_the_syncer_learns_in_each_session_with_which_state_the_process_began():
    process, stated = Process(recovery=False), {"source": "None"}
    process.download()
    trains = ev.TrainerUpdate(state=TrainerState(model_loaded=True, recovery=stated))
    assert sent(process(trains)) == [stated]
    assert sent(process(trains)) == [], "not with each step"
    process(ev.SessionLost(text="x"))
    process(process.welcome)
    assert sent(process(ev.ModelReady(versions=((1, 10),)))) == [stated]


def test_a_process_that_begins_with_the_job_states_nothing():
    process = Process(recovery=False)
    process.download()
    assert sent(process(ev.TrainerUpdate(state=TrainerState(model_loaded=True)))) == []


def test_a_recovery_is_a_message_of_its_fields():
    stated = began("Peer", ARRIVED, step=11)
    message = session.recovery(stated).recovery
    assert {field.name: value for field, value in message.ListFields()} == {
        "source": "Peer", "peer": "eu/1", "step": 11, "bytes": 500, "seconds": 1.5,
    }  # fmt: skip


def test_a_peer_that_waits_is_made_known_to_the_trainer():
    process = Process(recovery=False)
    process(ev.PeerAsks(step=12))
    process(ev.PeerAsks(step=11))
    assert process.state.checkpoint_wanted == 12


# ---------------------------------------------------------------- the trainer

MODEL = LinkState(
    phase=Phase.APPLY_MODEL, connected=True, epoch=1, incarnation=2, step=10, run="r", ready=[(0, 1)],
    local_step=5,
)  # fmt: skip
ARRIVED = dataclasses.replace(
    MODEL, peer="eu/1", peer_local_step=7, peer_step=11, peer_bytes=500, peer_seconds=1.5
)
FOUND = LocalCheckpoint(local_step=2, global_step=1, run="r")


def make(found=None, every=100):
    return core.TrainerCore(
        name="eu/0", fragments=1, found=found, checkpoint_every=every, connect_timeout_seconds=60.0
    )


def join(trainer, state):
    return trainer.join(state, now=0.0, terminated=False)


def test_the_trainer_waits_for_a_peer_before_it_applies_the_model():
    trainer = make()
    assert join(trainer, dataclasses.replace(MODEL, peer_pending=True)) == [core.AwaitLink()]
    assert not trainer.joined


@pytest.mark.parametrize(("found", "kept"), [(None, False), (FOUND, True)])
def test_the_state_of_a_peer_comes_before_an_older_one_of_its_own(found, kept):
    trainer = make(found)
    actions = join(trainer, ARRIVED)
    assert core.LoadPeerState(kept=kept) in actions
    assert not [a for a in actions if isinstance(a, core.LoadOptimizers)]
    [shown] = trainer.peer_state_loaded()
    assert "eu/1 at local step 7, global step 11" in shown.text
    assert trainer.resumed
    assert trainer.state().recovery == {
        "source": "Peer", "peer": "eu/1", "step": 11, "age": 0, "bytes": 500, "seconds": 1.5, "problem": "",
    }  # fmt: skip
    # The position in the data is its own.
    assert trainer.ledger.local_step == 5


def test_a_peers_state_that_does_not_fit_gives_way_to_its_own_and_then_to_a_new_one():
    trainer = make(FOUND)
    join(trainer, ARRIVED)
    shown, load = trainer.peer_state_unusable("another class")
    assert "another class" in shown.text
    assert load == core.LoadOptimizers()
    trainer.optimizers_loaded()
    assert trainer.recovery == {
        "source": "OldCheckpoint", "peer": "", "step": 1, "age": 9, "bytes": 0, "seconds": 1.5,
        "problem": "the optimizers' state of eu/1 cannot be used: another class",
    }  # fmt: skip
    trainer = make()
    join(trainer, ARRIVED)
    assert "new state" in trainer.peer_state_unusable("another class")[-1].text
    assert (trainer.resumed, trainer.recovery["source"]) == (False, "None")
    assert "another class; there is no local checkpoint" in trainer.recovery["problem"]


def test_a_recent_checkpoint_and_a_first_start_in_a_running_job_are_recoveries_as_well():
    trainer = make(LocalCheckpoint(local_step=2, global_step=8, run="r"))
    join(trainer, dataclasses.replace(MODEL, phase=Phase.LOAD_CHECKPOINT))
    facts = {"local_step": 2, "total_tokens": 20, "steps": [2], "tokens": [20]}
    trainer.checkpoint_loaded(facts, now=0.0)
    assert (trainer.recovery["source"], trainer.recovery["age"]) == ("Checkpoint", 2)
    new = make()
    why = "the syncer named no learner to ask"
    join(new, dataclasses.replace(MODEL, local_step=0, peer_problem=why))
    assert new.recovery == {
        "source": "None", "peer": "", "step": 0, "age": 0, "bytes": 0, "seconds": 0.0,
        "problem": f"no peer has sent the optimizers' state: {why}",
    }  # fmt: skip


def test_a_process_that_begins_with_the_job_recovers_nothing():
    trainer = make()
    join(trainer, dataclasses.replace(MODEL, step=0, local_step=0))
    assert (trainer.joined, trainer.recovery) == (True, {})


def test_why_no_peer_has_sent_anything_is_shown():
    actions = join(make(FOUND), dataclasses.replace(MODEL, peer_problem="us/0: busy"))
    assert any(isinstance(a, core.ShowProgress) and "us/0: busy" in a.text for a in actions)
    assert core.LoadOptimizers() in actions


def saved(trainer, **changes):
    state = dataclasses.replace(MODEL, phase=Phase.TRAINING, ready=[], **changes)
    trainer.step(1, state, now=0.0)
    return [a for a in trainer.copied([], loss=1.0) if isinstance(a, core.SaveCheckpoint)]


def test_a_checkpoint_for_a_peer_begins_once_and_not_before_its_step():
    trainer = make()
    join(trainer, MODEL)
    assert saved(trainer, checkpoint_wanted=11, step=10) == []
    [action] = saved(trainer, checkpoint_wanted=11, step=11)
    assert action.global_step == 11
    # The previous one was still being written: the next step tries again.
    [action] = saved(trainer, checkpoint_wanted=11, step=11)
    trainer.checkpoint_started(action.local_step)
    assert saved(trainer, checkpoint_wanted=11, step=12) == []
    assert saved(trainer, checkpoint_wanted=12, step=12) != []


def test_a_trainer_without_checkpoints_makes_none_for_a_peer_and_states_that():
    trainer = make(every=None)
    join(trainer, MODEL)
    assert not trainer.state().saves
    turned_off = make()
    assert turned_off.state().saves
    turned_off.checkpoints_off()
    assert not turned_off.state().saves
    assert saved(trainer, checkpoint_wanted=5, step=11) == []


# ---------------------------------------------------------------- the pace


def test_a_state_is_sent_in_an_eighth_of_the_time_that_it_may_take():
    assert bytes_per_second(1 << 30, interval=24, step_seconds=5.0) == (1 << 30) / 15
    assert bytes_per_second(1 << 20, interval=24, step_seconds=5.0) == LEAST_BYTES_PER_SECOND
    assert bytes_per_second(1 << 40, interval=24, step_seconds=5.0) == MOST_BYTES_PER_SECOND
    assert bytes_per_second(1 << 20, interval=24, step_seconds=0.0) == MOST_BYTES_PER_SECOND


def test_a_pace_spreads_bytes_and_does_not_make_up_for_lost_time():
    pace = Pace(10.0, now=0.0)
    assert pace.wait_seconds(20, now=0.0) == 0.0
    assert pace.wait_seconds(20, now=0.5) == 1.5
    assert pace.wait_seconds(20, now=100.0) == 0.0
    assert pace.wait_seconds(20, now=100.0) == 2.0


def test_a_peer_that_waits_for_the_first_global_step_is_served():
    trainer = make()
    join(trainer, MODEL)
    [action] = saved(trainer, checkpoint_wanted=1, step=1)
    assert action.global_step == 1


def test_pieces_of_a_pace_are_due_one_after_the_other_however_early_they_come():
    pace = Pace(10.0, now=0.0)
    pace.wait_seconds(20, now=0.0)
    assert pace.wait_seconds(20, now=0.5) == 1.5
    assert pace.wait_seconds(20, now=2.0) == 2.0
