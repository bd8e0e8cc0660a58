"""Our safetensors files must be what the safetensors library reads and writes."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from diloco.errors import DamagedError
from diloco.model.tensorfile import DTYPES, Entry, parse, plan

ENTRIES = [
    Entry(name="w", dtype="float32", shape=(2, 3)),
    Entry(name="s", dtype="int64", shape=()),
    Entry(name="h", dtype="bfloat16", shape=(5,)),
    Entry(name="none", dtype="bool", shape=(0, 4)),
]


def file_of(entries: list[Entry]) -> bytes:
    header, placed, size = plan(entries)
    assert all(e.hi <= size for e in placed)
    return header + bytes(size - len(header))


def test_the_library_reads_what_we_lay_out():
    tensors = load(file_of(ENTRIES))
    assert {n: (tuple(t.shape), str(t.dtype)) for n, t in tensors.items()} == {
        e.name: (e.shape, f"torch.{e.dtype}") for e in ENTRIES
    }


def test_we_read_what_the_library_writes():
    data = save({"a": torch.arange(6, dtype=torch.int16).reshape(2, 3)}, metadata={"x": "y"})
    entry = parse(data, len(data))["a"]
    assert (entry.dtype, entry.shape) == ("int16", (2, 3))
    assert torch.frombuffer(
        bytearray(data[entry.lo : entry.hi]), dtype=torch.int16
    ).tolist() == list(range(6))


def test_every_type_has_its_size():
    file_of([Entry(name=n, dtype=n, shape=(3,)) for n in DTYPES])


@given(st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(at):
    data = file_of(ENTRIES)
    cut = data[: at % len(data)]
    with pytest.raises(DamagedError):
        parse(cut, len(cut))


@given(st.binary(max_size=64))
def test_any_header_is_read_or_refused(text):
    data = len(text).to_bytes(8, "little") + text
    with contextlib.suppress(DamagedError):
        parse(data, len(data))


def header_of(**offsets: tuple[int, int]) -> bytes:
    text = json.dumps(
        {
            name: {"dtype": "U8", "shape": [hi - lo], "data_offsets": [lo, hi]}
            for name, (lo, hi) in offsets.items()
        }
    ).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "offsets",
    [{"a": (0, 4), "b": (0, 4)}, {"a": (0, 4), "b": (6, 8)}, {"a": (0, 4)}, {"a": (0, 9)}],
    ids=["overlap", "gap", "rest", "beyond the end"],
)
def test_tensors_that_do_not_fill_the_file_exactly_are_refused(offsets):
    data = header_of(**offsets) + bytes(8)
    with pytest.raises(DamagedError, match="safetensors"):
        parse(data, len(data))


def test_the_bytes_of_a_header_are_those_of_files_already_written():
    header, _, size = plan(ENTRIES, metadata={"format": "pt"})
    assert size == len(header) + 42
    assert header == (
        b'\x08\x01\0\0\0\0\0\0{"__metadata__":{"format":"pt"},'
        b'"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"s":{"dtype":"I64","shape":[],"data_offsets":[24,32]},'
        b'"h":{"dtype":"BF16","shape":[5],"data_offsets":[32,42]},'
        b'"none":{"dtype":"BOOL","shape":[0,4],"data_offsets":[42,42]}}     '
    )


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}',
    ],
    ids=["infinite shape", "nested without end", "infinite offset"],
)
def test_a_header_that_no_number_or_stack_can_hold_is_refused(header):
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    with pytest.raises(DamagedError, match="cannot be read"):
        parse(data, len(data))
