"""Worlds whose payloads have many chunks: windows, gaps and partial repeats happen in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from diloco.model import fragments
from diloco.model.fragments import BLOCK, CHUNK
from diloco_sim import transfers
from diloco_sim.chunks import small_chunks
from diloco_sim.description import Description, sample
from diloco_sim.faults import Plan
from diloco_sim.world import World
from diloco_syncer import coordinator
from diloco_syncer.merging.streaming import FragmentMerge
from diloco_syncer.rpc import receiver
from diloco_worker.link.download import START_SECONDS


def chunked(plan: str, **changes: Any) -> Description:
    """Three learners, one of them slow to send; each fragment has some twenty chunks."""
    found = sample(0, steps=20, faults=False)
    spec = replace(
        found.spec, fragments=2, interval=2, overlap=1, quorum=3, wire_up="FP32", guard=10.0
    )
    return replace(
        found, learners=3, spec=spec, sizes=(2500, 100, 2500, 30), step_seconds=(1.0, 1.1, 1.2),
        plan=Plan.parse(plan), chunk_elements=BLOCK, window_bytes=0, bandwidth=1e6, latency=0.01,
        checkpoint_every=None, **changes,
    )  # fmt: skip


def test_the_size_of_chunks_is_restored_also_after_an_error():
    layout = chunked("").layout

    def failing_world() -> None:
        with small_chunks(BLOCK, 0):
            assert [fragment.chunk_elements for fragment in layout.fragments] == [BLOCK, BLOCK]
            assert layout.fragments[0].chunks > 10
            assert coordinator.MERGE_WINDOW_BYTES == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_world()
    assert (fragments.CHUNK, coordinator.MERGE_WINDOW_BYTES) == (CHUNK, 16 << 20)


@pytest.mark.slow
def test_a_member_ahead_of_the_slowest_waits_for_room(monkeypatch):
    answers: Counter[bool] = Counter()
    has_room = FragmentMerge.has_room

    def counted(self: FragmentMerge, learner: str, index: int) -> bool:
        found = has_room(self, learner, index)
        answers[found] += 1
        return found

    monkeypatch.setattr(FragmentMerge, "has_room", counted)
    outcome = World(chunked("1..60 bandwidth eu/0 syncer one-way 0.02")).run()
    assert outcome.ok, outcome.violation
    assert answers[False] > 10
    assert answers[True] > 100


@pytest.mark.slow
def test_only_the_damaged_chunks_of_an_upload_are_sent_again(monkeypatch):
    again: list[int] = []
    reply = receiver.reply

    def seen(**fields: Any) -> bytes:
        if "again" in fields:
            again.append(len(fields["again"]))
        return reply(**fields)

    monkeypatch.setattr(receiver, "reply", seen)
    outcome = World(chunked("1..60 corruption eu/0 syncer 0.1")).run()
    assert outcome.ok, outcome.violation
    assert len(again) > 5
    assert min(again) == 1
    assert max(again) < 20


def test_a_fifth_of_the_worlds_has_payloads_of_several_chunks():
    found = [sample(seed, faults=False) for seed in range(200)]
    small = [of for of in found if of.chunk_elements < CHUNK]
    assert 20 < len(small) < 60
    assert any(of.window_bytes == 0 for of in small)
    assert all(of.chunk_elements % BLOCK == 0 for of in found)


@pytest.mark.slow
def test_members_that_hold_each_other_back_continue_as_soon_as_there_is_room():
    """One fragment and H = 1: nearly all uploads are against an older version, or of the whole."""
    plain = chunked("")
    spec = replace(plain.spec, fragments=1, interval=1, quorum=2)
    outcome = World(
        replace(plain, learners=2, spec=spec, step_seconds=(0.1, 0.15), latency=0.1, bandwidth=2e5)
    ).run()
    assert outcome.ok, outcome.violation
    assert outcome.seconds < 60.0


@pytest.mark.slow
def test_a_slow_link_brings_a_model_whose_versions_change_meanwhile(monkeypatch):
    """Two streams of 10 kB share 200 B/s: they take far longer than H steps, and never stop."""
    arrived: list[tuple[float, int]] = []
    finish = transfers._Download._finish

    def finished(download: Any, staged: Any = None, **more: Any) -> None:
        if staged is not None and download._identity.learner == "eu/0":
            arrived.append((download._transfers.process.clock.now, staged.fragment))
        finish(download, staged, **more)

    monkeypatch.setattr(transfers._Download, "_finish", finished)
    plain = replace(
        chunked("5..6 crash eu/0\n5..200 bandwidth syncer eu/0 one-way 0.001"),
        bandwidth=2e5, steps=250,
    )  # fmt: skip
    outcome = World(replace(plain, spec=replace(plain.spec, quorum=2, interval=10))).run()
    assert outcome.ok, outcome.violation
    slow = [(at, fragment) for at, fragment in arrived if 6.0 < at < 200.0]
    assert {fragment for _, fragment in slow} == {0, 1}
    assert slow[0][0] > 6.0 + 3 * START_SECONDS
