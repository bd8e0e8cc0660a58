"""
RunSpec: what every process of one job must share, and its hash.

Pure. The planner makes it from a DiLoCoJob; the syncer, the learners and the evaluator read it from
the file named by DILOCO_SPEC. Learner and syncer compare `RunSpec.hash` when they connect: it
covers what must never differ between them and leaves out what may change while the job runs (T, K,
checkpoint cadences, who takes part).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diloco.errors import ConfigError

UP_FORMATS = ("FP32", "BF16", "Int8", "Int4")
DOWN_FORMATS = ("FP32", "BF16")
MERGES = ("Radial", "Average")
FROZEN = ("Keep", "Ship")
BUFFERS = ("Average", "Initial")

EVALUATION_SECONDS = 3600.0
"""How long a run of `evaluation.command` may take."""

FINAL_EVALUATION_SECONDS = 2 * EVALUATION_SECONDS + 300.0
"""
How long the evaluator of a complete job may run. When the job completes, it may have begun to score an earlier
model; the last one follows, after its download.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """How often state is written, and how many are kept."""

    every_steps: int
    keep: int


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """
    The shared facts of a job. Fractions are floats here; the manifest's quoted decimals are parsed
    once.
    """

    job: str
    steps: int
    """T: global steps; may be raised while the job runs."""
    seed: int = 0
    fragments: int = 24
    """P."""
    interval: int = 24
    """H: global steps between two syncs of the same fragment."""
    overlap: int = 2
    """τ: rounds that may be in flight."""
    quorum: int = 1
    """K; may change while the job runs."""
    grace_max_steps: float = 1.0
    """Cap of the grace window in compute steps; 0 turns it off."""
    grace_safety: float = 0.8
    """γ in Eq 3."""
    merge: str = "Radial"
    average_parameters: tuple[str, ...] = ()
    frozen: str = "Keep"
    """
    Keep: each learner brings its frozen parameters, which the syncer compares. Ship: the job stores them.
    """
    buffers: str = "Average"
    """What happens to buffers that change while training; Initial: they stay those of step 0."""
    moving_buffers: tuple[str, ...] = ()
    """Patterns of names of such buffers, besides running statistics."""
    guard: float = 10.0
    """Multiple of the members' median norm that a delta may have; 0 turns the guard off."""
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    outer_nesterov: bool = True
    wire_up: str = "BF16"
    wire_down: str = "BF16"
    error_feedback: bool = False
    learners: dict[str, int] = field(default_factory=dict)
    """Region → number of learners; may change while the job runs."""
    learner_checkpoint: Checkpoint = Checkpoint(every_steps=96, keep=2)
    syncer_checkpoint: Checkpoint = Checkpoint(every_steps=48, keep=3)
    snapshot_url: str = ""
    """Where the syncer copies its snapshots, and begins from if it has none; empty: nowhere."""
    output_url: str = ""
    """Where the syncer copies the final model; empty: nowhere."""
    evaluation_every_steps: int | None = None
    evaluation_command: tuple[str, ...] = ()
    recipe: str | None = None
    """Built-in training program; None: the user's own command."""
    recipe_config: dict[str, Any] = field(default_factory=dict)
    """recipe.config of the manifest before any region's config is laid over it."""

    def __post_init__(self) -> None:
        """Refuse values out of bounds, all of them in one message."""
        # Two rounds of one fragment in flight would overwrite each other.
        most_overlap = max(1, min(self.interval - 1, self.fragments))
        problems = [
            text
            for bad, text in (
                (self.steps < 1, f"steps: {self.steps} is less than 1"),
                (self.fragments < 1, f"fragments: {self.fragments} is less than 1"),
                (
                    self.interval < self.fragments,
                    f"interval: {self.interval} is less than the {self.fragments} fragments",
                ),
                (
                    not 1 <= self.overlap <= most_overlap,
                    f"overlap: {self.overlap} is not in 1..{most_overlap}",
                ),
                (self.quorum < 1, f"quorum: {self.quorum} is less than 1"),
                (
                    not 0 <= self.guard < math.inf,
                    f"guard: {self.guard} is not a finite number of 0 or more",
                ),
                (self.merge not in MERGES, f"merge: {self.merge!r} is not one of {MERGES}"),
                (self.frozen not in FROZEN, f"frozen: {self.frozen!r} is not one of {FROZEN}"),
                (
                    self.buffers not in BUFFERS,
                    f"buffers: {self.buffers!r} is not one of {BUFFERS}",
                ),
                (
                    self.wire_up not in UP_FORMATS,
                    f"wire_up: {self.wire_up!r} is not one of {UP_FORMATS}",
                ),
                (
                    self.wire_down not in DOWN_FORMATS,
                    f"wire_down: {self.wire_down!r} is not one of {DOWN_FORMATS}",
                ),
            )
            if bad
        ]
        if problems:
            raise ConfigError("run spec: " + "; ".join(problems))

    @cached_property
    def hash(self) -> str:
        """16 hex digits over everything that must be equal in all processes of the job."""
        data = self._fields()
        for name in (*_MAY_CHANGE, *_COMPARED_AT_JOIN):
            data.pop(name, None)
        return hashlib.sha256(canonical(data).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical JSON with the hash beside the fields; `from_json` reads it back."""
        return canonical({"hash": self.hash, **self._fields()}) + "\n"

    def _fields(self) -> dict[str, Any]:
        # Not asdict: it copies everything, and an operator asks for documents and hashes all the time.
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for f in dataclasses.fields(self):
            value = data[f.name]
            if f.name in _LATER and value == f.default:
                del data[f.name]
            elif isinstance(value, Checkpoint):
                data[f.name] = dataclasses.asdict(value)
        return data

    @classmethod
    def from_json(cls, text: str, *, source: str = "run spec") -> RunSpec:
        """
        Parse the output of `to_json`.

        Raises:
            ConfigError: not JSON, unknown or missing fields, or the stated hash is not that of the
                fields.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{source}: holds a {type(data).__name__}, expected an object")
        stated = data.pop("hash", None)
        fields = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        if unknown := sorted(data.keys() - fields):
            raise ConfigError(f"{source}: unknown fields {', '.join(unknown)}")
        for name, value in data.items():
            if type(value) not in _JSON_TYPES[fields[name]]:
                raise ConfigError(f"{source}: {name} is {value!r}, expected {fields[name]}")
            if isinstance(value, list):
                data[name] = tuple(value)
        try:
            for name in ("learner_checkpoint", "syncer_checkpoint"):
                if name in data:
                    data[name] = Checkpoint(**data[name])
            spec = cls(**data)
            found = spec.hash
        except (TypeError, ConfigError, RecursionError) as error:
            raise ConfigError(f"{source}: {error}") from None
        if stated is not None and stated != found:
            raise ConfigError(
                f"{source}: states hash {stated}, its fields give {found}; write the file again"
            )
        return spec


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "tuple[str, ...]": (list,),
    "dict[str, int]": (dict,),
    "dict[str, Any]": (dict,),
    "Checkpoint": (dict,),
}

_LATER = ("frozen", "buffers", "moving_buffers", "snapshot_url", "output_url")
"""Left out at their defaults: processes of versions that lack them read the document, and agree on the hash."""

_MAY_CHANGE = (
    "steps",
    "quorum",
    "guard",
    "learners",
    "learner_checkpoint",
    "syncer_checkpoint",
    "snapshot_url",
    "output_url",
    "evaluation_every_steps",
    "evaluation_command",
)

_COMPARED_AT_JOIN = ("frozen",)
"""The tensors of a Hello show it, and syncer and learner compare those (core/admission.py)."""


def canonical(data: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
