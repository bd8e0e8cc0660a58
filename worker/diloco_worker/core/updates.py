"""
Which committed fragments this learner lacks, and what is under way to get them. Pure.

Normally a result is downloaded while the round runs, and has arrived when the commit is announced. If it has
not, the fragment is outdated: it is not offered before the trainer has applied the version that was announced, so
that its counters start from zero and its delta does not contain the missed update with the opposite sign. Unless
its result is still being downloaded, it is downloaded as it is now.

Versions are compared within one history of the syncer. A copy of its volume that is restored begins
another one, which uses the numbers of epochs again: what the learner has of the lost history is forgotten.
Of a local checkpoint that states its start, no parameters are used unless this history continues that start. One of an
earlier release states none: it is recognised by larger version numbers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from diloco.runtime.backoff import doubled
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged, Version, version_of

RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 10.0

MAX_STARTS = 8
"""Starts of the syncer that are remembered."""


class Updates:
    """
    Catches up with the syncer, per fragment.

    Args:
        slots: one per fragment.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._newest: dict[int, Version] = {}
        self._loading: dict[int, int] = {}
        """
        Fragments of which a download runs, waits for that of an older round, or is about to be repeated; and the
        round of the newest, 0: the current version.
        """
        self._failed: Counter[int] = Counter()
        """How often a fragment could not be decoded since it last was."""
        self._epoch = 0
        """Of the newest session in which the syncer stated its versions."""
        self.starts: tuple[str, ...] = ()
        """
        Of the syncer, its start then being the last, and each begun from a snapshot of the one before it. Empty:
        not known. The only one is "": of an earlier release, which states none.
        """
        self.outdated: set[int] = set()
        """Fragments that must not be offered."""

    def session_lost(self) -> None:
        """All downloads were cancelled."""
        self._loading.clear()

    def began(self, versions: tuple[Version, ...], session: ev.Welcomed) -> list[Staged]:
        """
        A session began: the syncer has these versions now, one per fragment.

        They may be older than those that its predecessor announced: a crash undoes what was committed
        after the last snapshot, and waiting for a version that no longer exists would never end.

        Epochs grow with each start, so a version of this epoch or a later one that came from another start
        is of a history that was lost. An older version may be, unless this start follows one that the learner
        knows: nothing may be based on it, but it is older than what this start commits.

        A start follows one that is known if it began from a snapshot of that. The known ones after that are
        abandoned: this start has none of their versions. If they return, they are not followed.

        Returns:
            What to discard.
        """
        self._newest = dict(enumerate(versions[: len(self._slots)]))
        self._epoch = session.epoch
        another = session.start_id != "" and self.starts[-1:] != (session.start_id,)
        follows = session.snapshot_start_id in self.starts
        if another:
            self._begin_start(session)
        elif session.start_id == "":
            self.starts = ("",)
        unknown = another and not follows
        discarded = []
        for slot in self._slots:
            version = slot.version
            lost = version is not None and (
                version[0] >= session.epoch if another else self._lost(slot.fragment, version)
            )
            if lost or (unknown and slot.held is not None):
                discarded.append(slot.forget())
            elif unknown:
                slot.inbox, slot.of_history = None, False
        self._settle()
        return [staged for staged in discarded if staged is not None]

    def restart(self) -> list[Staged]:
        """The whole model is to be downloaded, whatever was received before; returns what to discard."""
        held = [slot.forget() for slot in self._slots]
        return [staged for staged in held if staged is not None]

    def follows(self, start_id: str) -> bool:
        """Whether the syncer's history continues that of this start; "": of an earlier release, taken for it."""
        return "" in (start_id, *self.starts) or start_id in self.starts

    def loaded(self, versions: Sequence[Sequence[int] | None], start_id: str) -> None:
        """
        The trainer holds a model that did not all come from the inboxes, such as a checkpoint.

        Args:
            versions: of its fragments; those that are missing or None are older than any.
            start_id: the last start of the syncer that they are of; "": not stated.
        """
        if not self.follows(start_id):
            versions = ()  # another start was met while it loaded them
        for slot, pair in zip(self._slots, versions, strict=False):
            version = version_of(pair)
            if slot.version is None and not (version and self._lost(slot.fragment, version)):
                slot.version = version
            slot.of_history = slot.of_history or start_id in self.starts
        self._settle()

    def note(self, fragment: int, version: Version) -> None:
        """The syncer has this version of a fragment now."""
        if fragment < len(self._slots):
            self._newest[fragment] = max(version, self._newest.get(fragment, version))

    def catch_up(self) -> list[ev.Download]:
        """Download every fragment that is outdated and not on its way."""
        return [d for fragment in self._newest for d in self._catch_up(fragment, tries=1)]

    def result_announced(self, fragment: int, round_: int) -> None:
        """The result of a round is being downloaded, once a download of this fragment that runs has ended."""
        self._loading[fragment] = round_

    def superseded(self, request: ev.Download) -> bool:
        """Whether the result of a later round is on its way, so that this download need not be repeated."""
        return self._loading.get(request.fragment, request.round) != request.round

    def ended(self, request: ev.Download, *, retried: bool) -> list[ev.Download]:
        """A download ended, and is repeated or not."""
        if retried or self.superseded(request):
            return []
        self._loading.pop(request.fragment, None)
        return self._catch_up(request.fragment, tries=request.tries + 1 if not request.round else 1)

    def placed(self, fragment: int) -> list[ev.Download]:
        """A fragment is in the inbox: from its next step on the trainer has it."""
        if not self._behind(fragment) and self._slots[fragment].held is None:
            self.outdated.discard(fragment)
            return []
        return self._catch_up(fragment, tries=2)

    def decoded(self, fragment: int) -> None:
        """A fragment could be decoded: its failures are over."""
        del self._failed[fragment]

    def failed(self, fragment: int) -> float:
        """A fragment could not be decoded; returns after how many seconds it may be downloaded again."""
        self._failed[fragment] += 1
        return _delay(1 + self._failed[fragment])

    def repeat(self, fragment: int) -> list[ev.Download]:
        """Download a fragment that could not be decoded again, if it is needed."""
        return self._catch_up(fragment, tries=1 + self._failed[fragment])

    def _begin_start(self, session: ev.Welcomed) -> None:
        """What is received from now on is of this start, or of the snapshot that it began from."""
        origin = session.snapshot_start_id
        known = self.starts[: self.starts.index(origin)] if origin in self.starts else ()
        # Starts of earlier releases all state "", so only the first after them follows them.
        origins = (origin,) if origin else ()
        self.starts = (*known, *origins, session.start_id)[-MAX_STARTS:]

    def _settle(self) -> None:
        """A fragment that is neither behind nor waits for the trainer may be offered again."""
        self.outdated = {
            p for p in self.outdated if self._behind(p) or self._slots[p].held is not None
        }

    def _lost(self, fragment: int, version: Version) -> bool:
        """Whether it is newer than what the syncer has, and not because a crash has undone commits."""
        return version[0] >= self._epoch and version > self._newest.get(fragment, version)

    def _behind(self, fragment: int) -> bool:
        newest, version = self._newest.get(fragment), self._slots[fragment].version
        return newest is not None and (version is None or version < newest)

    def _catch_up(self, fragment: int, *, tries: int) -> list[ev.Download]:
        if not self._behind(fragment):
            return []
        self.outdated.add(fragment)
        if fragment in self._loading:
            return []
        self._loading[fragment] = 0
        return [
            ev.Download(fragment=fragment, exact=False, tries=tries, delay_seconds=_delay(tries))
        ]


def _delay(tries: int) -> float:
    return 0.0 if tries == 1 else doubled(RETRY_SECONDS, tries - 2, MAX_RETRY_SECONDS)
