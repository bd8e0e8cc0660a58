"""What a learner's process writes to tape.jsonl."""

import pytest
import torch
from torch import nn

from diloco.journal import reader, tape
from diloco.journal.replay_epochs import states_epochs, version_of
from diloco.model.fragments import Tensor, cut
from diloco.spec import RunSpec
from diloco_worker.core.messages import LinkState
from diloco_worker.core.trainer import ApplyFragment, TrainerCore
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.tape import Tape

LAYOUT = cut(
    [Tensor(name=name, shape=(3,), dtype="float32") for name in ("a", "b")], num_fragments=2
)


@pytest.fixture
def core():
    made = TrainerCore(
        name="eu/0", fragments=2, found=None, checkpoint_every=None, connect_timeout_seconds=9.0
    )
    made.link_state = LinkState(epoch=2, incarnation=5, step=6)
    return made  # fmt: skip


def applied(core, *versions):
    """The core, with one more step in which these fragments were applied."""
    core.ledger.count(8)
    for fragment, version in versions:
        core.ledger.received(fragment, version=version)
    return [ApplyFragment(fragment) for fragment, _ in versions]


def written(directory):
    [found] = tape.processes(reader.read(directory / tape.TAPE))
    return found


def test_a_version_is_read_with_its_epoch_whether_or_not_the_line_states_it(core, tmp_path):
    core.ledger.received(0, version=(1, 4))
    core.ledger.received(1, version=(2, 6))
    made = Tape(tmp_path, learner="eu/0", restarts=0)
    made.begin(core, LAYOUT, found=0, source="model", optimizers="new")
    made.step(core, applied(core, (0, (2, 7)), (1, (3, 5))), seen=6)
    made.close()
    found = written(tmp_path)
    assert states_epochs(found)
    assert [version_of(held, found) for held in found.begin.held] == [(1, 4), (2, 6)]
    assert [version_of(held, found) for held in found.steps[1].results] == [(2, 7), (3, 5)]
    # Most results are of the epoch in which the process began: their lines are as short as without epochs.
    assert [held.epoch for held in found.steps[1].results] == [None, 3]


def test_a_version_that_is_not_known_has_neither_step_nor_epoch(core, tmp_path):
    core.ledger.received(0, version=(2, 4))
    made = Tape(tmp_path, learner="eu/0", restarts=0)
    made.begin(core, LAYOUT, found=0, source="model", optimizers="new")
    made.close()
    found = written(tmp_path)
    assert found.begin.held[1] == tape.Held(fragment=1, step=-1)
    assert states_epochs(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_digests_of_parameters_do_not_depend_on_the_default_element_type_of_the_program(dtype):
    spec = RunSpec(job="j", steps=8, fragments=2, interval=2, overlap=1, learners={"eu": 1})
    replica = Replica(nn.Linear(3, 4), spec)
    expected, before = replica.digests(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert replica.digests() == expected
    finally:
        torch.set_default_dtype(before)
        replica.close()
