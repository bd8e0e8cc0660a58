"""State of the training program over restarts: `Learner.keep` and `Learner.scheduler` with a real link process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from itertools import islice

import pytest
import torch
from torch.optim import lr_scheduler

from diloco.errors import EXIT_REFUSED
from diloco.spec import Checkpoint
from diloco_testing.learners.linked import connected, make_spec, step_until, train
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker.trainer.kept import SavedEntries

PROGRAM = """
import collections, os, torch
from torch import nn
from diloco_worker import Learner

class Loader:
    '''Random indexes, of which it prefetches eight; its state is that of what was yielded.'''
    def __init__(self):
        self.generator, self.ahead = torch.Generator().manual_seed(3), collections.deque()
    def __iter__(self):
        while True:
            while len(self.ahead) < 8:
                before = self.generator.get_state()
                self.ahead.append((before, int(torch.randint(1_000_000, (), generator=self.generator))))
            yield self.ahead.popleft()[1]
    def state_dict(self):
        return {"generator": self.ahead[0][0] if self.ahead else self.generator.get_state()}
    def load_state_dict(self, state):
        self.ahead.clear()
        self.generator.set_state(state["generator"])

def first(items):
    return items[0]

class Dataset:
    '''An IterableDataset of datasets, which yields a dict for each row.'''
    def __init__(self):
        import datasets
        rows = datasets.Dataset.from_dict({"index": range(10_000)})
        self.rows = rows.shuffle(seed=3).to_iterable_dataset(num_shards=4)
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict
    def __iter__(self):
        return (row["index"] for row in self.rows)

class Shards:
    '''As a StreamingDataset with its loader: shuffled shards, four read ahead; its state counts the samples.'''
    def __init__(self):
        self.epoch = self.yielded = 0
    def order(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for shard in torch.randperm(5, generator=generator).tolist():
            rows = torch.randperm(7, generator=generator).tolist()
            yield from (shard * 7 + row for row in rows)
    def __iter__(self):
        while True:
            ahead = collections.deque()
            for sample in [*self.order()][self.yielded:]:
                ahead.append(sample)
                if len(ahead) > 4:
                    self.yielded += 1
                    yield ahead.popleft()
            while ahead:
                self.yielded += 1
                yield ahead.popleft()
            self.epoch, self.yielded = self.epoch + 1, 0
    def state_dict(self):
        return {"epoch": self.epoch, "sample_in_epoch": self.yielded, "num_canonical_nodes": 1, "shuffle_seed": 0}
    def load_state_dict(self, state):
        self.epoch, self.yielded = state["epoch"], state["sample_in_epoch"]

def make(kind):
    if kind == "own":
        return Loader()
    if kind == "shards":
        return Shards()
    if kind == "datasets":
        return Dataset()
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(
        range(100_000), batch_size=1, shuffle=True, num_workers=4, collate_fn=first,
        generator=torch.Generator().manual_seed(3),
    )

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    learner = Learner.connect(model, optimizer)
    loader = make(os.environ["LOADER"])
    learner.keep(loader=loader)
    for index in loader:
        if learner.done:
            break
        model(torch.full((1, 8), index / 1e6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=1)
        print(learner.local_step, index, flush=True)
"""


@contextlib.contextmanager
def program():
    """The program in its own process; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process, count=None):
    """The numbers of the next lines; of all that are left if there is no count."""
    return [tuple(map(int, line.split())) for line in islice(process.stdout, count)]


@pytest.mark.parametrize(
    ("loader", "use_checkpoint"),
    [
        ("own", True),
        ("torchdata", False),
        *(
            pytest.param(*row, marks=pytest.mark.slow_tier)
            for row in (("own", False), ("torchdata", True), ("datasets", True), ("shards", True))
        ),
    ],
)
def test_a_loader_that_prefetches_repeats_and_skips_no_batch_after_a_kill(
    enter, monkeypatch, loader, use_checkpoint
):
    if loader not in ("own", "shards") and importlib.util.find_spec(loader) is None:
        pytest.skip(f"{loader} is not installed")
    monkeypatch.setenv("LOADER", loader)
    spec = make_spec(learner_checkpoint=Checkpoint(every_steps=5, keep=2))
    with ScriptedSyncer(spec) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        state = enter(spec, syncer.port)
        with program() as process:
            seen, deadline = lines(process, 12), time.monotonic() + 90
            while not list(state.glob("checkpoint-*.json")):
                assert time.monotonic() < deadline, "no checkpoint in time"
                seen += lines(process, 1)
            process.send_signal(signal.SIGKILL)
            seen += lines(process)
        assert seen == list(enumerate((index for _, index in seen), start=1))
        newest = max(int(path.stem.rpartition("-")[2]) for path in state.glob("checkpoint-*.json"))
        syncer.welcome = {"run": "a", "use_checkpoint": use_checkpoint}
        with program() as process:
            # What was trained after the checkpoint is repeated; nothing else is.
            again = lines(process, len(seen) - newest + 20)
    assert again[0][0] == newest + 1
    indexes = dict(seen)
    repeated = [step for step, index in again if indexes.get(step, index) == index]
    assert repeated == [step for step, _ in again]
    values = [*(index for step, index in seen if step <= newest), *(index for _, index in again)]
    assert values == uninterrupted(loader, len(values))


def uninterrupted(loader, count):
    """What the program's loader yields."""
    names = {}
    exec(PROGRAM, names)  # the classes, without the program itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's
        return list(islice(names["make"](loader), count))


def test_no_batch_is_skipped_if_sigterm_comes_during_a_step(enter):
    names = {}
    exec(PROGRAM, names)
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
        seen, loader = [], names["Loader"]()
        learner.keep(loader=loader)
        for index in loader:
            if learner.done:
                break
            seen.append(index)
            if len(seen) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            train(learner, model, opt)
        syncer.welcome = {"run": "a", "use_checkpoint": True}
        again, _, _ = connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)
        with again:
            assert again.local_step == len(seen) == 5
            loader = names["Loader"]()
            again.keep(loader=loader)
            seen += islice(loader, 5)
    assert seen == uninterrupted("own", 10)


class Average:
    """Counts the steps that it was updated in."""

    def __init__(self, kind=int):
        self.updates, self.kind = 0, kind

    def state_dict(self):
        return {"updates": self.kind(self.updates)}

    def load_state_dict(self, state):
        self.updates = self.kind(state["updates"])


def restarted(syncer, enter, *, steps=5, **welcome):
    """A learner that trained for some steps with an average, left, and joined again."""
    syncer.step, syncer.welcome = 10, {"run": "a"}
    learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
    average = Average()
    learner.keep(average=average)

    def enough():
        average.updates += 1
        return learner.local_step == steps

    step_until(enough, learner, model, opt)
    os.kill(os.getpid(), signal.SIGTERM)
    assert learner.done
    syncer.welcome = {"run": "a", **welcome}
    return connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_what_was_kept_continues_with_the_checkpoint_and_what_is_new_starts_anew(
    enter, capfd, use_checkpoint
):
    with ScriptedSyncer(make_spec()) as syncer:
        again, _, _ = restarted(syncer, enter, use_checkpoint=use_checkpoint)
        with again:
            average, other = Average(), Average()
            again.keep(average=average, other=other)
            assert (average.updates, other.updates) == (6, 0)
        error = capfd.readouterr().err
        source = "the local checkpoint of local step 5"
        assert f"eu/0: average continues with the state of {source}\n" in error
        assert f"eu/0: other starts over: {source} has no state of it\n" in error


def test_of_another_run_nothing_that_was_kept_is_restored(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        again, _, _ = restarted(syncer, enter, run="b", use_checkpoint=True)
        with again:
            average = Average()
            again.keep(average=average)
            assert average.updates == 0


def test_an_object_that_does_not_take_its_state_ends_the_learner(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        again, _, _ = restarted(syncer, enter, use_checkpoint=True)
        with pytest.raises(SystemExit) as end:
            again.keep(average=Average(kind=lambda value: value / 0))
        assert end.value.code == EXIT_REFUSED
        assert "eu/0: learner.keep: average does not take its state" in capfd.readouterr().err
        syncer.wait(lambda: len(syncer.goodbyes) == 2)


def test_a_state_that_cannot_be_read_ends_the_learner_until_the_disk_works_again(
    enter, capfd, monkeypatch
):
    def read(*_):
        raise OSError("Input/output error")

    with ScriptedSyncer(make_spec()) as syncer:
        again, _, _ = restarted(syncer, enter, use_checkpoint=True)
        monkeypatch.setattr(SavedEntries, "read", read)
        with pytest.raises(SystemExit) as end:
            again.keep(average=Average())
        assert end.value.code == 1
        assert "the state of average cannot be read: Input/output error" in capfd.readouterr().err


def test_without_a_usable_checkpoint_the_log_states_that_a_kept_object_starts_anew(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        again, _, _ = restarted(syncer, enter, run="b", local_step=5)
        with again:
            assert again.local_step
            again.keep(average=Average())
        error = capfd.readouterr().err
        assert "average starts over: there is no local checkpoint that can be used" in error


def test_an_object_that_fails_once_costs_one_checkpoint(enter, caplog):
    with ScriptedSyncer(make_spec(learner_checkpoint=Checkpoint(every_steps=3, keep=9))) as syncer:
        state = enter(make_spec(), syncer.port)
        learner, model, opt = connected(syncer, enter)
        average = Average()
        learner.keep(average=average)
        step_until(lambda: learner.local_step == 1, learner, model, opt)
        average.kind = lambda _: 1 // 0
        step_until(lambda: learner.local_step == 4, learner, model, opt)
        average.kind = int
        with learner:
            step_until(lambda: list(state.glob("checkpoint-*.json")), learner, model, opt)
        [warning] = [r.getMessage() for r in caplog.records if "no checkpoint" in r.getMessage()]
        assert "local step 3 has no checkpoint: learner.keep: the state of average" in warning


def test_a_state_that_cannot_be_saved_ends_the_learner_at_its_first_step(enter, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        learner.keep(average=Average(kind=lambda value: {value}))
        with pytest.raises(SystemExit) as end:
            step_until(lambda: False, learner, model, opt)
        assert end.value.code == EXIT_REFUSED
        assert learner.local_step == 0
        error = capfd.readouterr().err
        assert "the state of average cannot be saved" in error
        assert "average/updates is a set; only tensors and plain values" in error


def test_an_average_of_the_model_and_a_loss_scaler_of_torch_continue_with_the_same_values(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        learner, model, opt = connected(syncer, enter, optimizer=torch.optim.AdamW)
        ema, scaler = averaged(model), torch.amp.GradScaler("cpu", init_scale=64, growth_interval=3)
        learner.keep(ema=ema, scaler=scaler)
        assert not scaled_step(model, opt, scaler, factor=float("inf")), "skipped, and halves"
        while learner.local_step < 5:
            assert scaled_step(model, opt, scaler)
            learner.step(tokens=10)
            ema.update_parameters(model)
        os.kill(os.getpid(), signal.SIGTERM)
        assert learner.done
        before, scale = ema.state_dict(), scaler.state_dict()
        assert (scale["scale"], scale["_growth_tracker"]) == (64.0, 2), "halved, then grown"
        assert int(before["n_averaged"]) == 5
        syncer.welcome = {"run": "a", "use_checkpoint": True}
        again, model, opt = connected(syncer, enter, seed=5, optimizer=torch.optim.AdamW)
        with again:
            ema, scaler = averaged(model), torch.amp.GradScaler("cpu")
            again.keep(ema=ema, scaler=scaler)
            after = ema.state_dict()
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], before[name]) for name in before)
            assert scaler.state_dict() == scale
            assert scaled_step(model, opt, scaler)
            again.step(tokens=10)
            assert scaler.get_scale() == 128.0, "it grows when it would have"


def averaged(model):
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)


def scaled_step(model, optimizer, scaler, *, factor=1.0):
    """One step with a scaled loss; whether the scaler let the optimizer make it."""
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean() * factor
    scaler.scale(loss).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    return not all(map(torch.equal, before, model.parameters()))


def rate_at(step):
    """The learning rate of the schedule below."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = schedule_of(optimizer)
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def schedule_of(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=150, cycle_momentum=False)


def test_the_learning_rate_is_that_of_the_global_step_for_joiners_and_after_restarts(enter):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 121, {"run": "a"}
        learner, model, opt = connected(syncer, enter)
        learner.scheduler(schedule_of(opt))
        assert opt.param_groups[0]["lr"] == rate_at(121)
        syncer.step = 130
        syncer.open(0)
        step_until(lambda: learner.step_index == 130, learner, model, opt)
        assert opt.param_groups[0]["lr"] == rate_at(130)
        os.kill(os.getpid(), signal.SIGTERM)
        assert learner.done
        for step, use_checkpoint in ((132, True), (140, False), (125, False)):
            syncer.step = step
            syncer.welcome = {"run": "a", "use_checkpoint": use_checkpoint}
            again, _, opt = connected(syncer, enter, seed=5)
            with again:
                again.scheduler(schedule_of(opt))
                assert opt.param_groups[0]["lr"] == rate_at(step)
