"""Print what an extra of pyproject.toml needs, or `build`, one requirement a line; used by the Dockerfile."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(pyproject: dict[str, Any], extra: str) -> list[str]:
    """What an image of this extra gets; "build": what its wheel is built with."""
    if extra == "build":
        return list(pyproject["build-system"]["requires"])
    project = pyproject["project"]
    return [*project["dependencies"], *_needs(project, extra)]


def _needs(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Requirements of an extra; extras of our own that it names are followed."""
    for requirement in project["optional-dependencies"][extra]:
        name, _, inner = requirement.partition("[")
        if name == project["name"]:
            for other in inner.rstrip("]").split(","):
                yield from _needs(project, other)
        else:
            yield requirement


def main() -> None:
    """The pyproject.toml of the working directory, the extra on the command line."""
    print(*requirements(tomllib.loads(Path("pyproject.toml").read_text()), sys.argv[1]), sep="\n")


if __name__ == "__main__":
    main()
