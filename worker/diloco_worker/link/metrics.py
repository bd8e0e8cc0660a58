"""A learner's Prometheus metrics, served by its link so that a scrape costs the training nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from diloco.runtime.metrics import register, serve
from diloco_worker.core.messages import TrainerState

log = logging.getLogger(__name__)


class Metrics:
    """
    Metrics from the trainer's states; names and meanings are in diloco/runtime/metric_table.py.

    The counters are exact even if the link misses states, because each state carries totals. When
    steps are faster than the link reads, the histogram gets only the last of them.

    Args:
        port: where to serve them; 0: nothing is served or counted.
        restarts: previous restarts of this learner.
    """

    def __init__(self, port: int, *, restarts: int = 0) -> None:
        self._metrics: Mapping[str, Any] = {}
        self._counted: dict[str, float] = {}
        if not port:
            return
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        try:
            serve(port, registry)
        except OSError as error:
            log.warning("metrics are not served: port %d: %s", port, error.strerror)
            return
        self._metrics = register("learner", registry)
        self._count("diloco_learner_restarts_total", restarts)

    def observe(self, state: TrainerState) -> None:
        """Take the trainer's newest state."""
        if not self._metrics or not state.stepped:
            return
        steps = state.local_step - state.start_local_step
        if not self._count("diloco_learner_steps_total", steps):
            return
        tokens = state.total_tokens - state.start_total_tokens
        self._count("diloco_learner_tokens_total", tokens)
        self._count("diloco_learner_sync_seconds_total", state.total_sync_seconds)
        self._metrics["diloco_learner_step_seconds"].observe(state.step_seconds)
        if state.loss is not None:
            self._metrics["diloco_learner_loss"].set(state.loss)

    def _count(self, name: str, total: float) -> bool:
        """Raise a counter to `total`; False if it is there already."""
        more = total - self._counted.get(name, 0)
        if more <= 0:
            return False
        self._counted[name] = total
        self._metrics[name].inc(more)
        return True
