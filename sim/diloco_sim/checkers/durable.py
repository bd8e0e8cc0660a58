"""A restart has exactly the state of the newest durable snapshot, or of a newer one that was being written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Captured, Flipped, Resumed
from diloco_syncer.storage.parameters import FragmentParameters


class Durable:
    """
    Compares what a start finds with what snapshots were taken of.

    After a bit has flipped at rest an older snapshot may be used; never one with the flipped bit, and
    never none.
    """

    observes = (dict, Captured, Resumed, Flipped)

    def __init__(self) -> None:
        self._captured: list[tuple[int, int, bytes]] = []
        """Epoch, step, and a digest of Θ and momentum, oldest first."""
        self._durable = -1
        """Index of the newest that is known to be durable."""
        self._damaged = False

    def observe(self, event: dict[str, Any] | Captured | Resumed | Flipped, now: float) -> None:
        """See `Checker`."""
        match event:
            case Flipped():
                self._damaged = True
            case Captured(epoch=epoch, step=step, fragments=fragments):
                self._captured.append((epoch, step, _digest(fragments)))
            case Resumed():
                self._resumed(event, now)
            case {"event": "snapshot", "ok": True, "step": step, "epoch": epoch}:
                for index in range(len(self._captured) - 1, self._durable, -1):
                    if self._captured[index][:2] == (epoch, step):
                        self._durable = index
                        break

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _resumed(self, event: Resumed, now: float) -> None:
        if event.parameters is None:
            if self._durable >= 0:
                self._fail("the restart begins anew, there is a durable snapshot", event, now)
            return
        state = _digest(event.parameters.all())
        found = [
            index
            for index, (_, step, captured) in enumerate(self._captured)
            if step == event.step and captured == state
        ]
        if not found:
            self._fail("the restart has a state that no snapshot was taken of", event, now)
        newest = self._captured[self._durable][1] if self._durable >= 0 else 0
        if found[-1] < self._durable and not self._damaged:
            self._fail(
                f"the restart is of step {event.step}, the newest durable snapshot is of {newest}",
                event,
                now,
            )
        self._durable = found[-1]

    def _fail(self, sentence: str, event: Resumed, now: float) -> None:
        raise Violation("durable", sentence, step=event.step, now=now)


def _digest(fragments: Iterable[FragmentParameters]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for fragment in fragments:
        found.update(fragment.theta_N.data)
        found.update(fragment.momentum_N.data)
    return found.digest()
