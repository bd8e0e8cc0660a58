"""The syncer's command line and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco_syncer.settings import read


def test_flags_win_over_variables(monkeypatch):
    monkeypatch.setenv("DILOCO_SPEC", "/env/spec.json")
    monkeypatch.setenv("DILOCO_STATE", "/env/run")
    monkeypatch.setenv("DILOCO_METRICS_PORT", "9")
    given = read(["--dir", "/flag/run"])
    assert (given.spec, given.directory) == (Path("/env/spec.json"), Path("/flag/run"))
    assert (given.listen, given.metrics_port, given.health_file) == ("0.0.0.0:7070", 9, None)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_s3_has_no_tls_only_where_the_environment_names_one(monkeypatch, variable):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert not read(["--spec", "s", "--dir", "d"]).plain_http
    monkeypatch.setenv(variable, "https://s3.example")
    assert not read(["--spec", "s", "--dir", "d"]).plain_http
    monkeypatch.setenv(variable, "http://127.0.0.1:9000")
    assert read(["--spec", "s", "--dir", "d"]).plain_http


def test_all_problems_are_reported_at_once(monkeypatch):
    monkeypatch.delenv("DILOCO_SPEC", raising=False)
    monkeypatch.delenv("DILOCO_STATE", raising=False)
    monkeypatch.setenv("DILOCO_METRICS_PORT", "http")
    with pytest.raises(ConfigError) as error:
        read([])
    for part in ("--spec is not given", "--dir is not given", "DILOCO_METRICS_PORT: 'http'"):
        assert part in str(error.value)
