"""`diloco chaos`: its options, and the plan that `--dry-run` prints."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.errors import ConfigError
from diloco_cli.__main__ import app
from diloco_local.chaos import run
from diloco_local.chaos.fault_plan import RATES
from diloco_local.faults import Kind

EXAMPLE = Path(__file__).parents[3] / "examples/01-text/job.yaml"


def invoke(*arguments):
    return CliRunner().invoke(app, ["chaos", str(EXAMPLE), *arguments], catch_exceptions=True)


@pytest.fixture
def started(monkeypatch):
    """The arguments of the run that is not started."""
    calls = []

    def start(*arguments):
        calls.append(arguments)
        return 75

    monkeypatch.setattr(run, "run", start)
    return calls


def test_a_dry_run_prints_the_same_plan_for_the_same_seed_and_starts_nothing(started):
    first, again, other = (
        invoke("--dry-run", "--minutes", "10", "--seed", seed) for seed in ("3", "3", "4")
    )
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == again.stdout != other.stdout
    head, *faults = first.stdout.splitlines()
    assert head == (
        f"seed 3: {len(faults)} faults in 10 min of training, of at most 3 of 4 learners at once"
    )
    assert len(faults) > 5
    assert started == []


def test_without_a_rate_all_kinds_occur_and_with_one_only_this_kind(started):
    assert invoke("--set", "spec.sync.quorum=2").exit_code == 75
    assert invoke("--pause-rate", "2.5", "--kill-rate", "0", "--spare", "3").exit_code == 75
    defaults, given = (arguments[3] for arguments in started)
    assert (defaults.rates, defaults.spare, defaults.seed) == (RATES, 2, 0)
    assert (given.rates, given.spare) == ({Kind.PAUSE: 2.5, Kind.KILL: 0.0}, 3)
    assert started[0][2] == Path("runs/stdlib-gpt")


def test_a_quorum_of_all_learners_spares_all_but_one(started):
    invoke("--set", "spec.sync.quorum=4")
    assert started[0][3].spare == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kill-rate", "nan"), "--kill-rate nan: expected a number from 0 to 60"),
        (("--hang-rate", "inf"), "--hang-rate inf: expected a number from 0 to 60"),
        (("--spare", "4"), "--spare 4: leaves none of the 4 learners"),
        (("--longest", "0"), "--longest 0: expected a number from 1 to 3600"),
    ],
)
def test_values_out_of_bounds_are_refused_before_anything_starts(arguments, message, tmp_path):
    for more in (["--dry-run"], ["--dir", str(tmp_path / "run")]):
        refused = invoke(*arguments, *more)
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_a_rate_that_is_not_a_number_is_an_error_of_usage(started):
    assert invoke("--cut-rate", "often").exit_code == 2
    assert started == []


def test_a_seed_that_the_summary_would_round_is_an_error_of_usage(started):
    assert invoke("--seed", str(2**53)).exit_code == 75
    assert invoke("--seed", str(2**53 + 1)).exit_code == 2
    assert len(started) == 1
