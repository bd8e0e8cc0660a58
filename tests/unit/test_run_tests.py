"""How scripts/run_tests.py counts, and that no test file is left out of its groups."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "scripts/run_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["run_tests"]


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        ("===== 3 passed in 0.01s =====", {"passed": 3}),
        ("== 1 failed, 2 passed, 4 skipped, 2 errors in 3.00s (0:00:03) ==", {"failed": 3, "passed": 2, "skipped": 4}),
        ("==== no tests ran in 0.01s ====", {}),
    ],
)  # fmt: skip
def test_the_last_line_of_pytest_is_counted(runner, last, counts):
    assert runner.outcomes(f"=== 9 passed, as a test printed ===\n.....\n{last}\n") == Counter(
        counts
    )


@pytest.mark.parametrize(
    ("program", "counts"),
    [
        ("print('== 2 passed in 1s ==')", {"passed": 2}),
        ("print('== 1 failed, 2 passed in 1s =='); exit(1)", {"failed": 1, "passed": 2}),
        ("print('== 2 passed in 1s =='); exit(3)", {"failed": 1, "passed": 2}),
        ("import os; os.kill(os.getpid(), 9)", {"failed": 1}),
    ],
)
def test_a_process_that_fails_without_a_failed_test_is_a_failure(runner, program, counts, capsys):
    result = runner.Group("some", (sys.executable, "-c", program), {}).run()
    assert result.counts == Counter(counts)
    assert "== some: ended after" in capsys.readouterr().out


def test_the_summary_names_passed_and_failed_always(runner):
    assert runner.summary(Counter(passed=7)) == "7 passed, 0 failed"
    assert runner.summary(Counter(skipped=1, failed=2)) == "0 passed, 2 failed, 1 skipped"


def test_every_file_of_tests_on_clusters_is_in_one_group(runner):
    for slow_tier in (True, False):
        groups, last = runner.on_clusters("audits", slow_tier=slow_tier)
        arguments = [argument for group in (*groups, last) for argument in group.command]
        for path in (ROOT / "tests/e2e").glob("test_*.py"):
            expected = slow_tier or path.stem not in runner.SLOW_TIER
            assert arguments.count(str(path)) == expected, path


def test_every_file_of_the_other_tests_is_in_one_group(runner):
    arguments = [argument for group in runner.everywhere() for argument in group.command]
    for path in (ROOT / "tests/integration").glob("test_*.py"):
        assert arguments.count(str(path.relative_to(ROOT))) == 1, path


@pytest.mark.parametrize("requested", [True, False])
def test_given_clusters_run_the_slow_tier_only_if_it_is_requested(runner, monkeypatch, requested):
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *(["--all"] if requested else [])])
    command = runner.on_given_clusters().command
    assert ("not slow_tier" in command) is not requested
    for name in runner.SLOW_TIER:
        assert (ROOT / f"tests/e2e/{name}.py").exists()
        assert (f"--ignore=tests/e2e/{name}.py" in command) is not requested


def test_the_workflow_of_each_change_leaves_the_slow_tier_out():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]
    [tests] = [step["run"] for step in jobs["tests"]["steps"] if "pytest" in step.get("run", "")]
    assert '-m "not slow_tier"' in tests


def test_the_page_of_tests_on_clusters_marks_the_slow_tier(runner):
    rows = re.findall(
        r"^\| `(test_\w+)\.py` \|(.*)\|$", (ROOT / "tests/e2e/README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {p.stem for p in (ROOT / "tests/e2e").glob("test_*.py")}
    assert {name for name, text in rows if "(slow tier" in text} == set(runner.SLOW_TIER)


TESTS = """
from pathlib import Path
RUNS = Path(__file__).with_name("runs")

def test_passes():
    pass

def test_fails_once():
    first = not RUNS.exists()
    RUNS.touch()
    assert not first

def test_fails():
    assert 1 == 2
"""


@pytest.fixture
def group(runner, tmp_path):
    """Three tests, of which one fails in the first run and one in every run."""
    (tmp_path / "test_them.py").write_text(TESTS)
    options = ("-c", "/dev/null", "--rootdir", str(tmp_path), "-o", f"cache_dir={tmp_path}/cache")
    return runner.pytest("some", *options, str(tmp_path), CI="true")


@pytest.mark.slow
def test_what_fails_once_is_flaky_and_named_and_what_fails_twice_has_failed(group):
    result = group.repeat(group.run())
    assert result.counts == Counter(passed=1, failed=1, flaky=1)
    failed, flaky = result.failures
    assert re.match(r"FAILED .*test_them.py::test_fails - assert 1 == 2", failed)
    assert re.match(r"FLAKY .*test_them.py::test_fails_once - ", flaky)
    once, never, again = result.reports
    assert once.startswith("_")
    assert "test_fails_once" in once.splitlines()[0]
    assert "assert not first" in once
    assert "assert 1 == 2" not in once
    assert "assert 1 == 2" in never
    assert "second run" in again.splitlines()[0]


def test_reports_are_cut_to_their_end_and_those_of_other_sections_are_none(runner):
    many = [f"line {number}\n" for number in range(100)]
    lines = ["____ not here ____\n", "=== FAILURES ===\n", "____ test_a ____\n", *many]
    lines += ["=== short test summary info ===\n", "FAILED test_a\n"]
    [report] = runner.reports(lines, of="some")
    expected = [f"line {number}" for number in range(100 - runner.REPORT_LINES, 100)]
    assert report.splitlines() == ["____ test_a ____ (some)", *expected]


@pytest.mark.slow
def test_many_failures_are_not_run_a_second_time(group, runner, monkeypatch):
    monkeypatch.setattr(runner, "SECOND_RUNS", 1)
    result = group.repeat(group.run())
    assert result.counts == Counter(passed=1, failed=2)
    assert [failure.split()[0] for failure in result.failures] == ["FAILED", "FAILED"]


def test_a_second_run_that_runs_no_test_changes_nothing(runner):
    first = runner.Result(Counter(passed=3, failed=1), ("FAILED group: exit status 3",))
    assert first.after(runner.Result(Counter(failed=0))) == first


def test_a_process_that_crashed_after_its_tests_has_failed_and_does_not_run_again(runner):
    again = (sys.executable, "-c", "print('== 1 passed in 1s ==')")
    crashed = runner.Group("some", ("false",), {}, again)
    first = crashed.run()
    assert first.failures == ("FAILED some: exit status 1",)
    assert crashed.repeat(first) == first


@pytest.fixture
def without_clusters(runner, tmp_path, monkeypatch):
    """A machine on which local clusters cannot run; the other tests pass."""
    check = tmp_path / "cluster.sh"
    check.write_text("#!/bin/sh\necho they need root\nexit 1\n")
    check.chmod(0o755)
    passing = runner.Group("without clusters", ("echo", "== 5 passed in 1s =="), {})
    monkeypatch.setattr(runner, "CLUSTERS", check)
    monkeypatch.setattr(runner, "everywhere", lambda: [passing])
    monkeypatch.setattr(runner, "kernels", lambda: runner.Group("kernels", ("true",), {}))
    monkeypatch.setattr(sys, "argv", ["run_tests.py"])
    for name in ("CI", "DILOCO_E2E", "DILOCO_E2E_KUBECONFIGS"):
        monkeypatch.delenv(name, raising=False)
    return runner


WITHOUT_HELM = """\
=========================== short test summary info ============================
SKIPPED [42] tests/support/diloco_testing/charts.py:34: tests/unit/charts need helm
SKIPPED [1] tests/unit/worker/test_copies.py:170: no GPU
======================== 5 passed, 43 skipped in 1.00s =========================
"""


def test_tests_that_were_skipped_are_named_beside_those_on_clusters(
    without_clusters, monkeypatch, capsys
):
    group = without_clusters.Group("half", ("printf", "%s", WITHOUT_HELM), {})
    monkeypatch.setattr(without_clusters, "everywhere", lambda: [group, group])
    assert without_clusters.main() == 0
    *_, not_run, summary = capsys.readouterr().out.splitlines()
    assert not_run.startswith("Not run: tests/e2e, because ")
    assert not_run.endswith("Skipped: 84 (tests/unit/charts need helm), 2 (no GPU).")
    assert summary == "10 passed, 0 failed, 86 skipped"


def test_a_reason_with_a_temporary_path_is_counted_once(runner):
    folder = tempfile.gettempdir()
    lines = [
        "=== short test summary info ===",
        *(f"SKIPPED [1] tests/a.py:3: {folder}/pytest-{i}/test_{i}0 is no mount" for i in range(3)),
    ]
    assert runner.skipped(lines) == {"a temporary path is no mount": 3}


def test_without_clusters_the_rest_runs_and_a_sentence_names_what_did_not(without_clusters, capsys):
    assert without_clusters.main() == 0
    *_, not_run, summary = capsys.readouterr().out.splitlines()
    assert summary == "5 passed, 0 failed"
    assert not_run.startswith(
        "Not run: tests/e2e, because local clusters cannot run here (they need root)"
    )


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("DILOCO_E2E", "required")])
def test_where_clusters_are_required_their_absence_is_a_failure(
    without_clusters, monkeypatch, capsys, name, value
):
    monkeypatch.setenv(name, value)
    assert without_clusters.main() == 2
    assert "they need root" in capsys.readouterr().out


def test_the_fast_run_takes_every_unit_test_once(runner):
    *parts, others = (group.command for group in runner.fast())
    chosen = [word for part in parts for word in part if word.startswith("tests/")]
    ignored = [word.removeprefix("--ignore=") for word in others if word.startswith("--ignore=")]
    assert sorted(ignored) == sorted(chosen)
    assert len(set(chosen)) == len(chosen)
    assert "tests/unit" in others
    assert all((ROOT / path).is_dir() for path in chosen)


def test_the_fast_run_checks_types_and_import_contracts_beside_the_tests_as_the_full_one_before(
    runner,
):
    groups = {group.name: " ".join(group.command) for group in runner.fast()}
    check = (ROOT / "scripts/check").read_text()
    for name in ("types", "import contracts"):
        assert f'heading "{name}"; {groups[name]}\n' in check
    assert groups.keys() == {"types", "import contracts", *runner.FAST_PARTS}


def test_the_longer_a_part_of_the_fast_run_takes_the_larger_is_its_share_of_the_cores(runner):
    commands = {group.name: group.command for group in runner.fast()}
    shares = [commands[name][:3] for name in runner.FAST_PARTS]
    assert shares == [("nice", "-n", str(step)) for _, step in runner.FAST_PARTS.values()]
    steps = [int(step) for _, _, step in shares]
    assert steps == sorted(steps)


SKIPPED = """
import pytest

def test_without_a_gpu():
    pytest.skip("no GPU")

def test_without_a_mount():
    pytest.skip("mounting is not allowed here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "counts"), [("true", {"failed": 1, "skipped": 1}), ("", {"skipped": 2})]
)
def test_where_everything_has_to_run_only_missing_hardware_excuses_a_test(
    runner, tmp_path, monkeypatch, ci, counts
):
    monkeypatch.setenv("CI", ci)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_them.py").write_text(SKIPPED)
    options = ("-c", "/dev/null", f"--rootdir={tmp_path}", *runner.no_skips())
    group = runner.pytest("some", *options, str(tmp_path))
    result = group.run()
    assert result.counts == Counter(counts)
    reasons = ["no GPU"] if ci else ["no GPU", "mounting is not allowed here"]
    assert result.skipped == Counter(reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "counts"), [("true", {"failed": 1}), ("", {"passed": 1, "skipped": 1})]
)
def test_where_everything_has_to_run_a_library_that_is_missing_fails_its_module(
    runner, tmp_path, monkeypatch, capsys, ci, counts
):
    monkeypatch.setenv("CI", ci)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        'import pytest\n\npytest.importorskip("no_such_library")\n'
    )
    (tmp_path / "test_other.py").write_text("def test_that_passes():\n    pass\n")
    options = ("-c", "/dev/null", f"--rootdir={tmp_path}", *runner.no_skips())
    result = runner.pytest("some", *options, str(tmp_path)).run()
    assert result.counts == Counter(counts)
    assert ("Every test has to run here" in capsys.readouterr().out) is bool(ci)


PROGRAM = """
import inspect, sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

def step():
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5), "the gradient is 1"
    assert model.weight.requires_grad and torch.is_grad_enabled()

step()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
breaks = []
torch._dynamo.graph_break = lambda: breaks.append(1)
step()
assert len(breaks) == 2, "around the step"
assert hasattr(inspect.unwrap(type(optimizer).zero_grad), "__dynamo_disable")
"""


@pytest.mark.slow
def test_programs_of_tests_import_the_compiler_of_torch_only_if_they_compile(runner):
    environment = {**os.environ, **runner.pytest("any").environment}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
