"""`diloco chaos --job`: what is disturbed in which cluster, what is refused, and how replies of pods are taken."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from diloco.errors import ConfigError
from diloco_cli import pod_faults, pod_program
from diloco_cli.__main__ import app
from diloco_cli.cluster_chaos import Wanted, aim, counted_kills
from diloco_cli.job_view import Pod, View
from diloco_cli.kubectl import Kubectl
from diloco_cli.pod_faults import Disturbance, Stage
from diloco_local.chaos.fault_plan import CLUSTER_RATES
from diloco_local.faults import LINK_KINDS, SYNCER, Fault, Kind
from diloco_testing.kubernetes.kubectl import diloco, make_kubectl, make_state
from diloco_testing.local.fake_run import until

LEARNERS = ("eu/0", "eu/1", "us/0", "us/1")
RUNNING = Pod(name="a-eu-0", uid="uid-0", problem="", ready=True)
VIEW = View(
    step=5, steps=9, learners=LEARNERS, here=LEARNERS, pods={}, size=1, syncer=(RUNNING,),
    training=frozenset(LEARNERS), end="", message="", restart_limit=None,
)  # fmt: skip
EAST = replace(VIEW, here=LEARNERS[:2])
WEST = replace(VIEW, here=LEARNERS[2:], syncer=())


def wanted(rates=None, spare=None, **more):
    return Wanted(
        seed=3, rates=rates or {}, spare=spare, longest_seconds=20, minutes=60, **more
    )  # fmt: skip


# ---------------------------------------------------------------------------------- what is disturbed


def test_without_a_rate_all_kinds_occur_that_a_cluster_has():
    made = aim(wanted(), VIEW, quorum=3)
    assert made.options.rates == CLUSTER_RATES
    assert set(CLUSTER_RATES) == set(Kind) - LINK_KINDS - {Kind.SYNCER_FULL}
    assert (made.spare, made.options.spare, made.targets, made.notes) == (3, 3, LEARNERS, ())
    assert {fault.kind for fault in made.plan()} == set(CLUSTER_RATES)


def test_a_quorum_of_all_learners_spares_all_but_one():
    assert aim(wanted(), VIEW, quorum=4).spare == 3


def test_in_one_of_several_clusters_only_what_is_there_is_disturbed():
    made = aim(wanted(spare=3), EAST, quorum=1)
    assert {fault.target for fault in made.plan()} == {"eu/0", "eu/1", SYNCER}
    assert (made.spare, made.options.spare) == (3, 1), "two others train elsewhere"
    assert made.notes == (
        "2 of 4 learners are in this cluster, and only they are disturbed: eu/0, eu/1",
    )
    made = aim(wanted(spare=1), WEST, quorum=1)
    assert {fault.target for fault in made.plan()} == {"us/0", "us/1"}
    assert made.options.spare == 0
    assert made.notes[0] == "the syncer has no pod in this cluster: it is not killed"
    syncer_only = replace(EAST, here=())
    made = aim(wanted(), syncer_only, quorum=1)
    assert {fault.kind for fault in made.plan()} == {Kind.SYNCER_KILL}
    assert made.notes == ("this cluster has no pods of learners: none is disturbed",)


@pytest.mark.parametrize(
    ("rates", "spare", "found", "message"),
    [
        ({Kind.SYNCER_KILL: 1}, None, WEST, "--syncer-kill-rate: the syncer has no pod in this cluster"),
        ({Kind.KILL: 1}, None, replace(EAST, here=()), "--kill-rate: this cluster has no pods of learners"),
        ({}, None, replace(WEST, here=()), "rate: this cluster has no pods of learners"),
        ({Kind.KILL: 1}, 4, VIEW, "--spare 4: leaves none of the 4 learners for kill"),
        ({Kind.KILL: 61}, None, VIEW, "--kill-rate 61: expected a number from 0 to 60"),
        ({Kind.KILL: 1}, 5, VIEW, "--spare 5: expected a number of learners from 0 to 4"),
    ],
)  # fmt: skip
def test_what_a_job_or_its_cluster_does_not_have_is_refused(rates, spare, found, message):
    with pytest.raises(ConfigError) as refused:
        aim(wanted(rates, spare), found, quorum=1)
    assert message in str(refused.value)


def fault(number, kind, target="eu/0", **more):
    return Fault(number=number, kind=kind, target=target, at=0, until=9, **more)


def test_a_plan_that_exceeds_the_limit_of_restarts_is_warned_of():
    faults = [fault(n, Kind.KILL) for n in (1, 2)] + [fault(3, Kind.KILL, "eu/1")]
    faults += [fault(n, Kind.DELETE) for n in (4, 5, 6)]  # the loss of a pod does not count
    assert counted_kills(faults, None) == counted_kills(faults, 2) == counted_kills([], 0) == ""
    assert "kills eu/0 2 times, and runPolicy.learnerRestartLimit is 1" in counted_kills(faults, 1)


# ---------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "a", "--cut-rate", "1"], "--cut-rate: faults of connections need a proxy between"),
        (["--job", "a", "--corrupt-rate", "1", "--dry-run"], "give --kill-rate, --syncer-kill-rate"),
        (["--job", "a", "job.yaml"], "give neither FILE nor --set"),
        (["--job", "a", "--set", "spec.steps=1"], "give neither FILE nor --set"),
        (["a", "-n", "team"], "give --job NAME instead of a"),
        ([], "expected a manifest FILE, to run the job on this machine, or --job NAME"),
        (["job.yaml", "--delete-rate", "1"], "a run on this machine has no pods"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(arguments, message):
    refused = CliRunner().invoke(app, ["chaos", *arguments], catch_exceptions=True)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)


@pytest.fixture
def kubectl(tmp_path):
    make_state(tmp_path)
    return make_kubectl(tmp_path)


def change(tmp_path, **fields):
    path = tmp_path / "cluster/job.yaml"
    job = yaml.safe_load(path.read_text())
    job["spec"] |= fields.pop("spec", {})
    job |= fields
    job["metadata"] |= {"namespace": "team", "uid": "uid-a"}
    path.write_text(yaml.safe_dump(job))
    (tmp_path / "cluster/job.json").write_text(json.dumps(job))


def chaos(kubectl, tmp_path, *arguments):
    return diloco(kubectl, "chaos", "--job", "a", "--dir", tmp_path / "run", *arguments)


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_for_this_cluster_and_changes_nothing(tmp_path, kubectl):
    shown = chaos(kubectl, tmp_path, "--dry-run", "--minutes", "10", "-n", "team")
    assert (shown.returncode, shown.stderr) == (0, "")
    first, head, *faults = shown.stdout.splitlines()
    assert first == (
        "3 of 4 learners are in this cluster, and only they are disturbed: eu/0, eu/1, eu/2"
    )
    assert head == (
        f"seed 0: {len(faults)} faults in 10 min of training, of at most 3 of 3 learners at once"
    )
    assert len(faults) > 3
    assert not (tmp_path / "run").exists()
    log = (tmp_path / "kubectl.log").read_text()
    assert log.splitlines() == [
        "--namespace=team get dilocojobs.diloco.dev/a -o json",
        "--namespace=team get pods --selector diloco.dev/job=a -o json",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("Complete", "job a is complete: faults can be injected only while it trains"),
        ("Failed", "job a is failed"),
        ("Suspended", "job a is suspended, so nothing trains; resume it with"),
    ],
)
def test_a_job_that_does_not_train_is_refused(tmp_path, kubectl, condition, message):
    change(tmp_path, status={"conditions": [{"type": condition, "status": "True"}]})
    refused = chaos(kubectl, tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_job_that_does_not_exist_is_reported_as_kubectl_does(tmp_path, kubectl):
    refused = diloco(kubectl, "chaos", "--job", "gone", "--dir", tmp_path / "run")
    assert refused.returncode == 1
    assert "cannot read job gone: Error from server (NotFound)" in refused.stderr


@pytest.mark.slow
def test_a_missing_right_is_named_before_anything_is_disturbed(tmp_path, kubectl, monkeypatch):
    change(tmp_path)
    monkeypatch.setenv("FORBIDDEN", "exec")
    refused = chaos(kubectl, tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        "you may not run commands in its pods: ask for the right to create pods/exec in namespace team\n"
    )
    monkeypatch.setenv("FORBIDDEN", "")  # that of deletions has no subresource
    refused = chaos(kubectl, tmp_path)
    assert refused.returncode == 2
    assert "ask for the right to delete pods in namespace team, or give the rates" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_directory_of_another_run_is_refused(tmp_path, kubectl):
    change(tmp_path)
    (tmp_path / "run/state").mkdir(parents=True)
    (tmp_path / "run/state/supervisor.lock").touch()
    refused = chaos(kubectl, tmp_path, "--kill-rate", "1")
    assert refused.returncode == 2
    assert "holds a run of this machine; give another directory with --dir" in refused.stderr


# ---------------------------------------------------------------------------------- replies of a pod


@pytest.fixture
def disturb(tmp_path):
    """Carries out a fault with a kubectl that is this Python program; ends it when the test does."""
    made = []

    def begin(program, kind=Kind.PAUSE, pods=1):
        path = tmp_path / "kubectl"
        path.write_text(f"#!{sys.executable} -IS\nimport json, os, sys, time\n{program}")
        path.chmod(0o755)
        targets = [replace(RUNNING, name=f"a-eu-{n}", uid=f"uid-{n}") for n in range(pods)]
        made.append(
            Disturbance(Kubectl(program=str(path)), fault(1, kind, amount=0.5), targets, 7.0)
        )
        return made[-1]

    yield begin
    for disturbance in made:
        disturbance.abort()


def stage(disturbance, wanted):
    until(lambda: disturbance.poll() is wanted, f"stage {wanted}")


BEGUN = "print('{\"begun\": 2}', flush=True)\n"
ENDED = "sys.stdin.read()\nprint('{\"ended\": true}', flush=True)\n"


@pytest.mark.slow
def test_a_fault_lasts_until_the_pods_reply_that_it_is_undone(disturb, tmp_path):
    log = f"open({str(tmp_path / 'log')!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
    sent = f"data = sys.stdin.buffer.read({Path(pod_program.__file__).stat().st_size})\n"
    check = f"assert data == open({pod_program.__file__!r}, 'rb').read()\n"
    running = disturb(log + sent + check + BEGUN + ENDED, kind=Kind.SLOW, pods=2)
    stage(running, Stage.ACTIVE)
    running.release()
    stage(running, Stage.OVER)
    assert running.confirmed
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "uid" in line]
    assert sorted(line.split()[1:] for line in lines) == [
        ["uid-0", "slow", "7.000", "0.500"],
        ["uid-1", "slow", "7.000", "0.500"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('print(\'{"refused": "its program does not run"}\')', "its program does not run"),
        ("sys.exit('warning\\nError from server (NotFound): pods \"a-eu-0\" not found')",
         'Error from server (NotFound): pods "a-eu-0" not found'),
        ("sys.exit('OSError: no process\\ncommand terminated with exit code 1')", "OSError: no process"),
        ("sys.exit(3)", "kubectl exited with 3 and no reply"),
        ("print('hello', flush=True)\ntime.sleep(600)", "its reply is not understood"),
        ("print('[' * 10**5, flush=True)\ntime.sleep(600)", "it sends more than a reply"),
        ("sys.stderr.write('x' * 10**6)", "it sends more than a reply"),
        ('print(\'{"begun": "many"}\', flush=True)\ntime.sleep(600)', "its reply is not understood"),
    ],
)  # fmt: skip
def test_a_fault_that_does_not_begin_in_every_pod_fails_with_a_reason(disturb, program, reason):
    """The first pod replies as it should, and what it stopped continues: its standard input ends."""
    first = f"if 'uid-0' in sys.argv:\n    {BEGUN}    {ENDED.splitlines()[0]}\n    sys.exit()\n"
    failing = disturb(first + program, pods=2)
    stage(failing, Stage.FAILED)
    assert failing.reason == reason
    assert all(part._process.returncode is not None for part in failing._parts)


@pytest.mark.slow
def test_a_pod_that_does_not_reply_ends_the_wait(disturb, monkeypatch):
    monkeypatch.setattr(pod_faults, "BEGIN_SECONDS", 0.2)
    silent = disturb("time.sleep(600)")
    stage(silent, Stage.FAILED)
    assert silent.reason == "no reply from the pod within 0.2 s"


@pytest.mark.slow
def test_an_end_that_no_pod_confirms_is_known(disturb, monkeypatch):
    broken = disturb(BEGUN)
    stage(broken, Stage.OVER)
    assert not broken.confirmed
    monkeypatch.setattr(pod_faults, "END_SECONDS", 0.2)
    hanging = disturb(BEGUN + "time.sleep(600)")
    stage(hanging, Stage.ACTIVE)
    hanging.release()
    stage(hanging, Stage.OVER)
    assert not hanging.confirmed


@pytest.mark.slow
def test_pods_are_deleted_with_one_request(disturb, tmp_path):
    log = f"open({str(tmp_path / 'log')!r}, 'a').write(' '.join(sys.argv[1:]))\n"
    deleted = disturb(log + "print('pod deleted')", kind=Kind.DELETE, pods=2)
    stage(deleted, Stage.OVER)
    assert (tmp_path / "log").read_text() == "delete pods a-eu-0 a-eu-1 --wait=false"
    refused = disturb("sys.exit('Error from server (Forbidden): no')", kind=Kind.DELETE)
    stage(refused, Stage.FAILED)
    assert refused.reason == "Error from server (Forbidden): no"


def test_the_program_for_pods_needs_the_standard_library_alone_and_fits_into_a_pipe():
    path = Path(pod_program.__file__)
    assert path.stat().st_size < 1 << 15
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(path), "uid", "kill"], capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["refused"].startswith("0 processes look like the agent")
