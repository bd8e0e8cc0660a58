"""How the machines of a learner connect: the first rank of each dials rank 0, whose address the store has."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import platform
import secrets
import socket
import time
from collections.abc import Iterable, Sequence

from diloco.errors import DilocoError, UnavailableError
from diloco_worker.ipc import relay
from diloco_worker.trainer.rank_group import RankGroup

log = logging.getLogger(__name__)

DIAL_SECONDS = 30.0
"""How long the first rank of a machine tries to reach rank 0."""

TRY_SECONDS = 5.0
"""For one address."""

PAUSE_SECONDS = 0.2

MARGIN_SECONDS = 5.0
"""Rank 0 listens for so much longer than the others dial."""


def connect(group: RankGroup, *, master: str, port: int) -> dict[int, socket.socket]:
    """
    Connect the machines; all ranks call it.

    Args:
        group: of several machines.
        master: host of rank 0, as this rank reaches it; "": not known.
        port: on which rank 0 listens; 0: any free one.

    Returns:
        In rank 0, a connection per other machine, by its number; in the first rank of another, one by 0; else none.

    Raises:
        UnavailableError: two machines cannot connect.
    """
    listener, error, text = None, None, ""
    if group.rank == 0:
        try:
            listener = _listen(master, port)
            known = [secrets.token_hex(relay.SECRET_BYTES) for _ in range(2)]
            text = json.dumps([[master, platform.node()], listener.getsockname()[1], *known])
        except OSError as problem:
            error = UnavailableError(
                f"learner {group.learner}: rank 0 cannot listen on port {port} for ranks on other machines: "
                f"{problem.strerror or problem}"
            )
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as closing:
        if listener is not None:
            closing.enter_context(listener)
        hosts, port, first, other = json.loads(group.agree(text, error)[0])
        own, peer = bytes.fromhex(first), bytes.fromhex(other)
        missing = ""
        if listener is not None:
            missing = _accept(listener, group, found, own=own, peer=peer)
        elif group.rank == group.leader:
            try:
                found[0] = _dial([master, *hosts], port, group, own=peer, peer=own)
            except UnavailableError as problem:
                error = problem
        try:
            group.agree("", error)
            group.agree("", UnavailableError(missing) if missing else None)
        except DilocoError:
            for sock in found.values():
                sock.close()
            raise
    return found


def _listen(master: str, port: int) -> socket.socket:
    """On all addresses, or, if the ranks find each other there, on that of this machine alone."""
    if _is_loopback(master):
        return socket.create_server((master, port), family=_family(master))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_loopback(host: str) -> bool:
    """Whether a host is, by its text, this machine: a name can have another address on each machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _accept(
    listener: socket.socket, group: RankGroup, found: dict[int, socket.socket], *, own: bytes, peer: bytes
) -> str:  # fmt: skip
    """Wait until each other machine has connected; returns which have not."""
    deadline = time.monotonic() + DIAL_SECONDS + MARGIN_SECONDS
    expected = set(range(1, len(group.machines)))
    while expected - found.keys() and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            sock, address = listener.accept()
        except OSError:
            continue
        try:
            machine = relay.welcome(sock, own=own, other=peer)
            if machine not in expected or machine in found:
                raise OSError(f"it states to be machine {machine}")
        except OSError as problem:
            sock.close()
            log.warning(
                "%s: refused a connection from %s to the port for ranks on other machines: %s",
                group.learner, address[0], problem,
            )  # fmt: skip
            continue
        found[machine] = sock
    absent = [group.machines[number][0] for number in sorted(expected - found.keys())]
    if not absent:
        return ""
    return f"learner {group.learner}: {group.named(absent)} did not connect to rank 0 within {DIAL_SECONDS:.0f} s"


def _dial(
    hosts: Iterable[str], port: int, group: RankGroup, *, own: bytes, peer: bytes
) -> socket.socket:
    """
    Connect to rank 0.

    Raises:
        UnavailableError: none of its addresses answers.
    """
    deadline = time.monotonic() + DIAL_SECONDS
    tried: dict[str, str] = {}
    while True:
        for host in dict.fromkeys(filter(None, hosts)):
            try:
                sock = socket.create_connection((host, port), timeout=TRY_SECONDS)
            except OSError as problem:
                tried[host] = str(problem.strerror or problem)
                continue
            try:
                relay.greet(sock, group.machine, own=own, other=peer)
            except OSError as problem:
                sock.close()
                tried[host] = str(problem)
                continue
            return sock
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"learner {group.learner}: rank {group.rank} on {platform.node()} cannot connect to rank 0: "
                f"{_reasons(tried, port)}; expected the machines of a learner to reach each other on this port "
                "(DILOCO_RELAY_PORT sets another)"
            )
        time.sleep(PAUSE_SECONDS)


def _reasons(tried: dict[str, str], port: int) -> str:
    texts: Sequence[str] = [f"{host} port {port}: {why}" for host, why in tried.items()]
    return ", ".join(texts) or "no address of it is known"
