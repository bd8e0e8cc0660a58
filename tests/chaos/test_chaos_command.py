"""
A whole run of `diloco chaos` with every kind of fault once: the job completes, and the audit is clean.

The faults are placed by global steps, and each begins only after all learners have recovered from the one before.
"""

import json
import subprocess
import sys

import pytest
import yaml

from diloco_testing.local.run_process import manifest

pytestmark = [pytest.mark.slow, pytest.mark.slow_tier, pytest.mark.timeout(900)]

STEPS = 400
SECONDS = 800.0
"""For a machine on which other programs use both cores."""

DRIVER = """
import sys
from pathlib import Path
from diloco_local.chaos import run
from diloco_local.chaos.fault_plan import RATES, Options
from diloco_local.faults import SYNCER_KINDS, Fault, Kind
from diloco_local.manifest import load_job

# Kills last: a learner that restarts misses many steps.
KINDS = [*(kind for kind in RATES if "kill" not in kind), Kind.SYNCER_KILL, Kind.KILL]

class Clock:
    # Of fault n: n while it is wanted, n + 0.5 when it is over.
    now, step = 0.5, 0

    def __call__(self, status):
        waits = self.now % 1 == 0.5
        trains = status["learners"]["training"] == status["learners"]["desired"]
        if self.step + 8 <= status["step"] or (not waits and status["step"] < self.step):
            if not waits or trains:
                self.now, self.step = self.now + 0.5, status["step"]
        return self.now

def amount(kind):
    return {Kind.SLOW: 0.7, Kind.DELAY: 0.1, Kind.CORRUPT: 0.1}.get(kind, 0.0)

job, here = Path(sys.argv[1]), Path(sys.argv[2])
faults = [
    Fault(number=n, kind=kind, target="syncer" if kind in SYNCER_KINDS else "us/0", at=n, until=n + 0.5,
          amount=amount(kind), bandwidth=2e6 if kind is Kind.DELAY else 0.0)
    for n, kind in enumerate(KINDS, 1)
]
sys.exit(run.run(job, load_job(job), here, Options(seed=1), faults=faults, clock=Clock()))
"""

KINDS = ["syncer-full", "pause", "slow", "cut", "hang", "delay", "corrupt", "syncer-kill", "kill"]


def test_a_job_completes_with_every_kind_of_fault_and_a_clean_audit(tmp_path):
    job, run = tmp_path / "job.yaml", tmp_path / "run"
    body = manifest("storm", steps=STEPS, learners=2, evaluation={"everySteps": STEPS // 2})
    job.write_text(yaml.safe_dump(body))
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, tmp_path / "driver.py", job, run],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    lines = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert [line["fault"] for line in lines if line["event"] == "begin"] == KINDS, lines
    ended = {line["number"]: line for line in lines if line["event"] == "end"}
    assert sorted(ended) == [1, 2, 3, 4, 5, 6, 7], "all but the kills"
    assert ended[7]["flipped"] > 0
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    restarted = [event["process"] for event in events if event["event"] == "restart"]
    assert restarted == ["syncer", "us/0"], "no other process ended"
    summary = done.stdout.partition("faults: 9 (seed 1): ")[2]
    assert "goodput: " in summary
    assert "restarts: 1 of learners, 1 of the syncer; " in summary
    assert "audit: Passed: " in summary
    assert "validation loss: " in done.stdout
    assert "Injected faults" in (run / "report.html").read_text()
