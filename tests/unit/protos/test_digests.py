"""Digests of a fragment name the tensor that differs."""

import numpy as np

from diloco.model import digests
from diloco.model.fragments import Tensor, cut


def fragment(tensors):
    named = [Tensor(name=f"t{n:03}", shape=(3, 5), dtype="float32") for n in range(tensors)]
    return cut(named, num_fragments=1).fragments[0]


def test_each_tensor_has_a_digest_of_its_own():
    made = fragment(3)
    values_N = np.arange(made.elements, dtype=np.float32)
    before = digests.digests(made, values_N)
    assert len(before) == 3 * digests.DIGEST_BYTES
    assert digests.names(made) == ["t000", "t001", "t002"]
    values_N[made.slots[1].offset + 14] = np.nextafter(values_N[made.slots[1].offset + 14], 99)
    after = digests.digests(made, values_N)
    width = digests.DIGEST_BYTES
    same = [before[n * width :][:width] == after[n * width :][:width] for n in range(3)]
    assert same == [True, False, True]


def test_a_second_vector_counts_as_well():
    made = fragment(2)
    ones_N = np.ones(made.elements, np.float32)
    other_N = ones_N.copy()
    other_N[made.slots[1].offset] = 2
    assert digests.digests(made, ones_N, ones_N) != digests.digests(made, ones_N, other_N)
    assert digests.digests(made, ones_N, ones_N) != digests.digests(made, ones_N)


def test_many_tensors_share_a_bounded_number_of_digests_and_each_value_counts():
    made = fragment(1000)
    values_N = np.zeros(made.elements, np.float32)
    before = digests.digests(made, values_N)
    names = digests.names(made)
    assert len(before) == digests.MAX_BYTES == len(names) * digests.DIGEST_BYTES
    assert (names[0], names[-1]) == ("t000 … t014", "t984 … t999")
    for slot in made.slots[::37]:
        values_N[slot.offset] = 1
        changed = digests.digests(made, values_N)
        values_N[slot.offset] = 0
        width = digests.DIGEST_BYTES
        pairs = enumerate(zip(before[::width], changed[::width], strict=True))
        differ = [
            n for n, _ in pairs if before[n * width :][:width] != changed[n * width :][:width]
        ]
        [number] = differ
        first, _, last = names[number].partition(" … ")
        assert first <= slot.tensor.name <= last


def test_a_fragment_without_tensors_has_none():
    empty = cut([Tensor(name="a", shape=(1,), dtype="float32")], num_fragments=1).fragments[0]
    bare = type(empty)(index=0, slots=())
    assert digests.digests(bare, np.zeros(0, np.float32)) == b""
    assert digests.names(bare) == []
