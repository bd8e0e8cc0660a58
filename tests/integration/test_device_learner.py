"""A learner whose device is late, with its real link process; and the benchmark that measures a real device."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco.codec import formats
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners.linked import applied, holds, make_spec
from diloco_testing.learners.slow_device import SlowDevice, to_device
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner, joined
from diloco_worker.trainer.device_replica import DeviceReplica

ROOT = Path(__file__).parents[2]


def test_uploads_and_results_of_a_learner_on_a_late_device_pass_its_link(enter, monkeypatch):
    device, chance = SlowDevice(3), random.Random(3)
    monkeypatch.setattr(
        joined, "replica_of", lambda model, spec, **how: DeviceReplica(model, spec, device, **how)
    )

    def step(learner: Learner) -> None:
        with device.no_waiting:
            learner.step(tokens=3)
        device.finish_training()  # the next step overwrites the parameters at once
        device.pass_time(chance.choice((0, 2, 30)))
        time.sleep(0.002)

    with ScriptedSyncer(make_spec(wire_up="FP32", wire_down="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(2)))
        to_device(model)
        with Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
            syncer.open(0, 1)
            stop = threading.Event()
            pulled = []

            def pull() -> None:
                syncer.wait(lambda: syncer.reports and len(syncer.reports[-1].offers) == 2)
                pulled.extend(syncer.pull(r % 2, round_=r, versions=[]) for r in range(1, 16))
                stop.set()

            puller = threading.Thread(target=pull)
            puller.start()
            deadline = time.monotonic() + 90
            while not stop.is_set() and time.monotonic() < deadline:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(learner.local_step + 1)
                step(learner)
            puller.join(1)
            assert len(pulled) == 15
            for upload in pulled:
                values_N = upload.values(syncer.layout)[: 300 * 300]
                assert np.unique(values_N).tolist() == [upload.header.local_step]
                assert upload.header.tokens == 3 * upload.header.local_step
            wanted_N = np.where(syncer.theta[1] != 0, 0.25, 0).astype(np.float32)
            before = applied(learner, 1)
            syncer.commit(1, wanted_N, round_=20)
            while applied(learner, 1) == before:
                assert time.monotonic() < deadline
                step(learner)
            assert holds(syncer, 1, model, wanted_N)
            assert max(report.local_step for report in syncer.reports) < learner.local_step


def test_a_delta_that_a_late_device_encoded_passes_the_link(enter, monkeypatch):
    device = SlowDevice(3)
    monkeypatch.setenv("DILOCO_ENCODE_ON", "device")
    monkeypatch.setattr(
        joined,
        "replica_of",
        lambda model, spec, **how: DeviceReplica(model, spec, device, **how),
    )
    with ScriptedSyncer(make_spec(wire_up="Int4", wire_down="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(2)))
        to_device(model)
        with Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
            deadline = time.monotonic() + 90

            def step_until(condition) -> None:
                while not condition():
                    assert time.monotonic() < deadline, "the condition did not become true in time"
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.copy_(torch.linspace(0, learner.local_step + 1, 300))
                    with device.no_waiting:
                        learner.step(tokens=3)
                    device.finish_training()
                    device.pass_time(30)
                    time.sleep(0.002)

            base_N = np.where(syncer.theta[1] != 0, 0.25, 0).astype(np.float32)
            before = applied(learner, 1)
            syncer.commit(1, base_N, round_=20)
            step_until(lambda: applied(learner, 1) != before)
            received_at = learner.local_step
            syncer.open(1)
            step_until(lambda: any(r.local_step > received_at and r.offers for r in syncer.reports))
            pulled = []
            puller = threading.Thread(target=lambda: pulled.append(syncer.pull(1, round_=44)))
            puller.start()
            step_until(lambda: pulled)
            puller.join(1)
    (upload,) = pulled
    assert upload.header.content == bulk.DELTA
    assert upload.header.format == formats.INT4
    line_N = torch.linspace(0, upload.header.local_step, 300).numpy()
    delta_N = base_N.copy()
    delta_N[:90_000] -= np.tile(line_N, 300)
    expected = np.empty(formats.encoded_bytes(formats.INT4, delta_N.size), np.uint8)
    formats.encode(formats.INT4, delta_N, expected)
    assert upload.payloads[0] == expected.tobytes()


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(660)
def test_the_benchmark_of_a_device_runs_at_a_tiny_size_and_states_that_there_is_none():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench_device.py"), "--quick"],
        stdout=subprocess.PIPE, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert torch.cuda.is_available() or "no CUDA device" in done.stdout
    assert "| learner.step(), % of a step |" in done.stdout
    assert "with / without, median of pairs" in done.stdout
