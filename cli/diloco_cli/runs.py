"""Commands that run, inspect and control jobs on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import EXIT_USAGE, ConfigError
from diloco.runtime.formatting import printable
from diloco_cli.options import (
    RUNS,
    ClusterJob,
    Context,
    Format,
    Manifest,
    Namespace,
    NewDirectory,
    Output,
    PositionalRunDirectory,
    RunDirectory,
    Sets,
    announce,
    echo,
    run_directory,
    show,
    show_json,
)
from diloco_job import quantities

_MOST_NAMED = 8


class ElementType(StrEnum):
    """Element types of an exported model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def run(
    file: Manifest,
    directory: NewDirectory = None,
    sets: Sets = None,
) -> None:
    """Run a job on this machine, or resume it.

    Exit status: 0 complete; 75 suspended, so that it can be resumed; 1 failed, or complete without a
    change of the parameters; 2 invalid manifest or command line; 130 stopped immediately.
    """
    from diloco_local import supervisor
    from diloco_local.manifest import load_job

    job = load_job(file, sets or ())
    raise typer.Exit(supervisor.run(file, job, directory or RUNS / job.metadata.name))


def suspend(positional: PositionalRunDirectory = None, directory: RunDirectory = None) -> None:
    """Stop a run cleanly, so that it can be resumed."""
    from diloco_local import run_control

    run_dir = run_directory(positional or directory)
    run_control.suspend(run_dir)
    echo(f"{run_dir}: suspended; resume it with: diloco resume --dir {run_dir}")


def resume(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    from_snapshot: Annotated[
        int | None,
        typer.Option(
            "--from-snapshot", metavar="STEP", min=0,
            help="Start from the snapshot of this step instead of the newest; 0: start over. "
            "Newer snapshots are set aside.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Resume a run that was stopped."""
    from diloco_local import run_control

    raise typer.Exit(
        run_control.resume(run_directory(positional or directory), from_snapshot=from_snapshot)
    )


def kill(
    learner: Annotated[
        str, typer.Argument(metavar="LEARNER", help="Name of the learner, such as eu/0.")
    ],
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
) -> None:
    """Kill a learner, to simulate a crash; it restarts automatically."""
    from diloco_local import run_control

    pid = run_control.kill(run_directory(positional or directory), learner)
    echo(f"killed {learner} (pid {pid})")


def status(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    job: ClusterJob = None,
    namespace: Namespace = "",
    context: Context = "",
    output: Format = Output.table,
) -> None:
    """Show the state of a run, or of a job in a cluster."""
    from rich.console import Console

    if job is not None:
        from diloco_cli import cluster_status
        from diloco_cli.remote import RemoteJob, learner_problems

        remote = RemoteJob(name=job, namespace=namespace, context=context, announce=announce)
        manifest = remote.read()
        table = output is Output.table
        if table:
            Console().print(
                cluster_status.status_table(manifest)
            )  # at once: learners may not reply
        problems, unknown = learner_problems(remote, manifest.get("spec") or {})
        if not table:
            show_json(cluster_status.document(manifest, problems, unknown))
            return
        if problems:
            Console().print(cluster_status.problem_table(problems))
        if unknown:
            echo(printable(unknown))
        return
    from diloco_local.display import Rate, status_table
    from diloco_local.run_directory import RunDir

    found = RunDir(run_directory(positional or directory)).status()
    if output is Output.json:
        show_json(found)
    else:
        Console().print(status_table(found, Rate()))
        if found["message"]:
            echo(printable(found["message"]))


def report(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    output: Format = Output.table,
) -> None:
    """Write report.html and report.png of a run."""
    from diloco_local.report.page import write_report

    run_dir = run_directory(positional or directory)
    write_report(run_dir)
    files = {name: str(run_dir / f"report.{name}") for name in ("html", "png")}
    show(output, files, "\n".join(files.values()))


def audit(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    output: Format = Output.table,
) -> None:
    """Verify every merge of a run from events.jsonl."""
    from diloco.journal import reader
    from diloco.journal.audit import audit_parts
    from diloco.journal.parts import parts

    events = run_directory(positional or directory) / "events.jsonl"
    if not parts(events):
        raise ConfigError(f"{events}: no such file; the syncer writes it when the job starts")
    found = audit_parts(reader.lines(events))
    rest = filter(None, [found.data, found.recovery])
    text = "\n".join(map(printable, [found.verdict, *found.violations, *found.notes, *rest]))
    show(output, {"ok": found.ok, "verdict": found.verdict, **asdict(found)}, text)
    if not found.ok:
        raise typer.Exit(1)


def export(
    to: Annotated[Path, typer.Option("--to", metavar="PATH", help="Directory for the model.")],
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    job: ClusterJob = None,
    namespace: Namespace = "",
    context: Context = "",
    dtype: Annotated[
        ElementType | None,
        typer.Option(help="Convert floating-point tensors. Default: as they are, float32."),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            metavar="QUANTITY", help="Split the model into files of this size, such as 5G."
        ),
    ] = "",
    files_from: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Also copy config.json, the tokenizer and other files from here."
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write the LoRA adapter in the format of PEFT, with the adapter_config.json of this folder.",
        ),
    ] = None,
    merge_into: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With --adapter: write the base model of this folder with the adapter merged into it.",
        ),
    ] = None,
    dcp: Annotated[
        bool,
        typer.Option(
            "--dcp",
            help="Write a checkpoint of torch.distributed.checkpoint, for models of any sharding.",
        ),
    ] = False,
    output: Format = Output.table,
) -> None:
    """
    Copy a finished model and verify the copy.

    With --dtype, --shard-size or --files-from: as the folder that from_pretrained of Hugging Face's
    libraries loads. With --adapter: as the folder that from_pretrained of PEFT loads. With --dcp: as the
    checkpoint that torch.distributed.checkpoint.load reads.
    """
    from diloco_local.adapter import export_adapter
    from diloco_local.dcp_export import export_dcp
    from diloco_local.export import export_model
    from diloco_local.pretrained import SHARD_BYTES, export_folder

    if merge_into is not None and adapter is None:
        raise ConfigError("--merge-into needs --adapter, the folder with adapter_config.json")
    if adapter is not None and files_from is not None:
        raise ConfigError("--files-from cannot be combined with --adapter; give one of them")
    if adapter is not None and merge_into is None and shard_size:
        raise ConfigError("--shard-size needs --merge-into: an adapter is one file")
    folder = adapter is not None or dtype is not None or bool(shard_size) or files_from is not None
    if dcp and folder:
        raise ConfigError(
            "--dcp cannot be combined with --dtype, --shard-size, --files-from or --adapter; the model that loads it "
            "converts the tensors"
        )
    shard_bytes = _bytes(shard_size) if shard_size else SHARD_BYTES

    def copied(run_dir: Path) -> dict[str, Any]:
        if dcp:
            return export_dcp(run_dir, to)
        if not folder:
            return export_model(run_dir, to)
        if adapter is not None:
            return export_adapter(
                run_dir,
                to,
                config_from=adapter,
                base=merge_into,
                dtype=dtype,
                shard_bytes=shard_bytes,
            )
        return export_folder(
            run_dir, to, dtype=dtype, shard_bytes=shard_bytes, files_from=files_from
        )

    if job is None:
        facts = copied(run_directory(positional or directory))
    else:
        from diloco_cli.remote import RemoteJob, fetch_model

        with tempfile.TemporaryDirectory(prefix="diloco-export-") as fetched:
            remote = RemoteJob(name=job, namespace=namespace, context=context, announce=announce)
            fetch_model(remote, Path(fetched))
            facts = copied(Path(fetched))
    if folder or dcp:
        text = "\n".join(
            f"{to / name}  SHA-256 {digest}" for name, digest in facts["files"].items()
        )
        if replaced := facts.get("alsoReplaced"):
            text += f"\nalso replaced, because the run has other values: {_named(replaced)}"
        if left_out := facts.get("leftOut"):
            text += f"\nnot exported, because the format has no place for them: {_named(left_out)}"
    else:
        text = f"{to}: model.safetensors and model.json, SHA-256 {facts['sha256']}"
    show(output, {"path": str(to), **facts}, text)


def _named(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - _MOST_NAMED} more" if len(tensors) > _MOST_NAMED else ""
    return f"{len(tensors)} tensors: {', '.join(tensors[:_MOST_NAMED])}{more}"


def _bytes(size: str) -> int:
    value = quantities.amount(size)
    if value is None or value < 1:
        raise ConfigError(f"--shard-size {size!r}: expected a quantity of bytes, such as 5G")
    return int(value)


def sample(
    positional: PositionalRunDirectory = None,
    directory: RunDirectory = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Number of bytes to generate.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature; 0: always the most likely byte."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; the same seed gives the same text.")
    ] = None,
) -> None:
    """Generate text with the model of a built-in recipe."""
    model = run_directory(positional or directory) / "model"
    if not (model / "model.json").is_file():
        raise ConfigError(f"{model}: no model yet; a run writes it when it is complete")
    given = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "seed": seed}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    # In its own process: the command line never imports torch.
    argv = [sys.executable, "-m", "diloco_worker.sample", f"--model={model}", *flags]
    done = subprocess.run(argv, check=False)  # noqa: S603
    if done.returncode:
        raise typer.Exit(EXIT_USAGE if done.returncode == EXIT_USAGE else 1)
