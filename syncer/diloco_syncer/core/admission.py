"""
Which learners may join: name, incarnation, spec and model of a Hello against those of the job. Pure.

Before, rpc/authorizer.py checks that the peer's certificate names the learner's region. After, the
engine decides which incarnation of the learner is current (core/learners.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diloco.errors import (
    ConfigError,
    DilocoError,
    MismatchError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.model import integers
from diloco.model.fragments import Layout, Tensor, cut, differences
from diloco.runtime.formatting import shorten
from diloco.spec import RunSpec
from diloco_syncer.core.learner_limits import beyond

MAX_ELEMENTS = 1 << 40
"""
Values of a model, constants included, whatever the memory of the syncer. Θ and its momentum are fp32 in
the memory of one process: at this limit 8 TiB, more than any machine that a syncer runs on.
"""

VALUE_BYTES = 8
"""Of a value in Θ and its momentum, both fp32. While a fragment is merged, its new ones exist as well."""

ADVISED_BYTES = 24
"""Of memory per value that a syncer should have (docs/operations.md, "Sizing")."""

MAX_TENSORS = 1 << 16
"""Tensors of a model, constants and aliases included; models of 10^12 parameters have a few thousand."""

MAX_FROZEN = 1 << 17
"""Frozen parameters that stay with the learners, aliases included: only their descriptions are kept."""

MAX_DIMENSIONS = 16
"""Dimensions of a tensor; parameters of known layers have at most 5."""

MAX_NAME = 512
"""Characters of a tensor's name; a name in a deeply nested module has about 100."""

MAX_DTYPE = 32
"""Characters of a dtype; the longest of torch has 15."""

DIGEST_LENGTH = 16
"""Hexadecimal digits of the digest of a frozen parameter."""

MAX_HASH = 64
"""Characters of a foreign spec hash that are kept; our own have 16."""

MAX_REGION = 63
"""Characters of a region's name, a DNS label."""

MAX_CUTS = 4
"""How many models of a fresh job are remembered, so that no repeated Hello is cut again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The description of a model, within the limits above."""

    tensors: tuple[Tensor, ...]
    """By name."""
    constants: tuple[Tensor, ...]
    """By name."""
    frozen: tuple[Tensor, ...]
    """By name."""
    digest: str
    """Equal digests mean equal tensors, and in one job (P, averages) the same layout."""

    @classmethod
    def of(
        cls,
        tensors: Iterable[Tensor],
        constants: Iterable[Tensor] = (),
        frozen: Iterable[Tensor] = (),
    ) -> Model:
        """
        Check a description against the limits, cheapest first.

        Raises:
            ConfigError: a number, length, shape or size is beyond its limit, or a name is not unique.
        """
        trained, fixed, kept = tuple(tensors), tuple(constants), tuple(frozen)
        _check_tensors(trained + fixed, most=MAX_TENSORS)
        _check_tensors(kept, most=MAX_FROZEN)
        for kind in (trained, fixed, kept):
            _check_unique(kind)
            _check_digests(kind, length=DIGEST_LENGTH if kind is kept else 0)
        trained, fixed, kept = _by_name(trained), _by_name(fixed), _by_name(kept)
        rows = [[list(t.to_json().values()) for t in kind] for kind in (trained, fixed, kept)]
        text = json.dumps(rows, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(tensors=trained, constants=fixed, frozen=kept, digest=digest)


def too_many_tensors(count: int, *, most: int) -> ConfigError:
    """The error for a model beyond MAX_TENSORS or MAX_FROZEN."""
    kind = "frozen parameters" if most == MAX_FROZEN else "tensors"
    return ConfigError(
        f"the model has {count} {kind} (aliases included), at most {most} are supported"
    )


def too_many_dimensions(name: str, count: int) -> ConfigError:
    """The error for a tensor beyond MAX_DIMENSIONS."""
    return ConfigError(
        f"tensor {shorten(name, 80)} has {count} dimensions, at most {MAX_DIMENSIONS} are supported"
    )


def _check_tensors(tensors: tuple[Tensor, ...], *, most: int) -> None:
    count = sum(1 + len(tensor.aliases) for tensor in tensors)
    if count > most:
        raise too_many_tensors(count, most=most)
    left = MAX_ELEMENTS
    for tensor in tensors:
        name = shorten(tensor.name, 80)
        if any(len(text) > MAX_NAME for text in (tensor.name, *tensor.aliases)):
            raise ConfigError(f"a name of tensor {name} has more than {MAX_NAME} characters")
        if len(tensor.dtype) > MAX_DTYPE:
            raise ConfigError(f"the dtype of tensor {name} has more than {MAX_DTYPE} characters")
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise too_many_dimensions(tensor.name, len(tensor.shape))
        # Multiplied one by one: the product never grows far beyond the limit.
        # Of integers that move, each takes several values of Θ.
        elements = 0 if 0 in tensor.shape else integers.DIGITS if tensor.newest else 1
        for size in tensor.shape if elements else ():
            elements *= size
            if size < 0 or elements > left:
                raise ConfigError(
                    f"the model has more than {MAX_ELEMENTS} values (by tensor {name})"
                    + ("" if most == MAX_FROZEN else "; a syncer holds Θ and momentum in memory")
                )
        left -= elements


def _check_unique(tensors: tuple[Tensor, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ConfigError(
                f"duplicate tensor names: {shorten(tensor.name, 80)}; give each parameter a name of its own"
            )
        seen.add(tensor.name)


def _check_digests(tensors: tuple[Tensor, ...], *, length: int) -> None:
    for tensor in tensors:
        if len(tensor.digest) != length or not set(tensor.digest) <= set("0123456789abcdef"):
            raise ConfigError(
                f"tensor {shorten(tensor.name, 80)} has the digest {shorten(tensor.digest, 32)!r}, expected "
                f"{length} hexadecimal digits"
            )


def _by_name(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


@dataclass(frozen=True, kw_only=True)
class Applicant:
    """What a learner states about itself in its Hello."""

    job: str
    learner: str
    region: str
    spec_hash: str
    tensors: tuple[Tensor, ...]
    """The trained parameters of its model."""
    constants: tuple[Tensor, ...] = ()
    frozen: tuple[Tensor, ...] = ()
    """Its frozen parameters, unless the job stores them (`RunSpec.frozen`)."""
    incarnation: int = 0
    """What it presents; 0: its process has just started."""

    @cached_property
    def model(self) -> Model:
        """
        Its model, checked once; the thread that received the Hello does it, not the one that decides.

        Raises:
            ConfigError: the description is beyond a limit.
        """
        return Model.of(self.tensors, self.constants, self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The learner may join."""

    layout: Layout
    """The job's, which is also its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The learner may not join."""

    error: DilocoError
    waits: bool = False
    """Only because its model is not the one that counts until Θ exists (core/initialisation.py)."""


class _OtherModelError(UnavailableError):
    """Another model counts until Θ exists; the learner tries again."""


@dataclass(slots=True)
class Admission:
    """
    Admits learners of this job that run its spec and train its model.

    In a fresh job the model is that of the learner that is asked for Θ^(0). It is fixed once Θ exists.
    """

    spec: RunSpec
    layout: Layout | None = None
    """How the job's model is cut; None: no learner has defined it."""
    source: str = ""
    """The learner that uploaded Θ^(0); "": none has, or it is not known."""
    issued_before: int = 0
    """
    Largest incarnation that this job issued before this process started. A crash of the machine may
    lose the record of which learner has it, so a learner may present any of these that no other has.
    """
    memory_bytes: int | None = None
    """That the syncer may use: no model that it cannot hold is admitted. None: not bounded."""
    differing: dict[str, str] = field(default_factory=dict)
    """Learner → hash of the spec for which its last Hello was refused; learners of the job only."""
    _digest: str = ""
    """Model.digest of `layout`."""
    _cuts: dict[str, Layout | DilocoError] = field(default_factory=dict)
    """Model.digest → its layout, or why it has none; the newest MAX_CUTS."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            layout = self.layout
            self._digest = Model.of(layout.tensors, layout.constants, layout.frozen).digest

    def handle(
        self, applicant: Applicant, *, layout_fixed: bool, issued: Mapping[str, int] | None = None,
        limits: Mapping[str, int] | None = None, holder: str = "", preceding: str = "",
    ) -> Admitted | Refused:  # fmt: skip
        """
        Decide about one Hello.

        Args:
            applicant: the Hello.
            layout_fixed: Θ exists, so the model can no longer be redefined.
            issued: learner → its newest incarnation (core/learners.py); None: no learner has any.
            limits: region → learners that it may have (core/learner_limits.py); None: those of the spec.
            holder: until Θ exists, the learner whose model counts; "": none has joined.
            preceding: until Θ exists, the learner that waits and whose model counts before that of this
                one (`Initialisation.preceding`); "": none.

        Returns:
            Admitted, or Refused with UnknownLearnerError (no learner has such a name),
            UnavailableError (it is beyond the limits, which may change, or has another model while Θ
            does not exist), StaleIncarnationError (an incarnation that it was never given),
            MismatchError (every difference spelled out) or ConfigError (the model is beyond a limit, needs
            more memory than there is, or cannot be cut into that many fragments).
        """
        try:
            self._check_name(applicant, self.spec.learners if limits is None else limits)
            self._check_spec(applicant)
            self._check_incarnation(applicant, issued or {})
            if not layout_fixed:
                self._check_turn(applicant, holder, preceding)
            return Admitted(layout=self._agree(applicant, layout_fixed=layout_fixed))
        except _OtherModelError as error:
            return Refused(error=UnavailableError(str(error)), waits=True)
        except DilocoError as error:
            return Refused(error=error)

    def _check_name(self, applicant: Applicant, limits: Mapping[str, int]) -> None:
        learner, region = shorten(applicant.learner, 80), applicant.region
        if applicant.job != self.spec.job:
            raise MismatchError(
                f"{learner} belongs to job {shorten(applicant.job, 80)!r}, but this syncer runs "
                f"{self.spec.job!r}; check DILOCO_SYNCER and DILOCO_JOB"
            )
        # An index has one spelling: eu/007 would be another learner than eu/7.
        name = re.fullmatch(r"([^/]+)/(0|[1-9][0-9]{0,8})", applicant.learner)
        if name is None or name[1] != region or len(region) > MAX_REGION:
            raise UnknownLearnerError(
                f"{learner!r} is not in one of the job's regions {', '.join(sorted(limits))}"
            )
        if detail := beyond(applicant.learner, limits):
            raise UnavailableError(detail)

    def _check_spec(self, applicant: Applicant) -> None:
        self.differing.pop(applicant.learner, None)
        if applicant.spec_hash != self.spec.hash:
            stated = shorten(applicant.spec_hash, MAX_HASH)
            self.differing[applicant.learner] = stated
            raise MismatchError(
                f"{applicant.learner} runs spec {stated}, this syncer runs "
                f"{self.spec.hash}; start it with the spec of this job"
            )
        if applicant.frozen and self.spec.frozen != "Keep":
            raise MismatchError(
                f"{applicant.learner} keeps its {len(applicant.frozen)} frozen parameters, but sync.frozen of "
                f"this job is {self.spec.frozen}; start it with the spec of this job"
            )

    def _check_incarnation(self, applicant: Applicant, issued: Mapping[str, int]) -> None:
        presented = applicant.incarnation
        if presented <= issued.get(applicant.learner, 0):
            return  # fresh, its current one, or replaced: the engine decides
        if presented <= self.issued_before and presented not in issued.values():
            return
        raise StaleIncarnationError(
            f"{applicant.learner} presents incarnation {presented}, which this job never issued to it; "
            "this process must stop"
        )

    def _check_turn(self, applicant: Applicant, holder: str, preceding: str) -> None:
        """Until Θ exists, only the model of one learner counts."""
        name = applicant.learner
        if preceding:
            raise _OtherModelError(
                f"{name} has failed to upload the initial parameters more often than {preceding}, which "
                "waits with another model and comes first; this learner tries again"
            )
        if holder and self.layout is not None and applicant.model.digest != self._digest:
            self._check_memory(applicant.model)
            raise _OtherModelError(
                f"{name} trains a different model than {holder}, which is to upload the initial parameters: "
                f"{self._differences(applicant.model)}. This learner tries again: if they do not arrive, "
                "the model of the next learner counts; if they do, models that differ are refused permanently"
            )

    def _agree(self, applicant: Applicant, *, layout_fixed: bool) -> Layout:
        model = applicant.model
        if self.layout is not None and model.digest == self._digest:
            return self.layout
        enough = len(model.tensors) >= self.spec.fragments
        if self.layout is not None and layout_fixed and enough:
            of = f", which {self.source} initialized" if self.source else ""
            raise MismatchError(
                f"{applicant.learner} trains a different model than this job{of}: {self._differences(model)}"
            )
        self._check_memory(model)
        self.layout, self._digest = self._cut(model), model.digest
        return self.layout

    def _differences(self, model: Model) -> str:
        if self.layout is None:
            raise AssertionError("there is no model to compare with")
        # Not cut: what differs is in the tensors, P and the averages are in the spec's hash.
        theirs = Layout(
            fragments=(), tensors=model.tensors, constants=model.constants, frozen=model.frozen
        )
        return "; ".join(differences(self.layout, theirs)) + _advice(self.layout, theirs)

    def _check_memory(self, model: Model) -> None:
        """A model that this syncer can never hold does not become the job's."""
        values = sum(tensor.length for tensor in model.tensors)
        # Constants are held as they came, in a dtype that has a byte per value at least.
        constants = sum(tensor.elements for tensor in model.constants)
        needed = VALUE_BYTES * values * (self.spec.fragments + 1) // self.spec.fragments + constants
        if self.memory_bytes is None or needed <= self.memory_bytes:
            return
        count = f"{values} values" + (f" and {constants} of constants" if constants else "")
        raise ConfigError(
            f"the model has {count}: Θ, its momentum and the fragment that is merged need at least "
            f"{needed / 2**30:.1f} GiB, and this syncer has {self.memory_bytes / 2**30:.1f} GiB; give the "
            f"syncer more memory ({(ADVISED_BYTES * values + 2 * constants) / 2**30:.1f} GiB are advised), or "
            "train a smaller model"
        )

    def _cut(self, model: Model) -> Layout:
        """The layout of a model that may become the job's, cut once per distinct model."""
        found = self._cuts.pop(model.digest, None) or self._first_cut(model)
        self._cuts[model.digest] = found
        while len(self._cuts) > MAX_CUTS:
            del self._cuts[next(iter(self._cuts))]
        if isinstance(found, DilocoError):
            raise found
        return found

    def _first_cut(self, model: Model) -> Layout | DilocoError:
        try:
            return cut(
                model.tensors,
                num_fragments=self.spec.fragments,
                constants=model.constants,
                frozen=model.frozen,
                average=self.spec.average_parameters,
            )
        except DilocoError as error:
            return error


def _advice(ours: Layout, theirs: Layout) -> str:
    """What to do about frozen parameters that differ, and buffers that only one side merges; "": nothing."""
    if _merged(ours) & _constants(theirs) or _merged(theirs) & _constants(ours):
        return (
            ". Earlier versions kept buffers that change as constants: use one version for the whole job, or start "
            "a new job"
        )
    if ours.frozen == theirs.frozen:
        return ""
    stored = _constants(ours) | _constants(theirs)
    if any(tensor.name in stored for tensor in (*ours.frozen, *theirs.frozen)):
        return (
            ". Earlier versions stored frozen parameters as constants: use one version for the whole job, or start "
            "a new job"
        )
    return (
        ". Frozen parameters stay with the learners (sync.frozen is Keep): every learner must freeze the same "
        "parameters and load the same values"
    )


def _merged(layout: Layout) -> set[str]:
    """Names of the buffers that are merged."""
    return {tensor.name for tensor in layout.tensors if tensor.buffer}


def _constants(layout: Layout) -> set[str]:
    return {tensor.name for tensor in layout.constants}
