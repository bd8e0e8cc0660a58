"""A learner on a device that does its work late, beside a model that does the same at once."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import nn

from diloco.codec import formats
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners.link_in_process import LinkInProcess
from diloco_testing.learners.slow_device import SlowDevice, garbage, to_device
from diloco_worker import joined
from diloco_worker.joined import JoinedTrainer
from diloco_worker.settings import from_env
from diloco_worker.trainer.device_replica import DeviceReplica
from diloco_worker.trainer.replica import Replica

SPEC = RunSpec(
    job="j", steps=10**6, fragments=5, interval=5, overlap=1, learners={"eu": 1}, wire_up="FP32", wire_down="FP32",
    moving_buffers=("norm.*",),
)  # fmt: skip


class Net(nn.Module):
    """Of every kind of tensor: fp32, bf16, odd sizes, running statistics, an integer that counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(31, 17) for _ in range(4)])
        self.narrow = nn.Parameter(torch.randn(129, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(6, 40).t())
        self.norm = nn.BatchNorm1d(7)


def update(model: nn.Module, step: int) -> None:
    """As an optimizer and a forward pass: every tensor changes in place."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(0.99).add_(0.01 * ((step * 7 + number) % 11) - 0.03)
        model.norm.running_mean.add_(0.5)
        model.norm.num_batches_tracked.add_(1)


class LateLearner:
    """A real trainer on a slow device, and a model that does the same at once."""

    def __init__(
        self, monkeypatch, tmp_path, *, seed: int, registers: bool = True, spec: RunSpec = SPEC,
        encode_on: str = "host",
    ) -> None:  # fmt: skip
        self._prepare(monkeypatch, tmp_path, spec, encode_on=encode_on)
        self.device = SlowDevice(seed, registers=registers)
        self.model = Net()
        to_device(self.model)
        monkeypatch.setattr(
            joined,
            "replica_of",
            lambda model, spec, **how: DeviceReplica(model, spec, self.device, **how),
        )
        links: list[LinkInProcess] = []

        def link(shared) -> LinkInProcess:
            forgets = 0.1 if encode_on == "device" else 0.0
            links.append(LinkInProcess(shared, spec, seed, forgets=forgets))
            return links[0]

        monkeypatch.setattr(joined, "LinkProcess", link)
        monkeypatch.setattr(joined, "Termination", NoSignals)
        self.trainer = JoinedTrainer(from_env(), self.model, [], connect_timeout_seconds=9)
        (self.link,) = links
        self.plain = Replica(self.shadow, spec)
        for fragment in range(len(self.plain.layout.fragments)):
            self._apply_to_shadow(fragment)

    def _prepare(self, monkeypatch, tmp_path, spec: RunSpec, *, encode_on: str = "host") -> None:
        """The environment, and what the model is compared with."""
        self.spec, self.shadow = spec, Net()
        self.history: dict[tuple[int, int], np.ndarray] = {}
        """By (fragment, local step), what its parameters were."""
        self.applied_at: dict[tuple[int, int], int] = {}
        """By (fragment, generation), the local step in which the shadow got a result."""
        self.restored = 0
        """Whole fragments of which a device had encoded the delta."""
        self.based: dict[tuple[int, int], np.ndarray] = {}
        """By (fragment, generation), the base of deltas after it."""
        self.bases: dict[tuple[int, tuple[int, int]], np.ndarray] = {}
        (tmp_path / "spec.json").write_text(spec.to_json())
        for name, value in {
            "JOB": "j", "LEARNER": "eu/0", "SYNCER": "127.0.0.1:1", "SPEC": str(tmp_path / "spec.json"),
            "ENCODE_ON": encode_on,
        }.items():  # fmt: skip
            monkeypatch.setenv(f"DILOCO_{name}", value)

    def step(self, *, waits: bool = False) -> None:
        step = self.trainer.local_step + 1
        self.device.train(lambda: update(self.model, step))
        self._step_shadow(step)
        before = [*self.trainer._core.applied]
        if waits:
            self.device.finish_training()  # what a blocking copy does
        with self.device.no_waiting:
            with self.device.unguarded() if waits else contextlib.nullcontext():
                self.trainer.step(tokens=10)
        self._follow(before)

    def _step_shadow(self, step: int) -> None:
        update(self.shadow, step)
        for fragment in range(len(self.plain.layout.fragments)):
            self.plain._copier.copy_out(fragment)
            self.history[fragment, step] = self.plain.shared.host(fragment).copy()

    def _follow(self, before: list[int]) -> None:
        """The shadow gets the results that were applied."""
        for fragment, generation in enumerate(self.trainer._core.applied):
            if generation != before[fragment]:
                assert generation == before[fragment] + 1
                self._apply_to_shadow(fragment)

    def _apply_to_shadow(self, fragment: int) -> None:
        generation = self.trainer._core.applied[fragment]
        self.applied_at[fragment, generation] = self.trainer.local_step
        inbox_N = self.plain.shared.inbox(fragment)
        inbox_N[:] = self.link.results[fragment, generation]
        self.plain.apply(fragment)
        version = self.trainer._core.ledger.versions[fragment]
        self.bases[fragment, version] = inbox_N.copy()  # with its rounding
        self.based[fragment, generation] = self.bases[fragment, version]

    def base_at(self, fragment: int, step: int) -> np.ndarray:
        """What the fragment had received last before a step."""
        generation = max(g for (p, g), at in self.applied_at.items() if p == fragment and at < step)
        return self.based[fragment, generation]

    def check_uploads(self) -> None:
        """Each upload is of the parameters at the step in its header, against the version in it."""
        for upload in self.link.uploads:
            header = upload.header
            expected_N = self.history[header.fragment, header.local_step]
            if header.content == bulk.DELTA:
                base = header.base.epoch, header.base.step
                expected_N = self.bases[header.fragment, base] - expected_N
            payload = np.empty(formats.encoded_bytes(header.format, expected_N.size), np.uint8)
            formats.encode(header.format, expected_N, payload)
            assert not garbage(upload.values_N)
            if header.content == bulk.DELTA or np.array_equal(upload.values_N, expected_N):
                assert upload.payload == payload.tobytes(), header
            else:  # a device encoded it
                self.restored += 1
                fmt = formats.format_of(self.spec.wire_up)
                base_N = self.base_at(header.fragment, header.local_step)
                delta_N = base_N - expected_N
                formats.encode(fmt, delta_N, payload)
                formats.decode(fmt, payload[: formats.encoded_bytes(fmt, delta_N.size)], delta_N)
                assert np.array_equal(upload.values_N, base_N - delta_N), header
            applied = [
                at
                for (p, _), at in self.applied_at.items()
                if p == header.fragment and at < header.local_step
            ]
            assert header.steps == header.local_step - max(applied)
            assert header.tokens == 10 * header.steps


class NoSignals:
    """In place of `Termination`, which needs the main thread."""

    received = False

    def restore(self) -> None:
        pass
