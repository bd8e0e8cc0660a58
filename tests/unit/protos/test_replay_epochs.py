"""The plan of a replay of a run whose syncer was started again."""

import pytest

from diloco.errors import ConfigError
from diloco.journal.records import decode
from diloco.journal.replay import Copy, Result, plan_of
from diloco.journal.replay_difference import first_difference
from diloco.journal.replay_epochs import NEVER
from diloco_testing.local.tapes import initialised, member, merge, process, start, tapes

# Killed after step 4, with a snapshot of step 2. eu/0 has applied the results of steps 3 and 4; us/0 only that of
# step 3, and after the restart: it was in its inbox.
EU = process(
    "eu/0",
    14,
    results={3: [(1, 1)], 5: [(0, 2)], 7: [(1, 3)], 8: [(0, 4)], 11: [(1, 3, 2)], 13: [(0, 4, 2)]},
)
US = process("us/0", 9, results={2: [(1, 1)], 4: [(0, 2)], 6: [(1, 3)], 8: [(1, 3, 2)]})
FIRST = [
    start(),
    initialised(),
    merge(1, member("eu/0", 2)),
    merge(2, member("eu/0", 4), member("us/0", 3)),
    merge(3, member("eu/0", 6, base=1)),
    merge(4, member("eu/0", 7, base=2)),
]
SECOND = [
    start(step=2, epoch=2),
    merge(3, member("eu/0", 10, base=None), member("us/0", 5, base=1)),
    merge(4, member("eu/0", 12, base=None)),
]  # fmt: skip
EVENTS = [*FIRST, *SECOND]


def plan(events=None, found=None, *, feedback=False, to=None):
    found = tapes(eu_0=EU, us_0=US) if found is None else found
    return plan_of(EVENTS if events is None else events, found, feedback=feedback, to=to)


def merges(events):
    return [decode(line) for line in events if line["event"] == "merge"]


# ------------------------------------------------------------ plans


def test_an_epoch_begins_with_the_versions_of_its_snapshot():
    made = plan()
    first, second = made.epochs
    assert [(e.number, e.step, [m.step for m in e.rounds]) for e in made.epochs] == [
        (1, 0, [1, 2, 3, 4]),
        (2, 2, [3, 4]),
    ]
    assert (dict(first.versions), first.initial) == ({}, (1, 0))
    assert dict(second.versions) == {1: (1, 1), 0: (1, 2)}
    assert (made.ends, made.to, len(made.rounds)) == ("", 4, 6)


def test_copies_and_results_are_those_of_their_epoch():
    made = plan()
    eu, us = made.lives["eu/0", 0], made.lives["us/0", 0]
    assert eu.copies[7] == [Copy(fragment=0, round=(1, 4), after=(1, 2), base=(1, 2))]
    assert eu.copies[10] == [Copy(fragment=1, round=(2, 3), after=(1, 3), base=None)]
    assert us.copies[5] == [Copy(fragment=1, round=(2, 3), after=NEVER, base=(1, 1))]
    assert [r.version for r in us.results] == [(1, 1), (1, 2), (1, 3), (2, 3)]
    # The result of step 3 of epoch 1, after a copy that epoch 2 merged.
    assert us.results[2] == Result(fragment=1, version=(1, 3), local_step=6, after=(2, 3))
    assert (eu.final, us.final, eu.last, us.last) == ((2, 4), (2, 3), 14, 9)


def test_a_third_epoch_may_begin_with_versions_of_both_before_it():
    eu = process("eu/0", 16, results={3: [(1, 1)], 8: [(0, 4)], 11: [(1, 3, 2)], 15: [(0, 4, 3)]})
    third = [
        start(step=3, epoch=3),
        merge(4, member("eu/0", 14, base=2)),
        merge(5, member("eu/0", 16, base=3)),
    ]
    made = plan([*FIRST[:3], merge(2, member("eu/0", 4)), *FIRST[4:], start(step=2, epoch=2),
                 merge(3, member("eu/0", 10, base=None)), merge(4, member("eu/0", 12, base=None)), *third],
                tapes(eu_0=eu))  # fmt: skip
    assert dict(made.epochs[2].versions) == {1: (2, 3), 0: (1, 2)}
    [[whole], [delta], [last]] = (made.lives["eu/0", 0].copies[n] for n in (12, 14, 16))
    assert (whole.base, delta.base, last.base) == (None, (1, 2), (2, 3))
    assert made.epochs[2].base(member_of(made, 2, 1)) == (2, 3)


def member_of(made, epoch, number):
    return made.epochs[epoch].rounds[number].members[0]


def test_an_epoch_without_a_merge_is_left_out():
    made = plan([*FIRST, start(step=2, epoch=2), start(step=2, epoch=3), *SECOND[1:]],
                tapes(eu_0=process("eu/0", 14, results={8: [(0, 4)], 11: [(1, 3, 3)]}), us_0=US[:6]))  # fmt: skip
    assert [epoch.number for epoch in made.epochs] == [1, 3]
    assert [copy.round for copies in made.lives["eu/0", 0].copies.values() for copy in copies][
        -1
    ] == (3, 4)


def test_a_first_epoch_without_a_merge_made_the_initial_version():
    found = tapes(eu_0=process("eu/0", 9, results={3: [(1, 1, 2)]}), us_0=process("us/0", 4))
    made = plan([*FIRST[:2], start(epoch=2), *FIRST[2:]], found)
    assert [(epoch.number, len(epoch.rounds)) for epoch in made.epochs] == [(1, 0), (2, 4)]
    assert made.lives["eu/0", 0].copies[2][0].base == (1, 0)


def test_a_syncer_that_ended_before_the_model_existed_is_no_epoch():
    eu = process("eu/0", 9, epoch=2, held_epoch=2, results={3: [(1, 1, 2)]})
    made = plan(
        [start(), start(epoch=2), *FIRST[1:4]],
        tapes(eu_0=eu, us_0=process("us/0", 4, held_epoch=2)),
    )
    assert [(epoch.number, epoch.initial) for epoch in made.epochs] == [(2, (2, 0))]


def test_a_process_may_begin_with_what_the_restart_has_undone():
    """Its local checkpoint holds results of steps 3 and 4, which the syncer of epoch 2 does not have."""
    again = process(
        "eu/0", 14, incarnation=3, restarts=1, after=8, found=8, held=4, source="checkpoint", optimizers="checkpoint",
        epoch=2, results={11: [(1, 3, 2)]},
    )  # fmt: skip
    killed = process("eu/0", 9, results={8: [(0, 4)]}, ended=False)
    events = [
        *FIRST,
        start(step=2, epoch=2),
        merge(3, member("eu/0", 10, incarnation=3, base=None)),
    ]
    made = plan(events, tapes(eu_0=[*killed, *again], us_0=US[:4]))
    assert [*made.lives["eu/0", 1].held()] == [(0, (1, 4)), (1, (1, 3))]
    assert made.lives["eu/0", 0].saves == {8}


def test_a_suspended_run_that_was_resumed_loses_nothing():
    events = [*FIRST, start(step=4, epoch=2), merge(5, member("eu/0", 9, incarnation=3, base=3))]
    again = process(
        "eu/0", 12, incarnation=3, restarts=1, after=8, found=8, held=4, source="checkpoint", optimizers="checkpoint",
        epoch=2,
    )  # fmt: skip
    made = plan(
        events, tapes(eu_0=[*process("eu/0", 8, results={8: [(0, 4)]}), *again], us_0=US[:4])
    )
    assert made.ends == ""
    assert dict(made.epochs[1].versions) == {1: (1, 3), 0: (1, 4)}
    assert made.lives["eu/0", 1].copies[9][0].base == (1, 3)


def test_a_replay_up_to_a_step_ends_when_it_is_passed_the_first_time():
    made = plan(to=3)
    assert ([len(e.rounds) for e in made.epochs], made.ends) == ([3], "--to 3")
    assert (made.lives["eu/0", 0].last, made.lives["us/0", 0].last) == (7, 7)


def test_error_feedback_does_not_survive_a_restart_so_an_upload_that_was_lost_before_it_does_not_count():
    joined = {"event": "join", "epoch": 1, "learner": "us/0", "incarnation": 1}
    aborted = {**merge(1, member("eu/0", 2)), "abandoned": "us/0"}
    events = [*FIRST[:2], joined, aborted, *FIRST[3:], *SECOND]
    assert plan(events, feedback=True).ends == ""
    later = {**merge(4, member("eu/0", 12, base=None)), "abandoned": "us/0"}
    ends = plan([*events[:-1], later, merge(6, member("us/0", 8))], feedback=True).ends
    assert ends.startswith("the replay ends before step 6 of epoch 2: the error feedback of us/0")


# ------------------------------------------------------------ what cannot be replayed


@pytest.mark.parametrize(
    ("events", "sentence", "steps"),
    [
        ([*FIRST, start(epoch=2), initialised("us/0", epoch=2), *SECOND[1:]],
         "after step 4 without a snapshot: with which parameters us/0 began the run again is not on the tape", 4),
        ([*FIRST, start(step=2, epoch=2, steps=9), *SECOND[1:]], "after step 4 with 9 steps in place of 6", 4),
        ([*FIRST, start(step=2, epoch=1), *SECOND[1:]], "as epoch 1, after epoch 1: its directory was restored", 4),
        ([*FIRST, start(step=2, epoch=2)], "epoch 2 of the syncer, which began again at step 2, merged nothing", 4),
        ([*EVENTS, merge(5, member("us/0", 12))], "before step 5 of epoch 2: us/0 has no tape of local step 12", 4),
    ],
)  # fmt: skip
def test_a_replay_ends_before_what_cannot_be_replayed_and_states_why(events, sentence, steps):
    made = plan(events)
    assert sentence in made.ends
    assert made.to == steps
    assert not made.complete


def test_a_result_of_a_merge_whose_line_the_kill_took_ends_the_replay_before_it_counts():
    # The line of step 4 was not written: eu/0 has applied its result, and us/0 has not.
    alone = merge(3, member("us/0", 5, base=1))
    made = plan([*FIRST[:5], SECOND[0], alone, *SECOND[2:]])
    assert made.ends == (
        "the replay ends before step 4 of epoch 2: eu/0 applied fragment 0 of step 4 of epoch 1, of which "
        "events.jsonl has no merge, after local step 8"
    )
    assert (made.lives["eu/0", 0].last, made.lives["eu/0", 0].stopped) == (7, True)


def test_a_process_after_one_that_cannot_be_replayed_is_not_replayed_either():
    again = process("eu/0", 14, incarnation=3, restarts=1, after=9, held=2, epoch=2)
    found = tapes(eu_0=[*process("eu/0", 9, results={8: [(0, 4)]}, ended=False), *again], us_0=US)
    alone = merge(3, member("us/0", 5, base=1))
    events = [*FIRST[:5], SECOND[0], alone, merge(4, member("eu/0", 10, incarnation=3, base=2))]
    made = plan(events, found)
    assert "before step 4 of epoch 2: eu/0 applied fragment 0 of step 4 of epoch 1" in made.ends
    assert made.to == 3


def test_a_version_of_a_snapshot_that_a_person_chose_ends_the_replay():
    # Its fragments have the new epoch, so that learners replace what they have.
    eu = process("eu/0", 14, results={8: [(0, 4)], 9: [(0, 2, 2), (1, 1, 2)]})
    ends = plan(found=tapes(eu_0=eu, us_0=US)).ends
    assert (
        "before step 3 of epoch 2: eu/0 applied fragment 0 of step 2 of epoch 2, of which" in ends
    )


def test_a_version_that_replaces_a_newer_one_ends_the_replay():
    eu = process("eu/0", 14, results={8: [(0, 4)], 9: [(0, 2)]})
    ends = plan(found=tapes(eu_0=eu, us_0=US)).ends
    assert (
        "eu/0 applied fragment 0 of step 2 of epoch 1 in place of a newer version, after local step 9"
        in ends
    )


def test_a_process_that_did_not_know_what_it_held_ends_the_replay():
    unknown = process("us/0", 9, held=-1, held_epoch=None)
    unknown[0]["held"][1]["step"] = -1
    made = plan(found=tapes(eu_0=EU, us_0=unknown))
    assert (
        "before step 2: us/0 began with a version of fragment 1 that it did not know" in made.ends
    )


def test_a_tape_without_epochs_is_replayed_up_to_the_restart():
    old = [(1, 1, None)], [(0, 2, None)]
    eu = process("eu/0", 8, held_epoch=None, results={3: old[0], 5: old[1]})
    made = plan(found=tapes(eu_0=eu, us_0=US))
    assert made.ends == (
        "the syncer was started again after step 4, and a release wrote the tape of eu/0 that did not state epochs"
    )
    assert [r.version for r in made.lives["eu/0", 0].results] == [(1, 1), (1, 2)]


def test_a_run_that_lost_its_model_before_a_merge_is_refused():
    with pytest.raises(ConfigError, match="started again after step 0 without a snapshot"):
        plan([*FIRST[:2], start(epoch=2), initialised(epoch=2), *FIRST[2:]])


# ------------------------------------------------------------ differences


def test_a_difference_names_its_epoch_if_there_are_several():
    other = merges([*EVENTS[:-1], merge(4, member("eu/0", 12, base=None, digests="aaaaaaab"))])
    assert first_difference(plan(), merges(EVENTS), {}) is None
    assert str(first_difference(plan(), other, {})) == (
        "step 4 of epoch 2, eu/0, fragment 0, a.weight: the parameters of local step 12 differ from the tape"
    )
