"""
Moments of the inner optimizers that are averaged over the members of each merge. No job does this: it is for studies.

    copy of a fragment ─► copy of its moments m ─► merge: a = Σ w m / Σ w ─► with the result: m ← a + (m − copy)

The weights are those of the merge. The moments do not travel: no link delays or rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from diloco.model.fragments import Fragment, Layout
from diloco_sim.checkers.observations import Committed
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import BeginMerge

Values = dict[tuple[str, str], Tensor]
"""By parameter and name of the state."""

_SQUARES = ("exp_avg_sq",)
"""Never negative."""

Version = tuple[int, int]


def moments_of(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], fragment: Fragment
) -> Values:  # fmt: skip
    """The tensors of the optimizers' state that are as large as their parameter, of a fragment."""
    found: Values = {}
    for slot in fragment.slots:
        parameter = parameters[slot.tensor.name]
        for optimizer in optimizers:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    found[slot.tensor.name, name] = value
    return found


def average(members: Sequence[Values], weights: Sequence[float]) -> Values:
    """Σ w m / Σ w, of what every member has."""
    total = sum(weights)
    shared = set(members[0]).intersection(*members) if members else set()
    pairs = [*zip(members, weights, strict=True)]
    return {
        key: torch.stack([member[key] * (w / total) for member, w in pairs]).sum(0)
        for key in sorted(shared)
    }


def apply(own: Values, merged: Values, copied: Values) -> None:
    """
    A learner continues with the average; nothing where it has no state yet.

    Args:
        own: its moments, which this changes.
        merged: the average.
        copied: its own in the average; what it changed since then is kept. Empty: nothing is.
    """
    for key, value in own.items():
        if key not in merged:
            continue
        if key in copied:
            value.sub_(copied[key]).add_(merged[key])
            if key[1] in _SQUARES:
                value.clamp_(min=0)
        else:
            value.copy_(merged[key])


class MergedMoments:
    """
    The moments of each merge of a cell; implements `Checker`.

    Args:
        layout: of the model.
    """

    observes = (BeginMerge, Committed)

    def __init__(self, layout: Layout) -> None:
        fragments = layout.fragments
        self._copies: list[dict[tuple[str, int], Values]] = [{} for _ in fragments]
        """By fragment; by learner and local step."""
        self._members: dict[tuple[int, int], tuple[Contribution, ...]] = {}
        """By round and attempt."""
        self._merged: list[tuple[Version, Values, dict[str, Values]] | None]
        """By fragment, the newest merge: its version, the average, and the copy of each member."""
        self._merged = [None for _ in fragments]

    def copied(self, fragment: int, learner: str, local_step: int, values: Values) -> None:
        """A learner has copied a fragment for its link."""
        copies = self._copies[fragment]
        copies[learner, local_step] = {key: value.clone() for key, value in values.items()}

    def merged(self, fragment: int, version: Version, learner: str) -> tuple[Values, Values]:
        """
        The average of the merge that made this version, and the copy of this learner in it.

        Each is empty if there is none: that merge is not the newest, or the learner was no member.
        """
        newest = self._merged[fragment]
        if newest is None or newest[0] != version:
            return {}, {}
        return newest[1], newest[2].get(learner, {})

    def observe(self, event: BeginMerge | Committed, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, BeginMerge):
            self._members[event.round, event.attempt] = event.contributions
            return
        commit, copies = event.commit, self._copies[event.commit.fragment]
        found = self._members.pop((commit.round, commit.attempt), ())
        members = [c for c in found if c.weight > 0 and (c.learner, c.local_step) in copies]
        of = {c.learner: copies[c.learner, c.local_step] for c in members}
        values = average([of[c.learner] for c in members], [c.weight for c in members])
        self._merged[commit.fragment] = event.fragment.version, values, of
        merged = {c.learner: c.local_step for c in members}
        self._copies[commit.fragment] = {
            (learner, step): copy
            for (learner, step), copy in copies.items()
            if step > merged.get(learner, 0)
        }

    def finish(self, now: float) -> None:
        """See `Checker`."""
