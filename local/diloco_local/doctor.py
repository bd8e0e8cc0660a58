"""
`diloco doctor`: starts the program of one or two learners without a syncer, and reads what they recorded.

The processes run in the directory of the manifest, as in `diloco run`; their own files are in a scratch directory.
What was recorded is judged by `diagnosis`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.errors import ConfigError, DamagedError, StorageError
from diloco.runtime import files
from diloco.runtime.memory_limit import memory_bytes
from diloco_agent.output import MAX_LOG_BYTES
from diloco_agent.processes import Command, Processes, ProcessExit
from diloco_job import quantities
from diloco_job.plan import LearnerPlan, Plan
from diloco_job.plan import plan as plan_of
from diloco_job.types import DiLoCoJob, Resources
from diloco_local.commands import Commands, Programs, local_problems
from diloco_local.diagnosis import (
    STEPS,
    Examination,
    Finding,
    Record,
    Surroundings,
    diagnose,
)
from diloco_local.run_directory import RunDir
from diloco_local.settings import Settings

POLL_SECONDS = 0.1
ENDING_SECONDS = 30.0
"""After its third step the program has at least this long to end."""
KILL_SECONDS = 5.0
"""From SIGTERM to SIGKILL of a program that did not end."""

LATER_STEP = 997
"""
The second learner joins at this global step, or at the last prime up to half of a shorter job: a schedule with a
shorter period is not where it was at step 0.
"""

NO_SYNCER = "127.0.0.1:1"
"""A program whose version of diloco knows no examination finds no syncer here."""

MAX_RECORD_BYTES = 1 << 20
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was examined, and what was found."""

    examinations: tuple[Examination, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; notes may remain."""
        return not any(finding.problem for finding in self.findings)


def examine(job_path: Path, job: DiLoCoJob, directory: Path, *, seconds: float) -> Diagnosis:
    """
    Start the program as the first learner of a job and, if there are more, as the last one.

    Args:
        job_path: the manifest; the program starts in its directory.
        job: the job of the manifest, with the changes of `--set`.
        directory: the run directory that a run would use; nothing is written there.
        seconds: limit for each start.

    Raises:
        ConfigError: the job cannot run on one machine, or has no learners.
        StorageError: the scratch directory cannot be written.
    """
    plan = plan_of(job)
    problems = local_problems(job)
    if not plan.learners:
        problems.append("spec.regions: no learners; doctor needs one to examine")
    if problems:
        raise ConfigError(f"{job_path}: cannot be examined:\n" + "\n".join(problems))
    later = _later_step(plan.spec.steps)
    first, last = plan.learners[0], plan.learners[-1]
    chosen = [(first, 0)] if first is last else [(first, 0), (last, later)]
    try:
        with tempfile.TemporaryDirectory(
            prefix="diloco-doctor-", ignore_cleanup_errors=True
        ) as scratch:
            run_dir = RunDir(Path(scratch) / "run")
            with run_dir.hold():
                commands = Commands(
                    plan=plan,
                    run_dir=run_dir,
                    settings=Settings.from_environment(),
                    directory=run_dir.adopt(job_path, job, plan.spec),
                    programs=Programs(),
                )
                if problems := commands.problems():
                    raise ConfigError(f"{job_path}: cannot be examined:\n" + "\n".join(problems))
                examinations = tuple(
                    _start(commands, learner, step, seconds=seconds) for learner, step in chosen
                )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageError(f"{where}{error.strerror or error}; nothing was examined") from None
    findings = diagnose(examinations, _surroundings(job, plan, directory))
    return Diagnosis(examinations=examinations, findings=tuple(findings))


def _later_step(total: int) -> int:
    """
    Where the second learner joins a job of so many steps.

    >>> _later_step(1), _later_step(100), _later_step(10_000)
    (0, 47, 997)
    """
    half = min(total // 2, LATER_STEP)
    primes = (n for n in range(half, 1, -1) if all(n % divisor for divisor in range(2, n)))
    return next(primes, half)


def _start(commands: Commands, learner: LearnerPlan, step: int, *, seconds: float) -> Examination:
    command = commands.of(learner.name, port=0, endpoint=NO_SYNCER)
    file = commands.run_dir.state_of(learner.name) / "examination.json"
    own = {"DILOCO_EXAMINATION": str(file), "DILOCO_EXAMINATION_STEP": str(step)}
    command = replace(command, environment={**command.environment, **own})
    started = time.monotonic()
    done_at, exited = _watch(command, file, started + seconds)
    now = time.monotonic()
    record = _read(file)
    return Examination(
        learner=learner.name,
        record=record,
        code=exited.code if exited is not None else None,
        cause=exited.cause if exited is not None else _last_line(command.log),
        seconds=now - started,
        ending_seconds=0.0 if done_at is None else now - done_at,
    )


def _watch(
    command: Command, file: Path, deadline: float
) -> tuple[float | None, ProcessExit | None]:
    """
    Run a program until it ends, or stop it at the deadline, and earlier if it makes steps after the third.

    Returns:
        When its third step was seen, and how it ended; None: it did not.
    """
    processes, done_at = Processes(), None
    try:
        processes.start(command)
        while not (exits := processes.exits()):
            processes.limit_logs()
            now = time.monotonic()
            if done_at is None and _is_complete(file):
                done_at, deadline = now, max(deadline, now + ENDING_SECONDS)
            if now > deadline or (done_at is not None and _goes_on(file, now - done_at)):
                _terminate(processes, command.name)
                break
            time.sleep(POLL_SECONDS)
        return done_at, exits[0] if exits else None
    finally:
        processes.close()


def _terminate(processes: Processes, name: str) -> None:
    """Let a program that did not end complete a file that it writes."""
    processes.terminate(name)
    deadline = time.monotonic() + KILL_SECONDS
    while not processes.exits() and time.monotonic() < deadline:
        processes.limit_logs()
        time.sleep(POLL_SECONDS)


def _is_complete(file: Path) -> bool:
    record = _read(file)
    return record is not None and len(record.steps) == STEPS


def _goes_on(file: Path, seconds: float) -> bool:
    """Whether a program still makes steps so long after the third: more time would not end it."""
    if seconds < ENDING_SECONDS:
        return False
    record = _read(file)
    return record is not None and record.calls_after_done > 1


def _read(file: Path) -> Record | None:
    try:
        if file.stat().st_size > MAX_RECORD_BYTES:
            return None
        return Record.from_json(files.read(file))
    except (OSError, DamagedError):
        return None


def _last_line(log: Path | None) -> str:
    if log is None:
        return ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def _surroundings(job: DiLoCoJob, plan: Plan, directory: Path) -> Surroundings:
    spec = job.spec
    regions = {region.name: region for region in spec.regions}
    limits = {
        learner.name: _memory(regions[learner.region].resources) or _memory(spec.learner.resources)
        for learner in plan.learners
    }
    processes = len(plan.learners) + 1 + (plan.evaluator is not None)
    existing = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir()
    )
    return Surroundings(
        learners=len(plan.learners),
        learner_checkpoints=plan.spec.learner_checkpoint.keep,
        snapshots=plan.spec.syncer_checkpoint.keep,
        # Of each, the log and the earlier one; of learners, also both parts of steps.jsonl.
        log_bytes=2 * MAX_LOG_BYTES * (processes + len(plan.learners)),
        free_bytes=shutil.disk_usage(existing).free,
        memory_bytes=memory_bytes(),
        learner_limits={name: limit for name, limit in limits.items() if limit is not None},
        syncer_limit=_memory(spec.syncer.resources),
        ships_frozen=spec.sync.frozen == "Ship",
    )


def _memory(resources: Resources) -> int | None:
    limit = quantities.amount(resources.limits.get("memory"))
    return None if limit is None else int(limit)
