"""Checkpoints in pieces: what each rank writes, when they count, and what other ranks read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco_testing.learners.rank_threads import in_ranks
from diloco_worker.core.checkpoint_schedule import Outcome
from diloco_worker.core.sealed import sealed, unsealed
from diloco_worker.core.shard_slices import piece, whole
from diloco_worker.trainer import pieces, rank_checkpoints
from diloco_worker.trainer.checkpoint import (
    Checkpoints,
    kept_of,
    local_checkpoint,
)
from diloco_worker.trainer.layout import Share
from diloco_worker.trainer.rank_checkpoints import RankCheckpoints, of_ranks
from diloco_worker.trainer.rank_group import RankGroup

DIGEST = "layout"
WIDE = 200
"""A matrix of this width is divided among the ranks."""


class Rank:
    """A replica of a model in one of several threads."""

    def __init__(self, group: RankGroup, directory: Path, *, seed: int = 1, keep: int = 2) -> None:
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))
        for index, parameter in enumerate(self.model.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        held = {}
        for turn, (name, tensor) in enumerate(self.model.state_dict(keep_vars=True).items()):
            box = whole(tensor.shape)
            copied = piece(dict.fromkeys(range(group.size), box), group.rank, turn=turn)
            held[name] = (tensor, Share(held=box, copied=copied))
        self.group = group
        self.checkpoints = RankCheckpoints(
            directory, keep=keep, digest=DIGEST, held=held, group=group
        )
        group.exchange("created")  # as `of_ranks` does: rank 0 cleans the directory first

    def stepped(self) -> Rank:
        self.optimizer.step()
        return self

    def save(self, step: int, kept: Callable[[], dict[str, Any]] = dict) -> Outcome | None:
        """What rank 0 knows of the checkpoint in the end."""
        self.begin(step, kept)
        assert self.checkpoints.finish()
        self.group.exchange("written")
        return self.checkpoints.ended()

    def begin(self, step: int, kept: Callable[[], dict[str, Any]] = dict) -> None:
        self.checkpoints.begin(
            self.model, [self.optimizer], attempts=0, kept=kept, local_step=step, global_step=step,
            facts={"step": step, "start": f"of rank {self.group.rank}"}, run="r",
        )  # fmt: skip

    def load(self, *, parameters: bool = True) -> int:
        """The local step of the checkpoint that was loaded; 0: there is none."""
        found = self.checkpoints.newest_of_all()
        if found is None:
            return 0
        self.checkpoints.load_part(
            found, self.model, [self.optimizer], parameters=parameters
        ).close()
        return found.local_step

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model/{n}": p.detach().clone() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key}/{name}"] = value.clone()
        return found


def ranks(directory: Path, body: Callable[[Rank], Any], *, size: int = 2, **options: Any) -> list:
    found = in_ranks(size, lambda group: body(Rank(group, directory, **options)))
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def saved(directory: Path, *steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The state that two ranks saved at the last of these steps."""

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        for step in steps:
            outcome = rank.stepped().save(step)
            assert outcome is (Outcome.WRITTEN if rank.group.rank == 0 else Outcome.FAILED)
        return rank.state()

    return ranks(directory, body, **options)[0]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_loads_what_two_have_written(tmp_path, size):
    wanted = saved(tmp_path, 1, 2)

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        assert rank.load() == 2
        return rank.state()

    for found in ranks(tmp_path, body, size=size, seed=2):
        assert_equal(found, wanted)


def test_all_ranks_find_the_start_of_the_syncer_that_rank_0_stated(tmp_path):
    saved(tmp_path, 1)

    def body(rank: Rank) -> str:
        return local_checkpoint(rank.checkpoints.newest_of_all()).start

    assert ranks(tmp_path, body, size=3) == ["of rank 0"] * 3


def test_one_process_loads_what_two_ranks_have_written_and_the_other_way_round(tmp_path):
    wanted = saved(tmp_path, 1)

    def one_process(group: RankGroup) -> dict[str, torch.Tensor]:
        rank = Rank(group, tmp_path / "unused", seed=2)
        alone = Checkpoints(tmp_path, keep=2, digest=DIGEST)
        found = alone.newest()
        assert found.local_step == 1
        alone.load(found, rank.model, [rank.optimizer])
        assert_equal(rank.state(), wanted)
        rank.stepped()
        assert alone.start(rank.model, [rank.optimizer], local_step=2, global_step=2, facts={})
        assert alone.finish()
        return rank.state()

    (wanted,) = in_ranks(1, one_process)
    names = {path.name.partition(".")[0] for path in tmp_path.glob("checkpoint-*")}
    assert len(names) == 2, "the pieces of the earlier one are kept"

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        assert rank.load() == 2
        return rank.state()

    for found in ranks(tmp_path, body, seed=3):
        assert_equal(found, wanted)


def test_the_optimizers_alone_continue_and_the_parameters_stay(tmp_path):
    wanted = saved(tmp_path, 1)

    def body(rank: Rank) -> tuple[dict, dict]:
        before = rank.state()
        rank.load(parameters=False)
        return before, rank.state()

    for before, after in ranks(tmp_path, body, seed=2):
        assert_equal({n: v for n, v in after.items() if n.startswith("model")}, before)
        assert torch.equal(after["exp_avg/0.weight"], wanted["exp_avg/0.weight"])


def test_each_rank_writes_its_part_and_two_generations_remain(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(sizes) == 4
    first, second = sizes[:2]
    assert first + second < 1.1 * 3 * 4 * WIDE * WIDE
    assert abs(first - second) < 0.1 * first
    stems = [path.name for path in sorted(tmp_path.glob("checkpoint-*.json"))]
    assert stems == ["checkpoint-0000000003.json", "checkpoint-0000000004.json"]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2 * (1 + 2 * 2)


DAMAGES = {
    "a byte of a piece": (".rank-1.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1] + b"?"), "SHA-256"),
    "a shorter piece": (".rank-1.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes, expected"),
    "no piece": (".rank-1.safetensors", Path.unlink, "No such file"),
    "no layout": (".rank-0.layout", Path.unlink, "No such file"),
    "a layout of another checkpoint": (
        ".rank-0.layout",
        lambda p: p.write_bytes(p.with_name("checkpoint-0000000001.rank-0.layout").read_bytes()),
        "rank-0.layout has SHA-256",
    ),
    "a link": (
        ".rank-1.safetensors",
        lambda p: (p.unlink(), p.symlink_to(p.with_name("checkpoint-0000000001.rank-1.safetensors"))),
        "found a link",
    ),
    "no manifest": (".json", Path.unlink, ""),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_partial_checkpoint_is_skipped_by_all_ranks_for_the_one_before(
    tmp_path, caplog, damage
):
    saved(tmp_path, 1, 2)
    suffix, change, sentence = DAMAGES[damage]
    change(tmp_path / f"checkpoint-0000000002{suffix}")
    assert ranks(tmp_path, Rank.load, seed=2) == [1, 1]
    if sentence:
        assert "checkpoint checkpoint-0000000002.json is skipped: " in caplog.text
        assert caplog.text.count("is skipped") == 1, "rank 0 states it for all"
        assert sentence in caplog.text
    alone = Checkpoints(tmp_path, keep=2, digest=DIGEST)
    assert alone.newest().local_step == 1


def test_checkpoints_of_another_model_are_skipped(tmp_path, caplog):
    saved(tmp_path, 1)
    path = tmp_path / "checkpoint-0000000001.json"
    path.write_bytes(sealed({**unsealed(path.read_bytes()), "digest": "another"}))
    assert ranks(tmp_path, Rank.load) == [0, 0]
    assert "it belongs to another model" in caplog.text


def test_a_rank_that_cannot_write_costs_all_ranks_this_checkpoint_only(tmp_path, caplog):
    obstacle = tmp_path / "checkpoint-0000000002.rank-1.safetensors.tmp"
    obstacle.mkdir()
    (obstacle / "file").touch()

    def body(rank: Rank) -> list[Outcome | None]:
        return [rank.stepped().save(step) for step in (1, 2)]

    assert ranks(tmp_path, body)[0] == [Outcome.WRITTEN, Outcome.FAILED]
    assert [path.name for path in tmp_path.glob("*.json")] == ["checkpoint-0000000001.json"]
    assert "checkpoint of local step 2: rank 1: [Errno 21] Is a directory" in caplog.text
    (obstacle / "file").unlink()
    obstacle.rmdir()
    assert ranks(tmp_path, lambda rank: (rank.load(), rank.stepped().save(3)))[0] == (
        1,
        Outcome.WRITTEN,
    )
    left = {path.name.partition(".")[0] for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-0000000001", "checkpoint-0000000003"}


def test_a_copy_that_one_rank_discards_is_discarded_by_all(tmp_path, monkeypatch):
    def body(rank: Rank) -> Outcome | None:
        if rank.group.rank == 1:
            monkeypatch.setattr(
                rank.checkpoints, "write", lambda *_: rank.checkpoints._discard(1, "test")
            )
        return rank.stepped().save(1)

    assert ranks(tmp_path, body)[0] is Outcome.LOST
    assert list(tmp_path.glob("*.json")) == []


def test_a_rank_that_is_a_checkpoint_ahead_costs_none(tmp_path):
    """The last one of a learner begins although the one before is being written."""

    def body(rank: Rank) -> list[Outcome | None]:
        rank.stepped()
        found = []
        for turn in (1, 0):
            for step in (1, 2) if rank.group.rank == turn else ():
                rank.begin(step)
                assert rank.checkpoints.finish()
                found.append(rank.checkpoints.ended())
            rank.group.exchange(f"rank {turn} has written both")
        return found

    assert ranks(tmp_path, body)[0] == [Outcome.WRITTEN] * 2


def test_state_that_only_one_rank_has_ends_the_checkpoints_with_a_sentence(tmp_path, caplog):
    def body(rank: Rank) -> Outcome | None:
        rank.stepped()
        if rank.group.rank == 1:  # as an optimizer that divides its state itself
            rank.optimizer.state.pop(next(rank.model.parameters()))
        return rank.save(1)

    assert ranks(tmp_path, body)[0] is Outcome.OFF
    assert (
        "no more local checkpoints will be written: only rank 0 has /optimizers/0/state/0/"
        in caplog.text
    )


def test_a_rank_without_a_state_to_keep_skips_the_checkpoint(tmp_path, caplog):
    def failing() -> dict[str, Any]:
        raise ConfigError("learner.keep: no state")

    def body(rank: Rank) -> Outcome | None:
        return rank.stepped().save(1, failing if rank.group.rank == 1 else dict)

    assert ranks(tmp_path, body)[0] is Outcome.FAILED
    assert (
        "checkpoint of local step 1: rank 1: learner.keep: no state; training continues"
        in caplog.text
    )


def test_each_rank_gets_what_it_kept_and_another_number_of_ranks_gets_a_reason(tmp_path):
    ranks(
        tmp_path, lambda rank: rank.stepped().save(1, lambda: {"reader": {"at": rank.group.rank}})
    )

    def kept(rank: Rank) -> Any:
        manifest = rank.checkpoints.newest_of_all()
        entries = kept_of(manifest, rank=rank.group.rank, ranks=rank.group.size)
        found = entries.read("reader") if "reader" in entries else entries.absent
        entries.close()
        return found

    assert ranks(tmp_path, kept) == [{"at": 0}, {"at": 1}]
    reason = "has the state that 2 ranks kept, which does not fit 3"
    assert ranks(tmp_path, kept, size=3) == [reason] * 3


def test_state_that_one_rank_cannot_take_leaves_all_ranks_their_own(tmp_path):
    saved(tmp_path, 1)

    def body(rank: Rank) -> tuple[str, dict, dict]:
        if rank.group.rank == 1:
            rank.optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
        rank.stepped()
        before = rank.state()
        with pytest.raises(ConfigError) as error:
            rank.load(parameters=False)
        return str(error.value), before, rank.state()

    for rank, (error, before, after) in enumerate(ranks(tmp_path, body, seed=2)):
        assert error.startswith("" if rank == 1 else "rank 1: ")
        assert "the checkpoint has a torch.optim.adamw.AdamW" in error
        assert_equal(after, before)


def test_state_that_is_not_finite_in_one_part_is_used_by_no_rank(tmp_path):
    def body(rank: Rank) -> None:
        rank.stepped()
        # In the part of rank 1.
        rank.optimizer.state[rank.model[0].weight]["exp_avg"][-1, -1] = float("nan")
        rank.save(1)

    ranks(tmp_path, body)

    def load(rank: Rank) -> None:
        with pytest.raises(ConfigError, match="is not finite in the checkpoint"):
            rank.load()
        assert not rank.optimizer.state

    ranks(tmp_path, load)


def test_ranks_without_a_common_directory_have_no_checkpoints(tmp_path):
    def reason(directory: Callable[[RankGroup], Path | None]) -> list:
        return in_ranks(
            2, lambda group: of_ranks(directory(group), keep=2, digest=DIGEST, held={}, group=group)
        )

    assert reason(lambda group: None) == [(None, "DILOCO_STATE is not set in every rank")] * 2
    text = "its ranks do not see the same directory DILOCO_STATE"
    assert reason(lambda group: tmp_path / str(group.rank)) == [(None, text)] * 2
    assert [found is not None and why == "" for found, why in reason(lambda group: tmp_path)] == [
        True,
        True,
    ]
    (tmp_path / "file").touch()
    for error in reason(lambda group: tmp_path / "file"):
        assert "file: File exists" in str(error)


def test_pieces_that_lack_values_are_not_a_checkpoint():
    def of(*boxes: tuple[int, int]) -> list[pieces.Piece]:
        tree = {"dict": [["optimizers", {"list": []}]]}
        return [
            pieces.Piece(
                path=Path("x"), tree=tree, parts={"a": pieces.Part.from_json([[lo], [size], [4]])}
            )
            for lo, size in boxes
        ]

    pieces.check_complete(of((0, 2), (2, 2)))
    pieces.check_complete(of((0, 4), (0, 0)))
    with pytest.raises(ConfigError, match="a: its shards have 3 of its 4 values"):
        pieces.check_complete(of((0, 2), (3, 1)))


def test_waiting_for_a_piece_is_stated_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(rank_checkpoints, "STALL_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    saved(tmp_path, 1)
    assert caplog.text.count("waiting for the pieces of ranks") <= 1
