"""How a real supervisor waits for the score of the final model, and what it shows without one."""

import signal

import pytest

from diloco_testing.local.fake_run import MANIFEST, FakeRun, ended, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def fake(tmp_path):
    run = FakeRun(tmp_path, manifest=MANIFEST)
    yield run
    run.close()


def test_a_run_that_waits_for_its_last_score_shows_it_and_an_interrupt_ends_it_without(fake):
    supervisor = fake.start(still_waiting_seconds=0.2, restarting_seconds=0.1)
    until(fake.all_training, "training")
    (fake.dir / "scoring").touch()
    fake.complete()
    until(lambda: fake.status()["sync"]["waitingFor"] == "the last evaluation", "wait")
    assert fake.process("evaluator")["state"] == "Running"
    note = "still waiting for the last evaluation; press Ctrl-C to end without waiting"
    until(lambda: supervisor.stdout.readline().strip() == note, "note")
    supervisor.send_signal(signal.SIGINT)
    code, out, err = ended(supervisor)
    assert (code, err) == (0, "")
    assert "warning: the final model has no validation loss (interrupted); evaluate it with" in out
    assert "model.safetensors" in out


def test_a_last_score_that_takes_long_is_waited_for(fake):
    supervisor = fake.start(still_waiting_seconds=0.2, restarting_seconds=0.1)
    until(fake.all_training, "training")
    (fake.dir / "scoring").touch()
    fake.complete()
    until(lambda: "still waiting" in supervisor.stdout.readline(), "note")
    (fake.dir / "scoring").unlink()
    code, out, err = ended(supervisor)
    assert (code, err) == (0, "")
    assert "step 50: validation loss 1.5000" in out
    assert "warning" not in out


def test_a_last_evaluation_without_a_score_is_reported_with_its_reason(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    (fake.dir / "no-score").write_text("the model of step 50 has no score: no GPU")
    fake.complete()
    code, out, _ = ended(supervisor)
    assert code == 0
    reason = "the model of step 50 has no score: no GPU"
    assert f"warning: the final model has no validation loss ({reason}); evaluate it with" in out
