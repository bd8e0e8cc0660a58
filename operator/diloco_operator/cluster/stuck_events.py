"""
Events about objects that are stuck, read the less often the longer that takes.

No field of Events has an index: for those of one object, the API server reads and decodes all of the
namespace. With 5,000 of them that costs it a tenth of a second of processor time, for each object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_operator.cluster.client import Cluster
from diloco_operator.state.objects import Object
from diloco_operator.state.pending_events import newest_event
from diloco_operator.workqueue import Key

SHARE = 1 / 500
"""Of the time that reading the Events of one object may take; 500 such objects cost one request at a time."""
LONGEST_SECONDS = 300.0
"""Between two reads of the Events of one object, however long each takes."""


@dataclass(frozen=True, slots=True)
class _Read:
    event: Object | None
    again: float
    """When to read it again."""


class StuckEvents:
    """Safe for use by many threads, with one thread per key at a time."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic."""
        self._cluster = cluster
        self._clock = clock
        self._read: dict[Key, dict[str, _Read]] = {}
        """By uid of the object: those that were stuck at the last reconcile of the job."""

    def about(self, key: Key, stuck: Sequence[Object]) -> tuple[Object, ...]:
        """
        The newest Event about each object that matters (`newest_event`), as it was when it was read.

        Raises:
            ApiError: the API server did not answer.
        """
        before = self._read.pop(key, {})
        if not stuck:
            return ()
        known = self._read[key] = {}
        for item in stuck:
            uid = str(item["metadata"]["uid"])
            last = before.get(uid)
            is_due = last is None or self._clock() >= last.again
            known[uid] = last if last and not is_due else self._newest(item)
        return tuple(read.event for read in known.values() if read.event is not None)

    def forget(self, key: Key) -> None:
        """The job was deleted."""
        self._read.pop(key, None)

    def _newest(self, item: Object) -> _Read:
        begun = self._clock()
        event = newest_event(item, self._cluster.events_about(item))
        now = self._clock()
        return _Read(event, now + min((now - begun) / SHARE, LONGEST_SECONDS))
