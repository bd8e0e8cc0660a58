"""
Ranks of a learner on devices that do their work late: the real trainers, link decisions and encoder.

As in test_device_replica.py, the devices are no GPUs. What is shown is that nothing is read or reused before it is
complete, that all ranks do the same at the same step, and that no step waits for a device or for another rank.
"""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch

from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners import late_learner, late_ranks
from diloco_testing.learners.late_learner import SPEC, Net
from diloco_testing.learners.late_ranks import LateRanks
from diloco_testing.learners.rank_threads import in_ranks
from diloco_testing.learners.slow_device import SlowDevice, SlowEvent
from diloco_testing.properties import seeds
from diloco_worker.core import events as ev
from diloco_worker.core import shard_slices
from diloco_worker.core.agreement import HOME
from diloco_worker.trainer import rank_replica

STEPS = 200
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """Small tensors are divided among the ranks, too: of some, the parts are not contiguous."""
    monkeypatch.setattr(shard_slices, "DIVIDED_ELEMENTS", 64)


def check_models(learner: LateRanks) -> None:
    learner.finish()
    expected = learner.shadow.state_dict()
    for model in learner.models:
        for name, found in model.state_dict().items():
            assert torch.equal(found, expected[name]), name


@pytest.mark.parametrize(
    ("ranks", "registers"),
    [
        pytest.param(2, True, id="2-registered"),
        pytest.param(3, False, id="3-pinned"),
        pytest.param(2, False, id="2-pinned", marks=pytest.mark.slow),
        pytest.param(3, True, id="3-registered", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", seeds(1, range(4)))
def test_over_hundreds_of_steps_uploads_are_whole_and_replicas_equal(
    monkeypatch, tmp_path, seed, ranks, registers
):
    learner = LateRanks(monkeypatch, tmp_path, seed=seed, ranks=ranks, registers=registers)
    chance = random.Random(seed)
    for _ in range(STEPS):
        learner.step()
        learner.pass_time(chance.choice((20, 90, 200, 400)))
        learner.link.turn()
        if chance.random() < 0.01:
            learner.link.die()
    learner.check_uploads()
    check_models(learner)
    assert len(learner.link.uploads) > STEPS / 30
    assert bulk.DELTA in {upload.header.content for upload in learner.link.uploads}
    results = len(learner.link.results) - len(learner.plain.layout.fragments)
    assert results > STEPS / 10
    assert learner.link.refused < len(learner.link.uploads) / 10
    learner.close()
    assert [device.registered for device in learner.devices] == [0] * ranks


def test_on_fast_devices_steps_are_offered_two_and_results_applied_three_steps_later(
    monkeypatch, tmp_path
):
    learner = LateRanks(monkeypatch, tmp_path, seed=0, ranks=2)
    learner.link._random.random = lambda: 0.6  # every state arrives, no read is long, no merge
    placed = {}
    for step in range(1, 31):
        learner.step()
        learner.finish()
        learner.link.turn()
        if step % 2:
            learner.link._merge(step // 2 % len(learner.plain.layout.fragments))
            placed |= {key: step for key in learner.link.results if key not in placed}
    reports = learner.link.reports
    assert [report.local_step for report in reports][-10:] == [*range(19, 29)]
    # Those without a result that is on its way.
    assert sum(bool(report.offers) for report in reports) > 10
    # Rank 0 finds a result in the next step, and plans the one after that: it is fetched there, and applied 3 later.
    waited = [at - placed[key] for key, at in learner.applied_at.items() if key[1] > 1]
    assert len(waited) > 8
    assert {*waited} == {5}
    learner.check_uploads()
    check_models(learner)
    learner.close()


def test_slow_devices_delay_reports_and_stop_no_step(monkeypatch, tmp_path):
    learner = LateRanks(monkeypatch, tmp_path, seed=1, ranks=2)
    for _ in range(20):
        learner.step()  # the devices do nothing
        learner.link.turn()
    assert max((report.local_step for report in learner.link.reports), default=0) <= 2
    learner.devices[0].finish()
    for _ in range(4):
        learner.step()
        learner.link.newest(now=0)
    assert max((report.local_step for report in learner.link.reports), default=0) <= 2, (
        "the other device has not copied its part"
    )
    for _ in range(8):  # the link misses some states
        learner.finish()
        learner.step()
        learner.link.newest(now=0)
    assert max(report.local_step for report in learner.link.reports) >= 24
    learner.check_uploads()
    check_models(learner)
    learner.close()


def test_a_whole_model_that_is_requested_while_copies_are_under_way_is_of_one_later_step(
    monkeypatch, tmp_path
):
    learner = LateRanks(monkeypatch, tmp_path, seed=2, ranks=2)
    for _ in range(12):
        learner.step()
        learner.pass_time(60)
        learner.link.turn()
    begun = learner.trainer._replica._transfers._under_way
    while not any(boundary.copies and not boundary.event.done() for boundary in begun):
        learner.step()
        learner.link.turn()
    learner.link._handle(ev.InitialRequested())
    learner.link._new = learner.link._protocol.link_state
    core, shared = learner.trainer._core, learner.trainer._replica.shared
    asked = core.initial_copied
    for _ in range(4):
        learner.step()  # it waits for nothing, so it copies no model
    assert core.initial_copied == asked
    while core.initial_copied == asked:
        assert learner.trainer.local_step < 60
        learner.finish()
        learner.link._end_reads()
        learner.step(waits=True)
    step = learner.trainer.local_step
    for fragment in range(len(learner.plain.layout.fragments)):
        assert np.array_equal(shared.place(fragment, HOME), learner.history[fragment, step])
        assert shared.host_copy(fragment).local_step == step
    for _ in range(60):
        learner.step()
        learner.pass_time(90)
        learner.link.turn()
    learner.check_uploads()
    assert learner.link.reports[-1].initial_copied == asked + 1
    check_models(learner)
    learner.close()


def test_a_rank_that_ends_after_a_failure_does_not_wait_for_its_device(monkeypatch, tmp_path):
    """The stream that trains may be in a collective with a rank that has died, and copies come after it."""
    learner = LateRanks(monkeypatch, tmp_path, seed=3, ranks=2)
    for _ in range(20):
        learner.step()
        learner.link.turn()
    assert learner.trainers[1]._replica._transfers._under_way

    def never(event) -> None:
        raise AssertionError("waits for a device that never ends")

    monkeypatch.setattr(SlowEvent, "wait", never)
    learner.trainers[1].close(ValueError("in the program"))
    learner.trainers[0].close()


# ---------------------------------------------------------------- which replica a rank gets


def built(monkeypatch, devices: list[SlowDevice | None]) -> list:
    """The replicas of ranks, on these devices; None: on the CPU."""
    models = [Net() for _ in devices]
    where = {id(model): {CUDA} if d else set() for model, d in zip(models, devices, strict=True)}
    monkeypatch.setattr(rank_replica, "devices_of", lambda model: (where[id(model)], set()))
    waiting = [device for device in devices if device is not None]
    monkeypatch.setattr(rank_replica, "CudaDevice", lambda _: waiting.pop())
    return in_ranks(
        len(devices), lambda group: rank_replica.replica_of(models[group.rank], SPEC, group)
    )


def test_ranks_on_gpus_copy_beside_the_training(monkeypatch, caplog):
    replicas = built(monkeypatch, [SlowDevice(0), SlowDevice(1)])
    assert replicas[0].devices == replicas[1].devices
    for replica in replicas:
        assert replica._transfers is not None
        assert replica.spares == 4 * min(SPEC.overlap + 4, SPEC.fragments)
        replica.close()
    assert caplog.records == []


def test_ranks_on_the_cpu_copy_at_once(monkeypatch):
    replicas = built(monkeypatch, [None, None])
    for replica in replicas:
        assert replica.devices is None
        assert replica.end(7, []) == 7
        replica.close()


@pytest.mark.parametrize("undoing", [[0, 1], [1], []])
def test_a_program_that_undoes_results_is_named_by_rank_0_and_no_step_waits(
    monkeypatch, tmp_path, caplog, undoing
):
    """It writes a vector, or master weights, to the model of these ranks in each step."""
    learner = LateRanks(monkeypatch, tmp_path, seed=2, ranks=2)
    kept = {
        id(learner.models[rank]): [p.detach().clone() for p in learner.models[rank].parameters()]
        for rank in undoing
    }
    for tensor in itertools.chain(*kept.values()):
        tensor.on_device = True

    def write(model, step):
        if id(model) not in kept:
            late_learner.update(model, step)
            return
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), kept[id(model)], strict=True):
                parameter.copy_(values + 1e-4 * step)

    monkeypatch.setattr(late_ranks, "update", write)
    chance = random.Random(2)
    for _ in range(STEPS):
        learner.step()
        learner.pass_time(chance.choice((20, 90, 200, 400)))
        learner.link.turn()
    assert [t._rank for t in learner.trainers if t._replica.findings] == undoing
    lines = [r.getMessage() for r in caplog.records if "were undone" in r.getMessage()]
    assert len(lines) == bool(undoing)
    problem = learner.trainer._core.state().problem_text
    assert problem == "".join(lines)
    assert problem.startswith("the last 4 results of merges were undone" if undoing else "")
    assert problem.endswith("; noticed in rank 1") or undoing != [1]
    learner.close()


def test_memory_that_cannot_be_registered_is_named(monkeypatch, caplog):
    (replica,) = built(monkeypatch, [SlowDevice(0, registers=False)])
    (found,) = [r.getMessage() for r in caplog.records]
    assert found.startswith("cudaHostRegister failed: copies go through")
    replica.close()


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([SlowDevice(0), SlowDevice(1, registers=False, pins=False)],
         "rank [01]: there is no memory for copies beside the training: no memory"),
        ([None, SlowDevice(0)], "rank 1: other ranks train on the CPU, or on several devices each"),
    ],
)  # fmt: skip
def test_if_one_rank_cannot_copy_beside_the_training_none_does(monkeypatch, caplog, devices, line):
    replicas = built(monkeypatch, devices)
    for replica in replicas:
        assert replica._transfers is None
        assert replica.devices is None
        assert replica.end(7, []) == 7
        replica.close()
    assert [device.registered for device in devices if device is not None] in ([0], [0, 0])
    for found in (r.getMessage() for r in caplog.records):
        assert re.fullmatch(f"{line}; each step waits until its fragments are copied", found)
    assert len(caplog.records) == len(replicas)


def test_a_rank_whose_tensors_are_on_several_devices_states_that_its_steps_wait(
    monkeypatch, caplog
):
    where = {CUDA}, {torch.device("cpu")}
    monkeypatch.setattr(rank_replica, "devices_of", lambda _: where)
    (replica,) = in_ranks(1, lambda group: rank_replica.replica_of(Net(), SPEC, group))
    assert replica.devices is None
    replica.close()
    (found,) = [r.getMessage() for r in caplog.records]
    assert found == (
        "trained parameters and buffers are on cpu, cuda:0; each step waits until its fragments are copied"
    )
