"""The plan of a replay, and the first difference from its tape."""

import pytest

from diloco.errors import ConfigError
from diloco.journal.records import decode
from diloco.journal.replay import Copy, Peer, Result, plan_of
from diloco.journal.replay_difference import first_difference
from diloco.journal.replay_epochs import NEVER
from diloco_testing.local.tapes import initialised, member, merge, process, start, tapes

EU = process("eu/0", 8, results={3: [(1, 1)], 5: [(0, 2)]})
US = process("us/0", 4, results={2: [(1, 1)], 4: [(0, 2)]})
EVENTS = [
    start(),
    initialised(),
    merge(1, member("eu/0", 2), clock={"eu/0": 2, "us/0": 1}),
    merge(2, member("eu/0", 4), member("us/0", 3)),
    merge(3, member("eu/0", 7, base=1), clock={"eu/0": 6, "us/0": 3}),
]


def plan(events=None, found=None, *, feedback=False, to=None):
    found = tapes(eu_0=EU, us_0=US) if found is None else found
    return plan_of(EVENTS if events is None else events, found, feedback=feedback, to=to)


def merges(events):
    return [decode(line) for line in events if line["event"] == "merge"]


def changed(number, change, events=EVENTS):
    """The events with one line changed."""
    return [*events[:number], change(events[number]), *events[number + 1 :]]


# ------------------------------------------------------------ plans


@pytest.mark.slow
def test_the_plan_of_a_long_run_costs_as_much_per_step_as_that_of_a_short_one():
    """If each step or merge were compared with all others, this would take hours: it ends at the time limit then."""
    steps = 60_000
    results = {number: [((number - 1) % 2, number - 1)] for number in range(2, steps + 1)}
    found = tapes(eu_0=process("eu/0", steps, results=results))
    rounds = (merge(number, member("eu/0", number)) for number in range(1, steps + 1))
    made = plan([start(steps=steps), initialised(), *rounds], found)
    life = made.lives["eu/0", 0]
    assert made.complete
    assert (len(made.rounds), len(life.copies), len(life.results)) == (steps, steps, steps - 1)
    assert life.copies[steps][0].after == (1, steps - 2), "of the same fragment"
    assert life.results[-1].after == (1, steps - 1)


def test_a_plan_has_every_round_copy_and_result():
    made = plan()
    assert (made.initialiser, made.to, made.ends, [m.step for m in made.rounds]) == (
        "eu/0",
        3,
        "",
        [1, 2, 3],
    )
    eu = made.lives["eu/0", 0]
    assert eu.copies == {
        2: [Copy(fragment=1, round=(1, 1), after=NEVER, base=(1, 0))],
        4: [Copy(fragment=0, round=(1, 2), after=NEVER, base=(1, 0))],
        7: [Copy(fragment=1, round=(1, 3), after=(1, 1), base=(1, 1))],
    }
    assert eu.results == [
        Result(fragment=1, version=(1, 1), local_step=3, after=(1, 1)),
        Result(fragment=0, version=(1, 2), local_step=5, after=(1, 2)),
    ]
    assert (eu.last, eu.final, eu.killed, eu.stopped, eu.saves) == (8, (1, 3), False, False, {8})
    us = made.lives["us/0", 0]
    # It was no member.
    assert us.results[0] == Result(fragment=1, version=(1, 1), local_step=2, after=NEVER)


def test_a_replay_up_to_a_step_ends_each_process_before_it_needs_a_later_result():
    made = plan(to=1)
    assert ([m.step for m in made.rounds], made.ends) == ([1], "--to 1")
    eu, us = made.lives["eu/0", 0], made.lives["us/0", 0]
    assert (eu.last, eu.stopped, eu.saves) == (4, True, set())
    assert (us.last, us.stopped) == (3, True)


def test_a_process_that_was_killed_ends_where_its_tape_does_and_the_next_finds_its_checkpoint():
    again = process(
        "us/0", 9, incarnation=3, restarts=1, after=4, found=3, held=2, source="checkpoint", optimizers="checkpoint"
    )  # fmt: skip
    found = tapes(
        eu_0=EU, us_0=[*process("us/0", 4, results={2: [(1, 1)], 4: [(0, 2)]}, ended=False), *again]
    )
    events = [*EVENTS, merge(4, member("us/0", 6, incarnation=3, base=2))]
    made = plan(events, found)
    first, second = made.lives["us/0", 0], made.lives["us/0", 1]
    assert (first.last, first.killed, first.saves) == (4, True, {3})
    assert (second.last, second.killed, second.saves, second.final) == (9, False, {9}, (1, 4))


def test_a_clock_that_is_ahead_of_a_tape_is_cut_to_what_the_replay_reaches():
    found = tapes(eu_0=EU, us_0=process("us/0", 4, results={2: [(1, 1)], 4: [(0, 2)]}, ended=False))
    events = changed(4, lambda line: {**line, "clock": {"eu/0": 6, "us/0": 9, "us/1": 5}})
    assert plan(events, found).rounds[2].clock == {"eu/0": 6, "us/0": 4, "us/1": 0}


def test_the_state_of_a_peer_is_saved_by_the_peer_at_the_step_that_was_taken():
    again = process(
        "us/0", 9, incarnation=3, restarts=1, after=4, held=2, optimizers="eu/0", peer_step=5
    )
    found = tapes(
        eu_0=process("eu/0", 8, results={3: [(1, 1)], 5: [(0, 2)], 8: [(0, 4)]}),
        us_0=[*process("us/0", 4, results={2: [(1, 1)], 4: [(0, 2)]}, ended=False), *again],
    )
    made = plan([*EVENTS, merge(4, member("us/0", 6, incarnation=3, base=2))], found)
    assert made.lives["us/0", 1].peer == Peer(learner="eu/0", local_step=5, step=5)
    assert made.lives["eu/0", 0].saves == {5, 8}


# ------------------------------------------------------------ what cannot be replayed


@pytest.mark.parametrize(
    ("events", "sentence", "steps"),
    [
        ([*EVENTS, merge(4, member("ap/0", 5))], "before step 4: ap/0 has no tape of incarnation 1", 3),
        ([*EVENTS, merge(4, member("us/0", 5))],
         "before step 4: us/0 has no tape of local step 5, which was merged; its last is 4", 3),
        ([*EVENTS, {"event": "halt", "epoch": 1, "step": 4, "fragment": 0, "reason": "Θ grew"}],
         "the syncer halted after step 3: Θ grew", 3),
        ([*EVENTS, {"event": "dropped", "lines": 3, "events": {"merge": 3}}], "events.jsonl has lost lines", 3),
        ([*EVENTS, merge(4, {**member("eu/0", 8), "step": "x"})], "events.jsonl is damaged after step 3: merge", 3),
    ],
)  # fmt: skip
def test_a_replay_ends_before_what_cannot_be_replayed_and_states_why(events, sentence, steps):
    made = plan(events)
    assert sentence in made.ends
    assert made.to == steps
    assert not made.complete


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([start(), initialised(), {"event": "data", "epoch": 1, "items": 9}], "events.jsonl is damaged"),
        ([start(), initialised()], "no step was merged"),
        ([start(step=4), *EVENTS[1:]], "does not begin with step 0"),
        (EVENTS[1:], "does not begin with the start of the syncer"),
        ([{"event": "rotate", "part": 3}, *EVENTS], "the oldest parts of events.jsonl were deleted"),
        (changed(2, lambda line: {k: v for k, v in line.items() if k != "clock"}), "a release that wrote no tape"),
    ],
)  # fmt: skip
def test_a_run_of_which_nothing_can_be_replayed_is_refused_with_a_sentence(events, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(events)


def test_a_program_that_takes_blocks_is_refused():
    data = {"event": "data", "epoch": 1, "items": 9, "size": 1, "next": 0, "free": [], "open": []}
    with pytest.raises(ConfigError, match=r"learner\.blocks, whose leases are not replayed yet"):
        plan([start(), data, *EVENTS[1:]])


def test_an_upload_that_was_discarded_ends_a_replay_with_error_feedback_only():
    joined = {"event": "join", "epoch": 1, "learner": "us/0", "incarnation": 1}
    aborted = {**merge(2, member("eu/0", 4)), "abandoned": "us/0"}
    events = [*EVENTS[:2], joined, EVENTS[2], aborted, merge(4, member("us/0", 4))]
    assert plan(events).ends == ""
    ends = plan(events, feedback=True).ends
    assert "before step 4: the error feedback of us/0 has an upload of step 2" in ends


# ------------------------------------------------------------ differences


def test_equal_runs_have_no_difference():
    assert first_difference(plan(), merges(EVENTS), tapes(eu_0=EU, us_0=US)) is None


def test_a_replay_that_has_come_less_far_has_none_yet():
    assert first_difference(plan(), merges(EVENTS)[:1], {}) is None


@pytest.mark.parametrize(
    ("line", "change", "sentence"),
    [
        (3, lambda m: {**m, "members": [m["members"][0], member("us/0", 3, digests="aaaaaaab")]},
         "step 2, us/0, fragment 0, a.weight: the parameters of local step 3 differ from the tape"),
        (2, lambda m: {**m, "digests": "cccccccd"},
         "step 1, syncer, fragment 1, b.weight: the merged values or their momentum differ from the tape"),
        (3, lambda m: {**m, "members": m["members"][:1]}, "step 2, syncer, fragment 0: its members are eu/0"),
        (4, lambda m: {**m, "members": [member("eu/0", 8, base=1)]},
         "step 3, eu/0, fragment 1: step is 8 in its upload, 7 on the tape"),
        (4, lambda m: {**m, "members": [member("eu/0", 7, base=None)]},
         "step 3, eu/0, fragment 1: base is None in its upload, 1 on the tape"),
        (2, lambda m: {**m, "step": 2, "fragment": 0},
         "step 1, syncer, fragment 1: the syncer merged fragment 0 in step 2 instead"),
    ],
)  # fmt: skip
def test_the_first_difference_names_step_worker_fragment_and_tensor(line, change, sentence):
    found = merges(changed(line, change))
    assert str(first_difference(plan(), found, {})) == sentence


def test_of_several_differences_the_earliest_is_named():
    events = changed(4, lambda m: {**m, "digests": "00000000"})
    events = changed(2, lambda m: {**m, "digests": "00000000"}, events)
    assert first_difference(plan(), merges(events), {}).step == 1


def test_parameters_that_a_process_ends_with_are_compared():
    other = tapes(eu_0=EU, us_0=process("us/0", 4, digests="eeeeeeef"))
    found = str(first_difference(plan(), merges(EVENTS), other))
    assert found == (
        "step 3, us/0, fragment 0, a.weight: its last parameters, of local step 4, differ from the tape"
    )
