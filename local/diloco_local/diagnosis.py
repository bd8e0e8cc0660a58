"""
What would go wrong in a job, from three steps of its program: `diloco doctor`. Pure.

Each finding states what was seen and what to do. What was not seen is not reported: a loop without a schedule, or a
model whose inputs could not be compared, has no finding about them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.errors import EXIT_DONE, DamagedError
from diloco.runtime.formatting import duration, ending, shorten, size

STEPS = 3
"""Steps of an examination."""

MAX_TEXT = 600
"""Characters of what a program logged or recorded, in a finding."""

# Of docs/architecture.md, "Memory of the syncer".
SYNCER_BYTES_PER_ELEMENT = 28
SYNCER_BYTES = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis."""

    problem: bool
    """False: worth knowing, but the job works."""
    learners: tuple[str, ...]
    """Where it was seen; (): it concerns the job."""
    text: str
    """What was seen; what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of learner.step()."""

    tokens: int
    finite: bool
    optimizer_steps: int
    """That preceded it since the previous call."""
    rate: float | None
    inputs: str
    """Digest of what the model got while it trained; "": not known."""
    random: str
    """Digest of the random state in which the model drew numbers; "": it drew none, or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the learner of an examination recorded (diloco_worker.examined)."""

    begin: int
    optimizers: int
    model: str
    """Digest of names, shapes and dtypes."""
    elements: int
    constant_bytes: int
    frozen_tensors: int
    frozen_bytes: int
    frozen_digest: str
    moving_buffers: int
    changed_buffers: str
    """A sentence; "": none."""
    not_stepped: str
    """A sentence about trained parameters that no optimizer has; "": none."""
    trained: bool
    """Whether a parameter changed in the three steps."""
    checkpoint_bytes: int
    peak_bytes: int
    shared_bytes: int
    """Of them, pages of files, which processes of one machine share."""
    reads_resumed: bool
    """Whether the program read `Learner.resumed`, as for a warm-up after each start."""
    calls_after_done: int
    steps: tuple[Step, ...]

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """
        The record in a file.

        Raises:
            DamagedError: it is not one.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(
                begin=int(data["begin"]),
                optimizers=int(data["optimizers"]),
                model=str(data["model"]),
                elements=int(data["elements"]),
                constant_bytes=int(data["constantBytes"]),
                frozen_tensors=int(data["frozen"]["tensors"]),
                frozen_bytes=int(data["frozen"]["bytes"]),
                frozen_digest=str(data["frozen"]["digest"]),
                moving_buffers=int(data["movingBuffers"]),
                changed_buffers=shorten(str(data.get("changedBuffers", "")), MAX_TEXT),
                not_stepped=shorten(str(data["notStepped"]), MAX_TEXT),
                trained=bool(data.get("trained", True)),
                checkpoint_bytes=int(data.get("checkpointBytes", 0)),
                peak_bytes=int(data["peakBytes"]),
                shared_bytes=int(data.get("sharedBytes", 0)),
                reads_resumed=bool(data.get("readsResumed", False)),
                calls_after_done=int(data["callsAfterDone"]),
                steps=tuple(map(_step, data["steps"][:STEPS])),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"the record of an examination cannot be read: {error!r}") from None


def _step(data: Mapping[str, Any]) -> Step:
    return Step(
        tokens=int(data["tokens"]),
        finite=bool(data["finite"]),
        optimizer_steps=int(data["optimizerSteps"]),
        rate=None if data["rate"] is None else float(data["rate"]),
        inputs=str(data["inputs"]),
        random=str(data["random"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """One start of the program."""

    learner: str
    record: Record | None
    """None: it did not connect."""
    code: int | None
    """Exit code; None: it was stopped."""
    cause: str
    """The line of its log that states why it ended, or its last line."""
    seconds: float
    """From its start to its end."""
    ending_seconds: float = 0.0
    """Of them, since the third step."""

    @property
    def complete(self) -> bool:
        """Whether it made all steps."""
        return self.record is not None and len(self.record.steps) == STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the job and the machine have for it."""

    learners: int
    learner_checkpoints: int
    """Kept by each learner."""
    snapshots: int
    """Kept by the syncer."""
    log_bytes: int
    """The most that all logs of a run take."""
    free_bytes: int
    """On the disk of the run directory."""
    memory_bytes: int | None
    """Of this machine; None: not known."""
    learner_limits: Mapping[str, int]
    """`resources.limits.memory` by learner, where it is set."""
    syncer_limit: int | None
    """`syncer.resources.limits.memory`."""
    ships_frozen: bool
    """`sync.frozen: Ship`."""


def diagnose(examinations: Sequence[Examination], around: Surroundings) -> list[Finding]:
    """All findings, problems first."""
    found = _joined(
        replace(finding, learners=(examination.learner,))
        for examination in examinations
        for part in (_end, _steps, _model, _memory)
        for finding in part(examination, around)
    )
    if len(examinations) == 2 and all(e.complete for e in examinations):
        found += _compared(examinations[0], examinations[1])
    complete = [e.record for e in examinations if e.complete and e.record is not None]
    if complete:
        found += [*_disk(complete, around), *_machine(complete, around), *_syncer(complete, around)]
    return sorted(found, key=lambda finding: not finding.problem)


def _problem(text: str, *learners: str) -> Finding:
    return Finding(problem=True, learners=learners, text=text)


def _note(text: str, *learners: str) -> Finding:
    return Finding(problem=False, learners=learners, text=text)


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """The same finding of several learners once."""
    texts: dict[tuple[bool, str], tuple[str, ...]] = {}
    for finding in found:
        key = (finding.problem, finding.text)
        texts[key] = (*texts.get(key, ()), *finding.learners)
    return [Finding(problem=p, learners=names, text=text) for (p, text), names in texts.items()]


# ------------------------------------------------------------ one learner


def _end(examination: Examination, around: Surroundings) -> Iterator[Finding]:
    record, code = examination.record, examination.code
    how = "was stopped" if code is None else f"ended with {ending(code)}"
    cause = f" ({shorten(examination.cause, MAX_TEXT)})" if examination.cause else ""
    within = f"within {duration(examination.seconds)}"
    if record is None:
        if code not in (None, EXIT_DONE):
            yield _problem(f"the program {how} before it connected{cause}; fix this first")
            return
        when = within if code is None else "before it ended with exit code 0"
        yield _problem(
            f"the program did not call Learner.connect {when}{cause}; call it, or attach, or give your trainer "
            "DiLoCoCallback; if it needs longer to begin, raise --seconds"
        )
    elif len(record.steps) < STEPS:
        steps = f"{len(record.steps)} of {STEPS} steps"
        if code is None and not record.steps:
            yield _problem(
                f"the program connected, and did not call learner.step() {within}{cause}; call it after each step "
                "of the optimizer; if its first step takes longer, raise --seconds"
            )
        elif code is None:
            yield _problem(f"the program made {steps} {within}{cause}; raise --seconds")
        elif code == EXIT_DONE:
            yield _problem(
                f"the program ended with exit code 0 after {steps}, while learner.done was false{cause}; "
                "its loop must be `while not learner.done`"
            )
        else:
            yield _problem(f"the program {how} after {steps}{cause}; fix this first")
    else:
        yield from _after_done(examination, record, how, cause)


def _after_done(
    examination: Examination, record: Record, how: str, cause: str
) -> Iterator[Finding]:
    if record.calls_after_done > 1:  # one may be the second of two calls in the last step
        yield _problem(
            f"learner.step() was called again although learner.done was true, at least {record.calls_after_done} "
            "times; the loop must be `while not learner.done`"
        )
    elif examination.code is None:
        yield _problem(
            f"the program did not end within {duration(examination.ending_seconds)} after learner.done was true"
            f"{cause}; leave the loop, and stop background threads and processes; if it evaluates or saves at its "
            "end, raise --seconds"
        )
    elif examination.code != EXIT_DONE:
        yield _problem(f"after its last step, the program {how}{cause}; a learner would restart")


def _steps(examination: Examination, around: Surroundings) -> Iterator[Finding]:
    record = examination.record
    if record is None or not record.steps:
        return
    steps = record.steps
    if without := [number for number, step in enumerate(steps, 1) if not step.tokens]:
        yield _problem(
            f"learner.step() was called with tokens=0 in {_numbered(without)}, so that a merge ignores them; pass "
            "the number of tokens, or of any other unit of work"
        )
    if broken := [number for number, step in enumerate(steps, 1) if not step.finite]:
        yield _problem(
            f"the loss was NaN or Inf in {_numbered(broken)}; check the learning rate and the data"
        )
    counts = [step.optimizer_steps for step in steps]
    stepped = [number for number, count in enumerate(counts, 1) if count]
    if stepped and (later := [n for n in range(stepped[0], len(counts)) if not counts[n]]):
        yield _problem(
            f"no optimizer step preceded learner.step() in {_numbered([n + 1 for n in later])}; call it once after "
            "each step of the optimizer"
        )
    if examination.complete and stepped and stepped[0] > 1:
        yield _note(
            f"no optimizer step preceded learner.step() in {_numbered(range(1, stepped[0]))}; call it after the "
            "optimizer's step, unless a loss scaler skipped the first ones"
        )
    if counts and min(counts) > record.optimizers:
        yield _note(
            f"{min(counts)} optimizer steps preceded each learner.step(); if they are one step of training, this is "
            "right; otherwise call it after each"
        )
    if examination.complete and not record.trained and not stepped:
        yield _note(
            f"no optimizer step preceded learner.step(), and no parameter changed in {STEPS} steps; call "
            "optimizer.step(), and give Learner.connect this optimizer; a loss scaler (GradScaler) may have skipped "
            "all of them: give it a lower init_scale, and examine the program again"
        )
    elif examination.complete and not record.trained:
        yield _problem(
            f"no parameter changed in {STEPS} steps; give Learner.connect the model and the optimizer that train, "
            "and check the learning rate"
        )
    if len({step.inputs for step in steps}) == 1 < len(steps) and steps[0].inputs:
        yield _note(
            f"the model got the same batch in all {len(steps)} steps; draw the next batch in each step"
        )


def _model(examination: Examination, around: Surroundings) -> Iterator[Finding]:
    record = examination.record
    if record is None:
        return
    if record.not_stepped:
        yield _problem(record.not_stepped)
    if record.changed_buffers:
        yield _note(record.changed_buffers)
    if record.moving_buffers:
        yield _note(
            f"{record.moving_buffers} buffers change while training: running statistics, and those of "
            "sync.movingBuffers; each round averages them"
        )
    if record.frozen_tensors and around.ships_frozen:
        yield _note(
            f"{size(record.frozen_bytes)} of frozen parameters are stored by the syncer, and each learner downloads "
            "them when it joins; sync.frozen: Keep avoids both"
        )
    elif record.frozen_tensors:
        yield _note(
            f"{size(record.frozen_bytes)} of frozen parameters are not sent; every learner must load the same ones, "
            "and the exported model lacks them"
        )


def _memory(examination: Examination, around: Surroundings) -> Iterator[Finding]:
    record, limit = examination.record, around.learner_limits.get(examination.learner)
    if record is None or limit is None or not record.peak_bytes:
        return
    needed = _needed_bytes(record)
    text = f"the process needed {size(record.peak_bytes)}, and copies for the exchange of fragments add "
    text += f"{size(needed - record.peak_bytes)}; resources.limits.memory is {size(limit)}"
    if needed > limit:
        yield _problem(
            f"{text}: raise it to at least {size(1.25 * needed)}, or use smaller batches"
        )
    elif 1.25 * needed > limit:
        yield _note(f"{text}: little is left for workers of data loaders and for checkpoints")


def _needed_bytes(record: Record) -> int:
    """At least: measured, and host copies and inboxes of all fragments, in fp32."""
    return record.peak_bytes + 8 * record.elements


# ------------------------------------------------------------ two learners


def _compared(first: Examination, second: Examination) -> Iterator[Finding]:
    """What differs although it must not, and what is equal although it must not be."""
    a, b = first.record, second.record
    if a is None or b is None:
        return
    names = (first.learner, second.learner)
    if a.model != b.model:
        yield _problem(
            "their models differ in names, shapes or dtypes, so the job refuses one of them; build the same model in "
            "all learners",
            *names,
        )
    if a.frozen_digest != b.frozen_digest:
        yield _problem(
            "their frozen parameters differ, so the job refuses one of them; load the same base in all learners",
            *names,
        )
    if _equal(a, b, lambda step: step.inputs):
        yield _problem(
            f"both got the same batches in all {STEPS} steps; give each its part of the data: "
            "identity().shard(dataset), or a seed from learner.index",
            *names,
        )
    if _equal(a, b, lambda step: step.random):
        yield _problem(
            "both models drew the same random numbers (dropout); call identity().seed_everything() before training",
            *names,
        )
    rates = [step.rate for step in a.steps]
    if a.begin != b.begin and len(set(rates)) > 1 and rates == [step.rate for step in b.steps]:
        shown = ", ".join(f"{rate:.6g}" for rate in rates if rate is not None)
        text = f"the learning rate was {shown} from global step {a.begin} on, and the same from step {b.begin} on; a "
        text += "learner that restarts or joins later would begin the schedule again: use learner.scheduler(), or "
        text += "learner.step_index"
        if a.reads_resumed and b.reads_resumed:
            yield _note(f"{text}; a warm-up while learner.resumed is false is right", *names)
        else:
            yield _problem(text, *names)


def _equal(a: Record, b: Record, part: Callable[[Step], str]) -> bool:
    pairs = [(part(x), part(y)) for x, y in zip(a.steps, b.steps, strict=True)]
    return all(x and x == y for x, y in pairs)


# ------------------------------------------------------------ the machine


def _disk(records: Sequence[Record], around: Surroundings) -> Iterator[Finding]:
    record = max(records, key=lambda r: r.checkpoint_bytes)
    constants = record.constant_bytes + (record.frozen_bytes if around.ships_frozen else 0)
    parts = {
        "checkpoints of learners": around.learners
        * (around.learner_checkpoints + 1)
        * record.checkpoint_bytes,
        "snapshots": (around.snapshots + 1) * (8 * record.elements + constants),
        "the model": 4 * record.elements + constants,
        "logs": around.log_bytes,
    }
    needed = sum(parts.values())
    text = f"a run on this machine writes up to {size(needed)}: "
    text += ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
    text += f"; {size(around.free_bytes)} are free"
    if needed > around.free_bytes:
        yield _problem(
            f"{text}: free some, choose another disk with --dir, or lower learner.checkpoint.keep and "
            "syncer.checkpoint.keep"
        )
    elif 2 * needed > around.free_bytes:
        yield _note(text)


def _machine(records: Sequence[Record], around: Surroundings) -> Iterator[Finding]:
    measured = [record for record in records if record.peak_bytes]
    if around.memory_bytes is None or not measured:
        return
    shared = max(record.shared_bytes for record in measured)
    own = max(_needed_bytes(record) - record.shared_bytes for record in measured)
    needed = around.learners * own + shared + _syncer_bytes(records)
    if needed > around.memory_bytes:
        yield _problem(
            f"a run on this machine needs at least {size(needed)} of memory: {around.learners} learners with "
            f"{size(own)} each, {size(shared)} of files that they share, and the syncer; it has "
            f"{size(around.memory_bytes)}: run fewer learners on it"
        )


def _syncer(records: Sequence[Record], around: Surroundings) -> Iterator[Finding]:
    needed, limit = _syncer_bytes(records), around.syncer_limit
    if limit is not None and needed > limit:
        yield _problem(
            f"the syncer of this model needs about {size(needed)}; syncer.resources.limits.memory is {size(limit)}: "
            "raise it"
        )


def _syncer_bytes(records: Sequence[Record]) -> int:
    return SYNCER_BYTES_PER_ELEMENT * max(r.elements for r in records) + SYNCER_BYTES


def _numbered(numbers: Sequence[int]) -> str:
    """
    Steps by their numbers.

    >>> _numbered([2]), _numbered(range(1, 4))
    ('step 2', 'steps 1, 2, 3')
    """
    noun = "step" if len(numbers) == 1 else "steps"
    return f"{noun} {', '.join(map(str, numbers))}"
