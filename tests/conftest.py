"""Profiles of hypothesis: `fast` is what `make check` has time for, `full` is what every other run uses."""

import gc
import os

from hypothesis import settings

standard = settings.get_profile("ci" if os.environ.get("CI") else "default")
settings.register_profile("full", standard, deadline=None)
settings.register_profile("fast", standard, deadline=None, max_examples=10)
settings.load_profile("full")


def pytest_collection_finish() -> None:
    # Modules and tests stay until the end; without them, each collection of garbage takes a fraction of the time.
    gc.freeze()
