"""
Scripts of a learner's decisions that people can read (docs/testing.md, "Golden scripts").

`DILOCO_UPDATE_GOLDEN=1 pytest tests/unit/worker/test_golden_scripts.py` rewrites them; review the diff.
"""

from pathlib import Path

import pytest

from diloco_testing.scripts.golden import check
from diloco_testing.scripts.learner import LearnerScript

SCRIPTS = sorted((Path(__file__).parents[2] / "golden/scripts/learner").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_learner_decides_as_the_script_shows(script):
    check(script, LearnerScript())
