"""Which learners may join: decided from values, without gRPC."""

import dataclasses

import pytest

from diloco.errors import (
    ConfigError,
    MismatchError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.model.fragments import Tensor
from diloco.spec import RunSpec
from diloco_syncer.core import admission as limits
from diloco_syncer.core.admission import Admission, Admitted, Applicant, Model, Refused

SPEC = RunSpec(job="j", steps=10, fragments=2, interval=2, overlap=1, learners={"eu": 2, "us": 1})
TENSORS = (
    Tensor(name="a", shape=(4, 100), dtype="float32"),
    Tensor(name="b", shape=(3, 100), dtype="float32"),
)
OTHER = (TENSORS[0], dataclasses.replace(TENSORS[1], shape=(5, 100)))
HONEST = Applicant(
    job="j", learner="eu/0", region="eu", spec_hash=SPEC.hash, tensors=TENSORS
)  # fmt: skip


def decided(admission, *, layout_fixed=False, issued=None, **changes):
    applicant = dataclasses.replace(HONEST, **changes)
    return admission.handle(applicant, layout_fixed=layout_fixed, issued=issued)


def tensor(name="a", shape=(1,), **changes):
    return Tensor(name=name, shape=shape, **{"dtype": "float32", **changes})


def test_the_first_learner_of_a_fresh_job_defines_the_model():
    admission = Admission(SPEC)
    decision = decided(admission)
    assert isinstance(decision, Admitted)
    assert decision.layout is admission.layout
    assert set(admission.layout.tensors) == set(TENSORS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"job": "k"}, MismatchError, "belongs to job 'k', but this syncer runs 'j'"),
        ({"spec_hash": "abc"}, MismatchError, "runs spec abc, this syncer runs"),
        ({"learner": "as/0", "region": "as"}, UnavailableError, "as/0 belongs to region as"),
        ({"learner": "a" * 64 + "/0", "region": "a" * 64}, UnknownLearnerError, "not in one of"),
        ({"region": "us"}, UnknownLearnerError, "'eu/0'"),
        ({"learner": "eu/x"}, UnknownLearnerError, "'eu/x'"),
        ({"learner": "eu/../../0"}, UnknownLearnerError, "'eu/../../0'"),
        ({"learner": "", "region": ""}, UnknownLearnerError, "''"),
        ({"learner": "eu/2"}, UnavailableError, "beyond the 2 learners of region eu"),
        ({"learner": "eu/999999999"}, UnavailableError, "beyond the 2 learners of region eu"),
        ({"learner": "eu/01"}, UnknownLearnerError, "'eu/01'"),
        ({"learner": "eu/1\n"}, UnknownLearnerError, "'eu/1?'"),
        ({"learner": "eu/٣"}, UnknownLearnerError, "'eu/٣'"),
        ({"learner": "y" * 10**6}, UnknownLearnerError, "yyy…'"),
        ({"job": "k" * 10**6}, MismatchError, "kkk…'"),
        ({"spec_hash": "f" * 10**6}, MismatchError, "fff…"),
        ({"incarnation": 1}, StaleIncarnationError, "presents incarnation 1, which this job never"),
        ({"tensors": TENSORS[:1]}, ConfigError, "fragments: 2"),
        ({"tensors": (TENSORS[0], TENSORS[0])}, ConfigError, "duplicate tensor names"),
    ],
)
def test_an_applicant_that_does_not_belong_to_the_job_is_refused(changes, error, message):
    admission = Admission(SPEC)
    decision = decided(admission, **changes)
    assert isinstance(decision, Refused)
    assert type(decision.error) is error
    assert message in str(decision.error)
    assert admission.layout is None, "a refused learner does not define the model"


def test_another_model_is_refused_with_every_difference():
    admission = Admission(SPEC)
    decided(admission)
    decision = decided(admission, learner="eu/1", tensors=OTHER, layout_fixed=True)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, MismatchError)
    assert "parameter b has shape [5, 100] instead of [3, 100]" in str(decision.error)
    assert set(admission.layout.tensors) == set(TENSORS)
    assert isinstance(decided(admission, learner="eu/1", layout_fixed=True), Admitted)


def test_while_no_learner_is_connected_and_nothing_is_trained_the_model_may_change():
    admission = Admission(SPEC)
    decided(admission)
    assert isinstance(decided(admission, tensors=OTHER), Admitted)
    assert set(admission.layout.tensors) == set(OTHER)


def test_a_learner_with_another_spec_is_named_until_it_comes_with_that_of_the_job():
    admission = Admission(SPEC)
    decided(admission, learner="eu/1", spec_hash="abc")
    assert admission.differing == {"eu/1": "abc"}
    decided(admission)
    assert admission.differing == {"eu/1": "abc"}, "another learner changes nothing"
    decided(admission, learner="eu/1")
    assert admission.differing == {}


# ---------------------------------------------------------------- incarnations


@pytest.mark.parametrize(
    ("presented", "admitted"),
    [
        (0, True),  # fresh
        (7, True),  # its current one
        (3, True),  # a replaced one: the engine ends it
        (8, False),  # that of eu/1
        (9, True),  # issued before this process started, its record was lost in a crash
        (10, False),
        (2**63, False),
        (2**64 - 1, False),
    ],
)
def test_an_incarnation_is_presented_only_by_the_learner_it_was_issued_to(presented, admitted):
    admission = Admission(SPEC, issued_before=9)
    decision = decided(admission, incarnation=presented, issued={"eu/0": 7, "eu/1": 8})
    assert isinstance(decision, Admitted) == admitted
    if not admitted:
        assert type(decision.error) is StaleIncarnationError


# ---------------------------------------------------------------- bounds of a model


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((tensor(shape=(2**64 - 1,) * 60_000),), "60000 dimensions, at most 16"),
        ((tensor(shape=(2**64 - 1,) * 16),), "more than 1099511627776 values"),
        ((tensor(shape=(2**39,)), tensor("b", (2**39,)), tensor("c")), "values (by tensor "),
        ((tensor(shape=(-1,)),), "values"),
        ((tensor("n" * 513),), "more than 512 characters"),
        ((tensor(aliases=("n" * 513,)),), "more than 512 characters"),
        ((tensor(dtype="f" * 33),), "dtype of tensor a has more than 32"),
        (
            (tensor(aliases=("x",) * 65_536),),
            " tensors (aliases included), at most 65536 are supported",
        ),
        (tuple(tensor(f"t{i}") for i in range(65_537)), "at most 65536 are supported"),
        (tuple(tensor(f"t{i // 2}") for i in range(25_000)), "duplicate tensor names: t0;"),
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "constants"])
def test_a_model_beyond_a_bound_is_refused_before_any_work(tensors, message, kind):
    admission = Admission(SPEC)
    decision = decided(admission, **{"tensors": TENSORS, kind: tensors})
    assert isinstance(decision, Refused)
    assert type(decision.error) is ConfigError
    assert message in str(decision.error)
    assert len(str(decision.error)) < 300
    assert admission.layout is None


def test_a_model_at_the_bounds_is_admitted():
    largest = (tensor(shape=(2**39,)), tensor("b", (2**39,)), tensor("c", (0, 2**60)))
    assert isinstance(decided(Admission(SPEC), tensors=largest), Admitted)
    assert Model.of(largest).digest == Model.of(largest[::-1]).digest, "the order does not matter"


def test_a_model_is_cut_once_however_often_it_is_presented(monkeypatch):
    cuts = []

    def counting(*arguments, **named):
        cuts.append(1)
        return original(*arguments, **named)

    original = limits.cut
    monkeypatch.setattr(limits, "cut", counting)
    admission = Admission(SPEC)
    for _ in range(3):
        decided(admission)
        decided(admission, tensors=OTHER)
        assert isinstance(decided(admission, tensors=TENSORS[:1]), Refused)
    assert len(cuts) == 3
    decided(admission)
    for size in range(100):
        other = (TENSORS[0], dataclasses.replace(TENSORS[1], shape=(size, 7)))
        assert isinstance(decided(admission, tensors=other, layout_fixed=True), Refused)
    assert len(cuts) == 3, "another model than that of a running job is compared, never cut"


def test_what_is_remembered_of_refused_learners_is_bounded():
    admission = Admission(SPEC)
    for index in range(1000):
        decided(admission, learner=f"eu/{index}", spec_hash="f" * 1000)
        decided(admission, tensors=(*TENSORS, tensor("c", (index,))))
    assert sorted(admission.differing) == ["eu/0", "eu/1"] or sorted(admission.differing) == [
        "eu/1"
    ]
    assert all(len(spec_hash) <= 64 for spec_hash in admission.differing.values())
    assert len(admission._cuts) <= limits.MAX_CUTS


def test_a_resumed_job_admits_its_own_model_without_a_cut(monkeypatch):
    model = {"tensors": TENSORS, "constants": (tensor("rope"),)}
    layout = decided(Admission(SPEC), **model).layout
    monkeypatch.setattr(limits, "cut", None)
    model["tensors"] = TENSORS[::-1]
    assert decided(Admission(SPEC, layout=layout), **model, layout_fixed=True).layout is layout
