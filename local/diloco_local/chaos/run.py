"""`diloco chaos`: a run with faults, and what it shows at its end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diloco.errors import EXIT_DONE
from diloco.runtime.formatting import printable
from diloco.runtime.signals import handled
from diloco_job.plan import plan as plan_of
from diloco_job.types import DiLoCoJob
from diloco_local import supervisor
from diloco_local.chaos.fault_injector import Injector
from diloco_local.chaos.fault_plan import Options, lines, plan
from diloco_local.commands import Programs
from diloco_local.display import console_on
from diloco_local.events import Limits
from diloco_local.faults import Fault
from diloco_local.report.costs import summary
from diloco_local.report.run_files import load
from diloco_local.status import Status

EXIT_FAILED = supervisor.EXIT_FAILED


def learners_of(job: DiLoCoJob) -> tuple[str, ...]:
    """The names of a job's learners."""
    return tuple(learner.name for learner in plan_of(job).learners)


def dry_run(job: DiLoCoJob, options: Options) -> list[str]:
    """
    The plan as lines of text.

    Raises:
        ConfigError: the options do not fit the job.
    """
    learners = learners_of(job)
    options.check(len(learners))
    return list(lines(plan(options, learners), options, len(learners)))


def run(
    job_path: Path,
    job: DiLoCoJob,
    directory: Path,
    options: Options,
    *,
    faults: Sequence[Fault] | None = None,
    clock: Callable[[Status], float] | None = None,
    programs: Programs | None = None,
    limits: Limits | None = None,
) -> int:
    """
    Run a job as `supervisor.run` does and inject faults.

    Args:
        job_path: the manifest.
        job: the job of the manifest.
        directory: the run directory.
        options: of the plan.
        faults: the plan; None: from the options.
        clock: the time of the plan; None: seconds since training began.
        programs: as of `supervisor.run`.
        limits: as of `supervisor.run`.

    Returns:
        The exit code: that of `supervisor.run`, but 1 if the job is complete and the audit found a violation; an
        interrupted audit finds none.

    Raises:
        ConfigError: the options do not fit the job, or it cannot run on one machine or in this directory.
        StorageError: the directory cannot be written.
    """
    learners = learners_of(job)
    options.check(len(learners))
    console = console_on(sys.stdout)
    injector = Injector(
        plan(options, learners) if faults is None else faults, learners, directory.absolute() / "faults.jsonl",
        seed=options.seed, spare=options.spare, clock=clock,
    )  # fmt: skip
    try:
        code = supervisor.run(
            job_path, job, directory, console=console, programs=programs, limits=limits, chaos=injector
        )  # fmt: skip
    finally:
        injector.close()
    try:
        # As of the sample and the report: a terminal that is closed now does not end it.
        with handled((signal.SIGHUP,), lambda _: None):
            return conclude(directory, code, injector.uncounted, console)
    except KeyboardInterrupt:
        console.print("stopped before the audit", soft_wrap=True)
        return code


def conclude(directory: Path, code: int, uncounted: str, console: Console) -> int:
    """
    Print faults, goodput, restarts and the audit of a run.

    Args:
        directory: the run directory.
        code: the exit code so far.
        uncounted: why faults.jsonl cannot tell the faults; "": it can.
        console: where to print.

    Returns:
        The exit code: 1 if `code` is 0 and the audit found a violation.
    """
    run = load(directory)
    shown = [f"faults: {uncounted or 'unknown'}"]
    if run.chaos and not uncounted:
        shown = summary(run, run.chaos)
    for line in (*shown, f"audit: {run.audit.verdict}", *run.audit.violations):
        console.print(Text(printable(line)), soft_wrap=True)
    return EXIT_FAILED if code == EXIT_DONE and not run.audit.ok else code
