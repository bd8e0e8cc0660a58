"""The shell blocks of a page of the documentation, as a person would copy them."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from typing import NamedTuple

_HEADING = re.compile(r"#+ (?P<title>.+)")
_FENCE = re.compile(r" *```(?P<language>\w*)")


class Place(NamedTuple):
    """Where a block is on its page."""

    heading: str
    """The nearest heading above it, whatever its level."""
    number: int
    """Among the shell blocks below that heading, from 1."""


def shell_blocks(page: str) -> dict[Place, str]:
    """
    The ```sh blocks of a page in Markdown, without their indentation.

    Raises:
        ValueError: a block has no end.
    """
    found: dict[Place, str] = {}
    heading, language, block = "", None, list[str]()
    count: Counter[str] = Counter()
    for line in page.splitlines():
        fence = _FENCE.match(line)
        if language is None:
            if title := _HEADING.match(line):
                heading = title["title"]
            elif fence:
                language, block = fence["language"], []
        elif not fence:
            block.append(line)
        else:
            if language == "sh":
                count[heading] += 1
                text = textwrap.dedent("\n".join([*block, ""]))
                found[Place(heading, count[heading])] = text
            language = None
    if language is not None:
        raise ValueError(f"{heading}: a block has no end")
    return found
