"""Generated jobs that the API server accepts, for property tests."""

from typing import Any

from hypothesis import strategies as st

from diloco_job.names import JOB_PATTERN, MAX_CHILD_NAME, REGION_PATTERN, RESERVED_REGIONS
from diloco_job.rules import rule_problems
from diloco_job.types import API_VERSION, KIND, DiLoCoJob

_PLAIN = st.none() | st.booleans() | st.integers(-5, 10**12) | st.text("a$(/é\n", max_size=6)
ANYTHING = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "value", "$x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value."""

_PROCESS_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)
_SOME_NAMES = ["main", "side", "state", "spec", "tls", "tmp", "HOME", "DILOCO_JOB", "A"]
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(_SOME_NAMES) | ANYTHING,
        "mountPath": st.sampled_from(["/tmp", "/data"]),
        "containerPort": st.sampled_from([9090, 80, "x"]),
        "image": st.just("i"),
        "env": ANYTHING,
        "emptyDir": st.just({}),
        "startupProbe": ANYTHING,
    },
)
_NESTED = ("env", "ports", "volumeMounts", "securityContext", "command", "resources")
_CONTAINER = st.builds(
    lambda entry, more: {**entry, **more},
    _ENTRY,
    st.dictionaries(st.sampled_from(_NESTED), st.lists(_ENTRY, max_size=3) | ANYTHING, max_size=3),
)
POD_SPECS = st.dictionaries(
    st.sampled_from(
        [
            "containers",
            "initContainers",
            "volumes",
            "tolerations",
            "imagePullSecrets",
            "nodeSelector",
            "affinity",
            "serviceAccountName",
            "securityContext",
            "hostNetwork",
            "terminationGracePeriodSeconds",
        ]
    ),
    st.lists(_CONTAINER | ANYTHING, max_size=3) | ANYTHING,
    max_size=4,
)
"""Content of podTemplate.spec: valid, unusual or invalid."""


def manifests() -> st.SearchStrategy[dict[str, Any]]:
    """Valid manifests as plain data."""
    return _manifests().filter(lambda data: not rule_problems(DiLoCoJob.model_validate(data)))


def jobs() -> st.SearchStrategy[DiLoCoJob]:
    """Valid jobs."""
    return manifests().map(DiLoCoJob.model_validate)


@st.composite
def _manifests(draw: st.DrawFn) -> dict[str, Any]:
    short = draw(st.booleans())
    regions = st.from_regex(REGION_PATTERN, fullmatch=True).filter(
        lambda name: len(name) <= (8 if short else 24) and name not in RESERVED_REGIONS
    )
    names = draw(st.lists(regions, min_size=1, max_size=4, unique=True))
    longest = max(map(len, names))
    job = draw(
        st.from_regex(JOB_PATTERN, fullmatch=True).filter(
            lambda name: len(name) + 1 + longest <= MAX_CHILD_NAME
        )
    )
    learners = [draw(st.integers(0, 5)) for _ in names]
    learners[0] = max(1, learners[0])
    fragments = draw(st.integers(1, 30))
    interval = draw(st.integers(max(3, fragments), 60))
    template = st.fixed_dictionaries(
        {},
        optional={
            "metadata": st.fixed_dictionaries(
                {}, optional={"labels": st.just({"a": "b", "diloco.dev/job": "mine"})}
            ),
            "spec": POD_SPECS,
        },
    )
    resources = st.sampled_from([{}, {"limits": {"nvidia.com/gpu": 1, "memory": "2Gi"}}])
    config = st.dictionaries(st.sampled_from(["batch", "data"]), ANYTHING, max_size=2)
    tls = draw(st.sampled_from(["Disabled", "Secret", "CertManager"]))
    own = draw(st.booleans())
    program = {"command": ["python", "a$b.py"]} if own else {"recipe": {"name": "gpt"}}
    spec = {
        "steps": draw(st.integers(1, 10**9)),
        "sync": {
            "fragments": fragments,
            "interval": interval,
            "overlap": min(2, fragments),
            "quorum": draw(st.integers(1, sum(learners))),
        },
        "learner": {
            **program,
            "podsPerLearner": draw(st.sampled_from([1, 1, 4])) if own else 1,
            "image": draw(st.sampled_from(["", "mine:1"])),
            "env": draw(
                st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["A", "B", "HOME", "DILOCO_SPEC"])},
                        optional={"value": _PROCESS_TEXT, "valueFrom": config},
                    ),
                    unique_by=lambda entry: entry["name"],
                    max_size=3,
                )
            ),
            "resources": draw(resources),
            "podTemplate": draw(template),
        },
        "regions": [
            {
                "name": name,
                "learners": count,
                "cluster": draw(st.sampled_from(["", "", *names])),
                "config": draw(config),
                "resources": draw(resources),
                "podTemplate": draw(template),
            }
            for name, count in zip(names, learners, strict=True)
        ],
        "syncer": {
            "region": draw(st.sampled_from(["", *names])),
            "endpoint": "" if tls == "Disabled" else draw(st.sampled_from(["", "a.b:7070"])),
            "podTemplate": draw(template),
            "service": {"type": draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]))},
        },
        "tls": {"mode": tls, "secretName": "certs", "issuerRef": {"name": "ca"}},
        "runPolicy": draw(st.sampled_from([{}, {"learnerRestartLimit": 3}])),
    }
    if draw(st.booleans()):
        spec["evaluation"] = {"everySteps": 5, **({"command": ["e"]} if own else {})}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job}, "spec": spec}
