"""The syncer as a process: killed with -9 and started again, ended, started wrongly, under load, behind TLS."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time

import numpy as np
import pytest

from diloco import health
from diloco.fragments import Tensor
from diloco.spec import Checkpoint
from diloco.transport import Tls
from diloco.v1 import bulk_pb2 as bulk
from diloco_testing.certificates import Authority
from diloco_testing.real_syncer import RealSyncer, make_spec, until
from diloco_testing.scripted_learner import (
    END,
    Model,
    ScriptedLearner,
    chunk,
    committed,
    encoded,
    good_round,
    random_delta,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def thetas_of(learner):
    return [random_delta(f, 50 + f.index, size=1.0) for f in learner.layout.fragments]


def theta_now(learner):
    return [learner.theta(p) for p in range(len(learner.layout.fragments))]


def durable(syncer, step):
    until(
        lambda: any(x["ok"] and x["step"] >= step for x in syncer.events("snapshot")),
        saying=f"a snapshot of step {step}",
    )


# ---------------------------------------------------------------- kill -9


@pytest.mark.parametrize("when", ["after Θ^(0)", "between snapshots", "while a member uploads"])
def test_a_killed_syncer_resumes_from_its_newest_snapshot(tmp_path, when):
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=2, keep=2))
    with RealSyncer(tmp_path, spec) as syncer, ScriptedLearner(syncer) as one:
        thetas = thetas_of(one)
        one.join().initialise(thetas)
        one.expect("ready")
        at = {0: thetas}
        durable(syncer, 0)
        for step in range(1, 1 if when == "after Θ^(0)" else 6):
            good_round(one, seed=step)
            at[step] = theta_now(one)
            if step % 2 == 0:
                durable(syncer, step)
        stale = one.pull()
        if when == "while a member uploads":
            delta_N = random_delta(one.layout.fragments[stale.fragment], 77)
            payloads, _, norms = encoded(one.layout.fragments[stale.fragment], delta_N)
            stream = one.stream(one.header(stale, norms=norms))
            assert stream.send(chunk(0, payloads[0]), END).reply().again
        syncer.kill()
        kept = max(x["step"] for x in syncer.events("snapshot"))
        syncer.start()
        assert (syncer.status().epoch, syncer.status().step) == (2, kept)
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=one.incarnation, local_step=one.local_step)
            assert (again.epoch, again.incarnation, again.welcome.step) == (2, 1, kept)
            for seen_N, kept_N in zip(theta_now(again), at[kept], strict=True):
                np.testing.assert_array_equal(seen_N, kept_N)
            # What is left of the first epoch is refused, also where it names a round of now.
            pull = again.pull()
            delta_N = random_delta(again.layout.fragments[pull.fragment], 78)
            old = {"round": pull.round, "attempt": pull.attempt, "epoch": 1}
            assert again.upload(pull, delta_N, **old).refused == "StaleEpoch"
            # What the learner has is of a version that died with the first epoch: it sends it whole.
            mine_N = at[max(at)][pull.fragment] - delta_N
            assert again.upload(pull, mine_N, content=bulk.WHOLE, base=None, norms=[]).done
            header = committed(again, pull)
            assert (header.version.epoch, header.version.step) == (2, kept + 1)
            good_round(again)
        assert syncer.events("start")[-1]["step"] == kept
        syncer.assert_audit()


def test_a_syncer_killed_before_its_first_snapshot_asks_again(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as one:
        one.join().initialise(thetas_of(one)[:1])
        syncer.kill()
        syncer.start()
        assert syncer.status().state == "Initialising"
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=one.incarnation)
            again.initialise(thetas_of(again))
            again.expect("ready")
            for seen_N, meant_N in zip(theta_now(again), thetas_of(again), strict=True):
                np.testing.assert_array_equal(seen_N, meant_N)
            good_round(again)


def test_the_life_after_the_syncers_death_gets_a_new_number(tmp_path):
    """Also a life of which only events.jsonl knows, not the snapshot."""
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as one:
        one.join().initialise(thetas_of(one))
        durable(syncer, 0)
        with ScriptedLearner(syncer) as two:
            two.join()
            good_round(two)
            syncer.kill()
        syncer.start()
        with ScriptedLearner(syncer) as three:
            three.join()
            assert three.incarnation == two.incarnation + 1 == 3
            assert three.local_step == two.local_step
            good_round(three)
        syncer.assert_audit()


def test_sigterm_leaves_the_current_state_durable(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as one:
        thetas = thetas_of(one)
        one.join().initialise(thetas)
        model = Model(one.layout, syncer.spec, thetas)
        for step in range(3):
            good_round(one, model, seed=step)
        before = theta_now(one)
        assert syncer.terminate() == 0
        syncer.start()
        assert (syncer.status().epoch, syncer.status().step) == (2, 3)
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=one.incarnation)
            for seen_N, before_N in zip(theta_now(again), before, strict=True):
                np.testing.assert_array_equal(seen_N, before_N)
            again.local_step = one.local_step
            good_round(again, model, seed=9)  # float64 says that the momentum came back as well
            model.check(again)
        assert syncer.events("stop")[0]["step"] == 3
        syncer.assert_audit()


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_successor_waits_until_its_predecessor_has_left_the_directory(tmp_path, end):
    """As when a pod is deleted: both run for a while, on one volume."""
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    with RealSyncer(tmp_path, spec) as first, ScriptedLearner(first) as one:
        one.join().initialise(thetas_of(one))
        one.expect("ready")
        successor = RealSyncer(tmp_path / "second", spec)
        successor.dir = first.dir
        with contextlib.ExitStack() as ended:
            ended.callback(successor.__exit__)
            successor.launch()
            until(lambda: "another syncer works here" in successor.said(), saying="it waits")
            good_round(one)
            durable(first, 1)
            assert [line["epoch"] for line in first.events("start")] == [1]
            getattr(first, end)()
            until(lambda: len(first.events("start")) == 2, saying="the successor has begun")
        assert [line["step"] for line in first.events("start")] == [0, 1]
        first.assert_audit()


# ---------------------------------------------------------------- started wrongly


def test_a_port_in_use_is_named_and_its_owner_keeps_it(tmp_path):
    with RealSyncer(tmp_path / "one", make_spec()) as first:
        second = RealSyncer(tmp_path / "two", make_spec())
        second.port = first.port
        assert second.launch().wait(30) == 2
        assert f"port {first.port} of 127.0.0.1 is in use" in second.said()
        assert second.events() == []
        assert first.process.poll() is None
        assert [first.status().epoch for _ in range(20)] == [1] * 20


SPECS = {
    "is not there": (None, "No such file or directory"),
    "is empty": (b"", "not JSON"),
    "is cut short": (make_spec().to_json().encode()[:100], "not JSON"),
    "is not text": (b"\xff\xfe\x00", "not UTF-8 text"),
    "is a list": (b"[]", "holds a list, expected an object"),
    "has a field too many": (b'{"job": "j", "steps": 1, "colour": 3}', "unknown fields colour"),
    "was edited": (make_spec().to_json().replace('"seed":0', '"seed":1').encode(), "says hash"),
    "is out of bounds": (b'{"job": "j", "steps": 0}', "steps: 0 is less than 1"),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_that_cannot_be_used_ends_it_with_a_sentence(tmp_path, spec):
    content, said = SPECS[spec]
    with RealSyncer(tmp_path, make_spec()) as syncer:
        assert syncer.terminate() == 0
        known = len(syncer.events())
        file = tmp_path / "spec.json"
        file.unlink() if content is None else file.write_bytes(content)
        syncer.log.unlink()
        assert syncer.launch().wait(30) == 2
        assert said in syncer.said()
        assert "Traceback" not in syncer.said()
        assert str(file) in syncer.said()
        assert len(syncer.events()) == known


def test_snapshots_of_another_spec_are_left_alone(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as one:
        one.join().initialise(thetas_of(one))
        durable(syncer, 0)
        syncer.terminate()
        before = sorted((syncer.dir / "snapshots").iterdir())
        (tmp_path / "spec.json").write_text(make_spec(seed=5).to_json())
        assert syncer.launch().wait(30) == 2
        assert "use the manifest that began this run" in syncer.said()
        assert [p for p in before if not p.exists()] == []


# ---------------------------------------------------------------- signs of life


def test_a_syncer_leaves_signs_of_life_while_it_serves(tmp_path, monkeypatch):
    file = tmp_path / "health.json"
    monkeypatch.setenv("DILOCO_HEALTH_FILE", str(file))
    monkeypatch.setenv("DILOCO_LOG_FORMAT", "json")
    with RealSyncer(tmp_path, make_spec()) as syncer:
        first = until(lambda: health.read(file), saying="a sign of life")
        assert first.ready
        assert first.progress_at == first.at
        until(lambda: health.read(file).at > first.at, saying="another")
        stopped = syncer.process
        stopped.send_signal(signal.SIGSTOP)
        silent = health.read(file)
        time.sleep(1.5)
        assert health.read(file) == silent
        stopped.send_signal(signal.SIGCONT)
        assert syncer.terminate() == 0
        assert (health.read(file).ready, health.read(file).why) == (False, "ending: last snapshot")
        assert all(json.loads(line) for line in syncer.said().splitlines())


# ---------------------------------------------------------------- under load


def test_a_slow_bulk_transfer_delays_no_control_message(tmp_path):
    """A fragment of 64 MiB trickles in for some seconds; every answer beside it takes less than one."""
    spec = make_spec(fragments=1, interval=1)
    tensors = (Tensor(name="big", shape=(1 << 24,), dtype="float32"),)
    with (
        RealSyncer(tmp_path, spec) as syncer,
        ScriptedLearner(syncer, "eu/0", tensors=tensors) as one,
    ):
        one.join().initialise([np.ones(1 << 24, np.float32)])
        one.expect("ready")
        pull = one.pull()
        payloads, _, norms = encoded(one.layout.fragments[0], np.full(1 << 24, 1e-3, np.float32))
        stream = one.stream(one.header(pull, norms=norms))
        over = threading.Event()
        answers: list[float] = []

        def ask() -> None:
            while not over.is_set():
                began = time.monotonic()
                syncer.status()
                with ScriptedLearner(syncer, "us/0", tensors=tensors) as other:
                    other.join()
                answers.append(time.monotonic() - began)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for index, payload in enumerate(payloads):
                stream.send(chunk(index, payload))
                time.sleep(0.05)
            assert stream.send(END).reply().done
        finally:
            over.set()
            asking.join()
        committed(one, pull)
        assert len(answers) > 5
        assert max(answers) < 1.0
        assert not [x for x in syncer.events("leave") if x["reason"] == "HeartbeatLate"]
        [member] = syncer.events("merge")[-1]["members"]
        assert (member["learner"], json.dumps(syncer.events("refuse"))) == ("eu/0", "[]")


# ---------------------------------------------------------------- TLS


def test_mutual_tls_lets_in_only_the_same_authority(tmp_path):
    ours, theirs = Authority(), Authority("another authority")
    server = ours.issue(tmp_path / "server")
    with RealSyncer(tmp_path / "job", make_spec(), tls=server) as syncer:
        friend = Tls.load(ours.issue(tmp_path / "friend"))
        stranger = Tls.load(theirs.issue(tmp_path / "stranger"))
        assert stranger is not None
        assert friend is not None
        # One that trusts our server, but has a certificate of somebody else.
        forger = Tls(certificate=stranger.certificate, key=stranger.key, authority=friend.authority)
        assert syncer.status(tls=friend).state == "Initialising"
        for other in (None, stranger, forger):
            assert syncer.refuses(tls=other)
        with ScriptedLearner(syncer, tls=friend) as one:
            one.join().initialise(thetas_of(one))
            one.expect("ready")
            good_round(one)
        assert syncer.events("refuse") == []
