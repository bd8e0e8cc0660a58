"""One rule decides which exits are crashes, wherever they are seen."""

import signal

import pytest

from diloco.runtime.exits import is_crash, of_container
from diloco_agent import policy, restarts, unit
from diloco_local import policy as local_policy
from diloco_operator.state import pods

FAULTS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL,
}  # fmt: skip


@pytest.mark.parametrize("number", signal.Signals)
def test_a_signal_is_a_crash_only_if_the_program_itself_causes_it(number):
    assert is_crash(-number) == (number in FAULTS)
    assert is_crash(of_container(128 + number)) == (number in FAULTS)


def test_each_error_of_a_program_is_a_crash_and_success_is_not():
    assert [code for code in range(128) if not is_crash(code)] == [0]
    assert [code for code in range(128) if of_container(code) != code] == []


def test_a_container_without_an_exit_code_of_its_own_did_not_crash():
    """128: the runtime could not start it. 255: its node restarted and the state is unknown."""
    assert not any(is_crash(of_container(code)) for code in (128, *range(193, 256)))


@pytest.mark.parametrize("module", [policy, restarts, pods])
def test_agent_and_operator_use_the_same_rule(module):
    assert module.is_crash is is_crash


@pytest.mark.parametrize("module", [policy, unit, local_policy])
def test_agent_and_local_runtime_count_the_same_exits_against_the_limit(module):
    assert module.counts is restarts.counts
