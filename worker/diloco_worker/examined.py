"""
A learner for `diloco doctor`: three steps of a program without a syncer, and a record of them.

The program runs as in a job: with the name, the config and the `identity()` of a learner. Its model is cut into the
job's fragments, and `done` is true after three steps. Nothing is sent. What the record means is decided by
`diloco_local.diagnosis`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco.model.fragments import Layout
from diloco.runtime import files
from diloco.spec import RunSpec
from diloco_worker.core.ledger import Ledger
from diloco_worker.core.open_blocks import Data
from diloco_worker.settings import LearnerSettings
from diloco_worker.trainer.buffers import Watch, other_type
from diloco_worker.trainer.frozen import digest
from diloco_worker.trainer.kept import AFTER_A_STEP, Kept
from diloco_worker.trainer.layout import Named, describe, local
from diloco_worker.trainer.loss import LossReader
from diloco_worker.trainer.optimizer_steps import OptimizerSteps
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.stepped import MOST_NAMES, not_stepped
from diloco_worker.trainer.termination import exit_with

if TYPE_CHECKING:
    from diloco_worker.trainer.rank_group import RankGroup

log = logging.getLogger(__name__)

STEPS = 3
NO_SYNCER = "127.0.0.1:1"
"""The only DILOCO_SYNCER of an examination: in a job, three steps would pass for a program that ends early."""
MOST_VALUES = 1024
MOST_BYTES = 64 << 20
MOST_DEPTH = 4
"""Of the inputs of one step: those of a step with more are not compared."""
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class ExaminedTrainer:
    """
    Implements `Learner` under `diloco doctor`.

    Args:
        config: from the environment; names the file for the record.
        model: see `Learner.connect`.
        optimizers: likewise.
        group: the ranks, all of which have connected; None: this process is the learner.

    Raises:
        DilocoError: the job would refuse the model, or this process is in a job.
    """

    def __init__(
        self, config: LearnerSettings, model: nn.Module, optimizers: Sequence[Optimizer], *,
        group: RankGroup | None = None,
    ) -> None:  # fmt: skip
        _refuse_job(config)
        spec = config.read_spec()
        self.name, self.index = config.learner, config.index(spec)
        self.spec: RunSpec | None = spec
        self.config = config.config
        self.total_steps = spec.steps
        self._begin = config.examination_step
        self._file = config.examination if config.rank == 0 else None
        self._optimizers = optimizers
        self._ledger, self._loss, self._kept = Ledger(0), LossReader(), Kept()
        self.closed, self._blocks = False, 0

        layout = _layout(model, spec, group)
        kept = spec.buffers == "Initial"
        tensors = describe(
            model, moving=None if kept else spec.moving_buffers, sharded=group is not None
        )
        if not self._begin:
            _refuse_not_finite(tensors.merged)
        self._trained = tensors.trained
        self._before = _digests(tensors.trained)
        self._watch = Watch(
            model, constant=() if kept else tensors.buffers, moving=tensors.moving, frozen=tensors.frozen,
            trained=tensors.trained,
        )  # fmt: skip
        self._optimizer_steps = OptimizerSteps(
            optimizers, lambda parameter, dtype: self._refuse(other_type(model, parameter, dtype))
        )
        self._inputs, self._rate = _Inputs(model), _Rate(optimizers)
        self._record: dict[str, Any] = {
            "learner": self.name,
            "begin": self._begin,
            "optimizers": len(optimizers),
            "model": layout.digest,
            "elements": sum(t.elements for t in layout.tensors),
            "constantBytes": _bytes(tensors.buffers),
            "frozen": {
                "tensors": len(tensors.frozen),
                "bytes": _bytes(tensors.frozen),
                "digest": xxhash.xxh3_64_hexdigest(
                    "".join(f"{t.name} {t.digest};" for t in layout.frozen).encode()
                ),
            },
            "movingBuffers": len(tensors.moving),
            "notStepped": not_stepped(model, optimizers),
            "steps": [],
            "readsResumed": False,
            "callsAfterDone": 0,
        }
        self._write()
        log.warning(
            "%s: an examination of diloco doctor: %d steps from global step %d on, and nothing is sent",
            self.name, STEPS, self._begin,
        )  # fmt: skip

    @property
    def resumed(self) -> bool:
        """See `Learner.resumed`: a program that reads it may warm up after each start."""
        self._record["readsResumed"] = True
        return False

    @property
    def done(self) -> bool:
        """See `Learner.done`."""
        return self.closed or self._ledger.local_step >= STEPS

    @property
    def step_index(self) -> int:
        """See `Learner.step_index`."""
        return self._begin + self._ledger.local_step

    @property
    def local_step(self) -> int:
        """See `Learner.local_step`."""
        return self._ledger.local_step

    def keep(self, objects: Mapping[str, Any]) -> None:
        """See `Learner.keep`: nothing is saved, but what a job refuses is refused here, too."""
        if self._ledger.local_step:
            raise ValueError(AFTER_A_STEP)
        self._kept.add(objects)

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """See `Learner.step`."""
        if self.done:
            calls = self._record["callsAfterDone"] = self._record["callsAfterDone"] + 1
            if calls & (calls - 1) == 0:  # a loop that never ends writes seldom
                self._write()
            return
        if self._ledger.local_step == 0:
            self._check_kept()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = float(loss.detach())  # waits for the device: `finite` must be that of this step
        self._loss.read(loss)
        self._ledger.count(tokens)
        self._record["steps"].append(
            {
                "tokens": tokens,
                "finite": self._loss.finite,
                "optimizerSteps": self._optimizer_steps.taken(),
                "rate": self._rate.value,
                **self._inputs.take(),
            }
        )
        if self._ledger.local_step == STEPS:
            self._record["changedBuffers"] = self._watch.changed()
            if text := self._watch.refused:
                self._refuse(text)
            self._record["trained"] = _digests(self._trained) != self._before
            self._record["checkpointBytes"] = _bytes(self._trained) + sum(
                map(_state_bytes, self._optimizers)
            )
        self._write()

    def take_block(self, data: Data) -> int | None:
        """See `Learner.blocks`: two learners that are examined begin with different ones, as in a job."""
        if self.done:
            return None
        self._blocks += 1
        return self._begin + self._blocks - 1

    def close(self, error: BaseException | None = None) -> None:
        """See `Learner.close`."""
        self.closed = True
        self._write()

    def _check_kept(self) -> None:
        try:
            self._kept.capture()
        except ConfigError as error:
            self._refuse(str(error))

    def _refuse(self, text: str) -> NoReturn:
        raise exit_with(EXIT_REFUSED, f"{self.name}: {text}")

    def _write(self) -> None:
        if self._file is not None:
            self._record["peakBytes"] = _memory_bytes("VmHWM")
            self._record["sharedBytes"] = _memory_bytes("RssFile")
            files.replace(self._file, json.dumps(self._record))


def _layout(model: nn.Module, spec: RunSpec, group: RankGroup | None) -> Layout:
    """That of the job, which refuses the model where this does."""
    if group is None:
        replica = Replica(model, spec)
        replica.close()
        return replica.layout
    from diloco_worker.trainer.rank_replica import RankReplica  # takes seconds

    shared = RankReplica(model, spec, group)
    shared.close()
    return shared.layout


class _Inputs:
    """
    Digests of what the model gets while it trains, and of the random state where it draws numbers.

    A model whose hooks are not called (compiled, scripted, or used through its parts) has none. Nor has a step with
    an input that was not read: what was would look equal where the rest differs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inputs, self._random = xxhash.xxh3_64(), ""
        self._tensors = self._values = self._bytes = 0
        self._complete = True
        self._before = ""
        with contextlib.suppress(RuntimeError):  # torch.jit.ScriptModule has no hooks
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end)

    def take(self) -> dict[str, str]:
        """The digests since the last call; "": there is none."""
        found = {
            "inputs": self._inputs.hexdigest() if self._tensors and self._complete else "",
            "random": self._random,
        }
        self._inputs, self._random = xxhash.xxh3_64(), ""
        self._tensors = self._values = self._bytes = 0
        self._complete = True
        return found

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        self._before = _random_state()
        for value in _values((args, kwargs), MOST_DEPTH):
            self._complete = self._complete and self._read(value)
            if not self._complete:
                break

    def _read(self, value: Any) -> bool:
        """Whether the value was added to the digest."""
        self._values += 1
        self._bytes += value.nbytes if isinstance(value, torch.Tensor) else 0
        if self._values > MOST_VALUES or self._bytes > MOST_BYTES:
            return False
        try:
            if isinstance(value, torch.Tensor):
                self._inputs.update(digest(value).encode())
                self._tensors += 1
            elif isinstance(value, _PLAIN):
                self._inputs.update(repr(value).encode(errors="replace"))
            else:
                return False
        except (RuntimeError, TypeError, ValueError):
            return False  # values that cannot be read as bytes
        return True

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._before:
            if not self._random and _random_state() != self._before:
                self._random = self._before
            self._before = ""


class _Rate:
    """The learning rate of the first group of parameters in the newest step of its optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.value: float | None = None
        for optimizer in optimizers[:1]:
            optimizer.register_step_pre_hook(self._stepping)

    def _stepping(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.value = float(optimizer.param_groups[0]["lr"])


def _refuse_not_finite(merged: Iterable[Named]) -> None:
    """As the link refuses an initial model that it cannot upload."""
    floating = [n for n in merged if n.tensor.is_floating_point()]
    names = [n.info.name for n in floating if not local(n.tensor).isfinite().all()]
    if names:
        raise ConfigError(
            f"the initial parameters of this learner are not finite: NaN or Inf in {', '.join(names[:MOST_NAMES])}"
        )


def _refuse_job(config: LearnerSettings) -> None:
    if config.syncer != NO_SYNCER:
        raise ConfigError(
            f"DILOCO_EXAMINATION: set, and DILOCO_SYNCER is {config.syncer}; expected it only under diloco doctor: "
            "remove it from the image and from learner.env"
        )


def _values(value: Any, depth: int) -> Iterator[Any]:
    """The tensors in nested containers, and what else is in them."""
    if depth and isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _values(item, depth - 1)
    else:
        yield value


def _random_state() -> str:
    """Its digest; "": it cannot be read, as inside of `torch.func.grad`."""
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    try:
        return "".join(map(digest, states))
    except RuntimeError:
        return ""


def _digests(tensors: Iterable[Named]) -> list[str]:
    return [digest(named.tensor) for named in tensors]


def _bytes(tensors: Iterable[Named]) -> int:
    return sum(named.tensor.nbytes for named in tensors)


def _state_bytes(optimizer: Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in _values(state, MOST_DEPTH))
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _memory_bytes(name: str) -> int:
    """
    Memory of this process, not that of its workers; 0: unknown.

    Args:
        name: VmHWM: the most it has had; RssFile: of files, shared with other processes.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0]) << 10 if sizes else 0
