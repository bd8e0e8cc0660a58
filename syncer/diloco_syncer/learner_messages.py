"""
Decisions of the engine as messages to learners (syncer.proto).
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Version
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, Engine
from diloco_syncer.storage.parameters import Parameters

INITIALISE = pb.SyncerMessage(initialise=pb.Initialise())


def welcome(
    decision: ev.Admit, engine: Engine, *, run: str, start_id: str, snapshot_start_id: str
) -> pb.SyncerMessage:
    """The first message of a session; for the names, see `State`."""
    return pb.SyncerMessage(
        welcome=pb.Welcome(
            epoch=engine.epoch,
            incarnation=decision.incarnation,
            step=engine.step if decision.step is None else decision.step,
            steps=engine.spec.steps,
            local_step=decision.local_step,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            use_checkpoint=decision.use_checkpoint,
            total_tokens=decision.total_tokens,
            compares_frozen=True,
            leases_blocks=True,
            run=run,
            start_id=start_id,
            snapshot_start_id=snapshot_start_id,
            peers=[pb.PeerAddress(learner=p.learner, address=p.address) for p in decision.peers],
        )
    )


def ready(parameters: Parameters | None, learner: str) -> pb.SyncerMessage:
    """Θ exists; the version of every fragment that this learner may have."""
    fragments = parameters.all(learner) if parameters is not None else []
    versions = [pb.Version(epoch=f.version[0], step=f.version[1]) for f in fragments]
    return pb.SyncerMessage(ready=pb.Ready(versions=versions))


def fragments(decision: ev.AnnounceFragments, *, steps: int) -> pb.SyncerMessage:
    """The global step and the fragments that may be pulled next."""
    return pb.SyncerMessage(
        open=pb.Open(step=decision.step, fragments=decision.fragments, steps=steps)
    )


def pull(
    decision: ev.Pull | ev.ProbeLearner, parameters: Parameters, *, bases: Sequence[Version] | None = None
) -> pb.SyncerMessage:  # fmt: skip
    """The request for a fragment, with the versions that a delta may be based on; None: all that are kept."""
    kept = parameters.versions(decision.fragment) if bases is None else bases
    versions = [pb.Version(epoch=e, step=s) for e, s in kept]
    return pb.SyncerMessage(
        pull=pb.Pull(
            round=decision.round,
            attempt=decision.attempt,
            fragment=decision.fragment,
            versions=versions,
            probe=isinstance(decision, ev.ProbeLearner),
        )
    )


def committed(fragment: int, version: tuple[int, int]) -> pb.SyncerMessage:
    """A fragment has this version now."""
    epoch, step = version
    return pb.SyncerMessage(
        committed=pb.Committed(fragment=fragment, version=pb.Version(epoch=epoch, step=step))
    )


def leases(decision: ev.LeaseBlocks) -> pb.SyncerMessage:
    """All blocks that are open at a learner."""
    return pb.SyncerMessage(leases=pb.Leases(serials=decision.serials))


def result(decision: ev.Pull) -> pb.SyncerMessage:
    """The result of this attempt may be downloaded."""
    return pb.SyncerMessage(
        result=pb.Result(round=decision.round, attempt=decision.attempt, fragment=decision.fragment)
    )


def complete(step: int) -> pb.SyncerMessage:
    """The job is complete."""
    return pb.SyncerMessage(complete=pb.Complete(step=step))
