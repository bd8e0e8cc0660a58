"""
What a syncer wrote while it believed a lie: `diloco audit` finds it (a01, a02, a07).

A break puts the defect back into the real coordinator and merge. No line is made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diloco.journal.audit import audit
from diloco.model.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import admission, engine, guard
from diloco_syncer.core import events as ev
from diloco_syncer.core.history import History
from diloco_syncer.merging import blend
from diloco_testing.learners.scripted import F32, random_delta, thetas_of
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))
NAMES = ("eu/0", "eu/1", "eu/2", "eu/3")


class Lied:
    """Four learners in one round; the last one lies."""

    def __init__(self, merge: str = "Radial") -> None:
        self.syncer = DrivenSyncer(driven_spec(quorum=4, merge=merge))
        self.learners = [DrivenLearner(self.syncer, name, TENSORS) for name in NAMES]
        self.learners[0].initialise(thetas_of(self.learners[0]))
        self.steps, self.tokens = 1, 100
        """Of the last one, as it states them."""

    def round(self, delta: Callable[[F32], F32] = lambda honest_N: honest_N, **header: Any) -> None:
        """All report and upload; the last one a delta made of an honest one, and its header with changes."""
        for learner in self.learners[:-1]:
            learner.step()
        self._report()
        pulls = [self._pull(learner) for learner in self.learners]
        fragment = self.learners[0].layout.fragments[pulls[0].fragment]
        deltas = [random_delta(fragment, seed) for seed in range(len(NAMES))]
        deltas[-1] = delta(deltas[-1])
        stated = {"steps": self.steps, "tokens": self.tokens, **header}
        uploads = [
            learner.upload(pull, delta_N, **(stated if learner.name == NAMES[-1] else {}))
            for learner, pull, delta_N in zip(self.learners, pulls, deltas, strict=True)
        ]
        for upload in uploads:
            upload.send(1)
        self.syncer.run()
        for upload in uploads:
            upload.resume().send_all()
        self.syncer.run()

    def _report(self) -> None:
        last = self.learners[-1]
        last.local_step += self.steps
        rows = self.syncer.spec.fragments
        self.syncer.run(
            ev.Reported(
                session=last.session.number, learner=last.name, local_step=last.local_step,
                steps=(self.steps,) * rows, tokens=(self.tokens,) * rows, offers=frozenset(range(rows)),
                total_tokens=self.tokens, global_step=0, step_seconds=1.0, sync_seconds=0.0, loss=None,
            )
        )  # fmt: skip

    def _pull(self, learner: DrivenLearner) -> pb.Pull:
        messages = [m for m in learner.received() if isinstance(m, pb.SyncerMessage)]
        [pull] = [m.pull for m in messages if m.WhichOneof("kind") == "pull"]
        return pull

    def violations(self) -> tuple[str, ...]:
        """What the audit of its lines finds."""
        return audit(json.dumps({"epoch": 1, **line}) for line in self.syncer.lines).violations


def short(honest_N: F32) -> F32:
    """A delta whose norm nothing can confirm."""
    return (honest_N * np.float32(0.4e-12 / np.linalg.norm(honest_N))).astype(np.float32)


@pytest.mark.parametrize("merge", ["Radial", "Average"])
def test_a01_the_audit_finds_the_weight_of_tokens_that_no_report_states(
    merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie() -> Lied:
        lied = Lied(merge)
        lied.round(tokens=2**63, steps=1)
        return lied

    whole = lie()
    assert (whole.syncer.merged(), whole.violations()) == ([], ())
    monkeypatch.setattr(History, "credit", lambda self, upload, fragment: upload)
    monkeypatch.setattr(guard, "weight_limits", lambda members: [math.inf] * len(members))
    believed = lie()
    assert believed.syncer.merged() == [1]
    [sentence] = believed.violations()
    assert "eu/3 (incarnation 4) has weight 8.5070591730" in sentence


def test_a02_the_audit_finds_a_direction_that_rests_on_a_norm_which_nothing_confirms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie() -> Lied:
        lied = Lied()
        lied.round(short, norms=[1e-29] * 2)
        return lied

    whole = lie()
    assert (whole.syncer.merged(), whole.violations()) == ([1], ())
    monkeypatch.setattr(blend, "NORM_FLOOR", 0.0)
    believed = lie()
    assert believed.syncer.merged() == [1]
    [sentence] = believed.violations()
    assert "eu/3 (incarnation 4) stated a norm that differs by" in sentence


def test_a07_the_audit_finds_a_learner_that_the_job_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lied = Lied()
    for module in (admission, engine):
        monkeypatch.setattr(module, "beyond", lambda learner, limits: "")
    DrivenLearner(lied.syncer, "eu/123456789", TENSORS)
    [sentence] = lied.violations()
    assert "eu/123456789 joined, but is not one of the learners of the spec" in sentence


def test_a07_the_audit_finds_steps_that_leave_no_delta() -> None:
    lied = Lied("Average")
    lied.steps, lied.tokens = 32, 3200
    lied.round(np.zeros_like)
    assert lied.syncer.merged() == [1]
    [sentence] = lied.violations()
    assert "eu/3 claims 6 steps, the others 1, and its delta is empty" in sentence


@pytest.mark.parametrize(("tokens", "confirmed"), [(100, True), (0, False)])
def test_a07_an_upload_without_tokens_confirms_no_steps(tokens: int, confirmed: bool) -> None:
    """However long its delta is; the pace goes by that (`LearnerRecord.confirmed`)."""
    lied = Lied()
    lied.tokens = tokens
    lied.round()
    assert lied.syncer.merged() == [1]
    records = lied.syncer.state.engine.learners
    assert [record.confirmed for record in records] == [True, True, True, confirmed]
