"""`diloco status --job`: what is shown of a job in a cluster, and of its learners."""

import json
import os
import time

import pytest

from diloco.errors import UnavailableError
from diloco_cli import remote, runs
from diloco_cli.remote import RemoteJob
from diloco_testing.kubernetes.kubectl import diloco, make_kubectl, make_state

pytestmark = pytest.mark.slow  # each command of the made-up kubectl is a process


@pytest.fixture
def kubectl(tmp_path):
    make_state(tmp_path)
    return make_kubectl(tmp_path)


def test_status_shows_a_job_in_a_cluster(tmp_path, kubectl):
    found = diloco(kubectl, "status", "--job", "a", "-n", "team", "--context", "eu", "-o", "json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["learners"]["training"] == 3
    shown = diloco(kubectl, "status", "--job", "a")
    head, *rows = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    assert " ".join(head) == "a Training step 5/9 3/4 learners training"
    assert ["eu", "3", "3", "3", "2", "2026-01-02T03:04:06Z"] in rows
    assert ["us", "1", "-", "-", "-", "-"] in rows
    found = ["LearnersReady", "False", "SomeNotTraining", "3", "of", "4", "learners", "train"]
    assert found in rows
    log = (tmp_path / "kubectl.log").read_text()
    assert "--context=eu --namespace=team get dilocojobs.diloco.dev/a" in log


def test_status_shows_what_is_wrong_with_the_work_of_learners(tmp_path, kubectl):
    own = tmp_path / "cluster/pod-a-eu-0"
    (own / "diloco-learner-1.json").write_text(
        json.dumps(
            {"at": 1.0, "ready": True, "problem": "NotFinite", "why": "the loss was NaN \x1b[2J"}
        )
    )
    older = own / "diloco-learner-0.json"
    older.write_text('{"problem": "NoTokens"}')
    os.utime(older, (1, 1))
    shown = diloco(kubectl, "status", "--job", "a")
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["eu/0", "NotFinite", "the", "loss", "was", "NaN", "?[2J"] in rows
    found = json.loads(diloco(kubectl, "status", "--job", "a", "-o", "json").stdout)
    assert found["learnerProblems"] == [
        {"learner": "eu/0", "problem": "NotFinite", "detail": "the loss was NaN ?[2J"}
    ]
    unknown = "problems are not known of eu/2: error: cannot exec in a stopped container"
    assert found["learnerProblemsUnknown"] == unknown
    # Learner 2 exits after the listing; ordinals 1 and 5 are other pods of a learner.
    assert unknown in shown.stdout
    (own / "diloco-learner-1.json").write_text('{"at": 1.0, "ready": true, "problem": ""}')
    assert "NotFinite" not in diloco(kubectl, "status", "--job", "a").stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("[" * 4096, "is not JSON: nested too deeply"),
        (f'{{"problem": {"[" * 500}{"]" * 500}}}', "is not JSON: nested too deeply"),
    ],
    ids=["torn", "list", "open-lists", "lists"],
)
def test_a_health_file_that_cannot_be_read_is_a_problem_that_is_not_known(
    tmp_path, kubectl, content, reason
):
    (tmp_path / "cluster/pod-a-eu-0/diloco-learner-1.json").write_text(content)
    found, unknown = remote.learner_problems(
        RemoteJob(name="a", kubectl=kubectl), {"learner": {"podsPerLearner": 2}}
    )
    assert found == []
    assert unknown.startswith("problems are not known of eu/0, eu/2: its health file ")
    assert reason in unknown


def test_the_health_files_of_at_most_some_learners_are_read(monkeypatch, kubectl):
    monkeypatch.setattr(remote, "ASKED_LEARNERS", 1)
    _, unknown = remote.learner_problems(RemoteJob(name="a", kubectl=kubectl), {})
    assert unknown == "problems are not known of 3 learners beyond the first 1, which are not asked"


def test_learners_that_do_not_reply_cost_a_status_a_bounded_time(monkeypatch, tmp_path, kubectl):
    """The pods of a node that is lost remain in phase Running."""
    monkeypatch.setattr(remote, "ASK_ALL_SECONDS", 0.5)
    monkeypatch.setattr(remote, "ASK_SECONDS", 0.4)
    monkeypatch.setattr(remote, "ASKED_AT_ONCE", 1)
    hanging = tmp_path / "hanging"
    hanging.write_text(
        f'#!/bin/sh\ncase "$*" in *exec*) exec sleep 60;; *) exec {kubectl} "$@";; esac\n'
    )
    hanging.chmod(0o755)
    started = time.monotonic()
    found, unknown = remote.learner_problems(RemoteJob(name="a", kubectl=str(hanging)), {})
    assert time.monotonic() - started < 20
    assert (found, "eu/0, eu/1, eu/4, eu/5" in unknown) == ([], True)


def test_the_status_is_printed_before_any_learner_is_asked(monkeypatch, kubectl, capsys):
    shown = []

    def asked(job, spec):
        shown.append(capsys.readouterr().out)
        return [("eu/0", "NotFinite", "the loss was NaN")], ""

    monkeypatch.setattr(remote, "learner_problems", asked)
    monkeypatch.setenv("PATH", f"{os.path.dirname(kubectl)}{os.pathsep}{os.environ['PATH']}")
    runs.status(job="a")
    assert "learners training" in shown[0]
    assert "NotFinite" in capsys.readouterr().out


@pytest.mark.parametrize("stream", [1, 2])
def test_a_container_that_floods_its_reply_is_cut_off(tmp_path, stream):
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\nexec yes flood >&{stream}\n")
    program.chmod(0o755)
    with pytest.raises(UnavailableError, match=r"sends more than 64\.0 KiB"):
        RemoteJob(name="a", kubectl=str(program)).health("a-eu-0")


def test_status_of_a_job_that_is_not_there_is_an_error(kubectl):
    done = diloco(kubectl, "status", "--job", "gone")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot read job gone: Error from server (NotFound)" in done.stderr
