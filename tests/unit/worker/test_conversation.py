"""What the link does about what it hears, without processes, sockets or clocks."""

from __future__ import annotations

from dataclasses import replace

from diloco_worker.core import events as ev
from diloco_worker.core.conversation import DOWNLOAD_TRIES, GREETING_SECONDS, Conversation
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.messages import LinkState, Phase, TrainerState

P = 2


class Talk:
    """A conversation, with every `Place` answered at once as the shell does."""

    def __init__(self, *, constants: bool = False, slots: list[Slot] | None = None) -> None:
        self.now = 0.0
        self.said = LinkState()
        self.resets = 0
        self.core = Conversation(
            slots=slots or [Slot(fragment=p) for p in range(P)],
            has_constants=constants,
            next_delay=lambda: 1.0,
            reset_delay=self._reset,
            syncer="s:1",
        )

    def _reset(self) -> None:
        self.resets += 1

    def __call__(self, event: ev.Event, *, after: float = 0.0) -> list[ev.Decision]:
        self.now += after
        out: list[ev.Decision] = []
        todo = self.core.handle(event, self.now)
        while todo:
            decision, *todo = todo
            if isinstance(decision, ev.Tell):
                self.said = self.core.said
                continue
            out.append(decision)
            if isinstance(decision, ev.Place):
                placed = ev.Placed(fragment=decision.staged.fragment)
                todo = [*self.core.handle(placed, self.now), *todo]
        return out


def welcome(**changes: object) -> ev.Welcomed:
    fields = {
        "epoch": 1, "incarnation": 4, "step": 10, "steps": 100, "local_step": 7, "total_tokens": 70,
        "heartbeat_seconds": 2.0, "use_checkpoint": False, **changes,
    }  # fmt: skip
    return ev.Welcomed(**fields)


def came(fragment: int, *, round_: int = 0, step: int = 10) -> ev.Downloaded:
    wish = ev.Download(fragment=fragment, round=round_)
    return ev.Downloaded(
        wish=wish, staged=Staged(fragment=fragment, version=(1, step), ticket=100 * fragment + step)
    )


STEPPING = TrainerState(in_place=True, stepped=True, local_step=8, applied=(1, 1))


def joined(*, constants: bool = False) -> Talk:
    talk = Talk(constants=constants)
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    talk(ev.ModelReady())
    for fragment in range(P):
        talk(came(fragment))
    talk(ev.Heard(state=replace(STEPPING, stepped=False)))
    return talk


def test_it_connects_as_soon_as_the_trainer_spoke():
    talk = Talk()
    assert talk.core.wake_at is None
    assert [type(d) for d in talk(ev.Heard(state=TrainerState()))] == [ev.Connect]


def test_a_fresh_process_downloads_everything_and_is_told_only_when_all_is_placed():
    talk = Talk(constants=True)
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    assert talk.said.phase is Phase.WAITING
    wishes = talk(ev.ModelReady())
    assert [(w.fragment, w.round) for w in wishes] == [(0, 0), (1, 0), (2, 0)]
    talk(came(0))
    talk(came(1))
    assert (talk.said.phase, list(talk.said.ready)) == (Phase.DOWNLOADING, [])
    talk(came(2))
    assert (talk.said.phase, list(talk.said.ready)) == (Phase.PLACED, [(0, 1), (1, 1)])
    talk(ev.Heard(state=STEPPING))
    assert (talk.said.phase, list(talk.said.ready)) == (Phase.TRAINING, [])


def test_a_part_of_the_model_that_breaks_is_asked_for_again():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    talk(ev.ModelReady())
    (again,) = talk(ev.Downloaded(wish=ev.Download(fragment=1), error="Damaged: x"))
    assert (again.fragment, again.round, again.delay_seconds > 0) == (1, 0, True)


def test_a_result_that_comes_while_the_model_is_put_together_waits_until_it_is_applied():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    talk(ev.ModelReady())
    talk(came(0))
    assert talk(came(0, round_=11, step=11)) == []
    talk(came(1))
    (place,) = talk(ev.Heard(state=replace(STEPPING, stepped=False)))
    assert (place.staged.version, place.generation) == ((1, 11), 2)
    assert list(talk.said.ready) == [(0, 2)]


def test_its_own_fresh_checkpoint_is_loaded_instead_of_downloading():
    talk = Talk()
    talk(ev.Heard(state=TrainerState(checkpoint_step=9, checkpoint_local_step=7)))
    talk(welcome(use_checkpoint=True))
    assert talk(ev.ModelReady()) == []
    assert talk.said.phase is Phase.LOAD


def test_a_checkpoint_that_turns_out_to_be_unusable_leads_to_a_download():
    talk = Talk()
    talk(ev.Heard(state=TrainerState(checkpoint_step=9)))
    talk(welcome(use_checkpoint=True))
    talk(ev.ModelReady())
    wishes = talk(ev.Heard(state=TrainerState(checkpoint_step=0)))
    assert [type(d) for d in wishes] == [ev.Download, ev.Download]


def test_the_initial_model_is_uploaded_when_the_trainer_has_copied_it_and_once_per_request():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    assert talk(ev.InitialWanted()) == []
    assert talk.said.initialise == 1
    assert talk(ev.Heard(state=TrainerState(initial=1))) == [ev.UploadInitial(request=1)]
    assert talk(ev.Heard(state=TrainerState(initial=1))) == []
    (again,) = talk(ev.InitialSent(request=1, error="Unavailable: x"))
    assert isinstance(again, ev.UploadInitial)
    assert talk(ev.InitialSent(request=1)) == []


def test_reports_leave_once_per_local_step_and_never_before_ready():
    talk = Talk()
    state = replace(STEPPING, applied=(0, 0))
    talk(ev.Heard(state=state))
    talk(welcome())
    assert talk(ev.Heard(state=replace(state, local_step=9))) == []
    (report,) = talk(ev.ModelReady())
    assert report.state.local_step == 9
    assert talk(ev.Heard(state=replace(state, local_step=9))) == []
    assert len(talk(ev.Heard(state=replace(state, local_step=10)))) == 1


def test_a_model_in_place_is_never_downloaded_again_after_a_broken_session():
    talk = joined()
    talk(ev.Lost(text="gone"))
    assert [type(d) for d in talk(ev.Tick(), after=1.0)] == [ev.Connect]
    talk(welcome(epoch=2))
    assert not [d for d in talk(ev.ModelReady()) if isinstance(d, ev.Download)]


def test_what_the_trainer_was_told_to_apply_is_not_overwritten_by_a_new_session():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    talk(ev.ModelReady())
    talk(came(0))
    talk(came(1))
    talk(ev.Lost(text="gone"))
    talk(ev.Tick(), after=1.0)
    talk(welcome())
    assert talk(ev.ModelReady()) == []
    assert talk.said.phase is Phase.PLACED


def test_a_join_that_breaks_starts_over():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(welcome())
    talk(ev.ModelReady())
    talk(came(0))
    assert talk(ev.Lost(text="gone")) == [ev.CancelTransfers()]
    assert talk.said.phase is Phase.CONNECTING
    talk(ev.Tick(), after=1.0)
    talk(welcome())
    assert len(talk(ev.ModelReady())) == P


def test_a_refusal_for_good_ends_all_trying():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    talk(ev.Lost(text="another model", refused_exit=78))
    assert (talk.said.refused_exit, talk.said.text) == (78, "another model")
    assert talk.core.wake_at is None
    assert talk(ev.Tick(), after=100.0) == []
    assert talk(ev.Heard(state=TrainerState(leaving="Refused"))) == [ev.Leave(reason="Refused")]


def test_a_heartbeat_leaves_only_when_nothing_else_did():
    talk = joined()
    assert talk(ev.Tick(), after=1.9) == []
    assert len(talk(ev.Heard(state=replace(STEPPING, local_step=9)))) == 1
    assert talk(ev.Tick(), after=1.9) == []
    assert talk(ev.Tick(), after=0.1) == [ev.SendHeartbeat()]


def test_a_syncer_that_never_greets_is_tried_anew():
    talk = Talk()
    talk(ev.Heard(state=TrainerState()))
    assert talk.core.wake_at == GREETING_SECONDS
    assert [type(d) for d in talk(ev.Tick(), after=GREETING_SECONDS)] == [ev.Connect]


def test_a_result_is_fetched_a_few_times_and_then_left_to_the_next_round():
    talk = joined()
    (wish,) = talk(ev.ResultComing(round=11, attempt=1, fragment=0))
    for _ in range(DOWNLOAD_TRIES - 1):
        (wish,) = talk(ev.Downloaded(wish=wish, error="Unavailable: x"))
    assert talk(ev.Downloaded(wish=wish, error="Unavailable: x")) == []


def test_a_round_that_was_not_committed_is_forgotten():
    talk = joined()
    (wish,) = talk(ev.ResultComing(round=11, attempt=1, fragment=0))
    assert talk(ev.Downloaded(wish=wish)) == []


def test_a_new_link_offers_what_the_old_one_had_placed():
    slots = [
        Slot(fragment=0, published=3, version=(1, 5)),
        Slot(fragment=1, published=2, version=(1, 6)),
    ]
    talk = Talk(slots=slots)
    talk(ev.Heard(state=replace(STEPPING, applied=(3, 1), incarnation=4, epoch=1)))
    assert list(talk.said.ready) == [(1, 2)]
    assert (talk.said.incarnation, talk.said.epoch) == (4, 1)


def test_bytes_that_are_no_numbers_are_not_shown_to_the_trainer():
    talk = joined()
    core = talk.core
    (place, *_) = core.handle(came(0, round_=11, step=11), 0.0)
    assert isinstance(place, ev.Place)
    core.handle(ev.Placed(fragment=0, error="NaN"), 0.0)
    assert list(talk.said.ready) == []
    (place, *_) = core.handle(came(0, round_=11, step=11), 0.0)
    assert isinstance(place, ev.Place)


def test_the_trainers_goodbye_comes_first_whatever_else_is_going_on():
    talk = joined()
    assert talk(ev.Heard(state=replace(STEPPING, leaving="SIGTERM"))) == [
        ev.Leave(reason="SIGTERM")
    ]


def test_completion_is_told():
    talk = joined()
    talk(ev.Completed(step=100))
    assert (talk.said.complete, talk.said.step) == (True, 100)
