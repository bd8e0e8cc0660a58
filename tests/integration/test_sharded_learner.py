"""
Learners of several ranks, each of which connects: they train what one process would, and stay equal.

For those on several machines, see test_machines_of_a_learner.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.runtime import health
from diloco.spec import Checkpoint
from diloco_testing.learners import sharded
from diloco_testing.learners.ranked import (
    SECONDS,
    TOLERANCE,
    Ranks,
    Reference,
    largest_difference,
)
from diloco_testing.local.fake_run import until
from diloco_testing.local.run_process import children
from diloco_testing.syncers.process import RealSyncer, make_spec

SHARDINGS = [
    pytest.param("fsdp", 2, 8, id="FSDP2 x 2"),
    pytest.param("ddp", 2, 8, id="DDP x 2", marks=pytest.mark.slow_tier),
    pytest.param("plain", 2, 8, id="replicas x 2", marks=pytest.mark.slow_tier),
    pytest.param("fsdp", 3, 8, id="FSDP2 x 3", marks=pytest.mark.slow_tier),
    pytest.param("hsdp", 4, 2, id="HSDP 2 x 2", marks=pytest.mark.slow_tier),
    pytest.param("tensor", 4, 2, id="TP x FSDP 2 x 2", marks=pytest.mark.slow_tier),
    pytest.param("experts", 2, 4, id="experts x 2", marks=pytest.mark.slow_tier),
    pytest.param("experts", 4, 2, id="experts x FSDP2 2 x 2", marks=pytest.mark.slow_tier),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "size", "fragments"), SHARDINGS)
def test_sharded_ranks_train_what_one_process_does(tmp_path, how, size, fragments):
    assert_as_one_process(tmp_path, how, size, fragments, merges=10 * fragments)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "size", "fragments"), SHARDINGS)
def test_sharded_ranks_on_late_devices_train_what_one_process_does(tmp_path, how, size, fragments):
    assert_as_one_process(tmp_path, how, size, fragments, merges=2 * fragments, more=["late"])


def assert_as_one_process(tmp_path, how, size, fragments, *, merges, more=()) -> None:
    """The ranks end, with the same results at the same steps, and with what one process would have."""
    spec = make_spec(
        learners={"eu": 1},
        steps=100,
        fragments=fragments,
        interval=8,
        overlap=2,
        guard=0.0,
        merge="Average",
    )
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, how, size, more=more) as ranks,
    ):
        found = ranks.results()
        syncer.assert_audit()
        refused = {line["reason"] for line in syncer.events("refuse")}
        # Copies that are late are also those of steps that another round has used.
        assert refused <= ({"ReportUsed"} if "late" in more else set())
        log = found[0]["log"]
        assert all(result["log"] == log for result in found), "the ranks applied different results"
        assert len({result["whole"] for result in found}) == 1
        if how in ("ddp", "plain"):
            assert len({result["held"] for result in found}) == 1
        if how == "hsdp":
            assert len({result["held"] for result in found}) == 2
        assert len(log) > 60
        assert len(syncer.events("merge")) > merges
        reference = Reference(syncer, log, how)
        theta = load_file(next(syncer.dir.rglob("model*.safetensors")))
        whole = torch.load(ranks.out)
    assert reference.merges == []
    assert largest_difference(theta, reference.theta) < TOLERANCE
    assert (
        largest_difference(whole, {n: p.detach() for n, p in reference.parameters.items()})
        < TOLERANCE
    )
    moved = largest_difference(theta, dict(sharded.make_model(how).named_parameters()))
    assert moved > 1000 * TOLERANCE


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(600)
def test_sigterm_for_one_rank_ends_all_at_the_same_step_and_one_process_continues(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=10**6, fragments=4, interval=4)
    with RealSyncer(tmp_path / "syncer", spec) as syncer:
        with Ranks(tmp_path, syncer, "fsdp", 2) as ranks:
            until(lambda: len(syncer.events("merge")) > 8, "merges", seconds=SECONDS)
            ranks.processes[1].send_signal(signal.SIGTERM)
            found = ranks.results()
        assert found[0]["log"] == found[1]["log"]
        last = found[0]["log"][-1][0]
        until(lambda: syncer.events("leave"), "the goodbye", seconds=SECONDS)
        assert syncer.events("leave")[-1]["reason"] == "SIGTERM"
        with Ranks(tmp_path, syncer, "alone", 1) as alone:
            merged = len(syncer.events("merge"))
            until(
                lambda: len(syncer.events("merge")) > merged + 4,
                "merges of the other",
                seconds=SECONDS,
            )
            alone.processes[0].send_signal(signal.SIGTERM)
            (second,) = alone.results()
        assert second["log"][0][0] == last + 1, "the position in the data is kept"
        assert [line["incarnation"] for line in syncer.events("join")] == [1, 2]
        syncer.assert_audit()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.slow_tier
@pytest.mark.parametrize(
    ("how", "difference"),
    [
        (
            "other",
            "compared with the model of rank 0, in that of rank 1 parameter 4.bias is missing",
        ),
        (
            "other mesh",
            "0.bias is a DTensor with placements (S(0)) on a mesh of [2] in rank 0, and a DTensor with placements "
            "(R, S(0)) on a mesh of [1, 2] in rank 1",
        ),
    ],
)
def test_ranks_with_different_models_or_meshes_end_with_the_difference(tmp_path, how, difference):
    spec = make_spec(learners={"eu": 1}, steps=100, fragments=4, interval=4)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, how, 2) as ranks,
    ):
        for code, error in ranks.ended():
            assert code == 78, error
            assert f"the ranks of this learner do not fit together: {difference}" in error
        assert syncer.events("join") == []


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(600)
def test_ranks_whose_plain_tensors_differ_end_with_their_names(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=100, fragments=4, interval=4)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, "own experts", 2) as ranks,
    ):
        for code, error in ranks.ended():
            assert code == 78, error
            assert (
                "the plain tensors 2.experts.weight have other values in rank 1 than in rank 0"
                in error
            )
            assert "distribute_tensor with Shard(0)" in error
        assert syncer.events("join") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_dies_while_the_ranks_join_ends_the_others_though_no_parent_reaps_it(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=100, fragments=4, interval=4)
    with RealSyncer(tmp_path / "syncer", spec) as syncer:
        syncer.kill()  # the ranks wait for it
        with Ranks(tmp_path, syncer, "plain", 2) as ranks:
            first, second = ranks.processes
            shown = []
            while not shown or "2 ranks train together" not in shown[-1]:
                shown.append(first.stderr.readline())
                assert shown[-1], shown
            second.kill()
            _, error = first.communicate(timeout=60)
            assert first.returncode == 75, error
            assert f"rank 1 (process {second.pid}) exited, so this learner exits" in error


def link_of(ranks: Ranks) -> int | None:
    """Process of the link, a child of rank 0."""
    for child in children(ranks.processes[0].pid):
        if b"diloco_worker.link" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return child
    return None


REPLICAS = [
    pytest.param("plain", 2, id="replicas x 2"),
    pytest.param("ddp", 2, id="DDP x 2"),
    pytest.param("hsdp", 4, id="HSDP 2 x 2"),
]


def assert_replicas_equal(found: list[dict], how: str, moment: str = "held") -> None:
    """All ranks followed the same results, and those that hold the same have the same bits."""
    assert all(result["log"] == found[0]["log"] for result in found)
    shards = 2 if how == "hsdp" else 1
    for shard in range(shards):
        assert len({result[moment] for result in found[shard::shards]}) == 1
    assert len({result[moment] for result in found}) == shards


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("how", "size"), REPLICAS)
def test_replicas_stay_equal_when_link_and_syncer_are_killed_and_the_syncer_loses_its_snapshots(
    tmp_path, how, size
):
    spec = make_spec(learners={"eu": 1}, steps=200, fragments=8, interval=8, overlap=2)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, how, size) as ranks,
    ):
        for _ in range(2):
            before = len(syncer.events("merge"))
            until(lambda n=before: len(syncer.events("merge")) > n + 10, "merges", seconds=SECONDS)
            link = link_of(ranks)
            os.kill(link, signal.SIGKILL)
            until(lambda old=link: link_of(ranks) not in (None, old), "a link", seconds=SECONDS)
        until(lambda: len(syncer.events("merge")) > 40, "merges", seconds=SECONDS)
        syncer.kill()
        shutil.rmtree(syncer.dir / "snapshots")  # Θ, but not who may continue
        syncer.start()
        before = len(syncer.events("merge"))
        until(lambda: len(syncer.events("merge")) > before + 10, "merges", seconds=SECONDS)
        syncer.kill()
        syncer.start()
        found = ranks.results()
        assert len(syncer.events("initialised")) == 2
    assert len(found[0]["log"]) > 200
    assert_replicas_equal(found, how)


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("how", "size"), REPLICAS)
def test_replicas_are_equal_after_a_killed_rank_and_a_restart(tmp_path, how, size):
    spec = make_spec(
        learners={"eu": 1}, steps=200, fragments=4, interval=4,
        learner_checkpoint=Checkpoint(every_steps=4, keep=2),
    )  # fmt: skip
    with RealSyncer(tmp_path / "syncer", spec) as syncer:
        with Ranks(tmp_path, syncer, how, size) as ranks:
            state = tmp_path / "eu/0"
            until(
                lambda: len(syncer.events("merge")) > 10 and [*state.glob("checkpoint-*.json")],
                "merges and a checkpoint", seconds=SECONDS,
            )  # fmt: skip
            ranks.processes[-1].kill()
            codes = [code for code, _ in ranks.ended()]
            assert codes[-1] == -signal.SIGKILL
            assert 0 not in codes
        before = len(syncer.events("merge"))
        with Ranks(tmp_path, syncer, how, size) as ranks:
            found = ranks.results()
        assert len(syncer.events("merge")) > before + 20
        assert [line["incarnation"] for line in syncer.events("join")] == [1, 2]
        syncer.assert_audit()
    for moment in ("began", "held"):
        assert_replicas_equal(found, how, moment)
    assert found[0]["began"] != found[0]["held"]
    assert found[0]["log"][0][0] > 4, "it continues with its local step"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_never_connects_ends_the_others_which_name_it(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=100, fragments=4, interval=4)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, "absent", 2) as ranks,
    ):
        first, second = ranks.processes
        _, error = first.communicate(timeout=SECONDS)
        assert first.returncode == 75, error
        assert (
            "learner eu/0: rank 1 of 2 has not called Learner.connect within 5 s; expected every rank to call it, or "
            "rank 0 alone with every_rank=False"
        ) in error
        assert second.poll() is None, "nothing but its absence ended the other"
        assert syncer.events("join") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        pytest.param("left out", 1, id="left out"),
        pytest.param("twice", -1, id="twice", marks=pytest.mark.slow_tier),
    ],
)
def test_a_rank_that_calls_step_once_less_or_more_ends_the_learner_before_a_mixed_upload(
    tmp_path, what, difference
):
    spec = make_spec(learners={"eu": 1}, steps=10**6, fragments=4, interval=4)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, "ddp", 2, more=[what]) as ranks,
    ):
        ended = ranks.ended()
        assert ended[0][0] == 75, ended
        assert ended[1][0] != 0, "an error of gloo may be the first that it sees"
        found = re.search(
            r"after as many calls of learner\.step\(\), rank 0 has made (\d+) optimizer steps, and rank 1 "
            r"\(process \d+\) (\d+); expected every rank to call learner\.step\(\) once after each optimizer step",
            ended[0][1],
        )
        assert found, ended[0][1]
        first, second = map(int, found.groups())
        assert second - first == difference
        copied = [m["step"] for line in syncer.events("merge") for m in line["members"]]
        assert all(step < sharded.WRONG_STEP for step in copied), "of steps that all ranks made"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "mistake", "parameters"),
    [
        pytest.param("fsdp", "mistaken", "parameters 0.weight, 0.bias, 2.weight, .*", id="FSDP2 x 2"),
        pytest.param("ddp", "mistaken rank", "parameters", id="DDP x 2", marks=pytest.mark.slow_tier),
    ],
)  # fmt: skip
def test_weights_that_ranks_load_and_results_that_they_undo_are_named_once_by_rank_0(
    tmp_path, how, mistake, parameters
):
    spec = make_spec(learners={"eu": 1}, steps=10**6, fragments=4, interval=4)
    file = tmp_path / "health.json"
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(
            tmp_path, syncer, how, 2, more=[mistake],
            variables={0: {"DILOCO_HEALTH_FILE": str(file)}},
        ) as ranks,
    ):  # fmt: skip
        until(lambda: (found := health.read(file)) and found.problem, "a problem", seconds=SECONDS)
        found = health.read(file)
        ranks.processes[1].send_signal(signal.SIGTERM)
        (first, error), (second, other) = ranks.ended()
    assert (first, second) == (0, 0), (error, other)
    assert found.problem == "OtherModel"
    assert found.why.startswith("the last 4 results of merges were undone in the next step")
    lines = error.splitlines()
    assert lines.count(found.why) == 1, error
    assert sum("were undone" in line for line in lines) == 1, error
    [written] = [line for line in lines if "were written between Learner.connect" in line]
    assert re.match(f"{parameters} were written between", written)
    rank_1 = f"; noticed in rank 1 (process {ranks.processes[1].pid})"
    if mistake == "mistaken rank":
        assert found.why.endswith(rank_1)
        assert written.endswith(rank_1)
    else:
        assert "noticed in" not in written, "all ranks load them before the same step"
    assert "were undone" not in other, "rank 0 alone names it"
    assert "were written between" not in other
