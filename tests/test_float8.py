"""Float8 bases: what quantizing does to numbers, which layers are quantized, and what they compute."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sft_kernels.e4m3 import quantize as products
from sft_kernels.e4m3.linear import Float8Linear, is_float8
from sft_kernels.e4m3.quantize import quantize, quantize_weight, why_not_quantized
from sft_kernels.e4m3.rows import FLOAT8, LARGEST
from sft_kernels.process import Process
from sft_kernels.trial import float32_copy
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models.float8 import quantizing_to_float8
from sft_play.models.load import load_base, load_model

CPU = Process.alone(torch.device("cpu"))
CPU_BF16 = Process.alone(torch.device("cpu"), torch.bfloat16)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def config_of(tiny_base):
    """A function that returns the config of a float8 run of the tiny model, or of another folder."""

    def config(name=None, train=None, **tuning):
        return Config.model_validate(
            {
                "model": {"name": str(name or tiny_base), "max_seq_len": 64},
                "tuning": {"base_dtype": "float8", **tuning},
                "train": train or {},
            }
        )

    return config


def float8_linear(out_features: int = 48, in_features: int = 32) -> tuple[Float8Linear, nn.Linear]:
    """Return a float8 linear, and a plain one with the weight that it computes with."""
    linear = nn.Linear(in_features, out_features)
    with torch.no_grad():
        linear.weight.copy_(numbers(out_features, in_features))
    layer = Float8Linear.of(linear, quantize(linear.weight.detach()))
    return layer, float32_copy(nn.ModuleList([layer]))[0]


# The quantizer


def test_the_largest_number_of_a_row_becomes_the_largest_of_e4m3():
    x = numbers(5, 64) * torch.tensor([[1e-6], [1.0], [300.0], [1e8], [1e-30]])
    values, scales = quantize(x)
    assert values.dtype == FLOAT8 and scales.dtype == torch.float32
    torch.testing.assert_close(scales, x.abs().amax(1) / LARGEST)
    assert (values.float().abs().amax(1) == LARGEST).all()


def test_no_number_is_off_by_more_than_a_17th_of_itself():
    x = numbers(64, 512)
    error = (quantize(x).dequantized(torch.float32) - x).abs() / x.abs()
    within_normal_range = x.abs() > x.abs().amax(1, keepdim=True) / 28_672
    assert error[within_normal_range].max() <= 1 / 17 + 1e-6
    assert error[within_normal_range].max() > 0.05, "the bound is that of e4m3"


def test_a_row_of_zeros_stays_zero_with_scale_1():
    found = quantize(torch.stack([torch.zeros(16), torch.ones(16)]))
    assert found.scales[0] == 1 and not found.values[0].float().any()
    assert found.dequantized(torch.float32)[1].eq(1).all()


def test_the_scale_of_a_weight_is_the_best_of_an_octave():
    weight = torch.cat([numbers(32, 256), torch.zeros(1, 256)])
    found = quantize_weight(weight)
    plain = quantize(weight)
    ratio = found.scales / plain.scales
    assert ratio.min() == 1 and 1 < ratio.max() < 2 and found.scales[-1] == 1
    errors = [(q.dequantized(torch.float32) - weight).square().sum(1) for q in (found, plain)]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < 0.92 * errors[1].sum()


# Which weights stay


@pytest.mark.parametrize(
    "number, words",
    [
        (1e3, None),
        (1e6, "outliers: half of a row would be off by "),
        (float("inf"), "its weight is not finite"),
        (float("nan"), "its weight is not finite"),
    ],
)
def test_an_outlier_that_pushes_others_below_the_range_of_e4m3_or_no_number_is_not_quantized(
    number, words
):
    weight = numbers(8, 64)
    weight[1] = 0
    assert why_not_quantized(weight, quantize(weight)) is None
    weight[3, 5] = number
    reason = why_not_quantized(weight, quantize(weight))
    assert reason is words or reason.startswith(words)


# The layer


def test_a_float8_layer_multiplies_what_quantizing_left_of_input_and_weight():
    layer, plain = float8_linear()
    x = numbers(7, 32, seed=1)
    expected = plain(quantize(x).dequantized(torch.float32))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert (layer(x) - plain(x)).norm() / plain(x).norm() < 0.05


def test_its_gradient_is_that_of_the_output_quantized_with_the_scales_of_the_weight():
    layer, plain = float8_linear()
    x = numbers(2, 5, 32).requires_grad_()
    dy = numbers(2, 5, 48, seed=1)
    layer(x).backward(dy)
    scales = layer.weight_scale
    rounded = quantize(dy.view(10, 48), scales).dequantized(torch.float32) / scales
    torch.testing.assert_close(x.grad.view(10, 32), rounded @ plain.weight, rtol=1e-5, atol=1e-5)
    exact = dy.view(10, 48) @ plain.weight
    assert (x.grad.view(10, 32) - exact).norm() / exact.norm() < 0.05


def test_autocast_gives_the_type_of_the_output_and_no_other_sums():
    layer, _ = float8_linear()
    x = numbers(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    rounded = x.bfloat16()
    expected = products.float8_product(
        quantize(rounded), layer.weight, layer.weight_scale, torch.float32
    )
    torch.testing.assert_close(y, expected.bfloat16() + layer.bias.bfloat16())


@pytest.mark.parametrize("convert", ["half", "float", "bfloat16"])
def test_a_float8_weight_and_its_scales_keep_their_types(convert):
    layer, _ = float8_linear()
    before = layer.dequantized_weight(torch.float32)
    getattr(layer, convert)()
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (FLOAT8, torch.float32)
    assert layer.bias.dtype == getattr(torch, convert if convert != "float" else "float32")
    assert torch.equal(layer.dequantized_weight(torch.float32), before)


# Models


def test_the_linears_of_the_layers_are_in_float8_and_nothing_else(config_of, caplog):
    with caplog.at_level(logging.INFO):
        model = load_base(config_of(), CPU)
    quantized = {name for name, weight in model.named_parameters() if weight.dtype == FLOAT8}
    assert len(quantized) == 14 and all(name.startswith("model.layers.") for name in quantized)
    others = {weight.dtype for name, weight in model.named_parameters() if name not in quantized}
    assert others == {torch.float32}
    assert "float8: 14 of 14 linears of the layers" in caplog.text
    assert model.config.to_dict().get("quantization_config") is None


def test_adapters_over_float8_begin_as_those_over_16_bits(config_of):
    def adapters(base_dtype):
        torch.manual_seed(0)
        config = config_of(train={"fast_path": False}, base_dtype=base_dtype)
        model = load_model(config, CPU_BF16)
        return {name: weight for name, weight in model.named_parameters() if "lora_" in name}

    over_float8, over_16_bits = adapters("float8"), adapters("auto")
    assert {weight.dtype for weight in over_float8.values()} == {torch.float32}
    assert over_float8.keys() == over_16_bits.keys()
    assert all(torch.equal(over_float8[name], over_16_bits[name]) for name in over_float8)


def test_a_layer_with_outliers_stays_as_it_was_and_the_log_says_so(
    config_of, tiny_base, tmp_path, caplog
):
    weights = load_file(tiny_base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    weights[f"{name}.weight"][5, 0] = 1e5
    for path in tiny_base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = load_base(config_of(tmp_path), CPU)
    kept = model.get_submodule(name)
    assert not is_float8(kept) and torch.equal(kept.weight, weights[f"{name}.weight"])
    assert is_float8(model.get_submodule("model.layers.1.mlp.gate_proj"))
    assert "float8: 13 of 14 linears of the layers" in caplog.text
    assert f"float8: {name} not: outliers: half of a row would be off by" in caplog.text


def test_experts_and_routers_stay_as_they_were(config_of, base_of, caplog):
    with caplog.at_level(logging.INFO):
        model = load_base(config_of(base_of("mixtral")), CPU)
    quantized = {name for name, weight in model.named_parameters() if weight.dtype == FLOAT8}
    assert quantized and all("self_attn" in name for name in quantized)
    assert "not: experts in one parameter" in caplog.text


def test_float8_weights_are_neither_merged_into_nor_trained(config_of):
    model = load_model(config_of(), CPU)
    with pytest.raises(ValueError, match="float8"):
        model.merge_and_unload()
    lora = {"modules_to_save": ["up_proj"], "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"up_proj .*float8"):
        load_model(config_of(lora=lora), CPU)


def test_a_run_over_float8_is_not_used_on_a_gpu_without_it(config_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with (
        pytest.raises(EnvironmentFault, match=r"cuda:0 has capability 8\.0.*set DEVICE=cpu"),
        quantizing_to_float8(torch.device("cuda", 0)),
    ):
        pass


# Fused


@pytest.fixture(scope="module")
def steps(tiny_base):
    """Loss and gradients of one step, fused and by the modules' own code, in float32 and bfloat16."""
    ids = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))

    def step(fast_path, process):
        torch.manual_seed(0)
        config = Config.model_validate(
            {
                "model": {"name": str(tiny_base), "max_seq_len": 64},
                "tuning": {"base_dtype": "float8"},
                "train": {"fast_path": fast_path},
            }
        )
        model = load_model(config, process).train()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.copy_(0.05 * numbers(*weight.shape))
        with process.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        on = model.get_base_model().fast_path.on
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return loss.detach(), torch.cat([grad.flatten() for grad in grads]), on

    found = {}
    for process in (CPU, CPU_BF16):
        found[process.compute_dtype] = (step(True, process), step(False, process))
    return found


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 0.01), (torch.bfloat16, 0.15)], ids=str)
def test_a_fused_step_over_float8_is_that_of_the_own_code(steps, dtype, allowed):
    (fused_loss, fused, on), (loss, own, off) = steps[dtype]
    assert {"attention", "linears", "mlp"} <= on.keys() and not off
    assert fused_loss.item() == pytest.approx(loss.item(), rel=allowed / 10)
    # a number next to a border of e4m3 falls on another side: an eighth of it
    assert (fused - own).norm() / own.norm() < allowed
