"""Two learners that were pulled together."""

import pytest

from diloco_syncer import coordinator
from diloco_testing.syncers.pulled import pulled_together


@pytest.fixture
def pair(monkeypatch):
    """The window is four chunks."""
    monkeypatch.setattr(coordinator, "MERGE_WINDOW_BYTES", 1)
    return pulled_together(2)
