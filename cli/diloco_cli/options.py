"""What the commands share: arguments and options, output, choice of the run directory."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import ConfigError
from diloco.runtime.formatting import printable

RUNS = Path("runs")
"""Default location of run directories."""


class Output(StrEnum):
    """Output formats of commands that print data."""

    table = "table"
    json = "json"


class ObjectOutput(StrEnum):
    """Output formats of commands that print Kubernetes objects."""

    yaml = "yaml"
    json = "json"


Manifest = Annotated[
    Path, typer.Argument(metavar="FILE", help="The manifest, a YAML file; - for standard input.")
]
NewDirectory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The run directory. Default: runs/<job>."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field, for example spec.sync.quorum=2."
    ),
]
RunDirectory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The run directory. Default: the only one in runs/."),
]
PositionalRunDirectory = Annotated[
    Path | None, typer.Argument(metavar="DIR", show_default=False, help="The same as --dir.")
]
ClusterJob = Annotated[
    str | None,
    typer.Option("--job", metavar="NAME", help="Use a job in a cluster instead of a run."),
]
Namespace = Annotated[
    str, typer.Option("-n", "--namespace", help="Namespace of the job. Default: the context's.")
]
Context = Annotated[
    str, typer.Option("--context", help="Context of kubectl. Default: the current one.")
]
Format = Annotated[Output, typer.Option("-o", "--output", help="Output format.")]
ObjectFormat = Annotated[ObjectOutput, typer.Option("-o", "--output", help="Output format.")]


def run_directory(given: Path | None) -> Path:
    """The run directory to use: the given one, else the only one in runs/."""
    if given is not None:
        if not (given / "job.yaml").is_file():
            raise ConfigError(f"{given}: not a run directory (no job.yaml); see diloco run")
        return given
    found = sorted(path.parent for path in RUNS.glob("*/job.yaml"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"{RUNS}: no run found; give --dir, or start a run with diloco run")
    raise ConfigError(f"{RUNS}: several runs; give --dir one of {', '.join(map(str, found))}")


def show(output: Output, data: Any, text: str) -> None:
    """Print `data` as JSON, or `text`."""
    if output is Output.json:
        show_json(data)
    else:
        echo(text)


def show_json(data: Any) -> None:
    """Print `data` as JSON."""
    echo(json.dumps(data, indent=2, ensure_ascii=False))


def echo(text: str, *, error: bool = False) -> None:
    """Print text that may come from a peer, a file or a cluster; to standard error if `error`."""
    typer.echo(printable(text, lines=True), err=error)


def announce(text: str) -> None:
    """Show the user what happens; on standard error, apart from what the command prints."""
    echo(text, error=True)
