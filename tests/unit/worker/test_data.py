"""Text, its split, and the windows of each batch."""

import numpy as np
import pytest

from diloco.errors import ConfigError
from diloco_worker.recipes import data

SENTENCE = b"the quick brown fox jumps over the lazy dog, from file %d. "


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    for number in range(200):
        path = root / f"part{number % 7}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((SENTENCE % number) * 3)
    return root


def files_of(text):
    return set(bytes(text).split(data.SEPARATOR))


def test_a_folder_is_split_by_file_into_disjoint_parts(folder):
    corpus = data.load(str(folder), context=16, validation_fraction=0.1)
    train, validation = files_of(corpus.train), files_of(corpus.validation)
    assert not train & validation
    assert train | validation == {(SENTENCE % n) * 3 for n in range(200)}
    assert 8 <= len(validation) <= 36


def test_a_new_file_moves_no_file_to_the_other_part(folder):
    before = data.load(str(folder), context=16)
    (folder / "new.txt").write_bytes(b"something else entirely")
    after = data.load(str(folder), context=16)
    assert files_of(before.train) <= files_of(after.train)
    assert files_of(before.validation) <= files_of(after.validation)


def test_the_split_does_not_depend_on_the_location_of_the_folder(folder, tmp_path):
    before = data.load(str(folder), context=16)
    folder.rename(tmp_path / "elsewhere")
    after = data.load(str(tmp_path / "elsewhere"), context=16)
    assert np.array_equal(before.validation, after.validation)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_both_parts_of_a_few_files_have_text(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_bytes((SENTENCE % number) * 3)
    corpus = data.load(str(tmp_path), context=16, validation_fraction=1e-6)
    assert len(files_of(corpus.train)) == count - 1
    assert len(files_of(corpus.validation)) == 1
    most = data.load(str(tmp_path), context=16, validation_fraction=1 - 1e-6)
    assert len(files_of(most.train)) == 1


@pytest.mark.parametrize("in_a_folder", [True, False])
def test_the_tail_of_a_single_file_is_the_validation_text(tmp_path, in_a_folder):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    corpus = data.load(str(tmp_path if in_a_folder else path), context=16, validation_fraction=0.1)
    assert bytes(corpus.train) + bytes(corpus.validation) == path.read_bytes()
    assert corpus.validation.size == 100


def test_hidden_and_binary_files_are_not_text(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"HIDDEN" * 10)
    (folder / ".secret").write_bytes(b"HIDDEN" * 10)
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe BINARY")
    (folder / "zeros.bin").write_bytes(b"BINARY\0\0")
    corpus = data.load(str(folder), context=16)
    everything = bytes(corpus.train) + bytes(corpus.validation)
    assert b"HIDDEN" not in everything
    assert b"BINARY" not in everything


@pytest.mark.slow
def test_the_standard_library_is_python_source_only():
    corpus = data.load("stdlib", context=128)
    assert corpus.train.size > 2_000_000
    assert 0.01 < corpus.validation.size / corpus.train.size < 0.1
    assert b"def " in bytes(corpus.train[:100_000])
    bytes(corpus.validation[: corpus.validation.size // 2]).decode(errors="strict")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no file or folder"),
        ({}, "holds no text"),
        ({"a.txt": b""}, "holds no text"),
        ({"a.bin": b"\xff\xfe\0"}, "holds no text"),
        ({"a.txt": b"short", "b.txt": b"x" * 500}, "a context of 64 needs at least 65"),
    ],
)
def test_a_folder_without_enough_text_is_refused_with_a_message(tmp_path, files, message):
    root = tmp_path / "texts"
    if files is not None:
        root.mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data.load(str(root), context=64)


def test_an_empty_file_is_refused_with_a_message(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty; give a file with text"):
        data.load(str(tmp_path / "empty"), context=64)


TEXT = np.frombuffer(bytes(range(256)) * 40, np.uint8)


def draw(**changed):
    given = {"seed": 7, "learner": "eu/0", "step": 3, "batch": 8, "context": 32} | changed
    return data.batch(TEXT, **given)


def test_a_batch_is_reproducible():
    assert np.array_equal(draw(), draw())


@pytest.mark.parametrize("changed", [{"seed": 8}, {"learner": "eu/1"}, {"step": 4}])
def test_seed_learner_and_step_each_change_the_batch(changed):
    assert not np.array_equal(draw(), draw(**changed))


def test_a_batch_is_the_same_on_every_machine():
    assert draw(batch=3, context=1).tolist() == [[217, 218], [78, 79], [254, 255]]


def test_windows_are_contiguous_and_reach_both_ends_of_the_text():
    text = np.arange(40, dtype=np.uint8)
    windows = data.batch(text, seed=1, learner="a/0", step=0, batch=2000, context=32)
    assert windows.shape == (2000, 33)
    assert (np.diff(windows, axis=1) == 1).all()
    assert (windows.min(), windows.max()) == (0, 39)


@pytest.mark.parametrize(("size", "tokens", "count"), [(40, 1, 1), (40, 10_000, 1), (330, 96, 3)])
def test_validation_windows_are_spread_over_the_text(size, tokens, count):
    text = (np.arange(size) % 251).astype(np.uint8)
    windows = data.validation_windows(text, tokens=tokens, context=32)
    assert windows.shape == (count, 33)
    assert np.array_equal(windows[0], text[:33])
    if count > 1:
        assert np.array_equal(windows[-1], text[-33:])
