"""
Reads typed values from environment variables that it is given. Standard library only.

Only a `settings.py` may pass `os.environ` in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from diloco.errors import ConfigError

T = TypeVar("T")

PROXY = r"http://[^\s/]+:[0-9]+/?"
"""An HTTP proxy; gRPC knows no other kind."""


class Environment:
    """
    Environment variables with types; an empty variable counts as not set.

    A value that cannot be used is a problem and reads as the default, so that `check`, called after
    everything was read, can report all problems at once.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._problems: list[str] = []

    def problem(self, message: str) -> None:
        """Add a problem that the caller found."""
        self._problems.append(message)

    def check(self) -> None:
        """
        End of reading.

        Raises:
            ConfigError: a variable is missing or cannot be used; the message names all of them.
        """
        if self._problems:
            raise ConfigError("environment: " + "; ".join(self._problems))

    def text(self, name: str, default: str = "", *, pattern: str = "", expected: str = "") -> str:
        """A text; one that does not match all of `pattern` is not `expected`."""
        text = self._variables.get(name) or default
        if pattern and text != default and not re.fullmatch(pattern, text):
            return self._refuse(name, text, expected, default)
        return text

    def required(self, name: str, expected: str) -> str:
        """A text that must be set; `expected` describes it."""
        text = self._variables.get(name, "")
        if not text:
            self.problem(f"{name} is not set, expected {expected}")
        return text

    def names(self, name: str) -> tuple[str, ...]:
        """Names separated by commas or blanks."""
        return tuple(self.text(name).replace(",", " ").split())

    def choice(self, name: str, *allowed: str) -> str:
        """One of several texts; the first is the default."""
        text = self.text(name, allowed[0])
        return (
            text
            if text in allowed
            else self._refuse(name, text, f"one of {', '.join(allowed)}", allowed[0])
        )

    def path(self, name: str) -> Path | None:
        """A path; None: not set."""
        text = self.text(name)
        return Path(text) if text else None

    def number(
        self, name: str, default: float, *, least: float = -math.inf, most: float = math.inf
    ) -> float:
        """A number from `least` to `most`."""
        text = self.text(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            return value
        return self._refuse(name, text, "a number" + _range(least, most), default)

    def integer(
        self, name: str, default: int, *, least: float = -math.inf, most: float = math.inf
    ) -> int:
        """A whole number from `least` to `most`."""
        text = self.text(name)
        if not text:
            return default
        if re.fullmatch("-?[0-9]+", text) and least <= int(text) <= most:
            return int(text)
        return self._refuse(name, text, "a whole number" + _range(least, most), default)

    def port(self, name: str, default: int) -> int:
        """A port of this machine; 0 has the meaning that the caller gives it."""
        return self.integer(name, default, least=0, most=65535)

    def json_object(self, name: str) -> dict[str, Any]:
        """A JSON object; {}: not set."""
        try:
            value = json.loads(self.text(name, "{}"))
        except ValueError as error:
            self.problem(f"{name}: {error}, expected a JSON object")
            return {}
        if not isinstance(value, dict):
            self.problem(f"{name}: holds a {type(value).__name__}, expected a JSON object")
            return {}
        return value

    def _refuse(self, name: str, text: str, expected: str, default: T) -> T:
        self.problem(f"{name}: {text!r}, expected {expected}")
        return default


def _range(least: float, most: float) -> str:
    if math.isinf(most):
        return "" if math.isinf(least) else f" of at least {least:g}"
    return f" from {least:g} to {most:g}"
