"""`diloco chaos`: faults in a run on this machine, or in a job in a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import ConfigError
from diloco_cli.options import (
    RUNS,
    ClusterJob,
    Context,
    Namespace,
    NewDirectory,
    Sets,
    announce,
    echo,
)

OptionalManifest = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]", show_default=False,
        help="The manifest of the job to run, a YAML file; - for standard input.",
    ),
]  # fmt: skip

Rate = float | None


def _rate(what: str) -> typer.models.OptionInfo:
    return typer.Option(metavar="PER_MINUTE", help=what, show_default=False)  # type: ignore[no-any-return]


def chaos(
    file: OptionalManifest = None,
    directory: NewDirectory = None,
    sets: Sets = None,
    job: ClusterJob = None,
    namespace: Namespace = "",
    context: Context = "",
    seed: Annotated[
        int, typer.Option(min=0, max=2**53, help="Random seed; the same seed gives the same plan.")
    ] = 0,
    kill_rate: Annotated[Rate, _rate("Kill a learner; it restarts.")] = None,
    syncer_kill_rate: Annotated[Rate, _rate("Kill the syncer; it restarts.")] = None,
    syncer_full_rate: Annotated[
        Rate, _rate("Let no file of the syncer grow, as on a full disk; only on this machine.")
    ] = None,
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
    delete_rate: Annotated[Rate, _rate("Delete the pods of a learner; only in a cluster.")] = None,
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
    """Inject faults into a run, or into a job in a cluster.

    With FILE, the job runs on this machine as with run. With --job, kill, syncer-kill, pause, slow and delete are
    possible, and the files of the job are fetched at the end.

    Rates are faults per minute of all learners together, from 0 to 60. Kinds without a rate do not occur; without any
    rate, all kinds do.

    Exit status: as of run, but 0 only if the job is complete and the audit found no violation. With --job, 0 if the
    audit found no violation and the job did not fail; 130 after Ctrl-C.
    """
    from diloco_local.faults import Kind

    given = {
        Kind.KILL: kill_rate, Kind.SYNCER_KILL: syncer_kill_rate, Kind.SYNCER_FULL: syncer_full_rate,
        Kind.PAUSE: pause_rate, Kind.SLOW: slow_rate, Kind.CUT: cut_rate, Kind.HANG: hang_rate,
        Kind.DELAY: delay_rate, Kind.CORRUPT: corrupt_rate, Kind.DELETE: delete_rate,
    }  # fmt: skip
    rates = {kind: rate for kind, rate in given.items() if rate is not None}
    if job is not None:
        from diloco_cli import cluster_chaos
        from diloco_cli.remote import RemoteJob

        if file is not None or sets:
            raise ConfigError(
                "--job names a job that runs in a cluster, with the manifest it has there: give neither FILE nor --set"
            )
        remote = RemoteJob(name=job, namespace=namespace, context=context, announce=announce)
        wanted = cluster_chaos.Wanted(
            seed=seed, rates=rates, spare=spare, longest_seconds=longest, minutes=minutes
        )
        if dry_run:
            for line in cluster_chaos.dry_run(remote, wanted):
                echo(line)
            return
        raise typer.Exit(cluster_chaos.run(remote, directory or RUNS / job, wanted))
    if file is None:
        raise ConfigError(
            "expected a manifest FILE, to run the job on this machine, or --job NAME of a job in a cluster"
        )
    if namespace or context:
        raise ConfigError(
            f"--namespace and --context are of a job in a cluster: give --job NAME instead of {file}"
        )
    if delete_rate:
        raise ConfigError(
            "--delete-rate: a run on this machine has no pods; give --kill-rate, or --job of a job in a cluster"
        )

    from diloco_local.chaos import run
    from diloco_local.chaos.fault_plan import RATES, Options
    from diloco_local.manifest import load_job

    manifest = load_job(file, sets or ())
    if spare is None:
        spare = min(manifest.spec.sync.quorum, manifest.spec.num_learners - 1)
    options = Options(
        seed=seed, rates=rates or RATES, spare=spare, longest_seconds=longest, minutes=minutes
    )
    if dry_run:
        for line in run.dry_run(manifest, options):
            echo(line)
        return
    raise typer.Exit(run.run(file, manifest, directory or RUNS / manifest.metadata.name, options))
