"""The leader election, in virtual time: candidates whose requests are lost, late or in conflict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_operator.leader.election import (
    Decision,
    Due,
    Election,
    Ended,
    Event,
    Found,
    Lead,
    Lease,
    NotBegun,
    Read,
    StandBy,
    Timing,
    Unanswered,
    Wake,
    Write,
    Written,
)

TIMING = Timing(lease_seconds=15, renew_seconds=10.0, retry_seconds=2.0)


@dataclass
class Server:
    """The Lease of an API server: a write needs the version that it replaces."""

    lease: Lease | None = None
    writes: int = 0
    leaders: list[str] = field(default_factory=list)
    """Who began to lead, one after the other."""

    def answer(self, request: Read | Write) -> Event:
        if isinstance(request, Read):
            return Found(self.lease)
        current = self.lease.version if self.lease is not None else ""
        if request.lease.version != current:
            return Unanswered()
        self.writes += 1
        mark = str(self.writes)
        self.lease = replace(
            request.lease, version=mark, renewed=mark, acquired=request.lease.acquired or mark
        )
        return Written(self.lease)


@dataclass
class Candidate:
    """A candidate with its own clock, and at most one request on its way."""

    name: str
    server: Server
    clock: float = 0.0
    """Of this node, in advance of the test's."""
    log: list[Decision] = field(default_factory=list)
    wake: float = 0.0
    request: Read | Write | None = None

    def __post_init__(self) -> None:
        self.election = Election(self.name, TIMING)

    def handle(self, event: Event, now: float) -> None:
        self.request = None
        for decision in self.election.handle(event, now + self.clock):
            self.log.append(decision)
            match decision:
                case Read() | Write():
                    assert self.request is None, "two requests at a time"
                    self.request = decision
                case Wake(at=at):
                    self.wake = at - self.clock
                case Lead(again=again):
                    assert not again or self.server.leaders[-1] == self.name
                    self.server.leaders.append(self.name)

    def turn(self, now: float) -> None:
        """Act if it is time; every request is answered at once."""
        if now >= self.wake:
            self.handle(Due(), now)
            while self.request is not None:
                self.handle(self.server.answer(self.request), now)

    def leads(self, now: float) -> bool:
        return self.election.may_write(now + self.clock)

    def made(self, kind: type[Decision]) -> list[Decision]:
        return [decision for decision in self.log if isinstance(decision, kind)]


@pytest.fixture
def server():
    return Server()


def until_leading(candidate: Candidate, *others: Candidate, start: float, most: float) -> float:
    """When it leads; every candidate has a turn each 0.1 s."""
    now = start
    while not candidate.leads(now):
        assert now < start + most, f"{candidate.name} does not lead after {most} s"
        now = round(now + 0.1, 3)
        for each in (candidate, *others):
            each.turn(now)
    return now


def test_the_first_candidate_leads_and_renews_with_one_request_every_two_seconds(server):
    first = Candidate("a", server)
    for tenth in range(1000):
        first.turn(tenth / 10)
        assert first.leads(tenth / 10)
    assert len(first.made(Lead)) == 1
    assert not first.made(StandBy)
    assert server.writes == 50
    assert len(first.made(Read)) == 1
    assert server.lease is not None
    assert (server.lease.holder, server.lease.transitions, server.lease.acquired) == ("a", 0, "1")


def test_a_second_candidate_stands_by_as_long_as_the_first_renews(server):
    first, second = Candidate("a", server), Candidate("b", server, clock=1e6)
    for tenth in range(1000):
        first.turn(tenth / 10)
        second.turn(tenth / 10)
        assert not second.leads(tenth / 10)
    assert not second.made(Write)


def test_the_second_takes_over_once_the_lease_has_not_changed_for_its_duration(server):
    first, second = Candidate("a", server), Candidate("b", server, clock=-1e6)
    first.turn(0.0)
    second.turn(0.0)
    # Killed: it has no further turn.
    took = until_leading(second, start=0.0, most=TIMING.lease_seconds + 0.2)
    assert took >= TIMING.lease_seconds
    assert not first.leads(took)
    assert server.lease is not None
    assert (server.lease.holder, server.lease.transitions) == ("b", 1)


def test_the_duration_that_the_holder_wrote_counts_and_not_the_candidates_own(server):
    server.lease = Lease(holder="old", seconds=60, version="1")
    late = Candidate("b", server)
    assert until_leading(late, start=0.0, most=70.0) >= 60.0


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_lease_without_a_duration_lasts_as_long_as_the_candidates_own(server, seconds):
    server.lease = Lease(holder="odd", seconds=seconds, version="1")
    late = Candidate("b", server)
    assert until_leading(late, start=0.0, most=20.0) >= TIMING.lease_seconds


def test_a_leader_that_ends_lets_another_lead_at_its_next_turn(server):
    first, second = Candidate("a", server), Candidate("b", server)
    first.turn(0.0)
    second.turn(0.0)
    first.handle(Ended(), 1.0)
    assert not first.leads(1.0)
    assert isinstance(first.request, Write)
    first.handle(server.answer(first.request), 1.0)
    assert not first.leads(1.0), "the answer to a release is no election"
    assert until_leading(second, start=1.0, most=2 * TIMING.retry_seconds)


def test_a_candidate_that_ends_leaves_the_lease_of_another_alone(server):
    first, second = Candidate("a", server), Candidate("b", server)
    first.turn(0.0)
    second.turn(0.0)
    second.handle(Ended(), 1.0)
    assert second.request is None


def test_a_process_that_starts_again_under_its_own_name_leads_at_once(server):
    Candidate("a", server).turn(0.0)
    again = Candidate("a", server, clock=-500.0)
    again.wake = 1.0
    again.turn(1.0)
    assert again.leads(1.0)


def test_a_leader_without_answers_stops_at_the_deadline_and_leads_again_when_they_return(server):
    leader = Candidate("a", server)
    leader.turn(0.0)
    now = 0.0
    while now < 30.0:
        now = round(now + 0.1, 3)
        if now >= leader.wake:
            leader.handle(Due(), now)
            leader.handle(Unanswered(), now)
        assert leader.leads(now) == (now < TIMING.renew_seconds)
    assert len(leader.made(StandBy)) == 1
    leader.turn(leader.wake)
    assert leader.leads(leader.wake)


def test_a_leader_that_leads_again_knows_whether_another_has_led_meanwhile(server):
    """If not, no other has written what its watches may not have delivered."""
    first, second = Candidate("a", server), Candidate("b", server)
    first.turn(0.0)
    first.wake = 60.0  # no request is answered meanwhile
    first.handle(Unanswered(), TIMING.renew_seconds)
    assert first.made(StandBy)
    first.turn(60.0)
    assert first.made(Lead) == [Lead(again=False), Lead(again=True)]
    first.wake = inf
    until_leading(second, start=60.0, most=60.0)
    second.handle(Ended(), 100.0)
    second.handle(server.answer(second.request), 100.0)
    first.wake = 100.0
    until_leading(first, start=100.0, most=60.0)
    assert first.made(Lead)[2:] == [Lead(again=False)]


def test_a_leader_whose_request_hangs_may_not_write_after_the_deadline(server):
    """No event arrives meanwhile: the time alone ends its right to write."""
    leader = Candidate("a", server)
    leader.turn(0.0)
    leader.handle(Due(), 9.0)
    assert leader.leads(9.9)
    assert not leader.leads(10.0)
    assert leader.request is not None
    leader.handle(server.answer(leader.request), 25.0)
    assert not leader.leads(25.0), (
        "counted from the request, its time was over when the answer came"
    )
    assert leader.made(StandBy)


def test_a_leader_that_finds_another_holder_stands_by(server):
    leader = Candidate("a", server)
    leader.turn(0.0)
    assert server.lease is not None
    server.lease = replace(server.lease, holder="b", version="by hand")
    leader.turn(2.0)  # conflict
    leader.turn(4.0)
    assert not leader.leads(4.0)
    assert leader.made(StandBy) == [StandBy("b holds the Lease")]


def test_a_lease_that_was_deleted_is_created_again_by_its_holder(server):
    leader = Candidate("a", server)
    leader.turn(0.0)
    server.lease = None
    for tenth in range(1, 100):
        leader.turn(tenth / 10)
        assert leader.leads(tenth / 10)
    assert server.lease is not None


# Whatever happens to the requests

FATES = ("answered", "answer lost", "request lost", "still on its way", "paused")


@given(
    clocks=st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=3),
    steps=st.lists(
        st.tuples(
            st.floats(0.0, 12.0), st.integers(0, 2), st.sampled_from(FATES), st.floats(0.0, 6.0)
        ),
        max_size=60,
    ),
)
def test_at_no_time_may_two_candidates_write(clocks, steps):
    """Requests are applied between the moment they are sent and the moment they are answered."""
    server, now = Server(), 0.0
    candidates = [Candidate(str(number), server, clock) for number, clock in enumerate(clocks)]
    late: list[Write] = []
    for pause, number, fate, takes in steps:
        now += pause
        _at_most_one_leads(candidates, now)
        candidate = candidates[number % len(candidates)]
        if fate == "paused":
            continue
        if candidate.request is None:
            candidate.handle(Due(), now)
        if candidate.request is None:
            continue
        request, now = candidate.request, now + takes
        if fate == "still on its way" and isinstance(request, Write):
            late.append(request)  # applied at some later step, after the client stopped waiting
            candidate.handle(Unanswered(), now)
        elif fate == "request lost":
            candidate.handle(Unanswered(), now)
        else:
            answer = server.answer(request)
            _at_most_one_leads(candidates, now)
            now += takes
            candidate.handle(Unanswered() if fate == "answer lost" else answer, now)
        _at_most_one_leads(candidates, now)
        if late and pause > 6.0:
            server.answer(late.pop(0))
            _at_most_one_leads(candidates, now)


def _at_most_one_leads(candidates: list[Candidate], now: float) -> None:
    assert sum(candidate.leads(now) for candidate in candidates) <= 1


@given(
    outage=st.floats(0.0, 100.0),
    turns=st.lists(st.integers(0, 2), min_size=3, max_size=3, unique=True),
)
def test_after_any_outage_one_candidate_leads(outage, turns):
    server = Server()
    candidates = [Candidate(str(number), server, clock=-7.0 * number) for number in range(3)]
    for tenth in range(30):
        for candidate in candidates:
            candidate.turn(tenth / 10)
    for candidate in candidates:
        candidate.wake = 3.0 + outage
    now, end = 3.0 + outage, 3.0 + outage + TIMING.lease_seconds + 2 * TIMING.retry_seconds
    while not any(candidate.leads(now) for candidate in candidates):
        assert now < end
        for number in turns:
            candidates[number].turn(now)
        now = round(now + 0.1, 3)


def test_a_leader_that_cannot_begin_lets_another_lead(server):
    """It would hold the Lease forever, and reconcile nothing."""
    first, second = Candidate("a", server), Candidate("b", server)
    first.turn(0.0)
    second.turn(0.0)
    first.handle(NotBegun(), 0.0)
    assert not first.leads(0.0)
    assert first.made(StandBy) == [StandBy("it could not begin to reconcile")]
    assert first.request is None, "no release: a write of its last term may be on its way"
    took = until_leading(second, first, start=0.0, most=TIMING.lease_seconds + 0.2)
    assert took >= TIMING.lease_seconds
    for tenth in range(300):
        first.turn(took + tenth / 10)
        second.turn(took + tenth / 10)
        assert not first.leads(took + tenth / 10)
    assert len(first.made(Lead)) == 1


def test_a_leader_that_cannot_begin_tries_again_where_there_is_no_other(server):
    only = Candidate("a", server)
    only.turn(0.0)
    only.handle(NotBegun(), 0.0)
    again = until_leading(only, start=0.0, most=TIMING.lease_seconds + 2 * TIMING.retry_seconds + 1)
    assert again > TIMING.lease_seconds
    assert only.made(Lead) == [Lead(again=False), Lead(again=False)]


def test_a_candidate_that_never_acted_may_not_write():
    assert not Election("a", TIMING).may_write(-inf)
    assert not Election("a", TIMING).may_write(0.0)
