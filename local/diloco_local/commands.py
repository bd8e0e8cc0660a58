"""
The command of every process of a plan on one machine.

`problems` reads the disk and `of` creates state directories; all else takes and returns values.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.runtime import files
from diloco_agent.processes import Command
from diloco_job.plan import PYTHON, Plan, ProgramPlan, environment
from diloco_job.types import DiLoCoJob
from diloco_local.run_directory import RunDir
from diloco_local.settings import Settings

SAMPLE_TOKENS = 400

WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Our programs; tests replace them."""

    kernels: tuple[str, ...] = (PYTHON, "-m", "diloco.codec.kernels")
    syncer: tuple[str, ...] | None = None
    """None: the plan's."""
    evaluator: tuple[str, ...] | None = None
    """None: the plan's."""
    sample: tuple[str, ...] = (PYTHON, "-m", "diloco_worker.sample")
    report: tuple[str, ...] = (PYTHON, "-m", "diloco_cli", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Builds commands; a plan does not contain the `port` and the `endpoint`."""

    plan: Plan
    run_dir: RunDir
    settings: Settings
    directory: Path
    """Working directory: that of the manifest, which the user's own commands expect."""
    programs: Programs

    def of(self, name: str, *, port: int, endpoint: str, restarts: int = 0) -> Command:
        """
        The command of one process of the plan.

        Args:
            name: "kernels", "syncer", "evaluator" or a learner's name.
            port: where the syncer listens; 0: any free port.
            endpoint: host:port of the syncer; "" before it listens.
            restarts: earlier starts of this process, in earlier runs too.
        """
        if name == "kernels":
            return self._command(name, self.programs.kernels)
        if name == "syncer":
            program = self.programs.syncer or self.plan.syncer.argv
            return self._command(name, (*program, *self._syncer_flags(port)))
        threads = self.settings.threads(learners=len(self.plan.learners))
        state = self.run_dir.state_of(name)
        state.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        if name == "evaluator" and self.plan.evaluator is not None:
            own = self._environment(self.plan.evaluator, endpoint, state) | self._health(name)
            program = self.programs.evaluator or self.plan.evaluator.argv
            return self._command(name, program, {**threads, **own})
        learner = self.plan.learner(name)
        if learner is None:
            raise ValueError(f"{name} is not part of the plan")
        own = self._environment(learner, endpoint, state)
        own |= {"DILOCO_RESTARTS": str(restarts), **self._health(name)}
        if learner.has_peers:
            own["DILOCO_PEER"] = "127.0.0.1:0"
        devices = self.settings.devices_of(
            self.plan.learners.index(learner), learners=len(self.plan.learners)
        )
        return self._command(name, learner.argv, {**threads, **devices, **own})

    def sample(self) -> Command:
        """The command that writes a sample of the final model to `RunDir.sample`."""
        flags = ("--model", str(self.run_dir.model), "--tokens", str(SAMPLE_TOKENS))
        # One token is little work: threads that spin until the next one took five times the processor time,
        # and minutes on a busy machine.
        waits = {} if WAIT_POLICY in self.settings.environment else {WAIT_POLICY: "PASSIVE"}
        argv = (*self.programs.sample, *flags)
        return self._command("sample", argv, waits, output=self.run_dir.sample)

    def report(self) -> Command:
        """The command that writes the report."""
        return self._command("report", (*self.programs.report, "--dir", str(self.run_dir.path)))

    def problems(self) -> list[str]:
        """Why the learners' program cannot start; empty if it can."""
        if not self.plan.learners:
            return []
        command = self.of(self.plan.learners[0].name, port=0, endpoint="")
        program = command.argv[0]
        if os.sep in program:
            found = os.access(command.directory / program, os.X_OK)
        else:
            found = shutil.which(program, path=command.environment["PATH"]) is not None
        if found:
            return []
        return [
            f"spec.learner.command: program {program} not found in {command.directory} or on PATH"
        ]

    def _health(self, name: str) -> dict[str, str]:
        return {"DILOCO_HEALTH_FILE": str(self.run_dir.health_of(name))}

    def _environment(self, process: ProgramPlan, endpoint: str, state: Path) -> dict[str, str]:
        return environment(
            self.plan,
            process,
            syncer=endpoint,
            spec_path=str(self.run_dir.spec),
            state_dir=str(state),
        )

    def _syncer_flags(self, port: int) -> tuple[str, ...]:
        run = self.run_dir
        return (
            *("--spec", str(run.spec)),
            *("--dir", str(run.path)),
            *("--listen", f"127.0.0.1:{port}"),
            *("--endpoint-file", str(run.endpoint)),
        )

    def _command(
        self,
        name: str,
        argv: tuple[str, ...],
        own: Mapping[str, str] | None = None,
        *,
        output: Path | None = None,
    ) -> Command:
        if argv[0] == PYTHON:
            argv = (self.settings.python, *argv[1:])
        return Command(
            name=name,
            argv=argv,
            environment={**self.settings.environment, **(own or {})},
            directory=self.directory,
            log=self.run_dir.log(name),
            output=output,
        )


def local_problems(job: DiLoCoJob) -> list[str]:
    """What a job requires that one machine does not have, as `path: message`."""
    problems = [
        f"spec.learner.env[{variable.name}].valueFrom: only a cluster can resolve it; use value"
        for variable in job.spec.learner.env
        if variable.value_from is not None
    ]
    if (pods := job.spec.learner.pods_per_learner) > 1:
        problems.append(
            f"spec.learner.podsPerLearner: {pods}; `diloco run` starts one process per learner; "
            "use 1, and torchrun in learner.command for several devices"
        )
    if job.spec.run_policy.suspend:
        problems.append("spec.runPolicy.suspend: true; set it to false to run the job")
    return problems
