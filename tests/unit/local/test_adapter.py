"""A LoRA adapter in the format of PEFT, and merged into its base: names, values, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco.errors import ConfigError, StorageError
from diloco.model import tensorfile
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
    tensors = {"q.weight": torch.zeros(3, 3), "q.bias": torch.zeros(3)}
    save_file(tensors, tmp_path / "base/model.safetensors")
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


# ------------------------------------------------------------ how square matrices are stored

LINEAR, CONV1D = ("encoder.layer.0.query", "decoder.h.0.c_proj")
"""Two square layers, of an encoder of Linear and a decoder of Conv1D layers."""


def with_squares(folder: Path, *modules: str, **more: torch.Tensor) -> Path:
    """A run with an adapter of these square layers, and its base, with a layer beside each that is not square."""
    tensors = {}
    for module in modules:
        tensors[f"{P}{module}.lora_A.default.weight"] = A[:, :3]
        tensors[f"{P}{module}.lora_B.default.weight"] = B
    export_model(folder / "run/model", tensors, {})
    (folder / "base").mkdir()
    base = {f"{module}.{kind}": torch.zeros(*shape) for module in (LINEAR, CONV1D)
            for kind, shape in (("weight", (3, 3)), ("bias", (3,)))}  # fmt: skip
    base["encoder.layer.0.dense.weight"], base["encoder.layer.0.dense.bias"] = (
        torch.zeros(6, 3),
        torch.zeros(6),
    )
    base["decoder.h.0.c_fc.weight"], base["decoder.h.0.c_fc.bias"] = (
        torch.zeros(3, 6),
        torch.zeros(6),
    )
    save_file(base | more, folder / "base/model.safetensors")
    (folder / "base/config.json").write_text("{}")
    return folder / "run"


@pytest.mark.parametrize("transposed", [False, True])
def test_square_matrices_of_linear_and_conv1d_in_one_model_are_refused(tmp_path, transposed):
    run = with_squares(tmp_path, LINEAR, CONV1D)
    wrong = LINEAR if transposed else CONV1D
    text = rf"{re.escape(wrong)}\.weight is square, and fan_in_fan_out is {transposed}.*merge_and_unload"
    with pytest.raises(ConfigError, match=text):
        merged(run, CONFIG | {"fan_in_fan_out": transposed})
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("module", "transposed"), [(LINEAR, False), (CONV1D, True)])
def test_the_nearest_layers_confirm_how_a_square_matrix_is_stored(tmp_path, module, transposed):
    tensors = merged(with_squares(tmp_path, module), CONFIG | {"fan_in_fan_out": transposed})
    product = 3 * (B @ A[:, :3])
    expected = product.T if transposed else product
    np.testing.assert_allclose(tensors[f"{module}.weight"].numpy(), expected, rtol=1e-6)


def test_a_square_matrix_without_a_bias_is_not_one_of_conv1d(tmp_path):
    run = with_squares(tmp_path, "decoder.o", **{"decoder.o.weight": torch.zeros(3, 3)})
    with pytest.raises(
        ConfigError, match=r"decoder\.o\.weight is square, and fan_in_fan_out is True"
    ):
        merged(run, CONFIG | {"fan_in_fan_out": True})


def test_matrices_of_the_adapter_show_how_square_ones_are_stored(run):
    names = (f"{P}h.k.lora_A.default.weight", f"{P}h.k.lora_B.default.weight")
    export_model(run / "model", TENSORS | dict(zip(names, (A[:, :3], B), strict=True)), {})
    base = BASE | {"h.k.weight": torch.zeros(3, 3), "h.k.bias": torch.zeros(3)}
    save_file(base, run.parent / "base/model.safetensors")
    with pytest.raises(ConfigError, match=r"h\.k\.weight is square, and fan_in_fan_out is True"):
        merged(run, CONFIG | {"fan_in_fan_out": True})
    np.testing.assert_allclose(merged(run)["h.k.weight"].numpy(), 3 * (B @ A[:, :3]), rtol=1e-6)


# ------------------------------------------------------------ incomplete, damaged and quantized bases


def split(base: Path, *names: str, index: bool = True) -> None:
    """Store the base as a file of h.q.weight and one of the others."""
    (base / "model.safetensors").unlink()
    groups = [
        {name: t for name, t in BASE.items() if (name == "h.q.weight") == first}
        for first in (True, False)
    ]
    for name, tensors in zip(names, groups, strict=True):
        save_file(tensors, base / name)
    if index:
        places = {
            tensor: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_exactly_the_files_of_the_index_are_the_base(run, tmp_path):
    split(tmp_path / "base", *PARTS)
    save_file(BASE, tmp_path / "base/consolidated.safetensors")
    assert merged(run).keys() == BASE.keys()


def test_a_base_that_lacks_a_file_of_its_index_is_refused(run, tmp_path):
    split(tmp_path / "base", *PARTS)
    (tmp_path / "base" / PARTS[1]).unlink()
    with pytest.raises(ConfigError, match=f"lacks {PARTS[1]}.*1 of 2 files are missing; download"):
        merged(run)
    assert not (tmp_path / "to").exists()


def test_a_base_that_lacks_a_tensor_of_its_index_is_refused(run, tmp_path):
    split(tmp_path / "base", *PARTS)
    save_file({"head.bias": BASE["head.bias"]}, tmp_path / "base" / PARTS[1])
    with pytest.raises(ConfigError, match="1 tensors that its files lack, such as steps"):
        merged(run)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "no weight_map"),
        ('{"weight_map": {"h.q.weight": "a.safetensors"}}', "lacks a.safetensors"),
    ],
)
def test_a_damaged_index_is_refused(run, tmp_path, index, text):
    (tmp_path / "base/model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=text):
        merged(run)


def test_an_index_beside_another_model_is_refused(run, tmp_path):
    split(tmp_path / "base", *PARTS)
    save_file(BASE, tmp_path / "base/model.safetensors")
    with pytest.raises(ConfigError, match="two models; remove one"):
        merged(run)


@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"),
        ("model-00001-of-00002.safetensors", "other-00002-of-00002.safetensors"),
        ("model.safetensors", "consolidated.safetensors"),
    ],
)
def test_without_an_index_all_parts_of_one_model_must_be_there(run, tmp_path, names):
    split(tmp_path / "base", *names, index=False)
    with pytest.raises(
        ConfigError, match=r"has 2 files of weights.* and no model\.safetensors\.index"
    ):
        merged(run)


def test_a_single_part_of_a_base_is_refused(run, tmp_path):
    (tmp_path / "base/model.safetensors").rename(tmp_path / "base" / PARTS[0])
    with pytest.raises(ConfigError, match="has 1 files of weights"):
        merged(run)


def test_a_damaged_base_is_not_blamed_on_the_run(run, tmp_path):
    path = tmp_path / "base/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError) as caught:
        merged(run)
    assert str(caught.value).startswith(f"{path}: safetensors")
    assert str(caught.value).endswith("; download the base model again")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("int8", "h.q.weight"), ("float8_e4m3fn", "h.q.weight"), ("int8", "head.bias")],
)
def test_a_quantized_base_is_refused(run, tmp_path, dtype, name):
    entries = [
        tensorfile.Entry(name=key, dtype=dtype if key == name else "float32", shape=tuple(t.shape))
        for key, t in BASE.items()
    ]
    header, _, size = tensorfile.plan(entries)
    (tmp_path / "base/model.safetensors").write_bytes(header.ljust(size, b"\0"))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} is .*{dtype}.*, expected float32"):
        merged(run)


# ------------------------------------------------------------ what was trained besides LoRA


def test_a_tensor_that_was_trained_besides_the_adapter_replaces_that_of_the_base(run, tmp_path):
    others = {
        f"{P}h.norm.weight": np.float32([5, 6]),
        f"{P}h.q.base_layer.bias": np.float32([7]),
        f"{P}h.same": np.float32([1.5]),
        f"{P}head.original_module.bias": np.float32([8, 8]),
        f"{P}added": np.float32([9]),
    }
    export_model(run / "model", TENSORS | others, {"step": 5})
    base = {
        "h.norm.weight": torch.ones(2),
        "h.q.bias": torch.zeros(1),
        "h.same": torch.tensor([1.5]),
    }
    save_file(BASE | base, tmp_path / "base/model.safetensors")
    tensors = merged(run)
    assert tensors["h.norm.weight"].tolist() == [5, 6]
    assert tensors["h.q.bias"].tolist() == [7]
    assert tensors["head.bias"].tolist() == [1, 2]
    stated = json.loads((tmp_path / "to/model.json").read_text())
    assert stated["alsoReplaced"] == ["h.norm.weight", "h.q.bias"]
    assert stated["leftOut"] == [f"{P}added"]


def test_a_frozen_base_of_another_element_type_is_the_same(run, tmp_path):
    """The base is float32, and was trained as float16: rounding is not a change."""
    exact = torch.full((3, 4), 0.1)
    save_file(BASE | {"h.q.weight": exact}, tmp_path / "base/model.safetensors")
    frozen = {f"{P}h.q.base_layer.weight": exact.half().numpy()}
    export_model(run / "model", TENSORS | frozen, {"step": 5})
    np.testing.assert_allclose(
        merged(run)["h.q.weight"].numpy(), exact.numpy() + 3 * (B @ A), rtol=1e-6
    )


def test_a_base_whose_adapted_matrix_has_other_values_is_refused(run):
    frozen = {f"{P}h.q.base_layer.weight": np.zeros((3, 4), np.float32)}
    export_model(run / "model", TENSORS | frozen, {"step": 5})
    with pytest.raises(ConfigError, match=r"h\.q\.weight has other values than in the run"):
        merged(run)


def test_a_trained_tensor_of_another_shape_than_in_the_base_is_refused(run):
    export_model(run / "model", TENSORS | {f"{P}steps": np.int64([1, 2])}, {"step": 5})
    with pytest.raises(
        ConfigError, match=r"steps has shape \(1,\) of int64, expected \(2,\) of int64"
    ):
        merged(run)


def test_all_tensors_that_are_left_out_are_stated_with_those_of_wrapped_modules_last(run, tmp_path):
    frozen = {f"{P}h.{n}.base_layer.weight": np.zeros(1, np.float32) for n in range(9)}
    export_model(run / "model", {**TENSORS, **frozen, f"{P}z.norm": np.ones(1, np.float32)}, {})
    stated = export_adapter(run, tmp_path / "to", config_from=tmp_path / "adapter")
    assert stated["leftOut"] == [f"{P}z.norm", *frozen]


# ------------------------------------------------------------ tied embeddings


@pytest.mark.parametrize(
    ("config", "head", "refused"),
    [
        ({"vocab_size": 5, "tie_word_embeddings": True}, True, True),
        ({"text_config": {"vocab_size": 5, "tie_word_embeddings": True}}, False, True),
        ({"vocab_size": 5}, False, True),
        ({"vocab_size": 5}, True, False),
        ({"vocab_size": 5, "tie_word_embeddings": False}, False, False),
        ({"vocab_size": 6, "tie_word_embeddings": True}, False, False),
    ],
)
def test_a_changed_embedding_is_refused_if_the_base_ties_it(run, tmp_path, config, head, refused):
    saved = {f"{P}embed.modules_to_save.default.weight": np.ones((5, 2), np.float32)}
    export_model(run / "model", TENSORS | saved, {"step": 5})
    base = BASE | {"embed.weight": torch.zeros(5, 2), "h.0.weight": torch.zeros(5, 2)}
    if head:
        base["lm_head.weight"] = torch.zeros(5, 2)
    save_file(base, tmp_path / "base/model.safetensors")
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(ConfigError, match=r"changes embed\.weight, and the base ties"):
            merged(run)
        assert not (tmp_path / "to").exists()
    else:
        assert merged(run)["embed.weight"].tolist() == [[1, 1]] * 5


# ------------------------------------------------------------ the configuration of another run


@pytest.mark.parametrize(
    ("change", "rank"),
    [({"r": 4}, 4), ({"rank_pattern": {"q": 3}}, 3), ({"r": None}, None), ({"r": 2, "rank_pattern": {"h.q": 1}}, 1)],
)  # fmt: skip
def test_a_configuration_with_other_ranks_is_refused(run, tmp_path, change, rank):
    own = write(tmp_path / "adapter", CONFIG | change)
    with pytest.raises(ConfigError, match=rf"give h\.q rank {rank}, but .* has shape \(2, 4\)"):
        export_adapter(run, tmp_path / "to", config_from=own)
    assert not (tmp_path / "to").exists()


def test_the_first_pattern_that_fits_gives_the_rank(run, tmp_path):
    own = write(tmp_path / "adapter", CONFIG | {"r": 8, "rank_pattern": {"k": 4, "q": 2, "h.q": 3}})
    export_adapter(run, tmp_path / "to", config_from=own)
    assert (tmp_path / "to/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize(
    "value", [{"q": "x"}, {"q": None}, {"q": 0}, {"(": 1}, {"q": float("nan")}, ["q"]]
)
def test_patterns_that_are_not_positive_numbers_are_refused(run, tmp_path, key, value):
    own = write(tmp_path / "adapter", CONFIG | {key: value})
    with pytest.raises(ConfigError, match=f"{key} is .*expected names of modules"):
        export_adapter(run, tmp_path / "to", config_from=own)


def test_matrices_of_different_ranks_are_not_merged(run):
    export_model(run / "model", TENSORS | {f"{P}h.q.lora_B.default.weight": B[:, :1]}, {})
    with pytest.raises(
        ConfigError, match=r"h\.q: lora_A and lora_B are not two matrices of one rank"
    ):
        merged(run)
