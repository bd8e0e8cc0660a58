"""
Messages of learners and evaluators as events and values, with every number bounded. Pure.

The only place where a number of a Hello, a Report or an Evaluation enters the syncer. Counts decide
(data positions, pace, weights), so a message with an impossible count is refused as a whole. Durations
and losses are measurements of a peer's clock and model, which may honestly be unusable (a diverged loss
is NaN), so they are replaced or clamped and the rest of the message counts.

| field | bound | beyond it |
| --- | --- | --- |
| Hello `local_step`, Report `local_step`, `steps` | 0..MAX_STEPS | refused |
| Hello `checkpoint_step`, Report `global_step` | 0..MAX_STEPS | refused |
| Hello `incarnation` | as issued | refused by core/admission.py |
| Hello `tensors`, `constants` | MAX_TENSORS, aliases included, of MAX_DIMENSIONS | refused |
| Hello `frozen` | FROZEN_BYTES; MAX_FROZEN, aliases included, of MAX_DIMENSIONS | refused |
| Hello `facts` | MAX_FACTS of MAX_FACT characters | refused |
| Hello `facts["restarts"]` | below 10^9 | 0 |
| Hello `peer_address` | host:port of MAX_ADDRESS characters | "" (it answers no other) |
| Hello `cluster` | MAX_REGION printable characters | shortened |
| Report `tokens`, `total_tokens` | 0..MAX_TOKENS | refused |
| length of `steps` and `tokens` | P | refused |
| `offers` | distinct fragments below P | refused |
| Blocks `items`, `size` | 1..MAX_ITEMS, `size` up to `items` | refused |
| Blocks `wanted`, length of `open` and `trained` | 0..MAX_OPEN, distinct | refused |
| Blocks serials | below MAX_SERIAL | refused |
| Blocks `begin`, `end` of a trained block | 0..MAX_STEPS, `begin` below `end` | refused |
| Recovery `source` | one of SOURCES | refused |
| Recovery `step`, `age` | 0..MAX_STEPS | refused |
| Recovery `bytes` | 0..MAX_BYTES | refused |
| Recovery `seconds` | as `step_seconds` | as there |
| Recovery `peer`, `problem` | MAX_REASON, MAX_MESSAGE printable characters | shortened |
| Report `step_seconds`, `sync_seconds` | 0..MAX_SECONDS | not finite or negative: 0 (unknown); above: clamped |
| Report `loss` | ±MAX_LOSS | not finite: none; beyond: clamped |
| Evaluation `step` | 0..T | refused |
| Evaluation `loss` | ±MAX_LOSS | not finite: refused (a model without a score has none); beyond: clamped |
| Evaluation `detail` | a JSON object of DETAIL_BYTES | refused |
| Failure and RegionFailure `reason`, `message` | MAX_REASON, MAX_MESSAGE printable characters | shortened |
| RegionFailure `region` | a region of the job | refused |
| members of `detail` | MAX_DETAILS short names with finite numbers or short texts | left out |
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from diloco.errors import ProtocolError
from diloco.rpc.peer_address import is_address
from diloco.rpc.tensor_info import from_proto, unpack_frozen
from diloco.runtime.formatting import shorten
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import (
    MAX_DIMENSIONS,
    MAX_FROZEN,
    MAX_REGION,
    MAX_TENSORS,
    Applicant,
    too_many_dimensions,
    too_many_tensors,
)

MAX_STEPS = 1 << 40
"""Steps of a learner or a job: 35 years at 1000 per second."""

MAX_TOKENS = 1 << 50
"""Tokens of a learner: 10^15. The sum over 1000 learners still fits the int64 of a Kubernetes status."""

MAX_BYTES = 1 << 50
"""That a peer has sent: a state of 10^14 parameters."""

MAX_ITEMS = 1 << 48
"""Items of a dataset: more than all tokens that were ever trained on."""

MAX_OPEN = 32
"""Blocks that may be open at a learner: at some steps each, longer than any round trip."""

MAX_SERIAL = 1 << 62

MAX_SECONDS = 86400.0
"""Longest duration of a step that is kept: a day."""

MAX_LOSS = 1e30
"""Largest loss that is kept; its square is still a finite float64."""

MAX_FACTS = 64
MAX_FACT = 1024
"""Number and length of a Hello's facts; a hostname has at most 253 characters."""

HELLO_BYTES = 4 << 20
"""A Hello or an Evaluation: at 60 bytes per tensor, a model of 65,000 tensors."""

MAX_REASON = 128
"""Characters of a Goodbye's reason that are kept."""

MAX_MESSAGE = 1000
"""Characters of a failure's message that are kept, as many as a condition of Kubernetes has."""

DETAIL_BYTES = 16 << 10
MAX_DETAILS = 64
MAX_DETAIL = 256
"""Bytes of an Evaluation's detail, its numbers, and characters of a name or text in it."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """An evaluation within its bounds."""

    step: int
    loss: float
    detail: dict[str, Any]
    """Further numbers by name."""


def report_bytes(fragments: int) -> int:
    """The most bytes of a LearnerMessage after the Hello: two counts and an offer per fragment."""
    return 4096 + 32 * fragments


def parse(data: bytes, message: type[M], *, most: int) -> M:
    """
    The protobuf message in these bytes.

    Raises:
        ProtocolError: longer than `most` bytes, or not such a message.
    """
    name = message.DESCRIPTOR.name
    if len(data) > most:
        raise ProtocolError(f"a {name} of {len(data)} bytes, expected at most {most}")
    try:
        return message.FromString(data)
    except DecodeError:
        raise ProtocolError(f"{len(data)} bytes that are not a valid {name}") from None


def hello(first: bytes | None) -> pb.Hello:
    """
    The Hello in the first message of a session; None: the stream ended without a message.

    Raises:
        ProtocolError: it is something else.
    """
    if first is not None:
        message = parse(first, pb.LearnerMessage, most=HELLO_BYTES)
        if message.WhichOneof("kind") == "hello":
            return message.hello
    raise ProtocolError("a session begins with Hello")


def received(
    data: bytes, *, session: int, learner: str, fragments: int
) -> ev.Reported | ev.BlocksStated | ev.Recovered | ev.Heartbeat | ev.Left:
    """
    The event of a message after the Hello, for a model with P = `fragments`; Left for a Goodbye.

    Raises:
        ProtocolError: it is too long, or a number in it is beyond its bound.
    """
    message = parse(data, pb.LearnerMessage, most=report_bytes(fragments))
    kind = message.WhichOneof("kind")
    if kind == "report":
        return reported(message.report, session=session, learner=learner, fragments=fragments)
    if kind == "blocks":
        return blocks(message.blocks, session=session, learner=learner)
    if kind == "recovery":
        return recovered(message.recovery, session=session, learner=learner)
    if kind == "goodbye":
        reason = shorten(message.goodbye.reason, MAX_REASON) or "Goodbye"
        return ev.Left(session=session, learner=learner, reason=reason)
    return ev.Heartbeat(session=session, learner=learner)


def applicant(hello: pb.Hello) -> Applicant:
    """
    What a Hello states about its sender; the model is checked when it is first read.

    Raises:
        ProtocolError: a number or a fact is beyond its bound.
        ConfigError: the model has too many tensors, or a tensor too many dimensions.
    """
    _check_counts("local_step", (hello.local_step,), MAX_STEPS)
    _check_counts("checkpoint_step", (hello.checkpoint_step,), MAX_STEPS)
    if len(hello.facts) > MAX_FACTS:
        raise ProtocolError(f"{len(hello.facts)} facts, expected at most {MAX_FACTS}")
    if any(len(text) > MAX_FACT for fact in hello.facts.items() for text in fact):
        raise ProtocolError(f"a fact of more than {MAX_FACT} characters")
    _check_model(hello.tensors, hello.constants, most=MAX_TENSORS)
    return Applicant(
        job=hello.job,
        learner=hello.learner,
        region=hello.region,
        spec_hash=hello.spec_hash,
        tensors=tuple(map(from_proto, hello.tensors)),
        constants=tuple(map(from_proto, hello.constants)),
        frozen=tuple(map(from_proto, _frozen(hello.frozen))),
        incarnation=hello.incarnation,
    )


def _frozen(data: bytes) -> list[pb.TensorInfo]:
    infos = unpack_frozen(data, most=MAX_FROZEN)
    if len(infos) > MAX_FROZEN:
        raise too_many_tensors(len(infos), most=MAX_FROZEN)
    try:
        frozen = [pb.TensorInfo.FromString(info) for info in infos]
    except DecodeError:
        raise ProtocolError("frozen parameters: no valid TensorInfo") from None
    _check_model(frozen, most=MAX_FROZEN)
    return frozen


def _check_model(*kinds: Sequence[pb.TensorInfo], most: int) -> None:
    """
    Check the lengths of what describes the model, before objects are made of it.

    An empty TensorInfo has two bytes: a Hello may hold two million.
    """
    count = sum(map(len, kinds))
    if count <= most:
        count += sum(len(info.aliases) for info in itertools.chain(*kinds))
    if count > most:
        raise too_many_tensors(count, most=most)
    for info in itertools.chain(*kinds):
        if len(info.shape) > MAX_DIMENSIONS:
            raise too_many_dimensions(info.name, len(info.shape))


def joined(
    hello: pb.Hello, *, session: int, incarnation: int, peer: str = "", certificate: str = ""
) -> ev.Hello:
    """The event of a Hello whose `applicant` was admitted."""
    address = hello.peer_address
    return ev.Hello(
        session=session,
        learner=hello.learner,
        region=hello.region,
        incarnation=incarnation,
        fresh=not hello.incarnation,
        local_step=hello.local_step,
        checkpoint_step=hello.checkpoint_step,
        restarts=_restarts(hello.facts.get("restarts", "")),
        peer=peer,
        certificate=certificate,
        peer_address=address if is_address(address) else "",
        cluster=shorten(hello.cluster, MAX_REGION),
    )


def reported(report: pb.Report, *, session: int, learner: str, fragments: int) -> ev.Reported:
    """
    The event of a Report of a model with P = `fragments`.

    Raises:
        ProtocolError: a count is beyond its bound, or a list does not fit the model.
    """
    for name, values in (("steps", report.steps), ("tokens", report.tokens)):
        if len(values) != fragments:
            raise ProtocolError(f"report: {len(values)} {name} for {fragments} fragments")
    offers = frozenset(report.offers)
    if len(offers) != len(report.offers) or any(offer >= fragments for offer in offers):
        raise ProtocolError(f"report: offers that are not distinct fragments below {fragments}")
    _check_counts("local_step", (report.local_step,), MAX_STEPS)
    _check_counts("global_step", (report.global_step,), MAX_STEPS)
    _check_counts("steps", report.steps, MAX_STEPS)
    _check_counts("tokens", report.tokens, MAX_TOKENS)
    _check_counts("total_tokens", (report.total_tokens,), MAX_TOKENS)
    known_loss = report.has_loss and math.isfinite(report.loss)
    return ev.Reported(
        session=session,
        learner=learner,
        local_step=report.local_step,
        steps=tuple(report.steps),
        tokens=tuple(report.tokens),
        offers=offers,
        total_tokens=report.total_tokens,
        global_step=report.global_step,
        step_seconds=_seconds(report.step_seconds),
        sync_seconds=_seconds(report.sync_seconds),
        loss=_loss(report.loss) if known_loss else None,
    )


def recovered(stated: pb.Recovery, *, session: int, learner: str) -> ev.Recovered:
    """
    The event of a Recovery.

    Raises:
        ProtocolError: a number is beyond its bound, or the source is not known.
    """
    if stated.source not in ev.SOURCES:
        source = shorten(stated.source, MAX_REASON)
        raise ProtocolError(f"recovery: source {source!r}, expected one of {', '.join(ev.SOURCES)}")
    _check_counts("recovery: step", (stated.step, stated.age), MAX_STEPS)
    _check_counts("recovery: bytes", (stated.bytes,), MAX_BYTES)
    return ev.Recovered(
        session=session,
        learner=learner,
        source=stated.source,
        peer=shorten(stated.peer, MAX_REASON),
        state_step=stated.step,
        age=stated.age,
        bytes=stated.bytes,
        seconds=_seconds(stated.seconds),
        problem=shorten(stated.problem, MAX_MESSAGE),
    )


def blocks(stated: pb.Blocks, *, session: int, learner: str) -> ev.BlocksStated:
    """
    The event of a Blocks.

    Raises:
        ProtocolError: a number or a list is beyond its bound.
    """
    if not 1 <= stated.size <= stated.items <= MAX_ITEMS:
        raise ProtocolError(
            f"blocks: {stated.items} items in blocks of {stated.size}, expected 1 to {MAX_ITEMS} items, in blocks of "
            "1 item up to all of them"
        )
    serials = [*stated.open, *(block.serial for block in stated.trained)]
    most = max(stated.wanted, len(stated.open), len(stated.trained))
    if most > MAX_OPEN or len(set(serials)) < len(serials):
        raise ProtocolError(f"blocks: {most} of them, or one twice, expected at most {MAX_OPEN}")
    _check_counts("blocks: serial", serials, MAX_SERIAL)
    trained = tuple(
        ev.TrainedBlock(serial=b.serial, begin=b.begin, end=b.end) for b in stated.trained
    )
    _check_counts("blocks: end", (b.end for b in trained), MAX_STEPS)
    if any(b.begin >= b.end for b in trained):
        raise ProtocolError("blocks: one is trained on without a step")
    return ev.BlocksStated(
        session=session,
        learner=learner,
        items=stated.items,
        size=stated.size,
        wanted=stated.wanted,
        open=tuple(stated.open),
        trained=trained,
    )


def score(evaluation: pb.Evaluation, *, steps: int) -> Score:
    """
    The score of a model of a job with T = `steps`.

    Raises:
        ProtocolError: the step is beyond T, the loss is not finite, or the detail is beyond a bound.
    """
    if evaluation.step > steps:
        raise ProtocolError(f"evaluation of step {evaluation.step}, but the job has {steps} steps")
    if not math.isfinite(evaluation.loss):
        raise ProtocolError(f"evaluation: the loss is {evaluation.loss}, expected a finite number")
    detail = _detail(evaluation.detail) if evaluation.detail else {}
    return Score(step=evaluation.step, loss=_loss(evaluation.loss), detail=detail)


def failure(report: pb.Failure) -> tuple[str, str]:
    """
    Reason and message of a failed job.

    Raises:
        ProtocolError: it has no reason.
    """
    if not report.reason:
        raise ProtocolError("a failure without a reason")
    return shorten(report.reason, MAX_REASON), shorten(report.message, MAX_MESSAGE)


def region_failure(report: pb.RegionFailure, regions: Container[str]) -> tuple[str, str, str]:
    """
    Name, reason and message of a region whose learners failed; "" as reason: they no longer have.

    Raises:
        ProtocolError: the job has no such region.
    """
    if report.region not in regions:
        region = shorten(report.region, MAX_REASON)
        raise ProtocolError(f"a failure of region {region}, which the job does not have")
    reason, message = report.reason, report.message
    return report.region, shorten(reason, MAX_REASON), shorten(message, MAX_MESSAGE)


def _detail(text: str) -> dict[str, Any]:
    if len(text.encode()) > DETAIL_BYTES:
        raise ProtocolError(f"evaluation: detail of more than {DETAIL_BYTES} bytes")
    try:
        detail = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ProtocolError("evaluation: detail is not JSON of finite numbers") from None
    if not isinstance(detail, dict):
        raise ProtocolError("evaluation: detail is not a JSON object")
    plain = {n: v for n, v in detail.items() if _is_plain(n) and _is_plain(v)}
    return dict(list(plain.items())[:MAX_DETAILS])


def _is_plain(value: object) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) <= MAX_TOKENS
        case float():
            return math.isfinite(value)
        case str():
            return len(value) <= MAX_DETAIL and value.isprintable()
        case _:
            return False


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _check_counts(name: str, values: Iterable[int], most: int) -> None:
    if (largest := max(values, default=0)) > most:
        raise ProtocolError(f"{name} is {largest}, expected at most {most}")


def _seconds(value: float) -> float:
    """A duration; 0 (unknown) if a clock cannot have measured it."""
    return min(value, MAX_SECONDS) if math.isfinite(value) and value > 0 else 0.0


def _loss(value: float) -> float:
    return max(-MAX_LOSS, min(value, MAX_LOSS))


def _restarts(text: str) -> int:
    """A count that a supervisor states; 0 if it is missing or no plausible number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
