"""
Which learners one that joins may ask for the state of their optimizers, and what came of it. Pure.

See docs/adr/0033-moments-from-a-peer.md. Paper leaves the choice open.
"""

from __future__ import annotations

from collections import Counter

from diloco_syncer.core.events import Decision, Log, PeerAddress, Recovered
from diloco_syncer.core.learners import LearnerRecord, LearnerRecords

MOST = 3
"""Peers that are offered to one learner."""


def offered(
    known: LearnerRecords | None, newcomer: LearnerRecord, *, step: int, interval: int
) -> tuple[PeerAddress, ...]:
    """
    The peers to ask, best first: of the same region first, then those that the fewest learners are asking now, then
    those that were the first choice least often.

    Args:
        known: all learners, of which the first choice is counted; None: the newcomer needs no peer.
        newcomer: a process that has just started, which is noted unless it needs no peer.
        step: global step of the syncer.
        interval: H; before that step no peer has moments of value, nor has a process that itself began without a
            recent checkpoint, for as many steps: the newcomer's own old ones may be better.
    """
    if known is None:
        return ()
    newcomer.began_at = step
    peers = [
        peer
        for peer in known.able()
        if peer.peer_address and peer is not newcomer and not peer.hangs
        and peer.cluster == newcomer.cluster and step - peer.began_at >= interval
    ]  # fmt: skip
    asked = Counter(r.first_peer for r in known.connected() if r.report is None)
    peers.sort(
        key=lambda peer: (
            *(peer.region != newcomer.region, asked[peer.name], peer.first_choices, peer.name),
        )
    )
    if peers:
        peers[0].first_choices += 1
        newcomer.first_peer = peers[0].name
    return tuple(PeerAddress(peer.name, peer.peer_address) for peer in peers[:MOST])


def recovered(record: LearnerRecord | None, event: Recovered, *, step: int) -> list[Decision]:
    """
    The line of events.jsonl for a process that begins to train, once for each incarnation.

    Args:
        record: of the learner; None: the session has been replaced.
        event: what the process states.
        step: global step of the syncer.
    """
    if record is None or record.recovery is not None:
        return []
    record.recovery = event
    fields = {
        "learner": record.name,
        "incarnation": record.incarnation,
        "step": step,
        "source": event.source,
        "peer": event.peer,
        "stateStep": event.state_step,
        "age": event.age,
        "bytes": event.bytes,
        "seconds": round(event.seconds, 3),
        "problem": event.problem,
    }
    return [Log(event="recovery", fields=fields)]
