"""
What things are called: grammars of names and endpoints, names of children and learners.

Pure. The patterns are written in the common subset of Python's `re` and RE2, so that the CRD can
carry them as they are; in Python use `re.fullmatch`, because `$` also matches before a final
newline.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re

JOB_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""A DNS label that starts with a letter: Services are named after the job."""

REGION_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label."""

REGION_MOST = 24
"""Longest region name, in characters."""

REGIONS_MOST = 64
"""Most regions of a job."""

CHILD_MOST = 52
"""Longest `<job>-<region>`: a StatefulSet's revision label adds 11 characters; labels end at 63."""

RESERVED_REGIONS = ("syncer", "evaluator", "spec")
"""`<job>-<name>` of these is taken by the job's other children."""

DECIMAL_PATTERN = r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?"
"""A quoted decimal; nine digits on each side, so that a double and a Decimal compare alike."""

_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"

ENDPOINT_PATTERN = rf"(\[[0-9A-Fa-f:.]+\]|{_LABEL}(\.{_LABEL})*):[1-9][0-9]{{0,4}}"
"""host:port as far as a pattern can say it; `is_endpoint` says the rest."""

HOST_MOST = 253
"""Longest host of an endpoint."""


def child_name(job: str, suffix: str) -> str:
    """Name of the child object of a job for a region or a role: `<job>-<suffix>`."""
    return f"{job}-{suffix}"


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
    """Name of the ConfigMap that holds a RunSpec: other content, other name."""
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
    The learner's name where a slash cannot stand: its directory, its log.

    Distinct names give distinct slugs, because what follows the last dash is the index.

    >>> learner_slug("eu/0")
    'eu-0'
    """
    return name.replace("/", "-")


def is_endpoint(text: str) -> bool:
    """True for host:port with a DNS name, IPv4 or [IPv6] address and a port of 1..65535."""
    if not re.fullmatch(ENDPOINT_PATTERN, text):
        return False
    host, _, port = text.rpartition(":")
    if int(port) > 65535 or len(host) > HOST_MOST:
        return False
    try:
        if host.startswith("["):
            # Kubernetes does not take IPv4 written as IPv6 for an address.
            return ipaddress.IPv6Address(host[1:-1]).ipv4_mapped is None
        if host.rpartition(".")[2].isdigit():
            # No top-level domain is a number: what ends in one is meant as an IPv4 address.
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
