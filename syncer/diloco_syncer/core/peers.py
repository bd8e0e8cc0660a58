"""
Which learners one that joins may ask for the state of their optimizers. Pure.

See docs/adr/0033-moments-from-a-peer.md. Paper leaves the choice open.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_syncer.core.events import PeerAddress
from diloco_syncer.core.learners import LearnerRecord

MOST = 3
"""Peers that are offered to one learner."""


def offered(
    able: Iterable[LearnerRecord] | None, newcomer: LearnerRecord, *, step: int, interval: int
) -> tuple[PeerAddress, ...]:
    """
    The peers to ask, best first: of the same region first, then those that were the first choice least often.

    Args:
        able: learners that train, are not ejected and do not hang, the first choice among them is counted; None: the
            newcomer needs no peer.
        newcomer: a process that has just started, which is noted unless it needs no peer.
        step: global step of the syncer.
        interval: H; before that step no peer has moments of value, nor has a process that itself began without a
            recent checkpoint, for as many steps: the newcomer's own old ones may be better.
    """
    if able is None:
        return ()
    newcomer.began_at = step
    peers = [
        r for r in able if r.peer_address and r is not newcomer and step - r.began_at >= interval
    ]
    peers.sort(key=lambda peer: (peer.region != newcomer.region, peer.first_choices, peer.name))
    if peers:
        peers[0].first_choices += 1
    return tuple(PeerAddress(peer.name, peer.peer_address) for peer in peers[:MOST])
