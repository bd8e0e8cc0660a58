"""Reports, uploads and results: the library and its link process against a scripted syncer."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from diloco.codec import formats
from diloco.runtime import health
from diloco.spec import Checkpoint
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.linked import (
    applied,
    connected,
    flat,
    holds,
    make_spec,
    step_until,
    train,
)
from diloco_testing.metrics import missing
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner


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
                before = applied(learner, 1)
                step_until(lambda b=before: applied(learner, 1) > b, learner, model, opt)
            step_until(lambda: syncer.reports[-1].offers, learner, model, opt)
            fresh = [r for r in syncer.reports if r.steps[1] == 0]
            assert fresh
            assert all(1 not in r.offers for r in fresh)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the compiler
def test_a_compiled_model_is_trained_and_computes_with_the_results_that_arrive(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        compiler = CompileCounterWithBackend("inductor")
        compiled = torch.compile(model, backend=compiler)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        with Learner.connect(compiled, opt, connect_timeout_seconds=90) as learner:
            assert {t.name for t in syncer.hellos[0].tensors} == {
                n for n, _ in model.named_parameters()
            }
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, compiled, opt)
            upload = syncer.pull(1, round_=1)
            expected = syncer.theta[1] - flat(syncer, 1, model)
            np.testing.assert_array_equal(upload.values(syncer.layout), expected)
            assert np.abs(expected).max() > 1e-3, "it was trained"
            values = [np.where(theta != 0, 0.25, 0).astype(np.float32) for theta in syncer.theta]
            for fragment in range(2):
                syncer.commit(fragment, values[fragment], round_=2 + fragment)
            opt.param_groups[0]["lr"] = 0.0  # the parameters are those of the results
            step_until(
                lambda: all(holds(syncer, f, model, values[f]) for f in range(2)),
                learner, compiled, opt,
            )  # fmt: skip
            assert compiler.frame_count == 1, "compiled once, for all steps"
            inputs = torch.ones(4, 8)
            torch.testing.assert_close(compiled(inputs), model(inputs))
            assert compiler.frame_count == 1


class Recomputed(nn.Module):
    """A block with dropout, whose activations are computed again in the backward pass if `again`."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again, self.forwards = again, 0
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.block.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.head(x)


def test_a_model_that_computes_its_activations_again_trains_as_one_that_keeps_them(enter):
    """With `torch.utils.checkpoint`: the same parameters to the bit, and results of merges arrive in it."""
    found = {}
    for again in (False, True):
        with ScriptedSyncer(make_spec(wire_up="FP32", wire_down="FP32")) as syncer:
            enter(syncer.spec, syncer.port, name=f"eu/{again:d}")
            torch.manual_seed(0)
            model = Recomputed(again=again)
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            with Learner.connect(model, opt, connect_timeout_seconds=90) as learner:
                torch.manual_seed(1)
                for _ in range(6):
                    train(learner, model, opt)
                found[again] = [parameter.detach().clone() for parameter in model.parameters()]
                values = [
                    np.where(theta != 0, 0.25, 0).astype(np.float32) for theta in syncer.theta
                ]
                for fragment in range(2):
                    syncer.commit(fragment, values[fragment], round_=1 + fragment)
                opt.param_groups[0]["lr"] = 0.0  # the parameters are those of the results
                step_until(
                    lambda s=syncer, m=model, v=values: all(holds(s, f, m, v[f]) for f in range(2)),
                    learner, model, opt,
                )  # fmt: skip
                assert model.forwards == (1 + again) * learner.local_step
    assert all(torch.equal(kept, made) for kept, made in zip(*found.values(), strict=True))


def test_an_upload_matches_the_step_and_counters_in_its_header(enter):
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


def test_the_next_delta_is_against_the_received_version(enter):
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


def as_int4(delta_N: np.ndarray, residual_N: np.ndarray) -> np.ndarray:
    """What the syncer decodes of a delta; `residual_N` becomes the new error feedback."""
    payload = np.empty(formats.encoded_bytes(formats.INT4, delta_N.size), np.uint8)
    formats.encode(formats.INT4, delta_N, payload, residual_N=residual_N)
    decoded_N = np.zeros_like(delta_N)
    formats.decode(formats.INT4, payload, decoded_N)
    return decoded_N


@pytest.mark.parametrize("acknowledged", [True, False])
def test_error_feedback_is_consumed_by_a_merged_round_and_not_by_one_that_is_pulled_again(
    enter, acknowledged
):
    with ScriptedSyncer(make_spec(wire_up="Int4", error_feedback=True)) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            if not acknowledged:  # as if each pull overtakes the reply to the previous upload
                syncer.acknowledge.clear()
            delta = syncer.theta[0] - flat(syncer, 0, model)
            residual = np.zeros_like(delta)
            first = syncer.pull(0, round_=1, attempt=1).values(syncer.layout)
            np.testing.assert_array_equal(first, as_int4(delta, residual))
            again = syncer.pull(0, round_=1, attempt=2).values(syncer.layout)
            np.testing.assert_array_equal(again, first)
            later = syncer.pull(0, round_=3).values(syncer.layout)
            np.testing.assert_array_equal(later, as_int4(delta, residual))
            # Without feedback the same values would be lost again.
            assert not np.array_equal(later, first)


def test_a_fragment_is_sent_whole_if_the_syncer_no_longer_has_its_base(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.open(0, 1)
            step_until(lambda: syncer.reports and syncer.reports[-1].offers, learner, model, opt)
            upload = syncer.pull(0, round_=1, versions=[(9, 9)])
            assert (upload.header.content, upload.header.format) == (bulk.WHOLE, bulk.FP32)
            np.testing.assert_array_equal(upload.values(syncer.layout), flat(syncer, 0, model))


def test_a_result_that_was_not_committed_is_discarded(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            result = syncer.commit(0, np.full_like(syncer.theta[0], 9), round_=1)
            result.committed = False
            wanted = np.where(syncer.theta[1] != 0, 0.5, 0).astype(np.float32)
            syncer.commit(1, wanted, round_=2)
            step_until(lambda: holds(syncer, 1, model, wanted), learner, model, opt)
            assert learner._trainer._core.ledger.steps == [learner.local_step, 0]
            assert not (flat(syncer, 0, model) == 9).any()


def test_14_a_result_that_is_not_decided_yet_is_requested_again(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            wanted = np.where(syncer.theta[0] != 0, 0.5, 0).astype(np.float32)
            syncer.commit(0, wanted, round_=1, attempt=3, undecided=2)
            step_until(lambda: holds(syncer, 0, model, wanted), learner, model, opt)
            requests = [(d.round, d.attempt, list(d.chunks)) for d in syncer.downloads if d.round]
            assert requests == [(1, 3, []), (1, 3, [0]), (1, 3, [0])]


def test_complete_ends_the_loop_with_a_goodbye(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        assert not learner.done
        syncer.send(complete=pb.Complete(step=100))
        step_until(lambda: learner.done, learner, model, opt)
        assert syncer.goodbyes == ["Complete"]
        assert learner.step_index == 100


def test_the_rounding_of_bf16_parameters_is_not_part_of_a_delta(enter):
    with ScriptedSyncer(make_spec(wire_up="FP32", wire_down="FP32")) as syncer:
        enter(syncer.spec, syncer.port)
        model = nn.Linear(32, 4, dtype=torch.bfloat16)
        with Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
            syncer.open(0, 1)
            values = np.where(syncer.theta[0] != 0, np.float32(1 / 3), 0).astype(np.float32)
            syncer.commit(0, values, round_=1)
            deadline = time.monotonic() + 90

            def offered_anew() -> bool:
                """The newest report, which may be of an earlier step, offers it with reset counters."""
                last = syncer.reports[-1] if syncer.reports else None
                return last is not None and 0 in last.offers and last.steps[0] < last.local_step

            while applied(learner, 0) < 2 or not offered_anew():
                assert time.monotonic() < deadline
                learner.step(tokens=1)
                time.sleep(0.01)
            upload = syncer.pull(0, round_=2)
            assert upload.header.content == bulk.DELTA
            assert (upload.header.base.epoch, upload.header.base.step) == (1, 1)
            assert not upload.values(syncer.layout).any()


def test_every_step_writes_a_line(enter):
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
            "queuedSeconds", "learningRate",
        }  # fmt: skip
        assert lines[0]["tokens"] == 5
        assert lines[0]["learningRate"] == opt.param_groups[0]["lr"]


def test_the_step_that_applies_a_result_states_its_age(enter):
    with ScriptedSyncer(make_spec(wire_down="FP32")) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            train(learner, model, opt)
            syncer.step = 7
            syncer.open(0, 1)
            step_until(lambda: learner.step_index == 7, learner, model, opt)
            wanted = np.where(syncer.theta[1] != 0, 0.25, 0).astype(np.float32)
            syncer.commit(1, wanted, round_=4)
            step_until(lambda: holds(syncer, 1, model, wanted), learner, model, opt)
            train(learner, model, opt)
        path = Path(os.environ["DILOCO_STATE"]) / "steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["resultAge"] for line in lines if "resultAge" in line] == [3]


def test_a_step_beside_which_a_checkpoint_was_copied_states_how_long_its_optimizer_waited(enter):
    spec = make_spec(learner_checkpoint=Checkpoint(every_steps=3, keep=2))
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            for _ in range(5):
                train(learner, model, opt, tokens=5)
        path = Path(os.environ["DILOCO_STATE"]) / "steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        waits = {line["localStep"]: line.get("copyWaitSeconds") for line in lines}
        assert [step for step, wait in waits.items() if wait is not None] == [4]
        assert 0 <= waits[4] <= lines[3]["seconds"]


def test_heartbeats_are_sent_while_the_trainer_makes_no_steps(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, *_ = connected(syncer, enter)
        with learner:
            syncer.wait(lambda: syncer.heartbeats >= 3)


def test_metrics_are_served_by_the_link(enter, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("DILOCO_METRICS_PORT", str(port))
    monkeypatch.setenv("DILOCO_RESTARTS", "4")
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            step_until(lambda: learner.local_step == 3, learner, model, opt)
            deadline = time.monotonic() + 90
            text = ""
            while "diloco_learner_steps_total 3.0" not in text:
                assert time.monotonic() < deadline, text
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    text = answer.read().decode()
            assert "diloco_learner_tokens_total 30.0" in text
            assert "diloco_learner_restarts_total 4.0" in text
            assert missing(text, "learner") == set()


def test_the_health_file_follows_session_and_steps(enter, monkeypatch, tmp_path):
    file = tmp_path / "health.json"
    monkeypatch.setenv("DILOCO_HEALTH_FILE", str(file))
    spec = make_spec()

    def health_when(condition):
        deadline = time.monotonic() + 90
        while (found := health.read(file)) is None or not condition(found):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        started = health_when(lambda found: found.ready)
        for _ in range(3):
            train(learner, model, opt)
        stepped = health_when(lambda found: found.progress_at > started.progress_at)
        assert stepped.why == "training, local step 3"
        idle = health_when(lambda found: found.at > stepped.at)
        assert idle.progress_at == stepped.progress_at
    with learner:
        # Without a syncer it is not ready, but steps still count as progress.
        cut_off = health_when(lambda found: not found.ready)
        assert "waiting for the syncer" in cut_off.why
        train(learner, model, opt)
        health_when(lambda found: found.progress_at > cut_off.progress_at)
    left = health.read(file)
    assert (left.ready, left.why) == (False, "has left the job: Closed")
