"""
Faults as values, and a seeded plan of them.

A plan is what makes a world hard. It can be sampled, printed, read back (`Plan.parse`) and made
smaller (`without`), so a failing run is a short text:

    3.250..9.000 cut eu/0 syncer
    3.500..6.000 latency eu/1 syncer one-way 0.5
    4.100..4.900 crash syncer power
    5.000..8.000 trickle us/1 2000
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """What happens to the target."""

    LATENCY = "latency"
    """`amount` seconds more to and from `peer`; only to `peer` if it is one-way."""
    BANDWIDTH = "bandwidth"
    """`amount` of the bandwidth (a factor) to and from `peer`; only to `peer` if it is one-way."""
    JITTER = "jitter"
    """Up to `amount` seconds more, for each message to and from `peer`, or one-way."""
    CUT = "cut"
    """Nothing passes between target and `peer`."""
    HALF_OPEN = "half-open"
    """Nothing passes from the target to `peer`, and no end notices it by itself."""
    BULK_DEAD = "bulk-dead"
    """No bulk message passes between target and `peer`; control messages do."""
    CONTROL_DEAD = "control-dead"
    """No control message passes between target and `peer`; bulk messages do, and overtake them."""
    CORRUPTION = "corruption"
    """A bulk message from the target to `peer` is damaged with probability `amount`."""
    BULK_BREAKS = "bulk-breaks"
    """Only the header of an upload to a round passes; its connection is reset `amount` seconds after it began."""
    CONTROL_BREAKS = "control-breaks"
    """The connection of the session is reset `amount` seconds after each pull."""
    CRASH = "crash"
    """Killed; starts again at the end. `peer` is "power" if the machine ends with it."""
    PAUSE = "pause"
    """Executes nothing (SIGSTOP)."""
    SLOW = "slow"
    """Its work takes `amount` times as long."""
    JUMP = "jump"
    """Its monotonic clock jumps forward by `amount` seconds."""
    WALL_JUMP = "wall-jump"
    """Its clock of the day jumps by `amount` seconds."""
    DISK_SLOW = "disk-slow"
    """Operations of its disk take `amount` times as long."""
    DISK_HANG = "disk-hang"
    DISK_FULL = "disk-full"
    DISK_FAIL = "disk-fail"
    """An operation fails with EIO with probability `amount`."""
    DISK_FORGET = "disk-forget"
    """A sync writes nothing."""
    DISK_FLIP = "disk-flip"
    """A bit of a file flips."""
    DISK_RESTORED = "disk-restored"
    """The machine ends, and a copy made `amount` seconds before replaces its files; starts at the end."""
    CHECKPOINT_LOST = "checkpoint-lost"
    """The learner's trainer ends and finds no local checkpoint."""
    CHECKPOINT_OLD = "checkpoint-old"
    """The learner's trainer ends and finds its first local checkpoint instead of the newest."""
    CHECKPOINT_FOREIGN = "checkpoint-foreign"
    """The learner's trainer ends and finds a local checkpoint of another run."""
    CHECKPOINT_DAMAGED = "checkpoint-damaged"
    """The learner's trainer ends and finds a local checkpoint that cannot be loaded."""
    LATE = "late"
    """The learner starts at the end, not at the beginning of the world."""
    LEAVE = "leave"
    """The learner, or the syncer, ends in an orderly way (SIGTERM), and comes back at the end."""
    SCALE = "scale"
    """There are `amount` learners."""
    SPEED = "speed"
    """A step of the learner takes `amount` times as long."""
    MUTE = "mute"
    """The learner reports and never uploads."""
    TRICKLE = "trickle"
    """The learner uploads `amount` bytes per second."""
    STALE = "stale"
    """The learner applies no result and repeats its report."""
    WRONG_ROUND = "wrong-round"
    """The learner uploads to another round or attempt than the one that pulled it."""
    LIE_TOKENS = "lie-tokens"
    """The learner states `amount` times its tokens."""
    LIE_STEPS = "lie-steps"
    """The learner states `amount` times its steps."""
    LIE_NORMS = "lie-norms"
    """The learner states `amount` times its norms."""
    LIE_SECONDS = "lie-seconds"
    """The learner states `amount` times its durations, and occasionally none that a clock can show."""
    AHEAD = "ahead"
    """The learner states a position in its data that is `amount` steps ahead; restarts at the end."""
    NAN = "nan"
    """The learner uploads values that are not finite, every other time with plausible norms."""
    HUGE = "huge"
    """The learner uploads as if its parameters were `amount` times as large."""
    WRONG_FORMAT = "wrong-format"
    """The learner states another format than that of the job."""
    IMPERSONATE = "impersonate"
    """The learner opens further sessions: foreign names, incarnations, models, regions and jobs."""
    TWIN = "twin"
    """A second process of the learner joins again and again, and does nothing else."""
    TWICE = "twice"
    """The learner uploads each answer on two streams at once."""
    NEWER = "newer"
    """The learner is of a later release: its messages have fields that the syncer does not know."""
    BLOCKS_KEPT = "blocks-kept"
    """The learner never states that it has trained on a block of data."""
    BLOCKS_FALSE = "blocks-false"
    """The learner states blocks as open and as trained on that it does not have."""
    PEER_MUTE = "peer-mute"
    """The learner takes what another one asks it for, and never answers."""
    PEER_SLOW = "peer-slow"
    """The learner sends another one `amount` bytes of its state per second."""
    PEER_OLD = "peer-old"
    """The learner answers with its first local checkpoint, whichever step is asked for."""
    PEER_FALSE = "peer-false"
    """What the learner sends another one is not what it states; the whole part of `amount` is the way, 1 to 5."""


LINK = (
    Kind.LATENCY,
    Kind.BANDWIDTH,
    Kind.JITTER,
    Kind.CUT,
    Kind.HALF_OPEN,
    Kind.BULK_DEAD,
    Kind.CONTROL_DEAD,
    Kind.CORRUPTION,
)
"""Between target and `peer`."""
DIRECTED = (Kind.LATENCY, Kind.BANDWIDTH, Kind.JITTER)
"""Of a link: each hits both directions, or only the one from target to `peer`."""
BREAKS = (Kind.BULK_BREAKS, Kind.CONTROL_BREAKS)
"""A connection of the learner breaks again and again."""
PROCESS = (Kind.CRASH, Kind.PAUSE, Kind.SLOW, Kind.JUMP, Kind.WALL_JUMP)
DISK = (
    Kind.DISK_SLOW, Kind.DISK_HANG, Kind.DISK_FULL, Kind.DISK_FAIL, Kind.DISK_FORGET, Kind.DISK_FLIP,
)  # fmt: skip
CRASHES = (Kind.CRASH, Kind.DISK_RESTORED)
"""The process is killed, and starts again at the end."""
CHECKPOINT = (
    Kind.CHECKPOINT_LOST, Kind.CHECKPOINT_OLD, Kind.CHECKPOINT_FOREIGN, Kind.CHECKPOINT_DAMAGED,
)  # fmt: skip
"""What a learner's own disk holds when its trainer starts again."""
MEMBERSHIP = (Kind.LATE, Kind.LEAVE, Kind.SCALE, Kind.SPEED)
MISBEHAVIOUR = (
    Kind.MUTE,
    Kind.TRICKLE,
    Kind.STALE,
    Kind.WRONG_ROUND,
    Kind.LIE_TOKENS,
    Kind.LIE_STEPS,
    Kind.LIE_NORMS,
    Kind.LIE_SECONDS,
    Kind.AHEAD,
    Kind.NAN,
    Kind.HUGE,
    Kind.WRONG_FORMAT,
    Kind.IMPERSONATE,
    Kind.TWIN,
    Kind.TWICE,
    Kind.NEWER,
)

BLOCKS = (Kind.BLOCKS_KEPT, Kind.BLOCKS_FALSE)
"""How a member misbehaves that takes blocks of data; only worlds with blocks have them."""

PEERS = (Kind.PEER_MUTE, Kind.PEER_SLOW, Kind.PEER_OLD, Kind.PEER_FALSE)
"""How a member misbehaves that another one asks for its state; only worlds where they ask have them."""

POWER = "power"
"""`peer` of a crash that takes the machine along."""

ONE_WAY = "one-way"
"""After the `peer` of a fault that hits one direction only."""

AMOUNTS: Mapping[Kind, tuple[float, float]] = {
    Kind.LATENCY: (0.01, 2.0),
    Kind.BANDWIDTH: (0.001, 0.5),
    Kind.JITTER: (0.01, 1.0),
    Kind.CORRUPTION: (0.001, 0.5),
    Kind.BULK_BREAKS: (0.0001, 0.5),
    Kind.CONTROL_BREAKS: (0.0001, 0.5),
    Kind.SLOW: (1.5, 20.0),
    Kind.JUMP: (1.0, 300.0),
    Kind.WALL_JUMP: (1.0, 3600.0),
    Kind.DISK_SLOW: (2.0, 1000.0),
    Kind.DISK_FAIL: (0.01, 1.0),
    Kind.DISK_RESTORED: (1.0, 300.0),
    Kind.SCALE: (1.0, 8.0),
    Kind.SPEED: (0.3, 5.0),
    Kind.TRICKLE: (100.0, 1e5),
    Kind.LIE_TOKENS: (1e-3, 1e6),
    Kind.LIE_STEPS: (1e-2, 1e3),
    Kind.LIE_NORMS: (1e-6, 1e6),
    Kind.LIE_SECONDS: (1e-6, 1e6),
    Kind.AHEAD: (10.0, 1e6),
    Kind.HUGE: (1e2, 1e6),
    Kind.PEER_SLOW: (10.0, 1e4),
    Kind.PEER_FALSE: (1.0, 5.99),
}
"""Range of the amounts, sampled evenly by their logarithm."""

WEIGHTS: Mapping[Kind, float] = {
    **dict.fromkeys(LINK, 1.0),
    **dict.fromkeys(PROCESS, 1.0),
    **dict.fromkeys(DISK, 0.5),
    **dict.fromkeys(CHECKPOINT, 0.25),
    **dict.fromkeys(MEMBERSHIP, 0.5),
    Kind.CUT: 2.0,
    Kind.CRASH: 3.0,
    Kind.PAUSE: 2.0,
}
"""How often each kind is sampled unless stated otherwise: faults of honest members only."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong for a while."""

    kind: Kind
    target: str
    """A process; a fault of a process that the world does not have does nothing."""
    begin: float
    """Virtual seconds."""
    end: float
    peer: str = ""
    """The other process of a link."""
    amount: float = 0.0
    one_way: bool = False
    """One of `DIRECTED`: only what the target sends to `peer` is concerned."""

    def __str__(self) -> str:
        fields = [f"{self.begin:.3f}..{self.end:.3f}", self.kind.value, self.target]
        if self.peer:
            fields.append(self.peer)
        if self.one_way:
            fields.append(ONE_WAY)
        if self.amount:
            fields.append(f"{self.amount:.6g}")
        return " ".join(fields)

    @classmethod
    def parse(cls, line: str) -> Fault:
        """
        Read what `str` printed.

        Raises:
            ValueError: it is not a fault.
        """
        try:
            window, kind, target, *rest = line.split()
            begin, end = map(float, window.split(".."))
            amount = float(rest.pop()) if rest and _is_number(rest[-1]) else 0.0
            one_way = Kind(kind) in DIRECTED and rest[-1:] == [ONE_WAY]
            if one_way:
                rest.pop()
            peer = rest.pop() if rest else ""
            if rest:
                raise ValueError(f"{rest[0]} is too much")
            return cls(Kind(kind), target, begin, end, peer, amount, one_way)
        except ValueError as error:
            raise ValueError(
                f"{line.strip()!r} is not a fault, expected 'BEGIN..END KIND TARGET [PEER] [one-way] [AMOUNT]': {error}"
            ) from None


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults in the order of their beginning."""

    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))

    def __len__(self) -> int:
        return len(self.faults)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    @classmethod
    def of(cls, *faults: Fault) -> Plan:
        """A plan of these faults."""
        return cls(tuple(sorted(faults, key=lambda fault: fault.begin)))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """
        Read what `str` printed; empty lines and what follows a # are ignored.

        Raises:
            ValueError: a line is not a fault.
        """
        lines = (line.split("#", 1)[0] for line in text.splitlines())
        return cls.of(*(Fault.parse(line) for line in lines if line.strip()))

    @classmethod
    def sample(
        cls, random: random.Random, *, learners: Sequence[str], syncer: str, horizon: float, count: int,
        weights: Mapping[Kind, float] = WEIGHTS,
    ) -> Plan:  # fmt: skip
        """
        Draw a plan.

        Args:
            random: of the world.
            learners: their processes.
            syncer: its process.
            horizon: when the last fault has begun; most are much shorter.
            count: how many faults.
            weights: relative frequency of each kind; a kind that is missing never happens.
        """
        kinds, frequencies = list(weights), list(weights.values())
        drawn = random.choices(kinds, frequencies, k=count) if count else []
        return cls.of(*(_sample(random, kind, learners, syncer, horizon) for kind in drawn))

    def only(self, *kinds: Kind) -> Plan:
        """The faults of these kinds."""
        return Plan(tuple(fault for fault in self.faults if fault.kind in kinds))

    def at(self, now: float) -> tuple[Fault, ...]:
        """The faults of this moment."""
        return tuple(fault for fault in self.faults if fault.begin <= now < fault.end)

    @property
    def end(self) -> float:
        """When the last fault is over."""
        return max((fault.end for fault in self.faults), default=0.0)


def _sample(
    random: random.Random, kind: Kind, learners: Sequence[str], syncer: str, horizon: float
) -> Fault:  # fmt: skip
    learner = random.choice(learners)
    begin = random.uniform(0, horizon)
    # From a blink to a large part of the world: by its logarithm.
    seconds = math.exp(random.uniform(math.log(0.01), math.log(max(0.02, horizon / 2))))
    low, high = AMOUNTS.get(kind, (0.0, 0.0))
    amount = math.exp(random.uniform(math.log(low), math.log(high))) if low else 0.0
    fault = Fault(
        kind, learner, round(begin, 3), round(begin + seconds, 3), "", float(f"{amount:.4g}")
    )
    if kind in LINK:
        forward = random.random() < 0.5
        target, peer = (learner, syncer) if forward else (syncer, learner)
        one_way = kind in DIRECTED and random.random() < 0.5
        return replace(fault, target=target, peer=peer, one_way=one_way)
    if kind in DISK or kind is Kind.DISK_RESTORED:
        return replace(fault, target=syncer)
    if kind in PROCESS:
        target = syncer if random.random() < 0.25 else learner
        power = POWER if kind is Kind.CRASH and random.random() < 0.3 else ""
        sign = -1.0 if kind is Kind.WALL_JUMP and random.random() < 0.5 else 1.0
        return replace(fault, target=target, peer=power, amount=sign * fault.amount)
    if kind is Kind.LEAVE and random.random() < 0.25:
        return replace(fault, target=syncer)
    if kind is Kind.SCALE:
        return replace(fault, target="learners", amount=float(round(fault.amount)))
    if kind is Kind.LATE:
        return replace(fault, begin=0.0, end=fault.begin)
    return fault


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
