"""Tapes that no process has written: for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.journal import tape

NAMES = ("a.weight", "b.weight")


def start(*, step: int = 0, steps: int = 6, epoch: int = 1) -> dict[str, Any]:
    """The line of a syncer of two fragments, due in turn."""
    return {
        "event": "start", "epoch": epoch, "step": step, "steps": steps, "fragments": 2, "interval": 2,
        "quorum": 1, "spec": "s",
    }  # fmt: skip


def initialised(learner: str = "eu/0", *, epoch: int = 1) -> dict[str, Any]:
    """The line about Θ^(0)."""
    return {"event": "initialised", "epoch": epoch, "learner": learner}


Applied = tuple[int, int] | tuple[int, int, int | None]
"""A fragment, the global step of its version, and the epoch of that: 1 unless it is given."""


def member(
    learner: str, step: int, *, incarnation: int = 1, base: int | None = 0, digests: str = "aaaaaaaa"
) -> dict[str, Any]:  # fmt: skip
    """A member of a merge."""
    return {
        "learner": learner, "incarnation": incarnation, "step": step, "steps": 1, "tokens": 8, "weight": 64.0,
        "base": base, "norm": 1.0, "clipped": 0, "digests": digests,
    }  # fmt: skip


def merge(
    step: int, *members: dict[str, Any], clock: dict[str, int] | None = None, digests: str = "cccccccc",
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The line of a merge; its clock is that of its members unless it is given."""
    own = {each["learner"]: each["step"] for each in members}
    return {
        "event": "merge", "epoch": 1, "step": step, "fragment": step % 2, "quorum": 1, "digests": digests,
        "clock": own if clock is None else clock, "members": list(members), **more,
    }  # fmt: skip


def process(
    learner: str, steps: int, *, incarnation: int = 1, restarts: int = 0, after: int = 0, found: int = 0,
    held: int = 0, source: str = "model", optimizers: str = "new", peer_step: int | None = None,
    results: Mapping[int, Sequence[Applied]] | None = None, ended: bool = True, digests: str = "eeeeeeee",
    epoch: int = 1, held_epoch: int | None = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """
    The lines of one process.

    Args:
        learner: its name.
        steps: its last local step.
        incarnation: its own.
        restarts: before it.
        after: local step at which it began.
        found: local step of the checkpoint that it found.
        held: global step of the newest version when it began; step n merges fragment n mod 2.
        source: of the parameters.
        optimizers: of their state.
        peer_step: local step of the peer.
        results: by local step, fragments and versions that it applied.
        ended: whether it left the job.
        digests: of the parameters that it ended with.
        epoch: of the syncer when it began.
        held_epoch: of the versions of both fragments; None: it is not stated.
    """
    results = results or {}
    begin = tape.Begin(
        tape=tape.VERSION, learner=learner, incarnation=incarnation, epoch=epoch, restarts=restarts, local_step=after,
        tokens=8 * after, step=held, found=found, source=source, optimizers=optimizers, peer_step=peer_step,
        held=tuple(_held(f, max(0, held - (held - f) % 2), held_epoch) for f in range(2)),
        fragments=tuple(tape.Tensors(fragment=f, names=NAMES[f]) for f in range(2)), machine="cpu; torch",
    )  # fmt: skip
    made = [
        tape.Step(
            incarnation=incarnation, local_step=number, seen=number - 1, step=number,
            results=tuple(_held(*each) for each in results.get(number, ())) or None,
        )
        for number in range(after + 1, steps + 1)
    ]  # fmt: skip
    parameters = tuple(tape.Digests(fragment=f, digests=digests) for f in range(2))
    end = tape.End(
        incarnation=incarnation, local_step=steps, reason="Complete", parameters=parameters
    )
    return [tape.encode(record) for record in (begin, *made, *([end] if ended else []))]


def _held(fragment: int, step: int, epoch: int | None = 1) -> tape.Held:
    return tape.Held(fragment=fragment, step=step, epoch=epoch)


def tapes(**lines: list[dict[str, Any]]) -> dict[str, list[tape.Process]]:
    """Tapes by learner; the name eu_0 stands for eu/0."""
    return {name.replace("_", "/"): tape.processes(found) for name, found in lines.items()}
