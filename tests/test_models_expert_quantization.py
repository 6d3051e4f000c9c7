"""Experts in 4 bits: packed as they are loaded, read by name, trained through, counted."""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes.nn import Linear4bit, Params4bit
from published_models import published_model
from stored_forms import mxfp4
from tiny_models import WHOLE_BLOCKS, tiny_model
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from traced_steps import build_on_meta

from sft_kernels.capture import kinds_of
from sft_kernels.expert_modules import find_experts, packed_weight
from sft_kernels.process import Process
from sft_kernels.trial import float32_copy
from sft_play.config.schema import Config
from sft_play.models import bnb, lora
from sft_play.models.architecture import encoders_of
from sft_play.models.experts import expert_weights, routing_linears
from sft_play.models.load import load_base
from sft_play.models.merging import Merge, quantized_names
from sft_play.models.parameters import PackedWeights, count_parameters, packed_weights

CPU = Process.alone(torch.device("cpu"))
IDS = torch.arange(32)[None] % 50 + 3


def base_of(folder: Path, model_type: str, **changes: int) -> Path:
    model = tiny_model(model_type, WHOLE_BLOCKS, **changes)
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    return folder


def config_of(base: Path, mode: str = "qlora", experts: str = "auto") -> Config:
    tuning = {"mode": mode, "lora": {"r": 4, "experts": experts}}
    return Config.model_validate({"model": {"name": str(base)}, "tuning": tuning})


@torch.no_grad()
def plain_copy(packed: nn.Module, base: Path) -> nn.Module:
    """Return the model in float32, with the values that the packed one has."""
    plain = load_base(config_of(base, "lora"), CPU)
    for name, module in packed.named_modules():
        if isinstance(module, Linear4bit):
            weight = bnb_functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.copy_(weight)
    for weight in expert_weights(packed):
        owner = packed.get_submodule(weight.module_name)
        plain.get_parameter(weight.name).copy_(getattr(owner, weight.parameter_name))
    return plain


def with_adapters(model: nn.Module, config: Config) -> nn.Module:
    torch.manual_seed(0)
    adapted = lora.add_adapters(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        parameters = dict(adapted.named_parameters())
        for name in sorted(parameters):
            parameter = parameters[name]
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


# (experts, out, in), (experts, in, out), without a gate and next to a linear router
@pytest.mark.parametrize(
    "model_type, experts", [("qwen2_moe", "auto"), ("gpt_oss", "auto"), ("gpt_oss", "shared")]
)
def test_experts_are_packed_and_compute_and_train_as_their_values_in_16_bits(
    model_type, experts, tmp_path
):
    base = base_of(tmp_path, model_type)
    packed = load_base(config_of(base), CPU)
    for weight in expert_weights(packed):
        parameter = packed_weight(packed.get_submodule(weight.module_name), weight.parameter_name)
        assert isinstance(parameter, Params4bit)
        assert parameter.nbytes * 2 == torch.Size(weight.shape).numel()
        assert tuple(parameter.quant_state.shape) == weight.shape
    plain = plain_copy(packed, base)
    assert count_parameters(packed).total == count_parameters(plain).total
    for model, mode in ((packed, "qlora"), (plain, "lora")):
        adapted = with_adapters(model, config_of(base, mode, experts))
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        lists = [m for m in adapted.modules() if isinstance(m, ParametrizationList)]
        assert all(len(steps) == 1 for steps in lists), "a pass left its adapter behind"
    expected = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad)
    packed.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(packed(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_a_copy_in_float32_has_the_unpacked_values_and_the_adapters(tmp_path):
    base = base_of(tmp_path, "qwen2_moe")
    packed = load_base(config_of(base), CPU)
    plain = with_adapters(plain_copy(packed, base), config_of(base, "lora"))
    adapted = with_adapters(packed, config_of(base))
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    logits = adapted(input_ids=IDS).logits
    copied = float32_copy(adapted)
    weights = [parameter for parameter in copied.parameters() if not parameter.requires_grad]
    assert {weight.dtype for weight in weights} == {torch.float32}
    outputs = [model(input_ids=IDS, labels=IDS) for model in (copied, plain)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    outputs[0].loss.backward()
    trained = [name for name, parameter in copied.named_parameters() if parameter.requires_grad]
    assert all(copied.get_parameter(name).grad is not None for name in trained)
    assert all(adapted.get_parameter(name).grad is None for name in trained)
    for name, tensor in adapted.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(adapted(input_ids=IDS).logits, logits)


def test_layers_of_packed_experts_are_of_one_kind(tmp_path):
    """torch gives each parametrized module a class of its own."""
    base = base_of(tmp_path, "qwen3_moe", num_hidden_layers=4)
    model = with_adapters(load_base(config_of(base), CPU), config_of(base))
    kinds = kinds_of(model, model.config)
    experts = find_experts(model)
    assert len(experts) > 1
    assert len({kinds[module] for module in experts}) == 1


def test_routers_stay_in_16_bits_and_the_share_in_4_bits_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "sft_play"):
        model = load_base(config_of(base_of(tmp_path, "jamba")), CPU)
    for name in routing_linears(model):
        assert type(model.get_submodule(name)) is nn.Linear
    assert "routers" in packed_weights(model).kept
    assert "of the weights" in caplog.text
    assert packed_weights(model).total == count_parameters(model).total


def test_what_stays_in_16_bits_for_no_known_reason_is_named():
    weights = PackedWeights(900, {"routers": 10, "mlp.w1": 80}, torch.bfloat16)
    assert weights.line() == ("4-bit: 90.9% of the weights; 9.1% stay in bfloat16: routers, mlp.w1")
    assert weights.unexplained == {"mlp.w1": 80}


def test_weights_that_code_reads_stay_as_they_are_and_train(tmp_path):
    config = config_of(base_of(tmp_path, "gemma3n_text"))
    model = load_base(config, CPU)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, Linear4bit)
    assert type(layer.altup.prediction_coefs) is nn.Linear  # clamped in training
    assert type(layer.altup.correction_coefs) is nn.Linear
    loss = lora.add_adapters(model, config).train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite()


def test_encoders_are_no_weights_that_could_not_be_packed():
    model = published_model("gemma3")
    weights = packed_weights(model)
    of_encoders = [encoder.parameters() for encoder in encoders_of(model).values()]
    assert weights.kept["encoders"] == sum(map(torch.numel, itertools.chain(*of_encoders)))
    assert not any("encoder" in name for name in weights.unexplained)


def test_the_model_without_memory_is_packed_alike(tmp_path):
    config = config_of(base_of(tmp_path, "mixtral"))
    on_meta = build_on_meta(config, torch.float32)
    loaded = lora.add_adapters(load_base(config, CPU), config)
    expected = {name: (p.shape, p.dtype) for name, p in loaded.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in on_meta.named_parameters()} == expected


def test_mxfp4_experts_are_dequantized_for_lora_and_stay_as_they_are_for_qlora(tmp_path, caplog):
    base = mxfp4(tmp_path)
    with caplog.at_level(logging.INFO, "sft_play"):
        plain = load_base(config_of(base, "lora"), CPU)
    assert "stored as MXFP4, dequantized" in caplog.text
    packed = load_base(config_of(base), CPU)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert isinstance(packed.model.layers[0].self_attn.q_proj, Linear4bit)
    for weight in expert_weights(packed):
        expected = plain.get_parameter(weight.name)
        assert expected.abs().max() > 0
        experts = packed.get_submodule(weight.module_name)
        stored = packed_weight(experts, weight.parameter_name)
        assert stored.quant_state.quant_type == "mxfp4"
        assert stored.nbytes == expected.numel() // 2
        assert torch.equal(getattr(experts, weight.parameter_name), expected)
    adapted = lora.add_adapters(packed, config_of(base))
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert adapted.base_model.model.is_loaded_in_4bit


def test_a_merge_rounds_attention_to_4_bits_and_leaves_mxfp4_experts(tmp_path):
    config = config_of(mxfp4(tmp_path))
    base = load_base(config_of(config.model.name, "lora"), CPU)
    quantization = bnb.quantization_config(config, torch.float32)
    rounded = quantized_names(base, Merge(config, tmp_path, quantization=quantization))
    assert {weight.name for weight in expert_weights(base)}.isdisjoint(rounded)
    assert any(name.endswith("q_proj.weight") for name in rounded)
