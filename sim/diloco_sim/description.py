"""What a world is made of: a job, its learners and a plan of faults, all drawn from one seed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from diloco.journal.parts import PART_BYTES
from diloco.model.fragments import BLOCK, CHUNK, Layout, Tensor, cut
from diloco.spec import Checkpoint, RunSpec
from diloco_sim.checkers.bounds import Most
from diloco_sim.checkers.liveness import Bounds
from diloco_sim.faults import (
    AMOUNTS,
    BLOCKS,
    BREAKS,
    MISBEHAVIOUR,
    PEERS,
    POWER,
    PROCESS,
    WEIGHTS,
    Fault,
    Kind,
    Plan,
)
from diloco_sim.healthy_intervals import ExplainedGap, Health
from diloco_sim.journal import PARTS
from diloco_sim.learner import RESTART_SECONDS, TRAINER
from diloco_sim.seeds import fork
from diloco_syncer.coordinator import MERGE_WINDOW_BYTES
from diloco_syncer.core.blocks import HOLD_SECONDS, IDLE_SECONDS
from diloco_syncer.core.peers import MOST
from diloco_syncer.merging.buffers import MOST_IDLE, SLACK
from diloco_worker.core.open_blocks import Data
from diloco_worker.core.peer_recovery import LEAST_SECONDS
from diloco_worker.link.buffers import SLACK as LINK_SLACK
from diloco_worker.link.buffers import most_transfers

T = TypeVar("T")

SYNCER = "syncer"

SIMULATED: Mapping[Kind, float] = {
    **WEIGHTS,
    **dict.fromkeys(MISBEHAVIOUR, 0.25),
    **dict.fromkeys((Kind.MUTE, Kind.TRICKLE, Kind.STALE), 0.5),
}
"""Weights of the kinds of faults that a world carries out."""

LEARNERS: Mapping[int, float] = {1: 2.0, 2: 6.0, 3: 6.0, 4: 3.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
"""Weights of the numbers of learners."""

STEP_SECONDS: Mapping[float, float] = {0.1: 3.0, 0.5: 3.0, 1.0: 3.0, 5.0: 1.0}
"""Weights of the seconds of a step; long steps are mostly heartbeats."""

SNAPSHOT_STEPS: Mapping[int, float] = {1: 1.0, 4: 3.0, 10: 3.0, 30: 3.0}
"""Weights of the global steps between two snapshots."""

CHUNKED = 0.2
"""Share of the worlds whose payloads have many chunks, as those of real models have; they take longer."""

BUFFERED = 0.25
"""Share of the worlds of two fragments or more whose last one holds buffers."""

PROGRESS_SECONDS = 90.0
"""What members with faults may cost the others between two merges, besides the steps of a round."""

RESTORED = 0.06
"""Share of the worlds in which an earlier copy of the syncer's files is restored."""

BREAKING = 1 / 6
"""Share of the worlds in which a connection of a learner breaks after each pull."""

BLOCKED = 0.3
"""Share of the worlds whose learners take blocks of data."""

NO_END = 10
"""Blocks for each learner and global step, of which no world takes as many."""

PEERED = 0.3
"""Share of the worlds whose learners ask each other for the state of their optimizers."""

_BETWEEN = (
    Kind.CUT, Kind.HALF_OPEN, Kind.CORRUPTION, Kind.BANDWIDTH, Kind.LATENCY, Kind.BULK_DEAD,
)  # fmt: skip
"""Of a learner and one that it asks."""

FAULT_SHARE = 0.6
"""All faults are over when the fastest learner could have made this share of the steps."""


@dataclass(frozen=True, slots=True)
class Description:
    """A world before it runs: a function of its seed, its number of steps and its plan."""

    seed: int
    steps: int
    """Global steps to train."""
    learners: int
    plan: Plan
    spec: RunSpec
    sizes: tuple[int, ...]
    """Elements of each parameter."""
    step_seconds: tuple[float, ...]
    """Of each learner at full speed."""
    latency: float
    bandwidth: float
    checkpoint_every: int | None
    """Local steps between own checkpoints."""
    part_bytes: int
    """Size from which on events.jsonl is rotated."""
    chunk_elements: int = CHUNK
    """Of a chunk on the wire, a multiple of BLOCK."""
    buffers: tuple[int, ...] = ()
    """Elements of each buffer that changes; the first holds integers."""
    window_bytes: int = MERGE_WINDOW_BYTES
    """How far a member may be ahead of the slowest, in chunks of the real size; 4 chunks at least."""
    data: Data | None = None
    """What the loops of the learners take blocks of; None: they take none."""
    block_steps: int = 1
    """That a loop makes with a block."""
    moments: int = 0
    """Elements of the state of the optimizers, for which learners ask each other; 0: they do not."""

    @property
    def blocks(self) -> int:
        """Of the data; 0: the loops take none."""
        return -(-self.data.items // self.data.size) if self.data is not None else 0

    @property
    def names(self) -> tuple[str, ...]:
        """The learners."""
        return names(self.learners)

    def tokens(self, index: int) -> int:
        """Of one step of a learner."""
        return 100 + 10 * index

    @property
    def layout(self) -> Layout:
        """The model."""
        tensors = [
            Tensor(name=f"t{i:02d}", shape=(size,), dtype="float32", embedding=i == 1)
            for i, size in enumerate(self.sizes)
        ]
        tensors += [
            Tensor(name=f"u{i:02d}", shape=(size,), dtype="float32" if i else "int64", buffer=True)
            for i, size in enumerate(self.buffers)
        ]
        return cut(tensors, num_fragments=self.spec.fragments)

    @property
    def job(self) -> RunSpec:
        """The spec for this number of steps and learners."""
        quorum = min(self.spec.quorum, self.learners)
        return replace(self.spec, steps=self.steps, learners=regions(self.learners), quorum=quorum)

    @property
    def slowest(self) -> float:
        """Seconds of a step of the slowest learner."""
        return max(self.step_seconds[: self.learners])

    @property
    def too_slow(self) -> frozenset[str]:
        """
        Learners that may be in no merge at all: each of their steps takes longer than H steps of the fastest.

        Every fragment has a new result at each of their step boundaries, which overwrites what they trained.
        """
        seconds = self.step_seconds[: self.learners]
        limit = self.spec.interval * min(seconds)
        return frozenset(n for n, s in zip(self.names, seconds, strict=True) if s > limit)

    @property
    def may_diverge(self) -> bool:
        """
        A fragment is merged again before its last result has reached the learners: report, pull, upload
        and result take four times the latency.

        Each delta then contains, with its sign changed, what the last merges did, and a large outer step
        amplifies it. The paper's H is many times τ.
        """
        return 4 * self.latency > self.spec.interval * min(self.step_seconds[: self.learners])

    @property
    def merges_per_second(self) -> float:
        """Of the schedule, if the fastest learner is at full speed."""
        between = self.spec.interval / self.spec.fragments
        return 1 / (between * min(self.step_seconds[: self.learners]))

    @property
    def bounds(self) -> Bounds:
        """
        How long recovery may take: time-outs of connections (40 s each), of heartbeats, deliveries and
        back-offs of a minute at most in all, and for a learner that was ejected up to 600 s more.
        """
        between = self.spec.interval / self.spec.fragments + self.spec.overlap
        # A step that began under a fault takes as long after it.
        waits = self.block_seconds + self.peer_seconds
        rounds = 10 * between * self.slowest + self.longest_step + waits
        return Bounds(
            progress=PROGRESS_SECONDS + rounds,
            recovery=PROGRESS_SECONDS + 240.0 + rounds,
            merge=240.0 + rounds,
            participation=900.0 + rounds,
            result=90.0 + 4 * self.slowest + self.longest_step,
        )

    @property
    def block_seconds(self) -> float:
        """
        How long loops may wait for their next block at the end of a pass, until the learners that have the
        last ones have trained on them or lose them; 0: they take none, or the first pass does not end.
        """
        if self.data is None or self.blocks > NO_END * self.steps * self.learners:
            return 0.0
        open_steps = (self.data.ahead + 1) * self.block_steps
        lost = 40.0 + HOLD_SECONDS  # until a connection has failed, and after that
        return max(lost, IDLE_SECONDS) + open_steps * self.longest_step

    @property
    def block_wait(self) -> float:
        """How long a loop may wait for a block once all faults are over."""
        return self.bounds.recovery

    @property
    def peer_seconds(self) -> float:
        """How long a learner without which nothing is merged may wait for its peers; 0: it asks none."""
        return MOST * (LEAST_SECONDS + 10.0) if self.moments else 0.0

    @property
    def health(self) -> Health:
        """Since when a quorum has had no fault."""
        return Health(
            self.plan,
            syncer=SYNCER,
            learners=[name for name in self.names if name not in self.too_slow],
            all_learners=self.names,
            quorum=self.job.quorum,
            trainer=TRAINER,
        )

    @property
    def longest_step(self) -> float:
        """Seconds of the longest step that the faults of this world let a learner begin."""
        factor, slow = 1.0, 1.0
        for fault in self.plan:
            if fault.kind is Kind.SPEED:
                factor *= max(1.0, fault.amount)
            elif fault.kind is Kind.SLOW:
                slow = max(slow, fault.amount)
        return self.slowest * factor * slow

    @property
    def most(self) -> Most:
        """What syncer and links may hold."""
        spec, sizes = self.job, [4 * fragment.elements for fragment in self.layout.fragments]
        # Links (diloco_worker/link/buffers.py), all payloads in fp32.
        transfers, both = most_transfers(spec), 2 * max(sizes)
        in_use = LINK_SLACK * (sum(sizes) + transfers * both)
        # Θ, momentum, an older version, and the Θ and momentum of the snapshot that is being written;
        # two vectors of each round that is in flight or whose result is still sent.
        rounds = 2 * (spec.overlap + 1)
        vectors = 5 * sum(sizes) + (2 * rounds + MOST_IDLE) * max(sizes)
        return Most(
            learners=self.learners,
            fragments=spec.fragments,
            overlap=spec.overlap,
            merges_per_second=self.merges_per_second,
            link_bytes=int(in_use + (transfers - 1) * both),
            vector_bytes=int(SLACK * vectors),
            journal_bytes=(PARTS + 2) * self.part_bytes,
            kept_snapshots=spec.syncer_checkpoint.keep,
        )

    @property
    def explained_gap(self) -> ExplainedGap:
        """Without a merge for longer than this, the status must not be Training."""
        between = self.spec.interval / self.spec.fragments + self.spec.overlap
        longest = self.longest_step + self.block_seconds
        return ExplainedGap(self.plan, between=between, longest_step=longest)

    @property
    def quiet_at(self) -> float:
        """When all faults are over."""
        return self.steps * min(self.step_seconds[: self.learners]) * FAULT_SHARE


def names(count: int) -> tuple[str, ...]:
    """The learners, in two regions."""
    return tuple(f"{'eu' if i % 2 == 0 else 'us'}/{i // 2}" for i in range(count))


def regions(count: int) -> dict[str, int]:
    """Region → how many of these learners it has."""
    return dict(Counter(name.partition("/")[0] for name in names(count)))


def sample(seed: int, *, steps: int = 100, faults: bool = True) -> Description:
    """
    Draw a world.

    Small ones are more frequent: nearly every defect shows with two to four learners (the small scope
    hypothesis: Jackson, "Software Abstractions", 2006), and more of them run in the same time. All
    numbers of learners up to eight, steps of five seconds and a snapshot after every step remain.

    Args:
        seed: decides everything but the steps.
        steps: global steps to train.
        faults: False: the same world without faults.
    """
    source = random.Random(seed)
    of_spec, of_plan, of_buffers, of_copy, of_breaks, of_blocks, of_peers = (
        fork(source) for _ in range(7)
    )
    description = _sample(seed, steps, of_spec)
    if of_buffers.random() < BUFFERED and description.spec.fragments > 1:
        sizes = tuple(of_buffers.randint(1, 300) for _ in range(of_buffers.randint(1, 3)))
        description = replace(description, buffers=sizes)
    if of_blocks.random() < BLOCKED:
        description = _with_blocks(of_blocks, description)
    if of_peers.random() < PEERED and description.learners > 1:
        every, moments = of_peers.choice((None, 3, 5, 5, 10, 20)), of_peers.choice((16, 256, 4096))
        description = replace(description, moments=moments, checkpoint_every=every)
    if not faults:
        return description
    count = of_plan.choice((0, 1, 2, 3, 5, 8, 12, 20))
    quiet_at = description.quiet_at
    plan = Plan.sample(
        of_plan, learners=description.names, syncer=SYNCER, horizon=0.9 * quiet_at, count=count,
        weights=_kinds(of_plan),
    )  # fmt: skip
    fitted = Plan.of(*(_fit(fault, quiet_at, of_plan) for fault in plan))
    plan = _without_losses(fitted)
    if of_copy.random() < RESTORED and not plan.only(Kind.DISK_FLIP):
        plan = Plan.of(*plan, *_restored(of_copy, quiet_at))
    if of_breaks.random() < BREAKING:
        plan = Plan.of(*plan, _breaking(of_breaks, description.names, quiet_at))
        if of_breaks.random() < 0.5:  # the quorum needs the learner, or the slowest one
            spec = replace(description.spec, quorum=max(1, description.learners - 1))
            description = replace(description, spec=spec)
    if description.data is not None and of_blocks.random() < 0.5:
        false = _false_blocks(of_blocks, description.names, quiet_at)
        plan = Plan.of(*plan, *(fault for fault in false if of_blocks.random() < 0.5))
    if description.moments:
        plan = Plan.of(*plan, *_recoveries(of_peers, description.names, quiet_at))
    return replace(description, plan=plan)


def _with_blocks(source: random.Random, description: Description) -> Description:
    """The end of a pass, where learners wait for each other, comes often, occasionally or never."""
    ahead, size = source.choice((0, 1, 1, 4)), source.randint(1, 50)
    most_open = description.learners * (ahead + 1)
    blocks = source.choice((2 * most_open, 6 * most_open, 1 << 20)) + source.randint(0, 3)
    items = blocks * size - source.randint(0, size - 1)
    data = Data(items=items, size=size, ahead=ahead)
    return replace(description, data=data, block_steps=source.randint(1, 3))


def _false_blocks(
    source: random.Random, learners: Sequence[str], quiet_at: float
) -> Iterator[Fault]:
    """What a member may do to the blocks of the others."""
    for kind in BLOCKS:
        begin = source.uniform(0.0, 0.9) * quiet_at
        end = source.uniform(begin, quiet_at)
        yield Fault.parse(str(Fault(kind, source.choice(learners), begin, end)))


def _recoveries(source: random.Random, learners: Sequence[str], quiet_at: float) -> Iterator[Fault]:
    """Learners that lose their state, and what then happens to those whom they ask, or to the syncer."""
    for _ in range(source.randint(1, 3)):
        learner, *others = source.sample(learners, len(learners))
        lost = source.choice((Kind.CHECKPOINT_LOST, Kind.CHECKPOINT_OLD, Kind.CHECKPOINT_DAMAGED))
        at = source.uniform(0.2, max(0.3, 1 - 5.0 / quiet_at)) * quiet_at
        yield Fault.parse(str(Fault(lost, learner, at, at + 0.1)))
        asks = at + RESTART_SECONDS  # some latencies later
        for _ in range(source.choice((0, 1, 2, 4))):
            kind = source.choice((*PEERS, *PEERS, *PROCESS, *_BETWEEN))
            begin = min(asks + source.uniform(-0.5, 1.5), 0.95 * quiet_at)
            end = min(begin + source.choice((0.5, 5.0, 20.0, 100.0)), quiet_at)
            low, high = AMOUNTS.get(kind, (0.0, 0.0))
            amount = math.exp(source.uniform(math.log(low), math.log(high))) if low else 0.0
            target, peer = source.choice(others), learner if kind in _BETWEEN else ""
            if kind in PROCESS:
                target = source.choice((target, target, target + TRAINER, learner, SYNCER))
            yield Fault.parse(str(Fault(kind, target, max(0.0, begin), end, peer, amount)))


def _restored(source: random.Random, quiet_at: float) -> list[Fault]:
    """
    A copy of the syncer's files that is restored after further starts, whose epochs are then used again.

    Not with a flipped bit: what a start may find is then no longer known.
    """
    begin = source.uniform(0.3, 0.9) * quiet_at
    age = source.uniform(0.1, 0.9) * begin
    restored = Fault(Kind.DISK_RESTORED, SYNCER, begin, min(begin + 1.0, quiet_at), amount=age)
    crashes = [
        Fault(Kind.CRASH, SYNCER, at, at + 0.1)
        for at in (begin - age * source.random() for _ in range(source.randint(1, 3)))
    ]
    # Rounded as a printed plan is.
    return [Fault.parse(str(fault)) for fault in (restored, *crashes)]


def _breaking(source: random.Random, learners: Sequence[str], quiet_at: float) -> Fault:
    """A connection that breaks for long: what each loss costs the others adds up."""
    kind, learner = source.choice(BREAKS), source.choice(learners)
    begin = source.uniform(0.0, 0.5) * quiet_at
    end = source.uniform(begin, quiet_at)
    low, high = AMOUNTS[kind]
    amount = math.exp(source.uniform(math.log(low), math.log(high)))
    return Fault.parse(str(Fault(kind, learner, begin, end, amount=amount)))


def _kinds(source: random.Random) -> Mapping[Kind, float]:
    """
    What may go wrong: everything, or in half of the worlds only a few kinds.

    Some defects need many faults of one kind, which others hide by what they end (Groce et al.,
    "Swarm testing", 2012).
    """
    if source.random() < 0.5:
        return SIMULATED
    return {kind: SIMULATED[kind] for kind in source.sample(list(SIMULATED), source.randint(1, 4))}


def _fit(fault: Fault, quiet_at: float, source: random.Random) -> Fault:
    """Over before the quiet period; half of the faults of a learner's process are its trainer's."""
    fault = replace(fault, end=round(max(fault.begin + 0.001, min(fault.end, quiet_at)), 3))
    trainer = source.random() < 0.5
    if fault.kind in PROCESS and fault.target != SYNCER and trainer:
        return replace(fault, target=fault.target + TRAINER)
    return fault


def _without_losses(plan: Plan) -> Plan:
    """
    No crash of the syncer's machine if its disk forgets.

    The promise that a snapshot survives rests on the disk: one whose syncs write nothing has lost, after
    a crash of the machine, what was durable.
    """
    if not plan.only(Kind.DISK_FORGET):
        return plan
    return Plan.of(
        *(replace(f, peer="") if f.peer == POWER and f.target == SYNCER else f for f in plan)
    )


def _choice(source: random.Random, weights: Mapping[T, float]) -> T:
    return source.choices(list(weights), list(weights.values()))[0]


def _sample(seed: int, steps: int, source: random.Random) -> Description:
    learners = _choice(source, LEARNERS)
    fragments = source.randint(1, 6)
    interval = fragments * source.choice((1, 1, 2, 3)) + source.choice((0, 0, 1))
    overlap = source.randint(1, max(1, min(interval - 1, fragments, 3)))
    quorum = source.choice((1, 1, max(1, learners // 2), max(1, learners - 1), learners))
    base = _choice(source, STEP_SECONDS)
    spec = RunSpec(
        job="simulated",
        steps=steps,
        fragments=fragments,
        interval=interval,
        overlap=overlap,
        quorum=quorum,
        grace_max_steps=source.choice((0.0, 1.0, 1.0, 2.0)),
        merge=source.choice(("Radial", "Average")),
        outer_learning_rate=source.choice((0.4, 0.7, 1.0)),
        outer_momentum=source.choice((0.0, 0.5, 0.9)),
        outer_nesterov=source.random() < 0.5,
        wire_up=source.choice(("FP32", "BF16", "Int8", "Int4")),
        wire_down=source.choice(("FP32", "BF16")),
        error_feedback=source.random() < 0.5,
        syncer_checkpoint=Checkpoint(
            every_steps=_choice(source, SNAPSHOT_STEPS), keep=source.randint(1, 3)
        ),
    )
    sizes = tuple(source.randint(1, 300) for _ in range(fragments + source.randint(0, 4)))
    chunked = source.random() < CHUNKED
    factor = source.randint(2, 10) if chunked else 1
    return Description(
        seed=seed,
        steps=steps,
        learners=learners,
        plan=Plan(),
        spec=spec,
        sizes=tuple(factor * size for size in sizes),
        step_seconds=tuple(
            base * source.choice((1.0, 1.0, 1.1, 1.5, 3.0)) * source.uniform(0.95, 1.05)
            for _ in range(learners)
        ),
        latency=source.choice((0.0005, 0.02, 0.1)),
        bandwidth=source.choice((float("inf"), 1e7, 2e5)),
        checkpoint_every=source.choice((None, None, 5, 20)),
        part_bytes=source.choice((PART_BYTES, PART_BYTES, 20_000, 4_000)),
        chunk_elements=source.choice((BLOCK, 2 * BLOCK, 5 * BLOCK)) if chunked else CHUNK,
        window_bytes=source.choice((0, MERGE_WINDOW_BYTES)),
    )
