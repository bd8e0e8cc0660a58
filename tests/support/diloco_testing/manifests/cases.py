"""
Invalid manifests and their messages.

One table for both validators: `diloco validate` (tests/unit) and a real API server (tests/e2e).
"""

from __future__ import annotations

from typing import Any

JOB = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: job}
spec:
  steps: 100
  learner: {recipe: {name: gpt, config: {width: 8}}}
  regions: [{name: eu, learners: 2}, {name: us, learners: 2}]
"""

# ------------------------------------------------------------------------------ rules


def _regions(count: int, *, of: int, more: int = 0) -> str:
    """So many regions of so many learners, and one of `more`."""
    entries = [f"{{name: r{n}, learners: {of}}}" for n in range(count)]
    return f"spec.regions=[{', '.join([*entries, f'{{name: more, learners: {more}}}'])}]"


BROKEN_RULES = [
    (
        ["metadata.name=" + "j" * 50],
        f'metadata.name: "{"j" * 50}", "-" and the longest region "eu" are 53 characters; the '
        "maximum is 52",
    ),
    (
        ["spec.sync.fragments=30"],
        "spec.sync.interval: 24 is less than the 30 fragments",
    ),
    (
        ["spec.sync.overlap=24"],
        "spec.sync.overlap: 24 is more than 23, the maximum with interval 24 and fragments 24",
    ),
    (
        ["spec.sync.fragments=1", "spec.sync.interval=1"],
        "spec.sync.overlap: 2 is more than 1, the maximum with interval 1 and fragments 1",
    ),
    (
        ["spec.sync.fragments=2", "spec.sync.interval=2"],
        "spec.sync.overlap: 2 is more than 1, the maximum with interval 2 and fragments 2",
    ),
    (
        ["spec.sync.fragments=2", "spec.sync.overlap=3"],
        "spec.sync.overlap: 3 is more than 2, the maximum with interval 24 and fragments 2",
    ),
    (
        ["spec.sync.fragments=1"],
        "spec.sync.overlap: 2 is more than 1, the maximum with interval 24 and fragments 1",
    ),
    (
        ["spec.sync.quorum=5"],
        "spec.sync.quorum: 5 is more than 4, the number of learners in all regions",
    ),
    (
        ["spec.regions[eu].learners=0", "spec.regions[us].learners=0"],
        "spec.sync.quorum: 1 is more than 0, the number of learners in all regions",
    ),
    (
        [_regions(10, of=1000, more=1)],
        "spec.regions: 10001 learners in all regions; the maximum is 10000",
    ),
    (
        ["spec.learner.command=[python, train.py]"],
        "spec.learner: has both recipe and command; set exactly one of them",
    ),
    (
        ["spec.learner.recipe=null"],
        "spec.learner: has neither recipe nor command; set exactly one of them",
    ),
    (["spec.learner={}"], "spec.learner: has neither recipe nor command"),
    (
        ["spec.learner.podsPerLearner=2"],
        "spec.learner.podsPerLearner: 2, but a recipe trains in one pod",
    ),
    (
        ["spec.learner.ports={health: 9090}"],
        "spec.learner.ports: health 9090, metrics 9090, rendezvous 29500, peer 7071; use a different port for each",
    ),
    (
        ["spec.syncer.ports={sync: 8080}"],
        "spec.syncer.ports: health 8080, metrics 9090, sync 8080; use a different port for each",
    ),
    (
        ["spec.evaluation={everySteps: 5, ports: {health: 5000, metrics: 5000}}"],
        "spec.evaluation.ports: health 5000, metrics 5000; use a different port for each",
    ),
    (["spec.syncer.region=asia"], 'spec.syncer.region: "asia" is not one of the regions: eu, us'),
    (
        ["spec.learner={command: [python, train.py]}", "spec.evaluation.everySteps=5"],
        "spec.evaluation.command: missing; spec.learner.command requires your own",
    ),
    (
        ["spec.syncer.endpoint=eu.example:7070"],
        'spec.tls.mode: Disabled, but spec.syncer.endpoint is "eu.example:7070"; use Secret or '
        "CertManager",
    ),
    (["spec.syncer.endpoint=eu.example"], 'spec.syncer.endpoint: "eu.example" is not an endpoint'),
    *(
        (
            [
                f'spec.syncer.endpoint="{local}:7070"',
                "spec.tls.mode=Secret",
                "spec.tls.secretName=s",
            ],
            f'spec.syncer.endpoint: "{local}:7070" is a loopback, link-local or unspecified address',
        )
        for local in (
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "0.0.0.0",
            "localhost",
            "a.LocalHost",
            "[::1]",
            "[::]",
            "[fe80::1]",
        )
    ),
    *(
        (
            [f'{field}="{url}"'],
            f'{field}: "{url}" is not a place for objects; write s3://bucket/path, gs://bucket/path, '
            "az://container/path or file:///path, without credentials",
        )
        for field, url in (
            ("spec.syncer.checkpoint.url", "s3://key:secret@bucket/runs"),
            ("spec.syncer.checkpoint.url", "https://bucket.s3.amazonaws.com/runs"),
            ("spec.syncer.checkpoint.url", "/var/lib/runs"),
            ("spec.output", "s3://bucket/../other"),
            ("spec.output", "file://host/path"),
        )
    ),
    (
        ["spec.syncer.service={type: NodePort, loadBalancerClass: example.com/inner}"],
        "spec.syncer.service.loadBalancerClass: is for type LoadBalancer; the type is NodePort",
    ),
    (
        ["spec.syncer.service.loadBalancerSourceRanges=[10.0.0.0/8]"],
        "spec.syncer.service.loadBalancerSourceRanges: is for type LoadBalancer; the type is "
        "ClusterIP",
    ),
    (["spec.tls.mode=Secret"], "spec.tls.secretName: missing; required by spec.tls.mode Secret"),
    (
        ["spec.tls.mode=CertManager"],
        "spec.tls.issuerRef: missing; required by spec.tls.mode CertManager",
    ),
    (
        ["spec.managedBy=kueue.x-k8s.io/multikueue", "spec.runPolicy.managedBy=example.com/a"],
        'spec.managedBy: "kueue.x-k8s.io/multikueue", but spec.runPolicy.managedBy, its former '
        'place, is "example.com/a"; set only one of them',
    ),
]

KEPT_RULES = [
    ["metadata.name=" + "j" * 49],
    ["spec.managedBy=example.com/a"],
    ["spec.runPolicy.managedBy=example.com/a"],
    ["spec.managedBy=example.com/a", "spec.runPolicy.managedBy=example.com/a"],
    ["spec.sync.overlap=23"],
    ["spec.sync.fragments=1", "spec.sync.interval=1", "spec.sync.overlap=1"],
    ["spec.sync.quorum=4"],
    [
        "spec.learner.ports={health: 65535, metrics: 1024, rendezvous: 8080}",
        "spec.syncer.ports={health: 65535, metrics: 1024, sync: 9090}",
        "spec.evaluation={everySteps: 5, ports: {health: 9090, metrics: 8080}}",
    ],
    ["spec.regions[eu].learners=0", "spec.syncer.region=eu"],
    [_regions(10, of=1000)],
    ["spec.learner={command: [x]}", "spec.evaluation={everySteps: 5, command: [y]}"],
    ["spec.learner={command: [x], podsPerLearner: 2}"],
    ["spec.syncer.endpoint=a:1", "spec.tls.mode=Secret", "spec.tls.secretName=s"],
    *(
        [f'spec.syncer.endpoint="{host}:1"', "spec.tls.mode=Secret", "spec.tls.secretName=s"]
        for host in ("10.0.0.1", "128.0.0.1", "localhost.example", "[fd00::1]", "[2001:db8::1]")
    ),
    ["spec.tls.mode=CertManager", "spec.tls.issuerRef.name=ca"],
    ["spec.syncer.checkpoint.url=s3://bucket", "spec.output=gs://my_bucket.example/a/b=c/"],
    ["spec.syncer.checkpoint.url=az://container/runs", "spec.output=file:///mnt/models"],
    [
        "spec.syncer.service={type: LoadBalancer, loadBalancerClass: example.com/Inner_1, "
        "loadBalancerSourceRanges: [10.0.0.0/8, 'fd00::/8', 192.0.2.1/32]}"
    ],
]

# ------------------------------------------------------------------------------ changes

REFUSED_CHANGES = [
    ("metadata.name=other", 'metadata.name: cannot change from "job" to "other"'),
    ("spec.seed=8", "spec.seed: cannot change from 0 to 8"),
    ("spec.sync.fragments=12", "spec.sync.fragments: cannot change from 24 to 12"),
    ("spec.sync.interval=48", "spec.sync.interval: cannot change from 24 to 48"),
    ("spec.sync.overlap=3", "spec.sync.overlap: cannot change from 2 to 3"),
    ('spec.sync.grace.maxSteps="0"', 'spec.sync.grace.maxSteps: cannot change from "1" to "0"'),
    ('spec.sync.grace.safety="0.80"', "spec.sync.grace.safety: cannot change from "),
    ("spec.sync.merge=Average", "spec.sync.merge: cannot change from "),
    ("spec.sync.buffers=Initial", "spec.sync.buffers: cannot change from "),
    ("spec.sync.movingBuffers=[x]", 'spec.sync.movingBuffers: cannot change from [] to ["'),
    ("spec.sync.averageParameters=[x]", 'spec.sync.averageParameters: cannot change from [] to ["'),
    ("spec.sync.frozen=Ship", "spec.sync.frozen: cannot change from "),
    ('spec.sync.outer.learningRate="0.70"', "spec.sync.outer.learningRate: cannot change from "),
    ('spec.sync.outer.momentum="0.9"', "spec.sync.outer.momentum: cannot change from "),
    ("spec.sync.outer.nesterov=false", "spec.sync.outer.nesterov: cannot change from true to fal"),
    ("spec.sync.wire.up=Int4", "spec.sync.wire.up: cannot change from "),
    ("spec.sync.wire.down=FP32", "spec.sync.wire.down: cannot change from "),
    ("spec.sync.wire.errorFeedback=true", "spec.sync.wire.errorFeedback: cannot change from "),
    ("spec.learner.recipe.config.width=16", "spec.learner.recipe: cannot change after "),
    ("spec.learner.recipe.config.width=8.0", "spec.learner.recipe: cannot change after "),
    ("spec.learner.recipe.config={depth: 8}", "spec.learner.recipe: cannot change after "),
    ("spec.learner.storage={}", "spec.learner.storage: cannot be added after the job is created"),
    (
        "spec.syncer.storage.size=1Gi",
        "spec.syncer.storage.size: cannot be reduced from 10Gi to 1Gi; a volume can only grow",
    ),
    ("spec.syncer.storage.size=1000000", "spec.syncer.storage.size: cannot be reduced from 10Gi"),
    ("spec.syncer.storage.storageClassName=x", "spec.syncer.storage.storageClassName: cannot"),
    ("spec.steps=99", "spec.steps: cannot be reduced from 100 to 99; it can only be raised"),
    ("spec.syncer.region=us", "spec.syncer.region: cannot change from eu to us"),
    (
        "spec.regions=[{name: us, learners: 2}, {name: eu, learners: 2}]",
        "spec.syncer.region: cannot change from eu to us (empty: the first region)",
    ),
    ("spec.regions=[{name: us, learners: 2}]", "spec.syncer.region: cannot change from eu to us"),
    (
        "spec.regions[eu].cluster=us",
        "spec.syncer.region: its cluster cannot change, because the volume of the syncer would",
    ),
]

ALLOWED_CHANGES = [
    "spec.steps=101",
    "spec.sync.quorum=4",
    "spec.learner.image=x",
    "spec.learner.env=[{name: a, value: b}]",
    "spec.learner.resources.limits.cpu=2",
    "spec.learner.podTemplate.spec.nodeSelector.a=b",
    "spec.learner.checkpoint={everySteps: 5, keep: 1}",
    "spec.syncer.checkpoint={everySteps: 5, keep: 1}",
    "spec.syncer.service.port=7071",
    "spec.syncer.ports={health: 8081, metrics: 9091, sync: 7071}",
    "spec.learner.ports={health: 8081, metrics: 9091, rendezvous: 29501}",
    "spec.syncer.storage.size=10.5Gi",
    "spec.syncer.storage.size=10240Mi",
    "spec.syncer.storage.size=20000000000",
    "spec.syncer.storage.whenDeleted=Retain",
    "spec.runPolicy.forceDeletePodsAfterSeconds=60",
    "spec.syncer.region=eu",
    "spec.regions[us].learners=9",
    "spec.regions[us].config.batch=4",
    "spec.regions[us].cluster=eu",
    "spec.regions[eu].cluster=eu",
    "spec.regions=[{name: eu, learners: 2}, {name: eu-spot, cluster: eu, learners: 1}]",
    "spec.regions=[{name: eu, learners: 1}]",
    "spec.regions=[{name: eu, learners: 1}, {name: asia, learners: 1}]",
    "spec.evaluation.everySteps=7",
    "spec.runPolicy.suspend=true",
    "spec.sync.fragments=24",
    "spec.learner.recipe={config: {width: 8}, name: gpt}",
]

# ------------------------------------------------------------------------------ fields

BROKEN_FIELDS: list[tuple[str, Any, str]] = [
    ("spec.steps", 0, "0 is less than 1, the minimum"),
    ("spec.steps", 10**9 + 1, "1000000001 is more than 1000000000, the maximum"),
    ("spec.steps", "5", '"5" is text; write 5 without quotes'),
    ("spec.steps", True, "true is not an integer"),
    ("spec.steps", 1.5, "1.5 is not an integer"),
    ("spec.steps", None, "is empty; give it a value or leave it out"),
    ("spec.seed", -1, "-1 is less than 0, the minimum"),
    ("spec.seed", 2**31, "2147483648 is more than 2147483647, the maximum"),
    ("spec.sync.fragments", 0, "0 is less than 1, the minimum"),
    ("spec.sync.fragments", 1025, "1025 is more than 1024, the maximum"),
    ("spec.sync.interval", 10**9 + 1, "1000000001 is more than 1000000000, the maximum"),
    ("spec.sync.overlap", 0, "0 is less than 1, the minimum"),
    ("spec.sync.quorum", 0, "0 is less than 1, the minimum"),
    ("spec.sync.grace.maxSteps", 1, '1 is a number; write it as a quoted decimal: "1"'),
    (
        "spec.sync.grace.maxSteps",
        1e-5,
        '1e-05 is a number; write it as a quoted decimal: "0.00001"',
    ),
    ("spec.sync.grace.maxSteps", "-1", '"-1" is not a decimal'),
    ("spec.sync.grace.safety", "1", "1 is not less than 1"),
    ("spec.sync.grace.safety", "0.99999999999999999999", "is not a decimal"),
    ("spec.sync.merge", "radial", '"radial" is not one of Radial or Average'),
    ("spec.sync.averageParameters", "x", '"x" is not a list'),
    ("spec.sync.frozen", "ship", '"ship" is not one of Keep or Ship'),
    ("spec.sync.buffers", "Keep", '"Keep" is not one of Average or Initial'),
    ("spec.sync.movingBuffers", "x", '"x" is not a list'),
    ("spec.sync.outer.learningRate", "0", "0 is not more than 0"),
    ("spec.sync.outer.learningRate", "0.000000000", "0.000000000 is not more than 0"),
    ("spec.sync.outer.learningRate", "00.7", '"00.7" is not a decimal'),
    ("spec.sync.outer.learningRate", "1e-3", '"1e-3" is not a decimal'),
    ("spec.sync.outer.learningRate", "0.7\n", "is not a decimal"),
    ("spec.sync.outer.momentum", "1.0", "1.0 is not less than 1"),
    ("spec.sync.outer.nesterov", 1, "1 is neither true nor false"),
    ("spec.sync.wire.up", "int8", '"int8" is not one of FP32, BF16, Int8 or Int4'),
    ("spec.sync.wire.down", "Int8", '"Int8" is not one of FP32 or BF16'),
    ("spec.learner.recipe.name", "gpt2", '"gpt2" is not one of gpt'),
    ("spec.learner.command", [], "is empty; at least 1 is required"),
    ("spec.learner.podsPerLearner", 4097, "4097 is more than 4096, the maximum"),
    ("spec.learner.env", [{"name": "A", "value": 1}], '1 is not text; quote it: "1"'),
    ("spec.learner.env", [{"name": "A"}, {"name": "A"}], 'two entries have the name "A"'),
    ("spec.learner.env", [{"name": ""}], '"" is not the name of an environment variable'),
    ("spec.learner.env", [{"name": "LR=3"}], '"LR=3" is not the name of an environment variable'),
    ("spec.learner.env", [{"name": "LÄR"}], '"LÄR" is not the name of an environment variable'),
    ("spec.learner.env", [{"name": "A\n"}], "is not the name of an environment variable"),
    ("spec.learner.env", [{"name": "A" * 254}], "use at most 253 printable ASCII characters"),
    ("spec.learner.env", [{"name": "A", "value": "x\0y"}], "a NUL character"),
    ("spec.learner.command", ["python", "\0"], "a NUL character"),
    ("spec.learner.resources", {"requests": {"cpu": 0.5}}, "0.5 is not a quantity"),
    ("spec.learner.checkpoint.everySteps", 0, "0 is less than 1, the minimum"),
    ("spec.learner.checkpoint.keep", 1001, "1001 is more than 1000, the maximum"),
    ("spec.learner.ports.health", 80, "80 is less than 1024, the minimum"),
    ("spec.syncer.ports.sync", 65536, "65536 is more than 65535, the maximum"),
    ("spec.learner.podTemplate", {"nodeSelector": {}}, "unknown field"),
    ("spec.regions", [], "is empty; at least 1 is required"),
    ("spec.regions", [{"name": f"r{i}", "learners": 1} for i in range(65)], "65 entries are more"),
    ("spec.regions", [{"name": "eu", "learners": 1}] * 2, 'two entries have the name "eu"'),
    ("spec.regions", [{"name": "eu"}], "missing; it is required"),
    ("spec.regions[0].learners", -1, "-1 is less than 0, the minimum"),
    ("spec.regions[0].learners", 1001, "1001 is more than 1000, the maximum"),
    ("spec.regions[0].name", "EU", '"EU" is not a region name'),
    ("spec.regions[0].name", "eu-", '"eu-" is not a region name'),
    ("spec.regions[0].name", "e" * 25, "is not a region name; use at most 24"),
    ("spec.regions[0].name", "syncer", '"syncer" is reserved for the job\'s own objects'),
    ("spec.regions[0].name", "evaluator", '"evaluator" is reserved for'),
    ("spec.regions[0].name", "spec", '"spec" is reserved for'),
    ("spec.regions[0].name", False, 'false is not text; quote it: "false"'),
    ("spec.regions[0].cluster", "EU", '"EU" is not the name of a cluster; write region.name of'),
    ("spec.regions[0].cluster", "e" * 25, "is not the name of a cluster; write region.name"),
    ("spec.syncer.service.type", "External", "is not one of ClusterIP, NodePort or LoadBalancer"),
    ("spec.syncer.service.port", 0, "0 is less than 1, the minimum"),
    ("spec.syncer.service.port", 65536, "65536 is more than 65535, the maximum"),
    ("spec.syncer.service.nodePort", 65536, "65536 is more than 65535, the maximum"),
    ("spec.syncer.service.ipFamilyPolicy", "DualStack", '"DualStack" does not match ^'),
    ("spec.syncer.service.loadBalancerClass", "a b", '"a b" does not match ^'),
    ("spec.syncer.service.loadBalancerSourceRanges", ["10.0.0.1"], '"10.0.0.1" is not a range of'),
    ("spec.syncer.service.loadBalancerSourceRanges", ["10.0.0/8"], "is not a range of addresses"),
    ("spec.syncer.service.loadBalancerSourceRanges", ["10.0.0.0/33"], "is not a range of"),
    ("spec.syncer.service.loadBalancerSourceRanges", ["fd00::/129"], "is not a range of"),
    ("spec.syncer.service.loadBalancerSourceRanges", ["::ffff:1.2.3.4/120"], "is not a range of"),
    ("spec.syncer.checkpoint.everySteps", 10**9 + 1, "is more than 1000000000"),
    ("spec.syncer.checkpoint.keep", 0, "0 is less than 1, the minimum"),
    ("spec.syncer.storage.size", "10Gb", "'10Gb' is not a quantity"),
    ("spec.syncer.storage.size", {}, "{} is not a quantity"),
    ("spec.syncer.storage.size", 10**20, "100000000000000000000 is not a quantity"),
    ("spec.syncer.storage.storageClassName", "Fast SSD", '"Fast SSD" does not match ^'),
    ("spec.learner.image", "x" * 1025, "1025 characters are more than 1024, the maximum"),
    ("spec.learner.command", ["x"] * 257, "257 entries are more than 256, the maximum"),
    ("spec.learner.recipe.config", {str(i): i for i in range(257)}, "257 entries are more than"),
    ("spec.evaluation", {}, "missing; it is required"),
    ("spec.evaluation.everySteps", 0, "0 is less than 1, the minimum"),
    ("spec.tls.mode", "mTLS", '"mTLS" is not one of Disabled, Secret or CertManager'),
    ("spec.runPolicy.suspend", "yes", '"yes" is neither true nor false'),
    ("spec.runPolicy.ttlSecondsAfterFinished", -1, "-1 is less than 0, the minimum"),
    ("spec.runPolicy.activeDeadlineSeconds", 2**31, "is more than 2147483647"),
    ("spec.runPolicy.learnerRestartLimit", "3", '"3" is text; write 3 without quotes'),
    ("spec.runPolicy.cleanupPolicy", "Some", "is not one of None, Running or All"),
    ("metadata.name", "1job", '"1job" is not a job name'),
    ("metadata.name", "My_Job", '"My_Job" is not a job name'),
    ("metadata.name", "j" * 51, "is not a job name; use at most 50"),
]

FITTING_FIELDS: list[tuple[str, Any]] = [
    ("spec.steps", 10**9),
    ("spec.seed", 2**31 - 1),
    ("spec.sync.grace.maxSteps", "0"),
    ("spec.sync.grace.safety", "0.999999999"),
    ("spec.sync.outer.learningRate", "0.000000001"),
    ("spec.sync.outer.momentum", "0"),
    ("spec.regions[0].learners", 0),
    ("spec.regions[0].name", "0"),
    ("spec.regions[0].name", "e" * 24),
    ("spec.regions[0].cluster", ""),
    ("spec.regions[0].cluster", "e" * 24),
    ("spec.learner.env", [{"name": "".join(map(chr, range(32, 127))).replace("=", "")}]),
    ("spec.learner.env", [{"name": "A" * 253, "value": "\n\té = 1"}]),
    ("spec.learner.resources.requests", {"cpu": 2, "memory": "1.5Gi"}),
    ("spec.runPolicy.ttlSecondsAfterFinished", None),
    ("metadata.name", "j" * 49),
    ("metadata.labels[app.kubernetes.io/name]", "x"),
]
