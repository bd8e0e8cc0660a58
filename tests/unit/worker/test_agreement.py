"""
The ranks of a learner in any order: each does the same at each step, and the link sees complete copies only.

The memory here has one cell per rank, fragment and place; a copy or a result takes one turn per cell, so that
ranks and link interleave in the middle of it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from functools import partial

import pytest

from diloco_testing.learners.control_area import ControlArea
from diloco_testing.properties import seeds
from diloco_worker.core.agreement import (
    HOME,
    PLANS,
    Board,
    FirstRank,
    PassedError,
    Places,
    Plan,
    board_bytes,
)
from diloco_worker.core.fetches import Fetch
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.core.rooms import Devices, Rooms
from diloco_worker.core.trainer import ApplyFragment, CopyFragment, TrainerCore

P = 3
TOKENS = 10
NOTHING = HostCopy(local_step=0, steps=0, tokens=0, base=0)


class Memory(ControlArea):
    def __init__(self, ranks: int, *, spares: int) -> None:
        super().__init__(board_bytes(ranks=ranks, fragments=P))
        self.home = [[None] * ranks for _ in range(P)]
        self.spare = [[None] * ranks for _ in range(spares + 1)]
        self.place, self.header = [HOME] * P, [NOTHING] * P
        self.inbox = [[0] * ranks for _ in range(P)]
        self.locked: set[int] = set()

    def cells(self, fragment: int, place: int) -> list:
        return self.home[fragment] if place == HOME else self.spare[place]


class RankedLearner:
    """R ranks, a link and their memory; `turn` lets one of them do a little."""

    devices: Devices | None = None

    def __init__(self, ranks: int, seed: int, *, lockstep: bool = True, spares: int = 4) -> None:
        self.random, self.ranks, self.lockstep = random.Random(seed), ranks, lockstep
        self.memory = Memory(ranks, spares=spares)
        self.board = Board(self.memory, ranks=ranks, fragments=P)
        self.first = FirstRank(P, spares, devices=self.devices)
        self.cores = [joined_core() for _ in range(ranks)]
        self.values = [[0] * P for _ in range(ranks)]
        self.history: list[list[object]] = [[] for _ in range(ranks)]
        self.entered, self.left = [0] * ranks, [0] * ranks
        """Boundaries that each rank has reached, and left."""
        self.sent: list[TrainerState] = []
        self.link_state = LinkState(phase=Phase.TRAINING, connected=True, open=[0, 1])
        self.generations, self.uploads = [1] * P, 0
        self.board.publish(self.plan_of(1))
        self.processes = [self.rank(r) for r in range(ranks)]
        self.link = self.run_link()

    def turn(self) -> None:
        next(self.random.choice([*self.processes, self.link]))

    def rank(self, rank: int) -> Iterator[None]:
        while True:
            boundary = self.left[rank] + 1
            while self.lockstep and min(self.left) < boundary - 1:
                yield  # the collective of the step waits for the others
            self.entered[rank] = boundary
            yield
            yield from self.follow(rank, boundary)
            self.left[rank] = boundary

    def follow(self, rank: int, boundary: int) -> Iterator[None]:
        if rank == 0:
            while self.board.behind(boundary - 1):
                assert not self.lockstep or boundary == 1, "rank 0 waits for a rank in lockstep"
                yield
            self.settle()
        while (plan := self.board.plan(boundary)) is None:
            assert not self.lockstep, "a rank waits for its plan in lockstep"
            yield
        core, copies = self.cores[rank], {}
        for action in core.step(TOKENS, plan.link_state, now=0.0):
            if isinstance(action, CopyFragment):
                copies[action.fragment] = action.copy
                yield
                cells = self.memory.cells(action.fragment, plan.places[action.fragment])
                cells[rank] = (action.fragment, boundary)
            elif isinstance(action, ApplyFragment):
                yield
                self.values[rank][action.fragment] = self.memory.inbox[action.fragment][rank]
            self.history[rank].append((boundary, action))
        core.copied([*copies], loss=1.0 + rank)
        self.history[rank].append([*self.values[rank]])
        yield
        self.board.enter(rank, boundary, terminated=False)
        if rank == 0:
            self.first.followed(core.state(offers=[*copies]), copies, boundary=boundary)
            self.board.publish(self.plan_of(boundary + 1))

    def plan_of(self, number: int) -> Plan:
        applied = self.cores[0].applied
        return self.first.plan(number, self.link_state, applied=applied, terminated=False, now=0.0)

    def settle(self) -> None:
        offers = []
        for fragment, place, copy in self.first.written():
            if fragment not in self.memory.locked:
                self.memory.place[fragment], self.memory.header[fragment] = place, copy
                offers.append((fragment, place))
        if (state := self.first.settle(offers)) is not None:
            self.sent.append(state)
        for fragment in self.first.places.idle(self.link_state.open):
            if fragment not in self.memory.locked and self.random.random() < 0.5:
                self.memory.place[fragment] = self.first.places.current[fragment] = HOME
                self.memory.header[fragment] = NOTHING

    def run_link(self) -> Iterator[None]:
        """Uploads offered copies, places results in free inboxes, and announces other fragments."""
        while True:
            yield
            kind = self.random.randrange(4)
            state = self.sent[-1] if self.sent else TrainerState(applied=[1] * P)
            if kind == 0 and state.offers:
                yield from self.upload(self.random.choice([*state.offers]))
            elif kind == 1:
                free = [p for p in range(P) if state.applied[p] == self.generations[p]]
                if free:
                    yield from self.result(self.random.choice(free))
            elif kind == 2:
                announced = self.random.sample(range(P), self.random.randint(1, P))
                self.publish(open=announced)

    def upload(self, fragment: int) -> Iterator[None]:
        self.memory.locked.add(fragment)
        place, header = self.memory.place[fragment], self.memory.header[fragment]
        for rank in range(self.ranks if header != NOTHING else 0):
            yield
            found = self.memory.cells(fragment, place)[rank]
            assert found == (fragment, header.local_step), (
                "the link reads a copy that is partly written"
            )
        self.uploads += 1
        self.memory.locked.discard(fragment)

    def result(self, fragment: int) -> Iterator[None]:
        generation = self.generations[fragment] + 1
        for rank in self.random.sample(range(self.ranks), self.ranks):
            yield
            self.memory.inbox[fragment][rank] = generation
        self.generations[fragment] = generation
        state = self.sent[-1] if self.sent else TrainerState(applied=[1] * P)
        ready = [(p, g) for p, g in enumerate(self.generations) if g > state.applied[p]]
        self.publish(ready=ready)

    def publish(self, **changes: object) -> None:
        fields = {"open": self.link_state.open, "ready": self.link_state.ready, **changes}
        self.link_state = LinkState(phase=Phase.TRAINING, connected=True, **fields)


class LateRankedLearner(RankedLearner):
    """
    Ranks whose devices make copies late: each has a queue, which `turn` lets advance.

    What a copy writes to is garbage until it is made, and a result that is applied is in a buffer of the device.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        rooms = Rooms(spares=[1] * 12, outgoing=[1] * P, incoming=[1, 1])
        self.devices = Devices(fragments=[1] * P, rooms=rooms, announced=P)
        self.queues: list[list] = [[] for _ in range(ranks)]
        """By rank, (boundary, what to do)."""
        self.buffers = [[None, None] for _ in range(ranks)]
        super().__init__(ranks, seed, spares=12)
        self.processes += [self.device(rank) for rank in range(ranks)] * 3

    def device(self, rank: int) -> Iterator[None]:
        while True:
            if queue := self.queues[rank]:
                queue.pop(0)[1]()
            yield

    def follow(self, rank: int, boundary: int) -> Iterator[None]:
        if rank == 0:
            assert boundary == 1 or not self.board.behind(boundary - 1), "rank 0 waits"
            self.first.finished = self.board.finished()
            while (found := self.first.oldest) and found.boundary <= self.first.finished:
                self.settle()
        plan = self.board.plan(boundary)
        assert plan is not None, "a rank waits for its plan"
        core, copies, queue = self.cores[rank], {}, self.queues[rank]
        finished = queue[0][0] - 1 if queue else boundary - 1
        for action in core.step(TOKENS, plan.link_state, now=0.0):
            if isinstance(action, CopyFragment):
                p, copies[action.fragment] = action.fragment, action.copy
                cells = self.memory.cells(p, plan.places[p])
                cells[rank] = "garbage"
                queue.append((boundary, partial(cells.__setitem__, rank, (p, boundary))))
            elif isinstance(action, ApplyFragment):
                p, generation = action.fragment, core.applied[action.fragment]
                assert (p, generation) in self.buffers[rank], "a result is not on the device"
                self.values[rank][p] = generation
                inbox = self.memory.inbox[p]
                queue.append((boundary, partial(self.round_in, inbox, rank, generation)))
            self.history[rank].append((boundary, action))
            yield
        for fetch in plan.fetches:
            queue.append((boundary, partial(self.fetch, rank, fetch)))
        core.copied([*copies], loss=1.0 + rank)
        self.history[rank].append([*self.values[rank]])
        yield
        self.board.enter(rank, boundary, terminated=False, finished=finished if queue else boundary)
        if rank == 0:
            self.first.followed(core.state(offers=[*copies]), copies, boundary=boundary)
            self.board.publish(self.plan_of(boundary + 1))

    def fetch(self, rank: int, fetch: Fetch) -> None:
        found = fetch.fragment, self.memory.inbox[fetch.fragment][rank]
        assert found[1] == fetch.generation, "the inbox was overwritten before it was fetched"
        self.buffers[rank][fetch.buffer] = found

    def round_in(self, inbox: list, rank: int, generation: int) -> None:
        assert inbox[rank] == generation, "the inbox was overwritten before values went back to it"


def joined_core() -> TrainerCore:
    core = TrainerCore(
        name="eu/0", fragments=P, found=None, checkpoint_every=None, connect_timeout_seconds=1.0
    )
    ready = [(p, 1) for p in range(P)]
    core.join(
        LinkState(phase=Phase.APPLY_MODEL, connected=True, ready=ready), now=0.0, terminated=False
    )
    assert core.joined
    return core


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_in_lockstep_never_wait_and_do_the_same(ranks, seed):
    world = RankedLearner(ranks, seed)
    while min(world.left) < 60:
        world.turn()
    whole = min(len(history) for history in world.history)
    assert whole > 150
    assert all(history[:whole] == world.history[0][:whole] for history in world.history)
    assert world.uploads > 10
    assert max(world.generations) > 3
    reported = [state.local_step for state in world.sent]
    assert reported == [*range(1, len(reported) + 1)]


@pytest.mark.parametrize("seed", seeds(1, range(8)))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_late_devices_never_wait_and_do_the_same(ranks, seed):
    world = LateRankedLearner(ranks, seed)
    while min(world.left) < 90:
        world.turn()
    whole = min(len(history) for history in world.history)
    assert whole > 200
    assert all(history[:whole] == world.history[0][:whole] for history in world.history)
    assert world.uploads > 10
    assert max(world.generations) > 3
    reported = [state.local_step for state in world.sent]
    assert len(reported) > 20
    assert reported == sorted({*reported})


def test_ranks_whose_devices_are_fast_copy_and_offer_in_each_step():
    world = LateRankedLearner(2, 0)
    world.link = iter(lambda: None, 0)  # reads nothing
    while min(world.left) < 20:
        for entered, queue in zip(world.entered, world.queues, strict=True):
            while queue and queue[0][0] < entered:  # the copies of the step before
                queue.pop(0)[1]()
        next(world.random.choice(world.processes[:2]))
    reported = [(state.local_step, [*state.offers]) for state in world.sent]
    assert reported == [(n, [0, 1]) for n in range(1, world.left[0] - 1)]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_are_not_in_lockstep_wait_and_do_the_same(seed):
    world = RankedLearner(3, seed, lockstep=False)
    world.processes += [world.processes[2]] * 5  # one is often ahead
    while min(world.left) < 40:
        world.turn()
    whole = min(len(history) for history in world.history)
    assert all(history[:whole] == world.history[0][:whole] for history in world.history)
    assert max(world.left) - min(world.left) <= 2


def test_an_announced_fragment_is_copied_and_offered_in_each_step():
    world = RankedLearner(2, 0)
    world.link = iter(lambda: None, 0)  # reads nothing
    while min(world.left) < 20:
        world.turn()
    assert [[*state.offers] for state in world.sent[:15]] == [[0, 1]] * 15


def test_with_few_spare_places_fragments_are_copied_less_often_and_never_overwritten():
    world = RankedLearner(2, 3, spares=1)
    while min(world.left) < 60:
        world.turn()
    assert world.uploads > 5


def test_a_copy_whose_predecessor_is_being_read_is_not_offered_and_its_place_is_free_again():
    first = FirstRank(2, 1)
    first.plan(1, LinkState(open=[0, 1]), applied=[0, 0], terminated=False, now=0.0)
    copy = HostCopy(local_step=1, steps=1, tokens=1, base=0)
    first.followed(TrainerState(local_step=1, offers=[0]), {0: copy})
    assert first.written() == [(0, 1, copy)]
    state = first.settle([])
    assert state.offers == []
    assert first.settled.offers == ()  # a link that starts later must not repeat a report's offers
    assert first.places.current == [HOME, HOME]
    assert first.places.plan([0]) == {0: 1}


def test_a_fragment_that_is_not_announced_any_longer_gives_its_spare_place_back():
    places = Places(2, 1)
    assert places.plan([0]) == {0: 1}
    places.write([0])
    assert places.written() == {0: 1}
    places.current[0] = 1
    assert places.idle([0]) == []
    assert places.idle([1]) == [0]
    assert places.plan([1]) == {}  # home holds what the link reads, and the spare place is taken
    places.current[0] = HOME
    assert places.plan([1]) == {1: 1}


def test_fragments_with_a_result_to_apply_are_not_copied():
    first = FirstRank(3, 4)
    state = LinkState(open=[0, 1, 2], ready=[(0, 2), (1, 2)])
    plan = first.plan(1, state, applied=[1, 2, 0], terminated=False, now=0.0)
    assert plan.link_state.open == [1, 2]
    assert [*plan.places] == [1, 2]

    assert first.short == [], "a fragment with a result lacks no place"


def test_a_plan_states_the_fragments_that_lack_a_place():
    first = FirstRank(3, 0)
    first.places.current = [HOME, HOME, HOME]
    first.plan(1, LinkState(open=[0, 1]), applied=[0] * 3, terminated=False, now=0.0)
    assert first.short == [0, 1]
    first.plan(2, LinkState(), applied=[0] * 3, terminated=False, now=0.0, model=True)
    assert first.short == []


def test_a_place_is_not_idle_while_another_copy_of_its_fragment_is_being_written():
    places = Places(1, 1)
    places.current[0] = 1
    assert places.plan([0]) == {0: HOME}
    places.write([0])
    assert places.idle([]) == []
    places.written()
    assert places.idle([]) == [0]


# ---------------------------------------------------------------- the board


@pytest.fixture
def board():
    return Board(Memory(2, spares=0), ranks=2, fragments=P)


def test_a_plan_comes_back_as_it_was_published(board):
    state = LinkState(
        phase=Phase.TRAINING, starts=["a"], open=[2, 0], ready=[[1, 7]], versions=[[1, 2], None, [3, 4]],
        text="…",
    )  # fmt: skip
    plan = Plan(boundary=5, link_state=state, places={2: 1, 0: 3}, terminated=True, now=1.5)
    plan = dataclasses.replace(plan, fetches=(Fetch(1, 7, 0),))
    board.publish(plan)
    assert board.plan(5) == plan
    assert board.plan(6) is None


def test_a_plan_that_is_partly_written_is_not_used(board):
    board.publish(Plan(boundary=1, link_state=LinkState(text="x")))
    assert board.plan(1) is not None
    area = board._area.data
    area[area.index(b"linkState")] ^= 1
    assert board.plan(1) is None


def test_a_plan_that_was_overwritten_is_an_error(board):
    board.publish(Plan(boundary=1 + PLANS, link_state=LinkState()))
    with pytest.raises(PassedError, match="boundary 1 was overwritten by that of 5"):
        board.plan(1)


def test_a_long_sentence_of_the_link_is_cut_in_a_plan(board):
    board.publish(Plan(boundary=1, link_state=LinkState(text="x" * 10**6)))
    assert len(board.plan(1).link_state.text) == 1001


def test_rows_state_how_far_each_rank_is_and_whether_it_is_to_end(board):
    board.enter(1, 4, terminated=True)
    assert board.rows() == [(0, False), (4, True)]
    assert board.behind(4) == [0]
    board.enter(0, 4, terminated=False)
    assert board.behind(4) == []
    board.enter(1, 5, terminated=False, finished=3)
    board.leave(1)
    assert [board.finished(), board.finished([0]), board.behind(5)] == [3, 4, [0]]


def test_the_whole_model_is_copied_to_the_own_places_so_that_a_released_place_is_none_of_it():
    first = FirstRank(2, 2)
    first.plan(1, LinkState(open=[0]), applied=[0, 0], terminated=False, now=0.0)
    copy = HostCopy(local_step=1, steps=1, tokens=1, base=0)
    first.followed(TrainerState(local_step=1, offers=[0]), {0: copy})
    assert first.copying
    first.settle([(p, place) for p, place, _ in first.written()])
    assert not first.copying
    plan = first.plan(
        2, LinkState(open=[0, 1]), applied=[0, 0], terminated=False, now=2.5, model=True
    )
    assert (plan.places, plan.now) == ({0: HOME, 1: HOME}, 2.5)
    assert plan.link_state.open == ()
    assert first.places.idle([]) == []


# ---------------------------------------------------------------- several machines


def planned(first: FirstRank, boundary: int) -> Plan:
    state = LinkState(open=[0, 1])
    return first.plan(boundary, state, applied=[0, 0], terminated=False, now=0.0)


def follow(first: FirstRank, plan: Plan) -> None:
    """Rank 0 makes the copies of a plan, and reports its step."""
    step = plan.boundary
    copies = {p: HostCopy(local_step=step, steps=1, tokens=1, base=0) for p in plan.places}
    state = TrainerState(local_step=step, offers=[*copies])
    first.followed(state, copies, boundary=step)


def settled(first: FirstRank) -> TrainerState | None:
    return first.settle([(p, place) for p, place, _ in first.written()])


def test_while_copies_are_late_there_are_no_others_and_the_link_learns_of_no_later_boundary():
    first = FirstRank(2, 4)
    follow(first, planned(first, 1))
    second = planned(first, 2)
    assert [*second.places] == [0, 1], "boundary 1 is not late before all ranks have followed it"
    follow(first, second)
    third = planned(first, 3)
    assert third.places == {}
    assert first.short == [], "no place is taken from another fragment"
    for boundary in (3, 4, 5):
        follow(first, planned(first, boundary))
    assert [first.oldest.boundary, first.late(5), first.copying] == [1, True, True]

    state = settled(first)
    assert (state.local_step, [*state.offers]) == (1, [0, 1])
    assert first.late(5)
    state = settled(first)
    assert (state.local_step, [*state.offers]) == (2, [0, 1])
    assert first.oldest is None, "a report without offers would replace those of boundary 2"
    follow(first, planned(first, 6))
    assert [*settled(first).offers] == [0, 1]


def test_places_of_late_copies_are_not_used_again_before_they_have_arrived():
    first = FirstRank(2, 4)
    first_plan = planned(first, 1)
    follow(first, first_plan)
    second_plan = planned(first, 2)
    follow(first, second_plan)
    assert all(first_plan.places[p] != second_plan.places[p] for p in (0, 1))
    spare = [
        place
        for plan in (first_plan, second_plan)
        for place in plan.places.values()
        if place != HOME
    ]
    assert len(spare) == len({*spare})
    settled(first)
    third_plan = first.places.plan([0, 1])
    assert all(
        third_plan[p] not in (first_plan.places[p], second_plan.places[p]) for p in third_plan
    )


def test_a_late_copy_of_the_whole_model_is_the_only_one():
    first = FirstRank(2, 4)
    plan = first.plan(1, LinkState(), applied=[0, 0], terminated=False, now=0.0, model=True)
    first.followed(TrainerState(local_step=1), {}, boundary=plan.boundary, model=True)
    follow(first, planned(first, 2))
    assert first.copying
    assert first.model_copying
    assert planned(first, 3).places == {}
    assert settled(first).local_step == 1
    assert not first.model_copying


def test_a_plan_reaches_the_board_of_another_machine_only_as_it_was_published(board):
    other = Board(Memory(2, spares=0), ranks=2, fragments=P)
    plan = Plan(boundary=7, link_state=LinkState(text="x"))
    record = board.publish(plan)
    other.take(record)
    assert other.plan(7) == board.plan(7)
    another_boundary = bytes([record[0] ^ 8]) + record[1:]
    empty = bytes(16)  # its checksum is right: that of no bytes of boundary 0
    long = record + b"x" * 10**6
    for wrong in (record[:-1], record[:-1] + b"?", b"", another_boundary, empty, long):
        with pytest.raises(ValueError, match="a plan of"):
            other.take(wrong)


def test_rows_reach_the_board_of_another_machine(board):
    other = Board(Memory(2, spares=0), ranks=2, fragments=P)
    board.enter(1, 4, terminated=True)
    board.leave(1)
    other.take_rows([1], board.rows_of([1]))
    assert other.rows() == [(0, False), (4, True)]
    assert [other.left(rank) for rank in range(2)] == [False, True]
    with pytest.raises(ValueError, match="expected those of 2 ranks"):
        other.take_rows([0, 1], board.rows_of([1]))


def test_the_first_failure_stays_and_one_that_is_partly_written_is_none(board):
    assert board.failure == ""
    board.fail("rank 1 … has ended")
    board.fail("another")
    assert board.failure == "rank 1 … has ended"
    area = board._area.data
    area[area.index(b"has ended")] ^= 1
    assert board.failure == ""
    other = Board(Memory(2, spares=0), ranks=2, fragments=P)
    other.fail("x" * 10**4)
    assert 1000 < len(other.failure) < 2048
    assert other.plan(1) is None


def test_rows_of_some_ranks_change_no_row_of_another_rank():
    here, there = (Board(Memory(3, spares=0), ranks=3, fragments=P) for _ in range(2))
    here.enter(1, 4, terminated=True)
    there.enter(0, 5, terminated=False)
    there.enter(2, 6, terminated=False)
    here.take_rows([0, 2], there.rows_of([0, 2]))
    assert here.rows() == [(5, False), (4, True), (6, False)]


def test_rows_plans_and_the_failure_share_no_memory():
    board = Board(Memory(2, spares=0), ranks=2, fragments=P)
    plans = [
        Plan(boundary=n, link_state=LinkState(text=str(n) * 30_000)) for n in range(1, PLANS + 1)
    ]
    for plan in plans:
        board.publish(plan)
    board.fail("y" * 10**4)
    board.enter(0, 7, terminated=True)
    board.enter(1, 8, terminated=True)
    found = [board.plan(plan.boundary) for plan in plans]
    assert [plan.link_state.text for plan in found] == [plan.link_state.text for plan in plans]
    assert set(board.failure) == {"y"}
    for plan in plans:
        board.publish(plan)
    assert set(board.failure) == {"y"}
    assert board.rows() == [(7, True), (8, True)]


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_a_plan_states_whether_a_rank_received_sigterm(terminated, model):
    first = FirstRank(P, 1)
    plan = first.plan(1, LinkState(), applied=[0] * P, terminated=terminated, now=0.0, model=model)
    assert plan.terminated == terminated


def test_while_nothing_is_being_written_no_copies_are_complete():
    assert Places(P, 1).written() == {}
