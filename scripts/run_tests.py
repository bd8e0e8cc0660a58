"""
Run every test: groups in parallel, each in its own pytest process, and one summary line at the end.

Tests on clusters mostly wait for pods, and building the clusters' programs waits for the network, so
the tests that need neither run meanwhile. The output of a group is printed whole when it ends.

Where no cluster can run, all other tests do, and a sentence names what did not run.
With CI=true or DILOCO_E2E=required everything has to run. --fast: unit tests alone, without the slow ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "tests/e2e/clusters/cluster.sh"
CHART = "tests/unit/charts"
"""Needs helm, which is built with the clusters' programs."""
OWN_CLUSTERS = ("test_api_rules", "test_fuzzed_jobs", "test_scale", "test_two_clusters")
"""Files of tests/e2e that start clusters or API servers of their own; all others share one cluster."""
LAST = "test_rbac"
"""Reads the audit logs of all other groups."""
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)")


@dataclass(frozen=True, slots=True)
class Group:
    """What one process runs, and what it counted."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, *, alone: bool = False) -> Counter[str]:
        """
        Outcomes of its tests by kind; a process that fails without any counts as a failure.

        Args:
            alone: print its output as it comes, since no other group prints.
        """
        begun, lines = time.monotonic(), []
        print(f"== {self.name}: started", flush=True)
        with subprocess.Popen(
            self.command, cwd=ROOT, env={**os.environ, **self.environment}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                lines.append(line)
                print(line if alone else "", end="", flush=alone)
        output = "" if alone else "".join(lines).rstrip()
        print(
            f"\n== {self.name}: ended after {time.monotonic() - begun:.0f} s\n{output}", flush=True
        )
        counts = outcomes("".join(lines))
        if process.returncode and not counts["failed"]:
            print(f"== {self.name}: exit status {process.returncode}", flush=True)
            counts["failed"] += 1
        return counts


def outcomes(output: str) -> Counter[str]:
    """What the last line of pytest's output counts; an error counts as a failure."""
    last = next((line for line in reversed(output.splitlines()) if line.startswith("=")), "")
    counts: Counter[str] = Counter()
    for number, kind in COUNT.findall(last):
        counts["failed" if kind == "error" else kind] += int(number)
    return counts


def summary(counts: Counter[str]) -> str:
    """Such as "812 passed, 0 failed, 3 skipped"."""
    kinds = dict.fromkeys(("passed", "failed", *sorted(counts)))
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def pytest(name: str, *arguments: str, **environment: str) -> Group:
    """A group that runs pytest."""
    command = (sys.executable, "-m", "pytest", "-ra", "--durations=15", *arguments)
    return Group(name, command, environment)


def everywhere(*arguments: str) -> Group:
    """Tests that need no clusters."""
    return pytest("without clusters", "tests/unit", "tests/integration", "tests/chaos", *arguments)


def programs() -> list[Group]:
    """Builds for local clusters, in parallel: some wait for the network while others compute."""
    images = ("sh", "-c", '"$0" packages && "$1" -m diloco_testing.clusters.images', str(CLUSTERS))
    return [
        Group("programs of local clusters", (str(CLUSTERS), "build"), {}),
        Group("images", (*images, sys.executable), {"PYTHONPATH": "tests/support"}),
    ]


def on_clusters(audits: str) -> tuple[list[Group], Group]:
    """Groups that may run at the same time, and the one after them; every file is in one of them."""
    files = {path.stem: str(path) for path in sorted((ROOT / "tests/e2e").glob("test_*.py"))}
    last, own = files.pop(LAST), [files.pop(name) for name in OWN_CLUSTERS]
    environment = {"DILOCO_E2E": "required", "DILOCO_E2E_AUDITS": audits}
    first = [
        pytest("one cluster", *files.values(), **environment),
        pytest("clusters of their own", CHART, *own, **environment),
    ]
    return first, pytest("rights", last, **environment)


def all_of_it(audits: str) -> Counter[str]:
    """Every test, on local clusters."""
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor() as pool:
        others = pool.submit(everywhere(f"--ignore={CHART}").run)
        built = list(pool.map(Group.run, programs()))
        if failed := sum((group for group in built if group["failed"]), Counter()):
            return failed + others.result()
        groups, last = on_clusters(audits)
        running: list[Future[Counter[str]]] = [others, *(pool.submit(g.run) for g in groups)]
        for future in running:
            counts += future.result()
    return counts + last.run()


def fast() -> list[Group]:
    """Unit tests that start no programs, with a tenth of the examples of properties, in two halves."""
    first = ("agent", "charts", "cli", "job", "local", "operator", "sim")
    chosen = ("-m", "not slow", "--hypothesis-profile=fast", "--durations=10")
    unit = [f"tests/unit/{folder}" for folder in first]
    others = ("tests/unit", *(f"--ignore={path}" for path in unit))
    # The threads of BLAS would spin for the cores of the other half. pytest keeps the tests as it has
    # compiled them only where bytecode may be written, and otherwise compiles all of them in each run.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return [
        pytest("operator, command line, simulator", *chosen, *unit, **environment),
        pytest("the others", *chosen, *others, **environment),
    ]


def at_once(groups: list[Group]) -> Counter[str]:
    """Run groups at the same time."""
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(Group.run, groups), Counter())


def main() -> int:
    """0: every test that ran has passed."""
    not_run = ""
    if sys.argv[1:] == ["--fast"]:
        counts = at_once(fast())
    elif os.environ.get("DILOCO_E2E_KUBECONFIGS"):
        group = pytest("all", "tests", DILOCO_E2E="required")
        counts = group.run(alone=True)
    else:
        check = subprocess.run([CLUSTERS, "check"], capture_output=True, text=True)
        required = "true" in os.environ.get("CI", "") or os.environ.get("DILOCO_E2E") == "required"
        if check.returncode and required:
            print(f"Tests on clusters are required, and local clusters cannot run: {check.stdout}")
            return 2
        if check.returncode:
            counts = everywhere().run(alone=True)
            not_run = (
                f"Not run: tests/e2e, because local clusters cannot run here ({check.stdout.strip()}); "
                "to run them on your own clusters, see tests/e2e/README.md."
            )
        else:
            with tempfile.TemporaryDirectory(prefix="diloco-audits-") as audits:
                counts = all_of_it(audits)
    print(f"\n{not_run}".rstrip())
    print(summary(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
