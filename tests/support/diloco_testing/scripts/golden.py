"""
Scripts that people can read: commands, and below each group of them what the real core decided.

    # A comment.
    step eu/0
    wait 30
    ----
    t=0 pull fragment 1 for step 1, attempt 1: eu/0

The format is that of etcd-io/raft's testdata. Everything below `----` up to the next empty line is
written by the test when DILOCO_UPDATE_GOLDEN is set, and compared otherwise.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

SEPARATOR = "----"

Execute = Callable[[Sequence[str]], Sequence[str]]
"""Carries out one command, given as words, and returns lines of output."""


def played(text: str, execute: Execute) -> str:
    """The script with the output that its commands have now."""
    out: list[str] = []
    commands: list[list[str]] = []
    in_output = False
    for line in text.splitlines():
        if line == SEPARATOR:
            found = [answer for command in commands for answer in execute(command)]
            out += [SEPARATOR, *(found or ["ok"])]
            commands, in_output = [], True
        elif in_output and line:
            continue
        else:
            in_output = False
            out.append(line)
            words = shlex.split(line, comments=True)
            if words:
                commands.append(words)
    if commands:
        raise ValueError(f"{SEPARATOR} is missing after: {' '.join(commands[-1])}")
    return "\n".join(out) + "\n"


def check(path: Path, execute: Execute) -> None:
    """Compare a script with what happens now, or rewrite it."""
    text = path.read_text()
    found = played(text, execute)
    if os.environ.get("DILOCO_UPDATE_GOLDEN"):
        path.write_text(found)
    assert found.splitlines() == path.read_text().splitlines()


def split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The plain words of a command, and its key=value words."""
    plain = [word for word in words if "=" not in word]
    return plain, dict(word.split("=", 1) for word in words if "=" in word)
