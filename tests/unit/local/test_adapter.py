"""A LoRA adapter in the format of PEFT, and merged into its base: names, values, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco.errors import ConfigError, StorageError
from diloco_local.adapter import adapter_of, export_adapter
from diloco_syncer.storage.model import export_model

P = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "init_lora_weights": True}
RANDOM = np.random.default_rng(0)
A, B = (RANDOM.standard_normal(s, np.float32) for s in ((2, 4), (3, 2)))
TENSORS = {
    f"{P}h.q.lora_A.default.weight": A,
    f"{P}h.q.lora_B.default.weight": B,
    f"{P}head.modules_to_save.default.bias": np.float32([1, 2]),
}
BASE = {
    "h.q.weight": torch.arange(12.0).reshape(3, 4),
    "head.bias": torch.zeros(2),
    "steps": torch.tensor([7]),
}


def write(folder: Path, config: Any = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that trained an adapter."""
    export_model(tmp_path / "run/model", TENSORS, {"step": 5, "frozen": [{"name": "h.q.weight"}]})
    write(tmp_path / "adapter")
    (tmp_path / "base").mkdir()
    save_file(BASE, tmp_path / "base/model.safetensors")
    (tmp_path / "base/config.json").write_text("{}")
    return tmp_path / "run"


def test_the_adapter_has_the_names_of_peft_and_its_configuration(run, tmp_path):
    stated = export_adapter(run, tmp_path / "to", config_from=tmp_path / "adapter")
    tensors = load_file(tmp_path / "to/adapter_model.safetensors")
    assert {name: t.numpy().tolist() for name, t in tensors.items()} == {
        f"{P}h.q.lora_A.weight": A.tolist(),
        f"{P}h.q.lora_B.weight": B.tolist(),
        f"{P}head.bias": [1, 2],
    }
    assert json.loads((tmp_path / "to/adapter_config.json").read_text()) == CONFIG
    assert (stated["step"], stated["leftOut"]) == (5, [])
    assert list(stated["files"]) == ["adapter_model.safetensors"]


def test_an_adapter_of_another_element_type(run, tmp_path):
    export_adapter(run, tmp_path / "to", config_from=tmp_path / "adapter", dtype="bfloat16")
    tensors = load_file(tmp_path / "to/adapter_model.safetensors")
    assert torch.equal(tensors[f"{P}h.q.lora_A.weight"], torch.from_numpy(A).bfloat16())


def test_the_module_inside_of_a_peft_model_gets_its_prefix():
    names = adapter_of(["h.q.lora_A.mine.weight", "e.lora_embedding_A.mine"], "").names
    assert names == {
        f"{P}h.q.lora_A.weight": "h.q.lora_A.mine.weight",
        f"{P}e.lora_embedding_A": "e.lora_embedding_A.mine",
    }


def test_tensors_that_are_not_part_of_the_adapter_are_named(run, tmp_path):
    export_model(run / "model", {**TENSORS, "running_mean": A}, {"step": 5})
    stated = export_adapter(run, tmp_path / "to", config_from=tmp_path / "adapter")
    assert stated["leftOut"] == ["running_mean"]


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (["q.weight"], "no tensor of LoRA"),
        (["q.lora_A.one.weight", "q.lora_A.two.weight"], "the adapters one, two"),
    ],
)
def test_a_model_without_exactly_one_adapter_is_refused(names, seen):
    with pytest.raises(ConfigError, match=f"run: has {seen}, expected one adapter"):
        adapter_of(names, "run")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ([], "peft_type is None"),
        (None, "peft_type is None"),
    ],
)
def test_the_configuration_of_another_adapter_is_refused(run, tmp_path, config, text):
    with pytest.raises(ConfigError, match=text):
        export_adapter(run, tmp_path / "to", config_from=write(tmp_path / "other", config))


def test_a_missing_or_damaged_configuration_is_refused_with_what_to_call(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"No such file .* expected what .*save_pretrained"):
        export_adapter(run, tmp_path / "to", config_from=tmp_path / "empty")
    (tmp_path / "empty/adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"Expecting .*save_pretrained"):
        export_adapter(run, tmp_path / "to", config_from=tmp_path / "empty")


def test_a_damaged_model_gives_no_adapter(run, tmp_path):
    path = run / "model/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="nothing was exported"):
        export_adapter(run, tmp_path / "to", config_from=tmp_path / "adapter")
    assert not (tmp_path / "to").exists()


# ------------------------------------------------------------ merged


def merged(run: Path, config: Any = CONFIG, **options: Any) -> dict[str, torch.Tensor]:
    folder = run.parent
    own = write(folder / "adapter", config)
    export_adapter(run, folder / "to", config_from=own, base=folder / "base", **options)
    return load_file(folder / "to/model.safetensors")


def test_the_base_with_the_adapter_has_the_values_and_files_of_both(run):
    tensors = merged(run)
    expected = BASE["h.q.weight"].numpy() + 3 * (B @ A)
    np.testing.assert_allclose(tensors["h.q.weight"].numpy(), expected, rtol=1e-6)
    assert tensors["head.bias"].tolist() == [1, 2]
    assert tensors["steps"].tolist() == [7]
    assert {path.name for path in (run.parent / "to").iterdir()} == {
        "model.safetensors", "model.json", "config.json",
    }  # fmt: skip
    assert "frozen" not in json.loads((run.parent / "to/model.json").read_text())


def test_a_base_of_another_element_type_keeps_it_or_gets_one(run):
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in BASE.items()}
    save_file(half, run.parent / "base/model.safetensors")
    tensors = merged(run)
    expected = half["h.q.weight"].float() + 3 * torch.from_numpy(B @ A)
    assert torch.equal(tensors["h.q.weight"], expected.bfloat16())
    for path in (run.parent / "to").iterdir():
        path.unlink()
    tensors = merged(run, dtype="float32")
    assert torch.allclose(tensors["h.q.weight"], expected)


def test_a_base_in_several_files_and_a_transposed_matrix(run):
    first = {"h.q.weight": BASE["h.q.weight"].T.contiguous()}
    save_file(first, run.parent / "base/model-00001-of-00002.safetensors")
    rest = {name: t for name, t in BASE.items() if name not in first}
    save_file(rest, run.parent / "base/model-00002-of-00002.safetensors")
    (run.parent / "base/model.safetensors").unlink()
    tensors = merged(run)
    expected = first["h.q.weight"].numpy() + 3 * (B @ A).T
    np.testing.assert_allclose(tensors["h.q.weight"].numpy(), expected, rtol=1e-6)
    assert tensors.keys() == BASE.keys()


@pytest.mark.parametrize("transposed", [False, True])
def test_of_a_square_matrix_the_configuration_decides(tmp_path, transposed):
    a, b = A[:, :3], B
    names = (f"{P}q.lora_A.default.weight", f"{P}q.lora_B.default.weight")
    export_model(tmp_path / "run/model", dict(zip(names, (a, b), strict=True)), {})
    (tmp_path / "base").mkdir()
    save_file({"q.weight": torch.zeros(3, 3)}, tmp_path / "base/model.safetensors")
    (tmp_path / "base/config.json").write_text("{}")
    tensors = merged(tmp_path / "run", CONFIG | {"fan_in_fan_out": transposed})
    product = 3 * (b @ a)
    expected = product.T if transposed else product
    np.testing.assert_allclose(tensors["q.weight"].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "scale"),
    [({"use_rslora": True}, 6 / 2**0.5), ({"alpha_pattern": {"q": 4}}, 2.0), ({"alpha_pattern": {"k": 4}}, 3.0)],
)  # fmt: skip
def test_the_scale_is_that_of_the_configuration(run, change, scale):
    tensors = merged(run, CONFIG | change)
    expected = BASE["h.q.weight"].numpy() + scale * (B @ A)
    np.testing.assert_allclose(tensors["h.q.weight"].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_unheard_of": True}, "use_unheard_of=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_parameters": ["w"]}, "target_parameters="),
        ({"lora_alpha": None}, "no lora_alpha"),
    ],
)
def test_what_is_not_plain_lora_is_not_merged(run, change, named):
    with pytest.raises(ConfigError, match=f"the adapter has {named}.*merge_and_unload"):
        merged(run, CONFIG | change)
    assert not (run.parent / "to").exists()


def test_another_base_is_refused_with_what_differs(run):
    save_file({"h.q.weight": torch.zeros(9, 4)}, run.parent / "base/model.safetensors")
    with pytest.raises(ConfigError, match=r"h\.q\.weight has shape \(9, 4\), expected \(3, 4\)"):
        merged(run)
    save_file({"x": torch.zeros(1)}, run.parent / "base/model.safetensors")
    with pytest.raises(ConfigError, match=r"h\.q\.weight is missing; head\.bias is missing"):
        merged(run)
    (run.parent / "base/model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        merged(run)


def test_an_adapter_of_an_embedding_is_not_merged(run):
    export_model(run / "model", {**TENSORS, f"{P}e.lora_embedding_A.default": A}, {})
    with pytest.raises(ConfigError, match=r"e\.lora_embedding_A cannot be merged"):
        merged(run)
