"""Ranks above 0 report that they make progress."""

import subprocess
import sys

from diloco.runtime import health
from diloco_worker.rank_liveness import RankProgress
from diloco_worker.settings import progress_file


def test_each_step_is_progress_and_the_file_is_written_once_a_second(tmp_path):
    path = tmp_path / "health.json"
    progress = RankProgress(path)
    progress.step(100.0)
    first = health.read(path)
    assert first is not None
    assert (first.at, first.progress_at, first.ready) == (100.0, 100.0, True)
    progress.step(100.5)
    assert health.read(path) == first
    progress.step(101.0)
    last = health.read(path)
    assert last is not None
    assert (last.progress_at, last.why) == (101.0, "step 3 of this process")


def test_only_the_first_process_of_a_pod_above_rank_0_reports(tmp_path):
    file = {"DILOCO_PROGRESS_FILE": str(tmp_path / "f")}
    assert progress_file(file) == progress_file({**file, "LOCAL_RANK": "0"}) == tmp_path / "f"
    assert progress_file({**file, "LOCAL_RANK": "1"}) is None
    assert progress_file({"DILOCO_HEALTH_FILE": "/x", "RANK": "0"}) is None


def test_a_program_reports_with_one_function_that_does_not_load_torch(tmp_path):
    code = (
        "import sys, diloco_worker\n"
        "diloco_worker.report_progress()\n"
        "sys.exit('torch' in sys.modules)"
    )
    path = tmp_path / "health.json"
    environment = {"PATH": "", "DILOCO_PROGRESS_FILE": str(path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert health.read(path) is not None


def test_outside_a_cluster_it_does_nothing():
    RankProgress(progress_file({})).step(1.0)
