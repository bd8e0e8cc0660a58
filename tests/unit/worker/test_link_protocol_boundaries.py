"""The link event by event: deadlines, repetitions, and what the trainer receives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.link_protocol import (
    LATE_NAMES,
    LATE_SECONDS,
    RETRY_SECONDS,
    WELCOME_TIMEOUT_SECONDS,
    LinkProtocol,
)
from diloco_worker.core.messages import Phase, TrainerState

FRESH = TrainerState()
STEPPING = TrainerState(model_loaded=True, stepped=True, local_step=8, applied=(0, 0))


class Link:
    """A protocol of two fragments and a clock; `delays` are those of the back-off, in order."""

    def __init__(self, *, constants=False, slots=None, delays=(1.0, 2.0, 4.0)):
        self.now, self.resets = 0.0, 0
        self._delays = iter(delays)
        self.slots = slots or [Slot(fragment=p) for p in range(2)]
        self.core = LinkProtocol(
            slots=self.slots, has_constants=constants, next_delay=lambda: next(self._delays),
            reset_delay=self._reset, syncer="s:1",
        )  # fmt: skip

    def _reset(self):
        self.resets += 1

    def __call__(self, event, *, at=None):
        self.now = self.now if at is None else at
        return self.core.handle(event, self.now)

    @property
    def state(self):
        return self.core.link_state

    def trainer(self, state=STEPPING, **changes):
        return self(ev.TrainerUpdate(state=replace(state, **changes)))

    def tick(self, at):
        return self(ev.Tick(), at=at)

    def arrives(self, request, *, step=10, epoch=1):
        staged = Staged(fragment=request.fragment, version=(epoch, step), ticket=step)
        return self(ev.Downloaded(request=request, staged=staged))


def welcome(**changes):
    fields = {
        "epoch": 3, "incarnation": 4, "step": 10, "steps": 100, "local_step": 7, "total_tokens": 70,
        "heartbeat_seconds": 2.0, "use_checkpoint": False, **changes,
    }  # fmt: skip
    return ev.Welcomed(**fields)


def kinds(decisions):
    return [type(d) for d in decisions]


def of(kind, decisions):
    return [d for d in decisions if isinstance(d, kind)]


def training(**changes):
    """A session with a learner that has its model and steps."""
    link = Link(**changes)
    link.trainer()
    link(welcome())
    link(ev.ModelReady())
    return link


# ---------------------------------------------------------------- sessions


def test_nothing_is_due_before_the_first_message_of_the_trainer():
    link = Link()
    assert link.core.wake_at is None
    assert link.tick(1e9) == []
    assert link.state.text == "waiting for the syncer at s:1"


def test_the_first_state_of_the_trainer_opens_the_session_with_it():
    link = Link()
    state = replace(STEPPING, incarnation=6, epoch=2, global_step=55, initial_copied=3)
    connect, *rest = link(ev.TrainerUpdate(state=state))
    assert connect == ev.Connect(state=state)
    assert rest == [ev.NotifyTrainer()], "the link before has uploaded the initial model"
    found = link.state
    assert (found.incarnation, found.epoch, found.step, found.initial_requested) == (6, 2, 55, 3)
    assert of(ev.Connect, link.trainer(local_step=9)) == [], "once"


def test_a_welcome_is_passed_on_to_the_trainer():
    link = Link()
    link.trainer(FRESH)
    assert link(welcome()) == [ev.NotifyTrainer()]
    found = link.state
    assert (found.connected, found.epoch, found.incarnation) == (True, 3, 4)
    assert (found.step, found.steps, found.local_step, found.total_tokens) == (10, 100, 7, 70)
    assert found.phase is Phase.WAITING
    assert found.text == "waiting for another learner to upload the initial model"
    assert link.resets == 0


def test_without_a_welcome_the_next_session_is_opened_after_the_time_limit():
    link = Link()
    link.trainer(FRESH)
    assert link.core.wake_at == WELCOME_TIMEOUT_SECONDS
    assert link.tick(WELCOME_TIMEOUT_SECONDS - 0.1) == []
    assert kinds(link.tick(WELCOME_TIMEOUT_SECONDS)) == [ev.Connect]
    assert link.core.wake_at == 2 * WELCOME_TIMEOUT_SECONDS
    assert link.tick(WELCOME_TIMEOUT_SECONDS + 1) == []


@pytest.mark.parametrize(("pause", "until"), [(0.0, 11.0), (0.5, 11.0), (7.0, 17.0)])
def test_after_a_lost_session_the_longer_of_back_off_and_requested_pause_is_waited(pause, until):
    link = training()
    link.now = 10.0
    out = link(ev.SessionLost(text="gone", pause_seconds=pause))
    assert kinds(out) == [ev.CancelTransfers, ev.NotifyTrainer]
    assert link.core.wake_at == until
    assert link.tick(until - 0.1) == []
    [connect] = link.tick(until)
    assert connect == ev.Connect(state=STEPPING)
    assert not link.state.connected
    assert link.state.text == "waiting for the syncer at s:1: gone"
    assert link.state.phase is Phase.TRAINING, "it trains on"


def test_a_session_opens_with_the_newest_state_of_the_trainer():
    link = training()
    link(ev.SessionLost(text="gone"), at=10.0)
    assert of(ev.SendReport, link.trainer(local_step=99)) == []
    [connect] = link.tick(11.0)
    assert connect.state.local_step == 99


def test_the_back_off_is_asked_anew_for_each_lost_session():
    link = training()
    for now, until in ((10.0, 11.0), (20.0, 22.0), (30.0, 34.0)):
        link(ev.SessionLost(text="gone"), at=now)
        assert link.core.wake_at == until


@pytest.mark.parametrize(("seconds", "resets"), [(0.99, 0), (1.0, 1)])
def test_the_back_off_begins_anew_after_a_session_that_lasted_and_grows_after_shorter_ones(
    seconds, resets
):
    """A syncer that refuses what a learner sends ends each session at once, after its Welcome."""
    link = training()
    link(ev.SessionLost(text="refused"), at=10.0)
    link.tick(11.0)
    link(welcome(), at=12.0)
    assert link.resets == 1, "the first session lasted for 10 s"
    link(ev.SessionLost(text="refused"), at=12.0 + seconds)
    assert link.resets == 1 + resets
    link(ev.SessionLost(text="unavailable"), at=60.0)
    assert link.resets == 1 + resets, "an attempt without a Welcome is no session"


def test_a_heartbeat_is_due_that_long_after_the_last_message():
    link = training()
    assert link.core.wake_at == 2.0
    assert link.tick(1.99) == []
    assert link.tick(2.0) == [ev.SendHeartbeat()]
    assert link.core.wake_at == 4.0
    link.now = 3.0
    assert len(of(ev.SendReport, link.trainer(local_step=9))) == 1
    assert link.core.wake_at == 5.0


def test_a_welcome_counts_as_the_beginning_of_the_interval():
    link = Link()
    link.trainer()
    link(welcome(), at=7.0)
    assert link.core.wake_at == 9.0


def test_after_a_refusal_nothing_is_due_and_nothing_is_sent():
    link = training()
    out = link(ev.SessionLost(text="another model", refused_exit=78))
    assert kinds(out) == [ev.CancelTransfers, ev.NotifyTrainer]
    assert (link.state.connected, link.state.refused_exit) == (False, 78)
    assert link.state.text == "another model"
    assert link.core.wake_at is None
    assert link.tick(1e9) == []
    assert link.trainer(local_step=9) == []


def test_after_the_goodbye_nothing_is_due():
    link = training()
    assert link.trainer(leaving="SIGTERM") == [ev.Leave(reason="SIGTERM")]
    assert link.core.wake_at is None
    assert link.tick(1e9) == []
    assert link.trainer(local_step=9) == []


# ---------------------------------------------------------------- reports


def test_only_a_trainer_that_has_its_model_and_has_stepped_is_reported():
    link = Link()
    link.trainer(FRESH)
    link(welcome())
    link(ev.ModelReady())
    assert of(ev.SendReport, link.trainer(stepped=False)) == []
    assert of(ev.SendReport, link.trainer(model_loaded=False)) == []
    assert len(of(ev.SendReport, link.trainer())) == 1


def test_a_step_is_reported_again_in_a_new_session_only():
    link = training()
    assert of(ev.SendReport, link.trainer()) == [], "the session began with it"
    assert of(ev.SendReport, link.trainer(local_step=7)) == []
    link(ev.SessionLost(text="gone"), at=1.0)
    link.tick(2.0)
    link(welcome())
    assert of(ev.SendReport, link.trainer()) == [], "the model is not known to be ready"
    [report] = of(ev.SendReport, link(ev.ModelReady()))
    assert report.state.local_step == 8


def test_a_model_that_is_ready_outside_of_a_session_changes_nothing():
    link = Link()
    assert link(ev.ModelReady()) == []
    link.trainer(FRESH)
    assert link(ev.ModelReady()) == []


# ---------------------------------------------------------------- the initial model


def test_each_request_for_the_initial_model_is_uploaded_once_copied():
    link = Link()
    link.trainer(FRESH)
    link(welcome())
    for request in (1, 2):
        link(ev.InitialRequested())
        assert (link.state.initial_requested, link.state.text) == (
            request, "uploading the initial model",
        )  # fmt: skip
        assert of(ev.UploadInitial, link.trainer(FRESH, initial_copied=request - 1)) == []
        [upload] = of(ev.UploadInitial, link.trainer(FRESH, initial_copied=request))
        assert upload == ev.UploadInitial(request=request)
        assert of(ev.UploadInitial, link.trainer(FRESH, initial_copied=request)) == []


def test_a_failed_upload_of_the_initial_model_is_repeated_unless_it_is_outdated():
    link = Link()
    link.trainer(FRESH)
    link(welcome())
    link(ev.InitialRequested())
    assert link(ev.InitialUploaded(request=1, error="")) == []
    assert link(ev.InitialUploaded(request=0, error="x")) == []
    again, *_ = link(ev.InitialUploaded(request=1, error="x"))
    assert again == ev.UploadInitial(request=1, delay_seconds=2 * RETRY_SECONDS)
    assert link.state.text == "uploading the initial model again: x"
    link(ev.SessionLost(text="gone"))
    assert link(ev.InitialUploaded(request=1, error="x")) == []


def test_after_an_initial_model_that_is_refused_for_good_nothing_is_due_and_nothing_is_sent():
    link = Link()
    link.trainer(FRESH)
    link(welcome())
    link(ev.InitialRequested())
    refused = ev.InitialUploaded(request=1, error="it is not finite", refused_exit=78)
    assert kinds(link(refused)) == [ev.CancelTransfers, ev.NotifyTrainer]
    assert link.core.wake_at is None
    assert link.trainer(FRESH, initial_copied=1) == []


# ---------------------------------------------------------------- the model of a fresh process


def fresh(**changes):
    link = Link(**changes)
    link.trainer(FRESH)
    link(welcome())
    requests = of(ev.Download, link(ev.ModelReady()))
    return link, requests


def test_without_constants_only_the_fragments_are_downloaded():
    _, requests = fresh()
    assert requests == [ev.Download(fragment=0), ev.Download(fragment=1)]


def test_the_model_is_applied_when_its_last_part_is_placed():
    link, (first, second, constants) = fresh(constants=True)
    assert constants.fragment == 2
    assert link.state.text == "downloading the model"
    [place] = of(ev.Place, link.arrives(first))
    assert (place.staged.fragment, place.generation) == (0, 1)
    link(ev.Placed(fragment=0))
    [discard] = of(ev.Discard, link.arrives(constants))
    assert discard.staged.fragment == 2, "they are copied already"
    assert (link.state.phase, list(link.state.ready)) == (Phase.DOWNLOADING, [])
    link.arrives(second)
    assert link(ev.Placed(fragment=1)) == [ev.NotifyTrainer()]
    assert (link.state.phase, link.state.text) == (Phase.APPLY_MODEL, "the model has arrived")
    assert [tuple(r) for r in link.state.ready] == [(0, 1), (1, 1)]


def test_a_part_of_the_model_that_failed_is_requested_again_after_a_pause():
    link, (first, _) = fresh()
    [again] = of(ev.Download, link(ev.Downloaded(request=first, error="Unavailable: x")))
    assert again == replace(first, tries=2, delay_seconds=RETRY_SECONDS)
    assert link.state.text == "downloading the model again: Unavailable: x"


def test_a_part_of_the_model_that_cannot_be_decoded_is_requested_again():
    link, (first, _) = fresh()
    link.arrives(first)
    out = link(ev.Placed(fragment=0, error="NotFinite"))
    assert of(ev.Download, out) == [ev.Download(fragment=0, delay_seconds=RETRY_SECONDS)]
    assert len(of(ev.Place, link.arrives(first))) == 1, "the same version may be placed now"


def test_a_part_that_arrives_after_it_was_placed_is_discarded():
    link, (first, _) = fresh()
    link.arrives(first)
    link(ev.Placed(fragment=0))
    assert kinds(link.arrives(first)) == [ev.Discard]
    assert link(ev.Downloaded(request=first, error="x")) == []


def test_a_part_that_is_older_than_a_result_that_has_arrived_is_requested_again():
    link, (first, _) = fresh()
    result = ev.Download(fragment=0, round=11)
    [place] = of(ev.Place, link.arrives(result, step=11))
    out = link.arrives(first, step=10)
    assert kinds(out) == [ev.Discard, ev.Download]
    assert out[1] == ev.Download(fragment=0)
    assert of(ev.Place, link.arrives(first, step=11)), "as new is new enough"
    assert place.generation == 1


@pytest.mark.parametrize(
    ("use", "checkpoint", "phase"),
    [(True, 9, Phase.LOAD_CHECKPOINT), (True, 0, Phase.DOWNLOADING), (False, 9, Phase.DOWNLOADING)],
)
def test_the_local_checkpoint_is_loaded_if_there_is_one_and_the_syncer_allows_it(
    use, checkpoint, phase
):
    link = Link()
    link.trainer(FRESH, checkpoint_step=checkpoint)
    link(welcome(use_checkpoint=use))
    link(ev.ModelReady())
    assert link.state.phase is phase
    if phase is Phase.LOAD_CHECKPOINT:
        assert link.state.text == "loading the local checkpoint"
        assert of(ev.Download, link.trainer(FRESH, checkpoint_step=checkpoint)) == []
        out = link.trainer(FRESH, checkpoint_step=0)
        assert len(of(ev.Download, out)) == 2, "it turned out to be unusable"


def test_a_loaded_checkpoint_is_followed_by_what_was_committed_since():
    link = Link()
    link.trainer(FRESH, checkpoint_step=9)
    link(welcome(use_checkpoint=True))
    link(ev.ModelReady())
    assert of(ev.Download, link(ev.Committed(fragment=1, version=(1, 12)))) == []
    out = link.trainer(stepped=False)
    assert [d.fragment for d in of(ev.Download, out)] == [1]
    assert (link.state.phase, link.state.text) == (Phase.TRAINING, "")


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.DOWNLOADING])
def test_a_process_without_a_model_starts_over_after_a_lost_session(phase):
    link = Link()
    link.trainer(FRESH)
    link(welcome())
    if phase is Phase.DOWNLOADING:
        link(ev.ModelReady())
    assert link.state.phase is phase
    link(ev.SessionLost(text="gone"))
    assert link.state.phase is Phase.CONNECTING
    late = ev.Download(fragment=0)
    assert kinds(link.arrives(late)) == [ev.Discard], "of the session before"


# ---------------------------------------------------------------- results


def result(round_=11, **changes):
    return ev.ResultAnnounced(**{"round": round_, "attempt": 2, "fragment": 0, **changes})


def test_a_pull_is_answered_with_an_upload_and_a_result_with_a_download():
    link = training()
    pull = ev.Pulled(round=11, attempt=2, fragment=1, versions=())
    assert link(pull) == [ev.Upload(pull=pull)]
    assert link(result()) == [ev.Download(fragment=0, round=11, attempt=2)]


@pytest.mark.parametrize(
    ("error", "aborted", "tries", "again"),
    [
        ("", False, 1, True),  # not decided yet
        ("x", False, 1, True),
        ("x", True, 2, True),
        ("", True, 1, False),
        ("x", False, 3, False),
    ],
)
def test_a_result_is_requested_again_while_it_may_still_come(error, aborted, tries, again):
    link = training()
    link(result())
    request = ev.Download(fragment=0, round=11, attempt=2, tries=tries)
    out = link(ev.Downloaded(request=request, error=error, aborted=aborted))
    expected = [replace(request, tries=tries + 1, delay_seconds=RETRY_SECONDS)] if again else []
    assert out == expected


def test_until_a_committed_result_has_arrived_its_fragment_is_not_offered():
    link = training()
    link(ev.Opened(step=12, steps=200, fragments=(0, 1)))
    [request] = of(ev.Download, link(result()))
    assert tuple(link.state.open) == (0, 1), "the round is not committed"
    link(ev.Committed(fragment=0, version=(1, 11)))
    assert tuple(link.state.open) == (1,)
    [again] = of(ev.Download, link(ev.Downloaded(request=request, error="Unavailable: x")))
    assert (again.round, tuple(link.state.open)) == (11, (1,))
    link.arrives(again, step=11)
    link(ev.Placed(fragment=0))
    assert tuple(link.state.open) == (0, 1)


def test_a_result_that_arrives_before_the_commit_is_announced_changes_no_offers():
    link = training()
    link(ev.Opened(step=12, steps=200, fragments=(0, 1)))
    [request] = of(ev.Download, link(result()))
    link.arrives(request, step=11)
    link(ev.Placed(fragment=0))
    link(ev.Committed(fragment=0, version=(1, 11)))
    assert tuple(link.state.open) == (0, 1)


def test_an_older_result_that_fails_is_not_requested_again_beside_the_newer_one():
    link = training()
    [older] = of(ev.Download, link(result()))
    [newer] = of(ev.Download, link(ev.ResultAnnounced(round=13, attempt=1, fragment=0)))
    assert of(ev.Download, link(ev.Downloaded(request=older, error="Unavailable: x"))) == []
    [again] = of(ev.Download, link(ev.Downloaded(request=newer, error="Unavailable: x")))
    assert (again.round, again.tries) == (13, 2)


def test_fragments_that_are_late_for_long_are_named_until_they_arrive():
    link = training()
    link(result())
    link(ev.Committed(fragment=0, version=(1, 11)), at=5.0)
    link.tick(5.0 + LATE_SECONDS - 0.1)
    assert (link.state.text, link.core.late) == ("", "")
    link.tick(5.0 + LATE_SECONDS)
    assert link.state.text == link.core.late
    assert link.state.text.endswith("fragment 0")
    link(ev.SessionLost(text="cut"))
    assert link.state.text.endswith("cut")
    link(welcome())
    link(ev.ModelReady(versions=((3, 10), (3, 10))))
    assert link.state.text.endswith("fragment 0")
    for fragment in (0, 1):
        link.arrives(ev.Download(fragment=fragment, exact=False), epoch=3)
        link(ev.Placed(fragment=fragment))
    assert (link.state.text, link.core.late) == ("", "")


def test_of_many_late_fragments_only_some_are_named():
    many = LATE_NAMES + 3
    link = Link(slots=[Slot(fragment=p) for p in range(many)])
    link.trainer(STEPPING, applied=(0,) * many, versions=[(1, 5)] * many)
    link(welcome())
    link(ev.ModelReady(versions=((3, 10),) * many))
    link.tick(LATE_SECONDS)
    assert link.state.text.endswith("fragment 0, 1, 2, 3, 4, 5, 6, 7 and 3 more")
    for fragment in range(3):
        link.arrives(ev.Download(fragment=fragment, exact=False), epoch=3)
        link(ev.Placed(fragment=fragment), at=LATE_SECONDS)
    assert link.state.text.endswith("fragment 3, 4, 5, 6, 7, 8, 9, 10")


def test_the_current_version_is_requested_again_after_pauses_that_double_and_for_ever():
    link = training()
    [request] = of(ev.Download, link(ev.Committed(fragment=0, version=(1, 11))))
    delays = []
    for tries in range(2, 6):
        [request] = link(ev.Downloaded(request=request, error="Unavailable: x"))
        assert (request.fragment, request.round, request.tries) == (0, 0, tries)
        delays.append(request.delay_seconds)
    assert delays == [RETRY_SECONDS * factor for factor in (1, 2, 4, 8)]


def test_outside_of_a_session_nothing_is_requested_again():
    link = training()
    [request] = link(result())
    link(ev.Committed(fragment=0, version=(1, 11)))
    link(ev.SessionLost(text="gone"))
    assert link(ev.Downloaded(request=request, error="Unavailable: x")) == []


def test_a_result_that_is_older_than_the_newest_is_discarded():
    link = training()
    link.arrives(ev.Download(fragment=0, round=12), step=12)
    out = link.arrives(ev.Download(fragment=0, round=11), step=11)
    assert kinds(out) == [ev.Discard]
    assert out[0].staged.version == (1, 11)


def test_a_result_waits_until_the_trainer_has_applied_the_one_before():
    link = training()
    [place] = of(ev.Place, link.arrives(ev.Download(fragment=0, round=11), step=11))
    assert link(ev.Placed(fragment=0)) == [ev.NotifyTrainer()]
    assert [tuple(r) for r in link.state.ready] == [(0, 1)]
    assert of(ev.Place, link.arrives(ev.Download(fragment=0, round=12), step=12)) == []
    assert of(ev.Place, link.trainer(local_step=9)) == [], "it may be reading the one before"
    [place] = of(ev.Place, link.trainer(local_step=10, applied=(1, 0)))
    assert (place.staged.version, place.generation) == ((1, 12), 2)
    assert list(link.state.ready) == [], "the trainer has it; the next is not placed yet"


def test_nothing_is_offered_to_a_trainer_without_the_rest_of_the_model():
    link, (first, _) = fresh()
    link.arrives(first)
    link(ev.Placed(fragment=0))
    link.trainer(FRESH)
    assert list(link.state.ready) == []


# ---------------------------------------------------------------- what is announced


def test_announced_fragments_are_open_and_the_step_is_known():
    link = training()
    assert link(ev.Opened(step=12, steps=200, fragments=(1, 0))) == [ev.NotifyTrainer()]
    assert (link.state.step, link.state.steps, tuple(link.state.open)) == (12, 200, (1, 0))
    assert link(ev.Opened(step=12, steps=200, fragments=(1, 0))) == [], "nothing new"


def test_a_fragment_that_was_missed_is_closed_until_it_is_placed():
    link = training()
    link(ev.Opened(step=12, steps=200, fragments=(1, 0)))
    [request] = of(ev.Download, link(ev.Committed(fragment=1, version=(1, 11))))
    assert tuple(link.state.open) == (0,)
    link.arrives(request, step=11)
    assert tuple(link.state.open) == (0,)
    link(ev.Placed(fragment=1))
    assert tuple(link.state.open) == (1, 0)


def test_completion_is_passed_on_to_the_trainer_with_its_step():
    link = training()
    link(ev.Completed(step=100))
    found = link.state
    assert (found.complete, found.step, found.text) == (True, 100, "the job is complete")


def test_leases_reach_the_trainer_and_the_newest_replace_the_earlier_ones():
    link = Link()
    link.trainer()
    link(welcome())
    assert link.state.leases is None
    assert ev.NotifyTrainer() in link(ev.Leased(serials=(3, 4)))
    assert link.state.leases == (3, 4)
    link(ev.Leased(serials=()))
    assert link.state.leases == ()


def test_at_the_beginning_no_fragment_is_late():
    link = Link()
    assert link.core.late == ""
    link.trainer()
    assert link.core.late == ""
