"""`diloco new`: which files it writes, and what it refuses."""

from __future__ import annotations

import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import typer.testing

from diloco.errors import ConfigError, StorageError
from diloco_cli.__main__ import app
from diloco_cli.template_files import NAMES, job_name, write_template
from diloco_job.manifest_file import parse_job
from diloco_local.commands import local_problems

ROOT = Path(__file__).parents[3]


def test_the_files_of_the_template_are_written_with_the_name_of_the_job(tmp_path):
    assert write_template(tmp_path / "a/My_GPT") == "my-gpt"
    written = {path.name: path.read_text() for path in (tmp_path / "a/My_GPT").iterdir()}
    assert written.keys() == set(NAMES)
    assert not [name for name, text in written.items() if "my-training" in text]
    job = parse_job(written["job.yaml"])
    assert (job.metadata.name, local_problems(job)) == ("my-gpt", [])


def test_the_command_names_the_next_steps(tmp_path):
    done = typer.testing.CliRunner().invoke(app, ["new", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    assert f"cd {tmp_path / 'mine'}\n" in done.output
    for line in ("python train.py ", "diloco doctor job.yaml ", "diloco run job.yaml "):
        assert f"\n  {line}" in done.output


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_exists_is_never_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"already has {name}, and nothing was written"):
        write_template(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_link_that_leads_nowhere_is_not_written_through(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/train.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(ConfigError, match=r"already has train\.py"):
        write_template(tmp_path / "new")
    assert not (tmp_path / "elsewhere.py").exists()


def test_other_files_in_the_directory_stay(tmp_path):
    (tmp_path / "data.csv").write_text("1")
    write_template(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "data.csv"}


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match="is a file"):
        write_template(tmp_path / "f")
    with pytest.raises(StorageError, match="the template was not written"):
        write_template(tmp_path / "f/below")


@pytest.mark.parametrize(
    "folder",
    ["x" * 300, "9-", "Äö", "a--b-", "Run 7 (new)", "null", "True", "yes", "no", "on", "off", "y"],
)
def test_any_folder_gives_a_valid_job(folder):
    text = (files("diloco_cli") / "template/job.yaml").read_text()
    name = job_name(folder)
    assert parse_job(text.replace("my-training", name)).metadata.name == name


def test_the_image_is_built_on_the_worker_image_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dockerfile = (files("diloco_cli") / "template/Dockerfile").read_text()
    assert f"\nARG WORKER=diloco-worker:{project['version']}\n" in dockerfile


def test_the_template_is_part_of_the_wheel():
    """The build backend takes what is below a package, except what git ignores."""
    folder = ROOT / "cli/diloco_cli/template"
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == set(NAMES)
    paths = [str(folder / name) for name in NAMES]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
