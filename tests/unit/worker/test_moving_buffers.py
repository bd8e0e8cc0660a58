"""Which buffers move with the model, how they are copied, and which changes are noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from diloco.errors import ConfigError
from diloco.model.fragments import cut
from diloco.spec import RunSpec
from diloco_testing.learners.alone import alone
from diloco_worker.core.ledger import HostCopy
from diloco_worker.trainer import buffers, layout
from diloco_worker.trainer.buffers import Loaded, Watch
from diloco_worker.trainer.layout import MAX_INTEGERS, Copier, describe
from diloco_worker.trainer.replica import Replica

COPY = HostCopy(local_step=1, steps=1, tokens=1, base=0)


class Net(nn.Module):
    """A statistic of a layer, one of its own, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, track_running_stats=False)
        self.register_buffer("usage", torch.zeros(4))
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.body(x))
        self.usage += y.detach().abs().mean(0)
        return self.plain(y) + self.table[:4]


def names(found: tuple) -> list[str]:
    return [n.info.name for n in found]


def test_running_statistics_move_and_other_buffers_only_if_they_are_named():
    found = describe(Net())
    assert names(found.moving) == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert names(found.buffers) == ["seen", "table", "usage"]
    check_named_buffers(Net())


@pytest.mark.slow  # to import the compiler takes a second
def test_the_buffers_of_a_compiled_module_are_named_as_those_of_the_module():
    check_named_buffers(torch.compile(Net()))


def check_named_buffers(model: nn.Module) -> None:
    found = describe(model, moving=["us*", "seen"])
    assert names(found.moving)[3:] == ["seen", "usage"]
    assert names(found.constants(ship_frozen=True)) == ["table"]
    assert names(found.merged) == sorted(names(found.trained) + names(found.moving))


def test_no_buffer_moves_if_they_stay_as_of_step_0():
    found = describe(Net(), moving=None)
    assert found.moving == ()
    assert "norm.running_mean" in names(found.constants(ship_frozen=True))


def test_a_pattern_moves_no_parameter():
    frozen = Net()
    frozen.body.requires_grad_(False)
    found = describe(frozen, moving=["*"])
    assert names(found.frozen) == ["body.bias", "body.weight"]
    assert "norm.weight" in names(found.trained)


class Stateful(Net):
    """With a state besides its buffers, of which state_dict has a copy."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("nothing of it is loaded")


def test_no_pattern_takes_the_extra_state_of_a_module():
    model = nn.Sequential(Stateful(), nn.Linear(2, 2))
    model.register_buffer("own_extra_state", torch.zeros(1))
    found = describe(model, moving=["*", "0._extra_state"])
    assert "0._extra_state" in names(found.buffers)
    assert "own_extra_state" in names(found.moving)
    assert "_extra_state" in names(describe(Stateful(), moving=["*_extra_state"]).buffers)


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        (torch.zeros(2, dtype=torch.complex64), "has dtype complex64; only real floating point"),
        (torch.zeros(MAX_INTEGERS + 1, dtype=torch.int8), "4097 values of int8, at most 4096"),
    ],
)
def test_a_buffer_that_cannot_be_merged_is_refused(buffer, problem):
    model = Net()
    model.register_buffer("odd", buffer)
    describe(model)  # it is a constant
    with pytest.raises(ConfigError, match=f"buffer odd, which changes, .*{problem}"):
        describe(model, moving=["odd"])


def test_out_and_in_are_inverse_for_every_kind_of_buffer():
    model = Net()
    model.norm.num_batches_tracked.fill_((1 << 40) + 3)
    model.norm.running_var.uniform_()
    model.seen[1] = True
    model.register_buffer("signed", torch.tensor([[-3], [7]], dtype=torch.int8))
    model.register_buffer("narrow", torch.randn(5).bfloat16())
    found = describe(model, moving=["*"])
    layout = cut([n.info for n in found.merged], num_fragments=2)
    copier = Copier(found, layout)
    memories = [np.zeros(f.elements, np.float32) for f in layout.fragments]
    copier.attach([[memory] for memory in memories], memories)
    before = {n.info.name: n.tensor.clone() for n in found.moving}
    copier.copy_out(1)
    with torch.no_grad():
        for named in found.moving:
            named.tensor.zero_()
    copier.copy_in(1)
    for named in found.moving:
        assert torch.equal(named.tensor, before[named.info.name]), named.info.name


def replica(model: nn.Module, **changes: object) -> Replica:
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1, **changes)
    return Replica(model, spec)


def copied(replica: Replica) -> bool:
    return all(replica.try_copy(fragment, COPY) for fragment in range(2))


def test_a_constant_buffer_that_changes_is_noticed_once(caplog):
    model = Net()
    of_model = replica(model)
    try:
        assert copied(of_model)
        assert caplog.text == ""
        for _ in range(2):
            model(torch.randn(5, 3))
            assert copied(of_model)
        assert caplog.text.count("buffer usage changed while training") == 1
        assert "spec.sync.movingBuffers" in caplog.text
        assert "norm" not in caplog.text
        assert "table" not in caplog.text
    finally:
        of_model.close()


@pytest.mark.parametrize("changes", [{"moving_buffers": ("usage",)}, {"buffers": "Initial"}])
def test_no_line_is_logged_about_what_the_manifest_names(changes, caplog):
    model = Net()
    of_model = replica(model, **changes)
    try:
        model(torch.randn(5, 3))
        assert copied(of_model)
        assert caplog.text == ""
    finally:
        of_model.close()


def test_a_pattern_without_a_buffer_is_reported_once(caplog):
    patterns = ("us*", "norm.running_mean", "usages", "body.weight", "*._extra_state")
    of_model = replica(Net(), moving_buffers=patterns)
    try:
        assert copied(of_model)
    finally:
        of_model.close()
    [line] = caplog.messages
    assert "has the name 'usages', 'body.weight', '*._extra_state'; expected" in line


def test_at_most_eight_patterns_without_a_buffer_are_shown(caplog):
    replica(Net(), moving_buffers=tuple(f"none{i}" for i in range(11))).close()
    [line] = caplog.messages
    assert "'none7' and 3 more; expected" in line


def test_buffers_are_compared_before_the_link_is_locked_out(monkeypatch):
    of_model = replica(Net())
    order = []
    watched, locked = of_model._watch.changed, of_model.shared.try_lock
    monkeypatch.setattr(of_model._watch, "changed", lambda: (order.append("read"), watched())[1])
    monkeypatch.setattr(
        of_model.shared, "try_lock", lambda p: (order.append(f"lock {p}"), locked(p))[1]
    )
    try:
        assert copied(of_model)
        assert of_model.try_copy_model([COPY, COPY])
    finally:
        of_model.close()
    assert order == ["read", "lock 0", "lock 1", "read", "lock 0", "lock 1"]


def test_buffers_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(layout, "PIECE_BYTES", 64)
    table = torch.arange(100.0)
    sizes = [piece.nbytes for piece in layout.pieces(table)]
    assert (max(sizes), sum(sizes)) == (64, 400)
    in_pieces = buffers._digest(table)
    monkeypatch.undo()
    assert buffers._digest(table) == in_pieces
    assert buffers._digest(table.reshape(10, 10).t()) != in_pieces


def test_the_download_of_the_model_is_not_a_change(caplog):
    model = Net()
    of_model = replica(model)
    try:
        of_model.copy_model([COPY, COPY])  # constants as a download would leave them
        of_model.apply_model(range(2))
        assert copied(of_model)
        assert caplog.text == ""
    finally:
        of_model.close()


def test_a_local_checkpoint_of_another_initialisation_is_not_a_change(caplog):
    model = Net()
    of_model = replica(model)
    try:
        model.table.add_(1)  # as a random table of the job's first learner
        of_model.loaded()
        assert copied(of_model)
        assert caplog.text == ""
    finally:
        of_model.close()


def test_buffers_of_every_shape_and_type_are_compared():
    model = nn.Linear(2, 2)
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("flipped", torch.randn(3, 2).t())
    model.register_buffer("pair", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("scalar", torch.tensor(True))
    own = torch.zeros(1)
    model.register_buffer("expanded", own.expand(3))
    watch = Watch(model, constant=describe(model).buffers, moving=())
    for buffer in {**dict(model.named_buffers()), "expanded": own}.values():
        buffer.copy_(buffer.clone())
    assert watch.changed() == ""
    model.flipped.add_(1)
    model.scalar.logical_not_()
    own.add_(1)
    assert watch.changed().startswith("buffers expanded, flipped, scalar changed")


def test_a_merged_buffer_that_is_replaced_by_another_tensor_is_noticed():
    model = Net()
    found = describe(model)
    watch = Watch(model, constant=found.buffers, moving=found.moving)
    assert watch.changed() == ""
    model.norm.running_mean = torch.zeros(4)
    model.usage = torch.zeros(4)
    sentence = watch.changed()
    assert "buffer norm.running_mean was replaced by another tensor" in sentence
    assert "buffer usage changed while training" in sentence
    assert watch.changed() == ""


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("wrap", [torch.jit.script, lambda m: nn.Sequential(torch.jit.script(m))])
def test_the_buffers_of_a_scripted_module_are_merged_and_not_replaced(wrap):
    model = wrap(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    found = describe(model)
    watch = Watch(model, constant=found.buffers, moving=found.moving)
    model(torch.randn(3, 2))
    assert watch.changed() == ""
    assert len(found.moving) == 3


def test_parameters_that_are_trained_from_later_on_are_noticed_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].twin = nn.Parameter(model[1].weight.detach())  # of the same memory
    watch = Watch(model, constant=(), moving=())
    assert watch.changed() == ""
    model[0].weight.requires_grad_(True)
    model[1].bias.requires_grad_(False)
    model.append(nn.Linear(2, 1, bias=False))
    assert watch.changed().startswith(
        "a gradient is computed for parameters 0.weight, 2.weight, and was not when this learner"
    )
    assert watch.changed() == ""


def watch_of(model: nn.Module) -> Watch:
    found = describe(model)
    return Watch(model, constant=(), moving=found.moving, trained=found.trained)


def three() -> nn.Sequential:
    """With a tied weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    return model


@pytest.mark.parametrize(
    ("replace", "names"),
    [
        (lambda m: m.__setitem__(0, nn.Linear(2, 2)), "parameters 0.weight, 0.bias,"),
        (
            lambda m: m.load_state_dict(three()[:1].state_dict(), strict=False, assign=True),
            "parameters 0.weight, 0.bias,",
        ),
        (lambda m: setattr(m[2], "weight", nn.Parameter(torch.ones(2, 2))), "parameter 2.weight,"),
        (
            lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(2), requires_grad=False)),
            "parameter 0.bias,",
        ),
    ],
)  # fmt: skip
def test_a_learner_whose_trained_parameters_are_replaced_cannot_continue(replace, names):
    model = three()
    watch = watch_of(model)
    assert (watch.changed(), watch.refused) == ("", "")
    replace(model)
    assert watch.changed() == ""
    assert f"has put another tensor in the place of {names}" in watch.refused


def test_a_learner_whose_trained_parameters_get_another_type_cannot_continue():
    model = three()
    watch = watch_of(model)
    model[1].bfloat16()
    assert watch.changed() == ""
    assert watch.refused.startswith(
        "the element type of parameters 1.bias, 1.weight is bfloat16, and was float32 at Learner.connect"
    )
    model[1].float()
    assert (watch.changed(), watch.refused) == ("", "")


def test_parameters_that_are_removed_or_renamed_are_noticed_once():
    model = three()
    watch = watch_of(model)
    nn.utils.parametrizations.orthogonal(model[0])
    del model[2]  # its weight is that of another layer
    text = watch.changed()
    assert "the program has removed parameter 2.bias from the model; the job" in text
    assert (
        "given parameter 0.weight (0.parametrizations.weight.original) another name, as a" in text
    )
    assert (watch.changed(), watch.refused) == ("", "")


@pytest.mark.slow
def test_a_layer_that_is_wrapped_later_keeps_its_name():
    model = three()
    watch = watch_of(model)
    model[0] = torch.compile(model[0])
    assert (watch.changed(), watch.refused) == ("", "")


def test_masks_that_are_added_later_are_named_once_and_buffers_of_no_file_are_not():
    """Otherwise the exported model of a run that prunes its weights is silently the one that is not pruned."""
    model = three()
    watch = watch_of(model)
    model[1].register_buffer("cache", torch.zeros(2), persistent=False)
    prune.l1_unstructured(model[0], "weight", 1)
    text = watch.changed()
    assert (
        "has added buffer 0.weight_mask, so that each learner has its own, and the exported" in text
    )
    assert "given parameter 0.weight (0.weight_orig) another name" in text
    assert (watch.changed(), watch.problem) == ("", text), "the result lacks it to the end"


def test_a_frozen_parameter_that_is_written_is_noticed_once(caplog):
    """As a teacher that follows the trained parameters is."""
    model = nn.ModuleDict({"net": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    model["teacher"].requires_grad_(False)
    spec = RunSpec(job="j", steps=1, fragments=1, interval=1, overlap=1, learners={"eu": 1})
    replica = Replica(model, spec)
    try:
        for _ in range(2):
            with torch.no_grad():
                model["teacher"].weight.lerp_(model["net"].weight, 0.1)
            assert replica.try_copy(0, COPY)
    finally:
        replica.close()
    [text] = [record.getMessage() for record in caplog.records]
    assert text.startswith("frozen parameter teacher.weight was written while training, which no")


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.teacher(x)


def test_a_frozen_parameter_of_fsdp2_is_written_by_a_teacher_and_not_by_steps_and_evaluations():
    """FSDP2 puts whole parameters in their place for each forward pass, and has other ones after it."""
    with alone():
        model = Distilled()
        watch = sharded_watch(model)
        optimizer = torch.optim.AdamW(model.net.parameters())
        for _ in range(4):
            model(torch.ones(3, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert watch.changed() == ""
            with torch.no_grad():
                model(torch.ones(3, 2))
            assert (watch.changed(), watch.refused) == ("", "")
        with torch.no_grad():
            model.teacher.weight.lerp_(model.net.weight, 0.1)
        assert watch.changed().startswith("frozen parameter teacher.weight was written while")
        assert watch.changed() == ""


def sharded_watch(model: Distilled) -> Watch:
    for part in (model.net, model.teacher, model):
        fully_shard(part)
    tensors = describe(model, sharded=True)
    return Watch(model, constant=(), moving=(), frozen=tensors.frozen, trained=tensors.trained)


def test_a_learner_whose_sharded_parameters_are_replaced_cannot_continue():
    """As by `load_state_dict` with `assign`, which the optimizer does not follow."""
    with alone():
        model = Distilled()
        watch = sharded_watch(model)
        model.load_state_dict(
            {n: p.detach().clone() for n, p in model.state_dict().items()}, assign=True
        )
        model(torch.ones(3, 2)).square().mean().backward()
        assert watch.changed() == ""
        assert (
            "has put another tensor in the place of parameters net.weight, net.bias"
            in watch.refused
        )


def test_a_sharded_parameter_that_is_trained_since_and_one_that_is_gone_are_named():
    with alone():
        model = Distilled()
        watch = sharded_watch(model)
        model.teacher.weight.requires_grad_()
        del model.net.bias
        text = watch.changed()
        assert "a gradient is computed for parameter teacher.weight, and was not when" in text
        assert "has removed parameter net.bias from the model" in text
        assert watch.refused == ""


def test_a_buffer_that_is_written_with_its_own_values_is_constant_and_not_read_for_ever(
    monkeypatch,
):
    model = Net()
    watch = Watch(model, constant=describe(model).buffers, moving=())
    read = []

    def digest(tensor: torch.Tensor) -> int:
        read.append(tensor)
        return digest_of(tensor)

    digest_of = buffers._digest
    monkeypatch.setattr(buffers, "_digest", digest)
    for _ in range(5):
        model.table.copy_(
            model.table.clone()
        )  # as DistributedDataParallel does before each forward pass
        assert watch.changed() == ""
    assert len(read) == buffers.MOST_READS
    assert all(tensor is model.table for tensor in read)


def test_a_line_about_buffers_names_at_most_eight():
    model = nn.Linear(2, 2)
    for index in range(11):
        model.register_buffer(f"b{index:02d}", torch.zeros(1))
    watch = Watch(model, constant=describe(model).buffers, moving=())
    for index in range(11):
        model.get_buffer(f"b{index:02d}").add_(1)
    sentence = watch.changed()
    assert "buffers b00, " in sentence
    assert "b07 and 3 more changed" in sentence


def test_weights_that_a_program_loads_after_it_connected_are_named():
    """A checkpoint of its own, for example, loaded at each start right before the loop."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    loaded, saved = Loaded(model), {k: v + 1 for k, v in model.state_dict().items()}
    model(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert loaded.written() == ""
    model.load_state_dict(saved)
    assert loaded.written().startswith(
        "parameters 0.weight, 0.bias were written between Learner.connect and the first step of"
    )


def test_weights_that_are_written_with_their_own_values_are_not_named():
    """As DistributedDataParallel writes them when it is made after `connect`."""
    model = nn.Sequential(nn.Linear(300, 2), nn.LayerNorm(2))
    loaded = Loaded(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    assert loaded.written() == ""
    with torch.no_grad():
        model[0].weight[1] = 0
    assert loaded.written().startswith("parameter 0.weight was written between")


def test_weights_of_fsdp2_that_are_loaded_are_named_and_passes_of_its_ranks_are_none():
    """The first forward pass may put a shard into other memory."""
    with alone():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1, bias=False))
        for part in (*model, model):
            fully_shard(part)
        loaded = Loaded(model)
        with torch.no_grad():
            model(torch.ones(3, 6))
        model(torch.ones(3, 6)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter._local_tensor = parameter._local_tensor.clone().add_(0)
        assert loaded.written() == ""
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        assert loaded.written().startswith(
            "parameters 0.weight, 0.bias, 1.weight were written between Learner.connect and the"
        )
