"""
Why a connection failed: gRPC's description of it ↔ a stable reason, with what to do. Pure.
"""

from __future__ import annotations

import re

# Messages of gRPC 1.80 to 1.85, measured in tests/integration/test_tls.py; the first match counts.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "CertificateExpired",
        r"certificate has expired",
        "the certificate of the syncer or of its authority has expired: renew the Secret there",
    ),
    (
        "CertificateNotYetValid",
        r"certificate is not yet valid",
        "the syncer's certificate is not valid yet: check the clocks of both clusters",
    ),
    (
        "CertificateOfOtherAuthority",
        r"CERTIFICATE_VERIFY_FAILED",
        "the syncer's certificate was not issued by the authority in the local ca.crt: the Secrets of all "
        "clusters must come from the same authority",
    ),
    (
        "CertificateNotForSyncer",
        r"Hostname Verification Check failed",
        "the certificate of the server at this address lacks the DNS name <job>-syncer: check the "
        "address and the Secret of the syncer's region",
    ),
    (
        "PlainText",
        r"WRONG_VERSION_NUMBER|Trying to connect an http1|Failed parsing HTTP/2",
        "the server at this address did not negotiate TLS: check the address, and spec.tls of the "
        "job in both clusters",
    ),
    (
        "ConnectionClosed",
        r"Handshake read failed \((Socket closed|.*reset)",
        "the connection was closed before the handshake: by a load balancer without a running "
        "syncer, or by a syncer that is starting",
    ),
    (
        "HandshakeRefused",
        # TLS 1.3: a client has finished its handshake when the server checks its certificate.
        r"failed to connect.*(Socket closed|Connection reset by peer)",
        "the syncer accepted the connection and closed it: it requires TLS with a valid certificate "
        "of its authority; check tls.crt here, and the log of the syncer",
    ),
    (
        "ConnectionRefused",
        r"Connection refused",
        "nothing listens at this address: the syncer is not running, or the address is wrong",
    ),
    (
        "NameUnknown",
        r"lookup failed|DNS resolution|errors resolving|Domain name not found",
        "the host name of the syncer cannot be resolved here: check spec.syncer.endpoint and DNS",
    ),
    (
        "Unreachable",
        r"[Nn]o route to host|[Uu]nreachable",
        "the address cannot be reached from here: check routes and firewalls",
    ),
    (
        "DialTimeout",
        # The time limit of a connection shows as the shutdown of the step that it waited for.
        r"Deadline Exceeded|DEADLINE_EXCEEDED|[Tt]imed out|[Tt]imeout|Endpoint closing"
        r"|handshaker shutdown",
        "no answer within the deadline: check firewalls and the network between the clusters",
    ),
)


def explain(details: str) -> str:
    """
    The stable reason for gRPC's description of a failed connection; "": not known.

    Takes gRPC's details, or the message of the UnavailableError made of them.
    """
    return next((reason for reason, pattern, _ in _REASONS if re.search(pattern, details)), "")


def advice(reason: str) -> str:
    """What a reason means and what to do, in one sentence; "" for an unknown reason."""
    return next((text for known, _, text in _REASONS if known == reason), "")
