"""The settings of the agent, and the environment of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco_agent.settings import read

LEARNER = {"DILOCO_JOB": "j", "DILOCO_REGION": "eu", "DILOCO_POD": "j-eu-3"}
ARGUMENTS = ("learner", "--", "python", "train.py")


def test_the_pods_ordinal_names_the_learner():
    given = read(ARGUMENTS, LEARNER)
    assert given.name == given.environment["DILOCO_LEARNER"] == "eu/3"
    assert given.argv == (sys.executable, "train.py")
    assert "RANK" not in given.environment
    assert (given.health_port, given.limits.learner_restarts, given.state) == (8080, None, None)


@pytest.mark.parametrize(
    ("ordinal", "learner", "rank", "master"), [(0, 0, 0, 0), (3, 1, 1, 2), (5, 2, 1, 4)]
)
def test_several_pods_form_one_learner(ordinal, learner, rank, master):
    env = {**LEARNER, "DILOCO_POD": f"j-eu-{ordinal}", "DILOCO_PODS_PER_LEARNER": "2"}
    child = read(ARGUMENTS, env).environment
    assert child["DILOCO_LEARNER"] == f"eu/{learner}"
    assert (child["RANK"], child["WORLD_SIZE"]) == (str(rank), "2")
    given = read(ARGUMENTS, env)
    assert (given.rank, given.num_ranks) == (rank, 2)
    assert given.rank_zero == (f"j-eu-{master}.j-eu", 8080)
    assert (child["MASTER_ADDR"], child["MASTER_PORT"]) == (f"j-eu-{master}.j-eu", "29500")


def test_the_port_of_the_rendezvous_is_read():
    env = {**LEARNER, "DILOCO_PODS_PER_LEARNER": "2", "DILOCO_RENDEZVOUS_PORT": "29510"}
    assert read(ARGUMENTS, env).environment["MASTER_PORT"] == "29510"


def test_other_learners_find_a_learner_that_answers_them_at_the_name_of_its_pod():
    assert "DILOCO_PEER_HOST" not in read(ARGUMENTS, LEARNER).environment
    child = read(ARGUMENTS, {**LEARNER, "DILOCO_PEER": "0.0.0.0:7071"}).environment
    assert child["DILOCO_PEER_HOST"] == "j-eu-3.j-eu"


def test_ranks_above_0_report_their_progress_where_the_agent_reads_their_health():
    env = {**LEARNER, "DILOCO_PODS_PER_LEARNER": "4"}
    given = read(ARGUMENTS, {**env, "DILOCO_POD": "j-eu-5"})
    assert given.environment["DILOCO_PROGRESS_FILE"] == str(given.health_file)
    for pod in ("j-eu-4", "j-eu-0"):
        zero = read(ARGUMENTS, {**env, "DILOCO_POD": pod})
        assert "DILOCO_PROGRESS_FILE" not in zero.environment, "the link of rank 0 writes there"


def test_a_rank_set_by_the_user_is_passed_through():
    given = read(ARGUMENTS, {**LEARNER, "RANK": "5"})
    assert (given.rank, given.environment["RANK"]) == (0, "5")


def test_the_users_variables_reach_the_process_but_cannot_replace_ours():
    env = {**LEARNER, "TOKEN": "x", "DILOCO_LEARNER": "us/9", "DILOCO_HEALTH_FILE": "/mine"}
    given = read(ARGUMENTS, env)
    assert given.environment["TOKEN"] == "x"
    assert given.environment["DILOCO_LEARNER"] == "eu/3"
    assert given.environment["DILOCO_HEALTH_FILE"] == str(given.health_file) != "/mine"
    assert given.environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_a_program_of_the_users_own_keeps_its_first_word():
    assert read(("learner", "--", "torchrun", "--", "x"), LEARNER).argv == ("torchrun", "--", "x")


@pytest.mark.parametrize(("role", "seconds"), [("learner", 55), ("syncer", 55), ("evaluator", 25)])
def test_the_process_gets_the_grace_period_minus_five_seconds(role, seconds):
    assert read((role, "--", "x"), LEARNER).limits.leave_seconds == seconds
    assert (
        read((role, "--", "x"), {**LEARNER, "DILOCO_GRACE_SECONDS": "20"}).limits.leave_seconds
        == 15
    )


def test_limit_and_ports_are_read():
    env = {**LEARNER, "DILOCO_RESTART_LIMIT": "0", "DILOCO_HEALTH_PORT": "81", "DILOCO_STATE": "/s"}
    given = read(ARGUMENTS, {**env, "DILOCO_LOG_FORMAT": "json", "DILOCO_STUCK_SECONDS": "7"})
    assert (given.limits.learner_restarts, given.health_port, given.stuck_seconds) == (0, 81, 7)
    assert (given.state, given.json_logs) == (Path("/s"), True)


@pytest.mark.parametrize(
    "arguments", [(), ("learner",), ("learner", "python"), ("cook", "--", "x"), ("learner", "--")]
)
def test_other_arguments_are_refused_with_what_was_expected(arguments):
    with pytest.raises(ConfigError, match=r"expected learner\|syncer\|evaluator -- COMMAND"):
        read(arguments, LEARNER)


def test_all_problems_are_reported_together():
    env = {"DILOCO_JOB": "j", "DILOCO_RESTART_LIMIT": "many", "DILOCO_PODS_PER_LEARNER": "0"}
    with pytest.raises(ConfigError) as error:
        read(ARGUMENTS, env)
    for part in (
        "DILOCO_REGION is not set", "DILOCO_POD is not set", "DILOCO_RESTART_LIMIT: 'many'",
        "DILOCO_PODS_PER_LEARNER: '0', expected a whole number of at least 1",
    ):  # fmt: skip
        assert part in str(error.value)


def test_rank_zero_has_the_name_of_the_learners_own_statefulset():
    env = {**LEARNER, "DILOCO_POD": "j-eu-1-3", "DILOCO_PODS_PER_LEARNER": "2"}
    child = read(ARGUMENTS, env).environment
    assert (child["DILOCO_LEARNER"], child["RANK"]) == ("eu/1", "1")
    assert child["MASTER_ADDR"] == "j-eu-1-2.j-eu"


def test_a_pod_without_an_ordinal_is_refused():
    with pytest.raises(ConfigError, match="ends in -<ordinal>"):
        read(ARGUMENTS, {**LEARNER, "DILOCO_POD": "mine"})


def test_it_loads_nothing_that_a_worker_or_syncer_image_lacks():
    code = (
        "import sys, diloco_agent.__main__\n"
        "heavy = {'pydantic', 'yaml', 'rich', 'typer', 'kubernetes', 'kopf', 'numpy', 'grpc', 'google'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
