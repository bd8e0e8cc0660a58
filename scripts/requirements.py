"""Print what an extra of pyproject.toml needs, one requirement a line; used by the Dockerfile."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def needs(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Requirements of an extra; extras of our own that it names are followed."""
    for requirement in project["optional-dependencies"][extra]:
        name, _, inner = requirement.partition("[")
        if name == project["name"]:
            for other in inner.rstrip("]").split(","):
                yield from needs(project, other)
        else:
            yield requirement


def main() -> None:
    """The pyproject.toml of the working directory, the extra on the command line."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*project["dependencies"], *needs(project, sys.argv[1]), sep="\n")


if __name__ == "__main__":
    main()
