"""
Θ and momentum equal an independent replay, in float64, of what was merged (paper 3.2 and D.2).

    Received (as on the wire) ─► decoded ─► v = Θ − θ ─► Δ per tensor ─► outer step ─► compared

The syncer's own numbers are not used but for which contributions a merge has. Each merge is replayed
from what was compared before, so that rounding does not add up: momentum, and a fragment that comes
whole, would amplify it. A restart goes back to the versions of its snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.codec import formats
from diloco.model.fragments import Fragment, Layout
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Committed, Received, Resumed
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import BeginMerge

F64 = npt.NDArray[np.float64]
Version = tuple[int, int]

TOLERANCE = 1e-5
"""Largest difference per unit of the largest value: fp32 rounds by about 1e-7 of it."""

UNSTABLE = 100.0
"""A mean direction this much shorter than its terms amplifies their rounding; it is not compared."""


@dataclass(slots=True)
class _State:
    version: Version
    theta_N: F64
    momentum_N: F64


class Replay:
    """
    Args:
        spec: of the job.
        layout: of the model.
    """

    observes = (dict, Resumed, Received, BeginMerge, Committed)

    def __init__(self, spec: RunSpec, layout: Layout) -> None:
        self._spec, self._layout = spec, layout
        self._uploads: dict[tuple[str, int, int, int], list[Received]] = {}
        """By learner, incarnation, round and attempt; a member may use several streams."""
        self._initial: dict[tuple[str, int], Received] = {}
        """By learner and fragment."""
        self._merges: dict[tuple[int, int], BeginMerge] = {}
        self._history: list[list[_State]] = [[] for _ in layout.fragments]
        self._epoch = 0
        self.compared = 0
        """Merges."""

    def observe(
        self, event: dict[str, Any] | Resumed | Received | BeginMerge | Committed, now: float
    ) -> None:
        """See `Checker`."""
        match event:
            case Received(header=header):
                if header.content == bulk.INITIAL:
                    self._initial[header.learner, header.fragment] = event
                elif header.content != bulk.CONSTANTS:
                    key = header.learner, header.incarnation, header.round, header.attempt
                    self._uploads.setdefault(key, []).append(event)
            case BeginMerge():
                self._merges[event.round, event.attempt] = event
            case Committed():
                if event.commit.changed:
                    self._merged(event, now)
            case Resumed():
                self._resumed(event, now)
            case {"event": "initialised", "learner": learner}:
                self._initialised(learner)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _initialised(self, learner: str) -> None:
        for fragment in self._layout.fragments:
            upload = self._initial[learner, fragment.index]
            theta_N = _decoded(upload.header.format, upload.chunks, fragment)
            state = _State((self._epoch, 0), theta_N, np.zeros_like(theta_N))
            self._history[fragment.index] = [state]

    def _resumed(self, event: Resumed, now: float) -> None:
        self._epoch = event.epoch
        self._uploads.clear()
        self._merges.clear()
        for fragment, history in enumerate(self._history):
            if event.parameters is None:
                history.clear()
                continue
            current = event.parameters.current(fragment)
            while history and history[-1].version != current.version:
                history.pop()
            if not history:
                self._fail(
                    f"the restart has version {current.version} of fragment {fragment}, which never was",
                    event.step,
                    now,
                )
            self._compare(fragment, current.theta_N, current.momentum_N, event.step, now)

    def _merged(self, event: Committed, now: float) -> None:
        commit, after = event.commit, event.fragment
        merge = self._merges.pop((commit.round, commit.attempt))
        fragment = self._layout.fragments[commit.fragment]
        history = self._history[commit.fragment]
        before = history[-1]
        members = [c for c in merge.contributions if c.tokens > 0 and c.steps > 0]
        deltas = [self._delta(c, fragment, history, commit.round, now) for c in members]
        weights = limited_weights(members, self._spec.guard)
        if not fragment.buffers:
            deltas = clipped(deltas, [c.steps for c in members], fragment, self._spec.guard)
        newest = max(range(len(members)), key=lambda m: members[m].local_step)
        delta_N, unstable = np.zeros(fragment.elements), np.zeros(fragment.elements, bool)
        for slot in fragment.slots:
            here = slice(slot.offset, slot.end)
            if slot.tensor.newest:
                delta_N[here] = deltas[newest][here]
                continue
            radial = self._spec.merge == "Radial" and not slot.average
            delta_N[here], unstable[here] = merged(
                [d[here] for d in deltas], weights, radial=radial
            )
        rate, mu = self._spec.outer_learning_rate, self._spec.outer_momentum
        if fragment.buffers:
            rate, mu = 1.0, 0.0
        momentum_N = mu * before.momentum_N + delta_N
        step_N = delta_N + mu * momentum_N if self._spec.outer_nesterov else momentum_N
        theta_N = before.theta_N - rate * step_N
        theta_N[unstable] = after.theta_N[unstable]
        momentum_N[unstable] = after.momentum_N[unstable]
        history.append(_State(after.version, theta_N, momentum_N))
        self._compare(commit.fragment, after.theta_N, after.momentum_N, commit.round, now)
        history[-1].theta_N = after.theta_N.astype(np.float64)
        history[-1].momentum_N = after.momentum_N.astype(np.float64)
        self._uploads = {k: u for k, u in self._uploads.items() if k[2] > commit.round}
        self.compared += 1

    def _delta(
        self, member: Contribution, fragment: Fragment, history: list[_State], step: int, now: float
    ) -> F64:
        """v = Θ − θ of a member, from what it sent."""
        key = member.learner, member.incarnation, member.round, member.attempt
        header, chunks = _together(self._uploads.get(key, ()))
        if header is None or len(chunks) < fragment.chunks:
            self._fail(
                f"{member.learner} is merged, nothing of it has arrived completely", step, now
            )
            raise AssertionError
        values_N, current = _decoded(header.format, chunks, fragment), history[-1]
        if header.content == bulk.WHOLE:
            return current.theta_N - values_N
        base = (header.base.epoch, header.base.step)
        found = next((s for s in reversed(history) if s.version == base), None)
        if found is None:
            self._fail(f"{member.learner} is merged against {base}, which never was", step, now)
            raise AssertionError
        return values_N + (current.theta_N - found.theta_N)

    def _compare(self, fragment: int, theta_N: Any, momentum_N: Any, step: int, now: float) -> None:
        state = self._history[fragment][-1]
        for name, ours_N, theirs_N in (
            ("Θ", state.theta_N, theta_N),
            ("the momentum", state.momentum_N, momentum_N),
        ):
            most = float(np.max(np.abs(ours_N), initial=0.0))
            difference = float(np.max(np.abs(ours_N - theirs_N), initial=0.0))
            if not difference <= TOLERANCE * (1 + most):
                self._fail(
                    f"{name} of fragment {fragment} differs by {difference:.3g} from the replay",
                    step,
                    now,
                )

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("replay", sentence, step=step, now=now)


def _together(uploads: Sequence[Received]) -> tuple[bulk.UploadHeader | None, dict[int, bytes]]:
    """The newest header, and all chunks; of two of one index they are equal."""
    chunks = {index: chunk for upload in uploads for index, chunk in upload.chunks.items()}
    return (uploads[-1].header if uploads else None), chunks


def _decoded(format_: int, chunks: Mapping[int, bytes], fragment: Fragment) -> F64:
    values_N = np.zeros(fragment.elements, np.float32)
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        formats.decode(format_, chunks[index], values_N[lo:hi])
    return values_N.astype(np.float64)


def limited_weights(members: list[Contribution], guard: float) -> list[float]:
    """tokens² / steps, tokens per step at most 2.1 times the median of three members or more."""
    rates = [c.tokens / c.steps for c in members]
    if guard > 0 and len(members) >= 3:
        usual = sorted(rates)[(len(rates) - 1) // 2]
        rates = [min(rate, 2.1 * usual) for rate in rates]
    return [rate**2 * c.steps for rate, c in zip(rates, members, strict=True)]


def clipped(deltas: list[F64], steps: list[int], fragment: Fragment, guard: float) -> list[F64]:
    """
    Deltas whose norm per √step, or per step, is at most `guard` times the median, tensor by tensor.

    Of a tensor that most members hardly change, a tenth of the fragment's median counts instead; of
    one that they do not change, the whole.
    """
    if guard <= 0 or len(deltas) < 3:
        return deltas
    middle = (len(deltas) - 1) // 2
    lengths, scales = np.array([_norm(v) for v in deltas]), (np.sqrt(steps), np.array(steps))
    wholes = [sorted(lengths / scale)[middle] for scale in scales]
    out = [v.copy() for v in deltas]
    for slot in fragment.slots:
        norms = np.array([_norm(v[slot.offset : slot.end]) for v in deltas])
        limits = np.zeros(len(deltas))
        for scale, whole in zip(scales, wholes, strict=True):
            median = sorted(norms / scale)[middle]
            usual = max(median, 0.1 * whole) if median else whole
            limits = np.maximum(limits, guard * usual * scale)
        for v, norm, limit in zip(out, norms, limits, strict=True):
            if norm > limit:
                v[slot.offset : slot.end] *= limit / norm
    return out


def _norm(v_N: F64) -> float:
    """‖v‖; `np.linalg.norm` takes three times as long for a short vector."""
    return math.sqrt(float(np.dot(v_N, v_N)))


def merged(deltas: list[F64], weights: list[float], *, radial: bool) -> tuple[F64, bool]:
    """
    Δ of one tensor, and whether it amplifies rounding too much to be compared.

        Average   Δ = Σ w v / Σ w
        Radial    Δ = (Σ w ‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w),   φ(v) = v / ‖v‖,  φ(0) = 0
    """
    shares = [w / math.fsum(weights) for w in weights]
    mean_N: F64 = np.sum([s * v for s, v in zip(shares, deltas, strict=True)], axis=0)
    norms = [_norm(v) for v in deltas]
    if not radial or len(deltas) == 1 or max(norms) == 0:
        return mean_N, False
    parts = [s * v / n for s, v, n in zip(shares, deltas, norms, strict=True) if n > 0]
    direction_N: F64 = np.sum(parts, axis=0)
    length = _norm(direction_N)
    terms = math.fsum(s for s, n in zip(shares, norms, strict=True) if n > 0)
    if length * UNSTABLE <= terms:
        return mean_N, True
    return math.fsum(
        s * n for s, n in zip(shares, norms, strict=True)
    ) * direction_N / length, False
