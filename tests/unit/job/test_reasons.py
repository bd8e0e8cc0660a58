"""The table of conditions and reasons."""

import re
import string

import pytest

from diloco.rpc import connection_reasons
from diloco_job.reasons import (
    CONDITIONS,
    MAX_MESSAGE,
    REASONS,
    clip,
    condition,
    event_type,
    has_reason,
)


def values_of(template: str) -> dict[str, str]:
    return {name: "x" for _, name, _, _ in string.Formatter().parse(template) if name}


def test_no_condition_has_a_reason_twice():
    pairs = [(entry.condition, entry.reason) for entry in REASONS]
    assert len(set(pairs)) == len(pairs)


def test_every_condition_has_a_reason_for_true_and_false():
    for kind in CONDITIONS:
        assert {"True", "False"} <= {entry.status for entry in REASONS if entry.condition == kind}


def test_reasons_have_the_form_that_the_api_server_requires():
    for entry in REASONS:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", entry.reason)
        assert entry.condition in CONDITIONS


@pytest.mark.parametrize("entry", REASONS, ids=lambda entry: f"{entry.condition}-{entry.reason}")
def test_a_condition_has_the_status_and_message_of_its_reason(entry):
    made = condition(entry.condition, entry.reason, **values_of(entry.message))
    assert (made.status, made.reason) == (entry.status, entry.reason)
    assert made.message == entry.message.format(**values_of(entry.message))
    assert event_type(entry.condition, entry.reason) == entry.event


def test_every_reason_of_a_refused_connection_is_a_reason_of_syncer_reachable():
    for reason, _, _ in connection_reasons._REASONS:
        assert has_reason("SyncerReachable", reason), reason


def test_every_warning_has_advice():
    for entry in REASONS:
        if entry.event == "Warning":
            assert entry.status in ("False", "True")
            assert entry.advice or entry.reason in ("NotReady",), entry


def test_a_message_ends_where_an_event_ends():
    assert len(clip("x" * 5000)) == MAX_MESSAGE
    assert clip("short") == "short"


def test_braces_in_a_value_are_text():
    assert "{0}" in condition("Accepted", "InvalidSpec", problems="spec.x: {0}").message
