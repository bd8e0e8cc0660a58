"""
Scripts of the syncer's decisions that people can read (docs/testing.md, "Golden scripts").

`DILOCO_UPDATE_GOLDEN=1 pytest tests/unit/syncer/test_golden_scripts.py` rewrites them; review the diff.
"""

from pathlib import Path

import pytest

from diloco_testing.scripts.golden import check, played
from diloco_testing.scripts.syncer import SyncerScript

SCRIPTS = sorted((Path(__file__).parents[2] / "golden/scripts/syncer").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_syncer_decides_as_the_script_shows(script):
    check(script, SyncerScript())


def test_a_script_shows_what_its_commands_answer_now():
    script = "# why\njob\n----\nok\n\njob fragments=1 overlap=2\n----\nanother answer\n"
    found = played(script, SyncerScript())
    assert "# why" in found
    assert "another answer" not in found
    assert "refused: run spec: overlap: 2 is not in 1..1" in found


def test_a_script_without_an_output_for_its_last_command_is_refused():
    with pytest.raises(ValueError, match="---- is missing after: job"):
        played("job\n", SyncerScript())
