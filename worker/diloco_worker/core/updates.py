"""
Which committed fragments this learner lacks, and what is under way to get them. Pure.

Normally a result is downloaded while the round runs. If that fails, if the session breaks, or if the
learner joins between pull and commit or with a checkpoint of its own, the fragment is outdated: it
is downloaded as it is now, and is not offered before it has been applied, so that its counters
start from zero and its delta does not contain the missed update with the opposite sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.runtime.backoff import doubled
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Version

RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 10.0


class Updates:
    """
    Catches up with the syncer, per fragment.

    Args:
        slots: one per fragment.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._newest: dict[int, Version] = {}
        self._loading: set[int] = set()
        """Fragments of which a download runs or is about to be repeated."""
        self.outdated: set[int] = set()
        """Fragments that must not be offered."""

    def session_lost(self) -> None:
        """All downloads were cancelled."""
        self._loading.clear()

    def began(self, versions: tuple[Version, ...]) -> None:
        """
        A session began: the syncer has these versions now, one per fragment.

        They may be older than those that its predecessor announced: a crash undoes what was committed
        after the last snapshot, and waiting for a version that no longer exists would never end.
        """
        self._newest = dict(enumerate(versions[: len(self._slots)]))
        self.outdated = {
            p for p in self.outdated if self._behind(p) or self._slots[p].held is not None
        }

    def loaded(self, versions: Sequence[Version | None]) -> None:
        """
        The trainer holds a model that did not all come from the inboxes, such as a checkpoint.

        Args:
            versions: of its fragments; those that are missing or None are older than any.
        """
        for slot, version in zip(self._slots, versions, strict=False):
            if slot.version is None:
                slot.version = version

    def note(self, fragment: int, version: Version) -> None:
        """The syncer has this version of a fragment now."""
        if fragment < len(self._slots):
            self._newest[fragment] = max(version, self._newest.get(fragment, version))

    def catch_up(self) -> list[ev.Download]:
        """Download every fragment that is outdated and not on its way."""
        return [d for fragment in self._newest for d in self._catch_up(fragment, tries=1)]

    def result_announced(self, fragment: int) -> None:
        """The result of a round is being downloaded."""
        self._loading.add(fragment)

    def ended(self, request: ev.Download, *, retried: bool) -> list[ev.Download]:
        """A download ended, and is repeated or not."""
        if retried:
            return []
        self._loading.discard(request.fragment)
        return self._catch_up(request.fragment, tries=request.tries + 1 if not request.round else 1)

    def placed(self, fragment: int) -> list[ev.Download]:
        """A fragment is in the inbox, or could not be decoded: from its next step on the trainer has it."""
        if not self._behind(fragment) and self._slots[fragment].held is None:
            self.outdated.discard(fragment)
            return []
        return self._catch_up(fragment, tries=2)

    def _behind(self, fragment: int) -> bool:
        newest, version = self._newest.get(fragment), self._slots[fragment].version
        return newest is not None and (version is None or version < newest)

    def _catch_up(self, fragment: int, *, tries: int) -> list[ev.Download]:
        if fragment in self._loading or not self._behind(fragment):
            return []
        self._loading.add(fragment)
        self.outdated.add(fragment)
        delay = 0.0 if tries == 1 else doubled(RETRY_SECONDS, tries - 2, MAX_RETRY_SECONDS)
        return [ev.Download(fragment=fragment, exact=False, tries=tries, delay_seconds=delay)]
