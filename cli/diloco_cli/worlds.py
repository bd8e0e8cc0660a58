"""The commands that run in virtual time: each is a program of its own."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import ConfigError


def sim(
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of a single world.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A..B", help="Range of seeds, both ends included."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Global steps of each world.")] = 100,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of worlds that run at the same time.")
    ] = 1,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Search for a smaller world that fails in the same way."),
    ] = False,
) -> None:
    """Simulate jobs under faults and check their guarantees."""
    if (seed is None) is (seeds is None):
        raise ConfigError("give either --seed or --seeds")
    if find_spec("diloco_sim") is None:
        raise ConfigError("the simulator is not installed; install diloco[local]")
    which = [f"--seed={seed}"] if seeds is None else [f"--seeds={seeds}"]
    argv = [sys.executable, "-m", "diloco_sim", *which, f"--steps={steps}", f"--jobs={jobs}"]
    argv += ["--shrink"] if shrink else []
    # In place of this program, so that signals reach it; the command line imports neither syncer nor worker.
    os.execv(sys.executable, argv)  # noqa: S606


def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The study, a YAML file (docs/experiments.md).")
    ],
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where results go. Default: runs/<study>."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="Number of cells to train in parallel. Default: one per core."
        ),
    ] = None,
) -> None:
    """Compare settings of a job: real training in virtual time.

    An interrupted study continues with the cells that are missing. Exit status: 0 every cell has a
    result; 1 some cells have none; 2 invalid study or command line; 130 interrupted.
    """
    if find_spec("diloco_experiment") is None or find_spec("torch") is None:
        raise ConfigError("experiments are not installed; install diloco[local]")
    argv = [sys.executable, "-m", "diloco_experiment", str(file)]
    argv += [f"--dir={directory}"] if directory is not None else []
    argv += [f"--jobs={jobs}"] if jobs is not None else []
    # In place of this program, so that signals reach it.
    os.execv(sys.executable, argv)  # noqa: S606
