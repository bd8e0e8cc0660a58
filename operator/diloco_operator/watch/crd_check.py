"""
Notices a CRD that is older than this operator: the API server drops the fields that it does not have.

The operator serves all jobs meanwhile, since most need no new field; the log and /readyz name the fields.
"""

from __future__ import annotations

import logging

from diloco_job.crd import GROUP, PLURAL
from diloco_operator.cluster.client import ApiError, Cluster
from diloco_operator.state.served_schema import missing_fields
from diloco_operator.watch.health import Health

log = logging.getLogger(__name__)

_MOST = 8
"""Fields that are named."""


class CrdCheck:
    """Compares the fields of the CRD with those of this version until none is missing; for one thread."""

    def __init__(self, cluster: Cluster, health: Health) -> None:
        self._cluster = cluster
        self._health = health
        self._missing: tuple[str, ...] = ()
        """In the last comparison."""
        self._ended = False

    def once(self) -> None:
        """
        Compare once, if that is still of use.

        Only what is missing twice in a row is reported: a server publishes a CRD that was just upgraded some
        seconds later.
        """
        if self._ended:
            return
        try:
            missing = missing_fields(self._cluster.published_schema())
        except ApiError as error:
            # A cluster may not grant `system:discovery`: then nothing is known.
            self._ended = error.status == 403
            return
        if missing is None:
            return
        if not missing:
            self._health.crd_is("")
            self._ended = True
        elif missing == self._missing:
            self._report(missing)
        self._missing = missing

    def _report(self, missing: tuple[str, ...]) -> None:
        more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
        problem = (
            f"the CRD {PLURAL}.{GROUP} is older than this operator and lacks {', '.join(missing[:_MOST])}{more}; "
            "the API server drops these fields from every job. Upgrade it: diloco crd | kubectl apply "
            "--server-side -f -"
        )
        if self._health.crd_is(problem):
            log.warning("%s", problem)
