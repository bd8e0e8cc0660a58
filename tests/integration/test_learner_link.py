"""The library and its link process against a syncer that does what the test says: real processes, real gRPC."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco import transport
from diloco.errors import MismatchError, StaleIncarnationError, UnavailableError
from diloco.spec import Checkpoint, RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.certificates import Authority
from diloco_testing.scripted_syncer import ScriptedSyncer
from diloco_worker import Learner
from diloco_worker.fetch import fetch_model


def make_spec(**changes: object) -> RunSpec:
    fields = {
        "job": "j", "steps": 100, "fragments": 2, "interval": 2, "overlap": 1, "learners": {"eu": 2, "us": 1},
        "learner_checkpoint": Checkpoint(every_steps=1000, keep=2), **changes,
    }  # fmt: skip
    return RunSpec(**fields)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model[2].bias.requires_grad_(False)
    return model


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Set the environment of a learner of this spec at this port."""

    def set_env(spec: RunSpec, port: int, *, name: str = "eu/0", faults: str = "") -> Path:
        (tmp_path / "spec.json").write_text(spec.to_json())
        state = tmp_path / name.replace("/", "-")
        values = {
            "JOB": spec.job, "LEARNER": name, "SYNCER": f"127.0.0.1:{port}", "SPEC": str(tmp_path / "spec.json"),
            "CONFIG": '{"batch": 4}', "STATE": str(state), "FAULTS": faults,
        }  # fmt: skip
        for key, value in values.items():
            monkeypatch.setenv(f"DILOCO_{key}", value)
        return state

    return set_env


def train(
    learner: Learner, model: nn.Module, optimizer: torch.optim.Optimizer, *, tokens: int = 10
) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    learner.step(tokens=tokens, loss=loss)


def step_until(condition, learner, model, optimizer, *, timeout_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        train(learner, model, optimizer)
        time.sleep(0.01)


def flat(syncer: ScriptedSyncer, fragment: int, model: nn.Module) -> np.ndarray:
    """The fragment's parameters as they are in the model."""
    named = dict(model.named_parameters())
    out = np.zeros(syncer.layout.fragments[fragment].elements, np.float32)
    for slot in syncer.layout.fragments[fragment].slots:
        values = named[slot.tensor.name].detach().float().numpy().reshape(-1)
        out[slot.offset : slot.offset + values.size] = values
    return out


def holds(syncer: ScriptedSyncer, fragment: int, model: nn.Module, wanted: np.ndarray) -> bool:
    return np.array_equal(flat(syncer, fragment, model), wanted)


def connected(
    syncer, enter, *, spec=None, seed=0, optimizer=torch.optim.SGD, name="eu/0", faults=""
):
    enter(spec or syncer.spec, syncer.port, name=name, faults=faults)
    model = make_model(seed)
    opt = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return Learner.connect(model, opt, connect_timeout_seconds=30), model, opt


def test_the_first_learner_uploads_its_own_initialisation(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, _ = connected(syncer, enter)
        with learner:
            for index in range(2):
                np.testing.assert_array_equal(syncer.theta[index], flat(syncer, index, model))
            assert {u.header.content for u in syncer.uploads} == {bulk.INITIAL, bulk.CONSTANTS}
            assert (learner.local_step, learner.step_index, learner.name) == (0, 0, "eu/0")
            assert learner.config == {"batch": 4}
        assert syncer.goodbyes == ["Closed"]


def test_a_later_learner_starts_from_the_syncers_model_and_constants(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        first, first_model, _ = connected(syncer, enter)
        first_model[1].running_mean.add_(0)
        first.close()
        learner, model, _ = connected(syncer, enter, seed=1, name="us/0")
        with learner:
            for (name, ours), theirs in zip(
                model.state_dict().items(), first_model.state_dict().values(), strict=True
            ):
                assert torch.equal(ours, theirs), name
            assert learner.index == 1


def test_reports_carry_algorithm_1s_counters_and_offer_only_what_is_open(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            train(learner, model, opt, tokens=7)
            first = syncer.wait(lambda: syncer.reports)[0]
            assert (first.local_step, list(first.steps), list(first.tokens)) == (1, [1, 1], [7, 7])
            assert list(first.offers) == []
            assert first.has_loss
            syncer.open(1)
            step_until(lambda: syncer.reports[-1].offers, learner, model, opt)
            assert list(syncer.reports[-1].offers) == [1]


def test_a_fragment_is_not_offered_at_the_step_that_overwrites_it(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            for round_ in range(1, 6):
                values = np.where(syncer.theta[1] != 0, 0.1 * round_, 0).astype(np.float32)
                syncer.commit(1, values, round_=round_)
                before = learner._applied[1]
                step_until(lambda b=before: learner._applied[1] > b, learner, model, opt)
            step_until(lambda: syncer.reports[-1].offers, learner, model, opt)
            fresh = [r for r in syncer.reports if r.steps[1] == 0]
            assert fresh
            assert all(1 not in r.offers for r in fresh)


def test_what_is_uploaded_belongs_to_the_step_and_counters_in_its_header(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(2)))
        with Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
            syncer.open(0, 1)
            stop = threading.Event()
            pulled = []

            def pull() -> None:
                syncer.wait(lambda: syncer.reports and syncer.reports[-1].offers)
                pulled.extend(syncer.pull(r % 2, round_=r, versions=[]) for r in range(1, 31))
                stop.set()

            puller = threading.Thread(target=pull)
            puller.start()
            while not stop.is_set():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(learner.local_step + 1)
                learner.step(tokens=3)
            puller.join()
        assert len(pulled) == 30
        for upload in pulled:
            header = upload.header
            assert np.unique(upload.values(syncer.layout)[: 1500 * 1500]).tolist() == [
                header.local_step
            ]
            assert (header.steps, header.tokens) == (header.local_step, 3 * header.local_step)


def test_a_pull_is_answered_with_the_exact_delta_of_the_reported_step(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            upload = syncer.pull(1, round_=1)
            header = upload.header
            assert header.content == bulk.DELTA
            assert (header.base.epoch, header.base.step) == (1, 0)
            assert header.local_step == learner.local_step
            assert (header.steps, header.tokens) == (learner.local_step, 10 * learner.local_step)
            expected = syncer.theta[1] - flat(syncer, 1, model)
            np.testing.assert_array_equal(upload.values(syncer.layout), expected)
            slot = syncer.layout.fragments[1].slots[0]
            norm = np.linalg.norm(expected[slot.offset : slot.end].astype(np.float64))
            assert header.norms[0] == pytest.approx(norm, rel=1e-6)


def test_a_result_overwrites_its_fragment_only_and_resets_its_counters(enter):
    with ScriptedSyncer(make_spec(wire_down="FP32")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: learner.local_step == 3, learner, model, opt)
            wanted = np.where(syncer.theta[1] != 0, 0.25, 0).astype(np.float32)
            syncer.commit(1, wanted, round_=1)
            step_until(lambda: holds(syncer, 1, model, wanted), learner, model, opt)
            applied_at = learner.local_step
            train(learner, model, opt)
            report = syncer.wait(lambda: [r for r in syncer.reports if r.local_step > applied_at])[
                0
            ]
            assert (report.steps[0], report.steps[1]) == (applied_at + 1, 1)
            assert (report.tokens[0], report.tokens[1]) == (10 * (applied_at + 1), 10)


def test_the_next_delta_is_against_what_was_received(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32", wire_down="BF16")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            train(learner, model, opt)
            rng = np.random.default_rng(0)
            values = np.where(syncer.theta[0] != 0, rng.normal(size=syncer.theta[0].size), 0)
            received = torch.from_numpy(values).float().bfloat16().float().numpy()
            syncer.commit(0, values, round_=2)
            step_until(lambda: holds(syncer, 0, model, received), learner, model, opt)
            applied_at = learner.local_step
            step_until(
                lambda: syncer.reports[-1].local_step > applied_at and 0 in syncer.reports[-1].offers,
                learner, model, opt,
            )  # fmt: skip
            upload = syncer.pull(0, round_=4)
            assert (upload.header.base.epoch, upload.header.base.step) == (1, 2)
            assert upload.header.steps == upload.header.local_step - applied_at
            np.testing.assert_array_equal(
                upload.values(syncer.layout), received - flat(syncer, 0, model)
            )


def test_error_feedback_is_used_up_by_a_merged_round_and_not_by_one_that_is_pulled_again(enter):
    with ScriptedSyncer(make_spec(wire_up="Int4", error_feedback=True)) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            delta = syncer.theta[0] - flat(syncer, 0, model)
            first = syncer.pull(0, round_=1, attempt=1).values(syncer.layout)
            again = syncer.pull(0, round_=1, attempt=2).values(syncer.layout)
            np.testing.assert_array_equal(first, again)
            later = syncer.pull(0, round_=3).values(syncer.layout)
            lost = np.linalg.norm(delta - first)
            assert lost > 0
            # Without feedback the same values would be lost twice.
            assert np.linalg.norm(2 * delta - first - later) < 1.5 * lost


def test_a_version_the_syncer_no_longer_has_is_answered_whole(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            upload = syncer.pull(0, round_=1, versions=[(9, 9)])
            assert (upload.header.content, upload.header.format) == (bulk.WHOLE, bulk.FP32)
            np.testing.assert_array_equal(upload.values(syncer.layout), flat(syncer, 0, model))


def test_what_was_not_committed_is_forgotten(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            result = syncer.commit(0, np.full_like(syncer.theta[0], 9), round_=1)
            result.committed = False
            wanted = np.where(syncer.theta[1] != 0, 0.5, 0).astype(np.float32)
            syncer.commit(1, wanted, round_=2)
            step_until(lambda: holds(syncer, 1, model, wanted), learner, model, opt)
            assert learner._ledger.steps == [learner.local_step, 0]
            assert not (flat(syncer, 0, model) == 9).any()


def test_a_damaged_chunk_of_a_result_is_asked_for_again(enter):
    hit = []

    def damage(index: int, message: bytes) -> bytes:
        if not hit:
            hit.append(index)
            return message[:-1] + bytes([message[-1] ^ 1])
        return message

    with ScriptedSyncer(make_spec(wire_down="FP32")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.damage = damage
            wanted = np.where(syncer.theta[0] != 0, 0.125, 0).astype(np.float32)
            syncer.commit(0, wanted, round_=1)
            step_until(lambda: holds(syncer, 0, model, wanted), learner, model, opt)
            assert hit
            assert list(syncer.downloads[-1].chunks) == [0]


@pytest.mark.parametrize("fault", ["corrupt-chunk=0", "truncate", "repeat", "reorder"])
def test_an_upload_that_is_harmed_on_the_way_arrives_whole(enter, fault):
    spec = make_spec(wire_up="FP32")
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter, faults=f"upload:{fault}")
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            upload = syncer.pull(0, round_=1)
            expected = syncer.theta[0] - flat(syncer, 0, model)
            np.testing.assert_array_equal(upload.values(syncer.layout), expected)
            assert upload.damaged == (1 if fault in ("corrupt-chunk=0", "truncate") else 0)
            assert len(upload.order) == (2 if fault == "repeat" else 1)


def test_a_delta_with_nan_is_declined_and_training_goes_on(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            fragment = next(
                f.index
                for f in syncer.layout.fragments
                if "0.weight" in [s.tensor.name for s in f.slots]
            )
            upload = syncer.pull(fragment, round_=1)
            assert np.isnan(upload.header.norms).all()
            assert not upload.payloads
            wanted = np.where(syncer.theta[fragment] != 0, 0.5, 0).astype(np.float32)
            syncer.commit(fragment, wanted, round_=1)
            step_until(lambda: holds(syncer, fragment, model, wanted), learner, model, opt)


def test_a_broken_session_is_opened_again_with_the_same_incarnation(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: syncer.reports, learner, model, opt)
            before = flat(syncer, 0, model)
            syncer.end_session(UnavailableError("gone for a moment"))
            syncer.wait(lambda: len(syncer.hellos) == 2)
            assert syncer.hellos[1].incarnation == 1
            np.testing.assert_array_equal(before, flat(syncer, 0, model))
            seen = len(syncer.reports)
            step_until(lambda: len(syncer.reports) > seen, learner, model, opt)


def test_a_new_syncer_on_the_same_port_is_found_and_training_never_stops(enter):
    spec = make_spec()
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        step_until(lambda: syncer.reports, learner, model, opt)
    with learner:
        train(learner, model, opt)
        with ScriptedSyncer(spec, port=syncer.port, epoch=2, initialised=True) as second:
            second.theta, second.versions = syncer.theta, [(1, 0), (1, 0)]
            step_until(lambda: second.reports, learner, model, opt)
            assert second.reports[0].local_step > 1
            second.open(0, 1)
            step_until(lambda: second.reports[-1].offers, learner, model, opt)
            upload = second.pull(0, round_=1)
            assert (upload.header.epoch, upload.header.content) == (2, bulk.DELTA)


def test_a_killed_link_is_replaced_and_keeps_base_and_incarnation(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: syncer.reports, learner, model, opt)
            os.kill(learner._link.pid, signal.SIGKILL)
            step_until(lambda: len(syncer.hellos) == 2, learner, model, opt)
            assert syncer.hellos[1].incarnation == 1
            syncer.open(0, 1)
            step_until(lambda: syncer.reports[-1].offers, learner, model, opt)
            upload = syncer.pull(0, round_=1)
            assert upload.header.content == bulk.DELTA
            np.testing.assert_array_equal(
                upload.values(syncer.layout), syncer.theta[0] - flat(syncer, 0, model)
            )


def test_a_stopped_link_never_makes_a_step_wait(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            os.kill(learner._link.pid, signal.SIGSTOP)
            longest = 0.0
            for _ in range(2000):
                began = time.monotonic()
                learner.step(tokens=1)
                longest = max(longest, time.monotonic() - began)
            os.kill(learner._link.pid, signal.SIGCONT)
            assert longest < 0.25
            reached = learner.local_step
            step_until(lambda: syncer.reports[-1].local_step > reached, learner, model, opt)


def test_complete_ends_the_loop_with_a_goodbye(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        assert not learner.done
        syncer.say(complete=pb.Complete(step=100))
        step_until(lambda: learner.done, learner, model, opt)
        assert syncer.goodbyes == ["Complete"]
        assert learner.step_index == 100


def test_another_model_is_refused_for_good_with_the_difference(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.refusal = MismatchError("parameter 0.weight has shape [16, 9] instead of [16, 8]")
        with pytest.raises(SystemExit) as stopped:
            connected(syncer, enter)
        assert stopped.value.code == 78
        assert "0.weight has shape [16, 9]" in capfd.readouterr().err


def test_a_syncer_that_never_comes_means_try_again(enter, capfd):
    enter(make_spec(), 1)
    model = make_model()
    with pytest.raises(SystemExit) as stopped:
        Learner.connect(
            model, torch.optim.SGD(model.parameters(), lr=0.1), connect_timeout_seconds=1.5
        )
    assert stopped.value.code == 75
    assert "no syncer within" in capfd.readouterr().err


def test_a_process_that_was_replaced_stops(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        syncer.end_session(StaleIncarnationError("eu/0 joined again as incarnation 2"))
        with pytest.raises(SystemExit) as stopped:
            step_until(lambda: False, learner, model, opt)
        assert stopped.value.code == 75
        assert "joined again as incarnation 2" in capfd.readouterr().err


def test_sigterm_leaves_cleanly_with_a_checkpoint_that_the_next_life_takes(enter):
    spec = make_spec()
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
        syncer.step = 40
        syncer.open()
        step_until(lambda: learner.step_index == 40, learner, model, opt)
        os.kill(os.getpid(), signal.SIGTERM)
        assert learner.done
        assert syncer.goodbyes == ["SIGTERM"]
        left_at = learner.local_step
        syncer.welcome = {"use_checkpoint": True, "local_step": left_at + 2}
        again, model2, opt2 = connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)
        with again:
            hello = syncer.hellos[-1]
            assert (hello.local_step, hello.checkpoint_step, hello.incarnation) == (left_at, 40, 0)
            for a, b in zip(model.parameters(), model2.parameters(), strict=True):
                assert torch.equal(a, b)
            assert opt2.state_dict()["state"][0]["step"] == left_at
            assert again.local_step == left_at + 2
            syncer.open(0, 1)
            step_until(lambda: syncer.reports[-1].offers, again, model2, opt2)
            upload = syncer.pull(0, round_=50)
            assert upload.header.content == bulk.WHOLE
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


SCRIPT = """
import os, sys, time, torch
from torch import nn
from diloco_worker import Learner
from diloco_worker.fetch import fetch_model
model = nn.Linear(64, 64)
learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("link", learner._link.pid, flush=True)
while not learner.done:
    time.sleep(0.01)
    learner.step(tokens=1)
print("left", flush=True)
"""


@pytest.fixture
def script():
    """A training script as a process of its own; killed at the end of the test whatever happens."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def is_gone(pid: int) -> bool:
    """Dead, though perhaps not yet reaped by whoever inherited it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


@pytest.fixture
def served(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        enter(syncer.spec, syncer.port)
        yield syncer


@pytest.mark.parametrize("stuck", [False, True])
def test_no_link_outlives_its_trainer_even_one_that_is_stuck(served, script, stuck):
    link = int(script.stdout.readline().split()[1])
    assert not is_gone(link)
    if stuck:
        os.kill(link, signal.SIGSTOP)
    script.kill()
    served.wait(lambda: is_gone(link))


def test_a_script_that_is_told_to_stop_leaves_and_exits_with_0(served, script):
    link = int(script.stdout.readline().split()[1])
    served.wait(lambda: served.reports)
    script.send_signal(signal.SIGTERM)
    assert script.wait(30) == 0
    assert script.stdout.readline() == "left\n"
    assert is_gone(link)
    assert served.goodbyes == ["SIGTERM"]


def test_signals_to_the_whole_group_leave_the_goodbye_to_the_trainer(served, script):
    link = int(script.stdout.readline().split()[1])
    served.wait(lambda: served.reports)
    os.kill(link, signal.SIGTERM)
    os.kill(link, signal.SIGINT)
    script.send_signal(signal.SIGTERM)
    assert script.wait(30) == 0
    assert served.goodbyes == ["SIGTERM"]


def test_the_users_own_sigterm_handler_is_called_too_and_comes_back(enter):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        with ScriptedSyncer(make_spec()) as syncer:
            learner, *_ = connected(syncer, enter)
            os.kill(os.getpid(), signal.SIGTERM)
            assert learner.done
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_while_waiting_for_a_syncer_ends_the_loop_before_it_begins(enter):
    enter(make_spec(), 1)
    model = make_model()
    alarm = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert learner.done
    alarm.join()


def test_bf16_parameters_send_no_rounding_as_progress(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32", wire_down="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.Linear(32, 4, dtype=torch.bfloat16)
        with Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
            syncer.open(0, 1)
            values = np.where(syncer.theta[0] != 0, np.float32(1 / 3), 0).astype(np.float32)
            syncer.commit(0, values, round_=1)
            deadline = time.monotonic() + 30
            while (
                learner._applied[0] < 2 or not syncer.reports or 0 not in syncer.reports[-1].offers
            ):
                assert time.monotonic() < deadline
                learner.step(tokens=1)
                time.sleep(0.01)
            upload = syncer.pull(0, round_=2)
            assert upload.header.content == bulk.DELTA
            assert (upload.header.base.epoch, upload.header.base.step) == (1, 1)
            assert not upload.values(syncer.layout).any()


def test_a_syncer_that_lost_everything_is_given_the_model_as_it_is_now(enter):
    spec = make_spec()
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        step_until(lambda: syncer.reports, learner, model, opt)
    with learner, ScriptedSyncer(spec, port=syncer.port, epoch=2) as second:
        step_until(lambda: second.initialised, learner, model, opt)
        assert not np.array_equal(second.theta[0], syncer.theta[0])
        step_until(lambda: second.reports, learner, model, opt)


def test_a_job_that_is_complete_already_is_left_at_once(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.complete = True
        learner, *_ = connected(syncer, enter)
        assert learner.done
        assert syncer.goodbyes == ["Complete"]


def test_an_observer_gets_every_tensor_under_every_name(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.ModuleDict(
            {"e": nn.Embedding(5, 4), "h": nn.Linear(4, 5, bias=False), "n": nn.BatchNorm1d(4)}
        )
        model["h"].weight = model["e"].weight
        model["n"].half()
        Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)).close()
        status = pb.StatusReply(tensors=syncer.hellos[0].tensors)
        syncer.step = 12
        with transport.channel(f"127.0.0.1:{syncer.port}", tls=None, purpose="bulk") as channel:
            step, tensors = fetch_model(channel, status=status, spec=syncer.spec)
        assert step == 12
        assert tensors.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert tensors[name].shape == value.shape
            assert np.array_equal(tensors[name], value.numpy()), name


def test_every_step_leaves_a_line(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            for _ in range(3):
                train(learner, model, opt, tokens=5)
        path = Path(os.environ["DILOCO_STATE"]) / "steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["localStep"] for line in lines] == [1, 2, 3]
        assert lines[-1].keys() == {
            "time", "incarnation", "localStep", "globalStep", "tokens", "loss", "seconds", "syncSeconds",
            "queuedSeconds",
        }  # fmt: skip
        assert lines[0]["tokens"] == 5


def test_heartbeats_go_out_while_the_trainer_is_silent(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, *_ = connected(syncer, enter)
        with learner:
            syncer.wait(lambda: syncer.heartbeats >= 3)


def test_without_a_job_the_script_runs_alone(monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    model = make_model()
    learner = Learner.connect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), standalone_steps=3
    )
    while not learner.done:
        learner.step(tokens=1)
    assert (learner.step_index, learner.local_step, learner.spec) == (3, 3, None)


def test_the_link_does_not_load_torch():
    code = "import sys, diloco_worker.link, diloco_worker.fetch; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_metrics_are_served_by_the_link(enter, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("DILOCO_METRICS_PORT", str(port))
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: learner.local_step == 3, learner, model, opt)
            syncer.wait(lambda: syncer.reports[-1].local_step == 3)
            deadline = time.monotonic() + 20
            text = ""
            # The link counts a report after it has handed it on.
            while "diloco_learner_steps_total 3.0" not in text:
                assert time.monotonic() < deadline, text
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    text = answer.read().decode()
            assert "diloco_learner_tokens_total 30.0" in text


def test_with_tls_files_everything_is_encrypted(enter, monkeypatch, tmp_path):
    authority = Authority()
    server = transport.Tls.load(authority.issue(tmp_path / "server"))
    monkeypatch.setenv("DILOCO_TLS", str(authority.issue(tmp_path / "client")))
    with ScriptedSyncer(make_spec(), tls=server) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: syncer.reports, learner, model, opt)


def test_missing_tls_files_are_named_and_not_tried_again(enter, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("DILOCO_TLS", str(tmp_path))
    with ScriptedSyncer(make_spec()) as syncer:
        with pytest.raises(SystemExit) as stopped:
            connected(syncer, enter)
        assert stopped.value.code == 78
        assert "tls.crt" in capfd.readouterr().err


def test_a_model_with_fewer_tensors_than_fragments_is_refused_with_the_number(enter, capfd):
    enter(make_spec(fragments=9, interval=9), 1)
    model = make_model()
    with pytest.raises(SystemExit) as stopped:
        Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert stopped.value.code == 78
    assert "9 is more than the 5 trained tensors" in capfd.readouterr().err
