"""How the ranks of a learner find each other: each thread here is one rank."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco_testing.learners.rank_threads import in_ranks
from diloco_worker.trainer import rank_group
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_processes import RankProcess


def test_all_ranks_get_the_texts_of_all():
    def body(group: RankGroup):
        group.wait_for_all()
        return group.exchange(f"a{group.rank}"), group.agree(f"b{group.rank}", None)

    expected = (["a0", "a1", "a2"], ["b0", "b1", "b2"])
    assert in_ranks(3, body) == [expected] * 3


def test_an_error_of_one_rank_ends_all_with_its_sentence():
    def body(group: RankGroup):
        group.agree("", ConfigError("no such layer") if group.rank == 1 else None)

    found = in_ranks(3, body)
    assert all(isinstance(error, ConfigError) for error in found)
    assert [str(error) for error in found] == [
        "rank 1: no such layer",
        "no such layer",
        "rank 1: no such layer",
    ]


def test_a_temporary_error_of_one_rank_is_no_permanent_refusal_in_the_others():
    def body(group: RankGroup):
        group.agree("", StorageError("disk full") if group.rank == 0 else None)

    found = in_ranks(2, body)
    assert [type(error) for error in found] == [StorageError, StorageError]
    assert str(found[1]) == "rank 0: disk full"


def test_a_store_that_has_ended_is_a_sentence():
    class Gone(dist.HashStore):
        def check(self, keys):
            raise dist.DistNetworkError("connection reset")

    group = RankGroup("eu/0", Gone(), rank=1, size=2, timeout_seconds=1)
    with pytest.raises(UnavailableError, match=r"does not answer rank 1 \(connection reset\)"):
        group.wait_for_all()


def test_rank_0_states_what_it_waits_for_and_waits_as_long_as_given(monkeypatch, capsys):
    monkeypatch.setattr(rank_group, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(rank_group, "SHOWN_SECONDS", 0.0)

    def body(group: RankGroup):
        return group.alone(may_be=True, seconds=60)

    store = dist.HashStore()
    late = threading.Timer(
        0.3, RankGroup, ("eu/0", store), {"rank": 1, "size": 2, "timeout_seconds": 1}
    )
    late.start()
    group = RankGroup("eu/0", store, rank=0, size=2, timeout_seconds=60)
    assert not body(group)
    late.join()
    assert "waiting up to 60 s for another of 2 ranks" in capsys.readouterr().err


def test_ranks_that_never_connect_are_named():
    group = RankGroup("eu/0", dist.HashStore(), rank=0, size=4, timeout_seconds=0.05)
    group._set("here/2", "")
    with pytest.raises(
        UnavailableError, match=r"ranks 1, 3 of 4 have not called Learner.connect within 0 s"
    ):
        group.wait_for_all()


def test_a_rank_without_rank_0_states_that():
    group = RankGroup("eu/0", dist.HashStore(), rank=1, size=2, timeout_seconds=0.05)
    with pytest.raises(UnavailableError, match=r"rank 0 has not called Learner.connect within 0 s"):
        group.alone(may_be=False)


def test_rank_0_alone_connects_alone_where_the_program_may_mean_that(monkeypatch):
    monkeypatch.setattr(rank_group, "ALONE_SECONDS", 0.05)
    store = dist.HashStore()
    group = RankGroup("eu/0", store, rank=0, size=2, timeout_seconds=60)
    assert group.alone(may_be=True)
    late = RankGroup("eu/0", store, rank=1, size=2, timeout_seconds=60)
    with pytest.raises(UnavailableError, match="pass every_rank=True in all ranks"):
        late.alone(may_be=True)
    assert not group.alone(may_be=False)


def test_all_ranks_together_are_not_alone():
    assert in_ranks(2, lambda group: group.alone(may_be=True)) == [False, False]


def found_machines(monkeypatch, *machines) -> list[RankGroup]:
    """The ranks, on these machines."""
    local = threading.local()
    monkeypatch.setattr(rank_group, "_machine", lambda: machines[local.rank])

    def body(group: RankGroup):
        local.rank = group.rank
        group.find_machines()
        return group

    return in_ranks(len(machines), body)


def test_ranks_on_several_machines_know_who_shares_memory_with_whom(monkeypatch):
    ranks = found_machines(
        monkeypatch, *((f"host{rank % 2}", f"boot{rank % 2}", 1) for rank in range(4))
    )
    assert all([*group.machines] == [[0, 2], [1, 3]] for group in ranks)
    assert [group.machine for group in ranks] == [0, 1, 0, 1]
    assert [group.leader for group in ranks] == [0, 1, 0, 1]
    assert [*ranks[1].processes] == [1, 3]
    assert ranks[1].hosts == {0: "host0", 2: "host0"}
    assert ranks[1].named([0, 3]) == f"rank 0 on host0, rank 3 (process {RankProcess.own().pid})"


def test_containers_of_a_machine_share_no_memory(monkeypatch):
    ranks = found_machines(monkeypatch, ("a", "boot", 1), ("b", "boot", 2), ("a", "boot", 1))
    assert all([*group.machines] == [[0, 2], [1]] for group in ranks)


def test_a_rank_that_ends_while_the_others_connect_is_named_at_once():
    def body(group: RankGroup):
        group.find_machines()
        process = group.processes[1]
        group.processes = {**group.processes, 1: RankProcess(pid=2**22 + 1, started=1)}
        if group.rank == 0:
            group.agree("", None)
        return process

    first, second = in_ranks(2, body)
    assert second == RankProcess.own()
    assert isinstance(first, UnavailableError)
    assert "rank 1 (process 4194305) has ended while the others connect" in str(first)


def test_a_rank_that_stands_still_while_the_others_connect_is_named_by_one_of_them(
    monkeypatch, capsys
):
    monkeypatch.setattr(rank_group, "SLOW_SECONDS", 0.0)

    def body(group: RankGroup):
        if group.rank < 2:
            group.exchange("")

    found = in_ranks(3, body, timeout_seconds=0.3)
    assert "rank 2 has called Learner.connect, but did not continue within 0 s" in str(found[0])
    lines = capsys.readouterr().err.splitlines()
    waiting = "diloco: eu/0: waiting for rank 2, which has called Learner.connect, to continue"
    assert lines.count(waiting) == 1
