"""Local checkpoints: the complete state is restored, and damaged or partial ones are skipped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import ConfigError, DamagedError
from diloco_worker.core.sealed import unsealed
from diloco_worker.trainer import checkpoint
from diloco_worker.trainer.checkpoint import Checkpoints, local_checkpoint
from diloco_worker.trainer.trees import pack, unpack

FACTS = {"local_step": 1, "total_tokens": 2, "steps": [1], "tokens": [2]}


def trained(optimizer_type=torch.optim.AdamW, *, seed=0, steps=3, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("hidden", torch.tensor([1.5]), persistent=False)
    optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def save(store, model, optimizers, *, local_step=1):
    assert store.start(model, optimizers, local_step=local_step, global_step=2, facts=FACTS)
    store.finish()


@pytest.mark.parametrize("start", ["a", None])
def test_a_checkpoint_states_the_start_of_the_syncer_that_its_versions_are_of(tmp_path, start):
    """One of an earlier release states none, and is read as well."""
    model, optimizer = trained(torch.optim.SGD)
    store = Checkpoints(tmp_path, keep=2, digest="d")
    facts = FACTS if start is None else {**FACTS, "start": start}
    assert store.start(model, [optimizer], local_step=1, global_step=2, facts=facts)
    store.finish()
    found = Checkpoints(tmp_path, keep=2, digest="d").newest()
    assert local_checkpoint(found).start == (start or "")


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.LBFGS, {"max_iter": 3}),
    ],
)
def test_training_continues_bit_for_bit_after_a_restart(tmp_path, optimizer_type, options):
    model, optimizer = trained(optimizer_type, **options)
    store = Checkpoints(tmp_path, keep=2, digest="d")
    save(store, model, [optimizer])
    train(model, optimizer, 2)
    other, other_optimizer = trained(optimizer_type, seed=9, steps=1, **options)
    again = Checkpoints(tmp_path, keep=2, digest="d")
    found = again.newest()
    assert (found.local_step, found.global_step, found.facts) == (1, 2, FACTS)
    again.load(found, other, [other_optimizer])
    assert other.hidden == 1.5
    train(other, other_optimizer, 2)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_several_optimizers_and_parameter_groups_are_restored(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def optimizers():
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5),
            torch.optim.AdamW(
                [{"params": [model[1].weight], "lr": 0.2}, {"params": [model[1].bias], "lr": 0.3}]
            ),
        ]

    first = optimizers()
    for optimizer in first:
        optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in first:
        optimizer.step()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, first)
    second = optimizers()
    store.load(store.newest(), model, second)
    assert [g["lr"] for g in second[1].param_groups] == [0.2, 0.3]
    assert second[1].param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(
        second[0].state[model[0].weight]["momentum_buffer"],
        first[0].state[model[0].weight]["momentum_buffer"],
    )


def test_another_set_of_optimizers_is_refused(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer])
    with pytest.raises(ConfigError, match="1 optimizers, this run 2"):
        store.load(store.newest(), model, [optimizer, optimizer])


def test_an_optimizer_that_cannot_state_its_state_costs_checkpoints_and_is_named(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    groups = optimizer.param_groups
    groups[0]["params"][0] = nn.Parameter(groups[0]["params"][0].detach().clone())
    store = Checkpoints(tmp_path, keep=1, digest="d")
    with pytest.raises(
        ConfigError, match=r"AdamW.state_dict\(\) fails with KeyError.*was replaced"
    ):
        store.start(model, [optimizer], local_step=1, global_step=2, facts=FACTS)


def test_a_checkpoint_of_a_model_with_more_tensors_is_refused(tmp_path):
    model, optimizer = trained()
    model.added = nn.Linear(1, 1)
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer])
    del model.added
    with pytest.raises(ConfigError, match=r"lacks 2 tensors that it had then, such as added\.bias"):
        store.load(store.newest(), model, [optimizer])


def test_the_random_state_is_restored(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer])
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    store.load(store.newest(), model, [optimizer])
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == drawn


def test_changes_after_the_copy_are_not_in_the_checkpoint(tmp_path):
    model, optimizer = trained()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    store = Checkpoints(tmp_path, keep=1, digest="d")
    store.start(model, [optimizer], local_step=1, global_step=2, facts=FACTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    store.finish()
    store.load(store.newest(), model, [optimizer])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.mark.slow
def test_17_loading_needs_no_more_memory_than_the_checkpoint_has_bytes(tmp_path):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer])
    found = store.newest()
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    before = memory_kib("VmRSS")
    store.load(found, model, [optimizer])
    extra = (memory_kib("VmHWM") - before) * 1024 / found.path.stat().st_size
    assert extra < 1.1


def test_a_checkpoint_that_shrinks_after_it_was_verified_changes_nothing(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer])
    found = store.newest()
    os.truncate(found.path, 100)
    train(model, optimizer, 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(DamagedError):
        store.load(found, model, [optimizer])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_newest_checkpoints_are_kept(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=2, digest="d")
    for step in (5, 10, 15):
        save(store, model, [optimizer], local_step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"checkpoint-{step:010d}.{kind}" for step in (10, 15) for kind in ("json", "safetensors")
    ]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def complete(*steps: int) -> list[str]:
    """The names of complete checkpoints."""
    return [f"checkpoint-{step:010d}.{kind}" for step in steps for kind in ("json", "safetensors")]


def refuse_manifests(monkeypatch, store):
    real = store._write_file

    def refusing(path, parts):
        if path.suffix == ".json":
            raise OSError(5, "Input/output error")
        return real(path, parts)

    monkeypatch.setattr(store, "_write_file", refusing)


def test_tensors_whose_manifest_was_refused_are_removed_before_the_next_checkpoint(
    tmp_path, monkeypatch
):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer], local_step=5)
    with monkeypatch.context() as broken:
        refuse_manifests(broken, store)
        save(store, model, [optimizer], local_step=10)
    assert "checkpoint-0000000010.safetensors" in names(tmp_path)
    room = []
    with monkeypatch.context() as full:
        full.setattr(store, "_write_file", lambda path, parts: room.append(names(tmp_path)) or "")
        save(store, model, [optimizer], local_step=15)
    assert room[0] == complete(5)
    assert store.newest().local_step == 5


def test_a_restart_removes_what_a_kill_in_the_middle_of_a_write_left(tmp_path, monkeypatch):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=2, digest="d")
    save(store, model, [optimizer], local_step=5)
    with monkeypatch.context() as broken:
        refuse_manifests(broken, store)
        save(store, model, [optimizer], local_step=10)
    for name in ("0000000005.safetensors.tmp", "0000000010.json.tmp", "0000000015.safetensors.tmp"):
        (tmp_path / f"checkpoint-{name}").write_bytes(b"partial")
    (tmp_path / "checkpoint-0000000020.json").write_text("{}")  # its tensors were deleted
    again = Checkpoints(tmp_path, keep=2, digest="d")
    assert names(tmp_path) == complete(5)
    assert again.newest().local_step == 5


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoints_of_another_model_are_deleted_before_those_of_this_one(tmp_path, keep):
    model, optimizer = trained()
    save(Checkpoints(tmp_path, keep=keep, digest="e"), model, [optimizer], local_step=50_000)
    store = Checkpoints(tmp_path, keep=keep, digest="d")
    assert names(tmp_path) == complete(50_000), "a restart alone deletes none"
    for step in (5, 10, 15):
        save(store, model, [optimizer], local_step=step)
        assert store.newest().local_step == step
    assert names(tmp_path) == complete(*(5, 10, 15)[-keep:])


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_written_is_kept_over_damaged_checkpoints_of_later_steps(tmp_path, keep):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=3, digest="d")
    for step in (5, 20, 25):
        save(store, model, [optimizer], local_step=step)
    os.truncate(tmp_path / "checkpoint-0000000020.safetensors", 9)
    os.truncate(tmp_path / "checkpoint-0000000025.json", 9)
    again = Checkpoints(tmp_path, keep=keep, digest="d")
    save(again, model, [optimizer], local_step=10)
    assert names(tmp_path) == complete(*(5, 10)[-keep:])
    assert again.newest().local_step == 10


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_truncated_checkpoint_is_skipped_for_the_previous_one(tmp_path, caplog, share, suffix):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=3, digest="d")
    save(store, model, [optimizer], local_step=5)
    save(store, model, [optimizer], local_step=10)
    victim = tmp_path / f"checkpoint-0000000010.{suffix}"
    data = victim.read_bytes()
    victim.write_bytes(data[: int(len(data) * share)])
    assert store.newest().local_step == 5
    assert "checkpoint-0000000010.json is skipped" in caplog.text


def test_a_flipped_bit_is_found(tmp_path, caplog):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=3, digest="d")
    save(store, model, [optimizer])
    victim = tmp_path / "checkpoint-0000000001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert store.newest() is None
    assert "SHA-256" in caplog.text


def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(tmp_path, caplog):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=3, digest="d")
    save(store, model, [optimizer])
    victim = tmp_path / "checkpoint-0000000001.json"
    whole = victim.read_bytes()
    before = unsealed(whole)
    draw = random.Random(4)
    skipped = 0
    for _ in range(300):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        victim.write_bytes(data)
        if store.newest() is None:
            skipped += 1
        else:
            found = unsealed(bytes(data))
            assert {key: found.get(key) for key in before} == before
    assert skipped > 250
    assert "SHA-256" in caplog.text


def test_a_manifest_of_an_older_version_has_no_digest(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=3, digest="d")
    save(store, model, [optimizer])
    victim = tmp_path / "checkpoint-0000000001.json"
    victim.write_text(json.dumps(unsealed(victim.read_bytes())))
    assert store.newest() is not None


@contextlib.contextmanager
def everything_allowed():
    """A umask that takes no permission away."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_b02_checkpoints_are_for_the_user_of_the_process_alone(tmp_path):
    model, optimizer = trained()
    with everything_allowed():
        save(Checkpoints(tmp_path / "state", keep=1, digest="d"), model, [optimizer])
    found = {path.suffix: mode(path) for path in (tmp_path / "state").iterdir()}
    assert found == {".json": 0o600, ".safetensors": 0o600}
    assert mode(tmp_path / "state") == 0o700


def test_the_directory_of_a_volume_keeps_the_mode_that_its_owner_chose(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o2770)  # as the kubelet sets it for fsGroup
    model, optimizer = trained()
    save(Checkpoints(state, keep=1, digest="d"), model, [optimizer])
    assert mode(state) == 0o2770


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("planted", ["a link to an intact checkpoint", "a pipe"])
def test_b02_what_is_no_regular_file_is_skipped_for_the_checkpoint_before(
    tmp_path, caplog, suffix, planted
):
    model, optimizer = trained()
    store = Checkpoints(tmp_path / "state", keep=3, digest="d")
    save(store, model, [optimizer], local_step=5)
    save(store, model, [optimizer], local_step=10)
    victim = tmp_path / f"state/checkpoint-0000000010.{suffix}"
    elsewhere = tmp_path / "elsewhere"
    victim.rename(elsewhere)
    if planted == "a pipe":
        os.mkfifo(victim)
    else:
        victim.symlink_to(elsewhere)
    assert store.newest().local_step == 5
    assert "checkpoint-0000000010.json is skipped" in caplog.text
    assert "expected a regular file; remove" in caplog.text
    assert victim.name in caplog.text


def test_b02_a_checkpoint_that_becomes_a_link_after_it_was_verified_is_not_loaded(tmp_path):
    model, optimizer = trained()
    store = Checkpoints(tmp_path / "state", keep=1, digest="d")
    save(store, model, [optimizer])
    found = store.newest()
    found.path.rename(tmp_path / "elsewhere")
    found.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="found a link"):
        store.load(found, model, [optimizer])


def test_b02_a_checkpoint_is_not_written_through_links(tmp_path):
    model, optimizer = trained()
    state, victim = tmp_path / "state", tmp_path / "victim"
    state.mkdir()
    victim.write_text("precious")
    for name in ("json", "json.tmp", "safetensors", "safetensors.tmp"):
        (state / f"checkpoint-0000000001.{name}").symlink_to(victim)
    store = Checkpoints(state, keep=1, digest="d")
    save(store, model, [optimizer])
    assert victim.read_text() == "precious"
    assert store.newest().local_step == 1


def test_a_checkpoint_of_another_model_is_skipped(tmp_path, caplog):
    model, optimizer = trained()
    save(Checkpoints(tmp_path, keep=1, digest="d"), model, [optimizer])
    assert Checkpoints(tmp_path, keep=1, digest="e").newest() is None
    assert "another model" in caplog.text


def test_a_full_disk_keeps_the_previous_checkpoint_and_does_not_stop_training(
    tmp_path, caplog, monkeypatch
):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer], local_step=5)
    real = os.write

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    save(store, model, [optimizer], local_step=10)
    monkeypatch.setattr(os, "write", real)
    assert "No space left" in caplog.text
    assert store.newest().local_step == 5
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_hangs_does_not_keep_a_learner_from_leaving(tmp_path, caplog, monkeypatch):
    model, optimizer = trained()
    store = Checkpoints(tmp_path, keep=1, digest="d")
    save(store, model, [optimizer], local_step=5)
    real, answers = os.write, threading.Event()

    def hanging(fd, data):
        assert answers.wait(100)
        return real(fd, data)

    monkeypatch.setattr(os, "write", hanging)
    monkeypatch.setattr(checkpoint, "STALL_SECONDS", 0.05)
    assert store.start(model, [optimizer], local_step=10, global_step=2, facts=FACTS)
    assert not store.finish()
    assert f"step 10: the disk of {tmp_path} has accepted no data" in caplog.text
    # The last checkpoint is not begun, and leaving does not wait again.
    assert not store.start(model, [optimizer], local_step=11, global_step=2, facts=FACTS)
    monkeypatch.setattr(checkpoint, "STALL_SECONDS", 100.0)
    assert not store.finish()
    assert caplog.text.count("has accepted no data") == 1
    assert store.newest().local_step == 5
    answers.set()
    store._writer.join(100)
    assert store.finish()
    assert store.newest().local_step == 10


def test_trees_are_restored_without_pickle():
    tree = {
        "a": [1, 2.5, None, True, ("x", {3: torch.ones(2)})],
        4: {"nested": torch.tensor(1, dtype=torch.int64)},
    }
    tensors = {}
    back = unpack(json.loads(json.dumps(pack(tree, tensors))), tensors)
    assert back["a"][:4] == [1, 2.5, None, True]
    assert back["a"][4][0] == "x"
    assert torch.equal(back["a"][4][1][3], torch.ones(2))
    assert back[4]["nested"] == 1


def test_a_value_that_cannot_be_saved_is_named():
    with pytest.raises(ConfigError, match="/odd is a object"):
        pack({"odd": object()}, {})
