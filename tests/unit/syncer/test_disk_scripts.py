"""
Scripts of what the syncer writes, that people can read (docs/testing.md, "Golden scripts").

`DILOCO_UPDATE_GOLDEN=1 pytest tests/unit/syncer/test_disk_scripts.py` rewrites them; review the diff.
"""

from pathlib import Path

import pytest

from diloco_testing.scripts.disk import DiskScript
from diloco_testing.scripts.golden import check

SCRIPTS = sorted((Path(__file__).parents[2] / "golden/scripts/disk").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_syncer_writes_what_the_script_shows(script):
    check(script, DiskScript())
