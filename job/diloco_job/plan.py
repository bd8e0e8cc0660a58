"""
What should run for a job: the same plan for one machine and for a cluster.

A plan has processes, their commands and their settings, but no paths, chosen ports, images or pods:
the runtime that carries it out adds those through `environment` or `process_env`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.spec import Checkpoint, RunSpec, canonical
from diloco_job import names
from diloco_job.fields import BILLION
from diloco_job.types import DiLoCoJob, Region

PYTHON = "python"
"""First word of our own programs; the runtime replaces it with its interpreter."""

CHECKPOINT_INTERVALS = 4
"""Of H, between two local checkpoints (docs/adr/0028-checkpoints-in-pieces.md)."""

Env = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """A process that runs a recipe or the user's own program."""

    argv: tuple[str, ...]
    config: Mapping[str, Any]
    """Content of DILOCO_CONFIG."""
    env: Env
    """The user's own variables; only a cluster resolves those with valueFrom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan(ProgramPlan):
    """One learner process (or group of pods)."""

    name: str
    """"<region>/<index>"."""
    region: str
    index: int
    """Within its region."""
    has_peers: bool
    """Whether it takes the state of its optimizers from other learners, and answers those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerPlan:
    """The syncer process."""

    region: str
    argv: tuple[str, ...]
    port: int
    """Port of its Service in a cluster."""
    endpoint: str
    """host:port that other regions dial, or ""."""
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorPlan(ProgramPlan):
    """The process that scores the syncer's Θ. Its `config` is that of no region."""

    every_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """What a job has once, however many learners it has."""

    spec: RunSpec
    syncer: SyncerPlan
    evaluator: EvaluatorPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(SharedPlan):
    """Everything that should run."""

    learners: tuple[LearnerPlan, ...]
    """In the order of the manifest's regions, then by index."""

    def learner(self, name: str) -> LearnerPlan | None:
        """The learner of that name, or None."""
        return next((learner for learner in self.learners if learner.name == name), None)


def plan(job: DiLoCoJob) -> Plan:
    """The plan of a validated job; equal jobs give equal plans."""
    shared = shared_plan(job)
    return Plan(
        spec=shared.spec,
        syncer=shared.syncer,
        evaluator=shared.evaluator,
        learners=tuple(
            learner_plan(job, region, index)
            for region in job.spec.regions
            for index in range(region.learners)
        ),
    )


def shared_plan(job: DiLoCoJob) -> SharedPlan:
    """The plan of a validated job without its learners, of which there may be thousands."""
    spec = job.spec
    return SharedPlan(
        spec=run_spec(job),
        syncer=SyncerPlan(
            region=spec.syncer_region,
            argv=(PYTHON, "-m", "diloco_syncer"),
            port=spec.syncer.service.port,
            endpoint=spec.syncer.endpoint,
            checkpoint=_syncer_checkpoint(job),
        ),
        evaluator=_evaluator(job),
    )


def run_spec(job: DiLoCoJob) -> RunSpec:
    """The values that every process of the job shares."""
    spec, sync, recipe = job.spec, job.spec.sync, job.spec.learner.recipe
    evaluation = spec.evaluation
    return RunSpec(
        job=job.metadata.name,
        steps=spec.steps,
        seed=spec.seed,
        fragments=sync.fragments,
        interval=sync.interval,
        overlap=sync.overlap,
        quorum=sync.quorum,
        grace_max_steps=float(sync.grace.max_steps),
        grace_safety=float(sync.grace.safety),
        merge=sync.merge,
        average_parameters=tuple(sync.average_parameters),
        frozen=sync.frozen,
        buffers=sync.buffers,
        moving_buffers=tuple(sync.moving_buffers),
        guard=float(sync.guard),
        outer_learning_rate=float(sync.outer.learning_rate),
        outer_momentum=float(sync.outer.momentum),
        outer_nesterov=sync.outer.nesterov,
        wire_up=sync.wire.up,
        wire_down=sync.wire.down,
        error_feedback=sync.wire.error_feedback,
        learners={region.name: region.learners for region in spec.regions},
        learner_checkpoint=_learner_checkpoint(job),
        syncer_checkpoint=_syncer_checkpoint(job),
        snapshot_url=spec.syncer.checkpoint.url,
        output_url=spec.output,
        evaluation_every_steps=evaluation.every_steps if evaluation else None,
        evaluation_command=tuple(evaluation.command or ()) if evaluation else (),
        recipe=recipe.name if recipe else None,
        recipe_config=dict(recipe.config) if recipe else {},
    )


def learner_spec(spec: RunSpec) -> RunSpec:
    """
    The part of a RunSpec that a learner needs at its start; the hash is the same.

    Values that may change while the job runs, and that reach learners through the syncer (T) or not
    at all (K, the set of learners, the syncer's snapshots, the evaluation), are replaced by
    constants: the document is part of the pod template, so changing them must not replace a learner.
    """
    # An own loop may read Learner.index, which depends on the set of regions, so that set stays:
    # without it, learners of two regions would share an index. Recipes use the learner's name.
    regions = dict.fromkeys(spec.learners, 0) if spec.recipe is None else {}
    return dataclasses.replace(
        spec,
        steps=BILLION,
        quorum=1,
        guard=0.0,
        learners=regions,
        syncer_checkpoint=Checkpoint(every_steps=1, keep=1),
        snapshot_url="",
        output_url="",
        evaluation_every_steps=None,
        evaluation_command=(),
    )


def environment(
    plan: SharedPlan,
    process: ProgramPlan,
    *,
    syncer: str,
    spec_path: str,
    state_dir: str,
    tls_dir: str = "",
    metrics_port: int = 0,
) -> dict[str, str]:
    """
    The variables that a learner or the evaluator gets in addition to those it inherits.

    docs/manifest.md, "Environment of a learner". Arguments as for `process_env`.
    """
    return {
        # The user's variables first: none of them can replace ours.
        **dict(process.env),
        **process_env(
            plan,
            process,
            syncer=syncer,
            spec_path=spec_path,
            state_dir=state_dir,
            tls_dir=tls_dir,
            metrics_port=metrics_port,
        ),
        **({"DILOCO_LEARNER": process.name} if isinstance(process, LearnerPlan) else {}),
    }


def process_env(
    plan: SharedPlan,
    process: ProgramPlan,
    *,
    syncer: str,
    spec_path: str,
    state_dir: str,
    tls_dir: str = "",
    metrics_port: int = 0,
) -> dict[str, str]:
    """
    Our variables that learners and the evaluator share, without the user's.

    Args:
        plan: the job's plan.
        process: one of its learners, or its evaluator.
        syncer: host:port to dial.
        spec_path: file that holds `plan.spec.to_json()`.
        state_dir: directory of this process; outlives a restart.
        tls_dir: directory with tls.crt, tls.key and ca.crt; "": no TLS.
        metrics_port: where to serve Prometheus metrics; 0: none.
    """
    return {
        "DILOCO_JOB": plan.spec.job,
        "DILOCO_SYNCER": syncer,
        "DILOCO_SPEC": spec_path,
        "DILOCO_CONFIG": canonical(dict(process.config)),
        "DILOCO_STATE": state_dir,
        **({"DILOCO_TLS": tls_dir} if tls_dir else {}),
        "DILOCO_METRICS_PORT": str(metrics_port),
    }


def learner_plan(job: DiLoCoJob, region: Region, index: int) -> LearnerPlan:
    """One learner of a region; learners of one region differ only in index and name."""
    learner = job.spec.learner
    if learner.recipe is not None:
        argv: tuple[str, ...] = (PYTHON, "-m", f"diloco_worker.recipes.{learner.recipe.name}")
        config = {**learner.recipe.config, **region.config}
    else:
        argv = tuple(learner.command or ())
        config = dict(region.config)
    return LearnerPlan(
        name=names.learner_name(region.name, index),
        region=region.name,
        index=index,
        has_peers=learner.has_peers,
        argv=argv,
        config=config,
        env=_user_env(job),
    )


def _evaluator(job: DiLoCoJob) -> EvaluatorPlan | None:
    evaluation, recipe = job.spec.evaluation, job.spec.learner.recipe
    if evaluation is None:
        return None
    return EvaluatorPlan(
        every_steps=evaluation.every_steps,
        argv=(PYTHON, "-m", "diloco_worker.evaluator"),
        config=dict(recipe.config) if recipe else {},
        env=_user_env(job),
    )


def _learner_checkpoint(job: DiLoCoJob) -> Checkpoint:
    checkpoint, interval = job.spec.learner.checkpoint, job.spec.sync.interval
    omitted = min(BILLION, CHECKPOINT_INTERVALS * interval)
    every = checkpoint.every_steps
    return Checkpoint(every_steps=omitted if every is None else every, keep=checkpoint.keep)


def _syncer_checkpoint(job: DiLoCoJob) -> Checkpoint:
    checkpoint = job.spec.syncer.checkpoint
    return Checkpoint(every_steps=checkpoint.every_steps, keep=checkpoint.keep)


def _user_env(job: DiLoCoJob) -> Env:
    return tuple((var.name, var.value) for var in job.spec.learner.env if var.value_from is None)
