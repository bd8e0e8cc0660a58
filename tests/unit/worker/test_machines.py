"""Two machines of a learner and what goes between them: each thread here is one rank."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import ConfigError, UnavailableError
from diloco.spec import RunSpec
from diloco_testing.learners.rank_threads import copied_bytes, in_ranks
from diloco_testing.local.fake_run import until
from diloco_worker.core.agreement import HOME, Board, Followed, Plan
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.ipc import relay
from diloco_worker.ipc.relay import Kind, Message
from diloco_worker.trainer import rank_group, rendezvous, shards
from diloco_worker.trainer.machines import FirstMachine, FurtherMachine
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica

SPEC = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1)
COPY = HostCopy(local_step=1, steps=1, tokens=1, base=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(300, 200)
        self.narrow = nn.Parameter(torch.randn(129, dtype=torch.bfloat16))
        self.register_buffer("table", torch.tensor([[True, False], [False, True]]))


class Pair:
    """Rank 0 on one machine, and rank 1 on another that copies the half of all parameters."""

    def __init__(self) -> None:
        self.models = [Net(), Net()]
        replicas = in_ranks(2, self.build)
        assert all(isinstance(replica, RankReplica) for replica in replicas), replicas
        self.replicas = replicas
        fragments = len(replicas[0].layout.fragments)
        self.boards = [Board(r.shared, ranks=2, fragments=fragments) for r in replicas]
        self.first = FirstMachine(
            replicas[0].shared, self.boards[0], replicas[0].machines, ranks=2, named=lambda _: "rank 1 on b"
        )  # fmt: skip
        (own,) = replicas[1].machines
        self.further = FurtherMachine(
            replicas[1].shared, self.boards[1], own, others=[0], first="rank 0 on a"
        )
        self.sockets = socket.socketpair()

    def build(self, group: RankGroup) -> RankReplica:
        group.find_machines("ab"[group.rank])
        assert [*group.machines] == [[0], [1]]
        return RankReplica(self.models[group.rank], SPEC, group)

    def begin(self) -> None:
        self.first.begin({1: self.sockets[0]})
        self.further.begin(self.sockets[1])

    def close(self) -> None:
        for machine in (self.first, self.further):
            machine.close()
        for sock in self.sockets:
            sock.close()
        for replica in self.replicas:
            replica.close()


@pytest.fixture
def pair(monkeypatch):
    """Both ranks hold the model; the ranks of both machines divide what they copy."""
    nearest = shards._nearest
    monkeypatch.setattr(shards, "_nearest", lambda boxes, _: nearest(boxes, None))
    made = Pair()
    made.begin()
    yield made
    made.close()


def followed(boundary: int, *fragments: int, model: bool = False) -> Followed:
    copies = dict.fromkeys(fragments, COPY)
    return Followed(boundary=boundary, state=TrainerState(), copies=copies, model=model)


def publish(pair: Pair, boundary: int, places: dict[int, int]) -> None:
    plan = Plan(boundary=boundary, link_state=LinkState(), places=places)
    pair.first.publish(plan, pair.boards[0].publish(plan))


def test_a_plan_and_the_rows_reach_the_board_of_the_other_machine(pair):
    publish(pair, 1, {})
    until(lambda: pair.boards[1].plan(1), "the plan")
    pair.boards[0].enter(0, 1, terminated=False)
    pair.boards[1].enter(1, 1, terminated=True)
    pair.further.entered(1, {}, model=False)
    until(lambda: pair.boards[0].rows() == [(1, False), (1, True)], "the row of rank 1")
    until(lambda: pair.boards[1].behind(1) == [], "the row of rank 0, with a beat")


def test_a_copy_has_arrived_when_all_parts_of_both_machines_are_in_its_place(pair):
    publish(pair, 1, {0: 1})
    pair.replicas[0].copy_out(0, 1)
    assert not pair.first.arrived(followed(1, 0))
    pair.replicas[1].copy_out(0, 1)
    pair.boards[1].enter(1, 1, terminated=False)
    pair.further.entered(1, {0: 1}, model=False)
    until(lambda: pair.first.arrived(followed(1, 0)), "the copy")
    memory_N = pair.replicas[0].shared.place(0, 1)
    state = pair.models[0].state_dict()
    for slot in pair.replicas[0].layout.fragments[0].slots:
        found = torch.from_numpy(slot.values(memory_N))
        assert torch.equal(found, state[slot.tensor.name].to(found.dtype)), slot.tensor.name


def test_the_rows_of_a_machine_wait_for_all_of_its_ranks_and_copies_come_after_them(pair):
    publish(pair, 1, {0: 1})
    pair.further.entered(1, {0: 1}, model=False)  # but its row is not there
    assert not pair.first.arrived(followed(1, 0))
    pair.boards[1].enter(1, 1, terminated=False)
    until(lambda: pair.first.arrived(followed(1, 0)), "the copy")
    assert pair.boards[0].behind(1) == [0]


def test_the_whole_model_and_the_constants_arrive_and_the_memory_for_it_is_given_back(pair):
    places = dict.fromkeys(range(2), HOME)
    publish(pair, 1, places)
    for replica in pair.replicas:
        replica.copy_model(places)
    pair.boards[1].enter(1, 1, terminated=False)
    pair.further.entered(1, places, model=True)
    until(lambda: pair.first.arrived(followed(1, model=True)), "the model")
    state = pair.models[0].state_dict()
    for fragment in pair.replicas[0].layout.fragments:
        for slot in fragment.slots:
            found = slot.values(pair.replicas[0].shared.place(fragment.index, HOME))
            wanted = state[slot.tensor.name].float().numpy()
            assert np.array_equal(found, wanted)
    until(lambda: not pair.replicas[1].shared.place(0, HOME)[:512].any(), "the memory")


def test_a_result_is_visible_when_the_other_machine_has_it_rounded_as_its_parameters(pair):
    wanted = {}
    for fragment in pair.replicas[0].layout.fragments:
        inbox_N = pair.replicas[0].shared.inbox(fragment.index)
        for slot in fragment.slots:
            values = torch.randn(slot.tensor.length)
            inbox_N[slot.offset : slot.offset + slot.tensor.length] = values
            wanted[slot.tensor.name] = values.view(slot.tensor.shape)
    state = LinkState(phase=Phase.TRAINING, ready=[[0, 3], [1, 5]], open=[0, 1])
    first = pair.first.visible(state)
    assert [*first.ready] == []
    assert [*first.open] == []
    until(lambda: pair.first.visible(state) == state, "the results")
    for replica in pair.replicas:
        for fragment in range(2):
            replica.apply(fragment)
    for model in pair.models:
        state = model.state_dict()
        for name, values in wanted.items():
            assert torch.equal(state[name], values.to(state[name].dtype)), name
    base = [
        slot.values(pair.replicas[0].shared.inbox(fragment.index))
        for fragment in pair.replicas[0].layout.fragments
        for slot in fragment.slots
        if slot.tensor.name == "narrow"
    ]
    assert np.array_equal(base[0], pair.models[1].narrow.detach().float().numpy())


def test_a_newer_result_of_a_fragment_is_sent_again(pair):
    state = LinkState(phase=Phase.TRAINING, ready=[[0, 3]])
    until(lambda: pair.first.visible(state) == state, "the result")
    pair.replicas[0].shared.inbox(0)[:] = 7
    newer = LinkState(phase=Phase.TRAINING, ready=[[0, 4]])
    assert [*pair.first.visible(newer).ready] == []
    until(lambda: pair.first.visible(newer) == newer, "the newer result")
    slot = pair.replicas[1].layout.fragments[0].slots[0]
    assert (slot.values(pair.replicas[1].shared.inbox(0)) == 7).all()


def test_the_model_is_applied_when_all_of_it_and_the_constants_are_there(pair):
    pair.replicas[0].copy_model(dict.fromkeys(range(2), HOME))
    pair.models[1].table.fill_(False)
    state = LinkState(phase=Phase.APPLY_MODEL, connected=True, ready=[[0, 1], [1, 1]])
    early = pair.first.visible(state)
    assert early.phase is Phase.DOWNLOADING
    assert "1 other machines" in early.text
    until(lambda: pair.first.visible(state) == state, "the model")
    pair.replicas[1].apply_model([])
    assert pair.models[1].table.tolist() == [[True, False], [False, True]]


def test_a_part_that_no_plan_has_ends_the_connection_with_the_reason(pair):
    pair.further._relay.send(Message(Kind.PART, (4, 0, 0), b"x"))
    until(lambda: pair.boards[0].failure, "the failure")
    assert pair.boards[0].failure == (
        "rank 1 on b does not answer: it sent what was not expected: a copy of unit 0 at boundary 4, which is not "
        "planned"
    )


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_on_one_machine_reaches_the_other(pair, number):
    pair.boards[number].fail("rank 1 has ended")
    [pair.first, pair.further][number].check()
    until(lambda: pair.boards[1 - number].failure, "the failure")
    assert pair.boards[1 - number].failure == "rank 1 has ended"


def test_a_lost_connection_is_a_failure_on_both_machines(pair):
    pair.sockets[1].shutdown(socket.SHUT_RDWR)
    until(lambda: pair.boards[0].failure and pair.boards[1].failure, "the failures")
    assert pair.boards[0].failure == "rank 1 on b does not answer: the connection was closed"
    assert pair.boards[1].failure == "rank 0 on a does not answer: the connection was closed"


def test_a_machine_whose_ranks_left_is_no_failure(pair):
    pair.boards[1].leave(1)
    pair.further.close()
    until(lambda: pair.boards[0].left(1), "the goodbye")
    assert pair.boards[0].failure == ""


def test_what_the_machine_of_rank_0_holds_is_copied_by_its_ranks_alone():
    made = Pair()
    assert copied_bytes(made.replicas[1]) == 0
    assert copied_bytes(made.replicas[0]) > 0
    assert [unit for unit in made.replicas[0].machines[0].copied if unit] == []
    for sock in made.sockets:
        sock.close()
    for replica in made.replicas:
        replica.close()


# ---------------------------------------------------------------- rendezvous


def met(size: int, **settings) -> list:
    def body(group: RankGroup):
        group.find_machines("abcd"[group.rank])
        found = rendezvous.connect(group, master="127.0.0.1", port=0)
        kept = sorted(found)
        for sock in found.values():
            sock.close()
        return kept

    return in_ranks(size, body, **settings)


def test_each_machine_connects_to_rank_0():
    assert met(3) == [[1, 2], [0], [0]]


def test_an_untrusted_peer_does_not_hold_the_machines_up(monkeypatch, caplog):
    listen = rendezvous._listen

    def with_untrusted_peer(*arguments):
        listener = listen(*arguments)
        peer = socket.create_connection(listener.getsockname())
        peer.sendall(relay._HELLO.pack(b"dilocorl", relay.VERSION, 1, b"?" * 32))
        untrusted.append(peer)
        return listener

    untrusted: list[socket.socket] = []
    monkeypatch.setattr(rendezvous, "_listen", with_untrusted_peer)
    assert met(2) == [[1], [0]]
    assert "it does not know the secret of this learner" in caplog.text
    for peer in untrusted:
        peer.close()


def test_a_machine_that_cannot_reach_rank_0_ends_all_ranks_with_its_reason(monkeypatch):
    monkeypatch.setattr(rendezvous, "DIAL_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "MARGIN_SECONDS", 0.3)

    def refused(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(rendezvous.socket, "create_connection", refused)
    found = met(2)
    assert all(isinstance(error, UnavailableError) for error in found), found
    assert all("rank 1 on" in str(error) for error in found)
    assert all("127.0.0.1 port" in str(error) for error in found)
    assert all("Connection refused" in str(error) for error in found)


def test_a_machine_that_never_connects_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "DIAL_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "MARGIN_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_dial", lambda *_, **__: socket.socket())
    found = met(2)
    assert all(isinstance(error, UnavailableError) for error in found), found
    assert all("did not connect to rank 0 within 0 s" in str(error) for error in found)


def test_machines_with_other_versions_of_the_messages_are_refused_everywhere(monkeypatch):
    versions = iter([1, 2])
    monkeypatch.setattr(
        rank_group, "relay", type("Relay", (), {"VERSION": property(lambda _: next(versions))})()
    )
    found = in_ranks(2, lambda group: group.find_machines("ab"[group.rank]))
    assert all(isinstance(error, ConfigError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert "install the same version" in str(found[0])


def test_more_machines_than_rank_0_can_serve_are_refused(monkeypatch):
    monkeypatch.setattr(rank_group, "MOST_MACHINES", 1)
    found = in_ranks(2, lambda group: group.find_machines("ab"[group.rank]))
    assert all(isinstance(error, ConfigError) for error in found), found
    assert "on 2 machines or in as many containers, at most 1 are supported" in str(found[0])
