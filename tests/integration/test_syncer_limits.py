"""
What untrusted, misbehaving and broken peers can cost a running syncer: memory, threads, connections, log lines.

Peers send raw bytes where an honest client could not send the message.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from diloco.errors import (
    ConfigError,
    DilocoError,
    ProtocolError,
    StaleIncarnationError,
    UnauthorisedError,
    UnavailableError,
)
from diloco.rpc import servers
from diloco.rpc.channels import channel
from diloco.rpc.status_codes import error_of
from diloco.rpc.tls import Tls
from diloco.spec import Checkpoint
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_syncer.core.refusals import FULL_REFUSALS
from diloco_syncer.rpc import control
from diloco_syncer.rpc.call_limits import QUERY_THREADS
from diloco_testing.learners.scripted import ScriptedLearner, good_round, random_delta
from diloco_testing.network.certificates import Authority, write
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

SESSION = "/diloco.v1.Syncer/Session"


@pytest.fixture(scope="module")
def syncer(tmp_path_factory) -> Iterator[RealSyncer]:
    folder = tmp_path_factory.mktemp("limits")
    with RealSyncer(folder, make_spec(learners={"eu": 2, "us": 1})) as running:
        yield running


@pytest.fixture
def learner(syncer) -> Iterator[ScriptedLearner]:
    """An honest learner that trains before and after what a test does."""
    with ScriptedLearner(syncer, "eu/0") as honest:
        honest.join()
        honest.local_step = honest.welcome.local_step
        if not honest.welcome.step and syncer.status().state == "Initialising":
            honest.initialise([random_delta(f, f.index, size=1.0) for f in honest.layout.fragments])
        honest.expect("ready")
        good_round(honest)
        yield honest
        good_round(honest)
    until(lambda: "Training" not in {x.state for x in syncer.status().learners}, expected="gone")


def memory_peak(syncer: RealSyncer) -> int:
    """Largest resident size of the syncer so far, in bytes."""
    assert syncer.process is not None
    status = Path(f"/proc/{syncer.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def refused(call: Callable[[], Any]) -> DilocoError:
    """The error that ends a call."""
    try:
        call()
    except grpc.RpcError as error:
        return error_of(error)
    except DilocoError as error:
        return error
    raise AssertionError("it was not refused")


def raw(syncer: RealSyncer, method: str, *messages: bytes, **options: Any) -> list[bytes]:
    """The replies to these bytes on a connection without limits of its own."""
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(syncer.endpoint, options=unlimited, **options) as wire:
        return list(wire.stream_stream(method)(iter(messages), timeout=30))


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "method", [SESSION, "/diloco.v1.Syncer/Evaluated", "/diloco.v1.Bulk/Upload"]
)
def test_a10_a_huge_message_is_refused_before_it_is_buffered(syncer, learner, method):
    before = memory_peak(syncer)
    error = refused(lambda: raw(syncer, method, bytes(100 << 20)))
    assert isinstance(error, ProtocolError)
    assert "RESOURCE_EXHAUSTED" in str(error)
    assert memory_peak(syncer) - before < 50 << 20


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("/diloco.v1.Syncer/Evaluated", 1 << 20),
        ("/diloco.v1.Syncer/GetStatus", 1 << 16),
        ("/diloco.v1.Bulk/Upload", 2 << 20),
        ("/diloco.v1.Bulk/Download", 2 << 20),
    ],
)
def test_each_service_has_a_smaller_limit_of_its_own(syncer, learner, method, size):
    error = refused(lambda: raw(syncer, method, bytes(size)))
    assert isinstance(error, ProtocolError)
    assert "expected at most" in str(error)


@pytest.mark.parametrize("method", [SESSION, "/diloco.v1.Bulk/Upload"])
def test_a10_a_compressed_message_is_refused_and_not_inflated(syncer, learner, method):
    before = memory_peak(syncer)
    error = refused(
        lambda: raw(syncer, method, bytes(256 << 20), compression=grpc.Compression.Gzip)
    )
    assert "disabled" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
    assert memory_peak(syncer) - before < 50 << 20


@pytest.mark.parametrize(
    "method", [SESSION, "/diloco.v1.Syncer/Evaluated", "/diloco.v1.Syncer/GetStatus"]
)
def test_bytes_that_are_no_message_are_refused_without_a_trace_in_the_log(syncer, learner, method):
    error = refused(lambda: raw(syncer, method, b"\xff" * 40))
    assert isinstance(error, ProtocolError)
    assert "Traceback" not in syncer.output()


# ---------------------------------------------------------------- Hello


def tensors(*shapes: list[int], name: str = "t{}") -> dict[str, Any]:
    infos = [pb.TensorInfo(name=name.format(i), shape=s) for i, s in enumerate(shapes)]
    return {"tensors": infos}


HELLOS: dict[str, tuple[type[DilocoError], dict[str, Any], str]] = {
    "a shape of 60,000 dimensions": (ConfigError, tensors([2**64 - 1] * 60_000, [1]), "dimensions"),
    "25,000 tensors, each name twice": (
        ConfigError,
        {"tensors": [pb.TensorInfo(name=f"layer.{i // 2}", shape=[1]) for i in range(25_000)]},
        "duplicate tensor names",
    ),
    "a petabyte": (ConfigError, tensors([2**49], [2**49]), "values"),
    "a long name": (ConfigError, tensors([1], [1], name="x{}" + "y" * 600), "characters"),
    "an index beyond the region": (UnavailableError, {"learner": "eu/2"}, "beyond the 2 learners"),
    "an incarnation never issued": (StaleIncarnationError, {"incarnation": 2**63}, "never issued"),
    "a data position of 2^63": (ProtocolError, {"local_step": 2**63}, "local_step"),
    "too many facts": (ProtocolError, {"facts": {f"k{i}": "" for i in range(65)}}, "65 facts"),
    "a long fact": (ProtocolError, {"facts": {"k": "v" * 2000}}, "a fact of more than"),
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a10_a_hello_beyond_a_bound_is_refused_and_defines_nothing(syncer, learner, hello):
    error, changes, message = HELLOS[hello]
    with ScriptedLearner(syncer, "eu/1") as other:
        with pytest.raises(error) as seen:
            other.join(**changes)
        assert type(seen.value) is error
        assert message in str(seen.value)
        assert len(str(seen.value)) < 2500
    assert {x.name for x in syncer.status().learners} == {"eu/0"}


def test_a10_a_model_that_cannot_be_held_does_not_shut_honest_learners_out(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as fresh:
        with ScriptedLearner(fresh, "us/0") as misbehaving:
            with pytest.raises(ConfigError, match="values"):
                misbehaving.join(**tensors([2**49], [2**49]))
            with ScriptedLearner(fresh, "eu/0") as honest:
                honest.join()


def test_a10_refusals_are_written_in_full_only_so_often(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as fresh:
        hello = pb.Hello(job="j", learner="y" * 60_000, region="eu")
        message = pb.LearnerMessage(hello=hello).SerializeToString()
        for _ in range(5 * FULL_REFUSALS):
            assert "y" * 70 in str(refused(lambda: raw(fresh, SESSION, message)))
        assert len(fresh.events("refuse")) == FULL_REFUSALS
        assert (fresh.dir / "events.jsonl").stat().st_size < 20_000
        assert fresh.log.stat().st_size < 50_000


# ---------------------------------------------------------------- telemetry


def report(learner: ScriptedLearner, **changes: Any) -> None:
    """One more step, with changes."""
    learner.local_step += 1
    rows = len(learner.layout.fragments)
    fields: dict[str, Any] = {
        "local_step": learner.local_step, "steps": [1] * rows, "tokens": [100] * rows,
        "offers": range(rows), "total_tokens": 100, "step_seconds": 0.01, **changes,
    }  # fmt: skip
    learner.send(report=pb.Report(**fields))


REPORTS: dict[str, dict[str, Any]] = {
    "total tokens of 2^64 - 1": {"total_tokens": 2**64 - 1},
    "a step of 2^63": {"local_step": 2**63},
    "tokens of 2^63": {"tokens": [2**63, 1]},
    "an offer of no fragment": {"offers": [2**32 - 1]},
    "no counts": {"steps": []},
    "200,000 counts": {"tokens": [2**40] * 200_000},
}


@pytest.mark.parametrize("lie", REPORTS)
def test_a05_a_report_with_an_impossible_count_ends_its_session_and_leaves_nothing(
    syncer, learner, lie
):
    with ScriptedLearner(syncer, "us/0") as misbehaving:
        misbehaving.join()
        known = misbehaving.welcome.local_step
        report(misbehaving, **REPORTS[lie])
        with pytest.raises(ProtocolError):
            misbehaving.expect("complete", seconds=60)
    found = {x.name: x for x in syncer.status().learners}["us/0"]
    assert (found.state, found.tokens, found.local_step) == ("Gone", 0, known)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e12, 1e300])
def test_a06_measurements_that_no_clock_made_are_replaced(syncer, learner, value):
    with ScriptedLearner(syncer, "us/0") as misbehaving:
        misbehaving.join()
        report(misbehaving, step_seconds=value, sync_seconds=value, loss=value, has_loss=True)

        def seen() -> pb.LearnerStatus | None:
            states = {x.name: x for x in syncer.status().learners}
            return states["us/0"] if states["us/0"].state == "Training" else None

        found = until(seen, expected="its report")
        assert 0 <= found.step_seconds <= 2 * 86400
        assert 0 <= found.sync_seconds <= 86400
        assert abs(found.loss) <= 1e30
        assert found.has_loss == (abs(value) < float("inf"))
        assert 0 <= syncer.status().grace_seconds < float("inf")
    until(
        lambda: {x.name: x for x in syncer.status().learners}["us/0"].state == "Gone",
        expected="the misbehaving learner is gone",
    )


EVALUATIONS: dict[str, dict[str, Any]] = {
    "a step beyond T": {"step": 2**63, "loss": 1.0},
    "a loss that is not a number": {"step": 1, "loss": float("nan")},
    "an infinite loss": {"step": 1, "loss": float("inf")},
    "a detail of NaN": {"step": 1, "loss": 1.0, "detail": '{"a": NaN}'},
    "a detail of 1 MiB": {"step": 1, "loss": 1.0, "detail": f'{{"a": "{"x" * (1 << 20)}"}}'},
    "a detail that is a list": {"step": 1, "loss": 1.0, "detail": "[1]"},
}


@pytest.mark.parametrize("lie", EVALUATIONS)
def test_an_impossible_evaluation_is_refused(syncer, learner, lie):
    with grpc.insecure_channel(syncer.endpoint) as wire:
        score = pb.Evaluation(**EVALUATIONS[lie])
        error = refused(lambda: SyncerStub(wire).Evaluated(score, timeout=10))
    assert isinstance(error, ProtocolError)
    assert syncer.status().eval_step == 0


def test_b05_members_of_a_score_that_are_no_plain_numbers_are_left_out(tmp_path):
    detail = '{"tokens": 1' + "0" * 400 + ', "accuracy": 0.5, "seconds": 1e999, "deep": {"a": 1}}'
    with RealSyncer(tmp_path, make_spec()) as fresh:
        with grpc.insecure_channel(fresh.endpoint) as wire:
            score = pb.Evaluation(step=1, loss=1.0, detail=detail)
            SyncerStub(wire).Evaluated(score, timeout=10)
        [line] = (fresh.dir / "eval.jsonl").read_text().splitlines()
        found = json.loads(line)
        del found["time"]
        assert found == {"tokens": 0, "accuracy": 0.5, "step": 1, "loss": 1.0}


def test_the_scores_are_bounded_by_two_parts(tmp_path):
    fresh = RealSyncer(tmp_path, make_spec())
    fresh.dir.mkdir(parents=True)
    before = b'{"step":0,"loss":5.0}\n'
    (fresh.dir / "eval.jsonl").write_bytes(
        before * (control.EVALUATIONS_PART_BYTES // len(before) + 1)
    )
    with fresh:
        with grpc.insecure_channel(fresh.endpoint) as wire:
            SyncerStub(wire).Evaluated(pb.Evaluation(step=1, loss=1.0), timeout=10)
        [line] = (fresh.dir / "eval.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1
        assert (fresh.dir / "eval.1.jsonl").stat().st_size >= control.EVALUATIONS_PART_BYTES


def test_a_flood_of_scores_does_not_fill_the_volume(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as fresh:
        with grpc.insecure_channel(fresh.endpoint) as wire:
            score = pb.Evaluation(step=1, loss=1.0)
            stub = SyncerStub(wire)
            for _ in range(control.EVALUATIONS_PER_MINUTE):
                stub.Evaluated(score, timeout=10)
            error = refused(lambda: stub.Evaluated(score, timeout=10))
        assert isinstance(error, UnavailableError)
        lines = (fresh.dir / "eval.jsonl").read_text().splitlines()
        assert len(lines) == control.EVALUATIONS_PER_MINUTE


# ---------------------------------------------------------------- streams and connections


def silent(over: threading.Event) -> Iterator[bytes]:
    """Messages of a stream that sends nothing."""
    over.wait()
    return
    yield


@pytest.mark.parametrize(
    ("method", "waiting"),
    [
        (SESSION, 32),
        ("/diloco.v1.Syncer/GetStatus", QUERY_THREADS // 4),
        ("/diloco.v1.Bulk/Upload", 32),
        ("/diloco.v1.Bulk/Download", 32),
    ],
)
def test_a09_streams_without_a_message_do_not_keep_others_from_being_served(
    syncer, learner, method, waiting
):
    """Of one address, a quarter of the threads may wait; the oldest ends when there are more."""
    over, count = threading.Event(), 400
    with ExitStack() as stack:
        stack.callback(over.set)
        calls = []
        for _ in range(count // 100):
            options = [("grpc.use_local_subchannel_pool", 1)]
            wire = stack.enter_context(grpc.insecure_channel(syncer.endpoint, options=options))
            calls += [wire.stream_stream(method)(silent(over)) for _ in range(100)]
        # A call of this address that begins before the last of them would be the oldest soon.
        until(
            lambda: sum(call.done() for call in calls) >= count - waiting,
            expected="those beyond a quarter of the threads are ended", seconds=30,
        )  # fmt: skip
        assert syncer.status(seconds=8).step > 0
        good_round(learner)
        with ScriptedLearner(syncer, "eu/1") as other:
            other.join()
        until(lambda: all(call.done() for call in calls), expected="all are ended", seconds=30)


def test_a11_silent_connections_are_closed(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", syncer.port), timeout=5))
            for _ in range(100)
        ]
        assert syncer.status().state == "Initialising"

        def closed() -> bool:
            return all(_at_end(each) for each in idle)

        until(closed, expected="closed by the syncer", seconds=3 * servers.HANDSHAKE_SECONDS)


FEW_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
import diloco_syncer.__main__ as program
os._exit(program.main(sys.argv[1:]))
"""
"""The syncer, with 400 descriptors and no right to more."""


def test_a11_idle_connections_for_all_descriptors_stop_neither_learners_nor_snapshots(tmp_path):
    """Without a byte of the handshake, so that no peer has an identity yet."""
    ours = Authority().make()
    spec = make_spec(syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    syncer = RealSyncer(tmp_path, spec, tls=write(tmp_path / "tls", ours))
    syncer.program = ["-c", FEW_FILES]
    with syncer, ScriptedLearner(syncer, "eu/0", tls=ours) as honest, ExitStack() as stack:
        honest.join().initialise([random_delta(f, 1) for f in honest.layout.fragments])
        honest.expect("ready")
        good_round(honest)
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", syncer.port), timeout=20))
            for _ in range(600)
        ]
        for seed in range(3):
            good_round(honest, seed=seed)
        assert syncer.process is not None
        files = len(os.listdir(f"/proc/{syncer.process.pid}/fd"))
        assert files < 400 - servers.RESERVED_DESCRIPTORS // 2, "most of these are free"
        snapshots = until(
            lambda: [x for x in syncer.events("snapshot") if x["step"] == 4] and syncer.events("snapshot"),
            expected="a snapshot of the newest step",
        )  # fmt: skip
        assert all(x["ok"] for x in snapshots), snapshots

        def served() -> bool:
            try:
                return syncer.status(tls=ours, seconds=5).step == 4
            except DilocoError:
                return False

        seconds = 3 * servers.HANDSHAKE_SECONDS
        until(served, expected="a new client is served", seconds=seconds)
        until(lambda: all(map(_at_end, idle)), expected="they are closed", seconds=seconds)
        good_round(honest)
        syncer.assert_audit()


def _at_end(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass  # the server's settings
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_flood_of_reports_delays_no_learner_for_long(syncer, learner):
    over, sent = threading.Event(), [0]

    def flood(hello: pb.Hello) -> Iterator[pb.LearnerMessage]:
        yield pb.LearnerMessage(hello=hello)
        while not over.is_set():
            sent[0] += 1
            yield pb.LearnerMessage(heartbeat=pb.Heartbeat())

    with (
        ScriptedLearner(syncer, "us/0") as misbehaving,
        grpc.insecure_channel(syncer.endpoint) as wire,
    ):
        call = SyncerStub(wire).Session(flood(misbehaving.hello()))
        next(call)
        until(lambda: sent[0] > 5000, expected="a flood")
        for seed in range(3):
            good_round(learner, seed=seed)
        assert syncer.status(seconds=10).step > 0
        over.set()
        call.cancel()


# ---------------------------------------------------------------- memory for untrusted peers


def test_a16_only_learners_of_the_spec_have_a_metric_series(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--metrics-port", str(port))
    with RealSyncer(tmp_path, make_spec(learners={"eu": 2}), *flags) as syncer:
        with ScriptedLearner(syncer, "eu/0") as honest:
            honest.join()
            for index in range(2, 30):
                with ScriptedLearner(syncer, f"eu/{index}") as ghost:
                    with pytest.raises(UnavailableError):
                        ghost.join()
            assert [x.name for x in syncer.status().learners] == ["eu/0"]
            assert not syncer.status().differing

            def series() -> list[str]:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                    lines = page.read().decode().splitlines()
                return [x for x in lines if x.startswith("diloco_learner_staleness_steps{")]

            assert until(series, expected="a series") == [
                'diloco_learner_staleness_steps{learner="eu/0"} 0.0'
            ]


# ---------------------------------------------------------------- text

EVIL = "eu/0\n2026 level=error FAKE\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.\u2028"
CONTROLS = "\x1b\x07\x9b\u202e\u2028"


@pytest.mark.parametrize("flags", [(), ("--json-logs",)], ids=["text", "json"])
def test_b03_what_a_peer_states_is_one_line_of_the_log_without_controls(tmp_path, flags):
    with RealSyncer(tmp_path, make_spec(), *flags) as fresh:
        for field in ("learner", "job", "spec_hash", "region"):
            with ScriptedLearner(fresh, "eu/0") as misbehaving, pytest.raises(DilocoError):
                misbehaving.join(**{field: EVIL})
        with ScriptedLearner(fresh, "eu/0") as honest:
            honest.join()
            with ScriptedLearner(fresh, "eu/1") as misbehaving:
                misbehaving.epoch = honest.epoch
                header = bulk.UploadHeader(epoch=honest.epoch, learner=EVIL)
                assert misbehaving.stream(header).reply().refused
            honest.send(goodbye=pb.Goodbye(reason=EVIL))
            until(lambda: fresh.events("leave"), expected="the line of the goodbye")
        assert fresh.output().count("FAKE") >= 5, "the refusals are logged"
        for text in (fresh.output(), (fresh.dir / "events.jsonl").read_text()):
            assert not any(control in text for control in CONTROLS)
            assert not any(line.startswith("2026 level") for line in text.split("\n"))


# ---------------------------------------------------------------- identity


def test_a12_a_certificate_of_another_job_gets_nothing_from_this_one(tmp_path):
    authority = Authority()
    ours = authority.make()
    foreign = authority.make(job="k", regions=["eu"], names=["k-syncer"])
    observer = authority.make(regions=[], names=[], observer=True)
    operator = authority.make(regions=[], names=["j-syncer"])
    with RealSyncer(tmp_path, make_spec(), tls=write(tmp_path / "tls", ours)) as syncer:
        with ScriptedLearner(syncer, "eu/0", tls=ours) as honest:
            honest.join().initialise([random_delta(f, 1) for f in honest.layout.fragments])
            honest.expect("ready")
            good_round(honest)
            with ScriptedLearner(syncer, "eu/0", tls=foreign) as outsider:
                outsider.epoch, outsider.incarnation = honest.epoch, honest.incarnation
                with pytest.raises(UnauthorisedError):
                    outsider.join()
                with pytest.raises(UnauthorisedError):
                    outsider.download(0)
                with pytest.raises(UnauthorisedError, match="names no role in job j"):
                    outsider.download(0, learner="", epoch=0, incarnation=0)
                pull = honest.pull()
                delta_N = random_delta(honest.layout.fragments[pull.fragment], 1)
                assert outsider.upload(pull, delta_N).refused == "Unauthorised"
                assert honest.upload(pull, delta_N).done
            with pytest.raises(UnauthorisedError, match="names no role in job j"):
                syncer.status(tls=foreign)
            assert isinstance(refused(lambda: evaluate(syncer, foreign)), UnauthorisedError)
            assert not (syncer.dir / "eval.jsonl").read_text()
            for member in (observer, operator):
                assert syncer.status(tls=member).step > 0
                evaluate(syncer, member)
                with ScriptedLearner(syncer, "eu/1", tls=member) as reader:
                    reader.download(0, learner="", epoch=0, incarnation=0)
                    with pytest.raises(UnauthorisedError):
                        reader.join()


def evaluate(syncer: RealSyncer, tls: Tls) -> None:
    with channel(syncer.endpoint, tls=tls, purpose="control", server_name="j-syncer") as wire:
        SyncerStub(wire).Evaluated(pb.Evaluation(step=1, loss=1.0), timeout=10)
