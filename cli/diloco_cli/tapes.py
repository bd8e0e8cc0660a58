"""Commands that replay a run, and print its tape."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import ConfigError
from diloco_cli.options import PositionalRunDirectory, RunDirectory, echo, run_directory


class TapeAction(StrEnum):
    """What to do with a tape."""

    show = "show"


def replay(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="New directory for the replay. Default: that of the run with -replay at its end."
        ),
    ] = None,
    to: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=1, help="Last global step. Default: that of the run."),
    ] = None,
) -> None:  # fmt: skip
    """Execute a recorded run again, and compare all bits.

    Exit status: 0 identical; 1 something differs, or the replay cannot continue; 2 nothing of the run can
    be replayed.
    """
    from diloco_local.replay import ReplayError
    from diloco_local.replay import replay as replayed

    try:
        run = run_directory(positional or directory)
        difference = replayed(run, to=to, directory=into, show=echo)
    except ReplayError as error:
        echo(str(error), error=True)
        raise typer.Exit(1) from None
    if difference is not None:
        echo(f"differs: {difference}", error=True)
        raise typer.Exit(1)


def tape(
    action: Annotated[TapeAction, typer.Argument(help="show: print it.", show_default=False)],
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
) -> None:
    """Print the recorded decisions of a run."""
    from diloco.journal.tape_text import sentences

    run = run_directory(positional or directory)
    empty = True
    for sentence in sentences(run):
        empty = False
        echo(sentence)
    if empty:
        raise ConfigError(f"{run}: no tape; a run of this release writes it when the job starts")
