"""Joining a job, or being refused: the library and its link process against a scripted syncer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import MismatchError
from diloco.rpc import channels
from diloco.rpc.tensor_info import unpack_frozen
from diloco.rpc.tls import Tls
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.linked import (
    connected,
    flat,
    make_model,
    make_spec,
    step_until,
)
from diloco_testing.network.certificates import Authority
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner
from diloco_worker.fetch import fetch_model
from diloco_worker.trainer.frozen import digest


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


def test_a_learner_whose_own_initialisation_is_not_finite_ends_and_does_not_upload_it_again(
    enter, capfd
):
    with ScriptedSyncer(make_spec()) as syncer:
        enter(syncer.spec, syncer.port)
        model = make_model()
        with torch.no_grad():
            model[0].weight[3, 2] = float("nan")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit) as stopped:
            Learner.connect(model, optimizer, connect_timeout_seconds=90)
        assert stopped.value.code == 78
        text = "initial parameters of this learner are not finite: 0.weight holds NaN or Inf; give what"
        assert text in capfd.readouterr().err


@pytest.mark.parametrize("buffers", ["Average", "Initial"])
def test_a_later_learner_starts_from_the_syncers_model_buffers_and_constants(buffers, enter):
    with ScriptedSyncer(make_spec(buffers=buffers, frozen="Ship")) as syncer:
        enter(syncer.spec, syncer.port)
        first_model = make_model()
        first_model[1].running_mean.uniform_()
        first_model[1].num_batches_tracked.fill_((1 << 40) + 7)
        optimizer = torch.optim.SGD(first_model.parameters(), lr=0.05)
        Learner.connect(first_model, optimizer, connect_timeout_seconds=90).close()
        learner, model, _ = connected(syncer, enter, seed=1, name="us/0")
        with learner:
            for (name, ours), theirs in zip(
                model.state_dict().items(), first_model.state_dict().values(), strict=True
            ):
                assert torch.equal(ours, theirs), name
            assert learner.index == 1


def test_hello_contains_the_number_of_restarts(enter, monkeypatch):
    monkeypatch.setenv("DILOCO_RESTARTS", "7")
    with ScriptedSyncer(make_spec()) as syncer:
        learner, *_ = connected(syncer, enter)
        with learner:
            assert syncer.hellos[0].facts["restarts"] == "7"


def test_another_model_is_refused_with_the_difference(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.refusal = MismatchError("parameter 0.weight has shape [16, 9] instead of [16, 8]")
        with pytest.raises(SystemExit) as stopped:
            connected(syncer, enter)
        assert stopped.value.code == 78
        assert "0.weight has shape [16, 9]" in capfd.readouterr().err


def test_frozen_parameters_are_described_and_stay_as_the_program_made_them(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        first, first_model, _ = connected(syncer, enter)
        first.close()
        learner, model, _ = connected(syncer, enter, seed=1, name="us/0")
        with learner:
            assert torch.equal(model[0].weight, first_model[0].weight)
            assert not torch.equal(model[2].bias, first_model[2].bias), "nothing was downloaded"
        for hello, own in zip(syncer.hellos, (first_model, model), strict=True):
            (info,) = unpack_frozen(hello.frozen, most=9)
            assert pb.TensorInfo.FromString(info).digest == digest(own[2].bias)
            assert "2.bias" not in {t.name for t in hello.constants}


def test_a_syncer_that_does_not_compare_frozen_parameters_is_left_with_the_reason(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.welcome["compares_frozen"] = False
        with pytest.raises(SystemExit) as stopped:
            connected(syncer, enter)
        assert stopped.value.code == 78
        assert "the syncer is older than this learner" in capfd.readouterr().err
        assert not syncer.uploads


def test_a_syncer_that_never_answers_ends_the_process_with_the_retry_code(enter, capfd):
    enter(make_spec(), 1)
    model = make_model()
    with pytest.raises(SystemExit) as stopped:
        Learner.connect(
            model, torch.optim.SGD(model.parameters(), lr=0.1), connect_timeout_seconds=1.5
        )
    assert stopped.value.code == 75
    assert "no syncer within" in capfd.readouterr().err


def test_sigterm_while_waiting_for_a_syncer_ends_the_loop_before_its_first_step(enter):
    enter(make_spec(), 1)
    model = make_model()

    def terminate() -> None:
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(0.01)  # without a handler, the signal would kill this process
        os.kill(os.getpid(), signal.SIGTERM)

    terminator = threading.Thread(target=terminate)
    terminator.start()
    learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert learner.done
    terminator.join()


def test_a_learner_leaves_a_complete_job_at_once(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.complete = True
        learner, *_ = connected(syncer, enter)
        assert learner.done
        assert syncer.goodbyes == ["Complete"]


@pytest.mark.parametrize("buffers", ["Average", "Initial"])
def test_an_observer_gets_every_tensor_under_every_name(buffers, enter):
    with ScriptedSyncer(make_spec(buffers=buffers, frozen="Ship")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.ModuleDict(
            {"e": nn.Embedding(5, 4), "h": nn.Linear(4, 5, bias=False), "n": nn.BatchNorm1d(4)}
        )
        model["h"].weight = model["e"].weight
        model["n"].half()
        model["n"].num_batches_tracked.fill_(70_000)
        Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)).close()
        status = pb.StatusReply(tensors=syncer.hellos[0].tensors)
        with channels.channel(f"127.0.0.1:{syncer.port}", tls=None, purpose="bulk") as channel:
            tensors = fetch_model(channel, status=status, spec=syncer.spec)
        assert tensors.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert tensors[name].shape == value.shape
            assert np.array_equal(tensors[name], value.numpy()), name


def test_without_a_job_the_script_runs_standalone(monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    model = make_model()
    learner = Learner.connect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), standalone_steps=3
    )
    while not learner.done:
        learner.step(tokens=1)
    assert (learner.step_index, learner.local_step, learner.spec) == (3, 3, None)


def test_the_link_does_not_load_torch():
    code = "import sys, diloco_worker.link.__main__, diloco_worker.fetch; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_with_tls_files_everything_is_encrypted(enter, monkeypatch, tmp_path):
    authority = Authority()
    server = Tls.load(authority.issue(tmp_path / "server"))
    monkeypatch.setenv("DILOCO_TLS", str(authority.issue(tmp_path / "client")))
    with ScriptedSyncer(make_spec(), tls=server) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: syncer.reports, learner, model, opt)


def test_missing_tls_files_are_named_without_a_retry(enter, monkeypatch, tmp_path, capfd):
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
