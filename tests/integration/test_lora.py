"""Adapters of the real PEFT: what `diloco export --adapter` writes is what PEFT loads, and merges to the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_local.adapter import export_adapter
from diloco_syncer.storage.model import export_model

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

GPT2 = transformers.GPT2Config(
    vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LLAMA = transformers.LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
CASES = {
    # Matrices that are stored transposed, and square ones among them.
    "gpt2": (GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "llama": (
        LLAMA,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"v_proj": 4},
            "alpha_pattern": {"down_proj": 32},
            "modules_to_save": ["lm_head"],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_adapter_is_the_one_that_was_trained(tmp_path: Path, name: str):
    config, options = CASES[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    trained = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, **options),
    )
    trained.peft_config["default"].save_pretrained(tmp_path / "adapter")
    own = {}
    for parameter_name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)  # B is 0 before training
            own[parameter_name] = parameter.detach().numpy()
    export_model(tmp_path / "run/model", own, {"step": 1, "frozen": [{"name": "x"}]})

    export_adapter(tmp_path / "run", tmp_path / "peft", config_from=tmp_path / "adapter")
    export_adapter(
        tmp_path / "run", tmp_path / "merged", config_from=tmp_path / "adapter", base=tmp_path / "base"
    )  # fmt: skip

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    state = loaded.state_dict()
    assert state.keys() == trained.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in trained.state_dict().items())

    ids = torch.randint(32, (2, 8))
    trained.eval()
    expected = trained(input_ids=ids).logits
    assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    unloaded = trained.merge_and_unload().state_dict()
    assert unloaded.keys() == merged.state_dict().keys()
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, unloaded[key], rtol=1e-5, atol=1e-6)
