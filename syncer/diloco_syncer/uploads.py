"""
Taking in what learners upload: check, stage or stream into a merge, ask again for what arrived damaged.

Runs in the gRPC thread of the stream. Yields the replies; nothing it receives is visible to anybody before the engine
commits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diloco import wire
from diloco.errors import (
    DamagedError,
    DilocoError,
    NotFiniteError,
    ProtocolError,
    StaleEpochError,
    StaleIncarnationError,
    StorageError,
    UnavailableError,
)
from diloco.fragments import CHUNK, Fragment, Layout
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer import state
from diloco_syncer.attempt import Attempt, AttemptAbortedError, Delivery
from diloco_syncer.core import events as ev
from diloco_syncer.core.merge import FragmentMerge, MemberError
from diloco_syncer.runner import Runner
from diloco_syncer.store import raw_tensors
from diloco_syncer.theta import Theta

log = logging.getLogger(__name__)

MOST_REPEATS = 3
"""How often missing or damaged chunks of one upload are asked for again."""

BEGIN_SECONDS = 3600.0
"""How long an upload waits for the other members' answers; the engine ends the attempt long before."""

PROGRESS_SECONDS = 5.0
"""How often the engine is told that a staged upload is still coming in."""

HELD_BACK_SECONDS = 0.2
"""How often a member that is held back by us is noted as alive."""

F32 = npt.NDArray[np.float32]
Take = Callable[[int, memoryview], None]


@dataclass(slots=True)
class Initial:
    """Θ^(0) while it comes in; owned by the service, one per job."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    fragments: dict[int, F32] = field(default_factory=dict)
    constants: bytes | None = None
    by: tuple[str, int] | None = None


def receive(
    runner: Runner,
    initial: Initial,
    messages: Iterator[bytes],
    *,
    admit: Callable[[str], None],
    cancel: Callable[[], None],
) -> Iterator[bytes]:
    """
    Serve one upload stream.

    Args:
        runner: for facts and events.
        initial: collects Θ^(0).
        messages: raw messages of the stream, header first.
        admit: raises UnauthorisedError unless the peer may speak for this learner.
        cancel: ends the stream from another thread.

    Yields:
        Packed UploadReply messages; the last has `done` or `refused`.
    """
    header: bulk.UploadHeader | None = None
    try:
        header = _header(messages)
        admit(header.learner)
        _identify(runner, header)
    except DilocoError as error:
        # Whoever that is: the round that it names is not its own.
        _record(runner, header, error)
        yield _reply(refused=error.reason, detail=str(error))
        return
    try:
        layout = _check(runner, header)
        if header.content in (bulk.INITIAL, bulk.CONSTANTS):
            yield from _initial(runner, initial, header, layout, messages)
        else:
            yield from _member(runner, header, layout.fragments[header.fragment], messages, cancel)
    except DilocoError as error:
        _drop(runner, header, error)
        if isinstance(error, MemberError) and error.learner != header.learner:
            error = AttemptAbortedError(f"the round was aborted: {error}")
        yield _reply(refused=error.reason, detail=str(error))
        return
    except (Exception, GeneratorExit):
        # Whatever it was (mostly the peer is gone), the round must not wait for this member for ever.
        unexpected = ProtocolError("the upload ended unexpectedly; see the log of the syncer")
        _drop(runner, header, unexpected)
        raise
    # After this the peer may end the stream as it likes: it has delivered.
    yield _reply(done=True)


def _record(runner: Runner, header: bulk.UploadHeader | None, error: DilocoError) -> None:
    """A refusal that no round is about."""
    learner = header.learner if header is not None else ""
    log.warning("refused an upload of %s: %s", learner or "somebody", error)
    runner.record("refuse", learner=learner, reason=error.reason, detail=str(error))


def _drop(runner: Runner, header: bulk.UploadHeader, error: DilocoError) -> None:
    """Tell the engine that a member's upload came to nothing."""
    if isinstance(error, UnavailableError):
        return  # nobody's fault: the attempt is over
    if not header.round:
        _record(runner, header, error)
        return
    attempt = runner.attempt(header.round, header.attempt)
    if attempt is not None:
        # The end of the attempt cuts the streams of all members; this one has a reason to hear.
        attempt.delivered(header.learner)
    runner.post(
        ev.Dropped(
            # The thread that completes a chunk may find another member's fault.
            learner=error.learner if isinstance(error, MemberError) else header.learner,
            round=header.round,
            attempt=header.attempt,
            reason=error.reason,
            detail=str(error),
        )
    )


def _reply(
    *, done: bool = False, again: tuple[int, ...] = (), refused: str = "", detail: str = ""
) -> bytes:
    message = bulk.UploadReply(done=done, again=again, refused=refused, detail=detail)
    return wire.pack(wire.Kind.TRAILER, 0, message.SerializeToString())


def _header(messages: Iterator[bytes]) -> bulk.UploadHeader:
    first = next(messages, None)
    if first is None:
        raise ProtocolError("an upload without a header; send UploadHeader first")
    envelope = wire.unpack(first)
    if envelope.kind != wire.Kind.HEADER:
        raise ProtocolError(f"an upload begins with {envelope.kind.name}; send UploadHeader first")
    try:
        return bulk.UploadHeader.FromString(bytes(envelope.payload))
    except Exception as error:
        raise DamagedError(f"the upload's header cannot be read: {error}") from None


def _identify(runner: Runner, header: bulk.UploadHeader) -> None:
    """
    Is the sender a living learner of this epoch?

    Raises:
        StaleEpochError, StaleIncarnationError.
    """
    if header.epoch != runner.engine.epoch:
        raise StaleEpochError(
            f"the upload is for epoch {header.epoch}, this is epoch {runner.engine.epoch}; say Hello again"
        )
    living = runner.living_incarnation(header.learner)
    if living != header.incarnation:
        raise StaleIncarnationError(
            f"incarnation {header.incarnation} of {header.learner} uploads, "
            f"but {'nobody' if living is None else f'incarnation {living}'} has joined; say Hello first"
        )


def _check(runner: Runner, header: bulk.UploadHeader) -> Layout:
    """
    Hold the header against what the syncer knows.

    Raises:
        ProtocolError, NotFiniteError, UnavailableError.
    """
    layout = runner.layout
    if layout is None:
        raise UnavailableError("no model is known yet; say Hello first")
    if header.content == bulk.CONSTANTS:
        _check_constants(header, layout)
        return layout
    if header.fragment >= len(layout.fragments):
        raise ProtocolError(
            f"fragment {header.fragment} does not exist; the model has {len(layout.fragments)}"
        )
    fragment = layout.fragments[header.fragment]
    if (header.elements, header.chunks) != (fragment.elements, fragment.chunks):
        raise ProtocolError(
            f"fragment {header.fragment} came with {header.elements} values in {header.chunks} chunks, "
            f"expected {fragment.elements} in {fragment.chunks}"
        )
    if header.content == bulk.DELTA:
        if len(header.norms) != len(fragment.slots):
            raise ProtocolError(
                f"fragment {header.fragment} came with {len(header.norms)} norms, "
                f"expected {len(fragment.slots)}"
            )
        if not np.isfinite(np.asarray(header.norms, np.float64)).all():
            raise NotFiniteError(
                f"{header.learner}: the delta of fragment {header.fragment} has a norm of NaN or Inf; "
                "look at its loss and learning rate"
            )
        if min(header.norms, default=0.0) < 0:
            raise ProtocolError(f"a norm of {min(header.norms)}; expected 0 or more")
    if header.format not in (bulk.FP32, bulk.BF16, bulk.INT8, bulk.INT4):
        raise ProtocolError(f"format {header.format} is none of FP32, BF16, INT8, INT4")
    if header.content not in (bulk.DELTA, bulk.WHOLE, bulk.INITIAL):
        raise ProtocolError(f"content {header.content} is none of DELTA, WHOLE, INITIAL, CONSTANTS")
    return layout


def _check_constants(header: bulk.UploadHeader, layout: Layout) -> None:
    """Sizes are bounded before anything is made for them; raises ProtocolError."""
    most = sum(16 * t.elements + 1024 for t in layout.constants) + 4096
    chunks = -(-header.elements // (CHUNK * 4))
    if header.elements > most or header.chunks != chunks:
        raise ProtocolError(
            f"constants of {header.elements} bytes in {header.chunks} chunks, expected at most "
            f"{most} for this model, in chunks of {CHUNK * 4}"
        )


def _chunks(messages: Iterator[bytes], count: int, take: Take) -> Iterator[bytes]:
    """
    Take `count` chunks in whatever order they come, each once; ask again for those that are missing or damaged.

    Raises:
        DamagedError: the stream ended early, or a chunk stayed damaged.
    """
    arrivals = wire.Arrivals(count)
    repeats = 0
    for message in messages:
        try:
            envelope = wire.unpack(message)
        except DamagedError as error:
            log.warning("upload: %s", error)
            continue  # it is missing at the end and asked for again
        if envelope.kind == wire.Kind.CHUNK:
            if arrivals.heard(envelope.index):
                take(envelope.index, envelope.payload)
            continue
        if envelope.kind != wire.Kind.END:
            raise ProtocolError(
                f"{envelope.kind.name} in the middle of an upload; expected a chunk"
            )
        missing = arrivals.missing()
        if not missing:
            return
        if repeats == MOST_REPEATS:
            raise DamagedError(
                f"chunks {list(missing[:8])} were still missing or damaged after {repeats} repeats"
            )
        repeats += 1
        yield _reply(again=missing)
    raise DamagedError(f"the upload ended {len(arrivals.missing())} chunks early")


# ---------------------------------------------------------------- members of a round


def _member(
    runner: Runner,
    header: bulk.UploadHeader,
    fragment: Fragment,
    messages: Iterator[bytes],
    cancel: Callable[[], None],
) -> Iterator[bytes]:
    attempt = runner.attempt(header.round, header.attempt)
    if attempt is None or attempt.fragment != header.fragment:
        raise AttemptAbortedError(
            f"round {header.round} attempt {header.attempt} is not running; wait for the next pull"
        )
    theta = runner.theta
    if theta is None:
        raise UnavailableError("there are no parameters yet")
    current = theta.held(header.fragment).version
    if header.content == bulk.DELTA and (header.base.epoch, header.base.step) == current:
        yield from _stream(runner, attempt, header, fragment, messages, cancel)
    else:
        yield from _staged(runner, attempt, theta, header, fragment, messages, cancel)


def _answer(
    runner: Runner, attempt: Attempt, header: bulk.UploadHeader, delivery: Delivery,
    cancel: Callable[[], None],
) -> FragmentMerge:  # fmt: skip
    """Tell the engine what this member brings and wait for the merge."""
    attempt.join(header.learner, delivery, cancel)
    whole = header.content == bulk.WHOLE
    runner.post(
        ev.Answered(
            learner=header.learner,
            incarnation=header.incarnation,
            round=header.round,
            attempt=header.attempt,
            local_step=header.local_step,
            steps=header.steps,
            tokens=header.tokens,
            base=None if whole else (header.base.epoch, header.base.step),
        )
    )
    return attempt.merge(timeout_seconds=BEGIN_SECONDS)


def _stream(
    runner: Runner, attempt: Attempt, header: bulk.UploadHeader, fragment: Fragment,
    messages: Iterator[bytes], cancel: Callable[[], None],
) -> Iterator[bytes]:  # fmt: skip
    """The usual case: a delta against the current version goes chunk by chunk into the merge."""
    delivery = Delivery(format=header.format, norms=tuple(header.norms))
    merge = _answer(runner, attempt, header, delivery, cancel)
    learner = header.learner

    def take(index: int, payload: memoryview) -> None:
        _expect_size(header, fragment, index, payload)
        attempt.moved(learner, len(payload))
        while not merge.wait_for_room(learner, index, HELD_BACK_SECONDS):
            if attempt.over:
                raise AttemptAbortedError(f"round {attempt.round} was aborted")
            attempt.moved(learner, 0)  # held back by us: not stalled
        merge.add(learner, index, payload)

    yield from _chunks(messages, fragment.chunks, take)
    _delivered(runner, attempt, merge, learner)


def _staged(
    runner: Runner, attempt: Attempt, theta: Theta, header: bulk.UploadHeader, fragment: Fragment,
    messages: Iterator[bytes], cancel: Callable[[], None],
) -> Iterator[bytes]:  # fmt: skip
    """Whole, or a delta against an older version: rebuild v = Θ_p − θ_{m,p}, then merge that (decision 9)."""
    current_N = theta.held(header.fragment).theta_N
    base_N: F32 | None = None
    if header.content == bulk.DELTA:
        base = (header.base.epoch, header.base.step)
        base_N = theta.at(header.fragment, base)
        if base_N is None:
            raise ProtocolError(
                f"fragment {header.fragment} came as a delta against {base}, which is no longer here; "
                "send it whole"
            )
    delta_N = np.zeros(fragment.elements, np.float32)
    coming = ev.Progressing(learner=header.learner, round=header.round, attempt=header.attempt)
    said_at = time.monotonic()

    def take(index: int, payload: memoryview) -> None:
        nonlocal said_at
        if attempt.over:
            raise AttemptAbortedError(f"round {attempt.round} was aborted")
        if time.monotonic() - said_at > PROGRESS_SECONDS:
            said_at = time.monotonic()
            runner.post(coming)
        _expect_size(header, fragment, index, payload)
        attempt.bytes_up += len(payload)
        lo, hi = fragment.chunk(index)
        wire.decode(header.format, payload, delta_N[lo:hi])

    yield from _chunks(messages, fragment.chunks, take)
    if base_N is None:
        np.subtract(current_N, delta_N, out=delta_N)
    else:
        delta_N += current_N - base_N
    norms = tuple(wire.slot_norms(fragment, delta_N))
    merge = _answer(runner, attempt, header, Delivery(format=bulk.FP32, norms=norms), cancel)
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        while not merge.wait_for_room(header.learner, index, HELD_BACK_SECONDS):
            if attempt.over:
                raise AttemptAbortedError(f"round {attempt.round} was aborted")
            attempt.moved(header.learner, 0)
        merge.add(header.learner, index, delta_N[lo:hi].view(np.uint8))
    _delivered(runner, attempt, merge, header.learner)


def _expect_size(
    header: bulk.UploadHeader, fragment: Fragment, index: int, payload: memoryview
) -> None:
    lo, hi = fragment.chunk(index)
    expected = wire.encoded_bytes(header.format, hi - lo)
    if len(payload) != expected:
        raise DamagedError(f"chunk {index} has {len(payload)} bytes, expected {expected}")


def _delivered(runner: Runner, attempt: Attempt, merge: FragmentMerge, learner: str) -> None:
    attempt.delivered(learner)
    if merge.finished:
        result = merge.result()
        runner.post(
            ev.Merged(
                round=attempt.round,
                attempt=attempt.attempt,
                delta_norm=result.delta_norm,
                bytes_up=attempt.bytes_up,
                bytes_result=result.encoded_bytes,
            )
        )


# ---------------------------------------------------------------- Θ^(0)


def _initial(
    runner: Runner, initial: Initial, header: bulk.UploadHeader, layout: Layout,
    messages: Iterator[bytes],
) -> Iterator[bytes]:  # fmt: skip
    """A part of Θ^(0); when all parts of one learner's life are here, they become Θ."""
    me = (header.learner, header.incarnation)
    if runner.theta is not None:
        raise ProtocolError("the initial parameters are here already; download them")
    if runner.engine.initialiser != header.learner:
        raise ProtocolError(
            f"{header.learner} uploads initial parameters, but {runner.engine.initialiser} was asked"
        )
    with initial.lock:
        if initial.by != me:
            initial.by, initial.constants = me, None
            initial.fragments.clear()
    if header.content == bulk.CONSTANTS:
        blob = bytearray(header.elements)

        def take_bytes(index: int, payload: memoryview) -> None:
            begin = index * CHUNK * 4
            if begin + len(payload) > len(blob):
                raise DamagedError(f"chunk {index} reaches beyond the {len(blob)} bytes announced")
            blob[begin : begin + len(payload)] = payload

        yield from _chunks(messages, header.chunks, take_bytes)
        constants = bytes(blob)
        _check_names(constants, layout)
        with initial.lock:
            _still(initial, me)
            initial.constants = constants
    else:
        fragment = layout.fragments[header.fragment]
        values_N = np.zeros(fragment.elements, np.float32)

        def take(index: int, payload: memoryview) -> None:
            _expect_size(header, fragment, index, payload)
            lo, hi = fragment.chunk(index)
            wire.decode(header.format, payload, values_N[lo:hi])

        yield from _chunks(messages, fragment.chunks, take)
        with initial.lock:
            _still(initial, me)
            initial.fragments[header.fragment] = values_N
    if initial.constants is not None and len(initial.fragments) == len(layout.fragments):
        runner.ask(lambda: _adopt(runner, initial, layout, header.learner))


def _still(initial: Initial, me: tuple[str, int]) -> None:
    """Nobody else began Θ^(0) while this part came in; raises StaleIncarnationError."""
    if initial.by != me:
        raise StaleIncarnationError(
            f"{initial.by} uploads the initial parameters now; parts of two lives are never mixed"
        )


def _check_names(blob: bytes, layout: Layout) -> None:
    """Θ would be exported without them only at the very end; raises ProtocolError now."""
    expected = {t.name for t in layout.constants}
    try:
        found = set(raw_tensors(blob)) if blob else set()
    except StorageError as error:
        raise ProtocolError(f"the constants cannot be read: {error}") from None
    if not expected <= found:
        raise ProtocolError(f"constants without {', '.join(sorted(expected - found))}")


def _adopt(runner: Runner, initial: Initial, layout: Layout, learner: str) -> None:
    """On the runner's thread: Θ^(0) becomes Θ."""
    if runner.theta is None:
        runner.theta = Theta(
            layout,
            [initial.fragments[f.index] for f in layout.fragments],
            [(runner.engine.epoch, 0)] * len(layout.fragments),
            constants=initial.constants or b"",
            keep_old=state.keep_old(runner.spec),
        )
        runner.post(ev.Initialised(learner=learner))
    initial.fragments.clear()
