"""Models and names exactly at their limits, and what is remembered of them."""

import dataclasses

import pytest

from diloco.errors import ConfigError, MismatchError, UnavailableError, UnknownLearnerError
from diloco.model.fragments import Tensor
from diloco.spec import RunSpec
from diloco_syncer.core import admission as limits
from diloco_syncer.core.admission import Admission, Admitted, Applicant, Model, Refused

SPEC = RunSpec(job="j", steps=10, fragments=2, interval=2, overlap=1, learners={"eu": 2, "us": 11})
TENSORS = tuple(Tensor(name=n, shape=(4, 100), dtype="float32") for n in "ab")
HONEST = Applicant(job="j", learner="eu/0", region="eu", spec_hash=SPEC.hash, tensors=TENSORS)


def decided(admission, *, layout_fixed=False, **changes):
    return admission.handle(dataclasses.replace(HONEST, **changes), layout_fixed=layout_fixed)


def tensor(name="a", shape=(1,), **changes):
    return Tensor(name=name, shape=shape, **{"dtype": "float32", **changes})


@pytest.mark.parametrize(
    "tensors",
    [
        (tensor("n" * limits.MAX_NAME),),
        (tensor(aliases=("n" * limits.MAX_NAME,)),),
        (tensor(dtype="f" * limits.MAX_DTYPE),),
        (tensor(shape=(1,) * limits.MAX_DIMENSIONS),),
        (tensor(aliases=("x",) * (limits.MAX_TENSORS - 1)),),
        (tensor(shape=(limits.MAX_ELEMENTS,)),),
        (tensor(shape=(limits.MAX_ELEMENTS // 4, 4, 1)), tensor("b", (0, 1 << 60))),
        (tensor(shape=(0, -1)),),
        (tensor(shape=(limits.MAX_ELEMENTS // 4,), dtype="int64", buffer=True),),
    ],
    ids=["name", "alias", "dtype", "dimensions", "tensors", "values", "zero", "empty", "integers"],
)
def test_what_is_exactly_at_a_limit_is_admitted(tensors):
    assert Model.of(tensors).tensors == tuple(sorted(tensors, key=lambda t: t.name))


@pytest.mark.parametrize(
    "tensors",
    [
        (tensor(shape=(limits.MAX_ELEMENTS + 1,)),),
        (tensor(shape=(limits.MAX_ELEMENTS,)), tensor("b")),
        (tensor(shape=(limits.MAX_ELEMENTS // 2, 2)), tensor("b")),
        (tensor(), tensor("b", (limits.MAX_ELEMENTS,))),
        (tensor("n" * limits.MAX_NAME), tensor("b", dtype="f" * (limits.MAX_DTYPE + 1))),
        (tensor(shape=(limits.MAX_ELEMENTS // 4 + 1,), dtype="int64", buffer=True),),
    ],
)
def test_what_is_one_beyond_a_limit_is_refused(tensors):
    with pytest.raises(ConfigError):
        Model.of(tensors)


def test_a_constant_may_have_the_name_of_a_parameter_but_not_of_another_constant():
    Model.of((tensor(),), (tensor(),))
    with pytest.raises(ConfigError, match="duplicate tensor names: a;"):
        Model.of((tensor("b"),), (tensor(), tensor()))


def test_equal_digests_mean_equal_models():
    def digest(*tensors, constants=()):
        return Model.of(tensors, constants).digest

    first = digest(tensor(), tensor("b"))
    assert first == digest(tensor("b"), tensor())
    others = [
        digest(tensor()),
        digest(tensor(), constants=(tensor("b"),)),
        digest(tensor(), tensor("b", (2,))),
        digest(tensor(), tensor("b", dtype="bfloat16")),
        digest(tensor(), tensor("b", aliases=("c",))),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("learner", "admitted"),
    [("us/0", True), ("us/10", True), ("us/11", False), ("eu/1", True), ("eu/2", False)],
)
def test_the_index_of_a_learner_is_below_the_learners_of_its_region(learner, admitted):
    decision = decided(Admission(SPEC), learner=learner, region=learner[:2])
    assert isinstance(decision, Admitted) == admitted


@pytest.mark.parametrize(("length", "error"), [(63, UnavailableError), (64, UnknownLearnerError)])
def test_the_name_of_a_region_that_the_job_may_get_has_63_characters_at_most(length, error):
    region = "r" * length
    decision = decided(Admission(SPEC), learner=f"{region}/0", region=region)
    assert isinstance(decision.error, error)


def test_once_the_model_is_fixed_another_is_neither_cut_nor_remembered():
    admission = Admission(SPEC)
    decided(admission)
    layout = admission.layout
    decision = decided(admission, tensors=(*TENSORS, tensor("c")), layout_fixed=True)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, MismatchError)
    assert admission.layout is layout
    assert decided(admission).layout is layout
    fewer = decided(admission, tensors=TENSORS[:1], layout_fixed=True)
    assert isinstance(fewer.error, ConfigError), "it cannot be cut at all"


def test_the_newest_models_of_a_fresh_job_are_remembered():
    admission = Admission(SPEC)
    models = [(*TENSORS, tensor(f"c{i}")) for i in range(limits.MAX_CUTS + 1)]
    layouts = [decided(admission, tensors=model).layout for model in models]
    assert len(admission._cuts) == limits.MAX_CUTS
    assert decided(admission, tensors=models[1]).layout is layouts[1], "used: the newest now"
    decided(admission, tensors=(*TENSORS, tensor("d")))
    assert decided(admission, tensors=models[1]).layout is layouts[1]
    assert decided(admission, tensors=models[2]).layout is not layouts[2], "the oldest was dropped"


def test_of_a_model_with_constants_only_the_differences_are_named():
    admission, constants = Admission(SPEC), (tensor("rope"),)
    decided(admission, constants=constants)
    other = (TENSORS[0], tensor("b", (9,)))
    refused = decided(admission, tensors=other, constants=constants, layout_fixed=True)
    assert "parameter b" in str(refused.error)
    assert "rope" not in str(refused.error)
    assert "rope" in str(decided(admission, layout_fixed=True).error)


def test_parameters_that_the_spec_averages_are_averaged_in_the_layout():
    spec = dataclasses.replace(SPEC, average_parameters=("b",))
    admitted = decided(Admission(spec), spec_hash=spec.hash)
    slots = [slot for fragment in admitted.layout.fragments for slot in fragment.slots]
    assert {slot.tensor.name: slot.average for slot in slots} == {"a": False, "b": True}
