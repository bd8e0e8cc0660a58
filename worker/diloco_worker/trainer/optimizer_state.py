"""
The state of optimizers in a local checkpoint: whether it fits the optimizers of this process, and loading it.

torch compares only the numbers of groups and parameters: with the state of another class, or of parameters
in another order, the next step fails or trains with the wrong moments.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError
from diloco_worker.trainer.layout import dtype_name, local
from diloco_worker.trainer.wrappers import tensors_of

SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Options of a group that torch's schedulers set."""

IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Options of a group that state how a step is computed, which may be impossible on the device of this process."""

CHOSEN = ("lr", "betas", "eps", "weight_decay")
"""Options of a group that a learner's config may choose, and on whose values no state depends."""

PER_ELEMENT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State with the shape of its parameter."""


def describe(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The class of each optimizer, and name, shape and dtype of its parameters by group; JSON values."""
    names = {id(tensor): name for name, tensor in tensors_of(model)}
    return [
        {
            "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "groups": [
                [[names.get(id(p), ""), list(p.shape), dtype_name(p)] for p in group["params"]]
                for group in optimizer.param_groups
            ],
        }
        for optimizer in optimizers
    ]


def load(
    saved: Sequence[Mapping[str, Any]], description: Sequence[Mapping[str, Any]] | None,
    model: nn.Module, optimizers: Sequence[Optimizer], *, of_peer: bool = False,
) -> None:  # fmt: skip
    """
    Give the optimizers the saved state; after an error they have their own.

    The learning rate of a group that a scheduler drives stays the program's: a scheduler that is made
    later would begin with that of the checkpoint. So does how a step is computed (`IMPLEMENTATION`). Other options
    are the checkpoint's, because some optimizers keep state there.

    Args:
        saved: `state_dict` of each optimizer; its groups are changed.
        description: what `describe` returned then; None: not known.
        model: of this process.
        optimizers: of this process.
        of_peer: another learner saved it, whose config may differ: the options of `CHOSEN` stay the program's.

    Raises:
        ConfigError: the state does not fit, is not finite, or is refused by an optimizer.
    """
    if len(saved) != len(optimizers):
        raise ConfigError(f"the checkpoint has {len(saved)} optimizers, this run {len(optimizers)}")
    if description is not None:
        for was, now in zip(description, describe(model, optimizers), strict=True):
            _compare(was, now)
    for state, optimizer in zip(saved, optimizers, strict=True):
        name = type(optimizer).__name__
        _check_groups(state["param_groups"], optimizer, options=description is None)
        _check_state(state["state"], optimizer)
        _check_finite(state["state"], f"{name}/state")
        _check_options(state["param_groups"], optimizer, f"{name}/param_groups")
    with own_on_error(optimizers):
        for state, optimizer in zip(saved, optimizers, strict=True):
            for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
                _keep_schedule(group, own)
                kept = IMPLEMENTATION + (CHOSEN if of_peer else ())
                group.update({key: own[key] for key in kept if key in own})
                _fill(group, own)
            try:
                optimizer.load_state_dict(dict(state))
            except Exception as error:  # of a class that may be the user's
                raise ConfigError(
                    f"{type(optimizer).__name__} refuses the state of the checkpoint: {error!r}"
                ) from error


@contextlib.contextmanager
def own_on_error(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Give the optimizers back what they have now if the block raises."""
    before = [optimizer.state_dict() for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(state)
        raise


def _compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if was["class"] != now["class"]:
        raise ConfigError(f"the checkpoint has a {was['class']}, this run a {now['class']}")
    counts = [[len(group) for group in side["groups"]] for side in (was, now)]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{now['class']}: its groups have {counts[0]} parameters in the checkpoint, {counts[1]} in this run"
        )
    for group, pair in enumerate(zip(was["groups"], now["groups"], strict=True)):
        for place, (old, new) in enumerate(zip(*pair, strict=True)):
            if old != new:
                raise ConfigError(
                    f"{now['class']}: parameter {place} of group {group} is {_text(old)} in the checkpoint, "
                    f"{_text(new)} in this run"
                )


def _text(parameter: Sequence[Any]) -> str:
    name, shape, dtype = parameter
    return f"{name or 'one outside the model'} ({dtype}, shape {shape})"


def _check_groups(
    groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, *, options: bool
) -> None:
    """`options`: compare their names, too; they stand for the class where that is not known."""
    name = type(optimizer).__name__
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"{name}: {len(groups)} groups in the checkpoint, {len(optimizer.param_groups)} in this run"
        )
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        if len(group["params"]) != len(own["params"]):
            raise ConfigError(
                f"{name}: group {index} has {len(group['params'])} parameters in the checkpoint, "
                f"{len(own['params'])} in this run"
            )
        differing = (group.keys() ^ own.keys()) - set(SCHEDULED)
        if options and differing:
            raise ConfigError(
                f"{name}: the options {', '.join(sorted(differing))} of group {index} are only in the "
                "checkpoint or only in this run"
            )


def _check_state(state: Mapping[Any, Any], optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    for index, entries in state.items():
        if not isinstance(index, int):
            continue  # of the optimizer as a whole
        if not 0 <= index < len(parameters):
            raise ConfigError(
                f"{name}: state of parameter {index} in the checkpoint, this run has {len(parameters)}"
            )
        parameter = parameters[index]
        own = optimizer.state.get(parameter, {})
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if not isinstance(value, torch.Tensor):
                continue
            like = own.get(key, parameter if key in PER_ELEMENT else None)
            if not isinstance(like, torch.Tensor):
                continue
            if value.shape != like.shape or value.is_floating_point() != like.is_floating_point():
                raise ConfigError(
                    f"{name}: {key} of parameter {index} has shape {list(value.shape)} and dtype "
                    f"{dtype_name(value)} in the checkpoint, expected {list(like.shape)} and {dtype_name(like)}"
                )


def _check_options(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, path: str) -> None:
    """Options must be finite where the program's own are: some are infinite by design (no limit)."""
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in (group.keys() & own.keys()) - {"params"}:
            if _is_finite(own[key]):
                _check_finite(group[key], f"{path}/{index}/{key}")


def _is_finite(value: Any) -> bool:
    try:
        _check_finite(value, "")
    except ConfigError:
        return False
    return True


def _check_finite(value: Any, path: str) -> None:
    if isinstance(value, torch.Tensor):
        # A sum needs no memory beside the tensor, and is finite only if every element is.
        held = local(value)
        real = torch.view_as_real(held) if held.is_complex() else held
        finite = not real.is_floating_point() or math.isfinite(real.sum(dtype=torch.float64).item())
    else:
        finite = not isinstance(value, float) or math.isfinite(value)
    if not finite:
        raise ConfigError(f"{path} is not finite in the checkpoint")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_finite(inner, f"{path}/{index}")


def _fill(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    """
    Add the program's options that the checkpoint lacks: torch would remove them.

    Schedulers and new releases of torch add options. One that only the checkpoint has is kept, as torch does:
    an optimizer may have added it in its first step.
    """
    for key, value in own.items():
        if key != "params" and key not in SCHEDULED:
            group.setdefault(key, value)


def _keep_schedule(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    if "initial_lr" not in group and "initial_lr" not in own:
        return
    for key in SCHEDULED:
        group.pop(key, None)
        if key in own:
            group[key] = own[key]
