"""What holds for every test: the profiles of hypothesis, the option --no-skips, and what took processor time."""

import gc
import logging
import os
import resource
import signal
from collections import Counter

import pytest
from hypothesis import settings

gc.disable()  # while modules are imported and tests collected: what they leave stays until the end
standard = settings.get_profile("ci" if os.environ.get("CI") else "default")
# `fast` is what `make check` has time for, `full` is what every other run uses.
settings.register_profile("full", standard, deadline=None)
settings.register_profile("fast", standard, deadline=None, max_examples=10)
settings.load_profile("full")

HARDWARE = ("no GPU", "this CPU has no vector instructions")
"""Beginnings of the reasons for which a test may be skipped with --no-skips."""


LISTED = 15
"""Tests in the list of those that took the most processor time."""
CPU: Counter[str] = Counter()
"""Seconds by test, those of its fixtures and of the programs that ended during it included."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skip is a failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    refuse_skip(report, collector.config)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if not (report.skipped and config.getoption("no_skips")):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not reason.startswith(HARDWARE):
        report.outcome = "failed"
        report.longrepr = f"Every test has to run here, and this one was skipped: {reason}"


def pytest_configure() -> None:
    # A shell starts what it runs in the background without Ctrl-C, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    begun = cpu_seconds()
    result = yield
    CPU[item.nodeid] = cpu_seconds() - begun
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("durations"):
        return
    terminalreporter.section(f"most processor time of {CPU.total():.0f} s")
    for name, seconds in CPU.most_common(LISTED):
        terminalreporter.write_line(f"{seconds:.2f}s {name}")


def pytest_collection_finish() -> None:
    # Modules and tests stay until the end; without them, each collection of garbage takes a fraction of the time.
    gc.freeze()
    gc.enable()
    # pytest adds its handlers to each logger that does not propagate, several times per test; torch has eighty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
