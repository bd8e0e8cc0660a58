"""
The names in certificates, which alone prove identity. Pure.

URI names list the regions that the holder of a certificate may act for; the DNS name `<job>-syncer`
makes its holder the syncer. Clients verify that DNS name whatever address they dial, so node ports,
load balancers and IP addresses need no names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def server_name(job: str) -> str:
    """The DNS name in the certificate of a job's syncer; the only one that clients verify."""
    return f"{job}-syncer"


def learner_server_name(job: str, region: str) -> str:
    """
    The DNS name in the certificate of a region whose learners answer others.

    >>> learner_server_name("stdlib-gpt", "eu")
    'eu.stdlib-gpt-learners'
    """
    return f"{region}.{job}-learners"


def region_uri(job: str, region: str) -> str:
    """
    The URI name that lets the holder of a certificate act for a region of a job.

    >>> region_uri("stdlib-gpt", "eu")
    'diloco://stdlib-gpt/region/eu'
    """
    return f"diloco://{job}/region/{region}"


def observer_uri(job: str) -> str:
    """
    The URI name that lets the holder of a certificate observe a job: its status, model and scores.

    >>> observer_uri("stdlib-gpt")
    'diloco://stdlib-gpt/observer'
    """
    return f"diloco://{job}/observer"


def regions_of(names: Iterable[str], job: str | None = None) -> tuple[str, ...]:
    """The regions named by URI names, sorted; of the given job, or of any."""
    found = (re.fullmatch(r"diloco://([-a-z0-9]+)/region/([-a-z0-9]+)", name) for name in names)
    return tuple(sorted({name[2] for name in found if name and job in (None, name[1])}))
