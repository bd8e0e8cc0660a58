"""
What the learners of a cell train: the built-in recipe behind the interface of the simulator.

A `Trained` draws the batches, makes the updates and has the schedule of `recipes.gpt.train`, for the learner of
its name. Its parameters are views of one flat vector in the order of the fragments. So what the simulator
writes there is what the next step trains.

Shape letters: M = learners, B = windows of a batch, T = bytes of context.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.model.fragments import Layout, cut
from diloco.spec import RunSpec
from diloco_experiment.gradients import gradients
from diloco_experiment.moments import MergedMoments, Values, apply, moments_of
from diloco_experiment.tasks import Method, Moments, Task
from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import data, gpt, optim
from diloco_worker.trainer.layout import describe

F32 = npt.NDArray[np.float32]

CPU = torch.device("cpu")

MAX_PARAMETERS = 50_000_000
"""Of a model."""

MAX_CELL_PARAMETERS = 200_000_000
"""
Of the models of all learners of a cell: they are in one process. Each parameter has its value, its gradient,
moments, a checkpoint of them, and what the link keeps of it: some 40 bytes.
"""

BATCHED_TOKENS, BATCHED_LEARNERS = 128, 8
"""
Steps of at most so many tokens, of at least so many learners, are computed in one call: then its overhead is
what a step costs. Larger matrices keep a core busy by themselves (benchmarks/bench_experiments.py).
"""


def config_of(raw: Mapping[str, Any]) -> gpt.Config:
    """
    The config of a learner in a cell: on the CPU, with the threads of the process.

    Raises:
        ConfigError: it is not valid for the recipe, or needs a GPU.
    """
    if raw.get("device") == "cuda":
        raise ConfigError("config.device: cuda; experiments train on CPUs, leave it out")
    if raw.get("slowdown", 1) != 1:
        raise ConfigError("config.slowdown: use stepSeconds of a scenario instead")
    return config_reader.read(gpt.Config, {**raw, "device": "cpu", "threads": None})


def layout_of(model: nn.Module, spec: RunSpec) -> Layout:
    """The fragments of a model, as the real learner cuts them."""
    tensors = describe(model)
    return cut(
        [named.info for named in tensors.merged],
        num_fragments=spec.fragments,
        average=spec.average_parameters,
    )


def check(task: Task) -> None:
    """
    Raises:
        ConfigError: the configs of a task are not valid or describe different models, the data is missing,
            or the model is too large or cannot be cut into the fragments.
    """
    configs = {}
    for name, raw in task.configs:
        try:
            configs[name] = config_of(raw)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    first_name, first = next(iter(configs.items()))
    for name, config in configs.items():
        if _shape(config) != _shape(first):
            raise ConfigError(
                f"config of {name}: layers, width, heads and context differ from those of "
                f"{first_name}; all learners train one model"
            )
    count = parameters_of(first)
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"the model has {count:,} parameters, an experiment at most {MAX_PARAMETERS:,}; make it smaller"
        )
    models = 1 if task.method is Method.SYNCHRONOUS else len(task.names) + len(task.added)
    if count * models > MAX_CELL_PARAMETERS:
        raise ConfigError(
            f"{models} learners of {count:,} parameters each, in all {count * models:,}, in one process; an "
            f"experiment has at most {MAX_CELL_PARAMETERS:,}; make the model smaller, or have fewer learners"
        )
    for config in configs.values():
        digest_of_data(config.data, config.context, config.validation_fraction)
    _cut(first, task.spec.fragments)


def parameters_of(config: gpt.Config) -> int:
    """Of the model, without making it."""
    matrices = 2 * gpt.VOCABULARY * config.width  # embedding and head
    return matrices + 12 * config.layers * config.width**2  # 4 of attention, 8 of the MLP


def _shape(config: gpt.Config) -> tuple[int, ...]:
    return config.layers, config.width, config.heads, config.context


@functools.lru_cache(maxsize=64)
def _cut(config: gpt.Config, fragments: int) -> None:
    spec = RunSpec(job="experiment", steps=1, fragments=fragments, interval=fragments, overlap=1)
    layout_of(gpt.GPT(config, seed=0), spec)


@functools.lru_cache(maxsize=4)
def corpus_of(source: str, context: int, fraction: float) -> data.Corpus:
    """The text of a config; all learners and cells of this process share it."""
    return data.load(source, context=context, validation_fraction=fraction)


@functools.lru_cache(maxsize=256)
def digest_of_data(source: str, context: int, fraction: float) -> str:
    """16 hex digits over both parts of a text."""
    corpus = corpus_of(source, context, fraction)
    found = hashlib.sha256(str(corpus.train.size).encode())
    found.update(corpus.train.data)
    found.update(corpus.validation.data)
    return found.hexdigest()[:16]


def forget_data() -> None:
    """Read the texts again: files may have changed."""
    corpus_of.cache_clear()
    digest_of_data.cache_clear()


_PACKAGES = "diloco", "torch", "numpy", "numba"


@functools.cache
def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return ", ".join([*found, f"Python {platform.python_version()}", cpu])


def made_by(task: Task) -> str:
    """
    What decides the result of a task besides the task itself, as one line.

    Raises:
        ConfigError: the data is missing.
    """
    configs = [config_of(raw) for _, raw in task.configs]
    texts = {digest_of_data(c.data, c.context, c.validation_fraction): None for c in configs}
    return f"{_versions()}, data {' '.join(texts)}"


class Recipe:
    """
    What the learners of one task share.

    Args:
        task: of the cell.

    Raises:
        ConfigError: the configs are not valid, or describe different models; the data is missing.
    """

    def __init__(self, task: Task) -> None:
        check(task)
        self.spec = task.spec
        self.configs = {name: config_of(raw) for name, raw in task.configs}
        self._first = next(iter(self.configs.values()))
        self.layout = layout_of(self.new_model(), self.spec)
        self._corpora: dict[tuple[str, int, float], data.Corpus] = {}
        self.group = Group(self)
        self.steps_of: Counter[str] = Counter()
        """Local steps of each learner so far."""
        self.moments = MergedMoments(self.layout) if task.moments is not Moments.LOCAL else None
        """None: each learner keeps its own."""
        self.keeps_moments = task.moments is Moments.AVERAGE
        """A learner keeps what its own changed since they were copied."""
        self.diverged = ""
        """Which learner's loss is not finite, and where; empty: none."""
        self._scores = data.validation_windows(
            self.corpus(self._first).validation,
            tokens=self._first.validation_tokens,
            context=self._first.context,
        )

    def new_model(self) -> gpt.GPT:
        """The model of step 0."""
        return gpt.GPT(self._first, seed=self.spec.seed)

    def config(self, name: str) -> gpt.Config:
        """Of a learner; one that scavenging adds has that of the first."""
        return self.configs.get(name, self._first)

    def corpus(self, config: gpt.Config) -> data.Corpus:
        """The text of a config."""
        key = config.data, config.context, config.validation_fraction
        if key not in self._corpora:
            self._corpora[key] = corpus_of(*key)
        return self._corpora[key]

    def windows(self, name: str, step: int) -> npt.NDArray[np.int64]:
        """The batch of a learner in its local step: that of the real learner of this name."""
        config = self.config(name)
        return data.batch(
            self.corpus(config).train, seed=self.spec.seed, learner=name, step=step,
            batch=config.batch, context=config.context,
        )  # fmt: skip

    def score(self, model: nn.Module) -> float:
        """Validation loss, as the evaluator computes it."""
        return gpt.validation_loss(model, self._scores, self._first, CPU)

    def optimizers(self, model: gpt.GPT, config: gpt.Config) -> list[torch.optim.Optimizer]:
        """The optimizers of a config."""
        return optim.build(
            model, model.hidden(), optimizer=config.optimizer,
            learning_rate=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay,
        )  # fmt: skip

    def update(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: gpt.Config, step: int
    ) -> None:  # fmt: skip
        """One update from the gradient, as `gpt.train` makes it at this global step."""
        nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
        rate = gpt.learning_rate(config, step=step, steps=self.spec.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()


class Placed:
    """
    A model whose parameters are views of one flat vector.

    Args:
        model: its values are kept.
        layout: the fragments.
    """

    def __init__(self, model: gpt.GPT, layout: Layout) -> None:
        self.model = model
        self.flat = torch.zeros(sum(fragment.elements for fragment in layout.fragments))
        self.values: list[F32] = []
        by_name, at, numbers = dict(model.named_parameters()), 0, self.flat.numpy()
        for fragment in layout.fragments:
            self.values.append(numbers[at : at + fragment.elements])
            for slot in fragment.slots:
                lo = at + slot.offset
                parameter = by_name[slot.tensor.name]
                view = self.flat[lo : lo + slot.tensor.length].view(parameter.shape)
                view.copy_(parameter.detach())
                parameter.data = view
            at += fragment.elements


class Trained(Placed):
    """
    The model of one learner from one start to the next; implements `diloco_sim.memory.Model`.

    Args:
        recipe: of the cell.
        name: of the learner.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        super().__init__(recipe.new_model(), recipe.layout)
        self.name, self.config = name, recipe.config(name)
        self.optimizers = recipe.optimizers(self.model, self.config)
        self._recipe = recipe
        self.local_step = self.global_step = 0
        """Of the step that has begun."""
        self.loss: float | None = None
        """Of that step; None: it is not computed yet."""

    def begin(self, *, local_step: int, global_step: int) -> None:
        """See `Model`."""
        self.local_step, self.global_step, self.loss = local_step, global_step, None
        self._recipe.group.began(self)

    def step(self) -> float:
        """See `Model`."""
        if self.loss is None:
            self._recipe.group.compute(self)
        if self.loss is None:
            raise AssertionError("the step has not begun")
        self._recipe.steps_of[self.name] += 1
        if not np.isfinite(self.loss) and not self._recipe.diverged:
            self._recipe.diverged = (
                f"the loss of {self.name} in its local step {self.local_step} is {self.loss}"
            )
        return self.loss

    def copied(self, fragment: int, local_step: int) -> None:
        """See `Model`."""
        if self._recipe.moments is not None:
            self._recipe.moments.copied(fragment, self.name, local_step, self.moments(fragment))

    def received(self, fragment: int, version: tuple[int, int]) -> None:
        """See `Model`."""
        if self._recipe.moments is not None:
            merged, copied = self._recipe.moments.merged(fragment, version, self.name)
            apply(self.moments(fragment), merged, copied if self._recipe.keeps_moments else {})

    def moments(self, fragment: int) -> Values:
        """Of its optimizers."""
        parameters = dict(self.model.named_parameters())
        return moments_of(parameters, self.optimizers, self._recipe.layout.fragments[fragment])

    def copy(self) -> Any:
        """See `Model`."""
        return self.flat.clone(), copy.deepcopy([o.state_dict() for o in self.optimizers])

    def load(self, saved: Any) -> None:
        """See `Model`."""
        self.flat.copy_(saved[0])
        self.load_optimizers(saved)

    def load_optimizers(self, saved: Any) -> None:
        """See `Model`."""
        for optimizer, state in zip(self.optimizers, saved[1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))


class Group:
    """
    The steps that have begun and are not computed yet: one call computes several of them.

    Nothing changes the values of a learner within its step, so it does not matter when they are computed.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._begun: dict[str, Trained] = {}

    def began(self, trained: Trained) -> None:
        """A step has begun; that of an earlier start of the learner will never end."""
        self._begun[trained.name] = trained

    def compute(self, trained: Trained) -> None:
        """Make the step of a learner, and of the others that can be made with it."""
        members = [trained]
        config = trained.config
        if config.batch * config.context <= BATCHED_TOKENS:
            alike = [m for m in self._begun.values() if m.config == config]
            members = alike if len(alike) >= BATCHED_LEARNERS else members
        for member in members:
            self._begun.pop(member.name, None)
        windows = [self._recipe.windows(m.name, m.local_step) for m in members]
        losses = gradients([m.model for m in members], windows, config)
        for member, loss in zip(members, losses, strict=True):
            self._recipe.update(member.model, member.optimizers, member.config, member.global_step)
            member.loss = loss
