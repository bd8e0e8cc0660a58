"""Decisions of the training side: joining, steps of Algorithm 1, checkpoints due, leaving."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.core.ledger import HostCopy, Ledger
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.core.recovery import LocalCheckpoint
from diloco_worker.core.trainer import (
    ApplyFragment,
    ApplyModel,
    AwaitCheckpoint,
    AwaitLink,
    CopyFragment,
    CopyModel,
    Exit,
    Leave,
    LoadCheckpoint,
    SaveCheckpoint,
    Send,
    ShowProgress,
    TrainerCore,
)

FOUND = LocalCheckpoint(local_step=7, global_step=40)
FACTS = {"local_step": 7, "total_tokens": 70, "steps": [7, 3], "tokens": [70, 30]}
TRAINING = LinkState(phase=Phase.TRAINING, connected=True, epoch=1, incarnation=2, step=5, steps=99)
MODEL = LinkState(
    phase=Phase.APPLY_MODEL, connected=True, epoch=1, incarnation=2, ready=[(0, 1), (1, 1)]
)


def make(**changes) -> TrainerCore:
    fields = {
        "name": "eu/0", "fragments": 2, "found": None, "checkpoint_every": 10, "connect_timeout_seconds": 60.0,
        **changes,
    }  # fmt: skip
    return TrainerCore(**fields)


def join(core: TrainerCore, link_state: LinkState | None, *, now=0.0, terminated=False):
    return core.join(link_state, now=now, terminated=terminated)


def joined(*, model: LinkState = MODEL, **changes) -> TrainerCore:
    """A core whose model was downloaded."""
    core = make(**changes)
    join(core, model)
    assert core.joined
    return core


def step(core: TrainerCore, link_state: LinkState | None = None, *, tokens=10, busy=(), now=0.0):
    """A whole step; the link holds the locks of the fragments in `busy`."""
    actions = core.step(tokens, link_state, now=now)
    taken = [a.fragment for a in actions if isinstance(a, CopyFragment) and a.fragment not in busy]
    return [*actions, *core.copied(taken, loss=1.5)]


def sent(actions) -> TrainerState:
    """The only state among the actions."""
    (state,) = [a.state for a in actions if isinstance(a, Send)]
    return state


def link(**changes) -> LinkState:
    return dataclasses.replace(TRAINING, **changes)


# ---------------------------------------------------------------- joining


def test_the_first_state_shows_what_there_is():
    state = make(found=FOUND).state()
    assert state == TrainerState(
        checkpoint_local_step=7, checkpoint_step=40, steps=[0, 0], tokens=[0, 0], applied=[0, 0],
        versions=[None, None], saves=True,
    )  # fmt: skip
    assert make().state().checkpoint_step == 0


@pytest.mark.parametrize("phase", [Phase.CONNECTING, Phase.WAITING, Phase.DOWNLOADING])
def test_until_the_model_is_there_it_waits_for_the_link(phase):
    core = make()
    assert join(core, LinkState(phase=phase, connected=True)) == [AwaitLink()]
    assert join(core, None) == [AwaitLink()]
    assert not core.joined


def test_a_downloaded_model_is_applied_whole_and_confirmed():
    core = make()
    model = dataclasses.replace(MODEL, ready=[(1, 4), (0, 2)], local_step=30, total_tokens=300)
    apply, shown, confirm = join(core, model)
    assert isinstance(shown, ShowProgress)
    assert apply == ApplyModel([1, 0])
    state = confirm.state
    assert (state.model_loaded, state.stepped, state.applied) == (True, False, [2, 4])
    assert (state.local_step, state.total_tokens) == (30, 300)
    assert (state.start_local_step, state.start_total_tokens) == (30, 300)
    assert (state.epoch, state.incarnation) == (1, 2)
    assert core.joined


def test_the_initial_model_is_copied_once_per_request():
    core = make()
    asked = LinkState(phase=Phase.WAITING, connected=True, initial_requested=1)
    empty = HostCopy(local_step=0, steps=0, tokens=0, base=0)
    copy, confirm, wait = join(core, asked)
    assert (copy, wait) == (CopyModel([empty, empty], wait=True), AwaitLink())
    assert (confirm.state.initial_copied, confirm.state.model_loaded) == (1, False)
    assert join(core, asked) == [AwaitLink()]
    again = join(core, dataclasses.replace(asked, initial_requested=2))
    assert sent(again).initial_copied == 2


def test_a_local_checkpoint_is_loaded_with_its_counters():
    core = make(found=FOUND)
    asked = LinkState(
        phase=Phase.LOAD_CHECKPOINT, connected=True, local_step=9, total_tokens=60, epoch=3
    )
    assert join(core, asked) == [LoadCheckpoint()]
    assert not core.joined
    state = sent(core.checkpoint_loaded(FACTS, now=1.0))
    assert core.joined
    assert (state.model_loaded, state.steps, state.tokens) == (True, [7, 3], [70, 30])
    # The syncer saw two steps more; the checkpoint's tokens are ahead of what was reported.
    assert (state.local_step, state.total_tokens) == (9, 70)
    assert (state.start_local_step, state.start_total_tokens) == (9, 70)
    assert state.applied == [0, 0], "the checkpoint's parameters are no version of the syncer's"


def test_a_checkpoint_holds_the_versions_that_its_fragments_were_received_in():
    core = joined(model=dataclasses.replace(MODEL, versions=[(1, 3), (1, 4)]), checkpoint_every=1)
    received = link(ready=[(1, 2)], versions=[(1, 3), (1, 9)], starts=["a", "b"])
    (save,) = saves(step(core, received))
    found = LocalCheckpoint(local_step=save.local_step, global_step=save.global_step, start="b")
    again = make(found=found)
    join(again, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    assert (again.state().versions, again.state().checkpoint_start) == ([None, None], "b")
    facts = json.loads(json.dumps(dict(save.facts)))
    assert sent(again.checkpoint_loaded(facts, now=0.0)).versions == [(1, 3), (1, 9)]


def test_a_checkpoint_states_no_versions_of_which_the_start_is_not_known():
    """Some may be of a lost history, whose versions have the numbers of others."""
    core = joined(model=dataclasses.replace(MODEL, versions=[(1, 3), (1, 4)]), checkpoint_every=1)
    (save,) = saves(step(core, link(starts=[])))
    again = make(found=FOUND)
    join(again, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    assert sent(again.checkpoint_loaded(save.facts, now=0.0)).versions == [None, None]
    assert "start" not in save.facts


def test_the_fragments_of_a_checkpoint_without_versions_are_older_than_any():
    core = make(found=FOUND)
    join(core, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    assert sent(core.checkpoint_loaded(FACTS, now=0.0)).versions == [None, None]


def test_what_was_missed_since_the_checkpoint_is_applied_and_its_counters_start_anew():
    core = make(found=FOUND)
    join(core, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    core.checkpoint_loaded({**FACTS, "versions": [[1, 3], [1, 9]]}, now=0.0)
    # The link leaves fragment 0 out of `open` until its newest version is in the inbox.
    assert sent(step(core, link(open=[1]))).offers == [1]
    state = sent(step(core, link(open=[0, 1], ready=[(0, 1)], versions=[(2, 40), None])))
    assert (state.offers, state.applied) == ([1], [1, 0])
    assert (state.steps, state.tokens) == ([0, 5], [0, 50])
    assert state.versions == [(2, 40), (1, 9)]
    copy = step(core)[0]
    assert copy == CopyFragment(0, HostCopy(local_step=10, steps=1, tokens=10, base=1))


def test_an_unusable_checkpoint_is_reported_and_the_model_downloaded_instead():
    core = make(found=FOUND)
    asked = LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True)
    join(core, asked)
    state = sent(core.checkpoint_unusable("it is damaged"))
    assert (state.checkpoint_step, state.checkpoint_local_step, state.model_loaded) == (0, 0, False)
    assert join(core, None) == [AwaitLink()], "the link has not read it yet"
    assert join(core, MODEL)[0] == ApplyModel([0, 1])


def test_counters_that_are_incomplete_change_nothing():
    core = make(found=FOUND)
    join(core, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    with pytest.raises(KeyError):
        core.checkpoint_loaded({"local_step": 7}, now=0.0)
    assert (core.joined, core.ledger.local_step) == (False, 0)


def test_a_link_that_asks_for_a_checkpoint_that_is_not_there_is_waited_for():
    asked = LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True)
    assert join(make(), asked) == [AwaitLink()]


def test_a_person_who_waits_sees_every_five_seconds_for_what():
    core = make()
    state = LinkState(phase=Phase.WAITING, connected=True, text="waiting for another")
    assert join(core, state, now=100.0) == [AwaitLink()]
    assert join(core, None, now=104.9) == [AwaitLink()]
    shown = ShowProgress("eu/0: waiting for another (5 s)")
    assert join(core, None, now=105.0) == [shown, AwaitLink()]
    assert join(core, None, now=109.9) == [AwaitLink()]
    assert len(join(core, None, now=110.0)) == 2
    silent = make()
    join(silent, None)
    shown = ShowProgress("eu/0: starting the link process (5 s)")
    assert join(silent, None, now=5.0) == [shown, AwaitLink()]


def test_a_syncer_that_does_not_answer_in_time_ends_the_process():
    core = make()
    join(core, LinkState(text="refused"), now=100.0)
    assert AwaitLink() in join(core, None, now=160.0)
    leave, end = join(core, None, now=160.1)
    assert leave.state.leaving == "interrupted"
    assert end == Exit(75, "eu/0: no syncer within 60 s: refused; trying again may help")
    assert core.closed


def test_the_time_to_answer_begins_anew_when_a_connection_is_lost():
    core = make()
    join(core, LinkState(phase=Phase.WAITING, connected=True), now=100.0)
    join(core, None, now=150.0)
    join(core, LinkState(), now=205.0)
    assert not core.closed
    join(core, None, now=210.1)
    assert core.closed


@pytest.mark.parametrize(
    ("link_state", "terminated", "reason"),
    [(None, True, "SIGTERM"), (link(complete=True), False, "Complete")],
)
def test_joining_ends_without_a_checkpoint(link_state, terminated, reason):
    core = make(found=FOUND)
    (leave,) = join(core, link_state, terminated=terminated)
    assert isinstance(leave, Leave)
    assert leave.state.leaving == reason
    assert core.closed
    assert not core.joined


def test_a_refusal_while_joining_leaves_and_exits():
    core = make()
    leave, end = join(core, LinkState(refused_exit=78, text="no such job"), terminated=True)
    assert leave.state.leaving == "Refused"
    assert end == Exit(78, "eu/0: no such job")


# ---------------------------------------------------------------- steps


def test_a_step_counts_and_notifies_the_link():
    core = joined()
    actions = step(core, link(), tokens=7)
    state = sent(actions)
    assert (state.local_step, state.total_tokens, state.stepped) == (1, 7, True)
    assert (state.steps, state.tokens, state.offers, state.loss) == ([1, 1], [7, 7], [], 1.5)
    assert (state.global_step, state.epoch, state.incarnation) == (5, 1, 2)
    assert len(actions) == 1


def test_invalid_tokens_are_refused_and_not_counted():
    core = joined()
    with pytest.raises(ValueError, match="tokens"):
        core.step(-1, link(step=6), now=0.0)
    assert (core.ledger.local_step, core.link_state.step) == (0, 6)


def test_open_fragments_are_copied_with_their_counters_and_offered_in_their_order():
    core = joined(model=dataclasses.replace(MODEL, ready=[(0, 3), (1, 4)]))
    first, second, send = step(core, link(open=[1, 0]))
    assert first == CopyFragment(1, HostCopy(local_step=1, steps=1, tokens=10, base=4))
    assert second == CopyFragment(0, HostCopy(local_step=1, steps=1, tokens=10, base=3))
    assert send.state.offers == [1, 0]


def test_a_copy_that_is_being_sent_is_not_offered_until_a_later_step():
    core = joined()
    assert sent(step(core, link(open=[0, 1]), busy=[0])).offers == [1]
    assert sent(step(core, busy=[0, 1])).offers == []
    assert sent(step(core)).offers == [0, 1]


def test_a_fragment_that_was_just_replaced_has_nothing_to_offer():
    core = joined()
    copy, apply, send = step(core, link(open=[0, 1], ready=[(1, 2)]))
    assert copy == CopyFragment(0, HostCopy(local_step=1, steps=1, tokens=10, base=1))
    assert apply == ApplyFragment(1)
    state = send.state
    assert (state.offers, state.applied, state.steps, state.tokens) == (
        [0],
        [1, 2],
        [1, 0],
        [10, 0],
    )


def test_a_result_is_applied_once_although_the_link_repeats_its_state():
    core = joined()
    ready = link(open=[0, 1], ready=[(1, 2)])
    step(core, ready)
    for again in (ready, None):
        actions = step(core, again)
        assert not [a for a in actions if isinstance(a, ApplyFragment)]
        assert sent(actions).offers == [0, 1]
    copy = step(core)[1]
    assert copy == CopyFragment(1, HostCopy(local_step=4, steps=3, tokens=30, base=2))
    assert ApplyFragment(1) in step(core, link(ready=[(1, 3)]))


def test_copies_come_before_results_so_that_they_hold_what_their_counters_state():
    core = joined(fragments=3, model=dataclasses.replace(MODEL, ready=[(0, 1), (1, 1), (2, 1)]))
    kinds = [type(a) for a in step(core, link(open=[2, 0, 1], ready=[(1, 2), (0, 2)]))]
    assert kinds == [CopyFragment, ApplyFragment, ApplyFragment, Send]


def test_states_that_were_sent_do_not_change_afterwards():
    core = joined()
    before = sent(step(core, link()))
    copy = dataclasses.replace(before)
    step(core, link(ready=[(0, 2), (1, 2)]))
    assert before == copy


def test_a_syncer_that_lost_everything_gets_a_copy_of_the_current_model():
    core = joined()
    step(core)
    copies, send = step(core, link(initial_requested=1))
    own = HostCopy(local_step=2, steps=2, tokens=20, base=1)
    assert copies == CopyModel([own, own])
    assert send.state.initial_copied == 1
    assert len(step(core)) == 1


def test_a_copy_of_the_model_that_the_link_prevented_is_tried_again_in_the_next_step():
    core = joined()
    step(core)
    asked = link(initial_requested=1)
    for number in (2, 3):
        copies, _ = core.step(10, asked, now=float(number)), core.model_not_copied()
        own = HostCopy(local_step=number, steps=number, tokens=10 * number, base=1)
        assert copies == [CopyModel([own, own])]
        assert sent(core.copied([], loss=None)).initial_copied == 0
    assert sent(step(core, asked)).initial_copied == 1


def test_a_link_that_restarts_finds_counters_identity_and_inboxes():
    core = joined()
    step(core, link(ready=[(0, 2)], open=[0, 1], initial_requested=1))
    # The first state of a new link repeats what the trainer reported; it has no session yet.
    fresh = LinkState(epoch=1, incarnation=2, step=5, initial_requested=1, ready=[(0, 2)])
    state = sent(step(core, fresh))
    assert (state.incarnation, state.epoch, state.global_step) == (2, 1, 5)
    assert (state.applied, state.steps, state.offers) == ([2, 1], [1, 2], [])
    assert (state.model_loaded, state.initial_copied) == (True, 1)
    assert not core.closed


def test_the_line_of_a_step_has_its_times():
    core = joined()
    core.ended(now=10.0)
    core.step(3, link(), now=12.0)
    core.copied([], loss=0.5)
    line = core.line(now=12.25, queued_seconds=0.125)
    assert line.pop("syncSeconds") >= 0.25
    assert line == {
        "incarnation": 2, "localStep": 1, "globalStep": 5, "tokens": 3, "loss": 0.5, "seconds": 2.0,
        "queuedSeconds": 0.125,
    }  # fmt: skip
    core.ended(now=12.5)
    core.step(3, None, now=13.0)
    state = sent(core.copied([], loss=0.5))
    assert state.step_seconds == 0.5
    line = core.line(now=13.5, queued_seconds=0.0)
    assert line["seconds"] == 0.5
    assert line["syncSeconds"] == 0.75, "with the time to write the line before"
    core.ended(now=13.5)
    first = state.total_sync_seconds
    state = sent(step(core, now=14.0))
    assert state.sync_seconds == 0.75
    assert state.total_sync_seconds == first + 0.75


def test_the_first_line_does_not_count_the_time_before_the_loop():
    core = make()
    join(core, MODEL, now=1000.0)
    core.step(1, None, now=1003.0)
    core.copied([], loss=None)
    line = core.line(now=1003.5, queued_seconds=0.0)
    assert (line["seconds"], line["syncSeconds"], line["loss"]) == (3.0, 0.5, None)


# ---------------------------------------------------------------- checkpoints


def saves(actions) -> list[SaveCheckpoint]:
    return [a for a in actions if isinstance(a, SaveCheckpoint)]


def test_a_checkpoint_is_due_every_n_steps_with_the_counters_of_its_step():
    core = joined(checkpoint_every=3)
    found = []
    for _ in range(7):
        for save in saves(step(core, link(ready=[(1, 2)]))):
            core.checkpoint_started(save.local_step)
            found.append(save)
    assert [save.local_step for save in found] == [3, 6]
    assert found[0].global_step == 5
    assert found[0].facts == {
        "local_step": 3, "total_tokens": 30, "steps": [3, 2], "tokens": [30, 20],
        "versions": [None, None],
    }  # fmt: skip
    assert Ledger.from_json(found[1].facts).steps == [6, 5]


def test_a_checkpoint_that_could_not_start_is_tried_at_the_next_step():
    core = joined(checkpoint_every=2)
    assert [len(saves(step(core))) for _ in range(4)] == [0, 1, 1, 1]
    core.checkpoint_started(4)
    assert [len(saves(step(core))) for _ in range(2)] == [0, 1]


def test_steps_before_this_process_count_for_no_checkpoint():
    core = make(found=FOUND, checkpoint_every=3)
    join(core, LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True))
    core.checkpoint_loaded(FACTS, now=0.0)
    assert [len(saves(step(core))) for _ in range(3)] == [0, 0, 1]


def test_a_checkpoint_that_is_discarded_is_due_again_at_once():
    core = joined(checkpoint_every=3)
    assert [len(saves(step(core))) for _ in range(3)] == [0, 0, 1]
    core.checkpoint_started(3)
    core.checkpoint_lost()
    assert [len(saves(step(core))) for _ in range(2)] == [1, 1]
    core.checkpoints_off()
    core.checkpoint_lost()
    assert not saves(step(core))


def test_a_state_that_cannot_be_saved_turns_checkpoints_off():
    core = joined(checkpoint_every=1)
    assert saves(step(core))
    core.checkpoints_off()
    assert not saves(step(core))
    (leave,) = core.check(None, terminated=True)
    assert leave.state.leaving == "SIGTERM"


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(
    ("link_state", "terminated", "reason"),
    [
        (None, True, "SIGTERM"),
        (link(complete=True), False, "Complete"),
        (link(complete=True), True, "SIGTERM"),
    ],
)
def test_a_trained_model_is_saved_before_leaving(link_state, terminated, reason):
    core = joined()
    step(core)
    assert core.check(link(), terminated=False) == []
    wait, save, leave = core.check(link_state, terminated=terminated)
    assert wait == AwaitCheckpoint()
    assert (save.local_step, save.global_step) == (1, 5)
    assert leave.state.leaving == reason
    assert leave.state.local_step == 1
    assert core.closed


def test_a_model_that_made_no_step_is_not_saved():
    core = joined()
    (leave,) = core.check(None, terminated=True)
    assert isinstance(leave, Leave)


def test_without_a_directory_nothing_is_saved():
    core = joined(checkpoint_every=None)
    for _ in range(20):
        assert not saves(step(core))
    assert [type(a) for a in core.check(None, terminated=True)] == [Leave]


def test_a_refusal_while_training_leaves_without_a_checkpoint():
    refused = link(refused_exit=75, text="eu/0 joined again")
    for ask in (
        lambda core: core.check(refused, terminated=True),
        lambda core: core.step(10, refused, now=0.0),
    ):
        core = joined()
        step(core)
        leave, end = ask(core)
        assert leave.state.leaving == "Refused"
        assert end == Exit(75, "eu/0: eu/0 joined again")
        assert core.closed


def test_after_leaving_nothing_happens():
    core = joined()
    step(core)
    (leave,) = core.close("Closed")
    assert leave.state.leaving == "Closed"
    before = core.state()
    assert core.close("Closed") == []
    assert core.check(link(complete=True, refused_exit=75), terminated=True) == []
    assert core.step(10, link(ready=[(0, 9)]), now=0.0) == []
    assert core.copied([], loss=None) == []
    assert core.state() == before


# ---------------------------------------------------------------- any history


FRAGMENTS = 3
fragment_sets = st.lists(st.integers(0, FRAGMENTS - 1), unique=True, max_size=FRAGMENTS)
history = st.lists(
    st.tuples(
        st.integers(0, 9),  # tokens
        fragment_sets,  # open
        fragment_sets,  # locked by the link
        fragment_sets,  # results that arrive
        st.booleans(),  # the link's state is new
        st.booleans(),  # the initial model is requested
    ),
    max_size=30,
)


@given(history)
def test_any_history_keeps_counters_copies_and_parameters_together(steps):
    """Drives the core with arrays, as the shell does with torch; parameters count the steps."""
    generations = [1] * FRAGMENTS
    model = MODEL, [(p, 1) for p in range(FRAGMENTS)]
    core = joined(
        fragments=FRAGMENTS,
        model=dataclasses.replace(model[0], ready=model[1]),
        checkpoint_every=None,
    )
    parameters = np.zeros(FRAGMENTS, np.int64)
    host = [(0, HostCopy(local_step=0, steps=0, tokens=0, base=0))] * FRAGMENTS
    # The reference: what was trained since a fragment was last received, written out.
    since: list[list[int]] = [[] for _ in range(FRAGMENTS)]
    applied, requested, total, current = [1] * FRAGMENTS, 0, 0, link()
    for number, (tokens, opened, locked, results, new, initial) in enumerate(steps, 1):
        for p in results:
            generations[p] = applied[p] + 1
        requested += initial
        latest = link(
            open=opened, initial_requested=requested,
            ready=[(p, g) for p, g in enumerate(generations) if g > applied[p]],
        )  # fmt: skip
        current = latest if new else current
        parameters += 1
        total += tokens
        for trained in since:
            trained.append(tokens)
        replaced = [p for p, g in current.ready if g > applied[p]]
        before = [[*trained] for trained in since]
        taken = []
        for action in core.step(tokens, latest if new else None, now=float(number)):
            match action:
                case CopyModel(copies):
                    for p, copy in enumerate(copies):
                        host[p] = (int(parameters[p]), copy)
                case CopyFragment(p, copy) if p not in locked:
                    host[p] = (int(parameters[p]), copy)
                    taken.append(p)
                case ApplyFragment(p):
                    parameters[p], since[p], applied[p] = 0, [], generations[p]
        state = sent(core.copied(taken, loss=None))
        assert state.offers == [p for p in current.open if p not in replaced and p not in locked]
        assert (state.local_step, state.total_tokens) == (number, total)
        assert (state.steps, state.tokens) == ([len(s) for s in since], [sum(s) for s in since])
        assert state.applied == applied
        assert state.initial_copied == current.initial_requested
        for p in state.offers:
            values, copy = host[p]
            assert (copy.local_step, values) == (number, copy.steps)
            assert (copy.steps, copy.tokens) == (len(before[p]), sum(before[p]))
            assert copy.base == applied[p]
