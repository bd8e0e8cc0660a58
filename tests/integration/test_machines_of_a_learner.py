"""
Learners whose ranks are on several machines: real processes, of which DILOCO_MACHINE says where they are.

They train what one process would, and a machine that dies, stands still or cannot be reached ends all of them.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from diloco_testing.learners.ranked import TOLERANCE, Ranks, Reference, largest_difference
from diloco_testing.syncers.process import RealSyncer, make_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def on_machines(*machines: str) -> dict[int, dict[str, str]]:
    """Variables of each rank, by the machine that it is on."""
    return {rank: {"DILOCO_MACHINE": machine} for rank, machine in enumerate(machines)}


SHARDINGS = [
    pytest.param("fsdp", "ab", 8, id="FSDP2, 2 machines x 1"),
    pytest.param("hsdp", "aabb", 2, id="HSDP, a replica on each of 2 machines"),
    pytest.param("fsdp", "aabb", 2, id="FSDP2, 2 machines x 2"),
    pytest.param("ddp", "abc", 8, id="DDP, 3 machines"),
]


@pytest.mark.parametrize(("how", "machines", "fragments"), SHARDINGS)
def test_ranks_on_several_machines_train_what_one_process_does(tmp_path, how, machines, fragments):
    spec = make_spec(
        learners={"eu": 1}, steps=100, fragments=fragments, interval=8, overlap=2, guard=0.0, merge="Average",
    )  # fmt: skip
    with (
        RealSyncer(tmp_path / "syncer", spec) as syncer,
        Ranks(tmp_path, syncer, how, len(machines), variables=on_machines(*machines)) as ranks,
    ):
        found = ranks.results()
        syncer.assert_audit()
        assert [line["reason"] for line in syncer.events("refuse")] == []
        merges = syncer.events("merge")
        log = found[0]["log"]
        assert all(result["log"] == log for result in found), "the ranks applied different results"
        assert len({result["whole"] for result in found}) == 1
        assert len({result["held"] for result in found}) == {"hsdp": 2, "ddp": 1}.get(
            how, len(machines)
        )
        assert len(log) > 60
        assert len(merges) > 10 * fragments
        reference = Reference(syncer, log)
        theta = load_file(next(syncer.dir.rglob("model*.safetensors")))
        whole = torch.load(ranks.out)
    assert reference.merges == []
    assert largest_difference(theta, reference.theta) < TOLERANCE
    trained = {name: p.detach() for name, p in reference.parameters.items()}
    assert largest_difference(whole, trained) < TOLERANCE
