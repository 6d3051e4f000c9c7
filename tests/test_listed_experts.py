"""FORMAT=vllm-adapter: adapters of experts by the names that vLLM and PEFT read for lists of experts."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import move_trained, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.inference import exported as parity
from sft_play.inference.export import export_run
from sft_play.inference.merge import what_vllm_does_not_serve
from sft_play.models import lora
from sft_play.models.experts import expert_weights
from sft_play.models.listed_experts import list_experts
from sft_play.runs import seal
from sft_play.runs.exports import ExportAsked

IDS = torch.arange(32)[None] % 50 + 3
# of the experts module, and of a projection of an expert, in published files
NAMES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "down_proj", "up_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w2", "w3")),
    "deepseek_v3": ("mlp.experts", ("gate_proj", "down_proj", "up_proj")),
}


def saved_adapter(model_type: str, folder: Path, **changes: list[int]) -> tuple[Config, PeftModel]:
    """Return a model with adapters that do something, saved with its base; and its config."""
    base = tiny_model(model_type, **changes).eval()
    base.save_pretrained(folder / "base")
    sections = {"model": {"name": str(folder / "base")}, "tuning": {"lora": {"r": 3, "alpha": 5}}}
    config = Config.model_validate(sections)
    model = lora.add_adapters(base, config)
    move_trained(model)
    model.save_pretrained(folder / "adapter")
    return config, model


def delta_of(tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    """Return what vLLM adds to a module's weight: scale x B A, of the names that it parses.

    parse_fine_tuned_lora_name (vllm/lora/utils.py) takes `base_model.model.` off, and
    `.lora_A.weight`; what is left is the module's name.
    """
    factors = (f"base_model.model.{module}.lora_{factor}.weight" for factor in "BA")
    b, a = (tensors[name] for name in factors)
    return scale * b @ a


@pytest.mark.parametrize("model_type", NAMES)
def test_each_expert_has_what_was_trained_by_the_names_that_vllm_packs(
    model_type: str, tmp_path: Path
) -> None:
    config, model = saved_adapter(model_type, tmp_path)
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    list_experts(config, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    place, (gate, down, up) = NAMES[model_type]
    weights = expert_weights(tiny_model(model_type))
    seen = set()
    for weight in weights:
        layer = weight.name.partition(".mlp.")[0]
        wrapper = model.base_model.model.get_submodule(weight.module_name)
        while wrapper.parameter_name != weight.parameter_name:
            wrapper = wrapper.base_layer
        trained = wrapper.get_delta_weight("default")
        for expert in range(weight.experts):
            # fused_moe_make_expert_params_mapping: `experts.{expert}.{name in the files}.`
            found = []
            for name in (down,) if weight.parameter_name == "down_proj" else (gate, up):
                module = f"{layer}.{place}.{expert}.{name}"
                seen.add(module)
                found.append(delta_of(tensors, module, 5 / 3))
            torch.testing.assert_close(torch.cat(found), trained[expert], rtol=1e-5, atol=1e-6)
    others = {name for name in before if ".experts." not in name}
    listed = {f"base_model.model.{name}.lora_{factor}.weight" for name in seen for factor in "AB"}
    assert tensors.keys() == others | listed
    assert all(torch.equal(tensors[name], before[name]) for name in others)
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {gate, down, up, "o_proj"} <= set(saved["target_modules"])
    assert saved["r"] == 3 and saved["target_parameters"] is None


# PEFT 0.21 knows the lists of these types, and joins gate and up with twice the rank; it takes the
# names of a dense layer next to them for those of experts
@pytest.mark.parametrize(
    ("model_type", "changes"), [("qwen3_moe", {"mlp_only_layers": []}), ("mixtral", {})]
)
def test_plain_peft_reads_the_listed_layout_too(
    model_type: str, changes: dict[str, list[int]], tmp_path: Path
) -> None:
    config, model = saved_adapter(model_type, tmp_path, **changes)
    list_experts(config, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(plain(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe"])
def test_experts_that_the_base_has_in_one_tensor_are_left_so(
    model_type: str, tmp_path: Path
) -> None:
    config, _ = saved_adapter(model_type, tmp_path)
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"experts\.\w+_proj in one tensor.*FORMAT=adapter"):
        list_experts(config, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.usefixtures("opens_here")
def test_a_run_is_exported_and_its_own_adapter_stays_as_it_was(
    train_run, base_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "MOST_TOKENS", 4)
    changes = {
        "model.name": base_of("qwen3_moe"),
        "tuning.lora.experts": "shared",
        "train.predict_with_generate": False,
    }
    run = train_run(changes, may_trace=False)
    own = run.path / "adapter" / "adapter_model.safetensors"
    before = own.read_bytes()
    lines = export_run(run, ExportAsked("vllm-adapter"), "cpu")
    assert "top-1 agreement=1.000" in lines[0]
    assert own.read_bytes() == before and seal.find_damage(own.parent) is None
    target = run.path / "export" / "vllm-adapter"
    assert seal.find_damage(target) is None and what_vllm_does_not_serve(target) == []
    names = load_file(target / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_B.weight" in names
