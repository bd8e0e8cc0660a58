"""
A restart has exactly the state of the newest durable snapshot, or of a newer one that was being written:
parameters, and what the engine keeps of the learners. What the journal adds to it must have happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Captured, Copied, Flipped, Restored, Resumed
from diloco_syncer.storage.parameters import FragmentParameters

REMEMBERED = 64
"""Snapshots before the newest durable one; the disk keeps three and the last one that was verified."""


@dataclass(frozen=True, slots=True)
class _State:
    epoch: int
    step: int
    parameters: bytes
    """A digest."""
    engine: Mapping[str, Any]


class Durable:
    """
    Compares what a start finds with what snapshots were taken of.

    After a copy of the files was restored, it is the state of the copy's newest snapshot that counts.
    After a bit has flipped at rest an older snapshot may be used; never one with the flipped bit, and
    never none.
    """

    observes = (dict, Captured, Resumed, Flipped, Copied, Restored)

    def __init__(self) -> None:
        self._captured: list[_State] = []
        """Oldest first."""
        self._merged: dict[tuple[str, int], set[int]] = {}
        """Learner and incarnation → t_m of its reports in merges."""
        self._durable = -1
        """Index of the newest that is known to be durable."""
        self._damaged = False
        self._copies: dict[Hashable, int] = {}
        """Copy of the files that may still be restored → what `_durable` was then."""

    def observe(
        self, event: dict[str, Any] | Captured | Resumed | Flipped | Copied | Restored, now: float
    ) -> None:
        """See `Checker`."""
        match event:
            case Flipped():
                self._damaged = True
            case Copied(copy):
                self._copies[copy] = self._durable
            case Restored(copy):
                self._durable = self._copies.pop(copy)
            case Captured():
                state = _State(event.epoch, event.step, _digest(event.fragments), event.engine)
                self._captured.append(state)
                self._forget()
            case Resumed():
                self._resumed(event, now)
            case {"event": "snapshot", "ok": True, "step": step, "epoch": epoch}:
                for index in range(len(self._captured) - 1, self._durable, -1):
                    state = self._captured[index]
                    if (state.epoch, state.step) == (epoch, step):
                        self._durable = index
                        break
            case {"event": "merge", "members": members}:
                for m in members:
                    merged = self._merged.setdefault((m["learner"], m["incarnation"]), set())
                    merged.add(m["step"])

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _forget(self) -> None:
        """What restarts no longer find: a world has thousands of snapshots, its disk a few."""
        old = self._durable - REMEMBERED
        if old > 0 and not self._copies:
            del self._captured[:old]
            self._durable -= old

    def _resumed(self, event: Resumed, now: float) -> None:
        if event.parameters is None:
            if self._durable >= 0:
                self._fail("the restart starts over, there is a durable snapshot", event, now)
            return
        state = _digest(event.parameters.all())
        found = [
            index
            for index, captured in enumerate(self._captured)
            if captured.step == event.step and captured.parameters == state
        ]
        if not found:
            self._fail("the restart has a state that no snapshot was taken of", event, now)
        newest = self._captured[self._durable].step if self._durable >= 0 else 0
        if found[-1] < self._durable and not self._damaged:
            self._fail(
                f"the restart is of step {event.step}, the newest durable snapshot is of {newest}",
                event,
                now,
            )
        self._durable = found[-1]
        differing = [self._difference(self._captured[i].engine, event.engine) for i in found]
        if all(differing):
            self._fail(f"the restart has {differing[-1]}", event, now)

    def _difference(self, saved: Mapping[str, Any], resumed: Mapping[str, Any]) -> str:
        """What the engine has of itself that the snapshot did not have and the journal cannot add."""
        for key in ("step", "merges"):
            if saved[key] != resumed[key]:
                return f"{key} {resumed[key]}, its snapshot {saved[key]}"
        if saved["halted"] and not resumed["halted"]:
            return f"no halt, and its snapshot has one: {saved['halted']}"
        if saved["blocks"] != resumed["blocks"]:
            return f"other blocks of data than its snapshot: {resumed['blocks']}, {saved['blocks']} there"
        for name, was in saved["members"].items():
            now = resumed["members"].get(name)
            if now is None:
                return f"no record of {name}, which its snapshot has"
            found = self._changed(name, was, now)
            if found:
                return f"other facts of {name} than its snapshot: {found}"
        return ""

    def _changed(self, name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        for key in _KEPT:
            if was[key] != now[key]:
                return f"{key} {now[key]} instead of {was[key]}"
        for key in _RAISED:
            if was[key] > now[key]:
                return f"{key} {now[key]} after {was[key]}"
        if was["incarnation"] != now["incarnation"]:
            return ""  # of a new process no report was merged
        floor, kept = now["reports"]["floor"], set(now["reports"]["merged"])
        forgotten = [t for t in was["reports"]["merged"] if t > floor and t not in kept]
        if forgotten or floor < was["reports"]["floor"]:
            return f"the report of local step {(forgotten or [floor + 1])[0]} counts as not merged"
        merged = self._merged.get((name, now["incarnation"]), set())
        invented = kept - merged - set(was["reports"]["merged"])
        return f"the report of local step {min(invented)} counts as merged" if invented else ""

    def _fail(self, sentence: str, event: Resumed, now: float) -> None:
        raise Violation("durable", sentence, step=event.step, now=now)


_KEPT = ("region", "tokens", "mergedRound", "merges", "restarts", "beganAt")
"""Facts of a learner that only a snapshot keeps."""

_RAISED = ("localStep", "incarnation")
"""Facts that the journal after the snapshot may raise."""


def _digest(fragments: Iterable[FragmentParameters]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for fragment in fragments:
        found.update(repr(tuple(fragment.version)).encode())
        found.update(fragment.theta_N.data)
        found.update(fragment.momentum_N.data)
    return found.digest()
