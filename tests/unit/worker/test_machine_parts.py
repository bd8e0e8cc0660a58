"""What a machine of a learner holds of the memory, in parts that fit in a message."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.model import tensorfile
from diloco.model.fragments import Tensor, cut
from diloco_worker.core import machine_parts as parts
from diloco_worker.core.shard_slices import Box, whole

TENSORS = [
    Tensor(name="a", shape=(6, 10), dtype="float32"),
    Tensor(name="b", shape=(7,), dtype="bfloat16"),
    Tensor(name="c", shape=(), dtype="float32"),
    Tensor(name="count", shape=(2,), dtype="int64", buffer=True),
]
CONSTANTS = [Tensor(name="mask", shape=(3, 5), dtype="int16")]


@pytest.fixture
def layout():
    return cut(TENSORS, num_fragments=2, constants=CONSTANTS)


def test_parts_write_exactly_the_boxes_of_their_tensors(layout):
    boxes = {"a": [Box((2, 0), (3, 10))], "b": [Box((4,), (3,))], "c": [whole(())]}
    found = parts.copied(layout, boxes)
    assert len(found) == 3, "two fragments, and the constants"
    for fragment in layout.fragments:
        memory = np.zeros(fragment.elements, np.float32)
        for part in found[fragment.index]:
            part.view(memory.view(np.uint8)).view(np.float32)[...] = 1
        for slot in fragment.slots:
            wanted = np.zeros(slot.tensor.shape, np.float32)
            for box in boxes.get(slot.tensor.name, ()):
                wanted[box.slices()] = 1
            if not slot.tensor.newest:
                assert np.array_equal(slot.values(memory), wanted), slot.tensor.name
        assert memory.sum() == sum(p.size_bytes // 4 for p in found[fragment.index])


def test_parts_have_the_dtype_of_their_tensor(layout):
    """The other end rounds the fp32 values of a result to what the parameter can hold."""
    boxes = {t.name: [whole((2,) if t.newest else t.shape)] for t in [*TENSORS, *CONSTANTS]}
    found = {part.name: part.dtype for unit in parts.copied(layout, boxes) for part in unit}
    assert found == {tensor.name: tensor.dtype for tensor in [*TENSORS, *CONSTANTS]}


def test_integers_that_change_are_one_part_of_all_their_digits(layout):
    found = parts.held(layout, {"count": [whole((2,))]}, constants_bytes=0)
    (part,) = [part for unit in found for part in unit]
    assert part.size_bytes == 4 * TENSORS[3].length


def test_parts_of_constants_are_where_the_file_has_them(layout):
    entries = [tensorfile.Entry(name="mask", dtype="int16", shape=(3, 5))]
    header, (entry,), size = tensorfile.plan(entries)
    memory = np.zeros(size, np.uint8)
    (part,) = parts.copied(layout, {"mask": [Box((1, 0), (2, 5))]})[-1]
    part.view(memory)[...] = 1
    values = memory[entry.lo : entry.hi].view(np.int16).reshape(3, 5)
    assert (values[0] == 0).all()
    assert (values[1:] == 257).all()
    assert not memory[: len(header)].any()


def test_all_constants_are_sent_to_a_machine(layout):
    (part,) = parts.held(layout, {}, constants_bytes=300)[-1]
    assert part.size_bytes == 300
    assert (part.name, part.dtype) == ("", "uint8"), "of no tensor"
    memory = np.zeros(400, np.uint8)
    part.view(memory)[...] = 1
    assert memory.nonzero()[0].tolist() == [*range(300)]
    assert parts.held(layout, {}, constants_bytes=0)[-1] == []


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((9, 5), Box((2, 1), (6, 3))),
        ((3, 4, 5), whole((3, 4, 5))),
        ((1, 40), whole((1, 40))),
        ((5, 9), Box((0, 4), (5, 2))),
    ],
)
def test_large_boxes_are_split_without_gap_or_overlap(monkeypatch, shape, box):
    monkeypatch.setattr(parts, "PART_BYTES", 24)
    layout = cut([Tensor(name="w", shape=shape, dtype="float32")], num_fragments=1)
    found = parts.copied(layout, {"w": [box]})[0]
    assert len(found) > 1
    assert all(part.size_bytes <= 24 for part in found)
    memory = np.zeros(layout.fragments[0].elements, np.float32)
    for part in found:
        part.view(memory.view(np.uint8)).view(np.float32)[...] += 1
    wanted = np.zeros(shape, np.float32)
    wanted[box.slices()] = 1
    assert np.array_equal(layout.fragments[0].slots[0].values(memory), wanted)


def test_several_boxes_of_a_tensor_are_in_order_whatever_order_they_came_in(layout):
    """Both ends of a relay make the same list."""
    boxes = {
        "a": [Box((4, 0), (2, 10)), Box((0, 0), (2, 10))],
        "mask": [Box((2, 0), (1, 5)), Box((0, 0), (1, 5))],
    }
    for found in (
        parts.copied(layout, boxes),
        parts.copied(layout, {n: b[::-1] for n, b in boxes.items()}),
    ):
        listed = [(part.name, part.box.lo[0]) for unit in found for part in unit]
        assert listed == [("a", 0), ("a", 4), ("mask", 0), ("mask", 2)]


def test_a_box_without_elements_is_no_part(layout):
    found = parts.copied(layout, {"mask": [Box((3, 0), (0, 5)), Box((0, 0), (3, 5))]})
    assert [part.box.shape for part in found[-1]] == [(3, 5, 2)]
