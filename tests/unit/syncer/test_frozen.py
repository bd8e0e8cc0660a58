"""Frozen parameters that stay with the learners: compared when a learner joins, kept as digests."""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file

from diloco.errors import ConfigError, MismatchError, ProtocolError, UnavailableError
from diloco.model.fragments import Tensor, cut
from diloco.rpc import tensor_info
from diloco.rpc.tensor_info import FROZEN_BYTES, pack_frozen, unpack_frozen
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import admission as limits
from diloco_syncer.core.admission import Admission, Admitted, Applicant, Model, Refused
from diloco_syncer.rpc import telemetry
from diloco_syncer.rpc.control import ControlService
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.snapshots import export

SPEC = RunSpec(job="j", steps=10, fragments=1, interval=2, overlap=1, learners={"eu": 3})
TRAINED = (Tensor(name="lora", shape=(8,), dtype="float32"),)


def base(*digits: str, **changes: object) -> tuple[Tensor, ...]:
    """A frozen base; one digit per tensor stands for its values."""
    return tuple(
        Tensor(name=f"base.{i}", shape=(1 << 30,), dtype="bfloat16", digest=16 * digit, **changes)
        for i, digit in enumerate(digits)
    )


def applicant(learner: str = "eu/0", **changes: object) -> Applicant:
    fields = {
        "job": "j", "learner": learner, "region": "eu", "spec_hash": SPEC.hash, "tensors": TRAINED,
        "frozen": base("a", "b"), **changes,
    }  # fmt: skip
    return Applicant(**fields)


def running(**changes: object) -> Admission:
    """The admission of a job whose model eu/0 initialized."""
    layout = cut(TRAINED, num_fragments=1, frozen=base("a", "b"))
    return Admission(**{"spec": SPEC, "layout": layout, "source": "eu/0", **changes})


def refusal(decision: object, kind: type[Exception] = MismatchError) -> str:
    assert isinstance(decision, Refused)
    assert type(decision.error) is kind
    return str(decision.error)


# ---------------------------------------------------------------- compared


def test_equal_frozen_parameters_are_admitted_and_other_values_are_refused_by_name():
    admission = running()
    assert isinstance(admission.handle(applicant("eu/1"), layout_fixed=True), Admitted)
    other = applicant("eu/1", frozen=base("a", "c"))
    text = refusal(admission.handle(other, layout_fixed=True))
    assert text.startswith("eu/1 trains a different model than this job, which eu/0 initialized: ")
    assert "frozen parameter base.1 has other values. " in text
    assert "base.0" not in text
    assert "load the same values" in text


def test_a_long_list_of_differences_states_how_many_more():
    layout = cut(TRAINED, num_fragments=1, frozen=base(*"a" * 300))
    theirs = applicant("eu/1", frozen=base(*"b" * 300))
    text = refusal(running(layout=layout).handle(theirs, layout_fixed=True))
    assert "base.0 has other values" in text
    assert "; and 292 more. " in text


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (base("a"), "frozen parameter base.1 is missing"),
        (base("a", "b", "c"), "frozen parameter base.2 is not part of the job's model"),
        ((), "frozen parameter base.0 is missing"),
        (
            (base("a")[0], dataclasses.replace(base("a", "b")[1], dtype="float32")),
            "frozen parameter base.1 has dtype float32 instead of bfloat16",
        ),
        (
            (base("a")[0], dataclasses.replace(base("a", "b")[1], shape=(3, 2), digest=16 * "f")),
            "frozen parameter base.1 has shape [3, 2] instead of [1073741824]",
        ),
        (base("a", "b", aliases=("head",)), "base.0 is tied or used as an embedding differently"),
    ],
)
def test_every_kind_of_difference_is_named(frozen, message):
    text = refusal(running().handle(applicant("eu/1", frozen=frozen), layout_fixed=True))
    assert message in text


def test_until_the_initial_parameters_exist_no_learner_is_refused_for_its_frozen_parameters():
    admission = Admission(SPEC)
    first = applicant("eu/1", frozen=base("f", "f"))
    assert isinstance(admission.handle(first, layout_fixed=False), Admitted)
    honest = applicant("eu/0")
    waits = admission.handle(honest, layout_fixed=False, holder="eu/1")
    assert "frozen parameter base.0 has other values" in refusal(waits, UnavailableError)
    assert waits.waits
    assert isinstance(admission.handle(honest, layout_fixed=False), Admitted), "its turn"
    assert admission.layout.frozen == honest.frozen


def test_a_learner_that_keeps_what_the_job_ships_is_refused():
    spec = dataclasses.replace(SPEC, frozen="Ship")
    text = refusal(Admission(spec).handle(applicant(), layout_fixed=False))
    assert "eu/0 keeps its 2 frozen parameters, but sync.frozen of this job is Ship" in text


def test_a_program_of_an_earlier_version_is_refused_with_the_reason():
    shipped = tuple(dataclasses.replace(t, digest="", shape=(3,)) for t in base("a", "b"))
    old_learner = applicant("eu/1", frozen=(), constants=shipped)
    assert "use one version" in refusal(running().handle(old_learner, layout_fixed=True))
    old_job = running(layout=cut(TRAINED, num_fragments=1, constants=shipped))
    assert "use one version" in refusal(old_job.handle(applicant("eu/1"), layout_fixed=True))


def test_frozen_values_that_differ_are_not_blamed_on_earlier_versions_where_buffers_agree():
    """Both merge a buffer and ship a constant, and neither has one of them as the other kind."""
    moving = Tensor(name="mean", shape=(3,), dtype="float32", buffer=True)
    same = {
        "tensors": (*TRAINED, moving),
        "constants": (Tensor(name="table", shape=(3,), dtype="float32"),),
    }
    of_job = cut(
        same["tensors"], num_fragments=2, constants=same["constants"], frozen=base("a", "b")
    )
    theirs = applicant("eu/1", frozen=base("a", "c"), **same)
    text = refusal(running(layout=of_job).handle(theirs, layout_fixed=True))
    assert "load the same values" in text
    assert "Earlier versions" not in text


def test_a_program_that_keeps_running_statistics_as_constants_is_refused_with_the_reason():
    constant = Tensor(name="mean", shape=(3,), dtype="float32")
    moving = dataclasses.replace(constant, buffer=True)
    older = {"tensors": TRAINED, "constants": (constant,), "frozen": ()}
    newer = {"tensors": (*TRAINED, moving), "constants": (), "frozen": ()}
    for ours, theirs in ((older, newer), (newer, older)):
        of_job = cut(
            ours["tensors"], num_fragments=len(ours["tensors"]), constants=ours["constants"]
        )
        admission = running(layout=of_job)
        text = refusal(admission.handle(applicant("eu/1", **theirs), layout_fixed=True))
        assert "buffer mean is " in text
        assert "use one version for the whole job" in text


def test_the_memory_of_the_syncer_does_not_bound_what_stays_with_the_learners():
    admission = Admission(SPEC, memory_bytes=1 << 20)
    assert isinstance(admission.handle(applicant(), layout_fixed=False), Admitted)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (base("a", ""), "tensor base.1 has the digest '', expected 16 hexadecimal digits"),
        (
            (dataclasses.replace(base("a")[0], digest="A" * 16),),
            "has the digest 'AAAAAAAAAAAAAAAA'",
        ),
        (
            (dataclasses.replace(base("a")[0], digest="a" * 10**6),),
            "expected 16 hexadecimal digits",
        ),
        (base("a") * 2, "duplicate tensor names: base.0"),
        ((dataclasses.replace(base("a")[0], shape=(2**41,)),), "more than 1099511627776 values"),
        (
            base("a") * (limits.MAX_FROZEN + 1),
            "131073 frozen parameters (aliases included), at most",
        ),
    ],
)
def test_frozen_parameters_beyond_a_bound_are_refused(frozen, message):
    admission = Admission(SPEC)
    text = refusal(admission.handle(applicant(frozen=frozen), layout_fixed=False), ConfigError)
    assert message in text
    assert len(text) < 300
    assert admission.layout is None


@pytest.mark.parametrize("kind", ["tensors", "constants"])
def test_only_frozen_parameters_have_a_digest(kind):
    odd = (dataclasses.replace(TRAINED[0], digest=16 * "a"),)
    decision = Admission(SPEC).handle(applicant(**{kind: odd}), layout_fixed=False)
    assert "expected 0 hexadecimal digits" in refusal(decision, ConfigError)


def hello(frozen: bytes) -> pb.Hello:
    return pb.Hello(job="j", learner="eu/0", region="eu", frozen=frozen)


@pytest.mark.slow
def test_a_base_of_a_hundred_thousand_tensors_fits_into_a_hello():
    rng = np.random.default_rng(0)
    tensors = [
        Tensor(
            name=f"base_model.model.model.layers.{i // 1700}.mlp.experts.{i % 1700 // 3}.{kind}.base_layer.weight",
            shape=(2048, 1408), dtype="bfloat16", digest=rng.bytes(8).hex(),
        )
        for i in range(100_000)
        for kind in [("gate_proj", "up_proj", "down_proj")[i % 3]]
    ]  # fmt: skip
    packed = pack_frozen(tensors)
    assert len(packed) < telemetry.HELLO_BYTES // 2
    assert list(telemetry.applicant(hello(packed)).frozen) == tensors
    assert len(Model.of(TRAINED, (), tensors).frozen) == 100_000


def test_no_frozen_parameters_take_no_bytes():
    assert pack_frozen([]) == b""
    assert list(unpack_frozen(b"", most=9)) == []


def test_descriptions_that_cannot_be_read_are_refused():
    packed = pack_frozen(base("a", "b"))
    for data in (b"noise", packed[:-3], b"\0"):
        with pytest.raises(ProtocolError, match="frozen parameters"):
            telemetry.applicant(hello(data))
    no_message = pb.FrozenTensors(tensors=[b"\xff"]).SerializeToString()
    with pytest.raises(ProtocolError, match="no valid TensorInfo"):
        telemetry.applicant(hello(zlib.compress(no_message)))
    with pytest.raises(ProtocolError, match="frozen parameters: no valid descriptions"):
        telemetry.applicant(hello(zlib.compress(b"\xff")))


def test_a_small_message_cannot_become_a_large_one(monkeypatch):
    with pytest.raises(ProtocolError, match=f"more than {FROZEN_BYTES} bytes"):
        telemetry.applicant(hello(zlib.compress(bytes(FROZEN_BYTES + 1))))
    assert len(unpack_frozen(zlib.compress(b"\n\0" * (8 << 20)), most=limits.MAX_FROZEN)) == 131073
    made = []
    monkeypatch.setattr(telemetry, "from_proto", made.append)
    many = pb.FrozenTensors(tensors=[b""] * (limits.MAX_FROZEN + 1)).SerializeToString()
    with pytest.raises(ConfigError, match="131073 frozen parameters"):
        telemetry.applicant(hello(zlib.compress(many)))
    deep = pb.TensorInfo(name="w", shape=[1] * 17).SerializeToString()
    with pytest.raises(ConfigError, match="tensor w has 17 dimensions"):
        telemetry.applicant(
            hello(zlib.compress(pb.FrozenTensors(tensors=[deep]).SerializeToString()))
        )
    assert made == []


@pytest.mark.parametrize(
    "plain", [b"\x0a", b"\x0a\x02a", b"\x0a\xff\xff\xff\xff\xff", b"\x12\0", b"\x0a\0\x08"]
)
def test_a_list_that_is_none_is_refused(plain):
    with pytest.raises(ProtocolError, match="frozen parameters: no valid descriptions"):
        unpack_frozen(zlib.compress(plain), most=9)


@pytest.mark.parametrize("limit", ["FROZEN_BYTES", "PACKED_BYTES"])
def test_a_base_that_no_hello_can_describe_is_refused_where_it_is_described(monkeypatch, limit):
    monkeypatch.setattr(tensor_info, limit, 10)
    with pytest.raises(ConfigError, match=r"its 2 frozen parameters take .* at most 10"):
        pack_frozen(base("a", "b"))


class Admitting:
    """A runner that admits each applicant, and counts how many it admits at the same time."""

    def __init__(self) -> None:
        self.spec, self.most, self.admitted = SPEC, 0, []
        self._lock = threading.Lock()
        self._now = 0

    def admit(self, applicant: Applicant) -> object:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.both.wait(0.2) if self._now < 2 else self.both.set()
        with self._lock:
            self._now -= 1
        self.admitted.append(applicant)
        return object()

    both = threading.Event()


def test_frozen_parameters_of_one_learner_are_compared_at_a_time():
    runner = Admitting()
    control = ControlService(runner, None, None, None, next_incarnation=lambda: 1)
    packed = pack_frozen(base("a", "b"))
    threads = [
        threading.Thread(
            target=control._admit, args=[pb.Hello(job="j", spec_hash=SPEC.hash, frozen=packed)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(runner.admitted), runner.most) == (4, 1)
    assert all(applicant.frozen == base("a", "b") for applicant in runner.admitted)


@pytest.mark.parametrize("other", [{"job": "other"}, {"spec_hash": "other"}])
def test_the_frozen_parameters_of_another_job_or_spec_are_not_inflated(other):
    runner = Admitting()
    control = ControlService(runner, None, None, None, next_incarnation=lambda: 1)
    control._admit(pb.Hello(**{"job": "j", "spec_hash": SPEC.hash, "frozen": b"noise", **other}))
    assert runner.admitted[0].frozen == ()


# ---------------------------------------------------------------- stored


def parameters(**changes: object) -> Parameters:
    layout = cut(TRAINED, num_fragments=1, **changes)
    values = np.arange(layout.fragments[0].elements, dtype=np.float32)
    return Parameters(layout, [values], [(1, 0)], source="eu/0")


def test_a_snapshot_has_the_digests_and_who_stated_them():
    kept = parameters(frozen=base("a", "b"))
    arrays, facts = kept.to_snapshot()
    assert sum(array.nbytes for array in arrays.values()) == 2 * kept.current(0).theta_N.nbytes
    resumed = Parameters.from_snapshot(arrays, json.loads(json.dumps(facts)), SPEC)
    assert resumed.layout == kept.layout
    admission = Admission(SPEC, layout=resumed.layout, source=resumed.source)
    assert isinstance(admission.handle(applicant("eu/1"), layout_fixed=True), Admitted)
    other = admission.handle(applicant("eu/1", frozen=base("a", "c")), layout_fixed=True)
    assert "which eu/0 initialized: frozen parameter base.1 has other values" in refusal(other)


def test_a_snapshot_of_an_earlier_version_is_read():
    arrays, facts = parameters().to_snapshot()
    del facts["frozen"], facts["source"]
    resumed = Parameters.from_snapshot(arrays, facts, SPEC)
    assert (resumed.layout, resumed.source) == (parameters().layout, "")


def test_the_exported_model_describes_what_stayed_with_the_learners(tmp_path):
    export(tmp_path, parameters(frozen=base("a", "b")), SPEC, step=3, tokens=5, run="r")
    assert load_file(tmp_path / "model/model.safetensors").keys() == {"lora"}
    described = json.loads((tmp_path / "model/model.json").read_text())["frozen"]
    assert [(t["name"], t["digest"]) for t in described] == [
        ("base.0", 16 * "a"),
        ("base.1", 16 * "b"),
    ]


def test_a_constant_with_several_names_is_exported_under_each(tmp_path):
    tied = Tensor(name="embed.weight", shape=(2,), dtype="float32", aliases=("head.weight",))
    theta = parameters(constants=[tied])
    theta.constants = safetensors.numpy.save({"embed.weight": np.ones(2, np.float32)})
    export(tmp_path, theta, SPEC, step=3, tokens=5, run="r")
    exported = load_file(tmp_path / "model/model.safetensors")
    assert exported.keys() == {"lora", "embed.weight", "head.weight"}
    assert exported["head.weight"].tolist() == [1.0, 1.0]
