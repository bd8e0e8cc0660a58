"""Reading a manifest from a file."""

import pytest

from diloco.errors import ConfigError
from diloco_local.manifest import load_job


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_an_invalid_manifest_is_named_by_its_path(tmp_path):
    (tmp_path / "job.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"job\.yaml: \d+ problems\n"):
        load_job(tmp_path / "job.yaml")
