"""Members that misbehave: what they do arrives at the syncer, and the promises to the others hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco.codec import formats, frames
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.behaviour import Behaviour
from diloco_sim.description import Description, sample
from diloco_sim.faults import MISBEHAVIOUR, Fault, Kind, Plan
from diloco_sim.world import World
from diloco_syncer.core.admission import Admission

HONEST = ("eu/1", "us/0", "us/1")


class Lines:
    """Merges, their members, and the reasons for refusals, of a world."""

    observes = (dict,)

    def __init__(self) -> None:
        self.merges: list[Mapping[str, Any]] = []
        self.reasons: Counter[tuple[str, str]] = Counter()

    def observe(self, event: dict[str, Any], now: float) -> None:
        if event["event"] == "merge":
            self.merges.append(event)
        elif "reason" in event:
            self.reasons[event["event"], event["reason"]] += 1

    def finish(self, now: float) -> None:
        pass

    def of(self, learner: str) -> int:
        return sum(any(m["learner"] == learner for m in merge["members"]) for merge in self.merges)


def four(plan: str, *, wire_up: str = "FP32") -> Description:
    """Four learners of one speed; a step takes a second, and any three are a quorum, and guarded."""
    found = sample(0, steps=60, faults=False)
    spec = replace(
        found.spec, fragments=2, interval=2, overlap=1, quorum=3, merge="Average", wire_up=wire_up,
        outer_momentum=0.5, wire_down="FP32", grace_max_steps=1.0, guard=10.0,
    )  # fmt: skip
    return replace(
        found, learners=4, spec=spec, sizes=(40, 50, 60), step_seconds=(1.0, 1.03, 1.06, 1.09),
        plan=Plan.parse(plan), checkpoint_every=None, latency=0.01,
    )  # fmt: skip


PLANS = {
    Kind.MUTE: "mute eu/0",
    Kind.TRICKLE: "trickle eu/0 100",
    Kind.STALE: "stale eu/0",
    Kind.WRONG_ROUND: "wrong-round eu/0",
    Kind.LIE_TOKENS: "lie-tokens eu/0 1000",
    Kind.LIE_STEPS: "lie-steps eu/0 100",
    Kind.LIE_NORMS: "lie-norms eu/0 0.001",
    Kind.LIE_SECONDS: "lie-seconds eu/0 1e6",
    Kind.AHEAD: "ahead eu/0 1e6",
    Kind.NAN: "nan eu/0",
    Kind.HUGE: "huge eu/0 1e6",
    Kind.WRONG_FORMAT: "wrong-format eu/0",
    Kind.IMPERSONATE: "impersonate eu/0",
    Kind.TWIN: "twin eu/0",
    Kind.TWICE: "twice eu/0",
    Kind.NEWER: "newer eu/0",
}


def test_every_kind_has_a_world_below():
    assert set(PLANS) == set(MISBEHAVIOUR)


@pytest.mark.slow
@pytest.mark.parametrize("wire_up", ["FP32", "Int8"])
@pytest.mark.parametrize("kind", MISBEHAVIOUR)
def test_the_others_are_merged_whatever_a_member_does(kind, wire_up):
    lines = Lines()
    outcome = World(four(f"8..40 {PLANS[kind]}", wire_up=wire_up), checkers=[lines]).run()
    assert outcome.ok, outcome.violation
    assert outcome.injected == {kind: 1}
    assert (outcome.stopped, len(lines.merges)) == ("", 60)
    assert min(map(lines.of, HONEST)) > 40, lines.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        (Kind.NAN, {("eject", "NotFinite")}),
        (Kind.WRONG_FORMAT, {("eject", "Protocol")}),
        (Kind.IMPERSONATE, {("refuse", "StaleIncarnation"), ("refuse", "Unavailable"), ("refuse", "Mismatch")}),
    ],
)  # fmt: skip
def test_what_a_member_sends_wrongly_is_refused(kind, reasons):
    lines = Lines()
    World(four(f"8..40 {PLANS[kind]}"), checkers=[lines]).run()
    assert reasons <= set(lines.reasons), lines.reasons


@pytest.mark.slow
def test_incarnations_finds_an_impersonator_that_is_admitted(monkeypatch):
    monkeypatch.setattr(Admission, "_check_incarnation", lambda self, *a, **k: None)
    found = World(four("8..40 impersonate eu/0")).run().violation
    assert found is not None
    assert (found.checker, "an impersonator is admitted as eu/0" in found.sentence) == (
        "incarnations",
        True,
    )


# ------------------------------------------------------------ what is sent


def behaves(line: str) -> Behaviour:
    found = Behaviour()
    found.change(Fault.parse(f"0..1 {line}"), True)
    return found


def test_a_member_that_is_ahead_states_it_in_reports_and_uploads_alike():
    ahead = behaves("ahead eu/0 500")
    header = bulk.UploadHeader(local_step=7)
    ahead.header(header)
    assert (header.local_step, ahead.report(pb.Report(local_step=7), None).local_step) == (507, 507)


def test_false_durations_are_also_some_that_no_clock_shows():
    lies = behaves("lie-seconds eu/0 1000")
    seconds = [
        lies.report(pb.Report(local_step=step, step_seconds=2.0, sync_seconds=0.5), None)
        for step in range(8)
    ]
    assert [r.step_seconds for r in seconds[1:]] == [np.inf, -1.0] + 5 * [2000.0]
    assert np.isnan(seconds[0].sync_seconds)
    assert seconds[3].sync_seconds == 500.0


@pytest.mark.parametrize("format_", [formats.FP32, formats.BF16, formats.INT8, formats.INT4])
def test_spoiled_chunks_are_not_finite_in_any_format_and_their_checksum_is_right(format_):
    payload = np.zeros(formats.encoded_bytes(format_, 256), np.uint8)
    formats.encode(format_, np.ones(256, np.float32), payload)
    sent = behaves("nan eu/0").message(frames.pack(frames.Kind.CHUNK, 3, payload))
    envelope = frames.unpack(sent)
    assert (envelope.kind, envelope.index) == (frames.Kind.CHUNK, 3)
    with pytest.raises(Exception, match="NaN"):
        formats.decode(format_, envelope.payload, np.zeros(256, np.float32))


def test_a_wrong_format_is_never_that_of_the_job():
    for step in range(8):
        for format_ in (formats.FP32, formats.BF16, formats.INT8, formats.INT4):
            header = bulk.UploadHeader(format=format_, local_step=step)
            behaves("wrong-format eu/0").header(header)
            assert header.format not in (format_, bulk.FORMAT_UNSPECIFIED, bulk.RAW)


def test_a_member_that_no_longer_misbehaves_states_what_is_true():
    honest = Behaviour()
    for line in PLANS.values():
        fault = Fault.parse(f"0..1 {line}")
        honest.change(fault, True)
        honest.change(fault, False)
    header = bulk.UploadHeader(local_step=7, tokens=9, steps=3, norms=[1.0], round=2, format=1)
    before = header.SerializeToString()
    honest.header(header)
    assert header.SerializeToString() == before
    values_N = np.ones(4, np.float32)
    assert honest.copied(values_N, 7) is values_N
    assert honest.report(pb.Report(local_step=7), pb.Report()) == pb.Report(local_step=7)
    assert (honest.mute, honest.stale, honest.trickle) == (False, False, 0.0)
