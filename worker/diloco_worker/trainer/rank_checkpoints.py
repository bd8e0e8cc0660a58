"""
Local checkpoints of a learner of several ranks: each rank writes its piece, and rank 0 the manifest.

The ranks begin a checkpoint at the same step: the plan of the step states it. Nothing is exchanged then: each writes in
the background what only it has, and reports to rank 0 through the store of torch.distributed. When all pieces are on
disk, a thread of rank 0 writes the manifest: a checkpoint without it does not count. What several ranks hold is
divided among them as for host copies (`core.shard_slices`). All ranks must see one directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError, DilocoError, StorageError
from diloco.runtime import files
from diloco_worker.core.checkpoint_schedule import Outcome, of_all
from diloco_worker.core.sealed import sealed
from diloco_worker.core.shard_slices import Box
from diloco_worker.trainer import optimizer_state, pieces
from diloco_worker.trainer.checkpoint import (
    DAMAGED,
    STALL_SECONDS,
    Captured,
    Checkpoints,
    Manifest,
    kept_of,
    restore_random,
)
from diloco_worker.trainer.copies import Copy
from diloco_worker.trainer.kept import SavedEntries
from diloco_worker.trainer.layout import Share, is_dtensor, local
from diloco_worker.trainer.rank_group import RankGroup

log = logging.getLogger(__name__)

TOPIC = "checkpoint"
MARK = "ranks.mark"
"""A file by which the ranks find out, while they connect, whether they see one directory."""
POLL_SECONDS = 0.25

UNUSABLE = (
    *(DilocoError, OSError, LookupError, RuntimeError, TypeError, ValueError, AssertionError),
    *(AttributeError, ArithmeticError),
)
"""What loading a checkpoint that does not fit this process raises."""

Held = Mapping[str, tuple[torch.Tensor, Share]]
"""By name, each tensor of the model, and what this rank holds of it."""


class RankCheckpoints(Checkpoints):
    """
    One rank's part of the local checkpoints.

    Args:
        directory: DILOCO_STATE, the same in all ranks; created if missing.
        keep: number of checkpoints to keep.
        digest: see `Checkpoints`.
        held: the model.
        group: the ranks.
    """

    def __init__(
        self, directory: Path, *, keep: int, digest: str, held: Held, group: RankGroup
    ) -> None:
        self._group = group
        super().__init__(directory, keep=keep, digest=digest)
        self._shares = {
            id(tensor): share
            for tensor, share in held.values()
            if isinstance(tensor, nn.Parameter) or is_dtensor(tensor)
        }
        self._held = _digest_of(held)
        self._outcome, self._why = Outcome.LOST, ""
        self._reports: list[tuple[int, str, str]] = []
        """Of this rank: step, outcome and reason of its last pieces."""
        self._ended: Outcome | None = None
        """Of the checkpoint that was begun last, if no one has asked for it."""

    # ------------------------------------------------------------ writing

    def begin(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, attempts: int,
        kept: Callable[[], Mapping[str, Any]], local_step: int, global_step: int, facts: dict[str, Any], run: str,
    ) -> None:  # fmt: skip
        """
        Begin this rank's piece, as all ranks do after this step.

        Args:
            model: of this rank.
            optimizers: of this rank.
            attempts: that were discarded in a row; as many as for one process, and the optimizers wait for the copy.
            kept: the states of what `Learner.keep` was given; called once.
            local_step: of the step.
            global_step: of the job.
            facts: the counters; those of rank 0 count.
            run: its name.
        """
        self.finish()  # its report is made, or this is the last step
        budget = self._copies.budget
        self._copies.budget = dataclasses.replace(budget, abandoned=max(budget.abandoned, attempts))
        try:
            states = kept()
        except ConfigError as error:
            self._begin_without(local_step, Outcome.FAILED, str(error))
            return
        try:
            started = self.start(
                model, optimizers, local_step=local_step, global_step=global_step, facts=facts, run=run,
                kept=states,
            )  # fmt: skip
        except DilocoError as error:
            self._begin_without(local_step, Outcome.OFF, str(error))
            return
        if not started:
            self._report(local_step, Outcome.FAILED, "its disk hangs")

    def _begin_without(self, step: int, outcome: Outcome, why: str) -> None:
        """This rank has no piece of this step; rank 0 still waits for the others."""
        self._writing = step
        self._writer = threading.Thread(
            target=self._conclude, args=({"local_step": step}, outcome, why), name="checkpoint", daemon=True
        )  # fmt: skip
        self._writer.start()

    def ended(self) -> Outcome | None:
        """Rank 0: what became of the last checkpoint; None: it is being written, or this was asked before."""
        if self.busy:
            return None
        ended, self._ended = self._ended, None
        return ended

    def _capture(
        self, model: nn.Module, optimizers: Sequence[Optimizer], kept: Mapping[str, Any]
    ) -> Captured:
        whole = super()._capture(model, optimizers, kept)
        owner_of = {
            id(value): parameter
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            if isinstance(state, dict)
            for value in state.values()
        }
        tensors: dict[str, torch.Tensor] = {}
        parts: dict[str, pieces.Part] = {}
        for name, tensor in whole.tensors.items():
            owner = owner_of.get(id(tensor), tensor)
            share = self._shares.get(id(owner))
            if share is not None and _alike(tensor, owner):
                tensors[name], parts[name] = _part(tensor, share)
            elif is_dtensor(tensor):
                raise ConfigError(
                    f"checkpoint: {name} is a DTensor that is not sharded as its parameter; expected a plain tensor, "
                    "or one of the parameter's shape, mesh and placements"
                )
            else:
                tensors[name] = tensor
        owners = {name: whole.tensors[name] for name in parts}
        return Captured(tree=whole.tree, tensors=tensors, owners=owners, parts=parts)

    def _write(self, copy: Copy, manifest: dict[str, Any]) -> None:
        self._outcome, self._why = Outcome.LOST, ""
        super()._write(copy, manifest)
        self._conclude(manifest, self._outcome, self._why)

    def write(self, tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
        """
        Write this rank's piece durably.

        Raises:
            OSError: the write failed; earlier checkpoints are intact.
        """
        try:
            self._write_piece(tensors, manifest)
        except OSError as error:
            self._outcome, self._why = Outcome.FAILED, str(error)
            raise
        self._outcome = Outcome.WRITTEN

    def _write_piece(self, tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
        step = manifest["local_step"]
        # Before the others are done: what an earlier write left behind takes the room that all need.
        self._clean(step)
        path = pieces.piece_path(self._manifest_path(step), self._group.rank)
        sha, size = self._write_tensors(path, tensors)
        layout = {
            "local_step": step, "rank": self._group.rank, "ranks": self._group.size, "held": self._held,
            "parts": {name: part.to_json() for name, part in manifest["parts"].items()},
            "tree": manifest["tree"], "sha256": sha, "bytes": size,
        }  # fmt: skip
        self._write_file(path.with_suffix(".layout"), [memoryview(json.dumps(layout).encode())])

    def _conclude(self, manifest: dict[str, Any], outcome: Outcome, why: str) -> None:
        """Report to rank 0, which waits for all reports, and then writes the manifest."""
        step = manifest["local_step"]
        ended = Outcome.FAILED
        try:
            self._report(step, outcome, why)
            if self._group.rank == 0:
                ended = self._collect(step)
                if ended is Outcome.WRITTEN:
                    self._write_manifest(manifest)
        except ConfigError as error:
            ended = Outcome.OFF
            log.warning("no more local checkpoints will be written: %s", error)
        except (DilocoError, OSError, ValueError) as error:
            ended = Outcome.FAILED
            log.error("checkpoint of local step %d: %s; training continues", step, error)
        self._ended = ended

    def _report(self, step: int, outcome: Outcome, why: str) -> None:
        # With the one before: the last checkpoint of a learner begins even while rank 0 collects those.
        self._reports = [*self._reports[-1:], (step, outcome.value, why)]
        self._group.report(TOPIC, json.dumps(self._reports))

    def _collect(self, step: int) -> Outcome:
        """What all ranks reported of a step."""
        found: dict[int, Outcome] = {}
        began, size, shown = time.monotonic(), -1, False
        while len(found) < self._group.size:
            for rank in range(self._group.size):
                if rank not in found and (
                    report := _read_report(self._group.reported(TOPIC, rank), step)
                ):
                    found[rank] = report[0]
                    self._show_report(rank, step, *report)
            if size != (size := self._written_bytes(step)):
                self._taken += 1
            if not shown and time.monotonic() - began > STALL_SECONDS:
                shown = True
                missing = sorted(set(range(self._group.size)) - found.keys())
                log.warning(
                    "checkpoint of local step %d: waiting for the pieces of ranks %s", step, missing
                )
            if len(found) < self._group.size:
                time.sleep(POLL_SECONDS)
        return of_all([*found.values()])

    def _show_report(self, rank: int, step: int, outcome: Outcome, why: str) -> None:
        if outcome is Outcome.OFF:
            log.warning("no more local checkpoints will be written: rank %d: %s", rank, why)
        elif outcome is Outcome.FAILED:
            log.error(
                "checkpoint of local step %d: rank %d: %s; training continues", step, rank, why
            )

    def _written_bytes(self, step: int) -> int:
        """Grows while any rank writes."""
        total = 0
        for path in self._directory.glob(f"{self._manifest_path(step).stem}.rank-*"):
            try:
                total += path.stat().st_size
            except OSError:
                continue  # it was just renamed
        return total

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        step = manifest["local_step"]
        path = self._manifest_path(step)
        found, digests = [], []
        for rank in range(self._group.size):
            piece = pieces.piece_path(path, rank)
            text = files.read(piece.with_suffix(".layout"))
            data = json.loads(text)
            if (data["local_step"], data["ranks"]) != (step, self._group.size):
                raise StorageError(f"{piece.name} is of local step {data['local_step']}")
            found.append(pieces.from_layout(piece, data))
            digests.append(hashlib.sha256(text).hexdigest())
        pieces.check_complete(found)
        rest = {key: value for key, value in manifest.items() if key not in ("tree", "parts")}
        self._write_file(path, [memoryview(sealed({**rest, "pieces": digests}))])
        self._clean(step)

    def _manifest_path(self, step: int) -> Path:
        return self._directory / f"{self.name_of(step)}.json"

    def _clean(self, step: int | None = None) -> None:
        if self._group.rank == 0:
            super()._clean(step)

    # ------------------------------------------------------------ reading

    def newest_of_all(self) -> Manifest | None:
        """
        The newest checkpoint that is intact: each rank verifies some of its pieces. All ranks call it.

        Raises:
            UnavailableError: a rank does not answer.
        """
        rank, size = self._group.rank, self._group.size
        names = json.loads(self._group.exchange(json.dumps([p.name for p in self._manifests()]))[0])
        for name in names:
            found, problem = None, ""
            try:
                found = self._read(self._directory / name, place=rank, places=size)
            except DAMAGED as error:
                problem = str(error) or repr(error)
            problems = [text for text in self._group.exchange(problem) if text]
            if not problems:
                return found
            if rank == 0:
                log.warning("checkpoint %s is skipped: %s", name, problems[0])
        return None

    def load_part(
        self, manifest: Manifest, model: nn.Module, optimizers: Sequence[Optimizer], *, parameters: bool
    ) -> SavedEntries:  # fmt: skip
        """
        Restore this rank's part of the optimizers and, if `parameters`, of the model. All ranks call it: either all of
        them have the state of the checkpoint then, or each optimizer has its own.

        Returns:
            What this rank kept, if there were as many ranks then; to be read later, the file stays open.

        Raises:
            DilocoError: a rank cannot load its part.
        """
        rank, size = self._group.rank, self._group.size
        found = manifest.pieces or (pieces.Piece(path=manifest.path, tree=manifest.tree),)
        random, problem, saved = None, None, None
        with optimizer_state.own_on_error(optimizers):
            try:
                random = pieces.load(
                    found, manifest.optimizers, model, optimizers, parameters=parameters, rank=rank, ranks=size,
                    held=self._held,
                )  # fmt: skip
                saved = kept_of(manifest, rank=rank, ranks=size)
            except UNUSABLE as error:
                problem = ConfigError(str(error) or repr(error))
            try:
                self._group.agree("", problem)
            except BaseException:
                if saved is not None:
                    saved.close()
                raise
        if saved is None:
            raise AssertionError("the problem was raised")
        if parameters:
            restore_random(random)
        return saved


def of_ranks(
    directory: Path | None, *, keep: int, digest: str, held: Held, group: RankGroup
) -> tuple[RankCheckpoints | None, str]:
    """
    The checkpoints of this rank; None, and why: there are none. All ranks call it.

    Raises:
        StorageError: the directory cannot be used.
    """
    token, error, found = secrets.token_hex(16), None, None
    try:
        if directory is not None:
            found = RankCheckpoints(directory, keep=keep, digest=digest, held=held, group=group)
            if group.rank == 0:
                files.replace(directory / MARK, token, mode=files.PRIVATE)
    except OSError as problem:
        error = StorageError(f"{directory}: {problem.strerror or problem}")
    tokens = group.agree("" if found is None else token, error)
    if directory is None or not all(tokens):
        return None, "DILOCO_STATE is not set in every rank"
    seen = group.exchange(_seen(directory))
    if group.rank == 0:
        (directory / MARK).unlink(missing_ok=True)
    if any(text != tokens[0] for text in seen):
        return None, "its ranks do not see the same directory DILOCO_STATE"
    return found, ""


def _seen(directory: Path) -> str:
    """The token that rank 0 wrote, if this rank sees its directory."""
    try:
        return files.read(directory / MARK).decode()
    except OSError:
        return ""


def _alike(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a tensor is divided among the ranks as this parameter is."""
    if tensor.shape != owner.shape or is_dtensor(tensor) != is_dtensor(owner):
        return False
    if not is_dtensor(owner):
        return True
    own, other = (tensor.placements, tensor.device_mesh), (owner.placements, owner.device_mesh)  # type: ignore[attr-defined]
    return bool(own == other)


def _part(tensor: torch.Tensor, share: Share) -> tuple[torch.Tensor, pieces.Part]:
    """What this rank writes of a tensor."""
    shape, values = tuple(tensor.shape), local(tensor).detach()
    if not shape:  # a number: each rank has it
        return values, pieces.Part(Box((), ()), ())
    if share.copied is None or share.held is None:
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        return values.reshape(-1)[:0].reshape(nothing.shape), pieces.Part(nothing, shape)
    return values[share.copied.slices(share.held.lo)], pieces.Part(share.copied, shape)


def _digest_of(held: Held) -> str:
    boxes = {
        name: share.held and [share.held.lo, share.held.shape]
        for name, (_, share) in sorted(held.items())
    }
    return hashlib.sha256(json.dumps(boxes).encode()).hexdigest()


def _read_report(text: str, step: int) -> tuple[Outcome, str] | None:
    """What a rank reported of this step; None: nothing yet."""
    for reported, outcome, why in json.loads(text or "[]"):
        if reported == step:
            return Outcome(outcome), why
    return None
