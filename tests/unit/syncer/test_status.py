"""What GetStatus and the metrics show of learners."""

import contextlib
import dataclasses
import time

import pytest

from diloco.model.fragments import Tensor, cut
from diloco.rpc import servers
from diloco.rpc.status_client import STATUS_BYTES, SyncerClient
from diloco.rpc.tensor_info import to_proto
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerServicer, add_SyncerServicer_to_server
from diloco_syncer import metrics as metrics_module
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import MAX_TENSORS
from diloco_syncer.core.learners import Ejection, Probe
from diloco_syncer.core.upload_limits import UploadProgress
from diloco_syncer.metrics import Metrics
from diloco_syncer.rpc import status
from diloco_syncer.rpc.telemetry import HELLO_BYTES
from diloco_syncer.storage.copy_schedule import CopyState
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(2))


@pytest.fixture
def syncer():
    syncer = DrivenSyncer(driven_spec(quorum=1))
    learners = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(2)]
    learners[0].initialise([random_delta(f, 9) for f in learners[0].layout.fragments])
    for learner in learners:
        learner.step()
    return syncer


def eject(syncer, name, **changes):
    record = syncer.state.engine.learners.by_name[name]
    record.ejection = Ejection(reason="AnswerLate", failed_at=0.0, **changes)
    syncer.state.engine.learners.changed()


def shown(syncer, name):
    found = status.reply(syncer.state, syncer.metrics)
    return next(learner for learner in found.learners if learner.name == name)


def test_an_ejected_learner_is_shown_with_its_reason_and_its_next_probe(syncer):
    eject(syncer, "eu/1", probe_at=time.monotonic() + 1000)
    learner = shown(syncer, "eu/1")
    assert learner.state == "Ejected"
    assert learner.detail.startswith("AnswerLate; next probe in ")
    assert (shown(syncer, "eu/0").state, shown(syncer, "eu/0").detail) == ("Training", "")


def test_a_status_of_27000_ejected_learners_after_a_long_training_is_read(syncer):
    record = syncer.state.engine.learners.by_name["eu/1"]
    record.name, record.region = "eu-west-1/26999", "eu-west-1"
    record.incarnation = 60_000
    record.local_step = syncer.state.engine.scheduler.step = record.merges = 1_000_000
    record.total_tokens, record.restarts = 10**12, 99
    record.report = dataclasses.replace(record.report, global_step=1_000_000, loss=2.5)
    record.ejection = Ejection(reason="AnswerLate", failed_at=0.0, probe_at=time.monotonic() + 500)
    found = status.learner_status(syncer.state.engine, record, time.monotonic())
    assert "next probe" in found.detail
    all_of_them = 27_000 * len(pb.StatusReply(learners=[found]).SerializeToString())
    assert 0.9 * STATUS_BYTES < all_of_them < STATUS_BYTES


def test_a_status_of_many_learners_leaves_out_how_each_began(syncer, monkeypatch):
    for record in syncer.state.engine.learners:
        record.recovery = ev.Recovered(
            session=1, learner=record.name, source="None", problem="x" * 1000
        )
    count = len(list(syncer.state.engine.learners))
    assert all(x.HasField("recovery") for x in status.reply(syncer.state, syncer.metrics).learners)
    monkeypatch.setattr(status, "MOST_RECOVERIES", count - 1)
    found = status.reply(syncer.state, syncer.metrics).learners
    assert [x.HasField("recovery") for x in found] == [False] * count


class Served(SyncerServicer):
    """GetStatus as the syncer answers it, over a real connection."""

    def __init__(self, syncer):
        self.syncer = syncer

    def GetStatus(self, request, context):  # noqa: N802
        return status.reply(self.syncer.state, self.syncer.metrics, request)


@pytest.mark.slow
def test_the_status_of_1000_learners_of_the_largest_model_is_read():
    """Its tensors may be as many bytes as a Hello: with them, the operator could never read it."""
    syncer = DrivenSyncer(driven_spec(quorum=1, learners={"eu": 1000}))
    for number in range(1000):
        DrivenLearner(syncer, f"eu/{number}", TENSORS)
    names = (
        f"model.layers.{number:05}.self_attention.key.weight" for number in range(MAX_TENSORS - 1)
    )
    tensors = [Tensor(name=name, shape=(1024, 1024), dtype="bfloat16") for name in names]
    hello = pb.LearnerMessage(hello=pb.Hello(tensors=map(to_proto, tensors))).ByteSize()
    assert 0.98 * HELLO_BYTES < hello < HELLO_BYTES, "such a learner is not refused"
    syncer.state.admission.layout = cut(tensors, num_fragments=2)
    assert status.reply(syncer.state, syncer.metrics).ByteSize() > STATUS_BYTES
    server = servers.server(max_workers=2)
    add_SyncerServicer_to_server(Served(syncer), server)
    port = servers.bind(server, "127.0.0.1:0", None)
    server.start()
    try:
        with contextlib.closing(SyncerClient(f"127.0.0.1:{port}")) as client:
            found = client.status(timeout_seconds=20)
    finally:
        server.stop(None).wait(10)
    assert len(found.learners) == 1000
    assert not found.tensors
    assert not found.tied_constants


def test_a_client_that_does_not_know_the_field_gets_the_model(syncer):
    shown = status.reply(syncer.state, syncer.metrics, pb.StatusRequest())
    assert [tensor.name for tensor in shown.tensors] == ["t0", "t1"]


def test_a_probe_in_progress_and_a_probe_that_is_due_are_distinguished(syncer):
    eject(syncer, "eu/1", probe_at=time.monotonic() - 1)
    assert shown(syncer, "eu/1").detail == "AnswerLate; a probe is due"
    probe = Probe(round=1, attempt=1, upload=UploadProgress.begin(0.0))
    eject(syncer, "eu/1", probe_at=0.0, probe=probe)
    assert shown(syncer, "eu/1").detail == "AnswerLate; a probe is in progress"


def test_a_failure_that_was_reported_is_repeated(syncer):
    assert not status.reply(syncer.state, syncer.metrics).HasField("failure")
    syncer.state.failure = ("DeadlineExceeded", "ran too long")
    shown = status.reply(syncer.state, syncer.metrics).failure
    assert (shown.reason, shown.message) == ("DeadlineExceeded", "ran too long")


def test_failures_of_regions_that_the_job_has_are_repeated(syncer):
    failure = ("LearnerRefused", "all its learners failed", 2)
    syncer.state.region_failures = {"eu": failure, "gone": failure}
    [shown] = status.reply(syncer.state, syncer.metrics).region_failures
    assert (shown.region, shown.reason, shown.message, shown.learners) == ("eu", *failure)


def test_copies_of_snapshots_are_shown_where_there_are_any(syncer):
    assert not status.reply(syncer.state, syncer.metrics).HasField("copies")
    syncer.state.copies = lambda: CopyState(url="s3://b/j")
    assert status.reply(syncer.state, syncer.metrics).copies == pb.SnapshotCopies(url="s3://b/j")
    syncer.state.copies = lambda: CopyState(
        url="s3://b/j", step=0, problem="no route", lasting=True
    )
    assert status.reply(syncer.state, syncer.metrics).copies == pb.SnapshotCopies(
        url="s3://b/j", has_step=True, step=0, problem="no route", lasting=True
    )


def test_metrics_count_copies_of_snapshots_and_failed_attempts(monkeypatch):
    served = []
    monkeypatch.setattr(metrics_module, "serve", lambda port, registry: served.append(registry))
    metrics = Metrics(1)
    metrics.event("copy", {"step": 48, "ok": True, "seconds": 2.5})
    metrics.event("copy", {"step": 48, "ok": False, "detail": "no route"})
    [registry] = served
    values = {
        name: registry.get_sample_value(f"diloco_snapshot_copy_{name}")
        for name in ("step", "seconds_sum", "failures_total")
    }
    assert values == {"step": 48, "seconds_sum": 2.5, "failures_total": 1}


def test_metrics_count_ejected_learners_and_ejections(syncer, monkeypatch):
    served = []
    monkeypatch.setattr(metrics_module, "serve", lambda port, registry: served.append(registry))
    metrics = Metrics(1)
    eject(syncer, "eu/1", probe_at=time.monotonic())
    metrics.update(syncer.state.engine)
    metrics.event("eject", {"learner": "eu/1", "reason": "AnswerLate", "probeSeconds": 5.0})
    [registry] = served
    counts = {
        state: registry.get_sample_value("diloco_learners", {"region": "eu", "state": state})
        for state in ("Training", "Ejected", "Joining", "Gone")
    }
    assert counts == {"Training": 1, "Ejected": 1, "Joining": 0, "Gone": 0}
    assert registry.get_sample_value("diloco_ejections_total", {"reason": "AnswerLate"}) == 1


def test_a16_a_learner_that_was_removed_from_the_job_no_longer_has_a_series(syncer, monkeypatch):
    """Its tokens still count: a counter that became smaller would raise, and all metrics would stop."""
    served = []
    monkeypatch.setattr(metrics_module, "serve", lambda port, registry: served.append(registry))
    metrics = Metrics(1)

    def series():
        metrics.update(syncer.state.engine)
        found = [m for m in served[0].collect() if m.name == "diloco_learner_staleness_steps"]
        return [sample.labels["learner"] for sample in found[0].samples]

    assert series() == ["eu/0", "eu/1"]
    syncer.run(ev.LimitsChanged(learners={"eu": 1}))
    assert series() == ["eu/0"]
    assert served[0].get_sample_value("diloco_tokens_total", {"region": "eu"}) == 200
    syncer.run(ev.LimitsChanged(learners={"eu": 2}))
    assert series() == ["eu/0", "eu/1"], "it is missing, and expected"
    syncer.run(ev.LimitsChanged(learners={"us": 2}))
    assert series() == []
    states = [s for m in served[0].collect() if m.name == "diloco_learners" for s in m.samples]
    assert {s.value for s in states} == {0.0}, "of a region that is gone, none trains"


def test_the_status_states_that_no_merge_has_changed_a_parameter(syncer):
    assert status.reply(syncer.state, syncer.metrics).unchanged
    syncer.state.engine.scheduler.parameters_changed = True
    assert not status.reply(syncer.state, syncer.metrics).unchanged
