"""
Numbers as people read them.

Pure.
"""

from __future__ import annotations

import signal


def count(value: float) -> str:
    """
    A count with three digits that matter.

    >>> count(532), count(16400), count(2_097_152)
    ('532', '16.4 k', '2.10 M')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{scaled:#.3g} {unit}".replace(". ", " ")
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """
    An amount of bytes.

    >>> size(512), size(3 << 20)
    ('512 B', '3.00 MiB')
    """
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} B" if unit == "B" else f"{value:#.3g} {unit}".replace(". ", " ")


def duration(seconds: float) -> str:
    """
    A duration in its two largest units.

    >>> duration(4.26), duration(271), duration(7322)
    ('4.3 s', '4 min 31 s', '2 h 02 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def ending(code: int) -> str:
    """
    How a process ended; a negative code is that of a signal.

    >>> ending(1), ending(-9)
    ('exit code 1', 'signal 9 (SIGKILL)')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
