"""The processes of the ranks of a learner, as they see each other: in one PID namespace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_NAMED = 16
"""Ranks in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of one rank."""

    pid: int
    started: int
    """In clock ticks since the boot: a later process can have the same PID."""

    @classmethod
    def own(cls) -> RankProcess:
        """This process."""
        found = _state(os.getpid())
        return cls(pid=os.getpid(), started=found[1] if found else 0)

    @property
    def ended(self) -> bool:
        """Whether it has ended; a zombie has, even if its parent never reaps it."""
        found = _state(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.started


def named(
    ranks: Iterable[int], processes: Mapping[int, RankProcess], hosts: Mapping[int, str] | None = None
) -> str:  # fmt: skip
    """
    Ranks with their processes, or with their machines if these are others.

    >>> named([0, 2, 3], {2: RankProcess(pid=7, started=1)}, {3: "b"})
    'rank 0, rank 2 (process 7), rank 3 on b'
    """
    texts = []
    for rank in ranks:
        process, host = processes.get(rank), (hosts or {}).get(rank)
        which = f" (process {process.pid})" if process else f" on {host}" if host else ""
        texts.append(f"rank {rank}{which}")
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return ", ".join(texts[:MOST_NAMED]) + more


def _state(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # After the name of the program, which can have any character.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
