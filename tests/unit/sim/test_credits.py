"""The checker of credits judges what a member is credited by what arrived, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.checkers.checker import Checkers, Violation
from diloco_sim.checkers.credits import Credits
from diloco_sim.checkers.observations import Received, ReportArrived, Resumed
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import BeginMerge

SPEC = RunSpec(
    job="t", steps=9, fragments=2, interval=8, overlap=1, quorum=1, learners={"eu": 2}, guard=10.0
)
"""A round credits 12 steps at most."""

FALSE = "eu/1"
RESUMED = Resumed(2, 1, None, SPEC, {})


def report(
    local_step: int, steps: int, tokens: int, *, learner: str = "eu/0", incarnation: int = 1,
    total: int | None = None,
) -> Any:  # fmt: skip
    """Of both fragments."""
    stated = pb.Report(
        local_step=local_step, steps=[steps] * 2, tokens=[tokens] * 2,
        total_tokens=100 * local_step if total is None else total,
    )  # fmt: skip
    return ReportArrived(learner, incarnation, stated)


def upload(
    local_step: int, steps: int, tokens: int, *, learner: str = "eu/0", incarnation: int = 1
) -> Any:
    header = bulk.UploadHeader(
        learner=learner, incarnation=incarnation, round=1, attempt=1, local_step=local_step, steps=steps,
        tokens=tokens, content=bulk.DELTA,
    )  # fmt: skip
    return Received(header, {})


def merge(
    local_step: int, steps: int, tokens: int, *, learner: str = "eu/0", incarnation: int = 1
) -> Any:
    member = Contribution(
        learner=learner, incarnation=incarnation, round=1, attempt=1, local_step=local_step, steps=steps,
        tokens=tokens, base=(1, 0), format=1, norms=(),
    )  # fmt: skip
    return BeginMerge(round=1, attempt=1, fragment=0, contributions=(member,))


def of_false(kind: Any, *facts: int, **more: Any) -> Any:
    return kind(*facts, learner=FALSE, **more)


def begins_to_lie(*credited: int) -> tuple[Any, ...]:
    """Two honest reports, then one of a thousand times the tokens, and its merge."""
    return (
        of_false(report, 1, 1, 100), of_false(report, 2, 2, 200),
        of_false(report, 3, 3, 300_000, total=300_000),
        of_false(upload, 3, 3, 300_000), of_false(merge, 3, *credited),
    )  # fmt: skip


@pytest.mark.parametrize(
    "events",
    [
        (report(4, 4, 400), upload(4, 4, 400), merge(4, 4, 400)),
        # The report of its step was replaced by a newer one.
        (report(3, 3, 300), upload(4, 4, 400), report(5, 5, 500), merge(4, 4, 400)),
        # It was cut off for long.
        (report(90, 90, 9000), upload(90, 90, 9000), merge(90, 12, 1200)),
        # Another incarnation counts from its own start.
        (report(4, 4, 400), report(4, 2, 200, incarnation=2), upload(4, 2, 200, incarnation=2),
         report(6, 6, 600), merge(4, 2, 200, incarnation=2)),
        # A syncer that starts knows nothing of what its predecessor received.
        (report(4, 4, 400), RESUMED, report(4, 3, 300), upload(4, 3, 300), merge(4, 3, 300)),
        begins_to_lie(3, 600),
    ],
)  # fmt: skip
def test_what_reports_and_headers_explain_is_accepted(events):
    judge(events)


@pytest.mark.parametrize(
    ("sentence", "events"),
    [
        ("no upload of that step has arrived", (report(4, 4, 400), merge(4, 4, 400))),
        ("no report of it has arrived", (report(4, 4, 400), RESUMED, upload(4, 4, 400), merge(4, 4, 400))),
        ("the honest learner has 400 in 4", (report(4, 4, 400), upload(4, 4, 400), merge(4, 4, 399))),
        ("the honest learner has 400 in 4", (report(4, 4, 400), upload(4, 4, 400), merge(4, 3, 400))),
        ("the honest learner has 1200 in 12", (report(90, 90, 9000), upload(90, 90, 9000), merge(90, 90, 9000))),
        ("its upload states 400 in 4, its report not", (report(4, 4, 401), upload(4, 4, 400), merge(4, 4, 400))),
        ("its reports explain at most 600 tokens", begins_to_lie(3, 300_000)),
        ("its reports explain at most 600 tokens", begins_to_lie(3, 602)),
        ("its reports explain at most 3 steps", begins_to_lie(4, 600)),
        ("its reports explain at most 2 steps", (
            of_false(report, 2, 0, 0), of_false(upload, 4, 24, 2400), of_false(merge, 4, 12, 1200),
        )),
    ],
)  # fmt: skip
def test_what_they_do_not_explain_is_found(sentence, events):
    with pytest.raises(Violation, match=sentence):
        judge(events)


def judge(events: tuple[Any, ...]) -> None:
    checkers = Checkers([Credits(SPEC, false={FALSE})])
    for now, event in enumerate(events):
        checkers.observe(event, float(now))
    checkers.finish(float(len(events)))
