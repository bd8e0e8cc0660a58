"""
The learner's side of a job: the `Learner` library, the link process, the GPT recipe, the evaluator.

Begin with `learner`, the public class; `joined` implements it in a job, with trainer/ in the training
process and link/ in the process beside it, and the decisions of both in core/ (pure). `identities` has what
a program needs to know before it has a model. `rank_liveness`
is for the other ranks of a learner of several pods. Imports only the contract (`diloco`); torch stays out of
core/, link/ and `fetch`, so `Learner` loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.attachment import StopTraining, attach
    from diloco_worker.identities import Identity, identity
    from diloco_worker.learner import Learner
    from diloco_worker.rank_liveness import report_progress

__all__ = ["Identity", "Learner", "StopTraining", "attach", "identity", "report_progress"]

# A module with the name of what it offers would hide it, once something imports the module.
_MODULES = {
    "Identity": "identities",
    "Learner": "learner",
    "StopTraining": "attachment",
    "attach": "attachment",
    "identity": "identities",
    "report_progress": "rank_liveness",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
