"""Lets torchtitan train on CPUs, which it does not support: import it before the rest of torchtitan, without a GPU."""

import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class _Cpu(types.ModuleType):
    """What torchtitan asks of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        """Name of the device."""
        return "CPU"

    def current_device(self) -> int:
        """Its number."""
        return 0

    def get_device_properties(self, device: object = None) -> Any:
        """Its memory, of which torchtitan logs how much is used."""
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """None are known."""
        return {}

    def reset_peak_memory_stats(self) -> None:
        """None are known."""

    def empty_cache(self) -> None:
        """There is none."""


def for_cpu(config: Any) -> Any:
    """Choose what CPUs have in a config for `Trainer`: no CUDA graphs, no FlexAttention."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    config.training.disable_cuda_graphs = True
    for _, _, owner, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())
    spec = config.model_spec
    parallelize = spec.parallelize_fn

    def parallelized(model: Any, **kwargs: Any) -> Any:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no sum of scaled gradients.
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelized
    return config


if not torch.cuda.is_available():
    utils.device_type, utils.device_module = "cpu", _Cpu("cpu")
