"""Ranks that hold replicas copy their parts of one memory: each thread here is one rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import ConfigError, UnavailableError
from diloco.spec import RunSpec
from diloco_testing.learners.rank_threads import copied_bytes, in_ranks
from diloco_worker.core.agreement import HOME
from diloco_worker.core.findings import NONE, Finding
from diloco_worker.trainer import rank_replica
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica
from diloco_worker.trainer.replica import Replica

SPEC = RunSpec(job="j", steps=9, fragments=3, interval=3, overlap=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(200, 300)
        self.norm = nn.BatchNorm1d(7)
        self.narrow = nn.Parameter(torch.randn(129, dtype=torch.bfloat16))
        self.base = nn.Parameter(torch.randn(40, 5), requires_grad=False)
        self.register_buffer("table", torch.tensor([[True, False], [False, True]]))


def nets(size: int) -> list[Net]:
    """The same model in each rank, with running statistics of its own."""
    found = []
    for rank in range(size):
        torch.manual_seed(0)
        net = Net()
        net.norm.running_mean.fill_(rank)
        found.append(net)
    return found


@pytest.fixture
def ranks():
    """Three models, and the replicas of their ranks."""
    models = nets(3)

    def build(group: RankGroup) -> RankReplica:
        return RankReplica(models[group.rank], SPEC, group)

    replicas = in_ranks(3, build)
    assert all(isinstance(replica, RankReplica) for replica in replicas), replicas
    yield models, replicas
    for replica in replicas:
        replica.close()


def values(replica: RankReplica, fragment: int, place: int) -> dict[str, np.ndarray]:
    memory_N = replica.shared.place(fragment, place)
    return {s.tensor.name: s.values(memory_N) for s in replica.layout.fragments[fragment].slots}


@pytest.mark.parametrize("place", [HOME, 1, 4])
def test_the_parts_of_all_ranks_are_the_host_copy_and_padding_is_zero(ranks, place):
    models, replicas = ranks
    state = models[0].state_dict()
    for fragment in range(3):
        if place != HOME:
            replicas[0].shared.place(fragment, place)[:] = 7  # of another fragment
        for replica in reversed(replicas):
            replica.copy_out(fragment, place)
        memory_N = replicas[1].shared.place(fragment, place)
        for slot in replicas[0].layout.fragments[fragment].slots:
            found = torch.from_numpy(slot.values(memory_N))
            assert torch.equal(found, state[slot.tensor.name].to(found.dtype)), slot.tensor.name
            assert not memory_N[slot.offset + slot.tensor.length : slot.end].any()


def test_each_rank_copies_its_share_of_the_bytes(ranks):
    _, replicas = ranks
    sizes = [copied_bytes(replica) for replica in replicas]
    whole = 4 * sum(slot.tensor.length for f in replicas[0].layout.fragments for slot in f.slots)
    assert sum(sizes) == whole
    assert max(sizes) < 1.05 * whole / 3


def test_every_rank_applies_all_of_a_result_and_rounding_is_written_back(ranks):
    models, replicas = ranks
    torch.manual_seed(1)
    for fragment in range(3):
        inbox_N = replicas[0].shared.inbox(fragment)
        for slot in replicas[0].layout.fragments[fragment].slots:
            if not slot.tensor.newest:
                inbox_N[slot.offset : slot.offset + slot.tensor.length] = torch.randn(
                    slot.tensor.length
                )
    for replica in replicas:
        for fragment in range(3):
            replica.apply(fragment)
    states = [model.state_dict() for model in models]
    for name in states[0]:
        assert all(torch.equal(state[name], states[0][name]) for state in states), name
    for fragment in range(3):
        for name, found in values(replicas[0], fragment, HOME).items():
            assert found.shape == states[0][name].shape
    (narrow,) = [
        slot.values(replicas[0].shared.inbox(f.index))
        for f in replicas[0].layout.fragments
        for slot in f.slots
        if slot.tensor.name == "narrow"
    ]
    assert np.array_equal(narrow, models[0].narrow.detach().float().numpy())


@pytest.mark.parametrize("undoing", [[0], [2], [0, 1, 2], []])
def test_each_rank_finds_out_whether_the_program_undoes_results_in_what_it_holds(
    ranks, undoing, caplog
):
    models, replicas = ranks
    kept = [[p.detach().clone() for p in model.parameters()] for model in models]
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for fragment in replicas[0].layout.fragments:
            inbox_N = replicas[0].shared.inbox(fragment.index)
            for slot in fragment.slots:
                if not fragment.buffers:
                    inbox_N[slot.offset : slot.offset + slot.tensor.length] = torch.randn(
                        slot.tensor.length, generator=generator
                    )
            for replica in replicas:
                replica.apply(fragment.index)
        for _, (replica, model, values) in itertools.product(
            range(2), zip(replicas, models, kept, strict=True)
        ):
            if replica.rank in undoing:
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), values, strict=True):
                        parameter.copy_(value)
            replica.stepped()
    found = [replica.rank for replica in replicas if replica.findings is Finding.UNDONE]
    assert found == undoing
    assert caplog.text == "", "rank 0 alone shows it"
    assert [replica.problem for replica in replicas] == [""] * 3


def test_constants_of_rank_0_reach_all_ranks(ranks):
    models, replicas = ranks
    models[0].table[0, 0] = False
    for replica in replicas[1:]:
        replica.copy_model(dict.fromkeys(range(3), HOME))
    replicas[0].copy_model(dict.fromkeys(range(3), HOME))
    for replica in replicas:
        replica.apply_model([])
    assert [model.table.tolist() for model in models] == [[[False, False], [False, True]]] * 3


def test_the_layout_is_that_of_one_process(ranks):
    _, replicas = ranks
    alone = Replica(nets(1)[0], SPEC)
    assert {replica.layout.digest for replica in replicas} == {alone.layout.digest}
    assert replicas[0].layout.frozen == alone.layout.frozen
    alone.close()


def test_too_little_memory_in_rank_0_ends_all_ranks_at_once(monkeypatch):
    def create(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_replica.SharedMemory, "create", create)
    models = nets(2)
    found = in_ranks(2, lambda group: RankReplica(models[group.rank], SPEC, group))
    assert [type(error) for error in found] == [UnavailableError, UnavailableError]
    assert "No space left on device" in str(found[1])


def test_ranks_with_different_models_are_refused_with_the_difference():
    models = nets(2)
    models[1].wide = nn.Linear(200, 301)
    found = in_ranks(2, lambda group: RankReplica(models[group.rank], SPEC, group))
    assert all(isinstance(error, ConfigError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert (
        "the ranks of this learner do not fit together: compared with the model of rank 0, in that of rank 1 "
        "parameter wide.bias has shape [301] instead of [300]" in str(found[0])
    )


def test_a_rank_whose_model_cannot_be_merged_ends_all_ranks():
    models = nets(2)
    models[1].odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    found = in_ranks(2, lambda group: RankReplica(models[group.rank], SPEC, group))
    assert str(found[0]).startswith("rank 1: model: parameter odd has dtype complex64")


def test_rank_0_alone_names_patterns_without_a_buffer_and_every_rank_looks_at_buffers(
    ranks, caplog
):
    models, replicas = ranks
    spec = RunSpec(
        job="j", steps=9, fragments=3, interval=3, overlap=1, moving_buffers=("*.usage",)
    )
    found = in_ranks(3, lambda group: RankReplica(models[group.rank], spec, group))
    assert all(isinstance(replica, RankReplica) for replica in found), found
    for replica in found:
        replica.close()
    lines = [r.getMessage() for r in caplog.records if "*.usage" in r.getMessage()]
    assert len(lines) == 1
    looked = []
    for replica in replicas:
        replica._watch.changed = lambda rank=replica.rank: looked.append(rank) or ""
        replica.copy_model(dict.fromkeys(range(3), HOME))
    assert looked == []
    for replica in replicas:
        replica.copy_out(0, HOME)
    assert looked == [0, 1, 2]


@pytest.mark.parametrize("writing", [[0], [2], [0, 1, 2]])
def test_frozen_parameters_and_buffers_that_are_written_are_found_in_every_rank_that_writes_them(
    ranks, writing, caplog
):
    caplog.set_level("INFO", logger="diloco_worker")
    models, replicas = ranks
    for model, replica in zip(models, replicas, strict=True):
        if replica.rank in writing:
            with torch.no_grad():
                model.base.mul_(0.5)  # as a teacher that follows the trained parameters
                model.table.logical_not_()
        replica.copy_out(0, HOME)
    found = [replica.rank for replica in replicas if replica.findings is Finding.CHANGED]
    assert found == writing
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    others = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert len(warnings) == (0 in writing), "one line for what all ranks find"
    assert all(line.startswith("buffer table changed while training and") for line in warnings)
    names = [line.partition(" changed")[0] for line in others]
    assert names == [f"rank {rank}: buffer table" for rank in writing if rank]
    assert all("frozen parameter base was written while" in line for line in warnings + others)
    assert [replica.problem for replica in replicas] == [""] * 3


@pytest.mark.parametrize("replacing", [[0], [1], [0, 1, 2]])
def test_ranks_whose_parameters_are_replaced_cannot_continue(ranks, replacing):
    models, replicas = ranks
    for model, replica in zip(models, replicas, strict=True):
        if replica.rank in replacing:
            model.wide = nn.Linear(200, 300)
        replica.copy_out(0, HOME)
    refused = [replica.rank for replica in replicas if replica.refused]
    assert refused == replacing
    for rank in replacing:
        expected = "in the place of parameters wide.weight, wide.bias"
        assert expected in replicas[rank].refused


def test_a_parameter_that_one_rank_alone_removes_is_a_problem_of_the_learner(ranks):
    models, replicas = ranks
    del models[2].narrow
    for replica in replicas:
        replica.copy_out(0, HOME)
    assert [replica.findings for replica in replicas] == [NONE, NONE, Finding.OTHER_MODEL]
    assert "the program has removed parameter narrow" in replicas[2].problem


@pytest.mark.parametrize("name", ["wide.weight", "base"])
def test_replicas_that_begin_with_other_values_are_refused_in_all_ranks(name):
    models = nets(3)
    with torch.no_grad():
        models[2].get_parameter(name).add_(1)

    for error in in_ranks(3, lambda group: RankReplica(models[group.rank], SPEC, group)):
        assert isinstance(error, ConfigError)
        assert f"the plain tensors {name} have other values in rank 2 than in rank 0" in str(error)


def test_many_names_of_values_that_differ_are_shortened():
    models = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(7))) for _ in range(2)]
    for error in in_ranks(2, lambda group: RankReplica(models[group.rank], SPEC, group)):
        assert isinstance(error, ConfigError)
        assert "3.weight and 6 more have other values in rank 1" in str(error)
