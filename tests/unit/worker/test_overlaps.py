"""Which tensors have values in common."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.trainer import overlaps
from diloco_worker.trainer.overlaps import overlapping

MEMORY = 48
"""Values of one byte."""


@st.composite
def views(draw):
    """Of one memory, with elements of different sizes."""
    memory = torch.zeros(MEMORY, dtype=torch.uint8)
    out = []
    for _ in range(draw(st.integers(2, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32]))
        typed = memory.view(dtype)
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        stride = [draw(st.integers(1, 4)) for _ in shape]
        size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        begin = draw(st.integers(0, max(0, typed.numel() - size)))
        if begin + size <= typed.numel():
            out.append(typed.as_strided(shape, stride, begin))
    return memory, out


def bytes_of(memory, tensor):
    size, first = tensor.element_size(), tensor.data_ptr() - memory.data_ptr()
    places = itertools.product(*map(range, tensor.shape))
    offsets = (sum(i * s for i, s in zip(place, tensor.stride(), strict=True)) for place in places)
    return {first + offset * size + k for offset in offsets for k in range(size)}


@given(views())
def test_tensors_have_values_in_common_exactly_where_they_have_a_byte_in_common(drawn):
    memory, tensors = drawn
    held = [bytes_of(memory, tensor) for tensor in tensors]
    pairs = overlapping((str(i), t) for i, t in enumerate(tensors))
    expected = {
        frozenset((i, k))
        for i, k in itertools.combinations(range(len(tensors)), 2)
        if held[i] & held[k]
    }
    assert {frozenset((int(a), int(b))) for a, b in pairs} == expected
    assert len(pairs) == len(expected)


def test_an_expanded_tensor_cannot_be_merged_and_may_be_frozen():
    expanded = torch.zeros(4).expand(3, 4)
    tensors = [("rows", expanded), ("one", torch.zeros(1).expand(1, 1))]
    [text] = overlaps.problems(tensors, {"rows", "one"})
    assert text.startswith(
        "rows is expanded: some of its values are one in memory, so that neither"
    )
    assert overlaps.problems(tensors, {"one"}) == []


def test_columns_of_different_types_in_one_memory_are_different_tensors():
    memory = torch.zeros(10, 8, dtype=torch.uint8)
    whole, half = memory[:, :4].view(torch.float32), memory[:, 4:6].view(torch.bfloat16)
    assert overlapping([("a", whole), ("b", half)]) == []


@pytest.mark.parametrize("columns", [2, 64])
def test_each_column_of_a_matrix_is_looked_at_once(monkeypatch, columns):
    looked = []
    part = overlaps._part
    monkeypatch.setattr(overlaps, "_part", lambda *args: looked.append(1) or part(*args))
    matrix = torch.zeros(5, columns)
    assert overlapping((str(i), matrix[:, i]) for i in range(columns)) == []
    assert len(looked) == columns
