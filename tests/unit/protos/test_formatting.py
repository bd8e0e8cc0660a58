"""Text of untrusted peers reaches a terminal without control characters."""

from __future__ import annotations

import io
import json
import logging
import unicodedata

import pytest

from diloco.runtime.formatting import printable
from diloco.runtime.logs import configure_logging

EVIL = (
    "eu/0\n2026 level=error FAKE\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.\u2028\x7f\ud800"
    "<script>alert(1)</script>"
)


def dangerous(text: str) -> list[str]:
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(c) in bidi
        or c in "\u061c\u200e\u200f"
    ]


def test_every_control_character_becomes_an_escape():
    everything = "".join(map(chr, range(0x3000))) + "\ud800\udfff\ufeff"
    assert dangerous(printable(everything)) == []
    assert set(dangerous(printable(everything, lines=True))) == {"\t", "\n"}


def test_text_of_people_stays_as_it_is():
    text = "größer, 例え, עברית, a – b 🙂 tokens²/steps"
    assert printable(text) == text


def test_json_stays_valid_and_equal():
    text = json.dumps({"name": EVIL, EVIL: 1}, ensure_ascii=False, indent=2)
    assert json.loads(printable(text, lines=True)) == {"name": EVIL, EVIL: 1}


@pytest.mark.parametrize("as_json", [False, True])
def test_b03_a_log_line_stays_one_line_without_controls(as_json: bool):
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging(json=as_json, name="syncer", stream=stream)
        logging.getLogger("test").warning("refused %s", EVIL, extra={"learner": EVIL})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    text = stream.getvalue()
    assert text.endswith("\n")
    assert dangerous(text[:-1]) == []
