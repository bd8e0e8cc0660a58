"""Copies of steps while faults are injected: what an earlier pod of a learner wrote is kept."""

import pytest

from diloco.errors import UnavailableError
from diloco_cli import step_copies
from diloco_cli.job_view import Pod
from diloco_cli.remote import RemoteJob
from diloco_cli.step_copies import StepCopies
from diloco_local.report.run_files import load
from diloco_local.run_directory import RunDir
from diloco_testing.kubernetes.kubectl import line


def pod(number):
    return Pod(name="a-eu-0", uid=f"uid-{number}", problem="", ready=True)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Copies the steps of eu/0 out of a pod that has this content; returns what the run directory has then."""
    copies, sent = StepCopies(RunDir(tmp_path)), []

    def fetch(job, run, learner, name):
        if sent[-1] is None:
            raise UnavailableError("broken")
        run.state_of(learner).mkdir(parents=True, exist_ok=True)
        (run.state_of(learner) / "steps.jsonl").write_text(sent[-1])

    monkeypatch.setattr(step_copies, "fetch_steps", fetch)

    def copied(number, content):
        sent.append(content)
        copies.copy(RemoteJob(name="a"), "eu/0", pod(number))
        folder = tmp_path / "learners/eu-0"
        return {p.name: p.read_text() for p in sorted(folder.iterdir())} if folder.exists() else {}

    return copied


def steps(*tokens):
    return "".join(line(number) + "\n" for number in tokens)


def test_what_an_earlier_pod_wrote_becomes_an_earlier_part(copy, tmp_path):
    assert copy(1, None) == {}
    copy(1, steps(1))
    assert copy(1, steps(1, 2)) == {"steps.jsonl": steps(1, 2)}
    first = {"steps.1.jsonl": steps(1, 2)}
    assert copy(2, None) == {**first, "steps.jsonl": steps(1, 2)}, "left for the next copy"
    assert load(tmp_path).learners[0].steps.time.size == 2, "the report does not count it twice"
    assert copy(2, steps(10)) == {**first, "steps.jsonl": steps(10)}
    assert copy(2, steps(10, 11)) == {**first, "steps.jsonl": steps(10, 11)}
    assert copy(3, steps(20)) == {
        **first, "steps.2.jsonl": steps(10, 11), "steps.jsonl": steps(20),
    }  # fmt: skip
    assert load(tmp_path).learners[0].steps.time.size == 5


def test_the_file_of_a_volume_that_a_new_pod_continues_is_there_once(copy):
    copy(1, steps(1))
    assert copy(2, steps(1, 2)) == {"steps.jsonl": steps(1, 2)}
    assert copy(2, steps(1, 2, 3)) == {"steps.jsonl": steps(1, 2, 3)}
