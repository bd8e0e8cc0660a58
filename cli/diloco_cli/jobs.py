"""Commands about manifests and about jobs in a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.runtime.formatting import printable
from diloco_cli.options import (
    Context,
    Format,
    Manifest,
    Namespace,
    ObjectFormat,
    ObjectOutput,
    Output,
    Sets,
    announce,
    echo,
    show,
    show_json,
)


def validate(file: Manifest, sets: Sets = None, output: Format = Output.table) -> None:
    """Check a manifest and report all of its problems."""
    from diloco_job.manifest_file import examine, refusal
    from diloco_local.commands import local_problems
    from diloco_local.manifest import read_manifest

    job, problems = examine(read_manifest(file), sets or ())
    only_cluster = local_problems(job) if job is not None and not problems else []
    if output is Output.json:
        show_json({"valid": not problems, "problems": problems, "needsCluster": only_cluster})
    if problems or job is None:
        raise refusal(str(file), problems)
    if output is Output.table:
        regions = ", ".join(f"{region.name} {region.learners}" for region in job.spec.regions)
        echo(
            f"{file}: {job.metadata.name} is valid: {job.spec.steps} steps, "
            f"{job.spec.num_learners} learners ({regions}), quorum {job.spec.sync.quorum}, "
            f"syncer in {job.spec.syncer_region}"
        )
        for problem in only_cluster:
            echo(f"only in a cluster: {problem}")


def render(
    file: Manifest,
    region: Annotated[
        str, typer.Option(help="The operator's region.name. Default: all regions.")
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(
            help="Namespace of the objects. Default: the manifest's, else default.",
            show_default=False,
        ),
    ] = "",
    worker_image: Annotated[
        str, typer.Option(help="The worker image of the chart.", show_default=False)
    ] = "",
    syncer_image: Annotated[
        str, typer.Option(help="The syncer image of the chart.", show_default=False)
    ] = "",
    sets: Sets = None,
    output: ObjectFormat = ObjectOutput.yaml,
) -> None:
    """Print the objects that the operator applies for a job."""
    from importlib.metadata import version

    from diloco_cli import render as rendering
    from diloco_local.manifest import load_job
    from diloco_operator.resources.operator_scope import OperatorScope

    scope = OperatorScope(
        region=region,
        worker_image=worker_image or f"diloco-worker:{version('diloco')}",
        syncer_image=syncer_image or f"diloco-syncer:{version('diloco')}",
    )
    objects = rendering.render(load_job(file, sets or ()), scope, namespace)
    if output is ObjectOutput.json:
        show_json({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    else:
        typer.echo(rendering.to_yaml(objects), nl=False)


def crd(output: ObjectFormat = ObjectOutput.yaml) -> None:
    """Print the CustomResourceDefinition of DiLoCoJob."""
    from diloco_job.crd import crd as definition
    from diloco_job.crd import crd_yaml

    if output is ObjectOutput.json:
        show_json(definition())
    else:
        typer.echo(crd_yaml(), nl=False)


def certs(
    file: Manifest,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Output directory; keep it secret: it contains ca.key."
        ),
    ],
    days: Annotated[int, typer.Option(min=1, help="Validity of the certificates.")] = 365,
    namespace: Annotated[
        str,
        typer.Option(help="Namespace of the Secrets. Default: the manifest's.", show_default=False),
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An additional name or address of the syncer."),
    ] = None,
    sets: Sets = None,
    output: Format = Output.table,
) -> None:
    """Create the certificates of a job: one Secret for each cluster."""
    from datetime import UTC, datetime

    from diloco_cli.authority import describe, write_certs
    from diloco_local.manifest import load_job

    job = load_job(file, sets or ())
    written = write_certs(
        job, out, now=datetime.now(UTC), days=days, namespace=namespace, hosts=host or ()
    )
    show(output, [secret.to_dict() for secret in written], describe(out, written))


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a job in a cluster.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Run directory to write.")],
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Fetch the files of a job in a cluster.

    The result is a run directory for `diloco report` and `diloco audit`.
    """
    from diloco_cli.remote import RemoteJob, fetch_run

    remote = RemoteJob(name=job, namespace=namespace, context=context, announce=announce)
    for missing in fetch_run(remote, to):
        echo(printable(missing))
    echo(f"{to}: fetched; verify every merge with: diloco audit --dir {to}")
