"""Numbers of peers: bounded and finite before anything else sees them."""

import json
import math

import pytest

from diloco.errors import ConfigError, ProtocolError
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.rpc import telemetry

NAN, INF = float("nan"), float("inf")


def report(**changes):
    fields = {
        "local_step": 5, "steps": [1, 2], "tokens": [10, 20], "offers": [0, 1], "total_tokens": 50,
        "loss": 2.5, "has_loss": True, "step_seconds": 0.5, "sync_seconds": 0.1, "global_step": 4, **changes,
    }  # fmt: skip
    return telemetry.reported(pb.Report(**fields), session=3, learner="eu/0", fragments=2)


def test_an_honest_report_arrives_as_it_is():
    seen = report()
    assert (seen.session, seen.learner, seen.local_step, seen.global_step) == (3, "eu/0", 5, 4)
    assert (seen.steps, seen.tokens, seen.offers) == ((1, 2), (10, 20), frozenset({0, 1}))
    assert (seen.total_tokens, seen.loss) == (50, 2.5)
    assert (seen.step_seconds, seen.sync_seconds) == (0.5, 0.1)
    assert report(has_loss=False).loss is None
    assert report(offers=[]).offers == frozenset()


@pytest.mark.parametrize("count", [2**40 + 1, 2**53 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", ["local_step", "global_step", "steps"])
def test_steps_beyond_their_bound_are_refused(name, count):
    with pytest.raises(ProtocolError, match=f"{name} is {count}"):
        report(**{name: [1, count] if name == "steps" else count})


@pytest.mark.parametrize("count", [2**50 + 1, 2**53 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", ["tokens", "total_tokens"])
def test_tokens_beyond_their_bound_are_refused(name, count):
    with pytest.raises(ProtocolError, match=f"{name} is {count}"):
        report(**{name: [count, 1] if name == "tokens" else count})


def test_counts_at_their_bounds_are_accepted():
    steps, tokens = telemetry.MAX_STEPS, telemetry.MAX_TOKENS
    seen = report(local_step=steps, steps=[steps, 0], tokens=[tokens, 0], total_tokens=tokens)
    assert (seen.local_step, seen.total_tokens) == (steps, tokens)
    assert 1000 * tokens < 2**63, "the tokens of 1000 learners fit an int64"
    assert steps < 2**53, "exact as a JSON number"


@pytest.mark.parametrize(
    "lists",
    [
        {"steps": []}, {"steps": [1]}, {"steps": [1] * 3}, {"tokens": []}, {"tokens": [1] * 200_000},
        {"offers": [2]}, {"offers": [2**32 - 1]}, {"offers": [0, 0]}, {"offers": [0] * 100_000},
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_the_model_are_refused(lists):
    with pytest.raises(ProtocolError, match="report:"):
        report(**lists)


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (NAN, 0.0), (INF, 0.0), (-INF, 0.0), (-1e12, 0.0), (-0.0, 0.0), (1e300, 86400.0),
        (86400.0, 86400.0), (5e-324, 5e-324),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["step_seconds", "sync_seconds"])
def test_a06_durations_are_finite_and_not_negative(name, stated, kept):
    assert getattr(report(**{name: stated}), name) == kept


@pytest.mark.parametrize(
    ("stated", "kept"),
    [(NAN, None), (INF, None), (-INF, None), (1e300, 1e30), (-1e300, -1e30), (1e30, 1e30)],
)
def test_a_loss_is_finite_or_unknown(stated, kept):
    assert report(loss=stated).loss == kept


# ---------------------------------------------------------------- Hello


@pytest.mark.parametrize("name", ["local_step", "checkpoint_step"])
@pytest.mark.parametrize("count", [2**40 + 1, 2**63, 2**64 - 1])
def test_positions_of_a_hello_beyond_their_bound_are_refused(name, count):
    with pytest.raises(ProtocolError, match=f"{name} is {count}"):
        telemetry.applicant(pb.Hello(**{name: count}))


@pytest.mark.parametrize(
    "facts",
    [{f"k{i}": "" for i in range(65)}, {"k" * 1025: ""}, {"k": "v" * 1025}],
)
def test_facts_of_a_hello_are_bounded(facts):
    with pytest.raises(ProtocolError, match="fact"):
        telemetry.applicant(pb.Hello(facts=facts))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"tensors": [pb.TensorInfo()] * (1 << 17)}, "131072 tensors"),
        ({"constants": [pb.TensorInfo()] * (1 << 17)}, "131072 tensors"),
        ({"tensors": [pb.TensorInfo(aliases=[""] * (1 << 16))]}, "65537 tensors"),
        ({"tensors": [pb.TensorInfo(name="w", shape=[1] * 17)]}, "tensor w has 17 dimensions"),
    ],
)
def test_a_model_beyond_its_limits_is_refused_before_objects_are_made_of_it(
    monkeypatch, model, message
):
    made = []
    monkeypatch.setattr(telemetry, "from_proto", made.append)
    with pytest.raises(ConfigError, match=message):
        telemetry.applicant(pb.Hello(**model))
    assert made == []


@pytest.mark.parametrize(
    ("stated", "kept"), [("3", 3), ("", 0), ("-1", 0), ("9" * 30, 0), ("999999999", 999999999)]
)
def test_restarts_are_a_plausible_count_or_unknown(stated, kept):
    hello = pb.Hello(learner="eu/0", incarnation=4, facts={"restarts": stated})
    event = telemetry.joined(hello, session=1, incarnation=4)
    assert (event.restarts, event.fresh, event.incarnation) == (kept, False, 4)


# ---------------------------------------------------------------- Evaluation


def score(**changes):
    return telemetry.score(pb.Evaluation(**{"step": 3, "loss": 1.5, **changes}), steps=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 11}, "evaluation of step 11, but the job has 10 steps"),
        ({"step": 2**64 - 1}, "the job has 10"),
        ({"loss": NAN}, "the loss is nan"),
        ({"loss": INF}, "the loss is inf"),
        ({"loss": -INF}, "the loss is -inf"),
        ({"detail": "x"}, "not JSON"),
        ({"detail": '{"a": NaN}'}, "not JSON"),
        ({"detail": '{"a": -Infinity}'}, "not JSON"),
        ({"detail": '{"a": 1' + "0" * 5000 + "}"}, "not JSON"),
        ({"detail": "[" * 16_000}, "not JSON"),
        ({"detail": "[1]"}, "not a JSON object"),
        ({"detail": '{"a": "' + "x" * 20_000 + '"}'}, "more than 16384 bytes"),
    ],
)
def test_an_evaluation_beyond_a_bound_is_refused(changes, message):
    with pytest.raises(ProtocolError, match="evaluation") as seen:
        score(**changes)
    assert message in str(seen.value)


def test_members_of_a_detail_that_are_no_plain_numbers_are_left_out():
    detail = {
        "a": 0.5, "b": True, "c": None, "d": "text", "e": 7, "huge": 10**400, "deep": {"a": 1},
        "list": [1], "long": "x" * 300, "control": "\x1b[31m", "a\nb": 1, "n" * 300: 1,
    }  # fmt: skip
    text = json.dumps(detail)[:-1] + ', "infinite": 1e999}'
    seen = score(detail=text).detail
    assert seen == {"a": 0.5, "b": True, "c": None, "d": "text", "e": 7}
    many = json.dumps({f"k{i}": i for i in range(1000)})
    assert len(score(detail=many).detail) == telemetry.MAX_DETAILS


def test_a_finite_loss_is_clamped():
    assert score(loss=1e300).loss == 1e30
    assert math.isfinite(score(loss=1e300).loss ** 2)


# ---------------------------------------------------------------- bytes


def test_a_message_is_parsed_only_within_its_length():
    data = pb.Evaluation(step=1, detail="x" * 100).SerializeToString()
    assert telemetry.parse(data, pb.Evaluation, most=len(data)).step == 1
    with pytest.raises(ProtocolError, match="expected at most"):
        telemetry.parse(data, pb.Evaluation, most=len(data) - 1)
    with pytest.raises(ProtocolError, match="not a valid Evaluation"):
        telemetry.parse(b"\xff" * 9, pb.Evaluation, most=100)


@pytest.mark.parametrize("fragments", [1, 24, 1000])
def test_the_largest_honest_report_fits(fragments):
    message = pb.LearnerMessage(
        report=pb.Report(
            local_step=2**40, steps=[2**40] * fragments, tokens=[2**50] * fragments,
            offers=range(fragments), total_tokens=2**50, loss=1.0, has_loss=True, step_seconds=1.0,
            sync_seconds=1.0, global_step=2**40,
        )
    )  # fmt: skip
    assert message.ByteSize() <= telemetry.report_bytes(fragments)


# ---------------------------------------------------------------- Failure


def test_a_failure_is_shortened_to_what_a_condition_holds():
    report = pb.Failure(reason="R" * 500, message="m\x1b" * 1000)
    reason, message = telemetry.failure(report)
    assert (len(reason), len(message)) == (telemetry.MAX_REASON, telemetry.MAX_MESSAGE)
    assert message.isprintable()


def test_a_failure_of_a_region_is_shortened_and_without_a_reason_it_is_over():
    report = pb.RegionFailure(region="eu", reason="R" * 500, message="m\x1b" * 1000)
    region, reason, message = telemetry.region_failure(report, {"eu": 2})
    assert region == "eu"
    assert (len(reason), len(message)) == (telemetry.MAX_REASON, telemetry.MAX_MESSAGE)
    assert message.isprintable()
    over = telemetry.region_failure(pb.RegionFailure(region="eu"), {"eu": 2})
    assert over == ("eu", "", "")


def test_a_failure_of_a_region_that_the_job_does_not_have_is_refused():
    with pytest.raises(ProtocolError, match="failure of region asia, which the job does not have"):
        telemetry.region_failure(pb.RegionFailure(region="asia", reason="R"), {"eu": 2})


def test_a_failure_without_a_reason_is_refused():
    with pytest.raises(ProtocolError, match="without a reason"):
        telemetry.failure(pb.Failure(message="lost"))
