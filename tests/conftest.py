"""What holds for every test: the profiles of hypothesis, and the option --no-skips."""

import gc
import os

import pytest
from hypothesis import settings

standard = settings.get_profile("ci" if os.environ.get("CI") else "default")
# `fast` is what `make check` has time for, `full` is what every other run uses.
settings.register_profile("full", standard, deadline=None)
settings.register_profile("fast", standard, deadline=None, max_examples=10)
settings.load_profile("full")

HARDWARE = ("no GPU", "this CPU has no vector instructions")
"""Beginnings of the reasons for which a test may be skipped with --no-skips."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skip is a failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and item.config.getoption("no_skips"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(HARDWARE):
            report.outcome = "failed"
            report.longrepr = f"Every test has to run here, and this one was skipped: {reason}"
    return report


def pytest_collection_finish() -> None:
    # Modules and tests stay until the end; without them, each collection of garbage takes a fraction of the time.
    gc.freeze()
