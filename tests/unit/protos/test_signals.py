"""Signals that a program handles for a while."""

import os
import signal

import pytest

from diloco.runtime.signals import handled

NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


@pytest.fixture
def given():
    """Give the signals a disposition for this test."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield lambda kind: [signal.signal(number, kind) for number in NUMBERS]
    for number, kind in before.items():
        signal.signal(number, kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(lambda *_: None, list(NUMBERS)), (signal.SIG_IGN, list(NUMBERS[1:]))],
    ids=["handled", "ignored"],
)
def test_only_a_hang_up_that_was_ignored_stays_so_and_all_have_their_handlers_back(
    given, kind, expected
):
    given(kind)
    seen = []
    with handled(NUMBERS, seen.append):
        for number in NUMBERS:
            os.kill(os.getpid(), number)
    assert seen == expected
    assert [signal.getsignal(number) for number in NUMBERS] == [kind] * len(NUMBERS)
