"""Failures of a learner, and leaving: the library and its link process against a scripted syncer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.errors import EXIT_REFUSED, StaleIncarnationError, UnavailableError
from diloco.journal.background import CAPACITY
from diloco.journal.writer import JournalWriter
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.learners.linked import (
    connected,
    flat,
    holds,
    link_pid,
    make_spec,
    step_until,
    train,
)
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker.trainer.runqueue import RunQueue


def test_a_damaged_chunk_of_a_result_is_requested_again(enter):
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
def test_an_upload_with_faults_arrives_completely(enter, fault):
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


def test_a_delta_with_nan_is_declined_and_training_continues(enter):
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


def test_a_new_syncer_on_the_same_port_is_found_while_training_continues(enter):
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
            os.kill(link_pid(learner), signal.SIGKILL)
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
            os.kill(link_pid(learner), signal.SIGSTOP)
            # Not the time that this thread was ready to run but had no core.
            run_queue, longest = RunQueue(), 0.0
            for _ in range(2000):
                started, queued = time.monotonic(), run_queue.seconds()
                learner.step(tokens=1)
                waited = run_queue.seconds() - queued
                longest = max(longest, time.monotonic() - started - waited)
            os.kill(link_pid(learner), signal.SIGCONT)
            run_queue.close()
            assert longest < 0.25
            reached = learner.local_step
            step_until(lambda: syncer.reports[-1].local_step > reached, learner, model, opt)


def test_a_disk_that_hangs_never_makes_a_step_wait(enter, monkeypatch):
    hanging, released = threading.Event(), threading.Event()
    append = JournalWriter.append

    def hang(journal, event):
        hanging.set()
        assert released.wait(300)
        append(journal, event)

    monkeypatch.setattr(JournalWriter, "append", hang)
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            train(learner, model, opt)
            assert hanging.wait(90)
            for _ in range(CAPACITY + 10):
                learner.step(tokens=1)
            assert not released.is_set()
            released.set()
    path = Path(os.environ["DILOCO_STATE"]) / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert CAPACITY <= len(lines) <= CAPACITY + 1
    assert [line["localStep"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_process_that_was_replaced_exits(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        syncer.end_session(StaleIncarnationError("eu/0 joined again as incarnation 2"))
        with pytest.raises(SystemExit) as stopped:
            step_until(lambda: False, learner, model, opt)
        assert stopped.value.code == 75
        assert "joined again as incarnation 2" in capfd.readouterr().err


def test_sigterm_leaves_cleanly_with_a_checkpoint_that_the_next_process_loads(enter):
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


def left_with_a_checkpoint(syncer, enter, *, steps=5):
    """The moments of a learner that left the job after these steps."""
    learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
    assert not learner.resumed
    step_until(lambda: learner.local_step == steps, learner, model, opt)
    moments = opt.state_dict()["state"][0]["exp_avg"].clone()
    os.kill(os.getpid(), signal.SIGTERM)
    assert learner.done
    return moments


@pytest.mark.parametrize("step", [200, 3])
def test_a_learner_with_an_old_checkpoint_keeps_the_state_of_its_optimizers(enter, capfd, step):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        moments = left_with_a_checkpoint(syncer, enter)
        # Much later, or a syncer that has returned to an older snapshot.
        syncer.step, syncer.welcome = step, {"run": "a", "use_checkpoint": False, "local_step": 7}
        theta = syncer.theta[0].copy()
        again, model, opt = connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)
        with again:
            assert again.resumed
            assert again.local_step == 7
            assert opt.state_dict()["state"][0]["step"] == 5
            assert torch.equal(opt.state_dict()["state"][0]["exp_avg"], moments)
            assert holds(syncer, 0, model, theta)
        assert (
            f"the parameters are those of global step {step}; the optimizers continue with the local "
            "checkpoint of local step 5, global step 10" in capfd.readouterr().err
        )


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_learner_does_not_use_a_checkpoint_of_another_run(enter, capfd, use_checkpoint):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        left_with_a_checkpoint(syncer, enter)
        syncer.welcome = {"run": "b", "use_checkpoint": use_checkpoint}
        theta = syncer.theta[0].copy()
        again, model, opt = connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)
        with again:
            assert not again.resumed
            assert not opt.state
            assert holds(syncer, 0, model, theta)
        assert (
            "start with new state: the local checkpoint of local step 5 belongs to another run"
            in (capfd.readouterr().err)
        )


def test_a_learner_with_another_optimizer_trains_on_and_states_why_it_starts_anew(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        left_with_a_checkpoint(syncer, enter)
        syncer.welcome = {"run": "a", "use_checkpoint": True}
        again, model, opt = connected(syncer, enter, seed=5, optimizer=torch.optim.Adam)
        with again:
            assert not again.resumed
            step_until(lambda: again.local_step == 7, again, model, opt)
            assert opt.state_dict()["state"][0]["step"] == 2
        error = capfd.readouterr().err
        assert (
            "the optimizers start with new state: checkpoint-0000000005.safetensors cannot be used"
            in error
        )
        assert "has a torch.optim.adamw.AdamW, this run a torch.optim.adam.Adam" in error


def test_b02_a_learners_state_is_private_and_a_link_in_it_is_not_followed(enter, tmp_path, caplog):
    with ScriptedSyncer(make_spec()) as syncer:
        before = os.umask(0)
        try:
            learner, model, opt = connected(syncer, enter)
            step_until(lambda: learner.local_step == 3, learner, model, opt)
            os.kill(os.getpid(), signal.SIGTERM)
            assert learner.done
        finally:
            os.umask(before)
        state = Path(os.environ["DILOCO_STATE"])
        modes = {path.name: path.stat().st_mode & 0o777 for path in state.rglob("*")}
        assert {path.partition(".")[2] for path in modes} == {"json", "safetensors", "jsonl"}
        assert set(modes.values()) == {0o600}
        assert state.stat().st_mode & 0o777 == 0o700
        # The parameters of another's file are not what this learner continues with.
        newest = max(state.glob("checkpoint-*.safetensors"))
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to(tmp_path / "elsewhere")
        again, _, _ = connected(syncer, enter, seed=5)
        with again:
            assert syncer.hellos[-1].checkpoint_step == 0
            assert syncer.hellos[-1].local_step == 0
        assert newest.name in caplog.text
        assert "found a link, expected a regular file; remove the link" in caplog.text


def test_a_learner_that_loads_its_checkpoint_first_receives_what_was_merged_since(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        merged = np.where(syncer.theta[0] != 0, 0.25, 0).astype(np.float32)
        syncer.step = 40
        syncer.open()
        step_until(lambda: learner.step_index == 40, learner, model, opt)
        syncer.commit(0, merged, round_=40)
        step_until(lambda: holds(syncer, 0, model, merged), learner, model, opt)
        os.kill(os.getpid(), signal.SIGTERM)
        assert learner.done
        # Fragment 1 is merged while no learner is there.
        missed = np.where(syncer.theta[1] != 0, 0.125, 0).astype(np.float32)
        syncer.theta[1], syncer.versions[1] = missed, (1, 44)
        syncer.welcome = {"use_checkpoint": True}
        seen = len(syncer.downloads)
        again, model2, opt2 = connected(syncer, enter, seed=5)
        with again:
            for a, b in zip(model.parameters(), model2.parameters(), strict=True):
                assert torch.equal(a, b), "the checkpoint is loaded"
            syncer.open(0, 1)
            step_until(
                lambda: syncer.reports and 1 in syncer.reports[-1].offers, again, model2, opt2
            )
            upload = syncer.pull(1, round_=50)
            assert (upload.header.base.epoch, upload.header.base.step) == (1, 44)
            assert upload.header.content == bulk.DELTA
            assert upload.header.steps < again.local_step, "counted since it was received"
        fetched = [(wanted.fragment, wanted.round) for wanted in syncer.downloads[seen:]]
        assert fetched == [(1, 0)], "and nothing that the checkpoint has"


SCRIPT = """
import os, sys, time, torch
from torch import nn
from diloco_worker import Learner
model = nn.Linear(64, 64)
learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("link", learner._trainer._link.pid, flush=True)
while not learner.done:
    time.sleep(0.01)
    learner.step(tokens=1)
print("left", flush=True)
"""


@pytest.fixture
def script():
    """A training script in its own process; killed at the end of the test."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def is_gone(pid: int) -> bool:
    """Whether a process is dead, reaped or not."""
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
def test_a_link_exits_with_its_trainer_even_if_it_is_stuck(served, script, stuck):
    link = int(script.stdout.readline().split()[1])
    assert not is_gone(link)
    if stuck:
        os.kill(link, signal.SIGSTOP)
    script.kill()
    served.wait(lambda: is_gone(link))


def test_a_script_that_receives_sigterm_leaves_and_exits_with_0(served, script):
    link = int(script.stdout.readline().split()[1])
    served.wait(lambda: served.reports)
    script.send_signal(signal.SIGTERM)
    assert script.wait(90) == 0
    assert script.stdout.readline() == "left\n"
    assert is_gone(link)
    assert served.goodbyes == ["SIGTERM"]


def test_the_link_ignores_signals_to_the_process_group(served, script):
    link = int(script.stdout.readline().split()[1])
    served.wait(lambda: served.reports)
    os.kill(link, signal.SIGTERM)
    os.kill(link, signal.SIGINT)
    script.send_signal(signal.SIGTERM)
    assert script.wait(90) == 0
    assert served.goodbyes == ["SIGTERM"]


def test_the_users_own_sigterm_handler_is_called_and_restored(enter):
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


HOLDER = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_link_that_is_stopped_with_a_lock_delays_only_the_copy_of_the_model(enter):
    """The lock is held by another process in its place."""
    spec = make_spec()
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        step_until(lambda: syncer.reports, learner, model, opt)
    fd = learner._trainer._replica.shared.fd
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd)], pass_fds=(fd,),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    killed = threading.Event()
    end = threading.Timer(40, lambda: (killed.set(), holder.kill()))
    with learner, holder, ScriptedSyncer(spec, port=syncer.port, epoch=2) as second:
        try:
            assert holder.stdout.readline() == "held\n"
            end.start()
            state = learner._trainer._core
            step_until(lambda: state.link_state.initial_requested, learner, model, opt)
            for _ in range(20):
                learner.step(tokens=1)
            assert not killed.is_set(), "a step waited for the lock"
            assert not second.initialised
        finally:
            end.cancel()
            holder.kill()
        step_until(lambda: second.initialised, learner, model, opt)


def test_a_syncer_that_lost_everything_gets_the_current_model(enter):
    spec = make_spec()
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        step_until(lambda: syncer.reports, learner, model, opt)
    with learner, ScriptedSyncer(spec, port=syncer.port, epoch=2) as second:
        step_until(lambda: second.initialised, learner, model, opt)
        assert not np.array_equal(second.theta[0], syncer.theta[0])
        step_until(lambda: second.reports, learner, model, opt)


def refusal(capfd, act) -> str:
    """What the learner prints when it ends for good."""
    with pytest.raises(SystemExit) as end:
        act()
    assert end.value.code == EXIT_REFUSED
    return capfd.readouterr().err


def test_a_model_that_is_converted_later_ends_the_learner_and_not_its_optimizer(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
        train(learner, model, opt)  # the optimizer has its moments
        model.to(torch.bfloat16)
        for parameter in opt.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        text = refusal(capfd, opt.step)
        assert (
            "eu/0: the element type of parameter 0.weight is bfloat16, and was float32 at" in text
        )
        assert learner.done
        opt.param_groups[0]["foreach"] = False
        opt.state.clear()
        opt.step()  # after the job, a program may do what it likes


def test_a_layer_that_is_replaced_later_ends_the_learner(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        model[0] = torch.nn.Linear(8, 16)
        syncer.open(0, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        text = refusal(capfd, lambda: step_until(lambda: False, learner, model, opt))
        assert (
            "eu/0: since Learner.connect, the program has put another tensor in the place of"
            in text
        )
        assert "parameters 0.weight, 0.bias, so that no merge" in text
