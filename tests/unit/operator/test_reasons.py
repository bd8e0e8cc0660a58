"""The table of conditions and reasons."""

import re
import string

import pytest

from diloco import tls
from diloco_operator.reasons import (
    CONDITIONS,
    MESSAGE_MOST,
    REASONS,
    clip,
    event_type,
    is_known,
    say,
)


def values_of(template: str) -> dict[str, str]:
    return {name: "x" for _, name, _, _ in string.Formatter().parse(template) if name}


def test_no_condition_has_a_reason_twice():
    pairs = [(one.condition, one.reason) for one in REASONS]
    assert len(set(pairs)) == len(pairs)


def test_every_condition_can_be_said_from_the_first_visit_on():
    for condition in CONDITIONS:
        assert {"True", "False"} <= {one.status for one in REASONS if one.condition == condition}


def test_reasons_are_what_the_api_server_takes():
    for one in REASONS:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", one.reason)
        assert one.condition in CONDITIONS


@pytest.mark.parametrize("one", REASONS, ids=lambda one: f"{one.condition}-{one.reason}")
def test_a_reason_is_said_with_its_status_and_its_words(one):
    said = say(one.condition, one.reason, **values_of(one.message))
    assert (said.status, said.reason) == (one.status, one.reason)
    assert said.message == one.message.format(**values_of(one.message))
    assert event_type(one.condition, one.reason) == one.event


def test_every_reason_of_a_refused_connection_is_one_of_the_syncers_reachability():
    for reason, _, _ in tls._REASONS:
        assert is_known("SyncerReachable", reason), reason


def test_what_is_wrong_has_an_event_and_says_what_to_do():
    for one in REASONS:
        if one.event == "Warning":
            assert one.status in ("False", "True")
            assert one.advice or one.reason in ("NotReady",), one


def test_a_message_ends_where_an_event_ends():
    assert len(clip("x" * 5000)) == MESSAGE_MOST
    assert clip("short") == "short"


def test_braces_in_a_value_are_text():
    assert "{0}" in say("Accepted", "InvalidSpec", problems="spec.x: {0}").message
