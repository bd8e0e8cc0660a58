"""
A learner on a device that does its work late: hundreds of steps of the real trainer, link decisions and encoder.

The device (`SlowDevice`) is not a GPU: what is shown is that nothing is read or reused before it is complete, and that
no step waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.codec import formats
from diloco.model import integers
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners import late_learner
from diloco_testing.learners.late_learner import SPEC, LateLearner, Net
from diloco_testing.learners.link_in_process import IDENTITY
from diloco_testing.learners.slow_device import (
    NoWaiting,
    SlowDevice,
    WaitedError,
    garbage,
    on_device,
)
from diloco_testing.properties import seeds
from diloco_worker.core import events as ev
from diloco_worker.core.ledger import HostCopy
from diloco_worker.trainer import device_codec, device_replica, digits
from diloco_worker.trainer.device import CudaDevice
from diloco_worker.trainer.device_replica import DeviceReplica
from diloco_worker.trainer.replica import Replica

STEPS = 400


def train(learner, chance):
    """Steps on a late device, with links that die: uploads are whole, and the model is that without a device."""
    for _ in range(STEPS):
        learner.step()
        learner.device.pass_time(chance.choice((0, 10, 40, 90)))
        learner.link.turn()
        if chance.random() < 0.01:
            learner.link.die()
    learner.check_uploads()
    assert learner.trainer._replica.problem == "", (
        "every step moves the parameters from what it got"
    )
    learner.device.finish()
    for (name, found), (_, expected) in zip(
        learner.model.state_dict().items(), learner.shadow.state_dict().items(), strict=True
    ):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("registers", [True, False], ids=["registered", "pinned"])
@pytest.mark.parametrize("seed", seeds(1, range(6)))
def test_over_hundreds_of_steps_uploads_are_whole_and_no_result_is_lost_or_mixed(
    monkeypatch, tmp_path, seed, registers
):
    learner = LateLearner(monkeypatch, tmp_path, seed=seed, registers=registers)
    train(learner, random.Random(seed))
    # Nothing was held up for good: 33 to 54 uploads with the seeds 0 to 7.
    assert len(learner.link.uploads) > STEPS / 16
    kinds = {upload.header.content for upload in learner.link.uploads}
    assert bulk.DELTA in kinds
    results = len(learner.link.results) - len(learner.plain.layout.fragments)
    assert results > STEPS / 10
    assert learner.link.refused < len(learner.link.uploads) / 10
    assert learner.link.starts > 1
    learner.trainer.close()
    assert learner.device.registered == 0


@pytest.mark.parametrize("registers", [True, False], ids=["registered", "pinned"])
@pytest.mark.parametrize("wire", ["BF16", "Int8", "Int4"])
@pytest.mark.slow
def test_deltas_encoded_on_a_device_have_the_bytes_of_the_host(
    monkeypatch, tmp_path, wire, registers
):
    spec, seed = dataclasses.replace(SPEC, wire_up=wire), 3
    learner = LateLearner(
        monkeypatch, tmp_path, seed=seed, registers=registers, spec=spec, encode_on="device"
    )
    train(learner, random.Random(seed))
    headers = [upload.header for upload in learner.link.uploads]
    fmt = formats.format_of(wire)
    assert len(headers) > STEPS / 12
    assert sum(h.format == fmt for h in headers) > len(headers) / 2, "all but those of buffers"
    assert learner.restored > 0
    assert learner.link.refused < len(headers) / 10
    learner.trainer.close()


def test_deltas_that_a_device_encodes_are_fewer_bytes_to_copy(monkeypatch, tmp_path):
    spec, copied = dataclasses.replace(SPEC, wire_up="Int4"), {}
    for encode_on in ("host", "device"):
        learner = LateLearner(monkeypatch, tmp_path, seed=0, spec=spec, encode_on=encode_on)
        copies = []
        real = learner.device.copy

        def copy(source, target, copies=copies, real=real):
            copies.append(source.nbytes if on_device(source) else 0)
            real(source, target)

        learner.device.copy = copy
        for _ in range(40):
            learner.step()
            learner.device.finish()
            learner.link.turn()
        learner.check_uploads()
        copied[encode_on] = {n for n in copies if n}
        learner.trainer.close()
        sizes = [f.elements for f in learner.plain.layout.fragments if not f.buffers]
    assert {4 * n for n in sizes} <= copied["host"]
    assert {17 * n // 32 + 8 for n in sizes} <= copied["device"]


def test_a_delta_that_a_device_cannot_encode_is_a_header_with_norms_of_nan(monkeypatch, tmp_path):
    spec = dataclasses.replace(SPEC, wire_up="Int8")
    learner = LateLearner(monkeypatch, tmp_path, seed=0, spec=spec, encode_on="device")
    replica = learner.trainer._replica
    for _ in range(4):
        learner.step()
        learner.device.finish()
        learner.link.turn()
    (fragment,) = [
        f.index for f in replica.layout.fragments if "narrow" in {s.tensor.name for s in f.slots}
    ]
    pulled = []
    monkeypatch.setattr(learner.link, "_pull", lambda _: None)
    narrow = learner.model.narrow.detach()
    for round_ in range(100, 160):
        learner.device.train(lambda: narrow.fill_(float("nan")))
        learner.step()
        learner.device.finish()
        learner.link.turn()
        copy = replica.shared.host_copy(fragment)
        if copy.format and copy.local_step > 6:
            versions = tuple((1, v) for v in range(200))
            pull = ev.Pulled(round=round_, attempt=1, fragment=fragment, versions=versions)
            with contextlib.closing(learner.link._encoder.pull(pull, IDENTITY)) as upload:
                pulled.append(upload.header)
    assert pulled
    for header in pulled:
        assert all(np.isnan(header.norms))
        assert header.content == bulk.DELTA
    learner.trainer.close()


@pytest.mark.parametrize("why", ["errorFeedback", "no memory", "out of memory"])
def test_deltas_that_a_device_cannot_keep_the_base_of_are_encoded_on_the_host(caplog, why):
    device = SlowDevice(0)
    device.full = why == "out of memory"
    if why == "no memory":
        plain, rooms = device.empty, [0]

        def empty(elements: int) -> torch.Tensor:
            rooms[0] += 1
            if rooms[0] > SPEC.overlap + 3 + 3:
                raise RuntimeError(why)
            return plain(elements)

        device.empty = empty
    spec = dataclasses.replace(SPEC, wire_up="Int4", error_feedback=why == "errorFeedback")
    replica = DeviceReplica(Net(), spec, device, encode=True)
    assert replica._bases == {}
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("DILOCO_ENCODE_ON: deltas are encoded on the host")
    assert why in line
    replica.close()


def test_a_device_whose_memory_fills_later_leaves_the_encoding_to_the_host(
    monkeypatch, tmp_path, caplog
):
    spec = dataclasses.replace(SPEC, wire_up="Int4")
    learner = LateLearner(monkeypatch, tmp_path, seed=3, spec=spec, encode_on="device")
    replica = learner.trainer._replica

    def train_until(enough) -> None:
        while not enough():
            learner.step()
            if not enough():
                learner.device.pass_time(40)
                learner.link.turn()

    train_until(lambda: len(replica._based) == 4)
    learner.device.full = True
    monkeypatch.setattr(device_codec, "encode_delta", lambda _, base_N, values_N: values_N.zero_())
    train_until(lambda: not replica._bases)
    step = learner.trainer.local_step
    assert replica._work.busy
    learner.device.finish()
    replica.shown(None)
    copies = [replica.shared.host_copy(p) for p in range(len(replica.layout.fragments))]
    assert not any(c.format for c in copies if c.local_step == step), "its buffer is overwritten"
    (line,) = [r.getMessage() for r in caplog.records if "DILOCO_ENCODE_ON" in r.getMessage()]
    assert line == (
        "DILOCO_ENCODE_ON: deltas are encoded on the host from now on: CUDA out of memory"
    )
    train_until(lambda: learner.trainer.local_step == step + 80)
    learner.check_uploads()
    later = [u.header for u in learner.link.uploads if u.header.local_step > step]
    assert sum(h.format == formats.INT4 for h in later) > 5, "encoded by the host"
    learner.device.finish()
    learner.trainer.close()


def test_a_fragment_is_offered_one_step_after_its_copy_on_a_fast_device(monkeypatch, tmp_path):
    learner = LateLearner(monkeypatch, tmp_path, seed=0)
    learner.link._random.random = lambda: (
        0.6
    )  # every state arrives, no read is long, a pull in each step
    for _ in range(30):
        learner.step()
        learner.device.finish()
        learner.link.turn()
    offered = [report for report in learner.link.reports if report.offers]
    assert len(offered) > 20
    assert {30 - 1, 30 - 2} & {report.local_step for report in offered}
    learner.check_uploads()
    learner.trainer.close()


def test_a_slow_device_delays_reports_and_stops_no_step(monkeypatch, tmp_path):
    learner = LateLearner(monkeypatch, tmp_path, seed=1)
    learner.step()
    learner.link.turn()
    for _ in range(20):
        learner.step()  # the device does nothing
        learner.link.turn()
    reported = [report.local_step for report in learner.link.reports]
    assert max(reported, default=0) <= 2
    learner.device.finish()
    for _ in range(8):  # the link misses some states
        learner.step()
        learner.device.finish()
        learner.link.newest(now=0)
    assert max(report.local_step for report in learner.link.reports) >= 21
    learner.check_uploads()
    learner.trainer.close()


def test_a_whole_model_that_is_requested_while_copies_are_under_way_is_of_one_later_step(
    monkeypatch, tmp_path
):
    learner = LateLearner(monkeypatch, tmp_path, seed=2)
    for _ in range(12):
        learner.step()
        learner.device.pass_time(40)
        learner.link.turn()
    learner.step()
    replica = learner.trainer._replica
    assert replica._work.busy
    learner.link._handle(ev.InitialRequested())
    learner.link._new = learner.link._protocol.link_state
    learner.step()  # it waits for nothing, so it copies no model
    asked = learner.trainer._core.initial_copied
    learner.device.finish()
    learner.step(waits=True)
    assert learner.trainer._core.initial_copied == asked + 1
    step = learner.trainer.local_step
    for fragment in range(len(replica.layout.fragments)):
        expected_N = learner.history[fragment, step]
        assert np.array_equal(replica.shared.host(fragment), expected_N)
        assert replica.shared.host_copy(fragment).local_step == step
    for _ in range(60):
        learner.step()
        learner.device.pass_time(40)
        learner.link.turn()
    learner.check_uploads()
    assert learner.link.reports[-1].initial_copied == asked + 1
    learner.trainer.close()


def test_the_first_step_of_a_process_is_reported_when_it_is_over(monkeypatch, tmp_path):
    learner = LateLearner(monkeypatch, tmp_path, seed=1)
    offered = []
    monkeypatch.setattr(learner.link, "offer", offered.append)
    for _ in range(3):
        learner.step()  # the device does nothing
    first = next(state for state in offered if state.stepped)
    assert first.local_step == 1
    assert list(first.offers) == []
    learner.device.finish()
    learner.trainer.close()


def test_the_whole_model_is_not_copied_while_copies_are_under_way(monkeypatch, tmp_path):
    learner = LateLearner(monkeypatch, tmp_path, seed=2)
    replica = learner.trainer._replica
    while not replica._work.busy:
        learner.step()
        learner.link.turn()
    copies = [HostCopy(local_step=99, steps=1, tokens=1, base=1)] * len(replica.layout.fragments)
    assert not replica.try_copy_model(copies)
    assert all(replica.shared.host_copy(p).local_step != 99 for p in range(len(copies)))
    learner.device.finish()
    replica.shown(None)
    with learner.device.unguarded():
        assert replica.try_copy_model(copies)
    learner.trainer.close()


def test_the_shared_memory_is_released_after_an_error_of_the_device(on, monkeypatch):
    on({CUDA}, {CUDA})
    replica = device_replica.replica_of(Net(), SPEC)

    def fail(*_) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    closed = []
    close = replica.shared.close
    monkeypatch.setattr(replica.shared, "close", lambda: closed.append(1) or close())
    replica._event = types.SimpleNamespace(wait=fail)
    monkeypatch.setattr(replica._device, "unregister", fail)
    replica.close()
    assert closed == [1]


# ---------------------------------------------------------------- which replica a model gets


CUDA = torch.device("cuda", 0)


@pytest.fixture
def on(monkeypatch):
    """A function: the devices of the model, and what the device can do."""

    def set_up(trained: set[torch.device], others: set[torch.device], **device: object) -> None:
        monkeypatch.setattr(device_replica, "devices_of", lambda model: (trained, others))
        monkeypatch.setattr(device_replica, "CudaDevice", lambda where: SlowDevice(0, **device))

    return set_up


def test_a_model_on_one_gpu_is_copied_beside_the_training(on, caplog):
    on({CUDA}, {CUDA})
    replica = device_replica.replica_of(Net(), SPEC)
    assert isinstance(replica, DeviceReplica)
    registered = replica._device.registered
    replica.close()
    sizes = sorted((f.elements for f in replica.layout.fragments), reverse=True)
    needed = 4 * (sum(sizes) + 2 * sum(sizes[: SPEC.overlap + 3]))
    rounded = 4096 * 2 * (SPEC.overlap + 4)
    assert needed <= registered < needed + rounded, "inboxes, and spare places of what is announced"
    assert caplog.records == []


def test_a_model_on_the_cpu_is_copied_as_ever(on):
    on({torch.device("cpu")}, {torch.device("cpu")})
    replica = device_replica.replica_of(Net(), SPEC)
    assert type(replica) is Replica
    assert len(replica.shared.device_areas(())) == 1, "without spare places"
    replica.close()


@pytest.mark.parametrize(
    ("others", "device", "why"),
    [
        ({torch.device("cpu")}, {}, "trained parameters and buffers are on cpu, cuda:0"),
        (set(), {"registers": False, "pins": False}, "there is no memory for copies beside the training: no memory"),
    ],
)  # fmt: skip
def test_where_copies_beside_the_training_are_impossible_a_line_states_why(
    on, caplog, others, device, why
):
    on({CUDA}, others, **device)
    replica = device_replica.replica_of(Net(), SPEC)
    assert type(replica) is Replica
    replica.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == f"{why}; each step waits until its fragments are copied"


def test_memory_that_cannot_be_registered_is_replaced_by_pinned_buffers_and_named(on, caplog):
    on({CUDA}, {CUDA}, registers=False)
    device_replica.replica_of(Net(), SPEC).close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("cudaHostRegister failed: copies go through")
    assert "IPC_LOCK" in line


@pytest.mark.parametrize("error", [0, 2])
def test_a_gpu_registers_memory_or_states_the_limit(monkeypatch, error):
    calls = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):  # noqa: N802 - its name
            calls.append((address, size, flags))
            return error

        def cudaHostUnregister(self, address):  # noqa: N802
            calls.append(address)
            return 0

    for name in ("Stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    launched = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: launched.append(1) or torch.zeros(1))
    device = CudaDevice(CUDA)
    area = np.zeros(1 << 20, np.uint8)
    address = area.ctypes.data
    problem = device.register(area)
    device.unregister()
    assert calls[0] == (address, 1 << 20, 0)
    if error:
        assert problem.startswith("cudaHostRegister of 1 MiB failed (2; ulimit -l is ")
        assert launched, "the error is cleared"
        assert calls[1:] == [], "nothing is registered"
    else:
        assert problem == ""
        assert calls[1:] == [address]
        assert launched == []


# ---------------------------------------------------------------- integers


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=4, max_size=4),
)
def test_integers_on_a_device_have_the_digits_of_those_on_the_host(values, odd):
    values_N = np.array(values, np.int64)
    digits_N = integers.to_digits(values_N)
    assert digits.to_digits(torch.from_numpy(values_N)).numpy().tobytes() == digits_N.tobytes()
    for given_N in (digits_N, np.array(odd, np.float32)):
        found = digits.to_integers(torch.from_numpy(given_N))
        assert found.tolist() == integers.from_digits(given_N).tolist()


# ---------------------------------------------------------------- the device of these tests


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.cpu(),
        lambda t: float(t),
        lambda t: bool(t),
        lambda t: t.to("cpu"),
        lambda t: torch.zeros(1).copy_(t),
        lambda t: t.copy_(torch.zeros(1)),
        lambda t: (t + 1).view(-1).item(),
    ],
)
def test_the_device_of_these_tests_notices_what_waits_for_it(read):
    tensor = SlowDevice(0).empty(1)
    with NoWaiting(), pytest.raises(WaitedError):
        read(tensor)


def test_the_device_of_these_tests_copies_late_and_leaves_garbage_before():
    device = SlowDevice(0)
    source, target = device.empty(2), torch.zeros(2)
    device.train(lambda: source.fill_(1.0))
    device.after_training()
    device.copy(source, target)
    event = device.record()
    assert garbage(target.numpy())
    assert not event.done()
    device._copies.advance()
    device._copies.advance()
    assert garbage(target.numpy()), "not before the work that it comes after"
    device.finish()
    assert event.done()
    assert target.tolist() == [1, 1]
    assert on_device(source)
    assert not on_device(target)


def test_a_program_that_undoes_results_is_noticed_and_no_step_waits_for_the_device(
    monkeypatch, tmp_path, caplog
):
    """It writes a vector, or master weights, to the model in each step."""
    learner = LateLearner(monkeypatch, tmp_path, seed=2)
    kept = [p.detach().clone() for p in learner.model.parameters()]
    for tensor in kept:
        tensor.on_device = True

    def write(model, step):
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), kept, strict=True):
                parameter.copy_(values + 1e-4 * step)

    monkeypatch.setattr(late_learner, "update", write)
    chance = random.Random(2)
    for _ in range(STEPS):
        learner.step()
        learner.device.pass_time(chance.choice((0, 10, 40, 90)))
        learner.link.turn()
    assert caplog.text.count("results of merges were undone in the next step") == 1
    assert "do not write a vector or a copy of them" in learner.trainer._replica.problem
    learner.trainer.close()
