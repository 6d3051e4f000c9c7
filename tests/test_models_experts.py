"""Experts of mixture-of-experts models: what is adapted, saved, loaded and merged."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_models import MODEL_TYPES, NEWER, TINY, move_trained, tiny_config, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.config.schema import Config
from sft_play.models import expert_adapters, lora
from sft_play.models.experts import expert_weights, routing_linears
from sft_play.models.parameters import count_parameters

IDS = torch.arange(32)[None] % 50 + 3
SAME = 1e-4  # float32 sums in another order, through random routers


def config_of(mode: str = "lora", **options: Any) -> Config:
    return Config.model_validate({"tuning": {"mode": mode, "lora": {"r": 4, **options}}})


def adapted(model_type: str, **options: Any) -> PeftModel:
    """Return a tiny model with adapters that do something."""
    model = lora.add_adapters(tiny_model(model_type).eval(), config_of(**options))
    move_trained(model)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def adapted_names(model: nn.Module) -> set[str]:
    """Return the last words of what has adapters, a parameter's after its module's."""
    names: set[str] = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            words = [word for word in name.split(".") if word != "base_layer"]
            names.add(getattr(module, "parameter_name", words[-1]))
    return names


# Experts next to shared experts and dense layers, whose names PEFT takes for the experts' in some of
# these types and not in others; experts stored (experts, in, out); experts without a gate; a router
# that is a linear layer, and layers that PEFT refuses.
@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe", "gpt_oss", "nemotron_h"])
def test_saved_adapters_of_experts_load_in_plain_peft(model_type, tmp_path):
    model = adapted(model_type)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    base = tiny_model(model_type).eval()
    assert not torch.allclose(logits(base), expected, atol=0.1)
    plain = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(plain), expected, atol=SAME, rtol=0)
    own = expert_adapters.load_frozen_adapter(tiny_model(model_type).eval(), tmp_path)
    torch.testing.assert_close(logits(own), expected, atol=0, rtol=0)
    assert {p.requires_grad for p in own.parameters()} == {False}
    torch.testing.assert_close(logits(own.merge_and_unload()), expected, atol=SAME, rtol=0)


def test_all_linear_adapts_attention_dense_and_shared_layers_and_experts_but_no_router():
    model = adapted("qwen2_moe")
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted_names(model) == {*names, "gate_up_proj"}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name and "shared_expert_gate" not in name for name in trained)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert routing_linears(tiny_model("qwen2_moe")) == {"model.layers.1.mlp.shared_expert_gate"}
    # no linear any more in newer versions, which no adapter would find
    assert routing_linears(tiny_model("jamba")) <= {"model.layers.1.feed_forward.router"}


def test_every_expert_has_adapters_of_the_rank_that_was_set():
    model = adapted("qwen3_moe", target_modules=["gate_up_proj", "experts.down_proj"])
    gate_up, down = expert_weights(tiny_model("qwen3_moe"))
    expected = 0
    for weight in (gate_up, down):
        expected += weight.experts * 4 * sum(weight.shape[1:])
    assert count_parameters(model).trainable == expected
    outer = model.get_submodule(f"base_model.model.{down.module_name}")
    assert outer.parameter_name == "down_proj"
    assert outer.base_layer.parameter_name == "gate_up_proj"


@pytest.mark.parametrize(
    "options, names",
    [
        ({"experts": "none"}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"target_modules": ["q_proj"]}, {"q_proj"}),
        (
            {"target_modules": ["q_proj"], "experts": "per_expert"},
            {"q_proj", "gate_up_proj", "down_proj"},
        ),
        # as in the layouts of transformers 4, one linear layer an expert
        ({"target_modules": ["w1", "w3", "w2"]}, {"gate_up_proj", "down_proj"}),
        ({"target_modules": ["gate_proj", "up_proj", "v_proj"]}, {"gate_up_proj", "v_proj"}),
    ],
)
def test_targets_of_experts_are_chosen_by_name(options, names):
    assert adapted_names(adapted("mixtral", **options)) == names


def test_layers_to_transform_chooses_the_layers_of_experts_too(tmp_path):
    model = adapted("mixtral", layers_to_transform=[1])
    assert all(".layers.1." in name for name, p in model.named_parameters() if p.requires_grad)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(tiny_model("mixtral").eval(), tmp_path)
    torch.testing.assert_close(logits(plain), expected, atol=SAME, rtol=0)


@pytest.mark.parametrize("model_type, word", [("jamba", "dt_proj"), ("mamba2", "out_proj")])
def test_all_linear_leaves_out_layers_whose_weight_alone_is_read(model_type, word):
    model = adapted(model_type)
    assert "in_proj" in adapted_names(model) and word not in adapted_names(model)
    model.train()(input_ids=IDS.repeat(1, 8), labels=IDS.repeat(1, 8)).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name, gradient in gradients.items() if gradient is None]


@pytest.mark.parametrize(
    "model_type, fields, left_out",
    [
        (
            "deepseek_v32",
            {"first_k_dense_replace": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
            {"wq_b", "wk", "weights_proj"},
        ),
        (
            "longcat_flash",
            {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
            {"classifier"},
        ),
        (
            "gemma3n_text",
            {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "altup_num_inputs": 2}
            | {"vocab_size_per_layer_input": 2304, "num_kv_shared_layers": 0}
            | {"intermediate_size": [48, 48], "activation_sparsity_pattern": [0.9, 0.0]},
            {"correction_coefs"},
        ),
    ],
)
def test_all_linear_leaves_out_layers_that_no_gradient_reaches(model_type, fields, left_out):
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "head_dim": 8}
    latent |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model(
        model_type, **{**TINY.common(), **latent, "n_routed_experts": 8, **fields}
    )
    model = lora.add_adapters(AutoModelForCausalLM.from_config(config), config_of())
    names = adapted_names(model)
    assert {"o_proj", "down_proj"} <= names and not left_out & names
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    of_b = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n and "experts" not in n}
    assert not [name for name, gradient in of_b.items() if gradient is None]


@pytest.mark.skipif("inkling2_text" not in NEWER, reason="transformers lacks it")
def test_layers_whose_adapters_peft_would_not_load_again_get_none(tmp_path):
    model = adapted("inkling2_text")
    assert "linear" in adapted_names(model) and "weight_proj" not in adapted_names(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model("inkling2_text").eval(), tmp_path)
    assert torch.allclose(logits(again), expected, atol=SAME)


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, *NEWER])
def test_the_tiny_config_of_a_type_with_experts_has_a_layer_of_them(model_type):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = ("num_experts", "n_routed_experts", "num_local_experts")
    says_experts = any((getattr(config, name, None) or 0) > 1 for name in counts)
    assert bool(expert_weights(model)) >= says_experts


class _ListedExperts(nn.Module):
    """A layer in the layout of older models: a list of experts, and a linear router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))


def test_the_router_of_listed_experts_is_found():
    model = nn.Module()
    model.layers = nn.ModuleList([_ListedExperts(), _ListedExperts()])
    assert routing_linears(model) == {"layers.0.gate", "layers.1.gate"}
    assert not expert_weights(model)
