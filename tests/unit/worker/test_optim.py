"""Inner optimizers, compared with those of torch."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from diloco_worker.recipes import optim

SHAPES = [(48, 48), (48, 48), (96, 48), (48, 96), (48, 96), (7, 3)]


def matrices():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in SHAPES]


def walk(optimizer, parameters, steps):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def torch_muon(parameters):
    return torch.optim.Muon(
        parameters, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_updates_as_torch_does_in_every_dtype_of_its_products(dtype, monkeypatch):
    monkeypatch.setattr(optim, "product_dtype", lambda device: dtype)
    ours, theirs, start = matrices(), matrices(), matrices()
    walk(optim.Muon(ours, lr=0.01, weight_decay=0.1), ours, 3)
    walk(torch_muon(theirs), theirs, 3)
    for mine, other, before in zip(ours, theirs, start, strict=True):
        moved = (other - before).norm()
        # torch computes in bfloat16, with 8 bits, and five iterations amplify that.
        assert (mine - other).norm() < 0.03 * moved


def test_either_muon_loads_the_state_of_the_other():
    first, second = matrices(), matrices()
    theirs = torch_muon(first)
    walk(theirs, first, 1)
    ours = optim.Muon(second, lr=0.5, weight_decay=0.0)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01
    buffers = [theirs.state[p]["momentum_buffer"] for p in first]
    for parameter, buffer in zip(second, buffers, strict=True):
        assert torch.equal(ours.state[parameter]["momentum_buffer"], buffer)
    torch_muon(second).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("shape", [(2, 64, 64), (1, 32, 128), (3, 128, 32)])
def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_gets_singular_values_near_1(shape):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = optim.orthogonal(given).float()
    assert found.shape == given.shape
    lengths = torch.linalg.svdvals(found)
    # A square Gaussian matrix has singular values near zero; five steps do not raise all of them.
    assert lengths.max() < 1.3
    assert lengths.median() > 0.6
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    exact = left @ right
    cosine = (found * exact).sum() / (found.norm() * exact.norm())
    assert cosine > 0.95


def test_a_matrix_without_a_gradient_does_not_change():
    moved, still = matrices()[:2]
    optimizer = optim.Muon([moved, still], lr=0.1, weight_decay=0.1)
    before = still.detach().clone()
    moved.grad = torch.ones_like(moved)
    optimizer.step()
    assert torch.equal(still, before)


def test_a_zero_gradient_gives_no_nan():
    [matrix] = matrices()[:1]
    matrix.grad = torch.zeros_like(matrix)
    optim.Muon([matrix], lr=0.1, weight_decay=0.0).step()
    assert torch.isfinite(matrix).all()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inside = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(("name", "count"), [("Muon", 2), ("AdamW", 1)])
def test_every_trained_parameter_has_exactly_one_optimizer(name, count):
    model = Small()
    made = optim.build(
        model, [model.inside.weight], optimizer=name, learning_rate=0.1, weight_decay=0.2
    )
    held = [id(p) for o in made for group in o.param_groups for p in group["params"]]
    assert len(made) == count
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(g["lr"] == 0.1 and g["weight_decay"] == 0.2 for o in made for g in o.param_groups)


def test_the_momentum_is_that_of_muon_alone():
    model = Small()
    muon, adamw = optim.build(
        model,
        [model.inside.weight],
        optimizer="Muon",
        learning_rate=0.1,
        weight_decay=0.2,
        momentum=0.8,
    )
    assert [group["momentum"] for group in muon.param_groups] == [0.8]
    assert all("momentum" not in group for group in adamw.param_groups)


TRAINS = """
import sys, torch
from diloco_worker.recipes import optim

model = torch.nn.Linear(4, 4)
for optimizer in optim.build(
    model, [model.weight], optimizer=sys.argv[1], learning_rate=0.1, weight_decay=0.1
):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_process_that_trains_does_not_import_the_compiler_of_torch(name):
    """It takes two seconds of processor time, at each start of a learner."""
    subprocess.run([sys.executable, "-c", TRAINS, name], check=True, timeout=100)


def test_hooks_of_steps_and_of_saved_states_run():
    parameters = matrices()
    optimizer = optim.AdamW(parameters, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    walk(optimizer, parameters, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saved", "loaded"]


def test_adamw_takes_the_steps_of_torchs():
    ours, theirs = matrices(), matrices()
    walk(optim.AdamW(ours, lr=0.01, fused=True), ours, 3)
    walk(torch.optim.AdamW(theirs, lr=0.01, fused=True), theirs, 3)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
