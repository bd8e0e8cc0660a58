"""
Modules that wrap a model or a part of it, and add their own names to those of its tensors.

The names of a job are those of the user's modules: learners that compile or parallelize other parts of the same model
train together, and what is exported loads into the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco.model import tensorfile

CHECKPOINTED = "_checkpoint_wrapped_module."
"""What `checkpoint_wrapper` of torch adds to the names of parameters, and removes from those of a state_dict."""

COMPILED = "_orig_mod"
"""What torch.compile calls the module that it wraps."""

FABRIC = {"_forward_module", "_original_module"}
"""What Lightning's Fabric calls the module that it wraps: as it runs it, and as the user made it."""

PARALLEL = (DistributedDataParallel, nn.DataParallel)
"""They call it `module`, as users call modules of their own."""


def bare(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile, DistributedDataParallel and Fabric, as the user named it."""
    while True:
        # Not getattr: PEFT's models hand out the attributes of the model that they wrap.
        children = dict(model._modules.items())
        inner = children.get("_original_module" if children.keys() == FABRIC else COMPILED)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def optimizers_of(given: object) -> list[Optimizer]:
    """
    The optimizers that were given: one, or several.

    Wrappers without hooks of their own, such as those of Accelerate and Lightning, are removed. One that has hooks may
    change the parameters after the inner optimizer, as Lookahead does.

    Raises:
        TypeError: something else was given, or the hooks of torch, which count steps, are missing.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found = list(given) if isinstance(given, Iterable) and several else [given]
    optimizers = [o for o in found if isinstance(o, Optimizer)]
    if len(optimizers) < len(found):
        kinds = [type(o).__name__ for o in found] if several else f"a {type(given).__name__}"
        raise TypeError(
            f"optimizer is {kinds}, expected one torch.optim.Optimizer or a list of them"
        )
    return [_hooked(optimizer) for optimizer in optimizers]


def _hooked(optimizer: Optimizer) -> Optimizer:
    while "_optimizer_step_post_hooks" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__} around a {type(inner).__name__}, with no hooks of "
                "torch.optim.Optimizer to count its steps; call super().__init__ if it is your own, or pass "
                "Learner.connect an empty list, without optimizer state in local checkpoints"
            )
        optimizer = inner
    return optimizer


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function from the names of a model's tensors to those without its wrappers, of parts of it as well."""
    wrapped = {
        f"{path}.{name}".lstrip(".").replace(CHECKPOINTED, "")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in ("module" if isinstance(module, PARALLEL) else COMPILED,)
        # A wrapper has nothing else; a module of the user that has may call a part of it like this.
        if len(module._modules) == 1
        and name in module._modules
        and not module._parameters
        and not module._buffers
    }

    def plain(name: str) -> str:
        name = name.replace(CHECKPOINTED, "")
        if not wrapped:
            return name
        path, own = "", []
        for part in name.split("."):
            path = f"{path}.{part}".lstrip(".")
            if path not in wrapped:
                own.append(part)
        return ".".join(own)

    return plain


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """
    Every parameter and buffer once with its plain name, including buffers that state_dict omits.

    Of those, and of frozen parameters, without what no file can hold: each learner builds it for itself.
    """
    model = bare(model)
    plain = plain_names(model)
    buffers = [(name, distinct(buffer)) for name, buffer in model.named_buffers()]
    return [
        (plain(name), tensor)
        for name, tensor in (*model.named_parameters(), *buffers)
        if tensor.requires_grad or _storable(tensor)
    ]


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has each of its values in memory once: only that can be overwritten."""
    if not _dense(tensor):
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def wraps(tensor: torch.Tensor) -> bool:
    """Whether it has its values in other tensors, as quantized weights have; a DTensor is none of these."""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements")


def _storable(tensor: torch.Tensor) -> bool:
    known = str(tensor.dtype).removeprefix("torch.") in tensorfile.DTYPES
    return known and _dense(tensor) and tensor.device.type != "meta" and not wraps(tensor)


def _dense(tensor: torch.Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_nested) and tensor.layout == torch.strided
