"""
Formats numbers, times and text for people.

Pure.
"""

from __future__ import annotations

import signal
from datetime import datetime

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0x2028,
    0x2029,
    *_BIDI,
    *range(0xD800, 0xE000),
    0xFEFF,
)
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\t\n"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""
    Text from a peer, a file or a cluster as a terminal may show it.

    Control characters (C0, DEL, C1), line and paragraph separators, bidirectional controls and
    surrogates become escapes: otherwise a name could move the cursor, color what follows, forge a
    line or change the order of what is read. The escapes are those of JSON, so JSON stays valid.

    Args:
        text: any.
        lines: keep tabs and newlines.

    >>> print(printable("eu/0\n\x1b[31m\u202egnp."))
    eu/0\u000a\u001b[31m\u202egnp.
    """
    return text.translate(_ESCAPES_IN_LINES if lines else _ESCAPES)


def count(value: float) -> str:
    """
    A count with three significant digits.

    >>> count(532), count(16400), count(999_900), count(2_097_152)
    ('532', '16.4 k', '1.00 M', '2.10 M')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        # What would be rounded to 1000 of a unit is 1 of the next.
        if value >= (size if unit == "k" else 0.9995 * size):
            return f"{_digits(value / (1e3 if unit == 'k' else size))} {unit}"
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """
    An amount of bytes.

    >>> size(512), size(1_047_600), size(3 << 20)
    ('512 B', '1023 KiB', '3.00 MiB')
    """
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:  # otherwise it would be rounded to 1024
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} B" if unit == "B" else f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, and all digits of a whole number that has more; never an exponent."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".removesuffix(".")


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


def wall_text(when: datetime) -> str:
    """A wall clock time in the format of all files of a run."""
    return when.isoformat(timespec="milliseconds")


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


def shorten(text: str, most: int) -> str:
    """
    At most `most` printable characters of a text that a peer chose, with a mark where it was cut.

    >>> shorten("abcdefgh", 5), shorten("a\\x1b[31m", 9)
    ('abcd…', 'a?[31m')
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)
