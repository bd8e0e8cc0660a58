"""
The command of every process of a plan on one machine.

Pure, but for a look at the disk in `problems`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_operator.api import DiLoCoJob
from diloco_operator.local.children import Command
from diloco_operator.local.rundir import RunDir
from diloco_operator.local.settings import Settings
from diloco_operator.plan import PYTHON, Plan, evaluator_env, learner_env

SAMPLE_TOKENS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs beside the learners'; tests put others in."""

    kernels: tuple[str, ...] = (PYTHON, "-m", "diloco.kernels")
    syncer: tuple[str, ...] | None = None
    """None: the plan's."""
    evaluator: tuple[str, ...] | None = None
    """None: the plan's."""
    sample: tuple[str, ...] = (PYTHON, "-m", "diloco_worker.sample")
    report: tuple[str, ...] = (PYTHON, "-m", "diloco_operator.cli", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Makes the commands; `port` and `endpoint` are what a plan cannot know."""

    plan: Plan
    rundir: RunDir
    settings: Settings
    directory: Path
    """The manifest's folder: where learners and the user's evaluator start."""
    programs: Programs

    def of(self, name: str, *, port: int, endpoint: str, restarts: int = 0) -> Command:
        """
        The command of one process of the plan.

        Args:
            name: "kernels", "syncer", "evaluator" or a learner's name.
            port: where the syncer must listen; 0: it chooses.
            endpoint: host:port of the syncer; "" while it has none.
            restarts: earlier lives of this process.
        """
        if name == "kernels":
            return self._command(name, self.programs.kernels)
        if name == "syncer":
            program = self.programs.syncer or self.plan.syncer.argv
            return self._command(name, (*program, *self._syncer_flags(port)))
        threads = self.settings.threads(learners=len(self.plan.learners))
        state = self.rundir.state_of(name)
        state.mkdir(parents=True, exist_ok=True)
        if name == "evaluator" and self.plan.evaluator is not None:
            scored = self.plan.evaluator
            own = evaluator_env(
                self.plan, scored, syncer=endpoint, spec_path=self.rundir.spec, state_dir=state
            )
            return self._command(name, self.programs.evaluator or scored.argv, {**threads, **own})
        learner = self.plan.learner(name)
        if learner is None:
            raise ValueError(f"{name} is not part of the plan")
        own = learner_env(
            self.plan, learner, syncer=endpoint, spec_path=self.rundir.spec, state_dir=state
        )
        own["DILOCO_RESTARTS"] = str(restarts)
        return self._command(name, learner.argv, {**threads, **own})

    def sample(self) -> Command:
        """The command that writes a sample of the final model to `RunDir.sample`."""
        flags = ("--model", str(self.rundir.model), "--tokens", str(SAMPLE_TOKENS))
        return self._command("sample", (*self.programs.sample, *flags), output=self.rundir.sample)

    def report(self) -> Command:
        """The command that writes the report."""
        return self._command("report", (*self.programs.report, "--dir", str(self.rundir.path)))

    def problems(self) -> list[str]:
        """Why the learners' program cannot be started; empty when it can."""
        if not self.plan.learners:
            return []
        command = self.of(self.plan.learners[0].name, port=0, endpoint="")
        word = command.argv[0]
        if os.sep in word:
            found = os.access(command.directory / word, os.X_OK)
        else:
            found = shutil.which(word, path=command.environment["PATH"]) is not None
        if found:
            return []
        return [
            f"spec.learner.command: {word} is no program; looked in {command.directory} and PATH"
        ]

    def _syncer_flags(self, port: int) -> tuple[str, ...]:
        run = self.rundir
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
            log=self.rundir.log(name),
            output=output,
        )


def local_problems(job: DiLoCoJob) -> list[str]:
    """What a job asks for that one machine does not have, as `path: message`."""
    said = [
        f"spec.learner.env[{one.name}].valueFrom: only a cluster can look it up; give a value"
        for one in job.spec.learner.env
        if one.value_from is not None
    ]
    if (pods := job.spec.learner.pods_per_learner) > 1:
        said.append(
            f"spec.learner.podsPerLearner: {pods}; `diloco run` starts one process per learner, "
            "so use 1, and torchrun in learner.command for several devices"
        )
    if job.spec.run_policy.suspend:
        said.append("spec.runPolicy.suspend: true; set it to false to run the job")
    return said
