"""
`DiLoCoJob` v1alpha1: the manifest as types.

The single source of fields, types, bounds, defaults and descriptions; rules between fields are in
`rules`. `manifest_file` parses YAML into these types; the CRD and the reference page are generated
from them. Nothing is converted: "5" is not an integer and `true` is not a number.

Fractions keep the text of the manifest (quoted decimals): they are equal if their text is equal, and
are ordered as `Decimal`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from diloco_job.fields import (
    INT32_MAX,
    Annotations,
    BelowOne,
    ClusterName,
    Command,
    Config,
    Count,
    Endpoint,
    EnvName,
    Fraction,
    IpFamilyPolicy,
    JobName,
    Labels,
    LoadBalancerClass,
    ObjectName,
    ObjectsUrl,
    Passed,
    Positive,
    ProcessText,
    Quantity,
    RegionName,
    SourceRange,
    Text,
    UniqueBy,
    UpToBillion,
    list_map,
)
from diloco_job.names import MAX_REGION_NAME, MAX_REGIONS

API_VERSION = "diloco.dev/v1alpha1"
KIND = "DiLoCoJob"


class Model(BaseModel):
    """Unknown fields are errors; nothing is converted; names are camelCase in manifests."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


class Metadata(Model):
    """Kubernetes' ObjectMeta; fields that only a server writes are accepted and ignored."""

    name: JobName
    """A DNS label that starts with a letter; with `-` and the longest region <= 52 characters."""
    namespace: str = ""
    """Namespace of the job in a cluster; ignored on one machine."""
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
    """How long a round waits for more learners after it reaches its quorum (paper Eq 3)."""

    max_steps: Fraction = "1"
    """Maximum grace window in compute steps; "0" disables it."""
    safety: BelowOne = "0.8"
    """γ: fraction of the remaining slack that a round may wait, at least 0 and less than 1."""


class Outer(Model):
    """The outer optimizer: SGD with momentum on the outer gradient."""

    learning_rate: Positive = "0.7"
    """Outer learning rate, more than 0."""
    momentum: BelowOne = "0.5"
    """Outer momentum μ, at least 0 and less than 1."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""


class Wire(Model):
    """Number formats on the wire."""

    up: Literal["FP32", "BF16", "Int8", "Int4"] = "BF16"
    """Learner to syncer: a delta."""
    down: Literal["FP32", "BF16"] = "BF16"
    """Syncer to learner: a fragment."""
    error_feedback: bool = False
    """Whether a learner adds the rounding error of a delta to its next one."""


class Sync(Model):
    """How learners synchronize: one model, in fragments, merged round by round."""

    fragments: Annotated[int, Field(ge=1, le=1024)] = 24
    """P: number of fragments of the model; at most its number of tensors."""
    interval: UpToBillion = 24
    """H: global steps between two rounds of the same fragment; at least the number of fragments."""
    overlap: UpToBillion = 2
    """τ: rounds in flight, and steps that a round may take; at most the number of fragments, and `interval` - 1."""
    quorum: UpToBillion = 1
    """K: reports that a round needs before its fragment is merged."""
    grace: Grace = Grace()
    """The grace window."""
    merge: Literal["Radial", "Average"] = "Radial"
    """How deltas are merged: Radial preserves their length, Average is the weighted mean."""
    average_parameters: Annotated[list[Text], Field(max_length=256)] = []
    """Shell patterns of parameters that, like embeddings, are merged by average."""
    frozen: Literal["Keep", "Ship"] = "Keep"
    """Keep: each learner brings its frozen parameters, which must be equal; Ship: the job stores them."""
    buffers: Literal["Average", "Initial"] = "Average"
    """What happens to buffers that change while training: Average merges them, Initial keeps those of step 0."""
    moving_buffers: Annotated[list[Text], Field(max_length=256)] = []
    """Shell patterns of buffers that change while training, besides the statistics of normalization layers."""
    guard: Fraction = "10"
    """Multiple of the members' median norm to which a delta is clipped; "0" disables the guard."""
    outer: Outer = Outer()
    """The outer optimizer."""
    wire: Wire = Wire()
    """Formats on the wire."""


# ---------------------------------------------------------------------------------------- pods


Quantities = Annotated[dict[str, Quantity], Field(max_length=64)]


class Resources(Model):
    """Resources of a container, as in core/v1."""

    requests: Quantities = {}
    """What the scheduler reserves."""
    limits: Quantities = {}
    """What the container must not exceed."""
    claims: Annotated[list[Passed], Field(max_length=64)] = []
    """Names of resource claims."""


Port = Annotated[int, Field(ge=1024, le=65535)]


class Ports(Model):
    """Ports of a pod; others than the defaults matter where it has the network of its node."""

    health: Port = 8080
    """Port of the probes."""
    metrics: Port = 9090
    """Port of the metrics."""


class LearnerPorts(Ports):
    """Ports of the pods of learners."""

    rendezvous: Port = 29500
    """MASTER_PORT of learners of several pods."""
    peer: Port = 7071
    """Port on which learners of one pod answer other learners, if learner.recovery is Peer."""


class SyncerPorts(Ports):
    """Ports of the syncer's pod."""

    sync: Port = 7070
    """Port on which the syncer listens; its Service has its own port."""


class PodMetadata(Model):
    """Labels and annotations of pods."""

    labels: Labels = {}
    """Added to the operator's own labels."""
    annotations: Annotations = {}
    """Annotations of the pod."""


class PodTemplate(Model):
    """Overlay for the pod that the operator creates."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations."""
    spec: Passed = {}
    """A core/v1 PodSpec, passed through: nodeSelector, tolerations, affinity, volumes, ..."""


class EnvVar(Model):
    """One environment variable, as in a container."""

    name: EnvName
    """Name of the variable."""
    value: ProcessText = ""
    """Its value."""
    value_from: Passed | None = None
    """Source of the value in a cluster; `diloco run` does not support it."""


Retention = Literal["Delete", "Retain"]


class Storage(Model):
    """The volume of the syncer."""

    size: Quantity = "10Gi"
    """Size of the volume."""
    storage_class_name: ObjectName = ""
    """StorageClass; empty: the default of the cluster."""
    when_deleted: Retention = "Delete"
    """Whether the volume is deleted with the job, or kept for a job of the same name."""


class LearnerStorage(Storage):
    """Volumes of the learners, one for each pod."""

    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of each volume, which one pod uses."""
    when_scaled: Retention = "Retain"
    """Whether the volumes of a learner are deleted when the learner is removed from its region."""


# ------------------------------------------------------------------ spec.learner, spec.regions


class Recipe(Model):
    """A built-in training program."""

    name: Literal["gpt"]
    """Name of the program."""
    config: Config = {}
    """Settings of the program, which validates them."""


class LearnerCheckpoint(Model):
    """A learner's own checkpoint."""

    every_steps: UpToBillion | None = None
    """Steps between two checkpoints; omitted: four times `sync.interval`."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of checkpoints that are kept."""


class Learner(Model):
    """What every learner runs."""

    recipe: Recipe | None = None
    """A built-in program; exactly one of recipe and command."""
    command: Command | None = None
    """Your own training program; `diloco run` starts it in the manifest's directory."""
    image: Text = ""
    """Container image; empty: the worker image of the chart."""
    pods_per_learner: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of pods of each learner."""
    checkpoint: LearnerCheckpoint = LearnerCheckpoint()
    """The learner's own checkpoint."""
    recovery: Literal["Peer", "Checkpoint"] = "Peer"
    """Where a learner without a recent checkpoint takes the state of its optimizers from. Peer: from another learner;
    Checkpoint: from its own last one, however old. Learners of several processes always do the latter."""
    storage: LearnerStorage | None = None
    """Volumes for its checkpoints; omitted: these are deleted with the pod. `diloco run` uses its directory."""
    env: Annotated[
        list[EnvVar],
        Field(max_length=512, json_schema_extra=list_map("name")),
        AfterValidator(UniqueBy(key="name")),
    ] = []
    """Environment of the training program."""
    resources: Resources = Resources()
    """Resources of its container."""
    ports: LearnerPorts = LearnerPorts()
    """Ports of its pods, for learners in the network of their node; `diloco run` ignores them."""
    pod_template: PodTemplate = PodTemplate()
    """Overlay for its pods."""

    @property
    def has_peers(self) -> bool:
        """Whether its learners answer each other: not those of several pods."""
        return self.recovery == "Peer" and self.pods_per_learner == 1


class Region(Model):
    """Learners with a fast network between them."""

    name: RegionName
    """A DNS label of at most 24 characters."""
    learners: Annotated[int, Field(ge=0, le=1000)]
    """Number of learners; may change while the job runs."""
    cluster: ClusterName = ""
    """region.name of the operator that runs it; empty: the region's own name. Several regions may
    have the same; an operator without region.name, like `diloco run`, runs all of them."""
    config: Config = {}
    """Overlay for recipe.config in this region; with learner.command, the whole config."""
    resources: Resources = Resources()
    """Replaces learner.resources."""
    pod_template: PodTemplate = PodTemplate()
    """Overlay for learner.podTemplate."""

    @property
    def cluster_name(self) -> str:
        """The cluster that runs it: the configured one, else the one of its own name."""
        return self.cluster or self.name


# -------------------------------------------------------------------- spec.syncer and the rest


class Service(Model):
    """The Service of the syncer."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """As in core/v1."""
    port: Annotated[int, Field(ge=1, le=65535)] = 7070
    """Port of the Service."""
    node_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on every node with type NodePort; 0: assigned by the cluster."""
    ip_family_policy: IpFamilyPolicy = ""
    """SingleStack, PreferDualStack or RequireDualStack; empty: the cluster's default, one family."""
    load_balancer_class: LoadBalancerClass = ""
    """Implementation of the load balancer with type LoadBalancer; empty: the cluster's default."""
    load_balancer_source_ranges: Annotated[list[SourceRange], Field(max_length=64)] = []
    """Addresses that may connect through the load balancer, such as 10.0.0.0/8; empty: all."""
    annotations: Annotations = {}
    """Annotations of the Service."""


class SyncerCheckpoint(Model):
    """The syncer's durable snapshots."""

    every_steps: UpToBillion = 48
    """Global steps between two snapshots."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of snapshots that are kept, on its volume and below the URL."""
    url: ObjectsUrl = ""
    """Where the snapshots are copied, and what a syncer without any begins from: s3://bucket/path,
    gs://bucket/path, az://container/path or file:///path; empty: nowhere. Below it, the job uses the
    folder of its name."""


class Syncer(Model):
    """The process that merges."""

    region: Annotated[str, Field(max_length=MAX_REGION_NAME)] = ""
    """Region of the syncer; empty: the first of regions."""
    endpoint: Endpoint = ""
    """host:port that other regions dial; required if regions are in different clusters."""
    image: Text = ""
    """Container image; empty: the syncer image of the chart."""
    resources: Resources = Resources()
    """Resources of its container."""
    storage: Storage = Storage()
    """Its volume."""
    service: Service = Service()
    """Its Service."""
    ports: SyncerPorts = SyncerPorts()
    """Ports of its pod, if that is in the network of its node; `diloco run` ignores them."""
    checkpoint: SyncerCheckpoint = SyncerCheckpoint()
    """Its snapshots."""
    pod_template: PodTemplate = PodTemplate()
    """Overlay for its pod."""


class Evaluation(Model):
    """A process that evaluates the syncer's model."""

    every_steps: UpToBillion
    """Global steps between two evaluations."""
    command: Command | None = None
    """With learner.command: gets the path of a model.safetensors, prints {"loss": number}."""
    ports: Ports = Ports()
    """Ports of the evaluator's pod, which has the podTemplate of learners; `diloco run` ignores them."""


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
    """Source of the certificates; must not be Disabled if syncer.endpoint is set."""
    secret_name: ObjectName = ""
    """Required by mode Secret: a Secret with tls.crt, tls.key and ca.crt."""
    issuer_ref: IssuerRef | None = None
    """Required by mode CertManager."""


class RunPolicy(Model):
    """When the job stops, and what remains."""

    suspend: bool = False
    """Whether the job is suspended."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after which a finished job is deleted; omitted: it stays."""
    active_deadline_seconds: Count | None = None
    """Seconds after which the job fails; omitted: no limit."""
    learner_restart_limit: Count | None = None
    """Restarts of one learner after crashes; omitted: no limit."""
    force_delete_pods_after_seconds: Count | None = None
    """Seconds that a learner's pod may hang in Terminating on a lost node before it is deleted by
    force; omitted: until the node is deleted or comes back."""
    cleanup_policy: Literal["None", "Running", "All"] = "Running"
    """What is deleted at the end: `None`: nothing; `Running`: pods that run, but neither the failed pods
    of a failed job, nor the syncer of a complete one, nor the volume; `All`: everything."""
    managed_by: Text = ""
    """The former place of spec.managedBy."""


class Spec(Model):
    """What to train, where, and how learners synchronize."""

    steps: UpToBillion
    """T: global steps; the job is complete after this many."""
    seed: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Seed of initialization and data order."""
    sync: Sync = Sync()
    """How learners synchronize."""
    learner: Learner = Learner()
    """What every learner runs."""
    regions: Annotated[
        list[Region],
        Field(min_length=1, max_length=MAX_REGIONS, json_schema_extra=list_map("name")),
        AfterValidator(UniqueBy(key="name")),
    ]
    """Where learners run, and how many."""
    syncer: Syncer = Syncer()
    """The process that merges."""
    evaluation: Evaluation | None = None
    """Evaluation of the model; omitted: no evaluator."""
    output: ObjectsUrl = ""
    """Where the final model is copied, in the folder of the job's name: a URL like
    syncer.checkpoint.url; empty: nowhere. The job is complete when it is there."""
    tls: Tls = Tls()
    """Mutual TLS."""
    run_policy: RunPolicy = RunPolicy()
    """When the job stops, and what remains."""
    managed_by: Text = ""
    """Name of another controller, such as kueue.x-k8s.io/multikueue; this operator then ignores the job."""

    @property
    def num_learners(self) -> int:
        """Number of learners in all regions."""
        return sum(region.learners for region in self.regions)

    @property
    def syncer_region(self) -> str:
        """The region of the syncer: the configured one, else the first."""
        return self.syncer.region or self.regions[0].name

    @property
    def syncer_cluster(self) -> str:
        """The cluster of the syncer: that of its region."""
        name = self.syncer_region
        return next((region.cluster_name for region in self.regions if region.name == name), name)


class DiLoCoJob(Model):
    """One training job: many learners, one model, regions that may fail."""

    api_version: Literal["diloco.dev/v1alpha1"]
    """Always diloco.dev/v1alpha1."""
    kind: Literal["DiLoCoJob"]
    """Always DiLoCoJob."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """Desired state."""
    status: Passed = {}
    """Written by the operator; accepted and ignored, so that a job read from a cluster is valid."""
