"""
The learner's side of a job: the `Learner` library, the link process, the GPT recipe, the evaluator.

Begin with `learner`, the public class; `joined` implements it in a job, with trainer/ in the training
process and link/ in the process beside it, and the decisions of both in core/ (pure). `rank_liveness`
is for the other ranks of a learner of several pods. Imports only the contract (`diloco`); torch stays out of
core/, link/ and `fetch`, so `Learner` loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.learner import Learner
    from diloco_worker.rank_liveness import report_progress

__all__ = ["Learner", "report_progress"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from diloco_worker.learner import Learner

        return Learner
    if name == "report_progress":
        from diloco_worker.rank_liveness import report_progress

        return report_progress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
