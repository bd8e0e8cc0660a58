"""A learner's Prometheus metrics, served by its link so that scraping never costs the training process anything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from diloco.telemetry import register
from diloco_worker.core.messages import TrainerState

log = logging.getLogger(__name__)


class Metrics:
    """
    Follows the trainer's states. With port 0 nothing is served and nothing counted.

    Names and meanings: diloco/telemetry.py. The counters are exact whatever states the link missed,
    because each state says how far the process has come since it began; of steps that follow each
    other faster than the link listens, the histogram sees the last.

    Args:
        port: where to serve them.
        restarts: lives of this learner before this one.
    """

    def __init__(self, port: int, *, restarts: int = 0) -> None:
        self._metrics: Mapping[str, Any] = {}
        self._counted: dict[str, float] = {}
        if not port:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        try:
            start_http_server(port, registry=registry)
        except OSError as error:
            log.warning("metrics: port %d: %s; none are served", port, error.strerror)
            return
        self._metrics = register("learner", registry)
        self._count("diloco_learner_restarts_total", restarts)

    def heard(self, state: TrainerState) -> None:
        """Take the trainer's newest state."""
        if not self._metrics or not state.stepped:
            return
        steps = state.local_step - state.began_local_step
        if not self._count("diloco_learner_steps_total", steps):
            return
        tokens = state.total_tokens - state.began_total_tokens
        self._count("diloco_learner_tokens_total", tokens)
        self._count("diloco_learner_sync_seconds_total", state.total_sync_seconds)
        self._metrics["diloco_learner_step_seconds"].observe(state.step_seconds)
        if state.loss is not None:
            self._metrics["diloco_learner_loss"].set(state.loss)

    def _count(self, name: str, total: float) -> bool:
        """Bring a counter to `total`; False where it is there already."""
        more = total - self._counted.get(name, 0)
        if more <= 0:
            return False
        self._counted[name] = total
        self._metrics[name].inc(more)
        return True
