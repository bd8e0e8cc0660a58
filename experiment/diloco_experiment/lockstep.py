"""
Methods whose learners wait for each other: the baselines of DiLoCo.

    synchronous   one model; each step has the batches of all learners
    diloco        each learner makes H steps; then all wait for the merge, and continue with its result

The merge, the formats on the wire with their rounding, and the outer optimizer are those of the programs.
Learners wait, so speeds and failures change the duration, not the result: a cell has neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diloco.codec import formats, frames
from diloco.errors import NotFiniteError
from diloco.model.fragments import Fragment
from diloco.spec import RunSpec
from diloco_experiment.models import CPU, Placed, Recipe, Trained
from diloco_experiment.moments import apply, average
from diloco_experiment.results import Curve, Result, Status, digest_of
from diloco_experiment.tasks import Moments, Task
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging.streaming import FragmentMerge
from diloco_worker.recipes import gpt

F32 = npt.NDArray[np.float32]


def synchronous(task: Task) -> Result:
    """Data-parallel training."""
    recipe = Recipe(task)
    placed = Placed(recipe.new_model(), recipe.layout)
    config = recipe.config(task.names[0])
    optimizers = recipe.optimizers(placed.model, config)
    curve, diverged, losses = Curve(), "", []
    for step in range(task.spec.steps):
        windows = np.concatenate([recipe.windows(name, step) for name in task.names])
        loss = gpt.loss_of(placed.model, windows, config, CPU)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            diverged = f"the loss of step {step} is {losses[-1]}"
            break
        recipe.update(placed.model, optimizers, config, step)
        if curve.due(task, step + 1):
            curve.add(step + 1, recipe.score(placed.model))
    tokens = sum(recipe.config(name).batch for name in task.names) * config.context * len(losses)
    return Result(
        status=Status.DIVERGED if diverged else Status.OK,
        detail=diverged,
        curve=tuple(curve.points),
        train_loss=_end(losses),
        steps=len(losses),
        local_steps=len(losses) * len(task.names),
        tokens=tokens,
        merged_tokens=tokens,
        virtual_seconds=float(len(losses)),
        theta=digest_of(placed.values),
    )


def diloco(task: Task) -> Result:
    """DiLoCo without overlap."""
    recipe, spec = Recipe(task), task.spec
    learners = [Trained(recipe, name) for name in task.names]
    theta = Placed(recipe.new_model(), recipe.layout)
    outer = _Outer(spec, recipe.layout.fragments[0], learners, theta.values[0], task.moments)
    curve, losses, merged = Curve(), [], 0
    for step in range(spec.steps):
        for learner in learners:
            learner.begin(local_step=step, global_step=step)
        losses.append(float(np.mean([learner.step() for learner in learners])))
        if recipe.diverged:
            break
        due = (step + 1) % spec.interval == 0 or step + 1 == spec.steps
        if due:
            try:
                outer.merge(step + 1, step + 1 - merged)
            except NotFiniteError as error:  # of the formats on the wire
                recipe.diverged = str(error)
                break
            merged = step + 1
        if curve.due(task, step + 1):
            curve.add(step + 1, recipe.score(theta.model))
    per_step = sum(recipe.config(n).batch * recipe.config(n).context for n in task.names)
    return Result(
        status=Status.DIVERGED if recipe.diverged else Status.OK,
        detail=recipe.diverged,
        curve=tuple(curve.points),
        train_loss=_end(losses),
        steps=len(losses),
        local_steps=recipe.steps_of.total(),
        tokens=per_step * len(losses),
        merged_tokens=per_step * merged,
        merges=outer.merges,
        members=float(len(learners)) if outer.merges else 0.0,
        virtual_seconds=float(len(losses)),
        theta=digest_of(theta.values),
    )


@dataclass(slots=True)
class _Outer:
    """Merges the only fragment of all learners, with the arithmetic of the syncer."""

    spec: RunSpec
    fragment: Fragment
    learners: Sequence[Trained]
    theta_N: F32
    """A view of Θ."""
    moments: Moments
    merges: int = 0
    momentum_N: F32 = field(init=False)
    base_N: F32 = field(init=False)
    """What the learners received last: Θ in the format of results."""
    residuals: list[F32 | None] = field(init=False)

    def __post_init__(self) -> None:
        self.momentum_N = np.zeros_like(self.theta_N)
        self.base_N = self.theta_N.copy()
        feedback = self.spec.error_feedback and self.spec.wire_up != "FP32"
        self.residuals = [np.zeros_like(self.theta_N) if feedback else None for _ in self.learners]

    def merge(self, step: int, steps: int) -> None:
        """One outer step after so many steps of each learner; all continue with the result."""
        up, down = formats.format_of(self.spec.wire_up), formats.format_of(self.spec.wire_down)
        contributions, payloads = [], []
        for learner, residual_N in zip(self.learners, self.residuals, strict=True):
            payload, norms = self._encode(up, learner.values[0], residual_N)
            payloads.append(payload)
            config = learner.config
            contributions.append(
                Contribution(
                    learner=learner.name, incarnation=1, round=step, attempt=1, local_step=step,
                    steps=steps, tokens=steps * config.batch * config.context, base=(1, 0),
                    format=up, norms=tuple(norms),
                )
            )  # fmt: skip
        spec = self.spec
        merge = FragmentMerge(
            fragment=self.fragment, theta_N=self.theta_N.copy(), momentum_N=self.momentum_N,
            contributions=tuple(contributions), merge=spec.merge,
            outer=OuterOptimizer(
                learning_rate=spec.outer_learning_rate, momentum=spec.outer_momentum,
                nesterov=spec.outer_nesterov,
            ),
            down=down, window=self.fragment.chunks,
        )  # fmt: skip
        for index in range(self.fragment.chunks):
            for contribution, payload in zip(contributions, payloads, strict=True):
                merge.add(contribution.learner, index, payload[index])
        result = merge.result()
        self.theta_N[:], self.momentum_N = result.theta_N, result.momentum_N
        for index in range(self.fragment.chunks):
            lo, hi = self.fragment.chunk(index)
            envelope = frames.unpack(merge.output(index, 0.0))
            formats.decode(down, bytes(envelope.payload), self.base_N[lo:hi])
        for learner in self.learners:
            learner.values[0][:] = self.base_N
        if self.moments is not Moments.LOCAL:
            own = [learner.moments(0) for learner in self.learners]
            values = average(own, [c.weight for c in contributions])
            for each in own:
                apply(each, values, {})  # of now: nothing changed since
        self.merges += 1

    def _encode(
        self, up: int, values_N: F32, residual_N: F32 | None
    ) -> tuple[list[bytes], list[float]]:
        """Chunks of a delta as sent, and the norms of what they hold."""
        delta_N, sent_N = self.base_N - values_N, np.empty_like(values_N)
        chunks = []
        for index in range(self.fragment.chunks):
            lo, hi = self.fragment.chunk(index)
            buffer = np.empty(formats.encoded_bytes(up, hi - lo), np.uint8)
            part_N = None if residual_N is None else residual_N[lo:hi]
            formats.encode(up, delta_N[lo:hi], buffer, residual_N=part_N)
            formats.decode(up, buffer.tobytes(), sent_N[lo:hi])
            chunks.append(buffer.tobytes())
        return chunks, formats.slot_norms(self.fragment, sent_N)


def _end(losses: Sequence[float]) -> float | None:
    """Mean of the last 5 %."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return float(np.mean(finite[-max(1, len(finite) // 20) :])) if finite else None
