"""
The types of the job's `status`, from which the CRD's status schema and the reference are generated.

Pure. The operator builds a plain mapping of this shape. A field without a value is omitted, because
server-side apply has no null. No field has a default in the CRD: a server must not add to what the
operator wrote.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from diloco_job.fields import INT32_MAX, list_map
from diloco_job.types import Model

Number = Annotated[int, Field(ge=0)]
Few = Annotated[int, Field(ge=0, le=INT32_MAX)]
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
    """Reason of the status, one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Details for people, in one sentence."""
    last_transition_time: Time
    """When the status last changed."""
    observed_generation: Number = 0
    """The metadata.generation that the condition is based on."""


class SyncerStatus(Model):
    """The syncer, as this operator observes it."""

    endpoint: str = ""
    """host:port at which others can dial the syncer."""
    region: str = ""
    """The region in which it runs."""
    last_merge_time: Time = ""
    """When it last merged a fragment."""
    volume_uid: str = ""
    """uid of the PersistentVolumeClaim that holds the job's state."""


class LearnersStatus(Model):
    """Learners of all regions; only of this operator's regions while the syncer does not reply."""

    desired: Few = 0
    """Desired number."""
    ready: Few = 0
    """Number registered with the syncer."""
    training: Few = 0
    """Number that take part in rounds."""
    summary: str = ""
    """training/desired, as `kubectl get` prints it."""


class RegionStatus(Model):
    """Learners of one region."""

    name: Annotated[str, Field(max_length=63)]
    """The region."""
    desired: Few = 0
    """Desired number."""
    ready: Few = 0
    """Number registered with the syncer."""
    training: Few = 0
    """Number that take part in rounds."""
    restarts: Number = 0
    """Restarts of its learners, in total."""
    last_seen_time: Time = ""
    """When the syncer last received a message from any of them."""


class ModelStatus(Model):
    """The finished model."""

    path: str = ""
    """Its path on the syncer's volume."""
    sha256: str = ""
    """SHA-256 of model.safetensors."""


class Status(Model):
    """The most recently observed status. Most of it can be derived again; docs/manifest.md lists what is read back."""

    observed_generation: Number = 0
    """The metadata.generation that this status is based on."""
    state: State = "Pending"
    """The conditions in one word, for people; programs should read the conditions."""
    step: Number = 0
    """Global steps that the syncer completed."""
    steps: Number = 0
    """Global steps in total: spec.steps."""
    progress: str = ""
    """step/steps, as `kubectl get` prints it."""
    tokens: Number = 0
    """Tokens trained on, as learners report them."""
    epoch: Number = 0
    """Starts of the syncer."""
    spec_hash: str = ""
    """Hash of the spec that all regions must share; learners with another hash are refused."""
    syncer: SyncerStatus = SyncerStatus()
    """The syncer."""
    learners: LearnersStatus = LearnersStatus()
    """Learners of all regions."""
    regions: list[RegionStatus] = Field([], max_length=256, json_schema_extra=list_map("name"))
    """Learners by region."""
    model: ModelStatus = ModelStatus()
    """The finished model."""
    start_time: Time = ""
    """When the job started or last resumed."""
    completion_time: Time = ""
    """When it became Complete or Failed."""
    last_sync_time: Time = ""
    """When the syncer last answered this operator."""
    operator: str = ""
    """The installation of the operator that runs this job, as namespace/name; others leave it alone."""
    conditions: list[Condition] = Field([], max_length=32, json_schema_extra=list_map("type"))
    """Accepted, SyncerReady, SyncerReachable, LearnersReady, QuorumMet, SpecConsistent, Suspended,
    Complete and Failed. All are present after the first reconcile."""
