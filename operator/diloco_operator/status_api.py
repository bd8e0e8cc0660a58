"""
What the operator writes under `status`: the types behind the CRD's status schema and the reference.

Pure. The operator builds a plain mapping of this shape and never reads one back for a decision
other than a terminal condition. A field without a value is left out: server-side apply carries no
null. Nothing here has a default in the CRD; a server must not add to what the operator wrote.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from diloco_operator.api import Model
from diloco_operator.fields import INT32_MOST, list_map

Number = Annotated[int, Field(ge=0)]
Few = Annotated[int, Field(ge=0, le=INT32_MOST)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, whole seconds."""

State = Literal["Pending", "Starting", "Training", "Degraded", "Suspended", "Complete", "Failed"]


class Condition(Model):
    """A metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Which condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in a sentence."""
    last_transition_time: Time
    """When status last changed."""
    observed_generation: Number = 0
    """The metadata.generation that this was said about."""


class SyncerStatus(Model):
    """The one process that merges, as this operator knows it."""

    endpoint: str = ""
    """host:port of the syncer, as others may dial it."""
    region: str = ""
    """The region it lives in."""
    last_merge_time: Time = ""
    """When it last merged a fragment."""


class LearnersStatus(Model):
    """Learners of all regions together; of this operator's own regions while no syncer answers."""

    desired: Few = 0
    """How many there should be."""
    ready: Few = 0
    """How many are registered with the syncer."""
    training: Few = 0
    """How many take part in rounds."""
    summary: str = ""
    """training/desired, as `kubectl get` prints it."""


class RegionStatus(Model):
    """Learners of one region."""

    name: Annotated[str, Field(max_length=63)]
    """The region."""
    desired: Few = 0
    """How many there should be."""
    ready: Few = 0
    """How many are registered with the syncer."""
    training: Few = 0
    """How many take part in rounds."""
    restarts: Number = 0
    """Earlier lives of its learners, all together."""
    last_seen_time: Time = ""
    """When the syncer last heard of one of them."""


class ModelStatus(Model):
    """The finished model."""

    path: str = ""
    """Where it lies on the syncer's volume."""
    sha256: str = ""
    """SHA-256 of model.safetensors."""


class Status(Model):
    """What the operator sees. Derived: everything here can be found out again by looking."""

    observed_generation: Number = 0
    """The metadata.generation that this status was made from."""
    state: State = "Pending"
    """The conditions in one word, for people; conditions are the interface."""
    step: Number = 0
    """Global steps that the syncer has done."""
    steps: Number = 0
    """Global steps that were asked for."""
    progress: str = ""
    """step/steps, as `kubectl get` prints it."""
    tokens: Number = 0
    """Tokens trained on, as learners reported them."""
    epoch: Number = 0
    """Starts of the syncer."""
    spec_hash: str = ""
    """Hash of what every region must share; regions with another one are refused."""
    syncer: SyncerStatus = SyncerStatus()
    """The one process that merges."""
    learners: LearnersStatus = LearnersStatus()
    """Learners of all regions together."""
    regions: list[RegionStatus] = Field([], max_length=256, json_schema_extra=list_map("name"))
    """Learners by region."""
    model: ModelStatus = ModelStatus()
    """The finished model."""
    start_time: Time = ""
    """When the job was started, or last resumed."""
    completion_time: Time = ""
    """When it became Complete or Failed."""
    last_sync_time: Time = ""
    """When the syncer last answered this operator."""
    conditions: list[Condition] = Field([], max_length=32, json_schema_extra=list_map("type"))
    """Accepted, SyncerReady, SyncerReachable, LearnersReady, QuorumMet, SpecConsistent, Suspended,
    Complete and Failed; all present from the first visit."""
