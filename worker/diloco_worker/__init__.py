"""
The learner's side of a job: the `Learner` library, the link process, the built-in recipe, the
evaluator.

`Learner` is loaded on first use: the link process and `fetch` live in this package and must not
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.learner import Learner

__all__ = ["Learner"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from diloco_worker.learner import Learner

        return Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
