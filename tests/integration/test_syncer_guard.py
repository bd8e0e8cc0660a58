"""
Members that lie about their work, against a real syncer: none of them owns a merge.

Four learners of equal work; the last one lies. The outer optimizer is plain (rate 1, no momentum), so
the step of Θ is the merged delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.model.fragments import Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.scripted import (
    END,
    F32,
    ScriptedLearner,
    Stream,
    chunk,
    committed,
    encoded,
    random_delta,
)
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

TENSORS = tuple(Tensor(name=name, shape=(64, 64), dtype="float32") for name in "ab")
NAMES = ("eu/0", "eu/1", "eu/2", "us/0")


@dataclass
class Job:
    """A syncer and four learners that have joined."""

    syncer: RealSyncer
    learners: list[ScriptedLearner]
    streams: list[Stream] = field(default_factory=list)

    def pulls(self, *, lie: int = 100) -> list[pb.Pull]:
        """All report a step of 100 tokens, the last one of `lie`."""
        for learner in self.learners[:-1]:
            learner.step()
        self.learners[-1].step(tokens=lie)
        return [learner.expect("pull") for learner in self.learners]

    def deltas(self, pull: pb.Pull) -> list[F32]:
        fragment = self.learners[0].layout.fragments[pull.fragment]
        return [random_delta(fragment, seed) for seed in range(len(self.learners))]

    def honest(self, pulls: list[pb.Pull], deltas: list[F32]) -> list[Stream]:
        """Uploads of the honest learners; kept, because a stream without a reference is cancelled."""
        honest = list(zip(self.learners, pulls, deltas, strict=False))[:3]
        self.streams += [learner.sent(pull, delta_N) for learner, pull, delta_N in honest]
        return self.streams

    def lie(self, pull: pb.Pull, delta_N: F32, **changes: Any) -> Stream:
        """The upload of the last one."""
        stream = self.learners[-1].sent(pull, delta_N, **changes)
        self.streams.append(stream)
        return stream

    def moved(self, pull: pb.Pull, before_N: F32) -> F32:
        """The merged delta of a committed round."""
        committed(self.learners[0], pull)
        return before_N - self.learners[0].theta(pull.fragment)

    def honest_round(self) -> None:
        """All do as they should; the lie before is not merged."""
        pulls = self.pulls()
        deltas = self.deltas(pulls[0])
        before_N = self.learners[0].theta(pulls[0].fragment)
        self.honest(pulls, deltas)
        self.lie(pulls[3], deltas[3])
        moved_N = self.moved(pulls[0], before_N)
        assert cosine(moved_N, sum(deltas)) > 0.999
        members = self.line()["members"]
        assert [(m["learner"], m["tokens"], m["clipped"]) for m in members] == [
            (name, 100, 0) for name in NAMES
        ]
        self.syncer.assert_audit()

    def line(self) -> dict[str, Any]:
        """The newest merge; its line is written in the background."""
        return until(lambda: self.syncer.events("merge"), expected="the line of the merge")[-1]

    def refusals(self) -> list[tuple[str, str]]:
        return [(line["learner"], line["reason"]) for line in self.syncer.events("refuse")]


@pytest.fixture
def job(request, tmp_path: Path) -> Iterator[Job]:
    changes: dict[str, Any] = getattr(request, "param", {})
    spec = make_spec(**{
        "quorum": 4, "learners": {"eu": 3, "us": 1},
        "outer_learning_rate": 1.0, "outer_momentum": 0.0, "outer_nesterov": False, **changes,
    })  # fmt: skip
    with ExitStack() as stack:
        syncer = stack.enter_context(RealSyncer(tmp_path, spec))
        learners = [
            stack.enter_context(ScriptedLearner(syncer, name, tensors=TENSORS)) for name in NAMES
        ]
        learners[0].join()
        learners[0].initialise([random_delta(f, 1) for f in learners[0].layout.fragments])
        for learner in learners[1:]:
            learner.join()
        for learner in learners:
            learner.expect("ready")
        yield Job(syncer, learners)


def cosine(a: F32, b: F32) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def test_a01_an_upload_that_states_other_counts_than_the_report_is_not_merged(job):
    pulls = job.pulls()
    deltas = job.deltas(pulls[0])
    job.honest(pulls, deltas)
    job.lie(pulls[3], deltas[3], tokens=2**63, steps=1)
    until(lambda: ("us/0", "CountsDiffer") in job.refusals(), expected="the lie is refused")
    job.honest_round()


def test_a01_false_counts_of_a_step_that_was_never_reported_are_not_merged(job):
    """It skips the report of its copy, and states the work of ten steps for it."""
    pulls = job.pulls()
    deltas = job.deltas(pulls[0])
    job.honest(pulls, deltas)
    member = job.learners[-1]
    member.local_step, member.total_tokens = member.local_step + 1, member.total_tokens + 100
    copied_at = member.local_step
    member.step()
    job.lie(pulls[3], deltas[3], local_step=copied_at, steps=10, tokens=1000)
    until(lambda: ("us/0", "CountsDiffer") in job.refusals(), expected="the lie is refused")
    job.honest_round()


@pytest.mark.parametrize("job", [{}, {"merge": "Average"}], indirect=True)
def test_a01_a_false_count_that_the_reports_repeat_is_bounded_by_the_others(job):
    lie = 2**40  # from its first report on: it has no history that would contradict
    pulls = job.pulls(lie=lie)
    before_N = job.learners[0].theta(pulls[0].fragment)
    deltas = job.deltas(pulls[0])
    job.honest(pulls, deltas)
    assert job.lie(pulls[3], deltas[3], tokens=lie).reply().done
    moved_N = job.moved(pulls[0], before_N)
    weights = [m["weight"] for m in job.line()["members"]]
    assert weights[3] / sum(weights) == pytest.approx(2.1**2 / (3 + 2.1**2))
    assert cosine(moved_N, sum(deltas[:3])) > 0.3
    job.syncer.assert_audit()


def test_a01_a_learner_that_begins_to_lie_is_bounded_by_its_own_history(job):
    for number in range(4):
        pulls = job.pulls(lie=100 if number < 3 else 2**40)
        tokens = 100 if number < 3 else 2**40
        deltas = job.deltas(pulls[0])
        job.honest(pulls, deltas)
        job.lie(pulls[3], deltas[3], tokens=tokens)
        committed(job.learners[0], pulls[0])
    until(lambda: len(job.syncer.events("merge")) == 4, expected="the fourth line")
    line = job.line()
    assert [m["tokens"] for m in line["members"]] == [100, 100, 100, 400]
    job.syncer.assert_audit()


def test_a02_a_norm_that_nothing_confirms_gives_no_direction(job):
    pulls = job.pulls()
    before_N = job.learners[0].theta(pulls[0].fragment)
    fragment = job.learners[0].layout.fragments[pulls[0].fragment]
    deltas = job.deltas(pulls[0])
    evil_N = random_delta(fragment, 99, size=1.0)
    for slot in fragment.slots:
        part_N = evil_N[slot.offset : slot.end]
        part_N *= np.float32(0.9e-12 / np.linalg.norm(part_N.astype(np.float64)))
    job.honest(pulls, deltas)
    norms = [1e-29] * len(fragment.slots)
    assert job.lie(pulls[3], evil_N, norms=norms).reply().done
    moved_N = job.moved(pulls[0], before_N)
    assert abs(cosine(moved_N, evil_N)) < 0.1
    assert cosine(moved_N, sum(deltas[:3])) > 0.999
    job.syncer.assert_audit()


@pytest.mark.parametrize("job", [{}, {"merge": "Average"}], indirect=True)
@pytest.mark.parametrize("size", [1.0, 1e10, 1e28, 1e34])
def test_a03_a_huge_delta_moves_theta_no_further_than_ten_usual_ones(job, size):
    pulls = job.pulls()
    before_N = job.learners[0].theta(pulls[0].fragment)
    deltas = job.deltas(pulls[0])
    huge_N = (np.float32(size * 100) * deltas[3]).astype(np.float32)
    job.honest(pulls, deltas)
    assert job.lie(pulls[3], huge_N).reply().done
    moved_N = job.moved(pulls[0], before_N)
    usual = np.linalg.norm(deltas[0])
    assert np.linalg.norm(moved_N) < 10.5 * usual
    member = job.line()["members"][3]
    assert member["clipped"] == 1
    assert member["ofMedian"] == pytest.approx(size * 100, rel=0.1)
    job.syncer.assert_audit()


def quantised(fmt: int, scale: float) -> Callable[[ScriptedLearner, pb.Pull], list[bytes]]:
    def payload(learner: ScriptedLearner, pull: pb.Pull) -> list[bytes]:
        lo, hi = learner.layout.fragments[pull.fragment].chunk(0)
        scales = np.full((hi - lo) // 128, scale, np.float32).tobytes()
        values = (hi - lo) if fmt == bulk.INT8 else (hi - lo) // 2
        return [scales + np.full(values, 0x77, np.uint8).tobytes()]

    return payload


@pytest.mark.parametrize("fmt", [bulk.BF16, bulk.INT8, bulk.INT4])
def test_a03_a_format_that_is_not_the_jobs_is_refused(job, fmt):
    pulls = job.pulls()
    deltas = job.deltas(pulls[0])
    job.honest(pulls, deltas)
    misbehaving = job.learners[3]
    if fmt == bulk.BF16:
        reply = job.lie(pulls[3], deltas[3], fmt=fmt).reply()
    else:
        stream = misbehaving.stream(misbehaving.header(pulls[3], format=fmt, norms=[1.0]))
        payloads = quantised(fmt, 3e36)(misbehaving, pulls[3])
        reply = stream.send(*(chunk(i, p) for i, p in enumerate(payloads)), END).reply()
    assert reply.refused == "Protocol"
    assert "of this job" in reply.detail
    job.honest_round()


@pytest.mark.parametrize("factor", [1e-29, 0.5, 2.0])
def test_a_norm_other_than_what_arrives_is_refused_whatever_its_size(job, factor):
    pulls = job.pulls()
    deltas = job.deltas(pulls[0])
    _, _, norms = encoded(job.learners[0].layout.fragments[pulls[0].fragment], deltas[3])
    job.honest(pulls, deltas)
    job.lie(pulls[3], deltas[3], norms=[factor * n for n in norms])
    until(lambda: ("us/0", "Protocol") in job.refusals(), expected="the norm is refused")
    job.honest_round()


def test_joins_name_the_address_of_the_peer(job):
    joins = job.syncer.events("join")
    assert {line["learner"] for line in joins} == set(NAMES)
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in joins)
    assert all(line["certificate"] == "" for line in joins)


@pytest.mark.parametrize("job", [{"quorum": 4, "guard": 0.0}], indirect=True)
def test_a03_without_a_guard_the_job_stops_at_its_last_good_parameters(job):
    pulls = job.pulls()
    before_N = job.learners[0].theta(pulls[0].fragment)
    deltas = job.deltas(pulls[0])
    job.honest(pulls, deltas)
    job.lie(pulls[3], (np.float32(1e30) * deltas[3]).astype(np.float32))
    until(lambda: job.syncer.events("halt"), expected="the job stops")
    status = until(lambda: job.syncer.status(), expected="a status")
    assert status.state == "Waiting"
    assert "root mean square" in status.waiting_for
    np.testing.assert_array_equal(job.learners[0].theta(pulls[0].fragment), before_N)
    assert not job.syncer.events("merge")
    assert job.syncer.terminate() == 0
    job.syncer.start()
    assert job.syncer.status().waiting_for == status.waiting_for, "a restart is no decision"
    # The way back: end what sent it, and choose the snapshot to start from; here, there was no merge.
    assert job.syncer.terminate() == 0
    (job.syncer.dir / "snapshots" / "from-snapshot").write_text("0")
    job.syncer.start()
    assert job.syncer.status().waiting_for.endswith("to upload the initial model")
