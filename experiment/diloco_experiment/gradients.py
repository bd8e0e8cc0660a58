"""
Gradients of several models of one shape in one call.

Shape letters: M = models, B = windows of a batch, T = bytes of context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from diloco_worker.recipes import gpt

CPU = torch.device("cpu")


def gradients(
    models: Sequence[gpt.GPT], windows: Sequence[npt.NDArray[np.int64]], config: gpt.Config
) -> list[float]:
    """
    Set the gradient of each model on its windows, all of one shape; returns the losses.

    That of one model equals bit for bit what the recipe's loop computes. Those of several are rounded
    differently: matrix products of a batch have another order of additions.
    """
    if len(models) == 1:
        loss = gpt.loss_of(models[0], windows[0], config, CPU)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.item()]
    windows_MBT = torch.from_numpy(np.stack(windows))
    names = [name for name, _ in models[0].named_parameters()]
    parameters = [dict(model.named_parameters()) for model in models]
    stacked = {name: torch.stack([p[name].detach() for p in parameters]) for name in names}

    def loss_of(values: dict[str, Tensor], windows_BT: Tensor) -> Tensor:
        return gpt.cross_entropy(
            lambda bytes_BT: functional_call(models[0], values, (bytes_BT,)), windows_BT, config
        )

    # The kernel of torch for attention on CPUs cannot be batched: vmap would call it once for each model.
    with sdpa_kernel(SDPBackend.MATH):
        found, losses_M = vmap(grad_and_value(loss_of))(stacked, windows_MBT)
    for row, of_model in enumerate(parameters):
        for name in names:
            of_model[name].grad = found[name][row]
    return [float(loss) for loss in losses_M]
