"""The named tensors of a torch model, and copies of their values to flat memory and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from diloco.errors import ConfigError, DamagedError
from diloco.model.fragments import cut
from diloco_worker.trainer.layout import Copier, ModelTensors, describe


class Tied(nn.Module):
    """A language model without layers: a tied head, a frozen bias, a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.body.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def memories(tensors: ModelTensors, num_fragments: int):
    constants = [n.info for n in tensors.constants(ship_frozen=True)]
    layout = cut([n.info for n in tensors.merged], num_fragments=num_fragments, constants=constants)
    copier = Copier(tensors, layout)
    hosts = [np.zeros(f.elements, np.float32) for f in layout.fragments]
    inboxes = [np.zeros(f.elements, np.float32) for f in layout.fragments]
    copier.attach([[host] for host in hosts], inboxes)
    return layout, copier, hosts, inboxes


def test_tied_weights_are_an_embedding_with_an_alias_and_frozen_tensors_are_constants():
    found = describe(Tied())
    facts = {n.info.name: (n.info.embedding, n.info.aliases, n.info.shape) for n in found.trained}
    assert facts == {
        "body.weight": (False, (), (4, 4)),
        "embed.weight": (True, ("head.weight",), (10, 4)),
        "scale": (False, (), ()),
    }
    assert [n.info.name for n in found.constants(ship_frozen=True)] == ["body.bias", "count"]


def test_frozen_parameters_and_buffers_are_kinds_of_their_own():
    model = Tied()
    model.cached = nn.Linear(2, 2, bias=False).requires_grad_(False)
    model.register_buffer("view", model.cached.weight.data)  # of a frozen parameter
    found = describe(model)
    frozen = [(n.info.name, n.info.aliases) for n in found.frozen]
    assert frozen == [("body.bias", ()), ("cached.weight", ("view",))]
    assert [n.info.name for n in found.buffers] == ["count"]
    assert found.constants(ship_frozen=False) == found.buffers


def test_a_constant_that_no_file_can_hold_is_named_unless_it_stays_with_the_learner():
    model = Tied()
    model.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex128), requires_grad=False)
    found = describe(model)
    assert [n.info.name for n in found.constants(ship_frozen=False)] == ["count"]
    with pytest.raises(ConfigError, match="constant odd has dtype complex128; expected one of"):
        found.constants(ship_frozen=True)


def test_a_head_tied_the_other_way_round_is_still_an_embedding():
    model = Tied()
    model.head = nn.Linear(4, 10, bias=False)
    model.embed.weight = model.head.weight
    (name,) = [n.info.name for n in describe(model).trained if n.info.embedding]
    assert name == "embed.weight"


def test_parameters_that_share_memory_are_a_single_tensor():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data
    assert [(n.info.name, n.info.aliases) for n in describe(model).trained] == [
        ("0.weight", ("1.weight",))
    ]


def views(*parts: torch.Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(part) for part in parts)


SHARED = torch.zeros(6, 4)


@pytest.mark.parametrize(
    "parts",
    [
        (SHARED, SHARED.t()),
        (SHARED, SHARED[2:3]),
        (SHARED[:, :3], SHARED[:, 2:]),
        (SHARED, SHARED.view(torch.bfloat16)),
    ],
    ids=["transposed", "rows", "columns", "dtypes"],
)
def test_parameters_that_share_a_part_of_their_values_are_refused(parts):
    with pytest.raises(ConfigError, match="0 and 1 have values in common in memory"):
        describe(views(*parts))


@pytest.mark.parametrize(
    "parts",
    [(SHARED[:2], SHARED[2:]), (SHARED[:, :2], SHARED[:, 2:]), (SHARED[::2], SHARED[1::2])],
    ids=["rows", "columns", "alternate rows"],
)
def test_parameters_that_are_different_parts_of_one_memory_are_accepted(parts):
    assert len(describe(views(*parts)).trained) == 2


def test_a_trained_part_of_a_frozen_parameter_is_refused_and_a_frozen_part_of_another_is_not():
    model = nn.ModuleDict({"base": views(SHARED, SHARED[4:]), "head": nn.Linear(2, 2)})
    model["base"][0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"base.0 and base.1 have values in common"):
        describe(model)
    model["base"][1].requires_grad_(False)
    assert len(describe(model).frozen) == 2


@pytest.mark.slow
def test_a_compiled_model_has_the_tensor_names_of_the_original():
    assert [n.info.name for n in describe(torch.compile(nn.Linear(2, 2))).trained] == [
        "bias",
        "weight",
    ]


def test_activation_checkpointing_does_not_change_the_names():
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = nn.Sequential(*map(checkpoint_wrapper, plain))
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
    assert [n.info for n in describe(wrapped).merged] == [n.info for n in describe(plain).merged]
    assert [n.info for n in describe(wrapped).buffers] == [n.info for n in describe(plain).buffers]


def test_a_frozen_parameter_in_a_checkpointed_layer_is_frozen_and_no_buffer():
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain[0].weight.requires_grad_(False)
    wrapped = nn.Sequential(*map(checkpoint_wrapper, plain))
    found = describe(wrapped, moving=("*",))
    assert [n.info.name for n in found.frozen] == ["0.weight"]
    assert found.frozen[0].tensor is plain[0].weight
    assert [n.info.name for n in found.buffers] == []


@pytest.mark.parametrize("wrap", [lambda layer: layer, checkpoint_wrapper], ids=["bare", "wrapped"])
@pytest.mark.parametrize("change", [torch.clone, lambda t: t.detach().half()])
def test_what_a_hook_of_state_dict_replaces_under_its_own_name_stays_in_the_job(change, wrap):
    plain = nn.BatchNorm1d(4)
    plain.bias.requires_grad_(False)
    plain.register_buffer("counts", torch.arange(3))

    def replace(module, state_dict, prefix, local_metadata) -> None:
        for name, value in state_dict.items():
            state_dict[name] = change(value)

    plain.register_state_dict_post_hook(replace)
    found = describe(nn.Sequential(wrap(plain)))
    tensors = {n.info.name: n.tensor for n in (*found.merged, *found.frozen, *found.buffers)}
    assert tensors.keys() == {
        "0.bias", "0.counts", "0.num_batches_tracked", "0.running_mean", "0.running_var", "0.weight",
    }  # fmt: skip
    assert all(tensor is getattr(plain, name[2:]) for name, tensor in tensors.items())
    assert [n.info.name for n in found.trained] == ["0.weight"]
    assert [n.info.name for n in found.frozen] == ["0.bias"]


class Fused(nn.Module):
    """Its state_dict has parts of a matrix instead of it, and a tensor that is neither parameter nor buffer."""

    def __init__(self, part) -> None:
        super().__init__()
        self.both = nn.Linear(2, 4, bias=False)
        self.part, self.table = part, torch.arange(3.0)
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module, state_dict, prefix, local_metadata) -> None:
        weight = state_dict.pop(f"{prefix}both.weight")
        for name, half in zip(("first", "second"), weight.chunk(2), strict=True):
            state_dict[f"{prefix}{name}"] = module.part(half)
        state_dict[f"{prefix}table"] = module.table


@pytest.mark.parametrize(
    "part",
    [torch.clone, torch.detach, lambda half: half, lambda half: half.detach().clone()],
    ids=["copies", "views", "views with a gradient", "copies without a gradient"],
)
def test_what_a_state_dict_computes_from_a_parameter_is_left_out(part):
    found = describe(nn.Sequential(Fused(part)))
    assert [n.info.name for n in found.trained] == ["0.both.weight"]
    assert [n.info.name for n in found.buffers] == ["0.table"]


def test_a_state_dict_that_takes_no_arguments_does_not_matter():
    class Own(nn.Linear):
        def state_dict(self):
            return {"a": super().state_dict(), "step": 3}

    model = Own(2, 2)
    model.register_buffer("table", torch.arange(3))
    found = describe(model)
    assert [n.info.name for n in (*found.trained, *found.buffers)] == ["bias", "weight", "table"]


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        describe(nn.Linear(2, 2).requires_grad_(False))


def test_a_tensor_that_cannot_be_merged_is_named():
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"odd has dtype complex64; .* torch\.view_as_real of it"):
        describe(model)
    model.odd = nn.Parameter(torch.view_as_real(torch.zeros(2, dtype=torch.complex64)))
    assert "odd" in [n.info.name for n in describe(model).trained]


def test_a_trained_parameter_whose_values_are_one_in_memory_is_refused_and_a_frozen_one_is_not():
    model = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=r"model: gain is expanded: .* as clone\(\) returns it"):
        describe(model)
    model.gain.requires_grad_(False)
    assert [n.info.name for n in describe(model).frozen] == ["gain"]


def test_a_buffer_without_dense_values_is_named_unless_it_is_not_persistent():
    table = torch.eye(3).to_sparse()
    model = nn.Sequential(Fused(torch.clone))
    model.register_buffer("adjacency", table)
    with pytest.raises(ConfigError, match=r"adjacency is a torch\.sparse_coo .*persistent=False"):
        describe(model)
    model.register_buffer("adjacency", table, persistent=False)
    assert [n.info.name for n in describe(model).buffers] == ["0.table"]


def test_a_lazy_module_is_named():
    with pytest.raises(ConfigError, match=r"1\.weight has no shape yet, .* one forward pass"):
        describe(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))


def test_a_model_without_memory_is_named():
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        describe(nn.Linear(2, 2, device="meta"))


@pytest.mark.slow
def test_28_a_model_whose_parameters_are_sharded_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(ConfigError, match=r"weight is a DTensor .* expected a plain tensor"):
            describe(sharded)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_shards_have_the_layout_of_the_whole_model_and_only_ties_that_exist(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4))
        model[3].weight = model[0].weight
        plain = [n.info for n in describe(model).merged]
        sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert [n.info for n in describe(sharded, sharded=True).merged] == plain
        assert sum(len(info.aliases) for info in plain) == 1
    finally:
        dist.destroy_process_group()


def test_frozen_subclasses_of_tensor_of_the_same_shape_are_not_taken_for_one():
    """A quantized base: such a tensor has no memory of its own, and its `data_ptr` is 0."""
    model = nn.Linear(2, 2)
    for name in ("first", "second"):
        quantized = TwoTensor(torch.randn(2, 2), torch.randn(2, 2))
        model.register_parameter(name, nn.Parameter(quantized, requires_grad=False))
    frozen = describe(model).frozen
    assert [(n.info.name, n.info.aliases) for n in frozen] == [("first", ()), ("second", ())]


def test_a_model_that_was_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"weight was made in torch.inference_mode"):
        describe(model)


def test_a_trained_subclass_of_tensor_that_is_not_known_is_refused():
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"parameter odd is a TwoTensor, a subclass of Tensor"):
        describe(model)


def test_the_names_inside_of_distributed_data_parallel_are_those_of_the_model():
    model = nn.Linear(2, 2)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    assert [n.info for n in describe(wrapped).merged] == [n.info for n in describe(model).merged]


def test_out_and_in_are_inverse_for_every_kind_of_parameter():
    torch.manual_seed(0)
    model = Tied()
    model.flipped = nn.Parameter(torch.randn(6, 5).t())  # not contiguous
    model.fp16 = nn.Parameter(torch.randn(130).half())
    model.fp64 = nn.Parameter(torch.randn(3).float().double())
    model.empty = nn.Parameter(torch.zeros(0, 3))
    found = describe(model)
    layout, copier, hosts, inboxes = memories(found, 3)
    before = {n.info.name: n.tensor.detach().clone() for n in found.trained}
    for p in range(3):
        copier.copy_out(p)
        inboxes[p][:] = hosts[p]
    with torch.no_grad():
        for named in found.trained:
            named.tensor.zero_()
    for p in range(3):
        copier.copy_in(p)
    for named in found.trained:
        assert torch.equal(named.tensor, before[named.info.name]), named.info.name
    assert model.head.weight is model.embed.weight
    for fragment, host in zip(layout.fragments, hosts, strict=True):
        for slot in fragment.slots:
            assert not host[slot.offset + slot.tensor.elements : slot.end].any()


def test_copying_a_fragment_changes_no_other_fragment():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layout, copier, _, inboxes = memories(describe(model), 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inboxes[0][:] = 9
    copier.copy_in(0)
    mine = {slot.tensor.name for slot in layout.fragments[0].slots}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in mine)


def test_the_rounding_of_a_bf16_parameter_does_not_stay_in_the_base_of_the_next_delta():
    model = nn.Linear(64, 4, dtype=torch.bfloat16)
    layout, copier, hosts, inboxes = memories(describe(model), 1)
    inboxes[0][: layout.fragments[0].elements] = np.float32(1 / 3)
    copier.copy_in(0)
    copier.copy_out(0)
    real = np.concatenate(
        [np.arange(s.offset, s.offset + s.tensor.elements) for s in layout.fragments[0].slots]
    )
    assert (inboxes[0][real] != np.float32(1 / 3)).all()
    assert not (inboxes[0] - hosts[0])[real].any()


def test_constants_of_every_dtype_survive_safetensors():
    model = Tied()
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("b16", torch.randn(5).bfloat16())
    model.register_buffer("expanded", torch.randn(1, 3, 1).expand(2, 3, 2))
    found = describe(model)
    _, copier, _, _ = memories(found, 1)
    memory = np.zeros(copier.constants_bytes(), np.uint8)
    copier.constants_out(memory)
    other = Tied()
    other.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    other.register_buffer("b16", torch.zeros(5, dtype=torch.bfloat16))
    other.register_buffer("expanded", torch.zeros(1, 3, 1).expand(2, 3, 2))
    _, taker, _, _ = memories(describe(other), 1)
    with torch.no_grad():
        other.count.zero_()
    taker.constants_in(memory)
    for name in ("body.bias", "count", "mask", "b16", "expanded"):
        assert torch.equal(model.state_dict()[name], other.state_dict()[name])


def test_constants_of_another_model_are_refused():
    model = nn.BatchNorm1d(3)
    _, copier, _, _ = memories(describe(model, moving=None), 1)
    memory = np.zeros(copier.constants_bytes(), np.uint8)
    copier.constants_out(memory)
    _, taker, _, _ = memories(describe(nn.BatchNorm1d(4), moving=None), 1)
    with pytest.raises(DamagedError, match="running_mean"):
        taker.constants_in(memory)
