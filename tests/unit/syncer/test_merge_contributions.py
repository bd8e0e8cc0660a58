"""What a merge refuses, which learner it names, and how its threads wait for each other."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.codec import formats
from diloco.errors import (
    AbortedError,
    DamagedError,
    NotFiniteError,
    ProtocolError,
    UnavailableError,
)
from diloco.model.fragments import CHUNK
from diloco_syncer.core.contribution import ContributionError
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging import kernels
from diloco_syncer.merging.streaming import FragmentMerge, _Progress, warm_up
from diloco_testing.syncers.merging import Upload, feed, fragment_of, merge_of, upload, values_of

SMALL = fragment_of(1000, 200)
CHUNKS = fragment_of(100, 4 * CHUNK, 130)
AVERAGED = fragment_of(100, 4 * CHUNK, 130, average=(0, 1, 2))
PATIENCE_SECONDS = 60.0
_COMPILED = (kernels.merge_average, kernels.merge_radial, kernels.step, kernels.square_sum)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def pair(fragment, **changes) -> list[Upload]:
    """Uploads of a/0 and a/1; `changes` are keyword arguments of the latter."""
    return [
        upload(fragment, "a/0", values_of(fragment, seed=0)),
        upload(fragment, "a/1", values_of(fragment, seed=1), **changes),
    ]


def merge_for(uploads: list[Upload], fragment, **kwargs) -> FragmentMerge:
    return merge_of(fragment, [u.contribution for u in uploads], **kwargs)


def waits(future: Future[object]) -> bool:
    """Whether it is still blocked after a while; a true answer costs the while, never luck."""
    try:
        future.result(timeout=0.2)
    except TimeoutError:
        return True
    return False


# ---------------------------------------------------------------- blame


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("merge", ["Radial", "Average"])
@pytest.mark.parametrize("guilty_comes_last", [False, True])
def test_nan_or_inf_names_its_learner_whichever_learner_sends_the_last_chunk(
    poison, merge, guilty_comes_last
):
    uploads = pair(SMALL)
    values_N = uploads[0].values_N.copy()
    values_N[1100] = poison
    broken = replace(uploads[0], chunks=(values_N.tobytes(),))
    running = merge_for(uploads, SMALL, merge=merge)
    order = [uploads[1], broken] if guilty_comes_last else [broken, uploads[1]]
    with pytest.raises(NotFiniteError, match="t1 holds NaN or Inf") as caught:
        feed(running, order)
    assert isinstance(caught.value, ContributionError)
    assert caught.value.learner == "a/0"
    assert not running.finished
    with pytest.raises(AbortedError, match="a/0"):
        running.result()
    with pytest.raises(AbortedError, match="a/0"):
        running.output(0, PATIENCE_SECONDS)


@pytest.mark.parametrize("fmt", [formats.BF16, formats.INT8, formats.INT4])
def test_nan_in_any_format_names_its_learner(fmt):
    uploads = pair(SMALL, fmt=fmt)
    raw = bytearray(uploads[1].chunks[0])
    raw[0:4] = b"\xff\xff\xff\x7f"  # two bf16 or one scale
    running = merge_for(uploads, SMALL)
    with pytest.raises(NotFiniteError) as caught:
        feed(running, [uploads[0], replace(uploads[1], chunks=(bytes(raw),))])
    assert isinstance(caught.value, ContributionError)
    assert caught.value.learner == "a/1"


@pytest.mark.parametrize("merge", ["Radial", "Average"])
@pytest.mark.parametrize("factor", [1.002, 0.998, 0.0, 1e30])
def test_a_norm_that_disagrees_with_what_arrived_names_learner_and_tensor(merge, factor):
    uploads = pair(CHUNKS)
    norms = uploads[1].contribution.norms
    lie = replace(uploads[1].contribution, norms=(norms[0], norms[1] * factor, norms[2]))
    uploads[1] = replace(uploads[1], contribution=lie)
    running = merge_for(uploads, CHUNKS, merge=merge)
    with pytest.raises(
        ContributionError, match=r"a/1: the delta of t1 has norm .* header states"
    ) as caught:
        feed(running, uploads)
    assert caught.value.learner == "a/1"
    assert not running.finished


def test_a_norm_rounded_to_single_precision_is_accepted():
    uploads = pair(CHUNKS)
    rounded = tuple(
        float(np.float32(n) * np.float32(1.0005)) for n in uploads[1].contribution.norms
    )
    uploads[1] = replace(uploads[1], contribution=replace(uploads[1].contribution, norms=rounded))
    running = merge_for(uploads, CHUNKS)
    feed(running, uploads)
    assert running.finished


@pytest.mark.parametrize(
    ("norms", "error", "message"),
    [
        ((1.0,), ProtocolError, "1 norms for a fragment of 2 tensors"),
        ((1.0, float("nan")), NotFiniteError, "norm of t1 is nan"),
        ((float("inf"), 1.0), NotFiniteError, "norm of t0 is inf"),
        ((1.0, -1.0), ProtocolError, "norm of t1 is -1.0"),
    ],
)
def test_norms_that_are_impossible_are_refused_before_the_first_chunk(norms, error, message):
    contribution = pair(SMALL)[1].contribution
    with pytest.raises(error, match=message) as caught:
        replace(contribution, norms=norms).check_norms(SMALL)
    assert caught.value.learner == "a/1"


@pytest.mark.parametrize("merge", ["Radial", "Average"])
@pytest.mark.parametrize("down", [formats.FP32, formats.BF16])
def test_finite_deltas_whose_merge_overflows_name_the_longest(down, merge):
    uploads = pair(SMALL)
    huge = upload(SMALL, "a/1", values_of(SMALL, seed=1, size=5e37))
    running = merge_for(
        [uploads[0], huge],
        SMALL,
        merge=merge,
        outer=OuterOptimizer(learning_rate=1e3, momentum=0.0, nesterov=False),
        down=down,
    )
    with pytest.raises(NotFiniteError, match="leaves the range") as caught:
        feed(running, [uploads[0], huge])
    assert caught.value.learner == "a/1"


def test_finite_directions_whose_sum_overflows_name_the_longest():
    short_N, long_N = (np.zeros(SMALL.elements, np.float32) for _ in range(2))
    # Of norms 1e20 and 5e38, so both directions count: half of the longer norm, and half of 2.5e38.
    short_N[0], long_N[:4] = 1e20, 2.5e38
    uploads = [upload(SMALL, "a/0", short_N), upload(SMALL, "a/1", long_N)]
    running = merge_for(uploads, SMALL)
    with pytest.raises(NotFiniteError, match="its delta of t0 is the longest") as caught:
        feed(running, uploads)
    assert caught.value.learner == "a/1"


def test_a_chunk_of_the_wrong_length_is_damaged_and_aborts():
    uploads = pair(SMALL)
    running = merge_for(uploads, SMALL)
    with pytest.raises(DamagedError, match="has 4796 bytes, expected 5120") as caught:
        running.add("a/0", 0, uploads[0].chunks[0][:4796])
    assert caught.value.learner == "a/0"
    with pytest.raises(AbortedError):
        running.result()


@pytest.mark.parametrize("index", [-1, 1])
def test_a_chunk_that_the_fragment_does_not_have_is_refused(index):
    uploads = pair(SMALL)
    with pytest.raises(ContributionError, match=f"chunk {index} of a fragment of 1"):
        merge_for(uploads, SMALL).add("a/0", index, uploads[0].chunks[0])


def test_a_learner_that_is_not_a_member_is_refused_without_effect():
    uploads = pair(SMALL)
    running = merge_for(uploads, SMALL)
    with pytest.raises(ProtocolError, match="b/0 is not a member"):
        running.add("b/0", 0, uploads[0].chunks[0])
    feed(running, uploads)
    assert running.finished


def test_a_learner_that_contributes_twice_is_a_value_error():
    uploads = pair(SMALL)
    with pytest.raises(ValueError, match="twice"):
        merge_of(SMALL, [uploads[0].contribution, uploads[0].contribution])


def test_a_repeated_chunk_is_ignored_even_if_its_content_differs():
    uploads = pair(CHUNKS)
    straight, again = merge_for(uploads, CHUNKS), merge_for(uploads, CHUNKS)
    feed(straight, uploads)
    again.add("a/0", 0, uploads[0].chunks[0])
    again.add("a/0", 0, uploads[1].chunks[0])
    feed(again, [uploads[1], uploads[0]])
    again.add("a/0", 0, uploads[1].chunks[0])
    assert again.result().theta_N.tobytes() == straight.result().theta_N.tobytes()


def test_a_payload_at_an_odd_address_is_merged():
    uploads = pair(SMALL)
    straight, odd = merge_for(uploads, SMALL), merge_for(uploads, SMALL)
    feed(straight, uploads)
    for each in uploads:
        odd.add(each.contribution.learner, 0, memoryview(b"x" + each.chunks[0])[1:])
    assert odd.result().theta_N.tobytes() == straight.result().theta_N.tobytes()


# ---------------------------------------------------------------- streaming


def test_an_averaged_chunk_is_out_before_the_next_one_is_in():
    uploads = pair(AVERAGED)
    running = merge_for(uploads, AVERAGED)
    for each in uploads:
        running.add(each.contribution.learner, 2, each.chunks[2])
    assert running.output(2, 0) is running.output(2, 0)
    with pytest.raises(UnavailableError, match=r"chunk 0 .* was not merged within 0 s"):
        running.output(0, 0)
    with pytest.raises(UnavailableError, match="4 chunks are not merged"):
        running.result()


def test_a_radial_chunk_is_out_when_its_last_tensor_is_complete():
    fragment = fragment_of(CHUNK, CHUNK // 2, CHUNK, CHUNK // 2)  # chunks 1 and 2 share tensor 2
    uploads = pair(fragment)
    running = merge_for(uploads, fragment)
    ready = []
    for index in (1, 0, 2):
        for each in uploads:
            running.add(each.contribution.learner, index, each.chunks[index])
        out = set()
        for chunk in range(fragment.chunks):
            try:
                running.output(chunk, 0)
            except AbortedError:
                raise
            except UnavailableError:
                continue
            out.add(chunk)
        ready.append(out)
    assert ready == [set(), {0}, {0, 1, 2}]
    assert running.finished


def test_chunks_that_arrived_are_released_once_they_are_merged():
    uploads = pair(AVERAGED)
    running = merge_for(uploads, AVERAGED)
    payload = np.frombuffer(uploads[0].chunks[0], np.uint8)
    alive = weakref.ref(payload)
    running.add("a/0", 0, payload)
    del payload
    kept_before = alive() is not None
    running.add("a/1", 0, uploads[1].chunks[0])
    assert (kept_before, alive() is not None) == (True, False)


def test_a_download_waits_for_its_chunk_and_all_get_the_same_bytes(threads):
    uploads = pair(CHUNKS)
    running = merge_for(uploads, CHUNKS)
    downloads = [threads.submit(running.output, 3, PATIENCE_SECONDS) for _ in range(3)]
    assert waits(downloads[0])
    feed(running, uploads)
    messages = [d.result(PATIENCE_SECONDS) for d in downloads]
    assert messages[0] is messages[1] is messages[2]


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize("merge", ["Radial", "Average"])
def test_any_timing_of_threads_gives_the_same_bits(merge, threads):
    fragment = fragment_of(100, CHUNK, 3 * CHUNK + 7, 130, CHUNK, average=(4,))
    fmts = [formats.FP32, formats.BF16, formats.INT4, formats.FP32, formats.INT8]
    uploads = [
        upload(fragment, f"a/{m}", values_of(fragment, seed=m), weight=m + 1, fmt=fmts[m])
        for m in range(5)
    ]
    straight = merge_for(uploads, fragment, merge=merge)
    feed(straight, uploads)

    def send(running: FragmentMerge, each: Upload) -> None:
        for index, chunk in enumerate(each.chunks):
            assert running.wait_for_room(each.contribution.learner, index, PATIENCE_SECONDS)
            running.add(each.contribution.learner, index, chunk)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            running = merge_for(uploads, fragment, merge=merge, window=1)
            downloads = [
                threads.submit(running.output, index, PATIENCE_SECONDS)
                for index in range(fragment.chunks)
            ]
            for sender in [threads.submit(send, running, each) for each in uploads]:
                sender.result(PATIENCE_SECONDS)
            assert running.finished
            for index, download in enumerate(downloads):
                assert download.result(PATIENCE_SECONDS) == straight.output(index, 0)
            assert running.result().momentum_N.tobytes() == straight.result().momentum_N.tobytes()
            assert running.result().delta_norm == straight.result().delta_norm
    finally:
        sys.setswitchinterval(before)


def test_a_member_is_held_back_once_it_is_a_window_ahead(threads):
    uploads = pair(CHUNKS)
    running = merge_for(uploads, CHUNKS, window=2)
    for index in range(2):
        assert running.wait_for_room("a/0", index, 0)
        running.add("a/0", index, uploads[0].chunks[index])
    assert not running.wait_for_room("a/0", 2, 0)
    held = threads.submit(running.wait_for_room, "a/0", 2, PATIENCE_SECONDS)
    assert waits(held)
    assert running.wait_for_room("a/1", 0, 0)  # the slowest never waits
    running.add("a/1", 0, uploads[1].chunks[0])
    assert held.result(PATIENCE_SECONDS) is True
    assert not running.wait_for_room("a/0", 3, 0)


def test_damaged_chunks_at_the_end_delay_no_learner():
    uploads = pair(CHUNKS)
    running = merge_for(uploads, CHUNKS, window=1)
    for index in range(CHUNKS.chunks):
        for each in reversed(uploads):
            assert running.wait_for_room(each.contribution.learner, index, 0)
            if (each.contribution.learner, index) not in [("a/1", 1), ("a/1", 2)]:
                running.add(each.contribution.learner, index, each.chunks[index])
    assert not running.finished
    for index in (1, 2):
        assert running.wait_for_room("a/1", index, 0)
        running.add("a/1", index, uploads[1].chunks[index])
    assert running.finished


def test_an_abort_wakes_everyone_and_the_first_reason_stays(threads):
    uploads = pair(CHUNKS)
    running = merge_for(uploads, CHUNKS, window=1)
    running.add("a/0", 0, uploads[0].chunks[0])
    held = threads.submit(running.wait_for_room, "a/0", 1, PATIENCE_SECONDS)
    download = threads.submit(running.output, 0, PATIENCE_SECONDS)
    assert waits(held)
    assert waits(download)
    running.abort("a/1 is gone")
    running.abort("something else")
    assert held.result(PATIENCE_SECONDS) is True
    with pytest.raises(AbortedError, match="a/1 is gone"):
        download.result(PATIENCE_SECONDS)
    feed(running, uploads)  # ignored
    assert not running.finished
    with pytest.raises(AbortedError, match="a/1 is gone"):
        running.result()


def test_an_abort_while_others_merge_ends_without_an_error_or_a_result(threads):
    uploads = [upload(CHUNKS, f"a/{m}", values_of(CHUNKS, seed=m)) for m in range(4)]
    for stop_at in range(CHUNKS.chunks):
        running = merge_for(uploads, CHUNKS, window=8)
        barrier = threading.Barrier(len(uploads))
        senders = [
            threads.submit(_send_and_abort, running, each, barrier, stop_at if m == 0 else None)
            for m, each in enumerate(uploads)
        ]
        for sender in senders:
            sender.result(PATIENCE_SECONDS)
        assert not running.finished
        with pytest.raises(AbortedError):
            running.output(CHUNKS.chunks - 1, PATIENCE_SECONDS)


def _send_and_abort(
    running: FragmentMerge, each: Upload, barrier: threading.Barrier, stop_at: int | None
) -> None:
    barrier.wait(PATIENCE_SECONDS)
    for index, chunk in enumerate(each.chunks):
        if index == stop_at:
            running.abort("enough")
        running.add(each.contribution.learner, index, chunk)


@pytest.mark.parametrize("call", ["result", "output"])
def test_a_finished_merge_that_is_aborted_returns_no_result(call):
    uploads = pair(SMALL)
    running = merge_for(uploads, SMALL)
    feed(running, uploads)
    running.abort("a member left before the commit")
    calls: dict[str, Callable[[], object]] = {
        "result": running.result,
        "output": lambda: running.output(0, 0),
    }
    with pytest.raises(AbortedError, match="left before"):
        calls[call]()
    assert not running.finished


def test_after_the_warm_up_a_merge_compiles_nothing():
    warm_up()
    versions = [len(k.signatures) for k in _COMPILED]
    for down in (formats.FP32, formats.BF16):
        for merge in ("Radial", "Average"):
            uploads = pair(CHUNKS, fmt=formats.INT4)
            running = merge_for(uploads, CHUNKS, merge=merge, down=down)
            feed(running, uploads)
            assert running.finished
    assert versions == [len(k.signatures) for k in _COMPILED]


def test_a_result_goes_down_in_no_other_format_than_fp32_or_bf16():
    uploads = pair(SMALL)
    with pytest.raises(ValueError, match="FP32 or BF16, not in format 4"):
        merge_for(uploads, SMALL, down=formats.INT4)


# ---------------------------------------------------------------- many members


class Counted(int):
    """An index that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) > int(other)

    def __le__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) <= int(other)


def comparisons_per_chunk(members: int) -> float:
    fragment = fragment_of(100, average=(0,))
    uploads = [upload(fragment, f"a/{m}", values_of(fragment, seed=m)) for m in range(members)]
    running = merge_for(uploads, fragment)
    Counted.comparisons = 0
    for each in uploads:
        assert running.has_room(each.contribution.learner, Counted(0))
        running.add(each.contribution.learner, Counted(0), each.chunks[0])
    assert running.finished
    return Counted.comparisons / members


def test_the_bookkeeping_of_a_chunk_does_not_depend_on_the_number_of_members():
    assert comparisons_per_chunk(64) == pytest.approx(comparisons_per_chunk(4), abs=1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_the_slowest_member_is_known_after_any_order_of_arrivals(arrivals):
    progress, positions = _Progress(4, chunks=8), [0] * 4
    for row, index in arrivals:
        before = min(positions)
        positions[row] = max(positions[row], min(index, 8))
        assert progress.reached(row, index) == (min(positions) > before)
        assert progress.slowest == min(positions)
