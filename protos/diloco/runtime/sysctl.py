"""
Kernel settings that slow transfers between distant regions.
"""

from __future__ import annotations

from pathlib import Path

_SMALL_BUFFER_BYTES = 16 << 20


def kernel_warnings(settings: Path = Path("/proc/sys/net/ipv4")) -> list[str]:
    """Messages on TCP settings that slow transfers between distant regions; Linux only."""
    most = {name: _fields(settings / name)[-1:] for name in ("tcp_wmem", "tcp_rmem")}
    warnings = [
        f"net.ipv4.{name} allows {int(size) >> 20} MiB per connection, about "
        f"{int(size) * 8 / 0.15 / 1e9:.1f} Gbit/s over 100 ms; "
        "raise its maximum to 64 MiB or more between distant regions"
        for name, sizes in most.items()
        for size in sizes
        if int(size) < _SMALL_BUFFER_BYTES
    ]
    cubic = _fields(settings / "tcp_congestion_control") == ["cubic"]
    if cubic and _fields(settings / "tcp_slow_start_after_idle") == ["1"]:
        warnings.append(
            "net.ipv4.tcp_congestion_control is cubic and tcp_slow_start_after_idle is 1: every "
            "transfer starts slowly; set it to 0, or use bbr, between distant regions"
        )
    return warnings


def _fields(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
