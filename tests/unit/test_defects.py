"""
Every defect that was once reported with a program that shows it has a test or a golden script with its number.

A name begins with the numbers of the defects: `test_06_snapshots_that_...`, `01_a08_a18_a_mute_member....txt`.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

DEFECTS = {
    "01": "one member that never answers stalls every round",
    "02": "one member that trickles freezes the job",
    "03": "a snapshot names one step and holds another",
    "04": "a report is merged into two fragments, K = 2",
    "04b": "a report is merged into two fragments, K = 1",
    "05": "an initialiser that hangs keeps the job from beginning",
    "06": "with unreadable snapshots a new job begins over the old one",
    "07": "a learner that was cut off outweighs all others, and brings back what they merged",
    "08": "one missed result costs a whole fragment in fp32",
    "09": "a learner that joins during a merge never receives its result",
    "10": "a syncer that stood still drops all learners",
    "13": "a disk that hangs stops decisions and training",
    "14": "all learners lose the result of a slow round",
    "15": "a full disk at the end completes the job without a model",
    "16": "a stopped trainer fills the memory of its link",
    "17": "loading a checkpoint takes several times its size",
    "18": "a replay is not bitwise equal on another CPU",
    "19": "two rounds of one fragment are in flight",
    "20": "a far learner is never merged",
    "21": "a runner that is late at the end never completes the job",
    "24": "with a quorum of all, one NaN stops the job without a reason",
    "26": "the progress of one member excuses all others",
    "27": "events.jsonl grows without a bound",
    "28": "a model of DTensors dies in an error of torch",
    "29": "an exception in a decision freezes the job",
    "a01": "a member that states 2^63 tokens owns the merge",
    "a02": "a norm below the floor is scaled up without a bound",
    "a03": "huge finite deltas are merged",
    "a05": "impossible numbers of a Report reach status and snapshots",
    "a06": "a negative or NaN duration turns off the grace window of all",
    "a07": "members that do not exist fill the quorum, and claimed steps set the pace",
    "a08": "a mute, dripping or NaN member stops the others",
    "a09": "streams without a message use up all threads",
    "a10": "memory and log lines for an untrusted peer: gzip, constants, shapes, names, a petabyte",
    "a11": "idle connections use up all descriptors",
    "a12": "identity: another job's certificate, unissued incarnations, unknown indexes",
    "a13": "a syncer's answer uses up the memory of the operator",
    "a16": "members are never forgotten",
    "a18": "a mute member leaves no trace",
    "b01": "who may create jobs may run any pod",
    "b02": "open modes, and links that are written through",
    "b03": "control characters reach log and terminal",
    "b05": "an evaluation with a huge number ends the report",
    "b06": "the endpoint of a job scans addresses for its author",
    "b07": "silent syncers of one tenant delay the jobs of another",
}
"""Number → what the program showed."""

OPEN: dict[str, str] = {}
"""Not fixed, or fixed without a test: what is missing."""

NUMBER = re.compile(r"(?:\d\d|[ab]\d\d)b?(?=_)")


def numbers(name: str) -> set[str]:
    """The numbers at the beginning of a name."""
    found = set()
    while match := NUMBER.match(name):
        found.add(match[0])
        name = name[match.end() + 1 :]
    return found


def covered() -> set[str]:
    """Numbers of all tests and golden scripts."""
    names = [path.stem for path in (TESTS / "golden/scripts").rglob("*.txt")]
    for path in TESTS.rglob("test_*.py"):
        names += re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
    return set().union(*map(numbers, names))


@pytest.mark.parametrize("number", sorted(DEFECTS.keys() - OPEN.keys()))
def test_a_reported_defect_has_a_test_with_its_number(number):
    assert number in covered()


def test_what_is_open_has_no_test_yet():
    assert not covered() & OPEN.keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("06_snapshots_that_all_are_damaged", {"06"}),
        ("04b_a_report", {"04b"}),
        ("01_a08_a18_a_mute_member", {"01", "a08", "a18"}),
        ("a_member", set()),
        ("b02_a_link", {"b02"}),
    ],
)
def test_numbers_are_at_the_beginning_of_a_name(name, expected):
    assert numbers(name) == expected
