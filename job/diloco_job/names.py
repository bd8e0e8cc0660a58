"""
Names: grammars of names and endpoints, names of a job's objects and learners.

Pure. Patterns use the common subset of Python's `re` and RE2, so that the CRD can contain them
unchanged; in Python use `re.fullmatch`, because `$` also matches before a final newline.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re

JOB_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""A DNS label that starts with a letter: Services are named after the job."""

REGION_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label."""

MAX_REGION_NAME = 24
"""Maximum length of a region name, in characters."""

MAX_REGIONS = 64
"""Maximum number of regions of a job."""

MAX_LEARNERS = 10_000
"""Maximum number of learners of a job, in all its regions."""

MAX_QUEUED = 500
"""Maximum number of learners of a job in a queue of one cluster: each has a StatefulSet with a pod template of its
own, and all of them are in the operator's memory at once."""

MAX_TEMPLATE_BYTES = 4 * 2**20
"""Maximum size of the pod templates of a job's learners together, in bytes of JSON: one for each region, or, in a
queue, for each learner. 500 learners in a queue with templates of this size took 111 MB of memory in an operator that
restarted: each StatefulSet records its template, and each pod has a copy."""

MAX_CHILD_NAME = 52
"""Maximum length of `<job>-<region>`: a StatefulSet's revision label adds 11 characters; labels end at 63."""

RESERVED_REGIONS = ("syncer", "evaluator", "spec")
"""`<job>-<name>` of these is the name of another object of the job."""

DECIMAL_PATTERN = r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?"
"""A quoted decimal; nine digits on each side, so that double and Decimal comparisons agree."""

_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"

SOURCE_RANGE_PATTERN = r"[0-9A-Fa-f:.]{2,39}/(0|[1-9][0-9]{0,2})"
"""An IPv4 or IPv6 range as far as a pattern can decide; `is_source_range` is exact."""
ENDPOINT_PATTERN = rf"(\[[0-9A-Fa-f:.]+\]|{_LABEL}(\.{_LABEL})*):[1-9][0-9]{{0,4}}"
"""host:port, as far as a pattern can check it; `is_endpoint` checks the rest."""

IPV4_PATTERN = r"(^|[.])[0-9]+$|^((0[xX][0-9A-Fa-f]*|[0-9]+)[.])*0[xX][0-9A-Fa-f]*$"
"""To be searched in a host without a line break: it is an IPv4 address in the notation of some resolver, and no name.
In syncer.0xcafe, the last part is a namespace."""

ENV_PATTERN = "[ -<>-~]+"
"""The name of an environment variable: printable ASCII without `=`, as in Kubernetes since 1.34."""

MAX_ENV_NAME = 253

MAX_HOST_NAME = 253
"""Maximum length of the host of an endpoint."""

_SEGMENT = "[A-Za-z0-9_=-][A-Za-z0-9._=-]*"

OBJECTS_URL_PATTERN = (
    rf"((s3|gs|az)://[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9](/{_SEGMENT})*|file://(/{_SEGMENT})+)/?"
)
"""A place for objects. There is no room for credentials, a query or "..", nor for what services encode differently."""

MAX_OBJECTS_URL = 512
"""Maximum length of such a URL."""


def child_name(job: str, suffix: str) -> str:
    """Name of the child object of a job for a region or a role: `<job>-<suffix>`."""
    return f"{job}-{suffix}"


def learner_set_name(job: str, region: str, index: int) -> str:
    """Name of the StatefulSet of one learner, where a region has not one for all."""
    return child_name(job, f"{region}-{index}")


def learner_pod_ordinal(pod: str, job: str, region: str) -> int | None:
    """
    Ordinal of a pod within its region, which counts the pods of all learners; None: another pod.

    >>> learner_pod_ordinal("a-eu-3", "a", "eu"), learner_pod_ordinal("a-eu-1-3", "a", "eu")
    (3, 3)
    """
    found = re.fullmatch(rf"{re.escape(child_name(job, region))}(-[0-9]+)?-([0-9]+)", pod, re.ASCII)
    return int(found[2]) if found else None


def syncer_name(job: str) -> str:
    """Name of the syncer's Deployment, Service and PersistentVolumeClaim."""
    return child_name(job, "syncer")


def evaluator_name(job: str) -> str:
    """Name of the evaluator's Deployment."""
    return child_name(job, "evaluator")


def tls_name(job: str) -> str:
    """Name of the Certificate, and of its Secret, with tls.mode CertManager."""
    return child_name(job, "tls")


def spec_name(job: str, content: str) -> str:
    """Name of the ConfigMap that contains a RunSpec; it depends on the content."""
    return child_name(job, f"spec-{hashlib.sha256(content.encode()).hexdigest()[:10]}")


def learner_name(region: str, index: int) -> str:
    """
    Name of a learner on the wire, in metrics and in events.

    >>> learner_name("eu", 0)
    'eu/0'
    """
    return f"{region}/{index}"


def learner_slug(name: str) -> str:
    """
    The learner's name without the slash, for its directory and its log.

    Distinct names give distinct slugs, because the index follows the last dash.

    >>> learner_slug("eu/0")
    'eu-0'
    """
    return name.replace("/", "-")


def is_local_endpoint(text: str) -> bool:
    """
    True for the endpoint of a loopback, link-local or unspecified address, or of a name for one.

    >>> is_local_endpoint("169.254.169.254:80"), is_local_endpoint("10.0.0.1:80")
    (True, False)
    """
    host = text.rpartition(":")[0].strip("[]")
    if host.rpartition(".")[2].lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_link_local or address.is_unspecified


def is_endpoint(text: str) -> bool:
    """True for host:port with a DNS name, IPv4 or [IPv6] address and a port of 1..65535."""
    if not re.fullmatch(ENDPOINT_PATTERN, text):
        return False
    host, _, port = text.rpartition(":")
    if int(port) > 65535 or len(host) > MAX_HOST_NAME:
        return False
    try:
        if host.startswith("["):
            # Kubernetes does not accept IPv4-mapped IPv6 addresses.
            return ipaddress.IPv6Address(host[1:-1]).ipv4_mapped is None
        if re.search(IPV4_PATTERN, host):
            # No top-level domain is a number, so this must be an IPv4 address. Resolvers also accept
            # hexadecimal numbers and fewer than four, with which one would pass for a name.
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def is_objects_url(text: str) -> bool:
    """
    True for the URL of a place for objects.

    >>> is_objects_url("s3://bucket/runs"), is_objects_url("s3://key:secret@bucket/runs")
    (True, False)
    """
    return bool(re.fullmatch(OBJECTS_URL_PATTERN, text)) and len(text) <= MAX_OBJECTS_URL


def is_source_range(text: str) -> bool:
    """
    True for an address, "/" and the length of a prefix.

    >>> is_source_range("10.0.0.0/8"), is_source_range("10.0.0.0")
    (True, False)
    """
    if not re.fullmatch(SOURCE_RANGE_PATTERN, text):
        return False
    try:
        # Kubernetes does not accept IPv4-mapped IPv6 addresses.
        return getattr(ipaddress.ip_interface(text), "ipv4_mapped", None) is None
    except ValueError:
        return False
