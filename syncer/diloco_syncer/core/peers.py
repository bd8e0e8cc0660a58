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
    able: Iterable[LearnerRecord], newcomer: LearnerRecord, *, step: int, interval: int
) -> tuple[PeerAddress, ...]:
    """
    The peers to ask, best first: of the same region first, then those that were the first choice least often.

    Args:
        able: learners that train, are not ejected and do not hang; the first choice among them is counted.
        newcomer: a process that has just started.
        step: global step of the syncer.
        interval: H; before that step no peer has moments of value.
    """
    if step < interval:
        return ()
    peers = [record for record in able if record.peer_address and record is not newcomer]
    peers.sort(key=lambda peer: (peer.region != newcomer.region, peer.first_choices, peer.name))
    if peers:
        peers[0].first_choices += 1
    return tuple(PeerAddress(peer.name, peer.peer_address) for peer in peers[:MOST])
