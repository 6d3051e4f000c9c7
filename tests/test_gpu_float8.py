"""Float8 on a GPU: kernels equal to their references, products near them, a step near the CPU's."""

import pytest
import torch

from sft_kernels.e4m3 import quantize as products
from sft_kernels.e4m3.linear import Float8Linear
from sft_kernels.e4m3.quantize import quantize, quantize_reference, quantize_weight
from sft_kernels.e4m3.rows import FLOAT8, Quantized
from sft_kernels.needs import FLOAT8_CAPABILITY
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.load import load_model


def has_float8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_float8(), reason="needs an NVIDIA GPU of capability 8.9"),
]
GPU = torch.device("cuda", 0)
# Sums of fast accumulation and the rounding to bfloat16, relative to the size of the product
CLOSE = 5e-3


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of all sizes: one is zero, one has an outlier."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=GPU)
    x *= torch.logspace(-4, 4, len(x), device=GPU)[:, None]
    x[1] = 0
    x[2, 3] = 1e6
    return x.to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a row, relative to the size of the row."""
    sizes = expected.double().norm(dim=-1)
    errors = (found.double() - expected.double()).norm(dim=-1)
    return float((errors / sizes.clamp(min=1e-30)).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("features", [16, 1008, 4096, 14336])
@pytest.mark.parametrize("has_columns", [False, True])
def test_the_quantizer_equals_its_reference(dtype, features, has_columns):
    x = numbers(65, features, dtype=torch.float32).clamp(-6e4, 6e4).to(dtype)
    columns = torch.rand(features, device=GPU) + 0.1 if has_columns else None
    found, expected = quantize(x, columns), quantize_reference(x, columns)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    x = numbers(8, 256)
    x[5, 7] = bad
    assert quantize(x).dequantized(torch.float32).isnan().any(1).tolist() == [
        row == 5 for row in range(8)
    ]


@pytest.mark.parametrize("shape", [(16, 16), (1024, 4096), (14336, 4096), (272, 1008)])
def test_a_transpose_moves_every_weight(shape):
    from sft_kernels.e4m3 import rows as kernels

    weight = torch.randint(0, 255, shape, dtype=torch.uint8, device=GPU).view(FLOAT8)
    found = kernels.transposed(weight).view(torch.uint8)
    assert torch.equal(found, weight.view(torch.uint8).t())


@pytest.mark.parametrize(
    "tokens, inputs, outputs",
    [(8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 1024), (37, 576, 1536), (1, 64, 128)],
)
def test_both_products_are_those_of_the_reference(tokens, inputs, outputs):
    weight = quantize_weight(0.02 * torch.randn(outputs, inputs, device=GPU))
    x = quantize(numbers(max(3, tokens), inputs)[:tokens])
    found = products.float8_product(x, weight.values, weight.scales, torch.bfloat16)
    expected = products._reference(x, weight.values.t(), weight.scales)
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    assert relative_error(found, expected) < CLOSE

    dy = quantize(numbers(max(3, tokens), outputs)[:tokens], weight.scales)
    found = products.input_product(dy, weight.values, torch.bfloat16)
    ones = torch.ones(inputs, device=GPU)
    expected = products._reference(dy, weight.values, ones)
    assert found.isfinite().all() and relative_error(found, expected) < CLOSE


def test_a_layer_computes_nothing_that_is_not_finite_for_zero_rows_and_outliers():
    linear = torch.nn.Linear(256, 512, bias=True, device=GPU, dtype=torch.bfloat16)
    layer = Float8Linear.of(linear, quantize_weight(linear.weight.detach()))
    layer.bias.requires_grad_(False)
    x = numbers(64, 256).requires_grad_()
    y = layer(x)
    y.backward(numbers(64, 512))
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert torch.equal(y[1], layer.bias) and not x.grad[1].any()


@pytest.fixture(scope="module")
def steps(tiny_base):
    """Loss and gradients of one step on a GPU: fused, by the modules' own code, in 16 bits."""
    ids = torch.randint(3, 500, (4, 48), generator=torch.Generator().manual_seed(0)).to(GPU)

    def step(fast_path, base_dtype):
        torch.manual_seed(0)
        config = Config.model_validate(
            {
                "model": {"name": str(tiny_base), "max_seq_len": 64},
                "tuning": {"base_dtype": base_dtype},
                "train": {"fast_path": fast_path},
            }
        )
        process = Process.alone(GPU, torch.bfloat16)
        model = load_model(config, process).train()
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.data.copy_(0.05 * noise)
        with process.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        on = model.get_base_model().fast_path.on
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return loss.item(), torch.cat([grad.flatten() for grad in grads]), on

    return {
        "fused": step(True, "float8"),
        "own": step(False, "float8"),
        "unquantized": step(False, "auto"),
    }


def test_a_fused_step_is_that_of_the_own_code(steps):
    (fused_loss, fused, on), (loss, own, _) = steps["fused"], steps["own"]
    assert {"attention", "linears", "mlp"} <= on.keys()
    assert fused_loss == pytest.approx(loss, rel=0.01)
    assert (fused - own).norm() / own.norm() < 0.15


def test_a_float8_step_is_near_that_in_16_bits(steps):
    (fused_loss, fused, _), (loss, unquantized, _) = steps["fused"], steps["unquantized"]
    assert fused_loss == pytest.approx(loss, rel=0.02)
    assert (fused - unquantized).norm() / unquantized.norm() < 0.25


def test_a_part_of_the_tokens_has_the_products_of_the_whole():
    weight = quantize_weight(torch.randn(64, 128, device=GPU))
    x = quantize(numbers(48, 128))
    half = Quantized(x.values[:32], x.scales[:32])
    found = products.float8_product(half, weight.values, weight.scales, torch.float32)
    whole = products.float8_product(x, weight.values, weight.scales, torch.float32)
    assert torch.equal(found, whole[:32])
