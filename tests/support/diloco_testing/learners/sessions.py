"""A link's decisions in its sessions, without processes, sockets or clocks."""

from __future__ import annotations

from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import LinkState

P = 2
"""Fragments of the model."""


class Session:
    """A link protocol whose `Place` decisions are answered at once, as `Link` does."""

    def __init__(self, *, constants: bool = False, slots: list[Slot] | None = None) -> None:
        self.now = 0.0
        self.link_state = LinkState()
        self.resets = 0
        self.core = LinkProtocol(
            slots=slots or [Slot(fragment=p) for p in range(P)],
            has_constants=constants,
            next_delay=lambda: 1.0,
            reset_delay=self._reset,
            syncer="s:1",
        )

    def _reset(self) -> None:
        self.resets += 1

    def __call__(self, event: ev.Event, *, after: float = 0.0) -> list[ev.Decision]:
        self.now += after
        out: list[ev.Decision] = []
        todo = self.core.handle(event, self.now)
        while todo:
            decision, *todo = todo
            if isinstance(decision, ev.NotifyTrainer):
                self.link_state = self.core.link_state
                continue
            out.append(decision)
            if isinstance(decision, ev.Place):
                placed = ev.Placed(fragment=decision.staged.fragment)
                todo = [*self.core.handle(placed, self.now), *todo]
        return out


def welcome(**changes: object) -> ev.Welcomed:
    """The syncer accepts a session."""
    fields = {
        "epoch": 1, "incarnation": 4, "step": 10, "steps": 100, "local_step": 7, "total_tokens": 70,
        "heartbeat_seconds": 2.0, "use_checkpoint": False, **changes,
    }  # fmt: skip
    return ev.Welcomed(**fields)


def downloads(decisions: list[ev.Decision]) -> list[ev.Download]:
    """What is to be downloaded."""
    return [d for d in decisions if isinstance(d, ev.Download)]
