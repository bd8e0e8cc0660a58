"""JSON of programs and peers: one error, whatever it holds."""

import json

import pytest

from diloco.runtime.untrusted_json import parse

NUMBERS = ["NaN", "-Infinity", "1e999", "-1e999", "1" + 400 * "0"]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000])
def test_what_is_not_json_or_nested_too_deeply_raises_value_error(text, finite):
    with pytest.raises(ValueError, match=r"."):
        parse(text, finite=finite)


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_that_no_float_holds_are_refused_where_they_are_not_expected(text):
    with pytest.raises(ValueError, match=r"expected a finite one$") as caught:
        parse(f'{{"a": [{text}]}}')
    assert len(str(caught.value)) < 60
    parse(text, finite=False)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_more_than_64_levels_are_refused(opening, closing, finite):
    most = 64 // opening.count("[") // 2 if opening.startswith("[{") else 64

    def nested(times):
        return f'[1, {opening * times}"x"{closing * times}]'

    assert parse(nested(most - 1), finite=finite)[0] == 1
    with pytest.raises(ValueError, match="nested too deeply, expected at most 64 levels"):
        parse(nested(most + 1), finite=finite)


def test_all_else_is_as_json_reads_it():
    value = {"a": [1, -2.5, 10**300, True, None, "x"], "b": {}}
    found = parse(json.dumps(value))
    assert found == value
    assert [type(item) for item in found["a"][:3]] == [int, float, int]
    assert parse(b"[1]") == [1]
