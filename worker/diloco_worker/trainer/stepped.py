"""
Which trained parameters the optimizers step.

A merge overwrites the parameters of the model. An optimizer over others, such as copies in fp32 that are written to the
model after each step, would undo it without an error. Parameters that only an optimizer has, such as those of a loss,
are trained by this learner alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError
from diloco_worker.trainer.layout import memory_key
from diloco_worker.trainer.wrappers import tensors_of

MOST_NAMES = 8
"""Named in one sentence."""


def not_stepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """
    A sentence about trained parameters that no optimizer has, and those of an optimizer that the model lacks; "": there
    are none, or no optimizer.

    One that shares memory with a parameter of an optimizer, as with a flat one of all parameters, counts as its own.

    Args:
        model: may be wrapped.
        optimizers: all that step it.

    Raises:
        ConfigError: they have none of the trained parameters, but some of the same shapes.
    """
    if not optimizers:
        return ""
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    known = {*map(id, stepped), *map(memory_key, stepped)}
    trained = {name: p for name, p in tensors_of(model) if p.requires_grad}
    missing = [name for name, p in trained.items() if known.isdisjoint((id(p), memory_key(p)))]
    if not missing:
        return _outside(model, stepped)
    names = ", ".join(missing[:MOST_NAMES])
    names += f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
    # One that steps in hooks of the backward pass may stand behind an optimizer of a made-up tensor.
    if len(missing) == len(trained) and {p.shape for p in trained.values()} & {
        p.shape for p in stepped
    }:
        raise ConfigError(
            f"optimizer: it has none of the {len(trained)} trained parameters of the model ({names}), but copies of "
            "them or earlier ones, so that its next step would undo each merge; create it from model.parameters(), "
            "after the model is complete and on its device, or pass an empty list if the program steps without one"
        )
    return (
        f"{len(missing)} of {len(trained)} trained parameters are in no optimizer that Learner.connect was given: "
        f"{names}; what steps them otherwise may undo each merge: create the optimizers from model.parameters() after "
        "the model is complete, pass all of them, or freeze the others by requires_grad_(False)"
    )


def _outside(model: nn.Module, stepped: Sequence[torch.Tensor]) -> str:
    own = [*model.parameters()]
    known = {*map(id, own), *map(memory_key, own)}
    others = [p for p in stepped if known.isdisjoint((id(p), memory_key(p)))]
    if not others:
        return ""
    shapes = ", ".join(str(list(p.shape)) for p in others[:MOST_NAMES])
    shapes += f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
    return (
        f"{len(others)} of {len(stepped)} parameters of the optimizers are not in the model that Learner.connect was "
        f"given (shapes {shapes}), so that they are trained here alone and not merged: pass one module that contains "
        "all that is trained, such as an nn.ModuleDict, and put layers into an nn.ModuleList instead of a list"
    )
