"""`diloco chaos`: a run with injected faults."""

from __future__ import annotations

from typing import Annotated

import typer

from diloco_cli.options import RUNS, Manifest, NewDirectory, Sets, echo

Rate = float | None


def _rate(what: str) -> typer.models.OptionInfo:
    return typer.Option(metavar="PER_MINUTE", help=what, show_default=False)  # type: ignore[no-any-return]


def chaos(
    file: Manifest,
    directory: NewDirectory = None,
    sets: Sets = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**53, help="Random seed; the same seed gives the same plan.")
    ] = 0,
    kill_rate: Annotated[Rate, _rate("Kill a learner; it restarts.")] = None,
    syncer_kill_rate: Annotated[Rate, _rate("Kill the syncer; it restarts.")] = None,
    pause_rate: Annotated[Rate, _rate("Stop a learner, and continue it.")] = None,
    slow_rate: Annotated[Rate, _rate("Stop a learner for 50 to 90 % of each second.")] = None,
    cut_rate: Annotated[Rate, _rate("Close the connections of a learner, and new ones.")] = None,
    hang_rate: Annotated[
        Rate, _rate("Pass nothing on the connections of a learner, and keep them open.")
    ] = None,
    delay_rate: Annotated[
        Rate, _rate("Delay the connections of a learner and limit their bandwidth.")
    ] = None,
    corrupt_rate: Annotated[Rate, _rate("Invert bytes of fragments on their way.")] = None,
    spare: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Learners that are not disturbed at any time. Default: the quorum, and at most all but one.",
            show_default=False,
        ),
    ] = None,
    longest: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a fault lasts at most.")
    ] = 20.0,
    minutes: Annotated[
        float,
        typer.Option(metavar="MINUTES", help="Inject faults for so long, from the first step on."),
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, and run nothing.")
    ] = False,
) -> None:
    """Run a job on this machine and inject faults.

    Rates are faults per minute of all learners together, from 0 to 60. Kinds without a rate do not occur; without any
    rate, all kinds do.

    Exit status: as of run, but 0 only if the job is complete and the audit found no violation.
    """
    from diloco_local.chaos import run
    from diloco_local.chaos.fault_plan import RATES, Options
    from diloco_local.faults import Kind
    from diloco_local.manifest import load_job

    job = load_job(file, sets or ())
    given = {
        Kind.KILL: kill_rate, Kind.SYNCER_KILL: syncer_kill_rate, Kind.PAUSE: pause_rate, Kind.SLOW: slow_rate,
        Kind.CUT: cut_rate, Kind.HANG: hang_rate, Kind.DELAY: delay_rate, Kind.CORRUPT: corrupt_rate,
    }  # fmt: skip
    rates = {kind: rate for kind, rate in given.items() if rate is not None}
    if spare is None:
        spare = min(job.spec.sync.quorum, job.spec.num_learners - 1)
    options = Options(
        seed=seed, rates=rates or RATES, spare=spare, longest_seconds=longest, minutes=minutes
    )
    if dry_run:
        for line in run.dry_run(job, options):
            echo(line)
        return
    raise typer.Exit(run.run(file, job, directory or RUNS / job.metadata.name, options))
