"""When the link states a learner's blocks of data to the syncer: when they change, and first in each session."""

from __future__ import annotations

from dataclasses import replace

from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import TrainerState

STEPPING = TrainerState(model_loaded=True, stepped=True, local_step=8, applied=(0, 0))
FIRST, SECOND = {"open": [0], "asked": 0}, {"open": [1], "asked": 0}


class Link:
    def __init__(self):
        self.core = LinkProtocol(
            slots=[Slot(fragment=p) for p in range(2)], has_constants=False, next_delay=lambda: 1.0,
            reset_delay=lambda: None, syncer="s:1",
        )  # fmt: skip

    def __call__(self, event):
        return self.core.handle(event, 0.0)

    def trainer(self, **changes):
        return self(ev.TrainerUpdate(state=replace(STEPPING, **changes)))

    def welcome(self, **changes):
        fields = {
            "epoch": 3, "incarnation": 4, "step": 10, "steps": 100, "local_step": 7, "total_tokens": 70,
            "heartbeat_seconds": 2.0, "use_checkpoint": False, **changes,
        }  # fmt: skip
        return self(ev.Welcomed(**fields))

    def ready(self):
        return self(ev.ModelReady(versions=((1, 0), (1, 0))))


def stated(decisions):
    return [d.blocks for d in decisions if isinstance(d, ev.SendBlocks)]


def test_blocks_are_stated_once_the_model_is_ready_and_again_when_they_change():
    link = Link()
    assert stated(link.trainer(blocks=FIRST)) == []
    assert stated(link.welcome()) == []
    assert stated(link.trainer(blocks=FIRST)) == []
    assert stated(link.ready()) == [FIRST]
    assert stated(link.trainer(blocks=FIRST, local_step=9)) == []
    assert stated(link.trainer(blocks=SECOND, local_step=9)) == [SECOND]


def test_blocks_are_stated_before_the_report_of_the_step_that_ended_them():
    link = Link()
    link.trainer(blocks=FIRST)
    link.welcome()
    link.ready()
    out = link.trainer(blocks=SECOND, local_step=9)
    assert [type(d) for d in out] == [ev.SendBlocks, ev.SendReport]


def test_each_session_begins_with_a_statement():
    link = Link()
    link.trainer(blocks=FIRST)
    link.welcome()
    link.ready()
    link(ev.SessionLost(text="x"))
    assert stated(link.trainer(blocks=FIRST, local_step=9)) == []
    link.welcome(epoch=4)
    assert stated(link.ready()) == [FIRST]


def test_what_was_trained_on_last_is_stated_when_the_learner_leaves():
    link = Link()
    link.trainer(blocks=FIRST)
    link.welcome()
    link.ready()
    out = link.trainer(blocks=SECOND, local_step=9, leaving="Complete")
    assert stated(out) == [SECOND]
    assert isinstance(out[-2 if isinstance(out[-1], ev.NotifyTrainer) else -1], ev.Leave)
    assert stated(link.trainer(blocks=FIRST, local_step=9, leaving="Complete")) == []


def test_a_program_without_blocks_states_none():
    link = Link()
    link.trainer()
    link.welcome()
    assert stated(link.ready()) == []
    assert stated(link.trainer(local_step=9)) == []


def test_whether_the_syncer_leases_blocks_is_known_from_its_welcome():
    link = Link()
    link.trainer()
    assert link.core.link_state.leases_blocks
    link.welcome(leases_blocks=False)
    assert not link.core.link_state.leases_blocks
    link(ev.SessionLost(text="x"))
    link.welcome(leases_blocks=True)
    assert link.core.link_state.leases_blocks
