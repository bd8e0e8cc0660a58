"""Ways to break the recovery from a peer, on all ends, as breaks.py has them for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_sim.faults import Kind
from diloco_testing.sim.breaks import finds
from diloco_worker.core import events as ev
from diloco_worker.core import trainer
from diloco_worker.core.messages import LinkState
from diloco_worker.core.peer_recovery import PeerRecovery
from diloco_worker.core.recovery import Source, began
from diloco_worker.link import peer_messages
from diloco_worker.link.peer_messages import Arrival

Patch = pytest.MonkeyPatch


@finds("recovered", "with a state of .*, it asked for", Kind.PEER_OLD)
def states_of_any_step(patch: Patch) -> None:
    """A learner takes a state of whatever step."""
    received = peer_messages.received

    def of_any_step(manifest: bytes, **asked: Any) -> bytes:
        return received(manifest, **{**asked, "step": 0})

    patch.setattr(peer_messages, "received", of_any_step)


@finds("recovered", "a state that no learner had")
def damaged_states(patch: Patch) -> None:
    """A learner takes a state whatever its digest is."""
    end = Arrival.end

    def unchecked(self: Arrival) -> tuple[bytes, ev.PeerState]:
        self._stated = self._whole.hexdigest()
        return end(self)

    patch.setattr(Arrival, "end", unchecked)


@finds("recovered", "line `recovery` of .* states Peer", Kind.PEER_FALSE)
def steps_of_the_header(patch: Patch) -> None:
    """The header of an answer decides of which step it is."""
    end = Arrival.end

    def as_stated(self: Arrival) -> tuple[bytes, ev.PeerState]:
        text, state = end(self)
        header = self._header or peer_messages.pb.PeerHeader()
        return text, ev.PeerState(
            learner=state.learner, local_step=header.local_step, global_step=header.global_step
        )

    patch.setattr(Arrival, "end", as_stated)


@finds("recovered", "still waits for the last of", Kind.PEER_MUTE)
def peers_never_abandoned(patch: Patch) -> None:
    """A learner waits for its peer, whatever time passes."""
    patch.setattr(PeerRecovery, "proceed", lambda self, **now: [])


@finds("recovered", "asks .* after")
def one_peer_again_and_again(patch: Patch) -> None:
    """A peer that has refused is asked again."""
    ask = PeerRecovery._ask

    def keep(self: PeerRecovery, *now: Any) -> list[ev.Decision]:
        peers = [*self._peers]
        asked = ask(self, *now)
        self._peers = peers
        return asked

    patch.setattr(PeerRecovery, "_ask", keep)


@finds("recovered", "line `recovery` of .* states Peer")
def peers_stated_with_the_step_of_now(patch: Patch) -> None:
    """The line states that what a peer sent is of the step at which its learner begins."""

    def of_now(source: Source, link_state: LinkState, *, step: int = 0, why: str = "") -> object:
        return began(source, link_state, step=link_state.step if step else 0, why=why)

    patch.setattr(trainer, "began", of_now)


@finds("recovered", "line `recovery` of .* states Peer")
def state_of_a_peer_not_loaded(patch: Patch) -> None:
    """A learner keeps its own state, and states that it is the peer's."""
    patch.setattr(
        trainer.TrainerCore, "_optimizers",
        lambda self: self.peer_state_loaded() if self.link_state.peer else self._own_optimizers(""),
    )  # fmt: skip
