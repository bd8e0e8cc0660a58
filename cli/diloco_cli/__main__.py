"""
The `diloco` command: composition root of the commands in `programs`, `runs`, `tapes`, `chaos`, `jobs` and
`worlds`.

Every command reads its arguments, calls one function and prints. Exit codes: 0 success, 2 invalid
command line or manifest, 1 anything else; errors go to standard error. Commands import what they need
when they run, so that `diloco validate` starts quickly.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup

    from diloco.errors import EXIT_USAGE, ConfigError, DilocoError
    from diloco.runtime.signals import handled
    from diloco_cli import chaos, jobs, programs, runs, tapes, worlds
    from diloco_cli.options import echo
except KeyboardInterrupt:  # Ctrl-C before a command has begun: nothing needs to be undone
    raise SystemExit(130) from None

GROUPS = {
    "Start a training program": (programs.new, programs.doctor),
    "Run a job on this machine": (runs.run, runs.suspend, runs.resume, runs.kill),
    "Test a job": (chaos.chaos,),
    "Inspect a run": (runs.status, runs.report, runs.audit, tapes.replay, tapes.tape),
    "Use the model": (runs.export, runs.sample),
    "Work with manifests and clusters": (
        *(jobs.validate, jobs.render, jobs.crd),
        *(jobs.certs, jobs.logs),
    ),
    "Compare settings": (worlds.experiment,),
    "Test DiLoCo itself": (worlds.sim,),
}


class Grouped(TyperGroup):
    """A command whose help lists its subcommands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section per group."""
        for title, functions in GROUPS.items():
            with formatter.section(title):
                commands = [self.commands[function.__name__] for function in functions]
                width = formatter.width - 12
                formatter.write_dl(
                    [
                        (command.name or "", command.get_short_help_str(width))
                        for command in commands
                    ]
                )


app = typer.Typer(
    name="diloco",
    cls=Grouped,
    help="Train one model across regions on hardware that fails.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for function in (function for functions in GROUPS.values() for function in functions):
    app.command()(function)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"diloco {version('diloco')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train one model across regions on hardware that fails."""


def main() -> None:
    """Entry point: expected errors are printed without a traceback."""
    try:
        with handled((signal.SIGTERM, signal.SIGHUP), _end):
            app(prog_name="diloco")  # also for `python -m diloco_cli`
    except ConfigError as error:
        echo(str(error), error=True)
        sys.exit(EXIT_USAGE)
    except DilocoError as error:
        echo(str(error), error=True)
        sys.exit(1)
    except OSError as error:
        echo(f"{error.filename or 'diloco'}: {error.strerror or error}", error=True)
        sys.exit(1)


def _end(number: int) -> None:
    """As after Ctrl-C, what is left is removed: files that are not complete, and the pod that read a volume."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
