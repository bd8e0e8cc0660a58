"""The syncer as a process: killed and restarted, terminated, misconfigured, under load, with TLS."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request

import numpy as np
import pytest

from diloco.errors import DilocoError
from diloco.model.fragments import Tensor
from diloco.rpc.tls import Tls
from diloco.runtime import health
from diloco.spec import Checkpoint
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.scripted import (
    END,
    Model,
    ScriptedLearner,
    chunk,
    committed,
    encoded,
    good_round,
    random_delta,
    thetas_of,
)
from diloco_testing.metrics import missing
from diloco_testing.network.certificates import Authority
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow


def theta_now(learner):
    return [learner.theta(p) for p in range(len(learner.layout.fragments))]


def durable(syncer, step):
    until(
        lambda: any(x["ok"] and x["step"] >= step for x in syncer.events("snapshot")),
        expected=f"a snapshot of step {step}",
    )


def test_b02_what_a_syncer_writes_is_for_its_user_alone_and_goes_through_no_link(tmp_path):
    """Whatever the umask; the links have the names of its next temporary files."""
    victim, before = tmp_path / "victim", os.umask(0)
    victim.write_text("precious")
    spec = make_spec(steps=2, quorum=1, syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    try:
        with RealSyncer(tmp_path, spec) as syncer:
            with ScriptedLearner(syncer) as learner:
                learner.join().initialise(thetas_of(learner))
                learner.expect("ready")
                good_round(learner)
            assert syncer.terminate() == 0
            for name in ("snapshots/epoch", "snapshots/incarnation"):
                (syncer.dir / f"{name}.tmp").symlink_to(victim)
            syncer.start()
            with ScriptedLearner(syncer) as learner:
                learner.join().expect("ready")
                learner.local_step = learner.welcome.local_step
                learner.pull()
            assert syncer.status().epoch == 2
            assert syncer.terminate() == 0
    finally:
        os.umask(before)
    assert victim.read_text() == "precious"
    found = list(syncer.dir.rglob("*"))
    assert not any(path.is_symlink() for path in found)
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o700}
    names = {path.name for path in found}
    assert names >= {"events.jsonl", "eval.jsonl", "epoch", "incarnation"}


# ---------------------------------------------------------------- kill -9


@pytest.mark.parametrize("when", ["after Θ^(0)", "between snapshots", "while a member uploads"])
def test_a_killed_syncer_resumes_from_its_newest_snapshot(tmp_path, when):
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=2, keep=2))
    with RealSyncer(tmp_path, spec) as syncer, ScriptedLearner(syncer) as learner:
        thetas = thetas_of(learner)
        learner.join().initialise(thetas)
        learner.expect("ready")
        at = {0: thetas}
        durable(syncer, 0)
        for step in range(1, 1 if when == "after Θ^(0)" else 6):
            good_round(learner, seed=step)
            at[step] = theta_now(learner)
            if step % 2 == 0:
                durable(syncer, step)
        stale = learner.pull()
        if when == "while a member uploads":
            delta_N = random_delta(learner.layout.fragments[stale.fragment], 77)
            payloads, _, norms = encoded(learner.layout.fragments[stale.fragment], delta_N)
            stream = learner.stream(learner.header(stale, norms=norms))
            assert stream.send(chunk(0, payloads[0]), END).reply().again
        syncer.kill()
        kept = max(x["step"] for x in syncer.events("snapshot"))
        syncer.start()
        assert (syncer.status().epoch, syncer.status().step) == (2, kept)
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=learner.incarnation, local_step=learner.local_step)
            assert (again.epoch, again.incarnation, again.welcome.step) == (2, 1, kept)
            for seen_N, kept_N in zip(theta_now(again), at[kept], strict=True):
                np.testing.assert_array_equal(seen_N, kept_N)
            # Uploads of the first epoch are refused, even if they name a current round.
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
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner)[:1])
        syncer.kill()
        syncer.start()
        assert syncer.status().state == "Initialising"
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=learner.incarnation)
            again.initialise(thetas_of(again))
            again.expect("ready")
            for seen_N, meant_N in zip(theta_now(again), thetas_of(again), strict=True):
                np.testing.assert_array_equal(seen_N, meant_N)
            good_round(again)


def test_a_learner_that_joins_after_the_syncers_death_gets_a_new_incarnation(tmp_path):
    """Also if only events.jsonl records the previous incarnation, not the snapshot."""
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        durable(syncer, 0)
        with ScriptedLearner(syncer) as other:
            other.join()
            good_round(other)
            syncer.kill()
        syncer.start()
        with ScriptedLearner(syncer) as third:
            third.join()
            assert third.incarnation == other.incarnation + 1 == 3
            assert third.local_step == other.local_step
            good_round(third)
        syncer.assert_audit()


def test_sigterm_leaves_the_current_state_durable(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        thetas = thetas_of(learner)
        learner.join().initialise(thetas)
        model = Model(learner.layout, syncer.spec, thetas)
        for step in range(3):
            good_round(learner, model, seed=step)
        before = theta_now(learner)
        assert syncer.terminate() == 0
        syncer.start()
        assert (syncer.status().epoch, syncer.status().step) == (2, 3)
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=learner.incarnation)
            for seen_N, before_N in zip(theta_now(again), before, strict=True):
                np.testing.assert_array_equal(seen_N, before_N)
            again.local_step = learner.local_step
            good_round(again, model, seed=9)  # float64 shows that the momentum was restored as well
            model.check(again)
        assert syncer.events("stop")[0]["step"] == 3
        syncer.assert_audit()


def test_uploads_that_an_orderly_stop_interrupts_are_no_fault_of_a_learner(tmp_path):
    names = ("eu/0", "eu/1")

    def together(**hello: int) -> tuple[list[ScriptedLearner], pb.Pull]:
        learners = [all_.enter_context(ScriptedLearner(syncer, name)) for name in names]
        for incarnation, learner in enumerate(learners, start=1):
            learner.join(**hello, **({"incarnation": incarnation} if hello else {}))
            assert learner.incarnation == incarnation
        if not syncer.events("initialised"):
            learners[0].initialise(thetas_of(learners[0]))
        for learner in learners:
            learner.expect("ready")
            learner.step()
        pulls = [learner.expect("pull") for learner in learners]
        assert pulls[0] == pulls[1]
        return learners, pulls[0]

    with RealSyncer(tmp_path, make_spec(quorum=2)) as syncer, contextlib.ExitStack() as all_:
        learners, pull = together()
        fragment = learners[0].layout.fragments[pull.fragment]
        payloads, _, norms = encoded(fragment, random_delta(fragment, 1))
        streams = [learner.stream(learner.header(pull, norms=norms)) for learner in learners]
        for stream in streams:
            assert stream.send(chunk(0, payloads[0]), END).reply().again  # it is in the middle
        assert syncer.terminate() == 0
        for stream in streams:
            with pytest.raises(DilocoError):
                stream.reply()
        assert [syncer.events(of) for of in ("refuse", "eject", "error")] == [[], [], []]
        syncer.start()
        learners, pull = together(local_step=1)
        assert [learner.local_step for learner in learners] == [2, 2]
        uploads = [learner.sent(pull, random_delta(fragment, 2)) for learner in learners]
        assert [upload.reply().done for upload in uploads] == [True, True]
        committed(learners[0], pull)
        assert [member["learner"] for member in syncer.events("merge")[0]["members"]] == list(names)
        assert syncer.events("refuse") == []
        syncer.assert_audit()


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_successor_waits_until_its_predecessor_has_left_the_directory(tmp_path, end):
    """As when a pod is deleted: both run for a while, on one volume."""
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    with RealSyncer(tmp_path, spec) as first, ScriptedLearner(first) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        successor = RealSyncer(tmp_path / "second", spec)
        successor.dir = first.dir
        with contextlib.ExitStack() as ended:
            ended.callback(successor.__exit__)
            successor.launch()
            until(
                lambda: "another syncer holds this directory" in successor.output(),
                expected="it waits",
            )
            good_round(learner)
            durable(first, 1)
            assert [line["epoch"] for line in first.events("start")] == [1]
            getattr(first, end)()
            until(lambda: len(first.events("start")) == 2, expected="the successor has begun")
        assert [line["step"] for line in first.events("start")] == [0, 1]
        first.assert_audit()


# ---------------------------------------------------------------- a fault of its own

ENGINE_RAISES = """
import os, sys
from diloco_syncer.core.engine import Engine
handle = Engine.handle
def raising(self, event, now):
    if getattr(event, "local_step", 0) == 3:
        raise ZeroDivisionError("at a named point")
    return handle(self, event, now)
Engine.handle = raising
import diloco_syncer.__main__ as program
os._exit(program.main(sys.argv[1:]))
"""


def test_a_syncer_whose_engine_raises_ends_with_its_reason_and_its_successor_resumes(tmp_path):
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    syncer = RealSyncer(tmp_path, spec)
    syncer.program = ["-c", ENGINE_RAISES]
    with syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        for step in (1, 2):
            good_round(learner, seed=step)
            durable(syncer, step)
        before = theta_now(learner)
        learner.step()
        assert syncer.process.wait(30) == 1
        assert "the engine cannot process Reported" in syncer.output()
        assert "at a named point" in syncer.output()
        assert [x["step"] for x in syncer.events("snapshot")] == [0, 1, 2]
        assert syncer.events("stop") == []
        syncer.program = ["-m", "diloco_syncer"]
        syncer.start()
        with ScriptedLearner(syncer) as again:
            again.join(incarnation=learner.incarnation, local_step=learner.local_step)
            for seen_N, before_N in zip(theta_now(again), before, strict=True):
                np.testing.assert_array_equal(seen_N, before_N)
            again.step()
            again.expect("pull")
        syncer.assert_audit()


# ---------------------------------------------------------------- started wrongly


def test_a_port_in_use_is_named_and_its_owner_keeps_it(tmp_path):
    with RealSyncer(tmp_path / "one", make_spec()) as first:
        second = RealSyncer(tmp_path / "two", make_spec())
        second.port = first.port
        assert second.launch().wait(30) == 2
        assert f"port {first.port} of 127.0.0.1 is in use" in second.output()
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
    "was edited": (make_spec().to_json().replace('"seed":0', '"seed":1').encode(), "states hash"),
    "is out of bounds": (b'{"job": "j", "steps": 0}', "steps: 0 is less than 1"),
}


@pytest.mark.parametrize("spec", SPECS)
def test_an_unusable_spec_ends_the_syncer_with_a_message(tmp_path, spec):
    content, message = SPECS[spec]
    with RealSyncer(tmp_path, make_spec()) as syncer:
        assert syncer.terminate() == 0
        known = len(syncer.events())
        file = tmp_path / "spec.json"
        file.unlink() if content is None else file.write_bytes(content)
        syncer.log.unlink()
        assert syncer.launch().wait(30) == 2
        assert message in syncer.output()
        assert "Traceback" not in syncer.output()
        assert str(file) in syncer.output()
        assert len(syncer.events()) == known


def test_snapshots_of_another_spec_are_left_alone(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        durable(syncer, 0)
        syncer.terminate()
        before = sorted((syncer.dir / "snapshots").iterdir())
        (tmp_path / "spec.json").write_text(make_spec(seed=5).to_json())
        assert syncer.launch().wait(30) == 2
        assert "use the manifest that started this run" in syncer.output()
        assert [p for p in before if not p.exists()] == []


# ---------------------------------------------------------------- heartbeat


def test_a_syncer_writes_its_heartbeat_while_it_serves(tmp_path, monkeypatch):
    file = tmp_path / "health.json"
    monkeypatch.setenv("DILOCO_HEALTH_FILE", str(file))
    monkeypatch.setenv("DILOCO_LOG_FORMAT", "json")
    with RealSyncer(tmp_path, make_spec()) as syncer:
        first = until(lambda: health.read(file), expected="a heartbeat")
        assert first.ready
        assert first.progress_at == first.at
        until(lambda: health.read(file).at > first.at, expected="the next heartbeat")
        stopped = syncer.process
        stopped.send_signal(signal.SIGSTOP)
        silent = health.read(file)
        time.sleep(1.5)
        assert health.read(file) == silent
        stopped.send_signal(signal.SIGCONT)
        assert syncer.terminate() == 0
        assert (health.read(file).ready, health.read(file).why) == (
            False,
            "stopping: writing the last snapshot",
        )
        assert all(json.loads(line) for line in syncer.output().splitlines())


# ---------------------------------------------------------------- metrics


@pytest.fixture
def metrics_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        return page.read().decode()


def metric(port, sample):
    """The value of one sample, labels included; None: it is not there."""
    lines = scrape(port).splitlines()
    return next((float(x.rpartition(" ")[2]) for x in lines if x.startswith(f"{sample} ")), None)


def test_learners_are_counted_also_before_the_first_merge(tmp_path, metrics_port):
    """The alert DilocoNoMerges compares both."""

    def learners(state):
        return metric(metrics_port, f'diloco_learners{{region="eu",state="{state}"}}')

    flags = ("--metrics-port", str(metrics_port))
    with RealSyncer(tmp_path, make_spec(quorum=2), *flags) as syncer:
        with ScriptedLearner(syncer) as learner:
            learner.join()
            until(lambda: learners("Joining") == 1, expected="it joined")
            learner.initialise(thetas_of(learner))
            learner.expect("ready")
            learner.step()
            until(lambda: learners("Training") == 1, expected="it trains")
            assert metric(metrics_port, "diloco_merges_total") == 0
            assert missing(scrape(metrics_port), "syncer") == set()
        until(lambda: (learners("Training"), learners("Gone")) == (0, 1), expected="it left")


def test_bulk_bytes_are_counted_in_both_directions(tmp_path, metrics_port):
    def wire(direction):
        sample = f'diloco_wire_bytes_total{{direction="{direction}",region="eu"}}'
        return metric(metrics_port, sample) or 0

    flags = ("--metrics-port", str(metrics_port))
    with RealSyncer(tmp_path, make_spec(), *flags) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        before = wire("up")
        assert before >= sum(4 * f.elements for f in learner.layout.fragments), "fp32"
        fragment = learner.layout.fragments[good_round(learner).fragment]
        assert 4 * fragment.elements <= wire("up") - before < 4.1 * fragment.elements
        assert 4 * fragment.elements <= wire("down") < 4.1 * fragment.elements


# ---------------------------------------------------------------- under load


def test_a_slow_bulk_transfer_delays_no_control_message(tmp_path):
    """A fragment of 64 MiB trickles in for some seconds; every answer beside it takes less than one."""
    spec = make_spec(fragments=1, interval=1)
    tensors = (Tensor(name="big", shape=(1 << 24,), dtype="float32"),)
    with (
        RealSyncer(tmp_path, spec) as syncer,
        ScriptedLearner(syncer, "eu/0", tensors=tensors) as learner,
    ):
        learner.join().initialise([np.ones(1 << 24, np.float32)])
        learner.expect("ready")
        pull = learner.pull()
        payloads, _, norms = encoded(
            learner.layout.fragments[0], np.full(1 << 24, 1e-3, np.float32)
        )
        stream = learner.stream(learner.header(pull, norms=norms))
        over = threading.Event()
        answers: list[float] = []

        def ask() -> None:
            # Fewer sessions than a learner may begin within a minute.
            while not over.is_set() and len(answers) < 100:
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
        committed(learner, pull)
        assert len(answers) > 5
        assert max(answers) < 1.0
        assert not [x for x in syncer.events("leave") if x["reason"] == "HeartbeatLate"]
        [member] = syncer.events("merge")[-1]["members"]
        assert (member["learner"], json.dumps(syncer.events("refuse"))) == ("eu/0", "[]")


# ---------------------------------------------------------------- TLS


def test_mutual_tls_admits_only_the_same_authority(tmp_path):
    ours, theirs = Authority(), Authority("another authority")
    server = ours.issue(tmp_path / "server")
    with RealSyncer(tmp_path / "job", make_spec(), tls=server) as syncer:
        friend = Tls.load(ours.issue(tmp_path / "friend"))
        untrusted = Tls.load(theirs.issue(tmp_path / "untrusted"))
        assert untrusted is not None
        assert friend is not None
        # It trusts our server, but has a certificate of another authority.
        forger = Tls(
            certificate=untrusted.certificate, key=untrusted.key, authority=friend.authority
        )
        assert syncer.status(tls=friend).state == "Initialising"
        for other in (None, untrusted, forger):
            assert syncer.refuses(tls=other)
        with ScriptedLearner(syncer, tls=friend) as learner:
            learner.join().initialise(thetas_of(learner))
            learner.expect("ready")
            good_round(learner)
        assert syncer.events("refuse") == []


NO_MEMORY = """
import os, sys
from diloco_syncer.rpc import upload_parts
begin, failures = upload_parts._Staged.__init__, [MemoryError("at a named point")]
def raising(self, *arguments):
    if failures:
        raise failures.pop()
    begin(self, *arguments)
upload_parts._Staged.__init__ = raising
import diloco_syncer.__main__ as program
os._exit(program.main(sys.argv[1:]))
"""


def test_a_learner_whose_upload_the_syncer_has_no_memory_for_is_pulled_again(tmp_path):
    syncer = RealSyncer(tmp_path, make_spec())
    syncer.program = ["-c", NO_MEMORY]
    with (
        syncer,
        ScriptedLearner(syncer, "eu/1") as other,
        ScriptedLearner(syncer, "eu/0") as learner,
    ):
        other.join().initialise(thetas_of(other))
        other.expect("ready")
        good_round(other)  # so that the quorum does not need the other one
        learner.join()
        pull = learner.pull()
        delta_N = random_delta(learner.layout.fragments[pull.fragment], 1)
        reply = learner.upload(pull, delta_N, content=bulk.WHOLE, norms=[])
        assert reply.refused == "Unavailable"
        assert "MemoryError" in reply.detail
        again = learner.expect("pull")
        assert (again.round, again.attempt > pull.attempt) == (pull.round, True)
        assert learner.upload(again, delta_N, content=bulk.WHOLE, norms=[]).done
        committed(learner, again)
        [error] = syncer.events("error")
        assert (error["decision"], "at a named point" in error["reason"]) == ("BeginMerge", True)
        assert [(line["learner"], line["reason"]) for line in syncer.events("refuse")] == [
            ("eu/0", "StreamBroken")
        ]
        assert syncer.events("eject") == []
        assert "at a named point" in syncer.output()
