"""
`DiLoCoJob` v1alpha1: the manifest as types.

The one source of the manifest: fields, types, bounds, defaults and every field's description stand
here and nowhere else; rules between fields stand in `validate.py`. `manifest.py` reads a file into
these types; the CRD and the reference page are made from them. Nothing is converted: "5" is no
integer and `true` is no number.

Fractions stay the text that was written (quoted decimals): equality is equality of text, order is
that of `Decimal`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from diloco_operator.fields import (
    INT32_MOST,
    Annotations,
    BelowOne,
    Config,
    Count,
    Endpoint,
    Fraction,
    JobName,
    Labels,
    LongText,
    ObjectName,
    Passed,
    Positive,
    Quantity,
    RegionName,
    Text,
    UniqueBy,
    UpToBillion,
    Words,
    list_map,
)
from diloco_operator.names import REGION_MOST, REGIONS_MOST

API_VERSION = "diloco.dev/v1alpha1"
KIND = "DiLoCoJob"


class Model(BaseModel):
    """Unknown fields are errors; nothing is converted; names are camelCase outside."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


class Metadata(Model):
    """Kubernetes' ObjectMeta; what only a server writes is accepted and not used."""

    name: JobName
    """A DNS label that starts with a letter; with `-` and the longest region <= 52 characters."""
    namespace: str = ""
    """Where the job lives in a cluster; means nothing on one machine."""
    labels: dict[str, str] = {}
    """Labels of the job object."""
    annotations: dict[str, str] = {}
    """Annotations of the job object."""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    generate_name: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] = []
    owner_references: list[Passed] = []
    managed_fields: list[Passed] = []
    self_link: str = ""


# ----------------------------------------------------------------------------------- spec.sync


class Grace(Model):
    """How long a round waits for more learners once it has its quorum (paper Eq 3)."""

    max_steps: Fraction = "1"
    """Cap of the grace window, in compute steps; "0" turns it off."""
    safety: BelowOne = "0.8"
    """γ: the share of the remaining slack that may be waited, at least 0 and less than 1."""


class Outer(Model):
    """The outer optimizer: SGD with momentum on the outer gradient."""

    learning_rate: Positive = "0.7"
    """Outer learning rate, more than 0."""
    momentum: BelowOne = "0.5"
    """Outer momentum μ, at least 0 and less than 1."""
    nesterov: bool = True
    """Whether the momentum looks ahead."""


class Wire(Model):
    """What numbers travel as."""

    up: Literal["FP32", "BF16", "Int8", "Int4"] = "BF16"
    """Learner to syncer: a delta."""
    down: Literal["FP32", "BF16"] = "BF16"
    """Syncer to learner: a fragment."""
    error_feedback: bool = False
    """Whether a learner adds what rounding lost to its next delta."""


class Sync(Model):
    """How learners are kept together: one model, in fragments, merged round by round."""

    fragments: Annotated[int, Field(ge=1, le=1024)] = 24
    """P: fragments the model is cut into; at most its number of tensors."""
    interval: UpToBillion = 24
    """H: steps between two syncs of the same fragment; at least the number of fragments."""
    overlap: UpToBillion = 2
    """τ: steps a sync may take; so many fragments are in flight."""
    quorum: UpToBillion = 1
    """K: learners that must have reported before a fragment is merged."""
    grace: Grace = Grace()
    """The grace window."""
    merge: Literal["Radial", "Average"] = "Radial"
    """How deltas become one: Radial (RDA) keeps their length, Average is the weighted mean."""
    average_parameters: Annotated[list[Text], Field(max_length=256)] = []
    """Shell patterns of parameter names that are merged by average besides embeddings."""
    outer: Outer = Outer()
    """The outer optimizer."""
    wire: Wire = Wire()
    """Formats on the wire."""


# ---------------------------------------------------------------------------------------- pods


Quantities = Annotated[dict[str, Quantity], Field(max_length=64)]


class Resources(Model):
    """Resources of a container, as in core/v1."""

    requests: Quantities = {}
    """What the scheduler sets aside."""
    limits: Quantities = {}
    """What the container may not exceed."""
    claims: Annotated[list[Passed], Field(max_length=64)] = []
    """Names of resource claims."""


class PodMetadata(Model):
    """Labels and annotations of pods."""

    labels: Labels = {}
    """Added to the operator's own labels."""
    annotations: Annotations = {}
    """Annotations of the pod."""


class PodTemplate(Model):
    """What is laid over the pod that the operator makes."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations."""
    spec: Passed = {}
    """A core/v1 PodSpec, passed through: nodeSelector, tolerations, affinity, volumes, ..."""


class EnvVar(Model):
    """One environment variable, as in a container."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the variable."""
    value: LongText = ""
    """Its text."""
    value_from: Passed | None = None
    """Where a cluster takes the text from; `diloco run` has no cluster to ask."""


# ------------------------------------------------------------------ spec.learner, spec.regions


class Recipe(Model):
    """A built-in training program."""

    name: Literal["gpt"]
    """Which program."""
    config: Config = {}
    """Its settings; the program itself knows which there are."""


class LearnerCheckpoint(Model):
    """A learner's own checkpoint."""

    every_steps: UpToBillion = 100
    """Steps between two checkpoints."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many are kept."""


class Learner(Model):
    """What every learner runs."""

    recipe: Recipe | None = None
    """A built-in program; exactly one of recipe and command."""
    command: Words | None = None
    """The words of your own training program; `diloco run` starts it in the manifest's folder."""
    image: Text = ""
    """Container image; empty: the chart's worker image."""
    pods_per_learner: Annotated[int, Field(ge=1, le=4096)] = 1
    """R/M: pods that form one learner."""
    checkpoint: LearnerCheckpoint = LearnerCheckpoint()
    """The learner's own checkpoint."""
    env: Annotated[
        list[EnvVar],
        Field(max_length=512, json_schema_extra=list_map("name")),
        AfterValidator(UniqueBy(key="name")),
    ] = []
    """Environment of the training program."""
    resources: Resources = Resources()
    """Resources of its container."""
    pod_template: PodTemplate = PodTemplate()
    """Laid over its pods."""


class Region(Model):
    """Learners that live close together."""

    name: RegionName
    """A DNS label of at most 24 characters."""
    learners: Annotated[int, Field(ge=0, le=1000)]
    """How many learners; may change while the job runs."""
    config: Config = {}
    """Laid over recipe.config for this region; with an own command it is the whole config."""
    resources: Resources = Resources()
    """Instead of learner.resources."""
    pod_template: PodTemplate = PodTemplate()
    """Laid over learner.podTemplate."""


# -------------------------------------------------------------------- spec.syncer and the rest


class Storage(Model):
    """The volume of the syncer."""

    size: Quantity = "10Gi"
    """How large."""
    storage_class_name: ObjectName = ""
    """Empty: the cluster's default."""


class Service(Model):
    """How the syncer is reached."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """As in core/v1."""
    port: Annotated[int, Field(ge=1, le=65535)] = 7070
    """Port of the Service."""
    node_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on every node with type NodePort; 0: the cluster chooses."""
    annotations: Annotations = {}
    """Annotations of the Service."""


class SyncerCheckpoint(Model):
    """The syncer's durable snapshots."""

    every_steps: UpToBillion = 48
    """Global steps between two snapshots."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many are kept."""


class Syncer(Model):
    """The one process that merges."""

    region: Annotated[str, Field(max_length=REGION_MOST)] = ""
    """The region it lives in; empty: the first of regions."""
    endpoint: Endpoint = ""
    """host:port that other regions dial; needed when regions live in different clusters."""
    image: Text = ""
    """Container image; empty: the chart's syncer image."""
    resources: Resources = Resources()
    """Resources of its container."""
    storage: Storage = Storage()
    """Its volume."""
    service: Service = Service()
    """Its Service."""
    checkpoint: SyncerCheckpoint = SyncerCheckpoint()
    """Its snapshots."""
    pod_template: PodTemplate = PodTemplate()
    """Laid over its pod."""


class Evaluation(Model):
    """A process that scores the syncer's model."""

    every_steps: UpToBillion
    """Global steps between two scores."""
    command: Words | None = None
    """With an own loop: is given the path of a model.safetensors, prints {"loss": number}."""


class IssuerRef(Model):
    """A cert-manager issuer."""

    name: Annotated[ObjectName, Field(min_length=1)]
    """Name of the issuer."""
    kind: Text = "Issuer"
    """Issuer or ClusterIssuer."""
    group: ObjectName = "cert-manager.io"
    """API group of the issuer."""


class Tls(Model):
    """Mutual TLS between learners and syncer."""

    mode: Literal["Disabled", "Secret", "CertManager"] = "Disabled"
    """Where certificates come from; not Disabled when syncer.endpoint is set."""
    secret_name: ObjectName = ""
    """Required by mode Secret: a Secret with tls.crt, tls.key and ca.crt."""
    issuer_ref: IssuerRef | None = None
    """Required by mode CertManager."""


class RunPolicy(Model):
    """When the job stops, and what is left then."""

    suspend: bool = False
    """Whether the job is to stand still."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after which a finished job is removed; left out: it stays."""
    active_deadline_seconds: Count | None = None
    """Seconds after which the job fails; left out: no limit."""
    learner_restart_limit: Count | None = None
    """Restarts of one learner that were its own fault; left out: no limit."""
    cleanup_policy: Literal["None", "Running", "All"] = "Running"
    """What is removed at the end."""
    managed_by: Text = ""
    """Another controller's name: this operator then leaves the job alone."""


class Spec(Model):
    """What is to be trained, where, and how it is kept together."""

    steps: UpToBillion
    """T: global steps; the job is complete when the syncer has done this many."""
    seed: Annotated[int, Field(ge=0, le=INT32_MOST)] = 0
    """Seed of initialisation and data order."""
    sync: Sync = Sync()
    """How learners are kept together."""
    learner: Learner = Learner()
    """What every learner runs."""
    regions: Annotated[
        list[Region],
        Field(min_length=1, max_length=REGIONS_MOST, json_schema_extra=list_map("name")),
        AfterValidator(UniqueBy(key="name")),
    ]
    """Where learners live, and how many."""
    syncer: Syncer = Syncer()
    """The one process that merges."""
    evaluation: Evaluation | None = None
    """Leave it out: no evaluator."""
    tls: Tls = Tls()
    """Mutual TLS."""
    run_policy: RunPolicy = RunPolicy()
    """When the job stops, and what is left then."""

    @property
    def num_learners(self) -> int:
        """Learners of all regions together."""
        return sum(region.learners for region in self.regions)

    @property
    def syncer_region(self) -> str:
        """The region the syncer lives in: the one named, else the first."""
        return self.syncer.region or self.regions[0].name


class DiLoCoJob(Model):
    """One training job: many learners, one model, regions that may fail."""

    api_version: Literal["diloco.dev/v1alpha1"]
    """Always diloco.dev/v1alpha1."""
    kind: Literal["DiLoCoJob"]
    """Always DiLoCoJob."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """What is asked for."""
    status: Passed = {}
    """Written by the operator; accepted, so that a job read from a cluster is valid, never used."""
