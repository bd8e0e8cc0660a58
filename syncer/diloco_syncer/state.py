"""
What the syncer knows (`State`, only on the runner's thread), and the part that other threads read (`StateView`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.model.fragments import Layout
from diloco_syncer.core.admission import Admission
from diloco_syncer.core.engine import Engine
from diloco_syncer.storage.capture import ExportedModel
from diloco_syncer.storage.copy_schedule import CopyState
from diloco_syncer.storage.parameters import Parameters


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that changes while the syncer runs. Other threads reach it through `Runner.ask`."""

    engine: Engine
    admission: Admission
    parameters: Parameters | None
    """Θ; None until it is initialized."""
    model: ExportedModel | None
    """None until it is exported."""
    run: str = ""
    """See `Store.run`."""
    start_id: str = ""
    """See `Store.start_id`."""
    snapshot_start_id: str = ""
    """See `Store.snapshot_start_id`."""
    evaluation: tuple[int, float] = (0, 0.0)
    """Global step and loss of the last evaluation."""
    failure: tuple[str, str] | None = None
    """Reason and message of the operator that reported the failure of the job."""
    copies: Callable[[], CopyState | None] = lambda: None
    """Copies of snapshots in an object store; None: there are none."""
    region_failures: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Region → reason, message and number, of the operator that reported the failure of so many learners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """One consistent view of the state, replaced as a whole; any thread may read it without a lock."""

    epoch: int
    step: int
    layout: Layout | None
    """None: no learner has defined the model."""
    parameters: Parameters | None
    initialiser: str | None
    """The learner that must upload Θ^(0)."""

    @classmethod
    def of(cls, state: State) -> StateView:
        """The facts of the current state; called on the runner's thread."""
        return cls(
            epoch=state.engine.epoch,
            step=state.engine.step,
            layout=state.admission.layout,
            parameters=state.parameters,
            initialiser=state.engine.initialiser,
        )
