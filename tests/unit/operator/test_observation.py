"""An observation as plain values."""

from datetime import UTC, datetime

from diloco.v1 import syncer_pb2 as pb
from diloco_job.names import MAX_REGIONS
from diloco_operator.state.objects import controller_uid, identity
from diloco_operator.state.observation import Failure, LearnerAnswer, RegionFailure, answer_of

AT = datetime(2026, 3, 1, tzinfo=UTC)


def test_a_reply_becomes_plain_values():
    reply = pb.StatusReply(
        job="a",
        epoch=3,
        step=7,
        steps=9,
        tokens=11,
        spec_hash="ab",
        state="Training",
        quorum=2,
        seconds_since_merge=1.5,
        model_path="/m",
        model_sha256="cd",
        eval_step=6,
        learners=[
            pb.LearnerStatus(name="eu/0", region="eu", state="Gone", seconds_since_heard=-1.0)
        ],
    )
    answer = answer_of(reply, AT)
    assert answer.at == AT
    for name in ("job", "epoch", "step", "tokens", "spec_hash", "state"):
        assert getattr(answer, name) == getattr(reply, name), name
    for name in ("quorum", "seconds_since_merge", "model_path", "model_sha256", "eval_step"):
        assert getattr(answer, name) == getattr(reply, name), name

    assert answer.learners == (LearnerAnswer(name="eu/0", state="Gone", seconds_since_heard=-1.0),)


def test_an_answer_has_the_restarts_that_learners_report():
    reply = pb.StatusReply(learners=[pb.LearnerStatus(name="eu/0", restarts=4)])
    assert answer_of(reply, AT).learners[0].restarts == 4


def test_an_answer_has_the_failure_that_the_syncers_region_reported():
    reply = pb.StatusReply(failure=pb.Failure(reason="DeadlineExceeded", message="ran too long"))
    expected = Failure(reason="DeadlineExceeded", message="ran too long")
    assert answer_of(reply, AT).failure == expected
    assert answer_of(pb.StatusReply(), AT).failure is None


def test_an_answer_has_the_place_of_snapshots_that_are_lastingly_not_copied():
    copies = pb.SnapshotCopies(url="s3://b/j", problem="no route; next attempt in 7 s")
    assert answer_of(pb.StatusReply(copies=copies), AT).not_copied_to == ""
    copies.lasting = True
    assert answer_of(pb.StatusReply(copies=copies), AT).not_copied_to == "s3://b/j"


def test_an_answer_has_the_failures_of_regions_but_not_more_than_a_job_has_regions():
    reported = [
        pb.RegionFailure(region=f"r{i}", reason="R", message="m", learners=2) for i in range(100)
    ]
    found = answer_of(pb.StatusReply(region_failures=reported), AT).region_failures
    assert found[0] == RegionFailure(region="r0", reason="R", message="m", learners=2)
    assert len(found) == MAX_REGIONS


def test_only_the_controller_counts_as_owner():
    owners = [{"uid": "1"}, {"uid": "2", "controller": True}]
    child = {"kind": "Service", "metadata": {"name": "a", "ownerReferences": owners}}
    assert controller_uid(child) == "2"
    assert controller_uid({"kind": "Service", "metadata": {"name": "a"}}) == ""
    assert identity(child) == ("Service", "a")


def test_a13_of_an_answer_with_more_learners_than_any_job_the_first_are_read():
    reply = pb.StatusReply.FromString(b"\x8a\x01\x00" * 300_000)
    assert len(reply.learners) == 300_000
    assert len(answer_of(reply, AT).learners) == 32_000
