"""What a process that executes its tape sees of the link."""

import pytest

from diloco.journal.replay import plan_of
from diloco_testing.local.tapes import initialised, member, merge, process, start, tapes
from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.core.replay import Replay

EVENTS = [
    start(),
    initialised(),
    merge(1, member("eu/0", 2)),
    merge(2, member("eu/0", 3)),
    merge(3, member("eu/0", 5, base=1)),
]
STEPS = {3: [(1, 1)], 4: [(0, 2)]}


def replay(*, ended=True):
    found = tapes(eu_0=process("eu/0", 6, results=STEPS, ended=ended))
    return Replay(plan_of(EVENTS, found, feedback=False).lives["eu/0", 0])


def link(step=0, *, epoch=1, ready=(), versions=((1, 0), (1, 0)), **more):
    return LinkState(
        phase=Phase.TRAINING, epoch=epoch, step=step, ready=ready, versions=versions, open=[0, 1], **more
    )  # fmt: skip


def test_a_step_copies_and_applies_what_the_tape_has_and_nothing_else():
    made = replay()
    made.observe(link(5, ready=[(1, 2)], versions=((1, 0), (1, 1))))
    first, second, third = (made.boundary(n) for n in (1, 2, 3))
    assert (first.open, first.ready, first.step) == ([], [], 1)
    assert (second.open, second.ready, second.step) == ([1], [], 2)
    assert (third.open, third.ready, third.step) == ([0], [(1, 2)], 3)


@pytest.mark.parametrize(
    ("ready", "versions"),
    [
        ((), ((1, 0), (1, 0))),  # it has not arrived
        ([(0, 2)], ((1, 2), (1, 0))),  # another fragment has
        ([(1, 2)], ((1, 0), (1, 3))),  # another version has
        ([(1, 2)], ((1, 0), None)),
    ],
)
def test_a_step_waits_for_the_version_that_it_applied(ready, versions):
    made = replay()
    made.observe(link(5, ready=ready, versions=versions))
    assert made.boundary(3) is None
    made.observe(link(5, ready=[(1, 2)], versions=((1, 0), (1, 1))))
    assert made.boundary(3) is not None


def test_a_fragment_is_copied_again_only_when_its_earlier_copy_is_merged():
    made = replay()
    made.observe(link(0))
    assert made.boundary(5) is None
    made.observe(link(1))
    assert made.boundary(5).open == [1]


def test_a_step_states_what_it_waits_for():
    made = replay()
    made.observe(link(0))
    assert made.waits(5) == "local step 5 waits for the merge of step 1 of epoch 1"
    assert made.waits(3) == "local step 3 waits for fragment 1 of step 1"


def test_the_program_sees_the_global_steps_of_the_tape():
    made = replay()
    made.observe(link(40, complete=True))
    shown = [made.between(n) for n in range(6)]
    assert [state.step for state in shown] == [0, 1, 2, 3, 4, 5]
    assert not any(state.complete for state in shown)
    assert (made.between(6).complete, made.between(6).step) == (True, 6)
    assert made.joining().step == 0


def test_a_loop_that_steps_beyond_the_tape_is_shown_the_end_and_nothing_to_do():
    made = replay()
    made.observe(link(3, ready=[(0, 9)]))
    state = made.boundary(7)
    assert (state.complete, state.open, state.ready) == (True, (), ())


def test_a_process_that_was_killed_is_never_shown_that_the_job_is_complete():
    made = replay(ended=False)
    made.observe(link(40, complete=True))
    assert made.life.killed
    assert not made.between(6).complete


def restarted():
    """The syncer was started again from step 1; the process applies the result of step 2 of both epochs."""
    steps = {3: [(1, 1)], 5: [(0, 2)], 8: [(0, 2, 2)]}
    events = [*EVENTS[:4], start(step=1, epoch=2), merge(2, member("eu/0", 7, base=None))]
    found = tapes(eu_0=process("eu/0", 9, results=steps))
    return Replay(plan_of(events, found, feedback=False).lives["eu/0", 0])


def test_a_version_of_another_epoch_is_not_the_one_that_was_applied():
    made = restarted()
    made.observe(link(1, epoch=2, ready=[(0, 3)], versions=((1, 2), (1, 1))))
    assert made.boundary(5).ready == [(0, 3)]
    assert made.boundary(8) is None
    made.observe(link(2, epoch=2, ready=[(0, 4)], versions=((2, 2), (1, 1))))
    assert made.boundary(8).ready == [(0, 4)]


def test_what_an_epoch_merged_stays_merged_when_the_next_begins_before_that_step():
    made = restarted()
    made.observe(link(1))
    assert made.boundary(7) is None  # its copy of local step 3 is not merged
    assert made.waits(7) == "local step 7 waits for the merge of step 2 of epoch 1"
    made.observe(link(1, epoch=2))
    assert made.boundary(7).open == [0]
    assert not made.merged
    made.observe(link(2))
    assert not made.merged
    made.observe(link(2, epoch=2))
    assert made.merged


def test_it_ends_when_its_last_copy_is_merged():
    made = replay()
    made.observe(link(2))
    assert not made.merged
    made.observe(link(3))
    assert made.merged


def test_while_it_joins_the_model_that_has_arrived_is_shown():
    made = replay()
    made.observe(LinkState(phase=Phase.APPLY_MODEL, step=9, ready=[(0, 1), (1, 1)]))
    assert made.joining().ready == [(0, 1), (1, 1)]


def test_a_process_that_began_otherwise_states_how():
    made = replay()
    assert made.began_otherwise("model", "new", link()) == ""
    text = made.began_otherwise("model", "us/0", link(peer="us/0", peer_local_step=7))
    assert "state is that of local step 7 of us/0; on the tape model and new" in text
    text = made.began_otherwise("checkpoint", "checkpoint", link())
    assert "parameters are those of the checkpoint" in text
