"""
What the link does about everything it hears: `handle(event, now) -> decisions`. Pure.

Between two sides: the syncer (a session that may break at any time) and the trainer (which never
waits). Rules:
  1. The trainer learns a fragment only through the inbox (core/inbox.py); nothing is placed while
     it may be read.
  2. A learner whose model is in place never starts over: after a broken session, or a new syncer,
     it trains on with what it has, and the next cycle of fragments brings it up to date (paper E.3,
     "short interruption").
  3. Only a refusal ends the process; everything else is tried again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.messages import LinkState, Phase, TrainerState

DOWNLOAD_TRIES = 3
"""Tries for the result of a round; after that the fragment's next round brings it."""

RETRY_SECONDS = 0.5

GREETING_SECONDS = 20.0
"""How long a syncer may take from our Hello to its Welcome; then a new session is tried."""


class Conversation:
    """
    The link's decisions.

    Args:
        slots: one per fragment; after the death of an earlier link they say what still lies in the
            inbox.
        has_constants: the model has something that is not trained.
        next_delay: seconds until the next try to connect.
        reset_delay: called when one succeeded.
        syncer: how people know the syncer, for messages.
    """

    def __init__(
        self, *, slots: list[Slot], has_constants: bool, next_delay: Callable[[], float],
        reset_delay: Callable[[], None], syncer: str,
    ) -> None:  # fmt: skip
        self._slots = slots
        self._constants = len(slots) if has_constants else None
        self._next_delay, self._reset_delay, self._syncer = next_delay, reset_delay, syncer
        self._trainer: TrainerState | None = None
        self._said = LinkState(text=f"waiting for the syncer at {syncer}")
        self._welcome: ev.Welcomed | None = None
        self._ready = False
        self._joining: set[int] = set()
        self._initial_started = 0
        self._reported = -1
        self._spoke_at = 0.0
        self._connect_at: float | None = None
        """When to open the next session, should there be no Welcome until then."""
        self._over = False

    @property
    def said(self) -> LinkState:
        """What the trainer should know."""
        return self._said

    @property
    def wake_at(self) -> float | None:
        """When a Tick is due at the latest; None: no time matters."""
        if self._over or self._trainer is None:
            return None
        if self._welcome is not None:
            return self._spoke_at + self._welcome.heartbeat_seconds
        return self._connect_at

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """
        Take one fact in and say what follows, in order.

        Args:
            event: what happened.
            now: monotonic seconds.
        """
        handlers: dict[type, Callable[[Any, float], list[ev.Decision]]] = {
            ev.Heard: self._heard, ev.Welcomed: self._welcomed, ev.InitialWanted: self._initial_wanted,
            ev.ModelReady: self._model_ready, ev.Opened: self._opened, ev.Pulled: self._pulled,
            ev.ResultComing: self._result_coming, ev.Completed: self._completed, ev.Lost: self._lost,
            ev.InitialSent: self._initial_sent, ev.Downloaded: self._downloaded, ev.Placed: self._placed,
            ev.Tick: self._tick,
        }  # fmt: skip
        before = self._said
        decisions = handlers[type(event)](event, now)
        if any(isinstance(d, ev.SendReport | ev.SendHeartbeat) for d in decisions):
            self._spoke_at = now
        if any(isinstance(d, ev.Connect) for d in decisions):
            self._connect_at = now + GREETING_SECONDS
        if self._said != before:
            decisions.append(ev.Tell())
        return decisions

    def _say(self, **changes: Any) -> None:
        self._said = dataclasses.replace(self._said, **changes)

    # ------------------------------------------------------------ the trainer

    def _heard(self, event: ev.Heard, now: float) -> list[ev.Decision]:
        state, first = event.state, self._trainer is None
        self._trainer = state
        if state.leaving:
            self._over = True
            return [ev.Leave(reason=state.leaving)]
        if self._over:
            return []
        out: list[ev.Decision] = []
        if first:
            self._said = dataclasses.replace(
                self._said, incarnation=state.incarnation, epoch=state.epoch, step=state.global_step,
                initialise=state.initial,
            )  # fmt: skip
            self._initial_started = state.initial
            out.append(ev.Connect(state=state))
        if state.in_place and self._said.phase in (Phase.PLACED, Phase.LOAD):
            self._say(phase=Phase.TRAINING, text="")
        if self._said.phase is Phase.LOAD and state.checkpoint_step == 0 and not state.in_place:
            out += self._join()  # its checkpoint turned out to be unusable
        out += self._confirm(state)
        if state.initial == self._said.initialise > self._initial_started:
            self._initial_started = state.initial
            out.append(ev.UploadInitial(request=state.initial))
        return [*out, *self._report()]

    def _confirm(self, state: TrainerState) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        for slot, applied in zip(self._slots, state.applied, strict=False):
            staged = slot.confirmed(applied)
            if staged is not None:
                out.append(ev.Place(staged=staged, generation=slot.published + 1))
        self._show_ready()
        return out

    def _show_ready(self) -> None:
        # While the model is still being put together nothing may be applied in parts.
        shown = self._said.phase is Phase.PLACED or (
            self._trainer is not None and self._trainer.in_place
        )
        ready = [(s.fragment, s.published) for s in self._slots if not s.free] if shown else []
        if [tuple(r) for r in self._said.ready] != ready:
            self._say(ready=ready)

    def _report(self) -> list[ev.Decision]:
        state = self._trainer
        if state is None or not self._ready or not (state.in_place and state.stepped):
            return []
        if state.local_step <= self._reported:
            return []
        self._reported = state.local_step
        return [ev.SendReport(state=state)]

    # ------------------------------------------------------------ the session

    def _welcomed(self, event: ev.Welcomed, now: float) -> list[ev.Decision]:
        self._welcome, self._ready, self._spoke_at, self._reported = event, False, now, -1
        self._reset_delay()
        self._say(
            connected=True, epoch=event.epoch, incarnation=event.incarnation, step=event.step, steps=event.steps,
            local_step=event.local_step, total_tokens=event.total_tokens,
        )  # fmt: skip
        if self._said.phase is Phase.CONNECTING:
            self._say(
                phase=Phase.WAITING, text="waiting for another learner to upload the initial model"
            )
        return []

    def _initial_wanted(self, event: ev.InitialWanted, now: float) -> list[ev.Decision]:
        self._say(initialise=self._said.initialise + 1, text="uploading the initial model")
        return []

    def _initial_sent(self, event: ev.InitialSent, now: float) -> list[ev.Decision]:
        if not event.error or event.request != self._said.initialise or self._welcome is None:
            return []
        self._say(text=f"uploading the initial model again: {event.error}")
        return [ev.UploadInitial(request=event.request, delay_seconds=2 * RETRY_SECONDS)]

    def _model_ready(self, event: ev.ModelReady, now: float) -> list[ev.Decision]:
        self._ready = True
        if self._trainer is None or self._welcome is None:
            return []
        if self._trainer.in_place:
            self._say(phase=Phase.TRAINING, text="")
            return self._report()
        if self._said.phase in (Phase.PLACED, Phase.LOAD):
            return []  # the trainer was told already and may be reading: it will say in_place
        if self._welcome.use_checkpoint and self._trainer.checkpoint_step > 0:
            self._say(phase=Phase.LOAD, text="loading the local checkpoint")
            return []
        return self._join()

    def _join(self) -> list[ev.Decision]:
        self._joining = {slot.fragment for slot in self._slots}
        if self._constants is not None:
            self._joining.add(self._constants)
        self._say(phase=Phase.DOWNLOADING, text="downloading the model")
        return [ev.Download(fragment=index) for index in sorted(self._joining)]

    def _opened(self, event: ev.Opened, now: float) -> list[ev.Decision]:
        self._say(step=event.step, steps=event.steps, open=event.fragments)
        return []

    def _pulled(self, event: ev.Pulled, now: float) -> list[ev.Decision]:
        return [ev.Upload(pull=event)]

    def _result_coming(self, event: ev.ResultComing, now: float) -> list[ev.Decision]:
        return [ev.Download(fragment=event.fragment, round=event.round, attempt=event.attempt)]

    def _completed(self, event: ev.Completed, now: float) -> list[ev.Decision]:
        self._say(step=event.step, complete=True, text="the job is complete")
        return []

    def _lost(self, event: ev.Lost, now: float) -> list[ev.Decision]:
        self._welcome, self._ready = None, False
        if event.refused_exit:
            self._over = True
            self._say(connected=False, refused_exit=event.refused_exit, text=event.text)
            return [ev.CancelTransfers()]
        self._connect_at = now + max(event.pause_seconds, self._next_delay())
        self._say(connected=False, text=f"waiting for the syncer at {self._syncer}: {event.text}")
        if self._said.phase in (Phase.WAITING, Phase.DOWNLOADING):
            self._joining.clear()
            self._say(phase=Phase.CONNECTING)
        return [ev.CancelTransfers()]

    def _tick(self, event: ev.Tick, now: float) -> list[ev.Decision]:
        if self._over or self._trainer is None:
            return []
        if self._welcome is not None:
            late = now - self._spoke_at >= self._welcome.heartbeat_seconds
            return [ev.SendHeartbeat()] if late else []
        if self._connect_at is not None and now >= self._connect_at:
            return [ev.Connect(state=self._trainer)]
        return []

    # ------------------------------------------------------------ downloads

    def _downloaded(self, event: ev.Downloaded, now: float) -> list[ev.Decision]:
        wish, staged = event.wish, event.staged
        if wish.round == 0:
            return self._piece(wish, staged, event.error)
        if staged is None:
            if not event.error or wish.tries >= DOWNLOAD_TRIES or self._welcome is None:
                return []
            again = dataclasses.replace(wish, tries=wish.tries + 1, delay_seconds=RETRY_SECONDS)
            return [again]
        place, drop = self._slots[staged.fragment].arrived(staged)
        out: list[ev.Decision] = []
        if drop is not None:
            out.append(ev.Drop(staged=drop))
        if place is not None:
            # During a join the whole model is placed first; what comes meanwhile waits its turn.
            out.append(self._place(place))
        return out

    def _piece(self, wish: ev.Download, staged: Staged | None, error: str) -> list[ev.Decision]:
        """A part of the model that a fresh process downloads."""
        if wish.fragment not in self._joining:
            return [ev.Drop(staged=staged)] if staged is not None else []
        if staged is None:
            self._say(text=f"downloading the model again: {error}")
            return [dataclasses.replace(wish, tries=wish.tries + 1, delay_seconds=RETRY_SECONDS)]
        if wish.fragment == self._constants:
            return [ev.Drop(staged=staged), *self._joined(wish.fragment)]
        slot = self._slots[wish.fragment]
        if slot.version is not None and staged.version < slot.version:
            # A result of a later round is here already; the current version is at least that by
            # now.
            return [ev.Drop(staged=staged), ev.Download(fragment=wish.fragment)]
        slot.version = staged.version
        return [self._place(staged)]

    def _place(self, staged: Staged) -> ev.Place:
        return ev.Place(staged=staged, generation=self._slots[staged.fragment].published + 1)

    def _placed(self, event: ev.Placed, now: float) -> list[ev.Decision]:
        slot = self._slots[event.fragment]
        if event.error:
            slot.version = None
            if event.fragment in self._joining:
                return [ev.Download(fragment=event.fragment, delay_seconds=RETRY_SECONDS)]
            return []
        slot.placed()
        if event.fragment in self._joining:
            return self._joined(event.fragment)
        self._show_ready()
        return []

    def _joined(self, fragment: int) -> list[ev.Decision]:
        self._joining.discard(fragment)
        if not self._joining:
            self._say(phase=Phase.PLACED, text="the model is here")
            self._show_ready()
        return []
