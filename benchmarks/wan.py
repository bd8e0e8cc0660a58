"""
An emulated long link: two network namespaces with wan.c between them. Needs root, gcc and `ip`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("wan.c")
NEAR_ADDRESS = "10.9.0.2"
"""In namespace `near`, where the syncer runs."""

_BUFFER_BYTES = 256 << 20
_SETTINGS = (
    f"net.ipv4.tcp_wmem=4096 16384 {_BUFFER_BYTES}",
    f"net.ipv4.tcp_rmem=4096 131072 {_BUFFER_BYTES}",
    "net.ipv4.tcp_slow_start_after_idle=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """A link that is up."""

    far: str
    near: str
    """Names of the namespaces."""
    description: str
    """For the results."""

    @staticmethod
    def inside(namespace: str) -> list[str]:
        """Put before a command to run it there; the process keeps its pid."""
        return ["ip", "netns", "exec", namespace]


def missing() -> str:
    """Why there can be no link on this machine; empty if there can."""
    lacking = [name for name in ("gcc", "ip", "sysctl") if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun does not exist"
    return ""


@contextmanager
def link(*, round_trip_ms: float, rate_mbit: float, mtu: int = 9000) -> Iterator[Wan]:
    """
    A link with a queue of one bandwidth × delay, the same both ways, gone afterwards.

    Raises:
        subprocess.CalledProcessError: this machine does not allow it.
    """
    far, near = (f"diloco-{side}-{os.getpid()}" for side in ("far", "near"))
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-wan-"))
        emulator = str(Path(folder) / "wan")
        _run("gcc", "-O2", "-pthread", "-o", emulator, str(SOURCE))
        for namespace in (far, near):
            _run("ip", "netns", "add", namespace)
            stack.callback(_run, "ip", "netns", "del", namespace)
            for setting in _SETTINGS:
                _run(*Wan.inside(namespace), "sysctl", "-qw", setting)
        queue_mb = max(1.0, rate_mbit / 8 * round_trip_ms / 1000)
        numbers = (round_trip_ms / 2, rate_mbit, queue_mb, mtu)
        process = subprocess.Popen(
            [emulator, far, near, *map(str, numbers)], stdout=subprocess.PIPE, text=True
        )
        stack.callback(_end, process)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(process.wait(), emulator)
        for namespace in (far, near):
            route = ("ip", "route", "replace", "10.9.0.0/24", "dev", "tun0", "congctl", control)
            _run(*Wan.inside(namespace), *route)
        description = (
            f"{rate_mbit:g} Mbit/s, {round_trip_ms:g} ms round trip, queue {queue_mb:.1f} MB, "
            f"MTU {mtu}, {control}, TCP buffers up to {_BUFFER_BYTES >> 20} MiB"
        )
        yield Wan(far=far, near=near, description=description)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    print("emulator:", "; ".join(process.communicate()[0].split("\n")).strip("; "))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
