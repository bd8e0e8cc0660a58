"""Decisions of the link, without processes, sockets or clocks."""

from __future__ import annotations

from dataclasses import replace

from diloco.errors import NotFiniteError
from diloco_testing.learners.sessions import P, Session, downloads, welcome
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.link_protocol import DOWNLOAD_TRIES, WELCOME_TIMEOUT_SECONDS
from diloco_worker.core.messages import Phase, TrainerState
from diloco_worker.link.transfer import initial_ended


def downloaded(fragment: int, *, round_: int = 0, step: int = 10) -> ev.Downloaded:
    request = ev.Download(fragment=fragment, round=round_)
    return ev.Downloaded(
        request=request,
        staged=Staged(fragment=fragment, version=(1, step), ticket=100 * fragment + step),
    )


STEPPING = TrainerState(model_loaded=True, stepped=True, local_step=8, applied=(1, 1))


def trained(*, constants: bool = False) -> Session:
    session = Session(constants=constants)
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady())
    for fragment in range(P):
        session(downloaded(fragment))
    session(ev.TrainerUpdate(state=replace(STEPPING, stepped=False)))
    return session


def test_it_connects_after_the_first_state_of_the_trainer():
    session = Session()
    assert session.core.wake_at is None
    assert [type(d) for d in session(ev.TrainerUpdate(state=TrainerState()))] == [ev.Connect]


def test_a_fresh_process_downloads_everything_and_applies_it_when_all_is_placed():
    session = Session(constants=True)
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    assert session.link_state.phase is Phase.WAITING
    requests = session(ev.ModelReady())
    assert [(w.fragment, w.round) for w in requests] == [(0, 0), (1, 0), (2, 0)]
    session(downloaded(0))
    session(downloaded(1))
    assert (session.link_state.phase, list(session.link_state.ready)) == (Phase.DOWNLOADING, [])
    session(downloaded(2))
    assert (session.link_state.phase, list(session.link_state.ready)) == (
        Phase.APPLY_MODEL,
        [(0, 1), (1, 1)],
    )
    session(ev.TrainerUpdate(state=STEPPING))
    assert (session.link_state.phase, list(session.link_state.ready)) == (Phase.TRAINING, [])


def test_a_failed_download_of_the_model_is_retried():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady())
    (again,) = session(ev.Downloaded(request=ev.Download(fragment=1), error="Damaged: x"))
    assert (again.fragment, again.round, again.delay_seconds > 0) == (1, 0, True)


def test_a_result_during_the_initial_download_is_held_until_the_model_is_applied():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady())
    session(downloaded(0))
    assert session(downloaded(0, round_=11, step=11)) == []
    session(downloaded(1))
    (place,) = session(ev.TrainerUpdate(state=replace(STEPPING, stepped=False)))
    assert (place.staged.version, place.generation) == ((1, 11), 2)
    assert list(session.link_state.ready) == [(0, 2)]


def test_its_own_fresh_checkpoint_is_loaded_instead_of_downloading():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState(checkpoint_step=9, checkpoint_local_step=7)))
    session(welcome(use_checkpoint=True))
    assert session(ev.ModelReady()) == []
    assert session.link_state.phase is Phase.LOAD_CHECKPOINT


def test_a_checkpoint_that_turns_out_to_be_unusable_leads_to_a_download():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState(checkpoint_step=9)))
    session(welcome(use_checkpoint=True))
    session(ev.ModelReady())
    requests = session(ev.TrainerUpdate(state=TrainerState(checkpoint_step=0)))
    assert [type(d) for d in requests] == [ev.Download, ev.Download]


def test_the_initial_model_is_uploaded_when_the_trainer_has_copied_it_and_once_per_request():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    assert session(ev.InitialRequested()) == []
    assert session.link_state.initial_requested == 1
    assert session(ev.TrainerUpdate(state=TrainerState(initial_copied=1))) == [
        ev.UploadInitial(request=1)
    ]
    assert session(ev.TrainerUpdate(state=TrainerState(initial_copied=1))) == []
    (again,) = session(ev.InitialUploaded(request=1, error="Unavailable: x"))
    assert isinstance(again, ev.UploadInitial)
    assert session(ev.InitialUploaded(request=1)) == []


def test_an_initial_model_that_is_not_finite_ends_the_learner_and_is_not_uploaded_again():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.InitialRequested())
    session(ev.TrainerUpdate(state=TrainerState(initial_copied=1)))
    ended = initial_ended(1, NotFiniteError("fragment 0 holds NaN"))
    assert session(ended) == [ev.CancelTransfers()]
    assert session.link_state.refused_exit == 78
    assert "fragment 0 holds NaN" in session.link_state.text


def test_an_initial_upload_that_ends_after_the_model_exists_is_not_repeated_and_ends_nothing():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.InitialRequested())
    session(ev.TrainerUpdate(state=TrainerState(initial_copied=1)))
    session(ev.ModelReady(versions=((1, 0), (1, 0))))
    assert session(ev.InitialUploaded(request=1, error="Unavailable: x")) == []
    assert session(initial_ended(1, NotFiniteError("fragment 0 holds NaN"))) == []
    assert session.link_state.refused_exit == 0


def test_a_report_is_sent_once_per_local_step_and_never_before_ready():
    session = Session()
    state = replace(STEPPING, applied=(0, 0))
    session(ev.TrainerUpdate(state=state))
    session(welcome())
    assert session(ev.TrainerUpdate(state=replace(state, local_step=9))) == []
    (report,) = session(ev.ModelReady())
    assert report.state.local_step == 9
    assert session(ev.TrainerUpdate(state=replace(state, local_step=9))) == []
    assert len(session(ev.TrainerUpdate(state=replace(state, local_step=10)))) == 1


def test_a_loaded_model_is_never_downloaded_again_after_a_broken_session():
    session = trained()
    session(ev.SessionLost(text="gone"))
    assert [type(d) for d in session(ev.Tick(), after=1.0)] == [ev.Connect]
    session(welcome(epoch=2))
    assert not [d for d in session(ev.ModelReady()) if isinstance(d, ev.Download)]


def test_a_new_session_does_not_overwrite_a_model_that_the_trainer_may_be_applying():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady())
    session(downloaded(0))
    session(downloaded(1))
    session(ev.SessionLost(text="gone"))
    session(ev.Tick(), after=1.0)
    session(welcome())
    assert session(ev.ModelReady()) == []
    assert session.link_state.phase is Phase.APPLY_MODEL


def test_a_broken_session_restarts_the_initial_download():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady())
    session(downloaded(0))
    assert session(ev.SessionLost(text="gone")) == [ev.CancelTransfers()]
    assert session.link_state.phase is Phase.CONNECTING
    session(ev.Tick(), after=1.0)
    session(welcome())
    assert len(session(ev.ModelReady())) == P


def test_a_refusal_ends_all_retries():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(ev.SessionLost(text="another model", refused_exit=78))
    assert (session.link_state.refused_exit, session.link_state.text) == (78, "another model")
    assert session.core.wake_at is None
    assert session(ev.Tick(), after=100.0) == []
    assert session(ev.TrainerUpdate(state=TrainerState(leaving="Refused"))) == [
        ev.Leave(reason="Refused")
    ]


def test_a_heartbeat_is_sent_only_when_nothing_else_was():
    session = trained()
    assert session(ev.Tick(), after=1.9) == []
    assert len(session(ev.TrainerUpdate(state=replace(STEPPING, local_step=9)))) == 1
    assert session(ev.Tick(), after=1.9) == []
    assert session(ev.Tick(), after=0.1) == [ev.SendHeartbeat()]


def test_a_session_without_a_welcome_is_replaced():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    assert session.core.wake_at == WELCOME_TIMEOUT_SECONDS
    assert [type(d) for d in session(ev.Tick(), after=WELCOME_TIMEOUT_SECONDS)] == [ev.Connect]


def test_the_download_of_a_result_is_retried_a_few_times_and_then_left_to_the_next_round():
    session = trained()
    (request,) = session(ev.ResultAnnounced(round=11, attempt=1, fragment=0))
    for _ in range(DOWNLOAD_TRIES - 1):
        (request,) = session(ev.Downloaded(request=request, error="Unavailable: x"))
    assert session(ev.Downloaded(request=request, error="Unavailable: x")) == []


def test_a_round_that_was_not_committed_changes_nothing():
    session = trained()
    (request,) = session(ev.ResultAnnounced(round=11, attempt=1, fragment=0))
    assert session(ev.Downloaded(request=request, aborted=True)) == []


def test_a_new_link_offers_what_the_previous_link_placed():
    slots = [
        Slot(fragment=0, published=3, version=(1, 5)),
        Slot(fragment=1, published=2, version=(1, 6)),
    ]
    session = Session(slots=slots)
    session(ev.TrainerUpdate(state=replace(STEPPING, applied=(3, 1), incarnation=4, epoch=1)))
    assert list(session.link_state.ready) == [(1, 2)]
    assert (session.link_state.incarnation, session.link_state.epoch) == (4, 1)


def test_a_fragment_that_cannot_be_decoded_is_not_offered_to_the_trainer():
    session = trained()
    core = session.core
    (place, *_) = core.handle(downloaded(0, round_=11, step=11), 0.0)
    assert isinstance(place, ev.Place)
    core.handle(ev.Placed(fragment=0, error="NaN"), 0.0)
    assert list(session.link_state.ready) == []
    (place, *_) = core.handle(downloaded(0, round_=11, step=11), 0.0)
    assert isinstance(place, ev.Place)


def test_a_trainer_that_leaves_reports_its_last_step_and_nothing_else_before_the_goodbye():
    session = trained()
    state = replace(STEPPING, leaving="SIGTERM")
    leave = ev.Leave(reason="SIGTERM")
    assert session(ev.TrainerUpdate(state=state)) == [ev.SendReport(state=state), leave]
    assert session(ev.TrainerUpdate(state=state)) == [leave]


def test_a_last_step_that_was_reported_is_not_reported_again_at_the_goodbye():
    session = trained()
    session(ev.TrainerUpdate(state=STEPPING))
    leaving = replace(STEPPING, leaving="SIGTERM")
    assert session(ev.TrainerUpdate(state=leaving)) == [ev.Leave(reason="SIGTERM")]


def test_the_trainer_learns_of_completion():
    session = trained()
    session(ev.Completed(step=100))
    assert (session.link_state.complete, session.link_state.step) == (True, 100)


# ------------------------------------------------------------ what was missed


def current(fragment: int, *, step: int, tries: int = 1) -> ev.Downloaded:
    """The current version of an outdated fragment has arrived."""
    request = ev.Download(fragment=fragment, exact=False, tries=tries)
    staged = Staged(fragment=fragment, version=(1, step), ticket=1000 + step)
    return ev.Downloaded(request=request, staged=staged)


def reconnected(session: Session, *versions: int) -> list[ev.Decision]:
    session(ev.Opened(step=10, steps=100, fragments=(0, 1)))
    session(ev.SessionLost(text="cut"))
    session(welcome())
    return session(ev.ModelReady(versions=tuple((1, step) for step in versions)))


def test_after_a_broken_session_outdated_fragments_are_downloaded_and_not_offered_before():
    session = trained()
    wanted = downloads(reconnected(session, 10, 34))
    assert [(d.fragment, d.round, d.exact) for d in wanted] == [(1, 0, False)]
    session(ev.Opened(step=35, steps=100, fragments=(0, 1)))
    assert tuple(session.link_state.open) == (0,)
    session(current(1, step=34))
    assert tuple(session.link_state.open) == (0, 1)
    assert [tuple(r) for r in session.link_state.ready] == [(1, 2)], "in the same state as `open`"


def test_nothing_is_downloaded_again_after_a_blip():
    assert downloads(reconnected(trained(), 10, 10)) == []


def test_a_commit_whose_result_is_being_downloaded_needs_nothing_more():
    session = trained()
    session(ev.ResultAnnounced(round=11, attempt=1, fragment=0))
    assert downloads(session(ev.Committed(fragment=0, version=(1, 11)))) == []
    assert downloads(session(downloaded(0, round_=11, step=11))) == []


def test_a_commit_whose_result_was_never_announced_is_downloaded():
    """The learner joined between the pull and the commit."""
    session = trained()
    [wanted] = downloads(session(ev.Committed(fragment=0, version=(1, 11))))
    assert (wanted.fragment, wanted.round, wanted.exact) == (0, 0, False)


def test_a_result_that_cannot_be_downloaded_is_replaced_by_the_current_version():
    session = trained()
    [request] = downloads(session(ev.ResultAnnounced(round=11, attempt=1, fragment=0)))
    session(ev.Committed(fragment=0, version=(1, 11)))
    for _ in range(DOWNLOAD_TRIES - 1):
        [request] = downloads(session(ev.Downloaded(request=request, error="Damaged: x")))
        assert request.round == 11
    [request] = downloads(session(ev.Downloaded(request=request, error="Damaged: x")))
    assert (request.round, request.exact) == (0, False)
    delays = []
    for _ in range(8):  # it is never forgotten
        [request] = downloads(session(ev.Downloaded(request=request, error="Unavailable: x")))
        delays.append(request.delay_seconds)
    assert delays == sorted(delays)
    assert delays[-1] == 10.0


def test_an_aborted_round_is_not_requested_again_but_an_undecided_one_is():
    session = trained()
    [request] = downloads(session(ev.ResultAnnounced(round=11, attempt=1, fragment=0)))
    [again] = downloads(session(ev.Downloaded(request=request)))
    assert (again.round, again.attempt) == (11, 1)
    assert downloads(session(ev.Downloaded(request=again, aborted=True))) == []


def test_a_missed_fragment_that_cannot_be_decoded_is_downloaded_again():
    session = trained()
    [request] = downloads(session(ev.Committed(fragment=0, version=(1, 11))))
    staged = Staged(fragment=0, version=(1, 11), ticket=5)
    session.core.handle(ev.Downloaded(request=request, staged=staged), 1.0)
    again = downloads(session.core.handle(ev.Placed(fragment=0, error="NotFinite"), 1.0))
    assert [d.fragment for d in again] == [0]


def test_a_fresh_process_does_not_catch_up_beside_its_download_of_the_model():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome())
    session(ev.ModelReady(versions=((1, 10), (1, 10))))
    assert downloads(session(ev.Committed(fragment=0, version=(1, 11)))) == []
    session(downloaded(0))
    session(downloaded(1))
    [missed] = downloads(session(ev.TrainerUpdate(state=replace(STEPPING, stepped=False))))
    assert (missed.fragment, missed.exact) == (0, False), "committed while the model was on its way"


def test_a_version_that_a_restart_of_the_syncer_has_undone_is_not_waited_for():
    """The commit of step 34 came, its result did not, and the successor resumes from step 10."""
    session = trained()
    assert downloads(session(ev.Committed(fragment=1, version=(1, 34))))
    assert downloads(reconnected(session, 10, 10)) == []
    assert tuple(session.link_state.open) == (0, 1)
    [wanted] = downloads(session(ev.Committed(fragment=1, version=(2, 11))))
    assert (wanted.fragment, wanted.round) == (1, 0)


# ------------------------------------------------------------ a checkpoint of its own


LOADED = replace(STEPPING, stepped=False, applied=(0, 0), versions=[[1, 10], [1, 4]])


def with_checkpoint(*versions: int) -> Session:
    """The trainer loads its checkpoint, at these versions of the syncer."""
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState(checkpoint_step=9, checkpoint_local_step=7)))
    session(welcome(use_checkpoint=True))
    session(ev.Opened(step=10, steps=100, fragments=(0, 1)))
    assert session(ev.ModelReady(versions=tuple((1, step) for step in versions))) == []
    return session


def test_a_learner_with_a_checkpoint_downloads_what_was_merged_since_and_nothing_else():
    session = with_checkpoint(10, 9)
    [wanted] = session(ev.TrainerUpdate(state=LOADED))
    assert (wanted.fragment, wanted.round, wanted.exact) == (1, 0, False)
    assert tuple(session.link_state.open) == (0,)
    session(current(1, step=9))
    assert tuple(session.link_state.open) == (0, 1)
    assert [tuple(r) for r in session.link_state.ready] == [(1, 1)]
    assert session.link_state.versions == [None, (1, 9)]


def test_a_checkpoint_without_versions_counts_as_older_in_every_fragment():
    session = with_checkpoint(10, 9)
    wanted = session(ev.TrainerUpdate(state=replace(LOADED, versions=[None, None])))
    assert [d.fragment for d in wanted] == [0, 1]


def test_what_was_merged_while_a_checkpoint_was_loaded_is_downloaded_too():
    session = with_checkpoint(10, 4)
    assert session(ev.Committed(fragment=0, version=(1, 11))) == []
    [wanted] = session(ev.TrainerUpdate(state=LOADED))
    assert wanted.fragment == 0


def test_a_checkpoint_that_was_loaded_during_a_cut_catches_up_in_the_next_session():
    session = with_checkpoint(10, 9)
    session(ev.SessionLost(text="cut"))
    assert session(ev.TrainerUpdate(state=LOADED)) == [], "there is no syncer to ask"
    session(welcome())
    wanted = downloads(session(ev.ModelReady(versions=((1, 10), (1, 12)))))
    assert [d.fragment for d in wanted] == [1]


def test_a_cut_while_a_checkpoint_is_loaded_hides_nothing_that_was_merged_meanwhile():
    session = with_checkpoint(10, 4)
    session(ev.SessionLost(text="cut"))
    session(welcome())
    session(ev.ModelReady(versions=((1, 10), (1, 12))))
    [wanted] = session(ev.TrainerUpdate(state=LOADED))
    assert wanted.fragment == 1


def test_an_offer_that_the_trainer_made_before_it_knew_is_not_reported():
    session = with_checkpoint(10, 9)
    session(ev.TrainerUpdate(state=LOADED))
    early = replace(LOADED, stepped=True, local_step=9, offers=[0, 1])
    (report,) = session(ev.TrainerUpdate(state=early))
    assert report.state.offers == [0]
    session(current(1, step=9))
    (report,) = session(ev.TrainerUpdate(state=replace(early, local_step=10)))
    assert report.state.offers == [0], "what it offers is not what it received"
    applied = replace(early, local_step=11, applied=(0, 1))
    (report,) = session(ev.TrainerUpdate(state=applied))
    assert report.state.offers == [0, 1]


def test_after_a_cut_the_first_report_offers_nothing_that_is_outdated():
    session = trained()
    session(ev.TrainerUpdate(state=replace(STEPPING, local_step=9, offers=[0, 1])))
    session(ev.SessionLost(text="cut"))
    session(welcome())
    *_, report = session(ev.ModelReady(versions=((1, 10), (1, 34))))
    assert report.state.offers == [0]


def test_a_new_link_takes_the_versions_of_a_checkpoint_from_the_trainer():
    slots = [Slot(fragment=0), Slot(fragment=1, published=1, version=(1, 12))]
    session = Session(slots=slots)
    state = replace(STEPPING, applied=(0, 1), versions=[[1, 10], [1, 12]])
    session(ev.TrainerUpdate(state=state))
    session(welcome())
    assert downloads(session(ev.ModelReady(versions=((1, 10), (1, 12))))) == []
    wanted = downloads(session(ev.Committed(fragment=0, version=(1, 13))))
    assert [d.fragment for d in wanted] == [0]


def test_a_fragment_that_the_model_does_not_have_reaches_neither_trainer_nor_transfers():
    session = trained(constants=True)
    session(ev.Opened(step=11, steps=100, fragments=(1, P, 7)))
    assert session.link_state.open == (1,)
    assert session(ev.Pulled(round=11, attempt=1, fragment=P, versions=())) == []
    assert session(ev.ResultAnnounced(round=11, attempt=1, fragment=P)) == []


def test_the_trainer_learns_the_name_of_the_run_with_each_welcome():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState()))
    session(welcome(run="a"))
    assert session.core.link_state.run == "a"
    session(welcome(run="b"))
    assert session.core.link_state.run == "b"
