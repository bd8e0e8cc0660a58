"""
The syncer's volume: whether the claim is still the one that holds the job's state.

Pure. The status records the uid of the claim. A job that has made steps does not start its syncer on
another claim, which may be empty: a person decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_operator.state.job_state import JobState

UNRECORDED = "unrecorded"
"""Value of the annotation where the status has no uid: an earlier version wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostVolume:
    """The claim with the state of a job that has made steps is not there."""

    uid: str
    """Of the claim that held the state; UNRECORDED: unknown."""
    found: str
    """The uid of the claim that has its name now; "": there is none."""
    step: int
    """Last known global step."""


def lost_volume(state: JobState) -> LostVolume | None:
    """The loss of the volume; None: it is there, nothing was on it, or a person acknowledged its loss."""
    step = state.previous.number("step")
    if not state.has_syncer or not step:
        return None
    recorded, found = state.previous.volume_uid, _live_uid(state)
    uid = recorded or UNRECORDED
    if found and recorded in ("", found):
        return None
    return None if state.acknowledged_loss == uid else LostVolume(uid=uid, found=found, step=step)


def volume_uid(state: JobState) -> str:
    """The uid to record: of the claim that holds the state from now on; "": there is none yet."""
    if not state.in_scope:
        # A region.name that was changed by mistake is set back.
        return state.previous.volume_uid
    if not state.has_syncer:
        return ""
    replaced = lost_volume(state) is None and _live_uid(state)
    return replaced or state.previous.volume_uid


def _live_uid(state: JobState) -> str:
    claim = state.syncer_child("PersistentVolumeClaim")
    return str(claim["metadata"]["uid"]) if claim is not None else ""
