"""
What syncer and learners agree on about learners that answer others (peer.proto). Pure.
"""

from __future__ import annotations

import re

MAX_ADDRESS = 261
"""Characters of host:port: a DNS name has at most 255."""

_ADDRESS = re.compile(r"(?P<host>[-.\w]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})", re.ASCII)


def is_address(text: str) -> bool:
    """
    Whether it is host:port with a port that can be dialled.

    >>> is_address("127.0.0.1:80"), is_address("[::1]:80"), is_address("a:0"), is_address("unix:/tmp/a")
    (True, True, False, False)
    """
    found = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    return found is not None and 0 < int(found["port"]) < 1 << 16
