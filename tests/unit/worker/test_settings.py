"""The environment of a learner process."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco_worker.settings import Fault, from_env

ENV = {
    "DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/3", "DILOCO_SYNCER": "host:1", "DILOCO_SPEC": "/s.json",
}  # fmt: skip


def test_without_a_syncer_there_is_no_job():
    assert from_env({}) is None
    assert from_env({"DILOCO_SYNCER": "", "DILOCO_JOB": "j"}) is None


def test_only_four_variables_are_needed():
    settings = from_env(ENV)
    assert (settings.job, settings.learner, settings.region, settings.config) == (
        "j",
        "eu/3",
        "eu",
        {},
    )
    assert settings.state is None


def test_the_variables_of_a_supervisor_are_read():
    env = {"DILOCO_RESTARTS": "3", "DILOCO_HEALTH_FILE": "/h.json", "DILOCO_LOG_FORMAT": "json"}
    settings = from_env({**ENV, **env})
    assert (settings.restarts, settings.health_file, settings.json_logs) == (
        3,
        Path("/h.json"),
        True,
    )
    assert (from_env(ENV).restarts, from_env(ENV).health_file, from_env(ENV).json_logs) == (
        0,
        None,
        False,
    )


def test_a_learner_that_answers_others_knows_where_they_find_it():
    env = {"DILOCO_PEER": "0.0.0.0:7071", "DILOCO_PEER_HOST": "j-eu-0.j-eu", "DILOCO_CLUSTER": "c"}
    found = from_env({**ENV, **env, "DILOCO_STATE": "/s"})
    assert (found.peer, found.peer_host, found.cluster) == ("0.0.0.0:7071", "j-eu-0.j-eu", "c")
    assert found.peers
    assert not from_env({**ENV, **env}).peers
    with pytest.raises(ConfigError, match="DILOCO_PEER"):
        from_env({**ENV, "DILOCO_PEER": "here"})


def test_a_process_knows_its_rank_in_its_learner():
    assert (from_env(ENV).rank, from_env(ENV).world_size) == (0, 1)
    settings = from_env({**ENV, "RANK": "3", "WORLD_SIZE": "4"})
    assert (settings.rank, settings.world_size) == (3, 4)


def test_a_message_lists_all_problems():
    bad = {
        "DILOCO_SYNCER": "h:1", "DILOCO_LEARNER": "eu", "DILOCO_CONFIG": "[1]", "DILOCO_METRICS_PORT": "x",
        "DILOCO_FAULTS": "upload:explode", "DILOCO_RESTARTS": "-1", "RANK": "first", "WORLD_SIZE": "-2",
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        from_env(bad)
    for part in (
        "DILOCO_JOB is not set", "DILOCO_SPEC is not set", "DILOCO_LEARNER: 'eu', expected <region>/<index>",
        "DILOCO_CONFIG: holds a list", "DILOCO_METRICS_PORT: 'x'", "DILOCO_RESTARTS: '-1'",
        "'upload:explode', expected",
        "RANK: 'first', expected a whole number", "WORLD_SIZE: '-2'",
    ):  # fmt: skip
        assert part in str(error.value)


def test_faults_have_a_value_and_a_limit():
    settings = from_env({**ENV, "DILOCO_FAULTS": "upload:corrupt-chunk=3@1; upload:nan"})
    assert settings.faults == (
        Fault(point="upload", effect="corrupt-chunk", value=3, times=1), Fault(point="upload", effect="nan"),
    )  # fmt: skip


def test_a_spec_that_cannot_be_read_is_named(tmp_path):
    settings = from_env({**ENV, "DILOCO_SPEC": str(tmp_path / "no.json")})
    with pytest.raises(ConfigError, match=r"no\.json: No such file"):
        settings.read_spec()
