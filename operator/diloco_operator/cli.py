"""
The `diloco` command.

Thin: every command reads its arguments, calls one function and prints. Exit codes: 0 done, 2 the
command line or the manifest is wrong, 1 anything else; errors go to standard error. What a command
needs is imported inside it, so that `diloco validate` stays quick.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import EXIT_USAGE, ConfigError, DilocoError

app = typer.Typer(
    name="diloco",
    help="Train one model across regions on hardware that fails.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RUNS = Path("runs")
"""Where run directories lie unless --dir says otherwise."""


class Output(StrEnum):
    """How data is printed."""

    table = "table"
    json = "json"


class RenderOutput(StrEnum):
    """How Kubernetes objects are printed."""

    yaml = "yaml"
    json = "json"


ManifestArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The manifest, a YAML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field: spec.sync.quorum=2."),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The run directory. Default: the only one in runs/."),
]
JobOption = Annotated[
    str | None, typer.Option("--job", metavar="NAME", help="A job in a cluster, by kubectl.")
]
NamespaceOption = Annotated[
    str, typer.Option("-n", "--namespace", help="Its namespace. Default: the context's.")
]
ContextOption = Annotated[str, typer.Option("--context", help="Default: the current one.")]
OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How data is printed.")]


@app.command()
def validate(
    file: ManifestArgument, sets: SetOption = None, output: OutputOption = Output.table
) -> None:
    """Check a manifest and say everything that is wrong with it."""
    from diloco_operator.local.commands import local_problems
    from diloco_operator.manifest import examine, refusal

    job, problems = examine(file, sets or ())
    only_cluster = local_problems(job) if job is not None and not problems else []
    if output is Output.json:
        _print_json({"valid": not problems, "problems": problems, "needsCluster": only_cluster})
    if problems or job is None:
        raise refusal(file, problems)
    if output is Output.table:
        regions = ", ".join(f"{region.name} {region.learners}" for region in job.spec.regions)
        typer.echo(
            f"{file}: {job.metadata.name} is good: {job.spec.steps} steps, "
            f"{job.spec.num_learners} learners ({regions}), quorum {job.spec.sync.quorum}, "
            f"syncer in {job.spec.syncer_region}"
        )
        for problem in only_cluster:
            typer.echo(f"only in a cluster: {problem}")


@app.command()
def run(
    file: ManifestArgument,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="The run directory. Default: runs/<job>."),
    ] = None,
    sets: SetOption = None,
) -> None:
    """Run a job on this machine, or go on with it."""
    from diloco_operator.local import supervisor
    from diloco_operator.manifest import load_job

    job = load_job(file, sets or ())
    raise typer.Exit(supervisor.run(file, job, directory or RUNS / job.metadata.name))


@app.command()
def status(
    positional: Annotated[Path | None, typer.Argument(metavar="[DIR]", show_default=False)] = None,
    directory: DirOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show where a run stands."""
    from rich.console import Console

    from diloco_operator.local.progress import Rate, view
    from diloco_operator.local.rundir import RunDir

    found = RunDir(_run_dir(positional or directory)).status()
    if output is Output.json:
        _print_json(found)
    else:
        Console().print(view(found, Rate()))
        if found["message"]:
            typer.echo(found["message"])


@app.command()
def kill(
    learner: Annotated[str, typer.Argument(metavar="LEARNER", help="Its name, such as eu/0.")],
    directory: DirOption = None,
) -> None:
    """Kill a learner as a crash would; it is started again."""
    from diloco_operator.local import control

    pid = control.kill(_run_dir(directory), learner)
    typer.echo(f"killed {learner} (pid {pid})")


@app.command()
def suspend(directory: DirOption = None) -> None:
    """Stop a run cleanly, so that it can be resumed."""
    from diloco_operator.local import control

    run_dir = _run_dir(directory)
    control.suspend(run_dir)
    typer.echo(f"{run_dir}: suspended; go on with: diloco resume --dir {run_dir}")


@app.command()
def resume(directory: DirOption = None) -> None:
    """Go on with a run that was stopped."""
    from diloco_operator.local import control

    raise typer.Exit(control.resume(_run_dir(directory)))


@app.command()
def report(directory: DirOption = None, output: OutputOption = Output.table) -> None:
    """Write report.html and report.png of a run."""
    from diloco_operator.local.report import write_report

    run_dir = _run_dir(directory)
    write_report(run_dir)
    files = {name: str(run_dir / f"report.{name}") for name in ("html", "png")}
    _print(output, files, "\n".join(files.values()))


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="PATH", help="Directory for the model.")],
    directory: DirOption = None,
    job: JobOption = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    output: OutputOption = Output.table,
) -> None:
    """Copy the finished model, of a run here or of a job in a cluster, and check the copy."""
    from diloco_operator.local.export import export_model

    if job is None:
        facts = export_model(_run_dir(directory), to)
    else:
        from diloco_operator.remote import MODEL, RemoteJob

        with tempfile.TemporaryDirectory(prefix="diloco-export-") as fetched:
            remote = RemoteJob(name=job, namespace=namespace, context=context)
            remote.fetch(MODEL, Path(fetched))
            facts = export_model(Path(fetched), to)
    said = f"{to}: model.safetensors and model.json, SHA-256 {facts['sha256']}"
    _print(output, {"path": str(to), **facts}, said)


@app.command()
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a job in a cluster.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Run directory to write.")],
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Fetch what a job in a cluster has written, as a run directory for `report` and `audit`."""
    from diloco_operator.remote import RemoteJob, fetch_run

    for missing in fetch_run(RemoteJob(name=job, namespace=namespace, context=context), to):
        typer.echo(missing)
    typer.echo(f"{to}: fetched; check every merge with: diloco audit --dir {to}")


@app.command()
def sample(
    directory: DirOption = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="How many bytes to write.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Equal seeds, equal text.")] = None,
) -> None:
    """Let the model of a built-in recipe write text."""
    model = _run_dir(directory) / "model"
    if not (model / "model.json").is_file():
        raise ConfigError(f"{model}: no model there yet; a run writes it when it is complete")
    given = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "seed": seed}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    # A process of its own: the operator never imports torch.
    argv = [sys.executable, "-m", "diloco_worker.sample", f"--model={model}", *words]
    done = subprocess.run(argv, check=False)  # noqa: S603
    if done.returncode:
        raise typer.Exit(EXIT_USAGE if done.returncode == EXIT_USAGE else 1)


@app.command()
def audit(
    positional: Annotated[Path | None, typer.Argument(metavar="[DIR]", show_default=False)] = None,
    directory: DirOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Check every merge of a run, from events.jsonl alone."""
    from diloco_operator.audit import audit as examine_events

    events = _run_dir(positional or directory) / "events.jsonl"
    with events.open(encoding="utf-8", errors="replace") as lines:
        found = examine_events(lines)
    text = "\n".join([found.verdict, *found.violations, *found.notes])
    _print(output, {"ok": found.ok, "verdict": found.verdict, **asdict(found)}, text)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def render(
    file: ManifestArgument,
    region: Annotated[
        str, typer.Option(help="The operator's region.name. Default: all regions are its own.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(help="Default: the manifest's, else default.", show_default=False)
    ] = "",
    worker_image: Annotated[
        str, typer.Option(help="The chart's image of learners.", show_default=False)
    ] = "",
    syncer_image: Annotated[
        str, typer.Option(help="The chart's image of the syncer.", show_default=False)
    ] = "",
    sets: SetOption = None,
    output: Annotated[
        RenderOutput, typer.Option("-o", "--output", help="How objects are printed.")
    ] = RenderOutput.yaml,
) -> None:
    """Print what the operator would apply for a job."""
    from importlib.metadata import version

    from diloco_operator import render as rendering
    from diloco_operator.manifest import load_job
    from diloco_operator.view import View

    view = View(
        region=region,
        worker_image=worker_image or f"diloco-worker:{version('diloco')}",
        syncer_image=syncer_image or f"diloco-syncer:{version('diloco')}",
    )
    objects = rendering.render(load_job(file, sets or ()), view, namespace)
    if output is RenderOutput.json:
        _print_json({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    else:
        typer.echo(rendering.to_yaml(objects), nl=False)


@app.command()
def crd(
    output: Annotated[
        RenderOutput, typer.Option("-o", "--output", help="How it is printed.")
    ] = RenderOutput.yaml,
) -> None:
    """Print the CustomResourceDefinition of DiLoCoJob."""
    from diloco_operator import crd as made

    if output is RenderOutput.json:
        _print_json(made.crd())
    else:
        typer.echo(made.crd_yaml(), nl=False)


@app.command()
def certs(
    file: ManifestArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Keep it: ca.key is in there.")],
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are good.")] = 365,
    namespace: Annotated[
        str, typer.Option(help="Of the Secrets. Default: the manifest's.", show_default=False)
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One more name or address of the syncer."),
    ] = None,
    sets: SetOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Make certificates for a job: an authority, and a Secret for each region's cluster."""
    from datetime import UTC, datetime

    from diloco_operator.authority import describe, write_certs
    from diloco_operator.manifest import load_job

    job = load_job(file, sets or ())
    written = write_certs(
        job, out, now=datetime.now(UTC), days=days, namespace=namespace, hosts=host or ()
    )
    _print(output, [one.to_dict() for one in written], describe(out, written))


def _run_dir(given: Path | None) -> Path:
    """The run directory meant: the one given, else the only one in runs/."""
    if given is not None:
        if not (given / "job.yaml").is_file():
            raise ConfigError(f"{given}: no run there (it has no job.yaml); see diloco run")
        return given
    found = sorted(path.parent for path in RUNS.glob("*/job.yaml"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"{RUNS}: no run there; give --dir, or start one with diloco run")
    raise ConfigError(f"{RUNS}: several runs; give --dir one of {', '.join(map(str, found))}")


def _print(output: Output, data: Any, text: str) -> None:
    if output is Output.json:
        _print_json(data)
    else:
        typer.echo(text)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def main() -> None:
    """Entry point: errors that a person can act on are printed without a traceback."""
    try:
        app()
    except ConfigError as error:
        typer.echo(str(error), err=True)
        sys.exit(EXIT_USAGE)
    except DilocoError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
    except OSError as error:
        typer.echo(f"{error.filename or 'diloco'}: {error.strerror or error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
