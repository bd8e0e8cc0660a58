"""
Run all tests but the slow tier: groups in parallel, each in its own pytest process, and one summary line at
the end.

Tests on clusters mostly wait for pods, and building the clusters' programs waits for the network, so
the tests that need neither run meanwhile. The output of a group is printed whole when it ends.

Tests that failed run a second time, alone, if they are few; those that pass then are counted as flaky
and named above the summary, as are those that fail again. The ends of their reports stand above that.

Where no cluster can run, all other tests do, and a sentence names what did not run.
With CI=true or DILOCO_E2E=required all of these have to run. --fast: unit tests alone, without the slow ones.
--all: the slow tier as well, which is the files of SLOW_TIER and the tests marked slow_tier.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "tests/e2e/clusters/cluster.sh"
SUPPORT = ROOT / "tests/support"
CHART = "tests/unit/charts"
"""Needs helm, which is built with the clusters' programs."""
OWN_CLUSTERS = (
    *("test_api_rules", "test_api_versions", "test_applied_metadata", "test_applied_status"),
    *("test_applied_templates", "test_cert_manager", "test_kueue", "test_operator_replicas"),
    "test_walkthrough",
)
"""Files of tests/e2e that start clusters or API servers of their own."""
TWO_CLUSTERS = ("test_two_clusters", "test_drills")
SECOND_CLUSTER = ("test_lifecycle",)
THIRD_CLUSTER = ("test_learners_of_pods", "test_failed_jobs", "test_volumes", "test_steady_state")
"""
All other files share the first cluster. test_steady_state waits for a write that must not come, and its ten
minutes begin with test_learners_of_pods.
"""
SLOW_TIER = (
    *("test_fuzzed_jobs", "test_ipv6_cluster", "test_kueue_controller", "test_older_version"),
    *("test_pod_groups", "test_pools", "test_scale"),
)
"""Run with --all; docs/testing.md names the faster tests of the same promises."""
WHOLE_RUNS = ("test_doctor", "test_examples", "test_lora", "test_recipes", "test_trainers")
"""Files of tests/integration that take as long as the chaos tests, and run beside the other ones."""
SECOND_HALF = "test_p"
"""Where the other files of tests/integration are divided: in one process, they would end after all other groups."""
SIMULATED = ("sim", "syncer")
"""Folders of tests/unit that take half of its processor time: in one process, it would end long after all others."""
AT_ONCE = 6
"""
Groups that run at the same time, three of them with clusters: they keep two cores busy. With eight, what tests had
started waited for a core until their deadlines had passed.
"""
FIRST = ("nice", "-n", "-10")
"""
Before the commands for which others wait. Without the right to a higher priority, nice runs
them with the usual one.
"""
FAST_PARTS = {
    "worker, experiment": (("experiment", "worker"), 0),
    "operator": (("charts", "operator"), 0),
    "simulator, syncer": (("sim", "syncer"), 2),
    "protos, local": (("local", "protos"), 3),
    "the others": ((), 7),
}
"""
Folders of each part of the fast tests, and its niceness: a share of the cores in proportion to its processor time
(each step is a factor of 1.25) and to how long its tests wait, so that all end at about the same time and none is
left alone on one core. The first and the fourth import torch, which takes two seconds of processor time.
"""
CONTRACTS = ("lint-imports", "--no-cache")
LAST = "test_rbac"
"""Reads the audit logs of all other groups."""
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)")
SECTION = re.compile(r"=+ (?P<title>[^=]+) =+$")
REPORT = re.compile(r"_{3,} .+ _{3,}$")
SKIP = re.compile(r"SKIPPED \[(?P<number>\d+)\] \S+:(\d+:)? (?P<reason>.*)")
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^\s'\",;:)]+")
"""Differs in each run, so that a reason with it would be counted apart."""
REPORTS, REPORT_LINES = 12, 60
"""How many reports of failures are repeated at the end, and how much of each: the output of all groups is long."""
SECOND_RUNS = 3
"""More failed tests than these in a group have a cause that a second run must not hide."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a group ended."""

    counts: Counter[str]
    failures: tuple[str, ...] = ()
    """pytest's line for each test that failed, with the beginning of its message."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped tests by reason."""
    reports: tuple[str, ...] = ()
    """What pytest printed about each failure: its end."""

    def __add__(self, other: Result) -> Result:
        return Result(
            self.counts + other.counts,
            self.failures + other.failures,
            self.skipped + other.skipped,
            self.reports + other.reports,
        )

    def after(self, second: Result) -> Result:
        """This result of all tests, given the result of a second run of those that failed."""
        if not second.counts["passed"] + second.counts["failed"]:
            return self
        counts = Counter(self.counts)
        counts["failed"] = second.counts["failed"]
        counts["flaky"] = second.counts["passed"]
        again = {failure.split(" - ")[0] for failure in second.failures}
        flaky = [f for f in self.failures if f.split(" - ")[0] not in again]
        flaky = [f"FLAKY {f.partition(' ')[2]}" for f in flaky]
        reports = (*self.reports, *second.reports)
        return Result(+counts, (*second.failures, *flaky), self.skipped, reports)


@dataclass(frozen=True, slots=True)
class Group:
    """What one process runs."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    second: tuple[str, ...] = ()
    """The command for the tests that failed."""

    def run(self, *, alone: bool = False) -> Result:
        """
        Outcomes of its tests; a process that fails without any counts as a failure.

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
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        output = "" if alone else "".join(lines).rstrip()
        print(
            f"\n== {self.name}: ended after {time.monotonic() - begun:.0f} s, {cpu:.0f} s of CPU of it "
            f"and its children\n{output}",
            flush=True,
        )  # Programs that outlive their parents, such as those of clusters, are not in it.
        result = Result(
            outcomes("".join(lines)), failures(lines), skipped(lines), reports(lines, of=self.name)
        )
        if process.returncode and not result.counts["failed"]:
            print(f"== {self.name}: exit status {process.returncode}", flush=True)
            return result + Result(
                Counter(failed=1), (f"FAILED {self.name}: exit status {process.returncode}",)
            )
        return result

    def nicer(self, niceness: int) -> Group:
        """The same with a smaller share of the cores; below 0, with a larger one where that is allowed."""
        return replace(self, command=("nice", "-n", str(niceness), *self.command))

    def repeat(self, result: Result) -> Result:
        """The result after a second run of the tests that failed, if they are few; not of a crash outside of tests."""
        tests = all("::" in failure for failure in result.failures)
        if not self.second or not tests or not 0 < result.counts["failed"] <= SECOND_RUNS:
            return result
        again = Group(f"{self.name}, second run of what failed", self.second, self.environment)
        return result.after(again.run(alone=True))


def failures(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines of pytest's short summary that name a failed test."""
    return tuple(
        line.strip()[:500]
        for line in short_summary(lines) if line.startswith(("FAILED ", "ERROR "))
    )  # fmt: skip


def reports(lines: Sequence[str], *, of: str) -> tuple[str, ...]:
    """The end of what pytest printed about each failed test of a group, below the heading with its name."""
    found: list[list[str]] = []
    inside = False
    for line in lines:
        if section := SECTION.match(line):
            inside = section["title"] in ("FAILURES", "ERRORS")
        elif inside and REPORT.match(line):
            found.append([f"{line.rstrip()} ({of})\n"])
        elif inside and found:
            found[-1].append(line)
    return tuple("".join((head, *rest[-REPORT_LINES:])).rstrip() for head, *rest in found)


def skipped(lines: Sequence[str]) -> Counter[str]:
    """How many tests pytest's short summary lists as skipped, by reason."""
    counts: Counter[str] = Counter()
    for line in short_summary(lines):
        if found := SKIP.match(line):
            counts[TEMPORARY.sub("a temporary path", found["reason"].strip())] += int(
                found["number"]
            )
    return counts


def short_summary(lines: Sequence[str]) -> Sequence[str]:
    """The end of pytest's output, in which it lists tests that did not pass."""
    begin = max((i for i, line in enumerate(lines) if "short test summary" in line), default=None)
    return () if begin is None else lines[begin:]


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


def skips(counts: Counter[str]) -> str:
    """
    A sentence on the tests that were skipped, and why; "" if none was.

    >>> skips(Counter({"no GPU": 1, "tests/unit/charts need helm": 84}))
    'Skipped: 84 (tests/unit/charts need helm), 1 (no GPU).'
    """
    listed = ", ".join(f"{number} ({reason})" for reason, number in counts.most_common())
    return f"Skipped: {listed}." if listed else ""


def pytest(name: str, *arguments: str, **environment: str) -> Group:
    """A group that runs pytest, and can run again what failed."""
    # Without bytecode, each of the thousand processes that tests start would compile our packages (0.3 s).
    # Threads of torch that wait for each other would spin on cores that other groups need.
    # With Go's default, tests on an API server took 1.4 times as much processor time.
    # PYTHONPATH: for programs that use an optimizer (tests/support/sitecustomize.py).
    # PYTHONFAULTHANDLER: pytest shows where a process crashed only until its tests have ended.
    defaults = {
        "PYTHONDONTWRITEBYTECODE": "", "OMP_WAIT_POLICY": "PASSIVE", "GOGC": "400", "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    environment = defaults | environment
    cache = f"cache_dir=.pytest_cache/{name.replace(' ', '-')}"
    command = (sys.executable, "-m", "pytest", "-ra", "--durations=15", "-o", cache, *arguments)
    second = (*command, "--last-failed", "--last-failed-no-failures=none")
    return Group(name, (*command, "--cache-clear"), environment, second)


def no_skips() -> tuple[str, ...]:
    """Options for tests on a machine that must be able to run them all."""
    return ("--no-skips",) if "true" in os.environ.get("CI", "") else ()


def kernels() -> Group:
    """Compiles them into numba's cache: the first processes of every group would each compile all of them."""
    code = (
        "from diloco.codec import formats; from diloco_syncer.merging import streaming; "
        "formats.warm_up(); streaming.warm_up()"
    )
    return Group("kernels", (*FIRST, sys.executable, "-c", code), {})


def with_slow_tier() -> bool:
    """Whether the slow tier was requested."""
    return "--all" in sys.argv[1:]


def tier() -> tuple[str, ...]:
    """Options that leave the tests of the slow tier out, unless they were requested."""
    return () if with_slow_tier() else ("-m", "not slow_tier")


def everywhere(*arguments: str) -> list[Group]:
    """Tests that need no clusters; in the last group, nothing waits, so it may begin last."""
    options = (*no_skips(), *arguments)
    files = {
        path.stem: str(path.relative_to(ROOT))
        for path in (ROOT / "tests/integration").glob("test_*.py")
    }
    whole = [files.pop(name) for name in WHOLE_RUNS]
    first = sorted(path for name, path in files.items() if name < SECOND_HALF)
    second = sorted(path for name, path in files.items() if name >= SECOND_HALF)
    worlds = [f"tests/unit/{name}" for name in SIMULATED]
    units = ("tests/unit", *(f"--ignore={path}" for path in worlds))
    return [
        # The threads of BLAS would spin for the cores of the other groups.
        pytest("simulator and syncer", *worlds, *tier(), *options, OMP_NUM_THREADS="1"),
        pytest("whole runs and chaos tests", *whole, "tests/chaos", *tier(), *options),
        pytest("integration tests, first half", *first, *tier(), *options),
        pytest("integration tests, second half", *second, *tier(), *options),
        pytest("other unit tests", *units, *tier(), *options, OMP_NUM_THREADS="1"),
    ]


def programs() -> list[Group]:
    """Builds for local clusters, in parallel: some wait for the network while others compute."""
    images = ("sh", "-c", '"$0" packages && "$1" -m diloco_testing.clusters.images', str(CLUSTERS))
    return [
        Group("programs of local clusters", (*FIRST, str(CLUSTERS), "build"), {}),
        Group("images", (*FIRST, *images, sys.executable), {"PYTHONPATH": "tests/support"}),
    ]


def on_clusters(audits: str, *, slow_tier: bool = False) -> tuple[list[Group], Group]:
    """Groups that may run at the same time, and the one after them; every file is in one of them."""
    files = {path.stem: str(path) for path in sorted((ROOT / "tests/e2e").glob("test_*.py"))}
    last, own = files.pop(LAST), [files.pop(name) for name in OWN_CLUSTERS]
    slow = [files.pop(name) for name in SLOW_TIER]
    own += slow if slow_tier else []
    two = [files.pop(name) for name in TWO_CLUSTERS]
    environment = {"DILOCO_E2E": "required", "DILOCO_E2E_AUDITS": audits}
    options = (*(() if slow_tier else ("-m", "not slow_tier")), *no_skips())
    second = [files.pop(name) for name in SECOND_CLUSTER]
    third = [files.pop(name) for name in THIRD_CLUSTER]
    # The longest first: what begins last must not be what ends last.
    groups = [
        pytest("clusters of their own", CHART, *own, *options, **environment),
        pytest("second cluster", *second, *options, **environment),
        pytest("third cluster", *third, *options, **environment),
        pytest("two clusters", *two, *options, **environment),
        pytest("first cluster", *files.values(), *options, **environment),
    ]
    return groups, pytest("rights", last, *no_skips(), **environment)


def on_given_clusters() -> Group:
    """All tests in one process, on the clusters of DILOCO_E2E_KUBECONFIGS."""
    slow = () if with_slow_tier() else SLOW_TIER
    ignored = (f"--ignore=tests/e2e/{name}.py" for name in slow)
    return pytest("all", "tests", *tier(), *ignored, DILOCO_E2E="required")


def started(pool: Executor, groups: Sequence[Group]) -> list[tuple[Group, Future[Result]]]:
    """Groups that begin to run."""
    return [(group, pool.submit(group.run)) for group in groups]


def ended(running: Sequence[tuple[Group, Future[Result]]]) -> Result:
    """Their results; once all have ended, the few tests that failed run again, without any others."""
    results = [(group, future.result()) for group, future in running]
    return sum((group.repeat(result) for group, result in results), Result(Counter()))


def all_of_it(audits: str, *, slow_tier: bool) -> Result:
    """The tests without clusters, and those on local clusters."""
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor() as builders:
        building = started(builders, programs())
        compiled = kernels().run()
        computing = everywhere(f"--ignore={CHART}")
        now, later = computing[: AT_ONCE // 2], computing[AT_ONCE // 2 :]
        running = started(pool, now)
        built = [compiled, *(future.result() for _, future in building)]
        if any(result.counts["failed"] for result in built):
            return sum(built, ended(running + started(pool, later)))
        groups, last = on_clusters(audits, slow_tier=slow_tier)
        # The longest of both kinds first; the unit tests, which only compute, fill what clusters leave.
        running += started(pool, [*groups[:3], *later[:-1], *groups[3:], *later[-1:]])
    return ended(running) + last.run()


def fast() -> list[Group]:
    """Types, import contracts, and unit tests that start no programs, with a tenth of the examples of properties."""
    chosen = ("-m", "not slow", "--hypothesis-profile=fast", "--durations=10")
    groups = [Group("types", ("mypy",), {}), Group("import contracts", CONTRACTS, {})]
    elsewhere = [folder for folders, _ in FAST_PARTS.values() for folder in folders]
    for name, (folders, niceness) in FAST_PARTS.items():
        paths = [f"tests/unit/{folder}" for folder in folders]
        paths = paths or ["tests/unit", *(f"--ignore=tests/unit/{f}" for f in elsewhere)]
        groups.append(pytest(name, *chosen, *paths, OMP_NUM_THREADS="1").nicer(niceness))
    return groups


def at_once(groups: Sequence[Group]) -> Result:
    """Run groups at the same time."""
    with ThreadPoolExecutor() as pool:
        return ended(started(pool, groups))


def main() -> int:
    """0: every test that ran has passed."""
    not_run = ""
    if sys.argv[1:] == ["--fast"]:
        result = at_once(fast())
    elif os.environ.get("DILOCO_E2E_KUBECONFIGS"):
        group = on_given_clusters()
        result = group.repeat(group.run(alone=True))
    else:
        check = subprocess.run([CLUSTERS, "check"], capture_output=True, text=True)
        required = "true" in os.environ.get("CI", "") or os.environ.get("DILOCO_E2E") == "required"
        if check.returncode and required:
            print(f"Tests on clusters are required, and local clusters cannot run: {check.stdout}")
            return 2
        if check.returncode:
            result = kernels().run() + at_once(everywhere())
            not_run = (
                f"Not run: tests/e2e, because local clusters cannot run here ({check.stdout.strip()}); "
                "to run them on your own clusters, see tests/e2e/README.md. "
            )
        else:
            with tempfile.TemporaryDirectory(prefix="diloco-audits-") as audits:
                result = all_of_it(audits, slow_tier=with_slow_tier())
    for report in result.reports[:REPORTS]:
        print(f"\n{report}")
    if more := len(result.reports[REPORTS:]):
        print(f"\nReports of {more} more failures are in the output of their groups.")
    print(f"\n{not_run}{skips(result.skipped)}".rstrip(), *result.failures, sep="\n")
    print(summary(result.counts))
    return 1 if result.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
