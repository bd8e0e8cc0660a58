"""
Learners whose ranks are on several machines: real processes, DILOCO_MACHINE names the machine of each.

They train what one process would, and a machine that dies, stops responding or cannot be reached ends all of them.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_agent import settings as agent_settings
from diloco_testing.learners.ranked import (
    SECONDS,
    TOLERANCE,
    Ranks,
    Reference,
    free_port,
    largest_difference,
)
from diloco_testing.learners.tunnel import Tunnel
from diloco_testing.local.fake_run import until
from diloco_testing.syncers.process import RealSyncer, make_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def on_machines(*machines: str) -> dict[int, dict[str, str]]:
    """Variables of each rank, by the machine that it is on."""
    return {rank: {"DILOCO_MACHINE": machine} for rank, machine in enumerate(machines)}


SLOW = pytest.mark.slow_tier

SHARDINGS = [
    pytest.param("fsdp", "ab", 8, id="FSDP2, 2 machines x 1"),
    pytest.param("hsdp", "aabb", 2, id="HSDP, a replica on each of 2", marks=SLOW),
    pytest.param("fsdp", "aabb", 2, id="FSDP2, 2 machines x 2", marks=SLOW),
    pytest.param("ddp", "abc", 8, id="DDP, 3 machines", marks=SLOW),
]


@pytest.mark.parametrize(("how", "machines", "fragments"), SHARDINGS)
def test_ranks_on_several_machines_train_what_one_process_does(tmp_path, how, machines, fragments):
    spec = compared(fragments)
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, how, len(machines), variables=on_machines(*machines)) as ranks,
    ):
        assert_as_one_process(syncer, ranks, how, fragments, parts=len(machines))


def compared(fragments: int):
    return make_spec(
        learners={"eu": 1}, steps=100, fragments=fragments, interval=8, overlap=2, guard=0.0, merge="Average",
    )  # fmt: skip


def assert_as_one_process(
    syncer: RealSyncer, ranks: Ranks, how: str, fragments: int, *, parts: int, merges: int | None = None,
    refused: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """The ranks end, with the same results at the same steps, and with what one process would have."""
    found = ranks.results()
    syncer.assert_audit()
    assert {line["reason"] for line in syncer.events("refuse")} <= {*refused}
    merged = syncer.events("merge")
    log = found[0]["log"]
    assert all(result["log"] == log for result in found), "the ranks applied different results"
    assert len({result["whole"] for result in found}) == 1
    assert len({result["held"] for result in found}) == {"hsdp": 2, "ddp": 1}.get(how, parts)
    assert len(log) > 60
    assert len(merged) > (10 * fragments if merges is None else merges)
    reference = Reference(syncer, log)
    theta = load_file(next(syncer.dir.rglob("model*.safetensors")))
    whole = torch.load(ranks.out)
    assert reference.merges == []
    assert largest_difference(theta, reference.theta) < TOLERANCE
    trained = {name: p.detach() for name, p in reference.parameters.items()}
    assert largest_difference(whole, trained) < TOLERANCE


# ---------------------------------------------------------------- failures


@pytest.fixture
def syncer(tmp_path) -> Iterator[RealSyncer]:
    spec = make_spec(learners={"eu": 1}, steps=10**6, fragments=4, interval=4)
    with RealSyncer(tmp_path / "syncer", spec) as running:
        yield running


def until_trained(syncer: RealSyncer) -> None:
    until(lambda: len(syncer.events("merge")) > 4, "merges", seconds=SECONDS)


def ended_within(ranks: Ranks, seconds: float, living: list[int]) -> list[str]:
    """What these ranks show at their end, which comes soon; all with exit code 75."""
    deadline, shown = time.monotonic() + seconds, []
    for rank in living:
        process = ranks.processes[rank]
        _, error = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        assert process.returncode == 75, error
        shown.append(error)
    return shown


@pytest.mark.slow_tier
def test_a_killed_first_rank_of_a_machine_ends_all_ranks_with_one_sentence(tmp_path, syncer):
    with Ranks(tmp_path, syncer, "hsdp", 4, variables=on_machines(*"aabb")) as ranks:
        until_trained(syncer)
        killed = ranks.processes[2]
        killed.kill()
        first, second, last = ended_within(ranks, 60, [0, 1, 3])
    for error in (first, second):
        assert "eu/0: rank 2 on b does not answer" in error
    # It sees what comes first: the process of its leader, or what rank 0 reports.
    assert (
        f"rank 2 (process {killed.pid}) exited, so this learner exits" in last or "rank 2" in last
    )


@pytest.mark.slow_tier
def test_a_killed_rank_is_named_on_the_other_machine(tmp_path, syncer):
    with Ranks(tmp_path, syncer, "hsdp", 4, variables=on_machines(*"aabb")) as ranks:
        until_trained(syncer)
        ranks.processes[3].kill()
        errors = ended_within(ranks, 60, [0, 1, 2])
    sentence = f"rank 3 (process {ranks.processes[3].pid}) exited, so this learner exits"
    assert all(sentence in error for error in errors), errors


@pytest.mark.slow_tier
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_machine_that_stands_still_ends_the_others_and_itself_when_it_continues(
    tmp_path, syncer, frozen
):
    with Ranks(tmp_path, syncer, "plain", 2, variables=on_machines(*"ab")) as ranks:
        until_trained(syncer)
        ranks.processes[frozen].send_signal(signal.SIGSTOP)
        (error,) = ended_within(ranks, 90, [1 - frozen])
        host = "ab"[frozen]
        assert f"eu/0: rank {frozen} on {host} does not answer: nothing came for 15 s" in error
        ranks.processes[frozen].send_signal(signal.SIGCONT)
        (error,) = ended_within(ranks, 60, [frozen])
        assert f"rank {1 - frozen} on {'ab'[1 - frozen]}" in error


def through(tunnel: Tunnel, port: int) -> dict[int, dict[str, str]]:
    """Rank 1 reaches rank 0 through the tunnel."""
    return {
        0: {"DILOCO_MACHINE": "a", "DILOCO_RELAY_PORT": str(port)},
        1: {"DILOCO_MACHINE": "b", "MASTER_ADDR": tunnel.host},
    }


@pytest.mark.slow_tier
@pytest.mark.parametrize("how", ["cut", "still"])
def test_a_connection_that_is_cut_or_silent_ends_both_machines_though_the_collectives_continue(
    tmp_path, syncer, how
):
    relay = free_port()
    with Tunnel({relay: 0}) as tunnel:
        ranks = Ranks(tmp_path, syncer, "plain", 2, variables=through(tunnel, relay))
        with ranks:
            until_trained(syncer)
            getattr(tunnel, how)(relay)
            errors = ended_within(ranks, 90, [0, 1])
    why = {"cut": "the connection was closed", "still": "nothing came for 15 s"}[how]
    assert any(f"does not answer: {why}" in error for error in errors), errors
    ends = ("does not answer", "exited, so this learner exits")
    assert all(any(end in error for end in ends) for error in errors), errors


@pytest.mark.slow_tier
def test_over_a_slow_connection_copies_are_offered_later_and_are_never_torn(tmp_path):
    relay = free_port()
    with (
        RealSyncer(tmp_path / "syncer", compared(2)) as syncer,
        Tunnel({relay: 20_000}) as tunnel,
        Ranks(tmp_path, syncer, "fsdp", 2, variables=through(tunnel, relay)) as ranks,
    ):
        assert_as_one_process(syncer, ranks, "fsdp", 2, parts=2, merges=5)


@pytest.mark.slow_tier
def test_ranks_on_late_devices_of_several_machines_train_what_one_process_does(tmp_path):
    variables = on_machines(*"aab")
    with (
        RealSyncer(tmp_path / "syncer", compared(4)) as syncer,
        Ranks(tmp_path, syncer, "fsdp", 3, variables=variables, more=["late"]) as ranks,
    ):
        # Copies that are late are also those of steps that another round has used.
        assert_as_one_process(syncer, ranks, "fsdp", 4, parts=3, merges=8, refused=("ReportUsed",))


@pytest.mark.slow_tier
def test_sigterm_on_a_machine_ends_all_ranks_at_the_same_step(tmp_path, syncer):
    with Ranks(tmp_path, syncer, "fsdp", 2, variables=on_machines(*"ab")) as ranks:
        until_trained(syncer)
        ranks.processes[1].send_signal(signal.SIGTERM)
        found = ranks.results()
        assert found[0]["log"] == found[1]["log"]
        until(lambda: syncer.events("leave"), "the goodbye", seconds=SECONDS)
        assert syncer.events("leave")[-1]["reason"] == "SIGTERM"
        assert [line["incarnation"] for line in syncer.events("join")] == [1]


@pytest.mark.slow_tier
def test_ranks_that_do_not_fit_end_with_the_same_sentence_on_all_machines(tmp_path, syncer):
    with Ranks(tmp_path, syncer, "other", 2, variables=on_machines(*"ab")) as ranks:
        lines = set()
        for code, error in ranks.ended():
            assert code == 78, error
            lines.add(error.splitlines()[-1])
    assert len(lines) == 1
    assert "do not fit together: compared with the model of rank 0" in lines.pop()


@pytest.mark.slow_tier
def test_torchrun_on_two_machines_starts_such_a_learner(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=30, fragments=2, interval=4)
    port = str(free_port())
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={port}", "--node-rank",
    ]  # fmt: skip
    with RealSyncer(tmp_path / "syncer", spec) as syncer:
        with Ranks(
            tmp_path, syncer, "hsdp", 2, variables=on_machines(*"ab"),
            started=lambda node: [*torchrun, str(node)],
        ) as ranks:  # fmt: skip
            found = ranks.results(each=2)
        assert len(found) == 4
        assert all(result["log"] == found[0]["log"] for result in found)
        assert len({result["whole"] for result in found}) == 1
        assert {m["learner"] for line in syncer.events("merge") for m in line["members"]} == {
            "eu/0"
        }
        syncer.assert_audit()


@pytest.mark.slow_tier
def test_pods_of_a_learner_connect_with_the_environment_that_their_agents_give(tmp_path):
    spec = make_spec(learners={"eu": 1}, steps=30, fragments=2, interval=4)
    variables = {}
    for pod in range(2):
        folder = tmp_path / str(pod)
        folder.mkdir()
        given = agent_settings.read(
            ["learner", "--", "python", "train.py"],
            {
                "DILOCO_JOB": "j", "DILOCO_REGION": "eu", "DILOCO_POD": f"j-eu-{pod}", "DILOCO_PODS_PER_LEARNER": "2",
                "TMPDIR": str(folder),
            },
        ).environment  # fmt: skip
        assert given["MASTER_ADDR"] == "j-eu-0.j-eu", "a name of the cluster's DNS"
        known = {k: v for k, v in given.items() if k.startswith("DILOCO_")}
        # Each pod has one rank: LOCAL_RANK is not set there, which means 0.
        ranks = {"RANK": given["RANK"], "WORLD_SIZE": given["WORLD_SIZE"], "LOCAL_RANK": "0"}
        variables[pod] = {**known, **ranks, "DILOCO_MACHINE": f"j-eu-{pod}"}
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, "fsdp", 2, variables=variables) as ranks,
    ):
        found = ranks.results()
        assert found[0]["log"] == found[1]["log"]
        syncer.assert_audit()
    progress = json.loads(Path(variables[1]["DILOCO_PROGRESS_FILE"]).read_text())
    assert re.fullmatch("step [0-9]+ of this process", progress["why"]), "its liveness"
