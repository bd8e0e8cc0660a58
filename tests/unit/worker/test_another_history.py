"""
What a learner holds of versions that the syncer no longer has: it crashed, or an older copy of its volume was restored.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco_testing.learners.sessions import Session, downloads, welcome
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged, Version
from diloco_worker.core.messages import Phase, TrainerState
from diloco_worker.core.trainer import ApplyModel, LoadCheckpoint, LoadOptimizers, Send, TrainerCore
from diloco_worker.trainer.checkpoint import Checkpoints, local_checkpoint

FRESH = TrainerState()
APPLIED = TrainerState(model_loaded=True, local_step=8, applied=(1, 1))


def part(fragment: int, version: Version, **request: object) -> ev.Downloaded:
    """A download of a fragment has arrived."""
    return ev.Downloaded(
        request=ev.Download(fragment=fragment, **request),
        staged=Staged(fragment=fragment, version=version, ticket=1000 * version[0] + version[1]),
    )


def joined(*versions: Version, start_id: str = "", **fields: object) -> Session:
    """It trains with these versions."""
    session = Session()
    session(ev.TrainerUpdate(state=FRESH))
    session(welcome(epoch=versions[0][0], start_id=start_id, **fields))
    session(ev.ModelReady(versions=versions))
    for fragment, version in enumerate(versions):
        session(part(fragment, version))
    session(ev.TrainerUpdate(state=APPLIED))
    session(ev.Opened(step=10, steps=100, fragments=(0, 1)))
    return session


def again(session: Session, *versions: Version, **fields: object) -> list[ev.Decision]:
    """The session breaks; the next one has these versions."""
    session(ev.SessionLost(text="cut"))
    session(welcome(**fields))
    return session(ev.ModelReady(versions=versions))


def pulled(session: Session, *versions: Version) -> ev.Pulled:
    """The pull that an upload answers."""
    [upload] = session(ev.Pulled(round=200, attempt=1, fragment=0, versions=versions))
    assert isinstance(upload, ev.Upload)
    return upload.pull


# ------------------------------------------------------------ an older copy of the volume was restored


@pytest.mark.parametrize("start_id", ["", "b"])
def test_versions_of_later_epochs_than_the_syncers_are_replaced_by_what_it_has(start_id):
    """The copy was made in epoch 1; the learner lived on to epoch 3, and the restored syncer begins epoch 2."""
    session = joined((3, 300), (3, 299), start_id="a" if start_id else "")
    wanted = downloads(again(session, (1, 100), (1, 99), epoch=2, start_id=start_id))
    assert [(d.fragment, d.exact, d.delay_seconds) for d in wanted] == [
        (0, False, 0),
        (1, False, 0),
    ]
    assert tuple(session.link_state.open) == (), "not offered before it has what the syncer has"
    session(part(0, (1, 100), exact=False))
    assert tuple(session.link_state.open) == (0,)
    session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1))))
    [place] = session(part(0, (2, 101), round=101))
    assert isinstance(place, ev.Place), "a result of the new history is not discarded"


def test_an_epoch_that_is_used_again_makes_nothing_of_equal_number_known():
    session = joined((2, 300), (2, 299), start_id="a")
    wanted = downloads(again(session, (2, 300), (1, 99), epoch=2, start_id="b"))
    assert [d.fragment for d in wanted] == [0, 1]


def test_results_that_wait_for_the_trainer_are_discarded_with_their_history():
    session = joined((3, 300), (3, 299), start_id="a")
    session(part(0, (3, 302), round=302))
    session(part(0, (3, 304), round=304))
    discarded = again(session, (1, 100), (1, 99), epoch=2, start_id="b")[0]
    assert isinstance(discarded, ev.Discard)
    assert discarded.staged.version == (3, 304)
    assert session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1)))) == []


def test_no_delta_is_based_on_a_version_of_a_history_that_the_learner_did_not_follow():
    """It comes late: the restored syncer has reached epoch 5, and made another version (3, 300) meanwhile."""
    session = joined((3, 300), (3, 299), start_id="a")
    decisions = again(
        session, (3, 300), (3, 299), epoch=5, start_id="z", snapshot_start_id="y"
    )  # fmt: skip
    assert downloads(decisions) == []
    assert pulled(session, (3, 300)).versions == ()
    session(part(0, (5, 301), round=301))
    assert pulled(session, (5, 301), (3, 300)).versions == ((5, 301), (3, 300))


def test_a_syncer_that_follows_the_one_it_knew_still_gets_deltas():
    session = joined((3, 300), (3, 299), start_id="a")
    again(session, (3, 300), (3, 299), epoch=4, start_id="b", snapshot_start_id="a")
    assert pulled(session, (3, 300)).versions == ((3, 300),)
    again(session, (3, 300), (3, 299), epoch=4, start_id="b", snapshot_start_id="a")
    assert pulled(session, (3, 300)).versions == ((3, 300),), "after a blip as well"
    again(session, (3, 300), (3, 299), epoch=6, start_id="d", snapshot_start_id="c")
    assert pulled(session, (3, 300)).versions == (), "two starts further, either is possible"


def test_a_start_that_wrote_no_snapshot_costs_no_deltas():
    """The syncer starts twice from the same snapshot: what the start between them committed is gone."""
    session = joined((3, 300), (3, 299), start_id="a")
    again(session, (3, 300), (3, 299), epoch=4, start_id="b", snapshot_start_id="a")
    session(part(0, (4, 301), round=301))
    session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1))))
    again(session, (3, 300), (3, 299), epoch=5, start_id="c", snapshot_start_id="a")
    assert pulled(session, (3, 300)).versions == ((3, 300),)
    assert pulled(session, (5, 301), (3, 300)).versions == ((5, 301), (3, 300))


def test_a_learner_that_joined_a_start_without_a_snapshot_still_sends_deltas_to_the_next():
    session = joined((3, 300), (3, 299), start_id="b", snapshot_start_id="a")
    again(session, (3, 300), (3, 299), epoch=5, start_id="c", snapshot_start_id="a")
    assert pulled(session, (3, 300)).versions == ((3, 300),)


def test_a_start_that_was_abandoned_is_not_followed_when_it_returns():
    """
    The history of b ends with d, which begins from the snapshot of a; then it is restored: its versions of
    epoch 2 are not those that d made.
    """
    session = joined((1, 100), (1, 99), start_id="a")
    again(session, (1, 100), (1, 99), epoch=2, start_id="b", snapshot_start_id="a")
    again(session, (1, 100), (1, 99), epoch=2, start_id="d", snapshot_start_id="a")
    assert pulled(session, (1, 100)).versions == ((1, 100),)
    session(part(0, (2, 105), round=105))
    session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1))))
    again(session, (2, 105), (1, 99), epoch=3, start_id="e", snapshot_start_id="b")
    assert pulled(session, (2, 105)).versions == ()


def test_only_the_last_starts_are_remembered():
    session = joined((1, 100), (1, 99), start_id="s0")
    for n in range(1, 12):
        again(
            session, (1, 100), (1, 99), epoch=n + 1, start_id=f"s{n}", snapshot_start_id=f"s{n - 1}"
        )  # fmt: skip
    assert session.link_state.starts == tuple(f"s{n}" for n in range(4, 12))


def test_the_upgrade_of_a_syncer_that_stated_no_start_costs_no_deltas():
    session = joined((3, 300), (3, 299))
    again(session, (3, 300), (3, 299), epoch=4, start_id="b")
    assert pulled(session, (3, 300)).versions == ((3, 300),)
    again(session, (3, 300), (3, 299), epoch=5, start_id="c", snapshot_start_id="b")
    assert pulled(session, (3, 300)).versions == ((3, 300),)


def test_a_second_start_from_a_snapshot_of_an_earlier_release_gets_no_deltas():
    """Its snapshot may be another one than that of the first, with other versions of the same numbers."""
    session = joined((3, 300), (3, 299))
    for epoch, start_id in ((4, "b"), (5, "c")):
        again(session, (3, 300), (3, 299), epoch=epoch, start_id=start_id)
    assert pulled(session, (3, 300)).versions == ()


def test_what_waited_for_the_trainer_is_no_base_in_a_history_that_it_did_not_follow():
    session = joined((3, 300), (3, 299), start_id="a")
    session(part(0, (3, 302), round=302))
    session(part(0, (3, 304), round=304))
    decisions = again(session, (3, 304), (3, 299), epoch=5, start_id="z", snapshot_start_id="y")
    assert [d.staged.version for d in decisions if isinstance(d, ev.Discard)] == [(3, 304)]
    assert [d.fragment for d in downloads(decisions)] == [0]
    session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1))))
    assert pulled(session, (3, 304)).versions == ()


def test_the_trainer_learns_that_a_version_in_its_inbox_is_of_a_lost_history():
    session = joined((3, 300), (3, 299), start_id="a")
    session(part(0, (3, 302), round=302))
    assert session.link_state.versions == [(3, 302), (3, 299)]
    again(session, (1, 100), (1, 99), epoch=2, start_id="b")
    assert session.link_state.ready == [(0, 2)], "not applied yet"
    assert session.link_state.versions == [None, None]


def test_a_syncer_of_an_earlier_release_still_gets_deltas():
    session = joined((3, 300), (3, 299))
    again(session, (3, 300), (3, 299), epoch=4)
    assert pulled(session, (3, 300)).versions == ((3, 300),)


def test_a_crash_that_undid_commits_makes_nothing_be_downloaded():
    session = joined((3, 300), (3, 299), start_id="a")
    decisions = again(
        session, (3, 290), (3, 291), epoch=4, start_id="b", snapshot_start_id="a"
    )  # fmt: skip
    assert downloads(decisions) == []


def test_a_new_link_knows_of_which_start_its_inboxes_are():
    first = joined((3, 300), (3, 299), start_id="a", snapshot_start_id="x")
    assert first.link_state.starts == ("x", "a")
    for start_id, wanted in (("a", []), ("b", [0, 1])):
        slots = [
            Slot(fragment=p, published=1, version=version)
            for p, version in enumerate(((3, 300), (3, 299)))
        ]
        session = Session(slots=slots)
        session(ev.TrainerUpdate(state=replace(APPLIED, starts=["x", "a"])))
        session(welcome(epoch=3, start_id=start_id))
        found = downloads(session(ev.ModelReady(versions=((3, 300), (3, 299)))))
        assert [d.fragment for d in found] == wanted


def restarted(session: Session, *versions: Version) -> Session:
    """A new link, with these versions in the shared memory and what the trainer knows of the one before."""
    slots = [Slot(fragment=p, published=1, version=version) for p, version in enumerate(versions)]
    another = Session(slots=slots)
    another(ev.TrainerUpdate(state=replace(APPLIED, starts=[*session.link_state.starts])))
    return another


@pytest.mark.parametrize("snapshot_start_id", ["y", ""])
def test_a_new_link_bases_no_delta_on_a_version_that_the_one_before_knew_to_be_lost(
    snapshot_start_id,
):
    session = joined((3, 300), (3, 299), start_id="a")
    syncer = {"epoch": 5, "start_id": "z", "snapshot_start_id": snapshot_start_id}
    again(session, (3, 300), (3, 299), **syncer)
    session(part(0, (5, 301), round=301))
    assert session.link_state.starts == (), "the inbox of fragment 1 is of neither"
    new = restarted(session, (5, 301), (3, 299))
    new(welcome(**syncer))
    new(ev.ModelReady(versions=((5, 301), (3, 299))))
    [upload] = new(ev.Pulled(round=302, attempt=1, fragment=1, versions=((3, 299),)))
    assert upload.pull.versions == ()


def test_a_new_link_bases_deltas_on_what_replaced_the_versions_of_a_lost_history():
    session = joined((3, 300), (3, 299), start_id="a")
    syncer = {"epoch": 5, "start_id": "z", "snapshot_start_id": "y"}
    again(session, (3, 300), (3, 299), **syncer)
    session(part(0, (5, 301), round=301))
    session(part(1, (5, 302), round=302))
    assert session.link_state.starts == ("y", "z")
    new = restarted(session, (5, 301), (5, 302))
    new(welcome(**syncer))
    assert downloads(new(ev.ModelReady(versions=((5, 301), (5, 302))))) == []
    assert pulled(new, (5, 301)).versions == ((5, 301),)


def test_the_starts_that_were_followed_outlive_the_link():
    session = joined((3, 300), (3, 299), start_id="a")
    again(session, (3, 300), (3, 299), epoch=4, start_id="b", snapshot_start_id="a")
    new = restarted(session, (3, 300), (3, 299))
    again(new, (3, 300), (3, 299), epoch=5, start_id="c", snapshot_start_id="a")
    assert pulled(new, (3, 300)).versions == ((3, 300),)


def test_a_new_link_bases_no_delta_on_an_inbox_that_was_about_to_be_written():
    """It ends between the first and the second placement of what the trainer had not let it write."""
    session = joined((3, 300), (3, 299), start_id="a")
    session(part(0, (3, 302), round=302))
    session(part(1, (3, 303), round=303))
    syncer = {"epoch": 5, "start_id": "z", "snapshot_start_id": "y"}
    again(session, (3, 303), (3, 303), **syncer)
    session(part(0, (5, 304), round=304))
    session(part(1, (5, 305), round=305))
    applied = ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 2)))
    first, second = session.core.handle(applied, 1.0)[:2]
    assert (first.staged.version, second.staged.version) == ((5, 304), (5, 305))
    session.core.handle(ev.Placed(fragment=0), 1.0)
    assert session.core.link_state.starts == (), "fragment 1 is of the history before"
    session.core.handle(ev.Placed(fragment=1), 1.0)
    assert session.core.link_state.starts == ("y", "z")


# ------------------------------------------------------------ local checkpoints


def returned(checkpoint: str, **syncer: object) -> Session:
    """A learner with a local checkpoint of this start is in a session with a syncer that considers it new enough."""
    found = TrainerState(checkpoint_step=9, checkpoint_local_step=7, checkpoint_start=checkpoint)
    session = Session()
    session(ev.TrainerUpdate(state=found))
    session(welcome(epoch=2, use_checkpoint=True, **syncer))
    session(ev.ModelReady(versions=((2, 10), (2, 9))))
    return session


def loaded(session: Session) -> list[ev.Decision]:
    """The trainer has loaded it; it began from the same versions as the syncer has."""
    found = session.core._trainer
    state = replace(found, model_loaded=True, applied=(0, 0), versions=[[2, 10], [2, 9]])
    return session(ev.TrainerUpdate(state=state))


@pytest.mark.parametrize("snapshot_start_id", ["x", ""])
def test_of_a_checkpoint_of_a_lost_history_the_parameters_are_not_loaded(snapshot_start_id):
    session = returned("a", start_id="z", snapshot_start_id=snapshot_start_id)
    assert session.link_state.phase is Phase.DOWNLOADING
    session(part(0, (2, 10)))
    session(part(1, (2, 9)))
    assert session.link_state.phase is Phase.APPLY_MODEL
    assert session.link_state.starts[-1] == "z"


@pytest.mark.parametrize(("start_id", "snapshot_start_id"), [("a", ""), ("a", "x"), ("b", "a")])
def test_a_checkpoint_of_the_syncers_history_is_loaded(start_id, snapshot_start_id):
    session = returned("a", start_id=start_id, snapshot_start_id=snapshot_start_id)
    assert session.link_state.phase is Phase.LOAD_CHECKPOINT
    assert downloads(loaded(session)) == []
    assert session.link_state.starts[-1] == start_id, "the next checkpoint is of this start"


def test_a_checkpoint_that_the_session_before_would_have_loaded_is_not_loaded_by_one_with_a_lost_history():
    session = Session()
    found = TrainerState(checkpoint_step=9, checkpoint_local_step=7, checkpoint_start="a")
    session(ev.TrainerUpdate(state=found))
    session(welcome(epoch=2, use_checkpoint=True, start_id="a"))
    session(ev.SessionLost(text="cut"))
    session(welcome(epoch=2, use_checkpoint=True, start_id="z", snapshot_start_id="x"))
    session(ev.ModelReady(versions=((2, 10), (2, 9))))
    assert session.link_state.phase is Phase.DOWNLOADING


def test_of_a_checkpoint_on_disk_of_a_lost_history_only_the_optimizers_are_loaded(tmp_path):
    session = joined((2, 10), (2, 9), start_id="a", run="r")
    trainer = {
        "name": "eu/0", "fragments": 2, "checkpoint_every": 1, "connect_timeout_seconds": 60.0,
    }  # fmt: skip
    core = TrainerCore(found=None, **trainer)
    core.join(replace(session.link_state, phase=Phase.APPLY_MODEL), now=0.0, terminated=False)
    core.step(10, session.link_state, now=1.0)
    [_, save] = core.copied([], loss=1.0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, keep=2, digest="d")
    assert checkpoints.start(
        model, [optimizer], local_step=1, global_step=10, facts=dict(save.facts), run=save.run
    )
    checkpoints.finish()

    found = local_checkpoint(checkpoints.newest())
    for start_id, actions in (("a", [LoadCheckpoint]), ("z", [ApplyModel, LoadOptimizers])):
        again, session = TrainerCore(found=found, **trainer), Session()
        session(ev.TrainerUpdate(state=again.state()))
        session(welcome(epoch=2, use_checkpoint=True, run="r", start_id=start_id))
        session(ev.ModelReady(versions=((2, 10), (2, 9))))
        for fragment, version in enumerate([(2, 10), (2, 9)]):
            if start_id == "z":
                session(part(fragment, version))
        done = again.join(session.link_state, now=0.0, terminated=False)
        assert [type(action) for action in done if not isinstance(action, Send)] == actions


@pytest.mark.parametrize("checkpoint", ["a", ""])
def test_what_the_trainer_loads_while_the_syncer_becomes_one_of_another_history_is_replaced(
    checkpoint,
):
    """The checkpoint of the start before, or the model that was downloaded from it."""
    session = returned(checkpoint, start_id="a")
    if not checkpoint:
        session = downloading(start_id="a")
        session(part(0, (2, 10)))
        session(part(1, (2, 9)))
        assert session.link_state.phase is Phase.APPLY_MODEL
    again(session, (2, 10), (2, 9), epoch=2, start_id="z", snapshot_start_id="x")
    assert [d.fragment for d in downloads(loaded(session))] == [0, 1]
    assert session.link_state.starts == ()


@pytest.mark.parametrize(("checkpoint", "start_id"), [("", "z"), ("", ""), ("a", "")])
def test_a_checkpoint_is_loaded_if_it_or_the_syncer_is_of_a_release_that_states_no_start(
    checkpoint, start_id
):
    session = returned(checkpoint, start_id=start_id)
    assert session.link_state.phase is Phase.LOAD_CHECKPOINT
    assert downloads(loaded(session)) == []
    assert session.link_state.starts == (("",) if checkpoint == start_id else ())


def test_a_checkpoint_without_a_start_of_a_lost_history_is_older_than_all_that_the_syncer_has():
    session = Session()
    session(ev.TrainerUpdate(state=TrainerState(checkpoint_step=9, checkpoint_local_step=7)))
    session(welcome(epoch=2, use_checkpoint=True, start_id="b"))
    session(ev.ModelReady(versions=((1, 10), (1, 9))))
    state = replace(APPLIED, applied=(0, 0), versions=[[3, 9], [2, 11]])
    assert [d.fragment for d in downloads(session(ev.TrainerUpdate(state=state)))] == [0, 1]


# ------------------------------------------------------------ a crash while a new learner downloads the model


def downloading(start_id: str = "") -> Session:
    session = Session()
    session(ev.TrainerUpdate(state=FRESH))
    session(welcome(epoch=1, start_id=start_id))
    session(ev.ModelReady(versions=((1, 14), (1, 13))))
    return session


def test_a_part_that_the_crash_of_the_syncer_has_undone_is_replaced_by_an_older_one():
    session = downloading()
    session(part(0, (1, 14)))
    again(session, (1, 10), (1, 9), epoch=2)
    [place] = session(part(0, (1, 10)))
    assert isinstance(place, ev.Place), "and no download of it again, which would never end"
    session(part(1, (1, 9)))
    assert session.link_state.phase is Phase.APPLY_MODEL


def test_a_result_that_waited_for_the_model_is_discarded_when_its_download_begins_anew():
    session = downloading()
    session(part(0, (1, 14)))
    session(part(0, (1, 15), round=15))
    discarded, *_ = again(session, (1, 10), (1, 9), epoch=2)
    assert isinstance(discarded, ev.Discard)
    assert discarded.staged.version == (1, 15)


def test_a_commit_that_the_crash_has_undone_is_not_waited_for_once_the_model_is_there():
    session = downloading()
    session(ev.Committed(fragment=0, version=(1, 15)))
    again(session, (1, 10), (1, 9), epoch=2)
    session(ev.Opened(step=10, steps=100, fragments=(0, 1)))
    session(part(0, (1, 10)))
    session(part(1, (1, 9)))
    assert downloads(session(ev.TrainerUpdate(state=APPLIED))) == []
    assert tuple(session.link_state.open) == (0, 1)


def test_a_fragment_whose_result_failed_during_the_download_of_the_model_may_be_offered_after_it():
    session = downloading()
    session(ev.Committed(fragment=0, version=(1, 15)))
    failed = ev.Download(fragment=0, round=15, tries=3)
    [missed] = downloads(session(ev.Downloaded(request=failed, error="Damaged: x")))
    session(ev.Opened(step=10, steps=100, fragments=(0, 1)))
    session(ev.Downloaded(request=missed, aborted=True))
    again(session, (1, 15), (1, 13), epoch=1)
    session(part(0, (1, 15)))
    session(part(1, (1, 13)))
    assert downloads(session(ev.TrainerUpdate(state=APPLIED))) == []
    assert tuple(session.link_state.open) == (0, 1)


# ------------------------------------------------------------ fragments that cannot be decoded


def undecoded(session: Session, request: ev.Download, version: Version) -> ev.Download:
    staged = Staged(fragment=request.fragment, version=version, ticket=7)
    place, *_ = session.core.handle(ev.Downloaded(request=request, staged=staged), 1.0)
    assert isinstance(place, ev.Place)
    [wanted] = downloads(
        session.core.handle(ev.Placed(fragment=request.fragment, error="NotFinite"), 1.0)
    )
    return wanted


def test_a_fragment_that_can_never_be_decoded_is_downloaded_ever_more_rarely():
    session = joined((1, 10), (1, 10))
    [request] = downloads(session(ev.Committed(fragment=0, version=(1, 11))))
    delays = []
    for _ in range(7):
        request = undecoded(session, request, (1, 11))
        delays.append(request.delay_seconds)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    session(part(0, (1, 11), exact=False))
    session(ev.TrainerUpdate(state=replace(APPLIED, applied=(2, 1))))
    [request] = downloads(session(ev.Committed(fragment=0, version=(1, 12))))
    assert undecoded(session, request, (1, 12)).delay_seconds == 0.5, "the one before was decoded"


def test_a_part_of_the_model_that_can_never_be_decoded_is_downloaded_ever_more_rarely():
    session = downloading()
    request, delays = ev.Download(fragment=0), []
    for _ in range(7):
        request = undecoded(session, request, (1, 14))
        delays.append(request.delay_seconds)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_part_of_the_model_that_was_decoded_at_last_counts_no_failures():
    session = downloading()
    request = undecoded(session, ev.Download(fragment=0), (1, 14))
    request = undecoded(session, request, (1, 14))
    session(part(0, (1, 14)))
    session(part(1, (1, 13)))
    session(ev.TrainerUpdate(state=APPLIED))
    [request] = downloads(session(ev.Committed(fragment=0, version=(1, 15))))
    assert undecoded(session, request, (1, 15)).delay_seconds == 0.5
