"""
The link's decisions about every event: `handle(event, now) -> decisions`. Pure.

The link stands between the syncer (a session that can break at any time) and the trainer (which
never waits). Rules:
  1. The trainer gets a fragment only through the inbox (core/inbox.py); nothing is placed while the
     trainer may read it.
  2. A learner with a loaded model never starts over: after a broken session, or with a new syncer,
     it continues to train and receives the fragments that it missed (core/updates.py; paper E.3,
     "short interruption").
  3. Only a refusal ends the process; everything else is retried.
  4. What the syncer states about fragments that the model does not have is ignored: it must not
     reach the trainer, which would end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.core.peer_recovery import PeerRecovery
from diloco_worker.core.updates import Updates

DOWNLOAD_TRIES = 3
"""Tries for the result of a round; after that the fragment is downloaded as it is then."""

RETRY_SECONDS = 0.5

WELCOME_TIMEOUT_SECONDS = 20.0
"""Time from Hello to Welcome, before a new session is opened."""

STEADY_SECONDS = 1.0
"""A session of at least this length is a success; if it ends earlier, the delay before the next one grows."""

LATE_SECONDS = 30.0
"""A fragment that cannot be offered for this long is reported."""

LATE_NAMES = 8
"""At most so many of them are named."""

_SENDING = (ev.SendReport, ev.SendBlocks, ev.SendRecovery, ev.SendHeartbeat)


class LinkProtocol:
    """
    State machine of the link.

    Args:
        slots: one per fragment; after a previous link has exited they describe what is in the
            inboxes.
        has_constants: whether the model has tensors that are not trained.
        next_delay: returns the seconds until the next attempt to connect.
        reset_delay: called when a session that has lasted ends.
        syncer: address of the syncer, for messages.
        recovery: asks peers for the state of their optimizers; None: none is asked.
    """

    def __init__(
        self, *, slots: list[Slot], has_constants: bool, next_delay: Callable[[], float],
        reset_delay: Callable[[], None], syncer: str, recovery: PeerRecovery | None = None,
    ) -> None:  # fmt: skip
        self._slots = slots
        self._updates = Updates(slots)
        self._announced: tuple[int, ...] = ()
        """Fragments that may be pulled next."""
        self._constants = len(slots) if has_constants else None
        self._next_delay, self._reset_delay, self._syncer = next_delay, reset_delay, syncer
        self._recovery = recovery
        self._trainer: TrainerState | None = None
        self._state = LinkState(
            text=f"waiting for the syncer at {syncer}", versions=[slot.inbox for slot in slots]
        )
        self._welcome: ev.Welcomed | None = None
        self._welcomed_at: float
        self._ready = False
        self._missing: set[int] = set()
        """Parts of the initial model that are not placed yet."""
        self._initial_uploaded = 0
        """The last request for Θ^(0) that an upload was started for."""
        self._reported_step = -1
        self._blocks_sent: dict[str, Any] = {}
        self._recovery_sent: dict[str, Any] = {}
        """What was stated in this session."""
        self._outdated_since: dict[int, float] = {}
        """Fragments that must not be offered, and since when."""
        self.late = ""
        """Some of them for long, in one sentence; empty: none."""
        self._last_sent_at: float
        self._connect_at: float | None = None
        """When to open the next session if there is no Welcome until then."""
        self._ended = False
        self._handlers: dict[type, Callable[[Any, float], list[ev.Decision]]] = {
            ev.TrainerUpdate: self._trainer_update, ev.Welcomed: self._welcomed,
            ev.InitialRequested: self._initial_requested, ev.ModelReady: self._model_ready,
            ev.Committed: self._committed,
            ev.Opened: self._opened, ev.Pulled: self._pulled, ev.ResultAnnounced: self._result_announced,
            ev.Leased: self._leased, ev.Completed: self._completed, ev.SessionLost: self._session_lost,
            ev.InitialUploaded: self._initial_upload_ended, ev.Downloaded: self._downloaded,
            ev.Placed: self._placed, ev.Tick: self._tick,
            ev.PeerAnswered: self._peer_answered, ev.PeerAsks: self._peer_asks,
        }  # fmt: skip

    @property
    def link_state(self) -> LinkState:
        """What the trainer should know."""
        return self._state

    @property
    def wake_at(self) -> float | None:
        """When a Tick is due at the latest; None: no deadline."""
        if self._ended or self._trainer is None:
            return None
        if self._welcome is not None:
            return self._last_sent_at + self._welcome.heartbeat_seconds
        return self._connect_at

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """
        Process one event.

        Args:
            event: what happened.
            now: monotonic seconds.

        Returns:
            What to do, in order.
        """
        previous = self._state
        decisions = self._handlers[type(event)](event, now) + self._proceed_recovery(now)
        self._publish_open()
        self._publish_late(now)
        self._publish_starts()
        for decision in decisions:
            if isinstance(decision, _SENDING):
                self._last_sent_at = now
            elif isinstance(decision, ev.Connect):
                self._connect_at = now + WELCOME_TIMEOUT_SECONDS
        if self._state is not previous and self._state != previous:
            decisions.append(ev.NotifyTrainer())
        return decisions

    def _update(self, **changes: Any) -> None:
        self._state = dataclasses.replace(self._state, **changes)

    # ------------------------------------------------------------ the trainer

    def _trainer_update(self, event: ev.TrainerUpdate, now: float) -> list[ev.Decision]:
        state, first = event.state, self._trainer is None
        self._trainer = state
        if state.leaving:
            # The last step counts for the position in the data, also if its own state did not come.
            last = [] if self._ended else [*self._statements(), *self._report()]
            self._ended = True
            return [*last, ev.Leave(reason=state.leaving)]
        if self._ended:
            return []
        out: list[ev.Decision] = []
        if first:
            self._update(
                incarnation=state.incarnation, epoch=state.epoch, step=state.global_step,
                initial_requested=state.initial_copied,
            )  # fmt: skip
            self._initial_uploaded = state.initial_copied
            self._updates.starts = tuple(state.starts)
            out.append(ev.Connect(state=state))
        phase = self._state.phase
        loaded = state.model_loaded and phase in (Phase.APPLY_MODEL, Phase.LOAD_CHECKPOINT)
        if first and state.model_loaded:
            self._updates.loaded(state.versions, state.starts[-1] if state.starts else "")
        if loaded:
            # What was downloaded has its versions already, unless they were forgotten since.
            versions = state.versions if phase is Phase.LOAD_CHECKPOINT else ()
            self._updates.loaded(versions, state.checkpoint_start)
            self._update(phase=Phase.TRAINING, text="")
            if self._ready:
                # What was committed since the checkpoint, or during the download.
                out += self._updates.catch_up()
        elif phase is Phase.LOAD_CHECKPOINT and state.checkpoint_step == 0:
            out += self._download_model(now)  # the checkpoint turned out to be unusable
        out += self._confirm(state)
        if state.initial_copied == self._state.initial_requested > self._initial_uploaded:
            self._initial_uploaded = state.initial_copied
            out.append(ev.UploadInitial(request=state.initial_copied))
        return [*out, *self._statements(), *self._report()]

    def _statements(self) -> list[ev.Decision]:
        """What the syncer does not know yet in this session, besides reports."""
        state, out = self._trainer, list[ev.Decision]()
        if state is None or not self._ready:
            return out
        if state.recovery != self._recovery_sent:
            self._recovery_sent = state.recovery
            out.append(ev.SendRecovery(recovery=state.recovery))
        if state.blocks != self._blocks_sent:
            self._blocks_sent = state.blocks
            out.append(ev.SendBlocks(blocks=state.blocks))
        return out

    def _leased(self, event: ev.Leased, now: float) -> list[ev.Decision]:
        self._update(leases=event.serials)
        return []

    def _confirm(self, state: TrainerState) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        for slot, applied in zip(self._slots, state.applied, strict=False):
            staged = slot.confirmed(applied)
            if staged is not None:
                out.append(self._place(staged))
        self._publish_ready()
        return out

    def _publish_ready(self) -> None:
        # Until the whole model has arrived, the trainer must not apply any part of it.
        complete = self._state.phase is Phase.APPLY_MODEL or (
            self._trainer is not None and self._trainer.model_loaded
        )
        ready = [(s.fragment, s.published) for s in self._slots if not s.free] if complete else []
        versions = [slot.inbox for slot in self._slots]
        if [*self._state.ready] != ready or self._state.versions != versions:
            self._update(ready=ready, versions=versions)

    def _publish_starts(self) -> None:
        # For checkpoints, and for the next link, which finds in the shared memory also what this one must not use as a
        # base. What is about to be placed does not count: the trainer may read this before, or this process end.
        known = all(slot.of_history for slot in self._slots)
        starts = self._updates.starts if known else ()
        if self._state.starts != starts:
            self._update(starts=starts)

    def _report(self) -> list[ev.Decision]:
        state = self._trainer
        if state is None or not self._ready or not (state.model_loaded and state.stepped):
            return []
        if state.local_step <= self._reported_step:
            return []
        self._reported_step = state.local_step
        # The trainer may have offered a fragment before it received that this one must not be.
        offers = [
            p for p in state.offers if p not in self._updates.outdated and self._slots[p].free
        ]
        if len(offers) < len(state.offers):
            state = dataclasses.replace(state, offers=offers)
        return [ev.SendReport(state=state)]

    # ------------------------------------------------------------ the session

    def _welcomed(self, event: ev.Welcomed, now: float) -> list[ev.Decision]:
        self._welcome, self._ready = event, False
        self._welcomed_at = self._last_sent_at = now
        self._reported_step, self._blocks_sent, self._recovery_sent = -1, {}, {}
        self._update(
            connected=True, epoch=event.epoch, incarnation=event.incarnation, step=event.step, steps=event.steps,
            local_step=event.local_step, total_tokens=event.total_tokens, run=event.run,
            leases_blocks=event.leases_blocks,
        )  # fmt: skip
        if self._recovery is not None:
            self._recovery.offered(event.peers)
        if self._state.phase is Phase.CONNECTING:
            self._update(
                phase=Phase.WAITING, text="waiting for another learner to upload the initial model"
            )
        return []

    def _initial_requested(self, event: ev.InitialRequested, now: float) -> list[ev.Decision]:
        self._update(
            initial_requested=self._state.initial_requested + 1, text="uploading the initial model"
        )
        return []

    def _initial_upload_ended(self, event: ev.InitialUploaded, now: float) -> list[ev.Decision]:
        outdated = event.request != self._state.initial_requested or self._welcome is None
        # Once Θ exists, an upload that was held up for long is of no use, and its copies are newer ones.
        if not event.error or outdated or self._ready:
            return []
        if event.refused_exit:
            self._ended = True
            self._update(refused_exit=event.refused_exit, text=event.error)
            return [ev.CancelTransfers()]
        self._update(text=f"uploading the initial model again: {event.error}")
        return [ev.UploadInitial(request=event.request, delay_seconds=2 * RETRY_SECONDS)]

    def _model_ready(self, event: ev.ModelReady, now: float) -> list[ev.Decision]:
        self._ready = True
        if self._trainer is None or self._welcome is None:
            return []
        out = _discard(self._updates.began(event.versions, self._welcome))
        self._publish_ready()
        if self._trainer.model_loaded:
            self._update(phase=Phase.TRAINING, text="")
            return [*out, *self._updates.catch_up(), *self._statements(), *self._report()]
        if self._state.phase in (Phase.APPLY_MODEL, Phase.LOAD_CHECKPOINT):
            # The trainer may be reading the model already; its next state confirms it.
            return out
        recent = self._welcome.use_checkpoint and self._trainer.checkpoint_step > 0
        if recent and self._updates.follows(self._trainer.checkpoint_start):
            self._update(phase=Phase.LOAD_CHECKPOINT, text="loading the local checkpoint")
            return out
        return [*out, *self._download_model(now)]

    def _committed(self, event: ev.Committed, now: float) -> list[ev.Decision]:
        self._updates.note(event.fragment, event.version)
        # A fresh process first downloads everything as it is.
        loaded = self._trainer is not None and self._trainer.model_loaded
        return [*self._updates.catch_up()] if loaded else []

    def _publish_open(self) -> None:
        outdated = self._updates.outdated
        fragments = (
            tuple(p for p in self._announced if p not in outdated) if outdated else self._announced
        )
        if tuple(self._state.open) != fragments:
            self._update(open=fragments)

    def _publish_late(self, now: float) -> None:
        outdated = self._updates.outdated
        if not (outdated or self._outdated_since or self.late):
            return
        self._outdated_since = {p: self._outdated_since.get(p, now) for p in sorted(outdated)}
        if not self._ready or self._state.phase is not Phase.TRAINING or self._state.complete:
            return  # the text states something else
        late = [str(p) for p, since in self._outdated_since.items() if now - since >= LATE_SECONDS]
        more = f" and {len(late) - LATE_NAMES} more" if len(late) > LATE_NAMES else ""
        names = ", ".join(late[:LATE_NAMES]) + more
        self.late = f"not offered before it arrives: fragment {names}" if late else ""
        self._update(text=self.late)

    def _download_model(self, now: float) -> list[ev.Decision]:
        # Of an earlier session there may be parts that the syncer has undone since.
        discarded = _discard(self._updates.restart())
        self._missing = {slot.fragment for slot in self._slots}
        if self._constants is not None:
            self._missing.add(self._constants)
        self._update(phase=Phase.DOWNLOADING, text="downloading the model")
        downloads = [ev.Download(fragment=index) for index in sorted(self._missing)]
        return [*discarded, *downloads, *self._begin_recovery(now)]

    def _opened(self, event: ev.Opened, now: float) -> list[ev.Decision]:
        self._announced = tuple(p for p in event.fragments if self._exists(p))
        self._update(step=event.step, steps=event.steps)
        return []

    def _pulled(self, event: ev.Pulled, now: float) -> list[ev.Decision]:
        if not self._exists(event.fragment):
            return []
        if self._slots[event.fragment].inbox is None:
            # The same version of the syncer may have other values: the fragment goes whole.
            event = dataclasses.replace(event, versions=())
        return [ev.Upload(pull=event)]

    def _exists(self, fragment: int) -> bool:
        return fragment < len(self._slots)

    def _result_announced(self, event: ev.ResultAnnounced, now: float) -> list[ev.Decision]:
        if not self._exists(event.fragment):
            return []
        self._updates.result_announced(event.fragment, event.round)
        return [ev.Download(fragment=event.fragment, round=event.round, attempt=event.attempt)]

    def _completed(self, event: ev.Completed, now: float) -> list[ev.Decision]:
        self._update(step=event.step, complete=True, text="the job is complete")
        return []

    def _session_lost(self, event: ev.SessionLost, now: float) -> list[ev.Decision]:
        if self._welcome is not None and now >= self._welcomed_at + STEADY_SECONDS:
            self._reset_delay()
        self._welcome, self._ready = None, False
        self._updates.session_lost()
        if event.refused_exit:
            self._ended = True
            self._update(connected=False, refused_exit=event.refused_exit, text=event.text)
            return [ev.CancelTransfers()]
        self._connect_at = now + max(event.pause_seconds, self._next_delay())
        self._update(
            connected=False, text=f"waiting for the syncer at {self._syncer}: {event.text}"
        )
        if self._state.phase in (Phase.WAITING, Phase.DOWNLOADING):
            self._missing.clear()
            self._update(phase=Phase.CONNECTING)
        return [ev.CancelTransfers()]

    def _tick(self, event: ev.Tick, now: float) -> list[ev.Decision]:
        if self._ended or self._trainer is None:
            return []
        if self._welcome is not None:
            # As `wake_at` computes it: rounded otherwise, a Tick at that time would do nothing.
            due = now >= self._last_sent_at + self._welcome.heartbeat_seconds
            return [ev.SendHeartbeat()] if due else []
        if self._connect_at is not None and now >= self._connect_at:
            return [ev.Connect(state=self._trainer)]
        return []

    # ------------------------------------------------------------ peers

    def _begin_recovery(self, now: float) -> list[ev.Decision]:
        if self._recovery is None:
            return []
        return self._recovery.begin(step=self._state.step, run=self._state.run, now=now)

    def _peer_answered(self, event: ev.PeerAnswered, now: float) -> list[ev.Decision]:
        if self._recovery is None:
            return []
        state = self._state
        return self._recovery.answered(event, step=state.step, run=state.run, now=now)

    def _proceed_recovery(self, now: float) -> list[ev.Decision]:
        """Abandon what is of no use any longer, and publish what there is."""
        recovery, state = self._recovery, self._state
        if recovery is None:
            return []
        if self._ended or (self._trainer is not None and self._trainer.model_loaded):
            out = recovery.stop()
        else:
            out = recovery.proceed(step=state.step, run=state.run, now=now)
        if (state.peer_pending, state.peer_problem) != (recovery.pending, recovery.why):
            source = recovery.source or ev.PeerState(learner="", local_step=0, global_step=0)
            self._update(
                peer_pending=recovery.pending, peer=source.learner, peer_local_step=source.local_step,
                peer_step=source.global_step, peer_bytes=source.bytes, peer_problem=recovery.why,
                peer_seconds=recovery.seconds,
            )  # fmt: skip
        if recovery.pending and state.phase is Phase.APPLY_MODEL:
            self._update(text=f"waiting for the optimizers' state of {recovery.asked}")
        return out

    def _peer_asks(self, event: ev.PeerAsks, now: float) -> list[ev.Decision]:
        # Several may wait: a checkpoint of the newest step is enough for all.
        self._update(checkpoint_wanted=max(self._state.checkpoint_wanted, event.step))
        return []

    # ------------------------------------------------------------ downloads

    def _downloaded(self, event: ev.Downloaded, now: float) -> list[ev.Decision]:
        request, staged = event.request, event.staged
        if request.round == 0 and request.exact:
            return self._model_part_downloaded(request, staged, event.error)
        if staged is None:
            # Neither aborted nor failed: the round is not decided yet.
            failed = bool(event.error) or not event.aborted
            again = request.round > 0 and failed and request.tries < DOWNLOAD_TRIES
            retry = again and self._welcome is not None and not self._updates.superseded(request)
            follow = self._updates.ended(request, retried=retry) if self._welcome else []
            return [_retry(request)] if retry else [*follow]
        # While the initial model is placed, a result is held until the trainer has applied that.
        place, discard = self._slots[staged.fragment].arrived(staged)
        out: list[ev.Decision] = []
        if discard is not None:
            out.append(ev.Discard(staged=discard))
        if place is not None:
            out.append(self._place(place))
        return [*out, *self._updates.ended(request, retried=False)]

    def _model_part_downloaded(
        self, request: ev.Download, staged: Staged | None, error: str
    ) -> list[ev.Decision]:
        """One fragment, or the constants, of the model that a fresh process downloads."""
        if request.fragment not in self._missing:
            return [ev.Discard(staged=staged)] if staged is not None else []
        if staged is None:
            self._update(text=f"downloading the model again: {error}")
            return [_retry(request)]
        if request.fragment == self._constants:
            return [ev.Discard(staged=staged), *self._model_part_placed(request.fragment)]
        slot = self._slots[request.fragment]
        if slot.version is not None and staged.version < slot.version:
            # The result of a later round has arrived; the current version is at least as new.
            return [ev.Discard(staged=staged), ev.Download(fragment=request.fragment)]
        slot.version = staged.version
        return [self._place(staged)]

    def _place(self, staged: Staged) -> ev.Place:
        self._slots[staged.fragment].inbox = staged.version
        return ev.Place(staged=staged, generation=self._slots[staged.fragment].published + 1)

    def _placed(self, event: ev.Placed, now: float) -> list[ev.Decision]:
        slot = self._slots[event.fragment]
        if event.error:
            slot.version, slot.inbox, slot.of_history = None, None, False
            delay = self._updates.failed(event.fragment)
            if event.fragment in self._missing:
                return [ev.Download(fragment=event.fragment, delay_seconds=delay)]
            return [*self._updates.repeat(event.fragment)]
        slot.placed()
        self._updates.decoded(event.fragment)
        if event.fragment in self._missing:
            return self._model_part_placed(event.fragment)
        self._publish_ready()
        return [*self._updates.placed(event.fragment)]

    def _model_part_placed(self, fragment: int) -> list[ev.Decision]:
        self._missing.discard(fragment)
        if not self._missing:
            self._update(phase=Phase.APPLY_MODEL, text="the model has arrived")
            self._publish_ready()
        return []


def _discard(staged: list[Staged]) -> list[ev.Decision]:
    return [ev.Discard(staged=each) for each in staged]


def _retry(request: ev.Download) -> ev.Download:
    return dataclasses.replace(request, tries=request.tries + 1, delay_seconds=RETRY_SECONDS)
