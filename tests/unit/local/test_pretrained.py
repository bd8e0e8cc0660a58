"""A model as the folder that from_pretrained loads: values, files, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diloco.errors import ConfigError, StorageError
from diloco.model.tensorfile import Entry
from diloco_local.pretrained import INDEX, export_folder, plan
from diloco_syncer.storage.model import export_model, raw_tensors

TENSORS = {
    "embed.weight": np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6),
    "head.weight": np.float32([[1.00390625, 1.01171875]]),
    "steps": np.array([7], np.int64),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that is complete."""
    export_model(tmp_path / "run" / "model", TENSORS, {"job": "j", "step": 600})
    return tmp_path / "run"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """As the libraries load it: one file, or all that the index names."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    found = json.loads((folder / INDEX).read_text())
    tensors = {}
    for name, file in found["weight_map"].items():
        tensors[name] = load_file(folder / file)[name]
    assert found["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def test_all_tensors_are_there_and_integers_keep_their_type(run: Path, tmp_path: Path):
    stated = export_folder(run, tmp_path / "to", dtype="bfloat16")
    tensors = loaded(tmp_path / "to")
    for name, values in TENSORS.items():
        expected = torch.from_numpy(values)
        expected = expected.bfloat16() if expected.is_floating_point() else expected
        assert torch.equal(tensors[name], expected)
        assert tensors[name].dtype == expected.dtype
    assert stated == json.loads((tmp_path / "to/model.json").read_text())
    assert (stated["step"], list(stated["files"])) == (600, ["model.safetensors"])


def test_a_model_larger_than_one_file_has_an_index(run: Path, tmp_path: Path):
    export_folder(run, tmp_path / "to", shard_bytes=100)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.json", INDEX,
    ]  # fmt: skip
    tensors = loaded(tmp_path / "to")
    assert {name: tensor.numpy().tolist() for name, tensor in tensors.items()} == {
        name: values.tolist() for name, values in TENSORS.items()
    }


def test_b02_no_link_that_is_planted_in_the_folder_is_written_through(run: Path, tmp_path: Path):
    base, to, victim = tmp_path / "base", tmp_path / "to", tmp_path / "victim"
    base.mkdir()
    (base / "config.json").write_text("{}")
    to.mkdir()
    victim.write_text("precious")
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    names += [INDEX, "model.json", "config.json"]
    for name in names:
        (to / f"{name}.tmp").symlink_to(victim)
    export_folder(run, to, shard_bytes=100, files_from=base)
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in to.iterdir()) == sorted(names)
    assert not any(path.is_symlink() for path in to.iterdir())


def test_a_tensor_larger_than_a_file_has_one_of_its_own():
    entries = [Entry(name=str(n), dtype="int8", shape=(n,)) for n in (2, 9, 2, 2)]
    assert [[e.name for e in shard.entries] for shard in plan(entries, 4)] == [
        ["2"],
        ["9"],
        ["2", "2"],
    ]


def test_the_files_beside_the_weights_of_the_base_model_are_copied(run: Path, tmp_path: Path):
    base, blobs = tmp_path / "base", tmp_path / "blobs"
    base.mkdir()
    blobs.mkdir()
    (blobs / "c0ffee").write_text('{"model_type": "gpt2"}')
    (base / "config.json").symlink_to(blobs / "c0ffee")  # as caches of downloads have it
    (base / "tokenizer.json").write_text("{}")
    for weights in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (base / weights).write_text("old")
    export_folder(run, tmp_path / "to", files_from=base)
    names = sorted(path.name for path in (tmp_path / "to").iterdir())
    assert names == ["config.json", "model.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "to/config.json").read_text() == '{"model_type": "gpt2"}'
    assert not (tmp_path / "to/config.json").is_symlink()


def test_a_model_without_its_frozen_tensors_is_refused_with_what_to_do(tmp_path: Path):
    tensor = {"dtype": "float32", "shape": [2]}
    frozen = [{"name": f"base.{n}.weight", **tensor} for n in range(10)]
    export_model(tmp_path / "run" / "model", TENSORS, {"job": "j", "step": 6, "frozen": frozen})
    with pytest.raises(ConfigError) as caught:
        export_folder(tmp_path / "run", tmp_path / "to")
    message = str(caught.value)
    assert "base.0.weight, base.1.weight" in message
    assert "and 2 more" in message
    assert "sync.frozen: Ship" in message
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("frozen", [[1], 5, {"a": 1}, [{}], "w", [None]], ids=str)
def test_a_model_json_that_no_run_wrote_is_refused(run: Path, tmp_path: Path, frozen: object):
    facts = run / "model" / "model.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"frozen": frozen}))
    with pytest.raises(StorageError, match=r"model\.json: frozen is not a list of tensors"):
        export_folder(run, tmp_path / "to", dtype="bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 9000, "nested too deeply"),
        ("[]", "has no sha256"),
        ('{"sha256": "' + "x" * (64 << 20) + '"}', "has more than 67108864 bytes, the maximum"),
    ],
    ids=["nested", "a list", "too long"],
)
def test_a_model_json_that_cannot_be_used_is_refused(
    run: Path, tmp_path: Path, text: str, message: str
):
    (run / "model" / "model.json").write_text(text)
    with pytest.raises(StorageError, match=rf"model\.json: {message}"):
        export_folder(run, tmp_path / "to", dtype="bfloat16")


def test_a_folder_with_weights_is_refused(run: Path, tmp_path: Path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to/pytorch_model.bin").touch()
    with pytest.raises(
        ConfigError, match=r"already holds pytorch_model.bin; give an empty"
    ) as caught:
        export_folder(run, tmp_path / "to")
    assert "delete this one if an earlier export did not end" in str(caught.value)


def test_a_folder_without_files_to_copy_is_refused(run: Path, tmp_path: Path):
    (tmp_path / "base").mkdir()
    for folder, text in [
        ("base", "0 files of 0 MB besides weights"),
        ("typo", "no such directory"),
    ]:
        with pytest.raises(ConfigError, match=text):
            export_folder(run, tmp_path / "to", files_from=tmp_path / folder)


def test_a_value_that_does_not_fit_is_named_and_nothing_is_left(tmp_path: Path):
    export_model(tmp_path / "run/model", {"a": np.float32([1.0]), "b": np.float32([1e6])}, {})
    with pytest.raises(
        ConfigError, match=r"^b: 1e\+06 is too large for float16; export it with another"
    ):
        export_folder(tmp_path / "run", tmp_path / "to", dtype="float16")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_damaged_model_is_not_exported(run: Path, tmp_path: Path):
    path = run / "model/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"SHA-256 is \w+, expected \w+; nothing was exported"):
        export_folder(run, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_tensor_of_many_chunks_is_converted_whole(tmp_path: Path):
    values = np.random.default_rng(1).standard_normal((3, 1 << 20), np.float32)
    export_model(tmp_path / "run/model", {"w": values}, {})
    export_folder(tmp_path / "run", tmp_path / "to", dtype="bfloat16")
    assert torch.equal(loaded(tmp_path / "to")["w"], torch.from_numpy(values).bfloat16())


def test_bfloat16_constants_are_read_as_such(tmp_path: Path):
    from safetensors.torch import save

    blob = save({"c": torch.linspace(0, 1, 5).bfloat16()})
    export_model(tmp_path / "run/model", raw_tensors(blob), {})
    export_folder(tmp_path / "run", tmp_path / "to", dtype="float32")
    assert torch.equal(loaded(tmp_path / "to")["c"], torch.linspace(0, 1, 5).bfloat16().float())
