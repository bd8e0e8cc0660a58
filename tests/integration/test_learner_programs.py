"""Programs as people write them, which do something unforeseen with their learner: against a scripted syncer."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from diloco.errors import EXIT_REFUSED
from diloco.spec import Checkpoint
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.linked import (
    applied,
    connected,
    make_model,
    make_spec,
    step_until,
    train,
)
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner
from diloco_worker.job_trainer import LATE_STEPS


def forked(act) -> int:
    """Exit code of a process that is forked here, and calls this: 7 if that raised RuntimeError."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except RuntimeError as error:
            code = 7 if "was forked from process" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_can_neither_use_the_learner_nor_end_it(enter):
    """It has the socket and the memory, and would take messages from the process that trains."""
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            train(learner, model, opt)
            assert forked(lambda: learner.step(tokens=1)) == 7
            assert forked(lambda: learner.done) == 7
            assert forked(learner.close) == 0
            link = learner._trainer._link.pid
            steps = learner.local_step
            step_until(lambda: learner.local_step >= steps + 20, learner, model, opt)
            assert learner._trainer._link.pid == link, "the link would have left with the fork"
            assert not learner.done


def test_a_second_connect_is_refused_until_the_first_is_closed(enter, capfd):
    """As for a generator and a critic: each would replace the other at the syncer, again and again."""
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        critic = nn.Linear(8, 1)
        critics = torch.optim.SGD(critic.parameters())
        with learner, pytest.raises(SystemExit) as refused:
            Learner.connect(critic, critics)
        assert refused.value.code == EXIT_REFUSED
        error = capfd.readouterr().err
        assert (
            "called again although learner eu/0 is connected; a learner has one model: put" in error
        )
        assert learner.done
        Learner.connect(model, opt).close()


def test_weights_that_are_loaded_after_connect_are_named_before_the_first_step(enter, caplog):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
            for _ in range(3):
                train(learner, model, opt)
            found = [
                r.getMessage() for r in caplog.records if "between Learner.connect" in r.message
            ]
            assert len(found) == 1
            assert "load weights, and checkpoints of your own, before Learner.connect" in found[0]


def test_a_loop_that_continues_after_the_end_of_the_job_is_named_once(enter, caplog):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            train(learner, model, opt)
            assert "end the loop" not in caplog.text
            syncer.send(complete=pb.Complete(step=syncer.spec.steps))
            text = f"learner.step() was called {LATE_STEPS} times since the job was complete"
            step_until(lambda: text in caplog.text, learner, model, opt)
            for _ in range(LATE_STEPS + 1):
                train(learner, model, opt)
            assert caplog.text.count("end the loop when learner.done is true") == 1


@pytest.mark.parametrize("wrong", [{"tokens": 2.5}, {"tokens": 1, "loss": torch.ones(2)}])
def test_a_call_of_step_that_is_refused_has_no_effect_if_the_program_continues(enter, wrong):
    """It took a state of the link with it, and the job waited for this learner forever."""
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            syncer.commit(0, syncer.theta[0] / 2, round_=1)
            for _ in range(50):
                learner._trainer._link.wait(0.2)
                with pytest.raises(ValueError, match=r"expected one number|not a whole number"):
                    learner.step(**wrong)
                train(learner, model, opt)
                if applied(learner, 0) > 1:
                    break
            assert applied(learner, 0) > 1


def test_a_program_may_connect_in_inference_mode(enter):
    """Each step was an error of torch, and the learner began again and again."""
    with ScriptedSyncer(make_spec()) as syncer:
        model = make_model()
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        enter(syncer.spec, syncer.port)
        with torch.inference_mode():
            learner = Learner.connect(model, opt, connect_timeout_seconds=90)
        with learner:
            syncer.open(0, 1)
            syncer.commit(0, syncer.theta[0] / 2, round_=1)
            step_until(lambda: applied(learner, 0) > 1, learner, model, opt)


def test_a_loop_that_continues_after_sigterm_is_named_once(enter, caplog):
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        with learner:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(2 * LATE_STEPS):
                train(learner, model, opt)
            assert caplog.text.count("end the loop when learner.done is true") == 1
            assert learner.done


def test_an_optimizer_that_cannot_state_its_state_is_named_once(enter, caplog):
    """A line for each step would fill the log."""
    spec = make_spec(learner_checkpoint=Checkpoint(every_steps=2, keep=2))
    with ScriptedSyncer(spec) as syncer:
        learner, model, opt = connected(syncer, enter)
        opt.param_groups[0]["history"] = {1, 2}
        with learner:
            for _ in range(8):
                train(learner, model, opt)
        assert caplog.text.count("no more local checkpoints will be written: checkpoint: ") == 1
        assert "history is a set; only tensors and plain values can be saved" in caplog.text


def test_a_refusal_that_a_program_catches_is_still_its_exit_code(enter, capfd):
    """A loop with `except:` would end with 0, as one that is too short does, and start again and again."""
    with ScriptedSyncer(make_spec()) as syncer:
        learner, model, opt = connected(syncer, enter)
        train(learner, model, opt)
        model[0] = nn.Linear(8, 16)
        syncer.open(0, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(SystemExit):
            step_until(lambda: False, learner, model, opt)
        with pytest.raises(SystemExit) as ended:
            _ = learner.done
        assert ended.value.code == EXIT_REFUSED
        assert learner.done, "once, so that no loop is caught in it"
        last = capfd.readouterr().err.splitlines()[-1]
        assert "has put another tensor in the place" in last, "the supervisor shows the last line"


def test_a_process_that_starts_after_the_end_states_that_its_model_is_not_the_jobs(enter, caplog):
    """What such a program saves after its loop is what it began with."""
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.complete = True
        learner, _, _ = connected(syncer, enter)
        assert learner.done
        assert (
            "eu/0: there is nothing left to train, so that this model has no parameters"
            in caplog.text
        )
