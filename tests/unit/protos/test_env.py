"""The reader of environment variables: typed, and every problem in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.runtime.env import Environment


def test_what_is_not_set_or_empty_is_the_default():
    env = Environment({"EMPTY": ""})
    for name in ("EMPTY", "MISSING"):
        assert env.text(name, "x", pattern="y", expected="y") == "x"
        assert env.names(name) == ()
        assert env.choice(name, "a", "b") == "a"
        assert env.path(name) is None
        assert env.number(name, 0.5, least=1) == 0.5
        assert env.integer(name, -1, least=0) == -1
        assert env.port(name, 80) == 80
        assert env.json_object(name) == {}
    env.check()


def test_what_is_set_has_its_type():
    env = Environment(
        {"T": "eu/0", "L": "a, b c", "C": "b", "P": "/p", "N": "2.5", "I": "-3", "J": '{"a": [1]}'}
    )
    assert env.text("T", pattern=r"\w+/\d", expected="") == env.required("T", "") == "eu/0"
    assert env.names("L") == ("a", "b", "c")
    assert env.choice("C", "a", "b") == "b"
    assert env.path("P") == Path("/p")
    assert env.number("N", 0, least=1, most=3) == 2.5
    assert env.integer("I", 0) == -3
    assert env.json_object("J") == {"a": [1]}
    env.check()


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda e: e.required("X", "the job's name"), "", "X is not set, expected the job's name"),
        (lambda e: e.text("X", pattern="a+", expected="some a"), "ab", "X: 'ab', expected some a"),
        (lambda e: e.choice("X", "a", "b"), "c", "X: 'c', expected one of a, b"),
        (lambda e: e.number("X", 1), "one", "X: 'one', expected a number"),
        (lambda e: e.number("X", 1), "nan", "X: 'nan', expected a number"),
        (lambda e: e.number("X", 1, least=1), "0", "X: '0', expected a number of at least 1"),
        (lambda e: e.integer("X", 1), "1.5", "X: '1.5', expected a whole number"),
        (lambda e: e.integer("X", 1), "²", "X: '²', expected a whole number"),
        (lambda e: e.port("X", 1), "65536", "X: '65536', expected a whole number from 0 to 65535"),
        (lambda e: e.json_object("X"), "[1]", "X: holds a list, expected a JSON object"),
        (lambda e: e.json_object("X"), "{", "expected a JSON object"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_was_expected(read, value, message):
    env = Environment({"X": value})
    read(env)
    with pytest.raises(ConfigError) as error:
        env.check()
    assert str(error.value).startswith("environment: X")
    assert str(error.value).endswith(message)


def test_all_problems_are_reported_at_once():
    env = Environment({"A": "x"})
    assert env.integer("A", 7) == 7
    assert env.required("B", "a file") == ""
    env.problem("C is wrong")
    with pytest.raises(ConfigError) as error:
        env.check()
    assert str(error.value) == (
        "environment: A: 'x', expected a whole number; B is not set, expected a file; C is wrong"
    )
