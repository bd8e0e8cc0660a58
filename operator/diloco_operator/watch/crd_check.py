"""
Notices a CRD that is older than this operator: the API server drops the fields that it does not have.

The operator serves all jobs meanwhile, since most need no new field; the log and /readyz name the fields.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from diloco_job.crd import GROUP, PLURAL
from diloco_operator.cluster.client import ApiError, Cluster
from diloco_operator.state.served_schema import missing_fields
from diloco_operator.watch.health import Health

log = logging.getLogger(__name__)

_MOST = 8
"""Fields that are named."""


PUBLISHED_SECONDS = 10.0
"""A server publishes a CRD that was just upgraded some seconds later: what is missing for less is not reported."""

AGAIN_SECONDS = 3600.0
"""Between two comparisons when nothing is missing: another release may install an older CRD later."""


class CrdCheck:
    """Compares the fields of the CRD with those of this version; for one thread."""

    def __init__(
        self, cluster: Cluster, health: Health, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._health = health
        self._clock = clock
        self._missing: tuple[str, ...] = ()
        """In the last comparison."""
        self._since = self._due = -math.inf
        """Since when that has been missing, and when to compare next."""

    def once(self) -> None:
        """Compare once, if it is time; report what has been missing for some seconds."""
        now = self._clock()
        if now < self._due:
            return
        try:
            missing = missing_fields(self._cluster.published_schema())
        except ApiError as error:
            # A cluster may not grant `system:discovery`, or not yet: then nothing is known.
            if error.status == 403:
                self._due = now + AGAIN_SECONDS
            return
        if missing is None:
            return
        if missing != self._missing:
            self._missing, self._since = missing, now
        if not missing:
            self._health.crd_is("")
            self._due = now + AGAIN_SECONDS
        elif now - self._since >= PUBLISHED_SECONDS:
            self._report(missing)

    def _report(self, missing: tuple[str, ...]) -> None:
        more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
        problem = (
            f"the CRD {PLURAL}.{GROUP} is older than this operator and lacks {', '.join(missing[:_MOST])}{more}; "
            "the API server drops these fields from every job. Upgrade it: diloco crd | kubectl apply "
            "--server-side -f -"
        )
        if self._health.crd_is(problem):
            log.warning("%s", problem)
