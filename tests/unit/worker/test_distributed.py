"""A rank that waits for another: it ends with a sentence, and never without an end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from diloco.errors import StorageError
from diloco.model.fragments import Tensor, cut
from diloco_testing.learners import control_area
from diloco_testing.learners.rank_threads import in_ranks
from diloco_testing.local.fake_run import until
from diloco_worker import distributed
from diloco_worker.core import trainer as core
from diloco_worker.core.agreement import HOME, PLANS, FirstRank, Plan
from diloco_worker.core.findings import NONE, Finding, Findings
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.rooms import Devices, Rooms
from diloco_worker.core.trainer import TrainerCore
from diloco_worker.distributed import DistributedTrainer
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.job_trainer import LATE_STEPS
from diloco_worker.trainer import rank_processes, undone
from diloco_worker.trainer.buffers import WRITTEN, Loaded
from diloco_worker.trainer.first_rank import LinkRank
from diloco_worker.trainer.kept import KeptState
from diloco_worker.trainer.optimizer_steps import OptimizerSteps
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_processes import RankProcess


def rank(number: int) -> DistributedTrainer:
    """One of two ranks, without a model and without the others."""
    trainer = DistributedTrainer.__new__(DistributedTrainer)
    trainer.name, trainer._rank, trainer._first, trainer._journal = "eu/0", number, None, None
    trainer._boundary, trainer._terminated, trainer._steps = 0, False, {}
    trainer._group = RankGroup("eu/0", dist.HashStore(), rank=number, size=2, timeout_seconds=1)
    trainer._group.processes = {0: RankProcess.own(), 1: RankProcess.own()}
    trainer._machines = SimpleNamespace(
        failure="", close=lambda: None, entered=lambda *_, **__: None
    )
    trainer._model_copied = False
    trainer._board = control_area.board(ranks=2, fragments=1)
    trainer._core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=1.0
    )
    nothing = SimpleNamespace(
        close=lambda: None, restore=lambda: None, give_up=lambda: None, received=False,
        refused="", end=lambda boundary, fetches: boundary, stepped=lambda: None, findings=NONE,
    )  # fmt: skip
    trainer._checkpoints, trainer._kept = None, KeptState(trainer._show, trainer._end)
    trainer._replica = trainer._run_queue = trainer._termination = nothing
    return trainer


def ending(capfd: pytest.CaptureFixture[str], wait) -> str:
    """The sentence with which the process ends; the exit code is that of trying again."""
    with pytest.raises(SystemExit) as stopped:
        wait()
    assert stopped.value.code == 75
    return capfd.readouterr().err


def test_a_rank_whose_program_has_no_collective_waits_for_its_plan_with_a_deadline(
    monkeypatch, capfd
):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0.05)
    trainer = rank(1)
    trainer._core.joined = True
    text = ending(capfd, lambda: trainer._plan(1))
    own = trainer._group.processes[0].pid
    assert (
        f"eu/0: rank 0 (process {own}) did not end the step before within 0 s; expected every rank to call"
        in text
    )
    assert "each step to have a collective of the training" in text


def test_rank_0_waits_for_the_other_ranks_with_a_deadline(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0.05)
    trainer = rank(0)
    trainer._group.processes = {}
    assert "rank 0, rank 1 did not take the job's model within 0 s; its own output" in ending(
        capfd, lambda: trainer._await_ranks(1)
    )
    trainer = rank(0)
    trainer._core.joined, trainer._group.processes = True, {}
    trainer._board.enter(0, 1, terminated=False)
    assert "rank 1 did not end the step before the last within 0 s" in ending(
        capfd, lambda: trainer._await_ranks(1)
    )


def test_a_rank_that_is_waited_for_is_named_before_the_deadline_by_one_rank(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "SHOWN_SECONDS", 0.0)
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0.1)
    first, second = rank(0), rank(1)
    for trainer in (first, second):
        trainer._group.processes = {}
        trainer._board.enter(0, 1, terminated=False)
    shown = "diloco: eu/0: waiting up to 0 s for rank 1\n"
    assert ending(capfd, lambda: first._await_ranks(1)).startswith(shown)
    assert shown not in ending(capfd, lambda: second._plan(2)), "it waits for itself"
    for who in range(2):
        second._board.enter(who, 1, terminated=False)
    text = ending(capfd, lambda: second._plan(2))
    assert text.startswith("diloco: eu/0: waiting up to 0 s for rank 0\n")


def test_a_failure_on_another_machine_ends_a_rank_that_waits_and_one_that_does_not(capfd):
    trainer = rank(0)
    trainer._machines.failure = "rank 1 on b does not answer: the connection was closed"
    expected = "diloco: eu/0: rank 1 on b does not answer: the connection was closed\n"
    assert ending(capfd, lambda: trainer._await_ranks(1)) == expected
    trainer = rank(0)
    trainer._machines.failure = "rank 1 on b does not answer: the connection was closed"
    assert ending(capfd, lambda: trainer.done) == expected


def test_a_rank_that_ends_by_its_own_decision_or_an_error_does_not_look_as_if_it_left(capfd):
    trainer = rank(0)
    ending(capfd, lambda: trainer._exit("too far behind"))
    assert trainer._board.failure == "too far behind"
    trainer = rank(1)
    trainer.close(ValueError("in the program"))
    assert trainer._board.failure.endswith("exited with ValueError, so this learner exits")
    trainer = rank(1)
    trainer.close()
    assert not trainer._board.failure


def test_a_rank_that_ends_after_a_failure_does_not_wait_for_a_checkpoint(capfd):
    finished = []
    for error in (ValueError("in the program"), None):
        trainer = rank(0)
        trainer._checkpoints = SimpleNamespace(finish=lambda: finished.append(1))
        trainer.close(error)
        assert len(finished) == (error is None)


def test_a_rank_of_another_machine_that_left_is_named_by_one_that_waits_for_it(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "ALIVE_SECONDS", 0.0)
    trainer = rank(0)
    trainer._group.processes = {0: RankProcess.own()}
    trainer._group.hosts = {1: "b"}
    trainer._board.leave(1)
    assert "rank 1 on b exited, so this learner exits" in ending(
        capfd, lambda: trainer._await_ranks(1)
    )


@pytest.fixture
def zombie():
    """A process that has ended, and that its parent has not reaped."""
    process = subprocess.Popen(["sleep", "600"])
    found = RankProcess(pid=process.pid, started=rank_processes._state(process.pid)[1])
    assert not found.ended
    process.kill()
    until(lambda: rank_processes._state(process.pid)[0] == "Z", "a zombie")
    yield found
    process.wait()


@pytest.mark.parametrize("dead", [0, 1])
def test_any_rank_that_has_ended_is_noticed_though_it_is_a_zombie(monkeypatch, capfd, zombie, dead):
    monkeypatch.setattr(distributed, "ALIVE_SECONDS", 0.0)
    for waiting in (lambda t: t._plan(1), lambda t: t._await_ranks(1)):
        trainer = rank(1)
        trainer._group.processes[dead] = zombie
        text = ending(capfd, lambda t=trainer, wait=waiting: wait(t))
        assert f"eu/0: rank {dead} (process {zombie.pid}) exited, so this learner exits" in text


def test_a_rank_that_ended_after_its_part_is_not_missed(zombie, monkeypatch):
    monkeypatch.setattr(distributed, "ALIVE_SECONDS", 0.0)
    trainer, replies = rank(0), iter([False, False, True, True])
    trainer._group.processes[1] = zombie
    trainer._await(lambda: next(replies), lambda: [1], "did not end the step before")


def test_a_later_process_with_the_same_pid_is_another_one():
    own = RankProcess.own()
    assert not own.ended
    assert dataclasses.replace(own, started=own.started + 1).ended
    assert RankProcess(pid=2**22 + 1, started=1).ended


@pytest.mark.parametrize("broken", ["folder", "file"])
def test_a_disk_that_refuses_the_files_of_rank_0_ends_all_ranks_with_its_sentence(tmp_path, broken):
    state = tmp_path / "state"
    if broken == "folder":
        state.write_text("")
    else:
        (state / "steps.jsonl").mkdir(parents=True)
    found = in_ranks(2, lambda group: distributed._journal(SimpleNamespace(state=state), group))
    assert [type(error) for error in found] == [StorageError, StorageError]
    assert str(state) in str(found[0])
    assert str(found[1]) == f"rank 0: {found[0]}"


def test_a_line_of_steps_jsonl_has_learning_rate_and_age_of_the_result_where_they_are_known():
    """As that of a learner of one process."""
    trainer, lines = rank(0), []
    actions = [[core.ApplyFragment(0), core.ApplyFragment(1)], []]
    trainer._core = SimpleNamespace(
        closed=False, link_state=LinkState(step=12), ledger=SimpleNamespace(versions=[(1, 9), (1, 7)]),
        step=lambda *_, **__: actions.pop(0), copied=lambda *_, **__: [], line=lambda **_: {"localStep": 3},
        ended=lambda **_: None, checks=SimpleNamespace(),
    )  # fmt: skip
    trainer._replica = SimpleNamespace(
        refused="", problem="", apply=lambda fragment: None, end=lambda boundary, fetches: boundary,
        stepped=lambda: None, findings=NONE,
    )  # fmt: skip
    trainer._run_queue = SimpleNamespace(seconds=lambda: 0.0)
    trainer._termination = SimpleNamespace(received=False)
    trainer._journal = SimpleNamespace(append=lines.append)
    trainer._loss = SimpleNamespace(read=lambda loss: None, value=None, newly_finite=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    trainer._optimizer_steps = OptimizerSteps([optimizer])
    for boundary in (1, 2):
        trainer._board.publish(Plan(boundary=boundary, link_state=LinkState()))
        if boundary == 2:
            weight.grad = torch.ones(1)
            optimizer.step()
        trainer.step(tokens=1)
    assert lines == [
        {"localStep": 3, "resultAge": 5},
        {"localStep": 3, "learningRate": 0.25},
    ]


def calls(
    first: DistributedTrainer,
    second: DistributedTrainer,
    *,
    left_out: int,
    twice: int,
    who: int,
    order: Sequence[int] = (0, 1),
) -> None:
    """
    The calls of `step` of two ranks after each of twelve optimizer steps, whose collective keeps them together.

    Args:
        first: rank 0.
        second: rank 1.
        left_out: the optimizer step after which rank `who` does not call it; 0: none.
        twice: after which it calls it twice; 0: none.
        who: 0 | 1.
        order: who is the first if both can continue.
    """
    trainers = (first, second)
    for step in range(1, 13):
        due = [1, 1]
        due[who] += (step == twice) - (step == left_out)
        while any(due):
            for rank in order:
                trainer = trainers[rank]
                trainer._optimizer_steps = SimpleNamespace(first=step)
                boundary = trainer._boundary + 1
                # Rank 0 waits for the rows of the boundary before, and rank 1 for its plan.
                if due[rank] and boundary <= trainers[1 - rank]._boundary + 1:
                    if rank == 0:
                        first._compare_steps(boundary)
                    trainer._enter(boundary, Plan(boundary=boundary, link_state=LinkState()))
                    due[rank] -= 1
                    break
            else:
                break  # what is due is a rank's that waits for the next step of the other


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["left_out", "twice"])
def test_a_rank_that_calls_step_once_less_or_more_ends_its_learner(capfd, who, what, order):
    trainers = rank(0), rank(1)
    trainers[1]._board = trainers[0]._board
    text = ending(
        capfd,
        lambda: calls(*trainers, **{"left_out": 0, "twice": 0, what: 5}, who=who, order=order),
    )
    assert "after as many calls of learner.step(), rank 0 has made" in text
    assert max(trainer._boundary for trainer in trainers) <= 6, "before what was copied is offered"


def test_ranks_that_call_step_as_often_or_whose_optimizers_report_no_steps_continue():
    trainers = rank(0), rank(1)
    trainers[1]._board = trainers[0]._board
    calls(*trainers, left_out=0, twice=0, who=0, order=(1, 0))
    assert [trainer._boundary for trainer in trainers] == [12, 12]
    trainers[0]._board.enter(1, 12, terminated=False, steps=0)
    trainers[0]._compare_steps(13)


def test_a_rank_that_rank_0_has_left_behind_ends(capfd):
    trainer = rank(1)
    trainer._board.publish(Plan(boundary=1 + PLANS, link_state=LinkState()))
    text = ending(capfd, lambda: trainer._plan(1))
    assert "rank 1 is too far behind rank 0: the plan of boundary 1 was overwritten" in text


def test_sigterm_in_any_rank_is_in_the_plan_that_a_rank_follows():
    trainer = rank(1)
    trainer._board.publish(Plan(boundary=1, link_state=LinkState(), terminated=True))
    trainer._plan(1)
    assert trainer._terminated
    assert trainer.done


def shown(first: DistributedTrainer, caplog) -> list[str]:
    """What rank 0 logs about the ranks, over some boundaries."""
    caplog.clear()
    for _ in range(4):
        first._show_findings()
    return [record.getMessage() for record in caplog.records]


def two_ranks() -> tuple[DistributedTrainer, DistributedTrainer]:
    """With one board, and a replica of its own each."""
    trainers = rank(0), rank(1)
    trainers[1]._board = trainers[0]._board
    trainers[0]._findings_of_ranks = Findings()
    for trainer in trainers:
        trainer._optimizer_steps = SimpleNamespace(first=0)
        trainer._replica = SimpleNamespace(
            findings=NONE, problem_of_ranks="", end=lambda boundary, fetches: boundary
        )
    return trainers


@pytest.mark.parametrize("undoing", [[0], [1], [0, 1]])
def test_results_that_any_rank_has_undone_are_named_once_by_rank_0(undoing, caplog):
    trainers = two_ranks()
    for trainer in trainers:
        trainer._replica.findings = Finding.UNDONE if trainer._rank in undoing else NONE
        for boundary in (1, 2):
            trainer._enter(boundary, Plan(boundary=boundary, link_state=LinkState()))
    [text] = shown(trainers[0], caplog)
    named = f"; noticed in {trainers[0]._group.named(undoing)}" if len(undoing) == 1 else ""
    assert text == undone.PROBLEM + named
    assert trainers[0]._replica.problem_of_ranks == text
    assert shown(trainers[0], caplog) == []


@pytest.mark.parametrize("finding", distributed.NAMED)
def test_what_rank_0_has_not_found_itself_is_named_by_rank_0_with_the_ranks_that_have(
    finding, caplog
):
    trainers = two_ranks()
    for trainer in trainers:
        trainer._replica.findings = finding * trainer._rank
        trainer._enter(1, Plan(boundary=1, link_state=LinkState()))
    [text] = shown(trainers[0], caplog)
    assert text.startswith(distributed.FOUND[finding])
    assert text.endswith(f"; noticed in {trainers[0]._group.named([1])}")
    is_problem = finding in distributed.PROBLEMS
    assert trainers[0]._replica.problem_of_ranks == (text if is_problem else "")
    assert shown(trainers[0], caplog) == []


@pytest.mark.parametrize("finding", distributed.NAMED)
def test_what_rank_0_has_named_itself_is_not_named_again(finding, caplog):
    trainers = two_ranks()
    for trainer in trainers:
        trainer._replica.findings = finding
        trainer._enter(1, Plan(boundary=1, link_state=LinkState()))
    assert shown(trainers[0], caplog) == []
    assert trainers[0]._replica.problem_of_ranks == ""


@pytest.mark.parametrize(
    ("writing", "what", "end"),
    [
        ([0, 1], "parameters 0.weight, 0.bias", ""),
        ([0], "parameters 0.weight, 0.bias", "; noticed in rank 0 (process {pid})"),
        ([1], "parameters", "; noticed in rank 1 (process {pid})"),
    ],
)
def test_weights_that_any_rank_has_loaded_after_it_connected_are_named_once_by_rank_0(
    writing, what, end, caplog
):
    trainers = two_ranks()
    for trainer in trainers:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters())
        trainer._optimizer_steps = OptimizerSteps([optimizer], before=trainer._before_step)
        trainer._loaded = Loaded(model)
        if trainer._rank in writing:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        optimizer.step()
        trainer._enter(1, Plan(boundary=1, link_state=LinkState()))
    [text] = shown(trainers[0], caplog)
    assert text == f"{what} were {WRITTEN}{end.format(pid=os.getpid())}"
    assert trainers[0]._replica.problem_of_ranks == ""
    assert shown(trainers[0], caplog) == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_loop_that_continues_after_the_end_is_named_by_rank_0_alone(number, caplog):
    """SIGTERM in any rank ends all of them, so that the plan states it."""
    trainer = rank(number)
    trainer._replica = SimpleNamespace(refused="", problem="")
    trainer._terminated = True
    for _ in range(LATE_STEPS + 1):
        trainer._check_model()
    assert caplog.text.count("end the loop when learner.done is true") == (number == 0)


# ---------------------------------------------------------------- rank 0


@pytest.fixture
def first():
    """Rank 0 of a model of four fragments; the copies of 2 and 3 are in the spare places, that of 3 the older one."""
    tensors = [Tensor(name=name, shape=(256,), dtype="float32") for name in "abcd"]
    shared = SharedMemory.create(cut(tensors, num_fragments=4), constants_bytes=0, spares=2)
    first = LinkRank.__new__(LinkRank)
    first._shared, first._locks, first.decisions = shared, None, FirstRank(4, 2)
    first._core = SimpleNamespace(applied=[1] * 4, initial_copied=0)
    first.decisions.places.current = [HOME, HOME, 1, 2]
    for fragment, local_step, place in ((2, 7, 1), (3, 5, 2)):
        copy = HostCopy(local_step=local_step, steps=1, tokens=1, base=0)
        shared.set_host_copy(fragment, copy, place=place)
    yield first
    shared.close()


def copied_at(first: LinkRank) -> list[int]:
    return [first._shared.host_copy(p).local_step for p in range(4)]


def test_a_result_that_is_ready_releases_no_copy_that_can_still_be_pulled(first):
    first._newest = lambda: LinkState(open=[2, 3], ready=[(2, 2), (3, 2)])
    first.plan(1, terminated=False)
    first._newest = lambda: LinkState(open=[0], ready=[(0, 2)])
    first.plan(2, terminated=False)
    assert copied_at(first) == [0, 0, 7, 5]
    assert first.decisions.places.current == [HOME, HOME, 1, 2]


def test_fragments_that_lack_a_place_get_those_of_the_oldest_copies_and_no_more(first):
    first._newest = lambda: LinkState(open=[0])
    assert first.plan(1, terminated=False).places == {}
    assert copied_at(first) == [0, 0, 7, 0]
    assert first.plan(2, terminated=False).places == {0: 2}


def test_a_large_fragment_gets_a_place_that_has_room_for_it_though_copies_elsewhere_are_older(
    first,
):
    rooms = Rooms(spares=[256, 512], outgoing=[512], incoming=[512])
    devices = Devices(fragments=[512, 256, 256, 256], rooms=rooms, announced=1)
    first.decisions = FirstRank(4, 2, devices=devices)
    first.decisions.places.current = [HOME, HOME, 2, 1]
    first._newest = lambda: LinkState(open=[0])
    assert first.plan(1, terminated=False).places == {}
    assert copied_at(first) == [0, 0, 0, 5], "a copy is lost whose place is of no use"
    assert first.plan(2, terminated=False).places == {0: 2}


def test_a_report_without_copies_does_not_replace_the_offers_of_one_that_is_settled_with_it(first):
    sent: list[TrainerState] = []
    first._machines, first._link_state = SimpleNamespace(arrived=lambda _: True), LinkState()
    first.link = SimpleNamespace(offer=sent.append)
    first._newest = lambda: LinkState(open=[2])
    first.plan(1, terminated=False)
    copies = {2: HostCopy(local_step=8, steps=1, tokens=1, base=0)}
    first.decisions.followed(TrainerState(local_step=8, offers=[2]), copies, boundary=1)
    first.decisions.followed(TrainerState(local_step=9), {}, boundary=2)
    first.settle(2)
    assert [(state.local_step, [*state.offers]) for state in sent] == [(8, [2])]
    first.settle(2)
    assert [(state.local_step, [*state.offers]) for state in sent[1:]] == [(9, [])]


def test_the_locks_of_a_copied_model_are_released_for_a_link_with_a_smaller_request(first):
    first._locks, first._link_state = contextlib.ExitStack(), LinkState()
    first._core.initial_copied = 1
    first.settle(0)
    assert first._locks is None
