import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.model import integers
from diloco.model.fragments import BLOCK, CHUNK, Layout, Tensor, cut, differences, due
from diloco.rpc import tensor_info


def tensor(name: str, *shape: int, dtype: str = "float32", embedding: bool = False) -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype, embedding=embedding)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=40))
    tensors = [tensor(f"t{i}", size) for i, size in enumerate(sizes)]
    return tensors, draw(st.integers(1, len(tensors)))


@given(models())
def test_every_tensor_lies_in_exactly_one_slot_on_a_block_edge_without_overlap(model):
    tensors, parts = model
    layout = cut(tensors, num_fragments=parts)
    assert [f.index for f in layout.fragments] == list(range(parts))
    placed = [slot.tensor.name for f in layout.fragments for slot in f.slots]
    assert sorted(placed) == sorted(t.name for t in tensors)
    for fragment in layout.fragments:
        edge = 0
        for slot in fragment.slots:
            assert slot.offset == edge
            assert slot.offset % BLOCK == 0
            assert slot.end - slot.offset >= slot.tensor.elements
            edge = slot.end
        assert fragment.elements == edge


@given(models(), st.randoms())
def test_the_order_in_which_tensors_are_listed_changes_nothing(model, rng):
    tensors, parts = model
    shuffled = tensors[:]
    rng.shuffle(shuffled)
    first, second = cut(tensors, num_fragments=parts), cut(shuffled, num_fragments=parts)
    assert first == second
    assert first.digest == second.digest


@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.integers(1, 3))
def test_no_fragment_is_more_than_four_thirds_of_the_best_possible(blocks, parts):
    tensors = [tensor(f"t{i}", n * BLOCK) for i, n in enumerate(blocks)]
    largest = max(f.elements for f in cut(tensors, num_fragments=parts).fragments)
    best = min(
        max(sum(n for n, p in zip(blocks, deal, strict=True) if p == part) for part in range(parts))
        for deal in itertools.product(range(parts), repeat=len(blocks))
    )
    assert 3 * largest <= 4 * best * BLOCK


def test_equal_tensors_are_dealt_evenly():
    layout = cut([tensor(f"t{i}", BLOCK) for i in range(12)], num_fragments=4)
    assert [f.elements for f in layout.fragments] == [3 * BLOCK] * 4


def test_chunks_cover_a_fragment_once_and_only_the_last_is_short():
    (fragment,) = cut([tensor("t", 2 * CHUNK + 1)], num_fragments=1).fragments
    assert fragment.chunks == 3
    assert [fragment.chunk(i) for i in range(3)] == [
        (0, CHUNK),
        (CHUNK, 2 * CHUNK),
        (2 * CHUNK, 2 * CHUNK + BLOCK),
    ]


def test_embeddings_and_named_patterns_are_averaged():
    tensors = [tensor("wte", 8, embedding=True), tensor("a.bias", 8), tensor("a.weight", 8)]
    (fragment,) = cut(tensors, num_fragments=1, average=["*.bias"]).fragments
    assert {s.tensor.name: s.average for s in fragment.slots} == {
        "wte": True,
        "a.bias": True,
        "a.weight": False,
    }


def test_a_scalar_fills_one_block():
    (fragment,) = cut([tensor("temperature")], num_fragments=1).fragments
    assert fragment.elements == BLOCK


def test_more_fragments_than_tensors_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"spec\.sync\.fragments: 3 is more than the 2 trained"):
        cut([tensor("a", 1), tensor("b", 1)], num_fragments=3)


def test_buffers_are_the_last_fragment_and_the_others_are_those_of_one_fragment_less():
    parameters = [tensor(f"t{i}", 100 * i) for i in range(1, 6)]
    buffers = [
        Tensor(name="a.mean", shape=(300,), dtype="float32", buffer=True),
        Tensor(name="z.count", shape=(2, 20), dtype="int32", buffer=True),
    ]
    layout = cut([*parameters, *buffers], num_fragments=4)
    *trained, last = layout.fragments
    assert tuple(trained) == cut(parameters, num_fragments=3).fragments
    assert [s.tensor.name for s in last.slots] == ["a.mean", "z.count"]
    assert last.elements == 3 * BLOCK + 2 * BLOCK  # an integer takes four values
    assert [f.buffers for f in layout.fragments] == [False, False, False, True]
    assert all(slot.average for slot in last.slots)
    assert layout.elements == sum(t.elements for t in parameters)


def test_a_job_of_too_few_or_too_many_fragments_for_its_buffers_is_refused_with_the_number():
    model = [tensor("a", 1), Tensor(name="b", shape=(2,), dtype="float32", buffer=True)]
    assert [f.buffers for f in cut(model, num_fragments=2).fragments] == [False, True]
    with pytest.raises(
        ConfigError, match=r"1 leaves none for the parameters .* set it to 2 or more"
    ):
        cut(model, num_fragments=1)
    with pytest.raises(
        ConfigError, match=r"1 trained .* and one fragment of buffers; set it to 2 or"
    ):
        cut(model, num_fragments=3)


def test_a_buffer_that_is_merged_is_another_model_than_one_that_is_not():
    moving = Tensor(name="b", shape=(2,), dtype="float32", buffer=True)
    ours = cut([tensor("a", 1), tensor("b", 2)], num_fragments=1)
    theirs = cut([tensor("a", 1), moving], num_fragments=2)
    assert ours.digest != theirs.digest
    assert differences(ours, theirs) == ["parameter b is a buffer in only one of the two models"]
    kept = cut([tensor("a", 1)], num_fragments=1, constants=[tensor("b", 2)])
    assert differences(kept, theirs) == [
        "buffer b is not part of the job's model",
        "constant b is missing",
    ]


def test_the_values_of_a_slot_have_the_shape_and_type_of_its_tensor():
    count = Tensor(name="count", shape=(2, 1), dtype="int16", buffer=True)
    mean = Tensor(name="mean", shape=(3,), dtype="float32", buffer=True)
    fragment = cut([tensor("a", 1), count, mean], num_fragments=2).fragments[1]
    flat_N = np.zeros(fragment.elements, np.float32)
    flat_N[: 2 * integers.DIGITS] = integers.to_digits(np.array([-7, 300]))
    flat_N[BLOCK : BLOCK + 3] = (1, 2, 3)
    of_count, of_mean = (slot.values(flat_N) for slot in fragment.slots)
    assert of_count.dtype == np.int16
    np.testing.assert_array_equal(of_count, [[-7], [300]])
    np.testing.assert_array_equal(of_mean, [1, 2, 3])
    assert of_mean.base is not None  # not a copy


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ConfigError, match="duplicate tensor names: a;"):
        cut([tensor("a", 1), tensor("a", 2), tensor("b", 1)], num_fragments=1)


@pytest.mark.parametrize("kind", ["constants", "frozen"])
def test_a_name_that_a_file_of_the_model_cannot_have_is_refused(kind):
    reserved = Tensor(name="__metadata__", shape=(1,), dtype="float32")
    tied = Tensor(name="b", shape=(1,), dtype="float32", aliases=("__metadata__",))
    for names in ({"tensors": [reserved]}, {kind: [reserved]}, {kind: [tied]}):
        model = {"tensors": [tensor("a", 1)], **names}
        with pytest.raises(ConfigError, match="the name __metadata__, which safetensors reserves"):
            cut(model.pop("tensors"), num_fragments=1, **model)


@pytest.mark.parametrize(
    "other",
    [
        Tensor(name="a", shape=(4, 2), dtype="float32"),
        Tensor(name="a", shape=(2, 4), dtype="bfloat16"),
        Tensor(name="a", shape=(2, 4), dtype="float32", embedding=True),
        Tensor(name="a", shape=(2, 4), dtype="float32", aliases=("b",)),
        Tensor(name="c", shape=(2, 4), dtype="float32"),
    ],
)
def test_the_digest_and_the_differences_see_every_fact_of_a_tensor(other):
    ours = cut([Tensor(name="a", shape=(2, 4), dtype="float32")], num_fragments=1)
    theirs = cut([other], num_fragments=1)
    assert ours.digest != theirs.digest
    assert differences(ours, theirs)
    assert differences(ours, ours) == []


def test_json_and_message_of_a_tensor_give_it_back_and_the_digest_stays():
    embed = Tensor(
        name="embed.weight",
        shape=(10, 4),
        dtype="float32",
        embedding=True,
        aliases=("head.weight",),
    )
    scale = Tensor(name="scale", shape=(), dtype="bfloat16")
    count = Tensor(name="count", shape=(), dtype="int64", buffer=True)
    for info in (embed, scale, count):
        assert Tensor.from_json(json.loads(json.dumps(info.to_json()))) == info
        assert tensor_info.from_proto(tensor_info.to_proto(info)) == info
    layout = cut([embed, scale], num_fragments=2, constants=[tensor("mask", 3, dtype="bool")])
    # Snapshots of running jobs hold this digest.
    assert layout.digest == "89cba7da217506e94298bde2b7b0bfb4584f97b394d5a37d708083c7a2db6fbe"


def test_the_digest_covers_constants_the_cut_and_averaged_tensors():
    tensors = [tensor("a", 8), tensor("b", 8)]
    digests = {
        cut(tensors, num_fragments=1).digest,
        cut(tensors, num_fragments=2).digest,
        cut(tensors, num_fragments=1, average=["a"]).digest,
        cut(tensors, num_fragments=1, constants=[tensor("mask", 2)]).digest,
    }
    assert len(digests) == 4


def test_differences_are_sentences_about_both_sides():
    ours = cut([tensor("a", 2), tensor("b", 3)], num_fragments=1, constants=[tensor("mask", 2)])
    theirs = cut([tensor("b", 4, dtype="bfloat16"), tensor("c", 1)], num_fragments=1)
    assert differences(ours, theirs) == [
        "parameter a is missing",
        "parameter c is not part of the job's model",
        "parameter b has shape [4] instead of [3]",
        "parameter b has dtype bfloat16 instead of float32",
        "constant mask is missing",
    ]
    assert differences(ours, theirs, most=1) == ["parameter a is missing", "and 4 more"]


def test_the_digest_of_a_known_model_is_what_it_was_in_the_first_release():
    tensors = [tensor("wte", 256, 64, embedding=True), tensor("h.w", 64, 64), tensor("h.b", 64)]
    assert cut(tensors, num_fragments=2).digest[:16] == "fde4d0f90a9bc23f"


@given(st.integers(1, 60).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 200))))
def test_in_one_interval_every_fragment_is_due_once_at_its_offset(shape):
    parts, interval = shape
    steps = range(3 * interval, 4 * interval)
    found = [due(step, num_fragments=parts, interval=interval) for step in steps]
    assert [p for p in found if p is not None] == list(range(parts))
    assert [found.index(p) for p in range(parts)] == [p * interval // parts for p in range(parts)]


@given(st.integers(1, 60).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 200))))
def test_offsets_are_spread_evenly(shape):
    parts, interval = shape
    steps = range(interval)
    places = [s for s in steps if due(s, num_fragments=parts, interval=interval) is not None]
    gaps = {b - a for a, b in zip(places, (*places[1:], interval), strict=True)}
    assert gaps <= {math.floor(interval / parts), math.ceil(interval / parts)}


def test_an_empty_layout_has_no_elements():
    assert Layout(fragments=(), tensors=()).elements == 0
