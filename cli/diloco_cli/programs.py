"""Commands for the user's own training program: its files, and its examination."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.runtime.formatting import duration, printable, size
from diloco_cli.options import RUNS, Format, Manifest, Output, Sets, echo, show

if TYPE_CHECKING:
    from diloco_local.doctor import Diagnosis


def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
) -> None:
    """Write a program of your own: loop, job, evaluation and image."""
    from diloco_cli.template_files import write_template

    job = write_template(directory)
    echo(
        f"{directory}: wrote the training program of job {job}. Next:\n"
        f"  cd {directory}\n"
        "  python train.py          # the program alone\n"
        "  diloco doctor job.yaml   # three steps of it, then what would go wrong in a job\n"
        "  diloco run job.yaml      # two learners, one model\n"
        "Then replace Model, dataset and loss_on in train.py with your own."
    )


def doctor(
    file: Manifest,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Directory whose free disk space is checked."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=86400,
            help="Limit for each start of the program, including the evaluation at the end.",
        ),
    ] = 300,
    sets: Sets = None,
    output: Format = Output.table,
) -> None:
    """Run three steps of a program alone, and report all problems.

    Files that the program itself writes, such as a model at its end, are written as in a run, and replaced.

    Exit status: 0 no problem was seen; 1 otherwise; 2 invalid manifest or command line.
    """
    from diloco_local.doctor import examine
    from diloco_local.manifest import load_job

    job = load_job(file, sets or ())
    found = examine(file, job, directory or RUNS / job.metadata.name, seconds=seconds)
    data = {
        "healthy": found.healthy,
        "findings": [asdict(finding) for finding in found.findings],
        "examinations": [asdict(examination) for examination in found.examinations],
    }
    show(output, data, _described(found, str(file)))
    if not found.healthy:
        raise typer.Exit(1)


def _described(found: Diagnosis, name: str) -> str:
    lines = []
    for examination in found.examinations:
        record = examination.record
        steps = 0 if record is None else len(record.steps)
        facts = f"{steps} steps in {duration(examination.seconds)}"
        if record is not None and record.begin:
            facts = f"joined at global step {record.begin}, {facts}"
        if record is not None and record.peak_bytes:
            facts += f", {size(record.peak_bytes)} of memory"
        lines.append(f"{examination.learner}: {facts}")
    for finding in found.findings:
        where = f"{', '.join(finding.learners)}: " if finding.learners else ""
        lines.append(f"{'problem' if finding.problem else 'note'}: {where}{finding.text}")
    problems = sum(finding.problem for finding in found.findings)
    verdict = "no problem was seen" if not problems else f"{problems} to fix"
    return "\n".join(map(printable, [*lines, f"{name}: {verdict}"]))
