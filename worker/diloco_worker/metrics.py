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

    Names and meanings: diloco/telemetry.py. Of steps that follow each other faster than the link listens, the counters
    miss nothing, the histogram sees the last.
    """

    def __init__(self, port: int) -> None:
        self._metrics: Mapping[str, Any] = {}
        self._before: TrainerState | None = None
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

    def heard(self, state: TrainerState) -> None:
        """Take the trainer's newest state."""
        before, self._before = self._before, state
        if not self._metrics or before is None or state.local_step <= before.local_step:
            return
        metrics = self._metrics
        if before.in_place:  # else the difference is what an earlier life did
            metrics["diloco_learner_steps_total"].inc(state.local_step - before.local_step)
            metrics["diloco_learner_tokens_total"].inc(
                max(0, state.total_tokens - before.total_tokens)
            )
        metrics["diloco_learner_sync_seconds_total"].inc(
            max(0.0, state.total_sync_seconds - before.total_sync_seconds)
        )
        metrics["diloco_learner_step_seconds"].observe(state.step_seconds)
        if state.loss is not None:
            metrics["diloco_learner_loss"].set(state.loss)
