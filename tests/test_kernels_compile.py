"""Every Triton kernel becomes machine code for each generation of GPUs, on a host without one."""

from unittest.mock import patch

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from marks import long
from test_fast_residual import GEMMA, LLAMA

from sft_kernels.norms.residual import TritonNorms

pytest.importorskip("triton", reason="there is no Triton for this system")

from kernel_compiler import compiling_for

from sft_kernels.e4m3 import rows as float8_kernels
from sft_kernels.experts import grouped_kernels
from sft_kernels.experts import kernels as experts
from sft_kernels.linears import adapter_gradients
from sft_kernels.linears import four_bit as packed_weights
from sft_kernels.linears import glu as gated
from sft_kernels.loss import linear_cross_entropy as loss
from sft_kernels.mxfp4 import Mxfp4State

ROWS, FEATURES, CHOICES = 8, 64, 2
CAPABILITIES = [
    pytest.param(80, id="A100", marks=pytest.mark.long),
    pytest.param(89, id="RTX 4090, L40S", marks=pytest.mark.long),
    pytest.param(90, id="H100, H200"),
    pytest.param(100, id="B200", marks=pytest.mark.long),
    pytest.param(120, id="RTX 5090", marks=pytest.mark.long),
]
DTYPES = [torch.bfloat16, long(torch.float16), long(torch.float32)]


def rows(dtype: torch.dtype, features: int = FEATURES, count: int = ROWS) -> torch.Tensor:
    return torch.zeros(count, features, dtype=dtype)


def glu(dtype: torch.dtype) -> None:
    gate, up, dh = (rows(dtype) for _ in range(3))
    for activation in ("silu", "gelu_tanh"):
        gated.launch_forward(gate, up, activation)
        gated.launch_backward(dh, gate, up, activation, rows(dtype), rows(dtype), h=None)
        gated.launch_backward(dh, gate, up, activation, rows(dtype), rows(dtype), h=dh)


def float8(dtype: torch.dtype) -> None:
    columns = torch.ones(FEATURES)
    weight = torch.zeros(FEATURES, FEATURES).to(torch.float8_e4m3fn)
    float8_kernels.quantize_rows(rows(dtype))
    float8_kernels.quantize_rows(rows(dtype), columns)
    float8_kernels.transposed(weight)


def cross_entropy(dtype: torch.dtype) -> None:
    targets = torch.zeros(ROWS, dtype=torch.int64)
    loss.launch_cross_entropy(rows(dtype), targets)
    loss.launch_cross_entropy(rows(dtype), targets, softcap=30.0)


def norms(dtype: torch.dtype) -> None:
    x, weight = rows(dtype), torch.zeros(FEATURES, dtype=dtype)
    for kind in (LLAMA, GEMMA):
        TritonNorms.forward(x, None, weight, kind)
        _, s, inverse = TritonNorms.forward(x, x, weight, kind)
        TritonNorms.backward(x, x, s, weight, inverse, kind)


def mixture(dtype: torch.dtype) -> None:
    places = torch.zeros(ROWS, CHOICES, dtype=torch.int64)
    ends = torch.full((CHOICES,), ROWS, dtype=torch.int32)
    values = rows(dtype, count=ROWS * CHOICES)
    experts.sum_choices_kernel(values, places, ends, None)
    experts.sum_choices_kernel(values, places, ends, torch.zeros(ROWS, CHOICES))
    dh, y, weights = rows(dtype), rows(dtype, 2 * FEATURES), torch.zeros(ROWS)
    for form in (("silu", 0.0, 0.0), ("gelu_tanh", 0.0, 0.0), ("clamped", 1.702, 7.0)):
        experts.expert_glu_forward(y, form, ends)
        experts.expert_glu_forward(y, form, None)
        experts.expert_glu_backward(dh, y, weights, form, ends)


def grouped(dtype: torch.dtype, count: int = 80 * 2 * ROWS) -> None:
    """The tiles of many rows, over plain and packed weights."""
    order = torch.zeros(count, dtype=torch.int64)
    ends = torch.full((2,), count, dtype=torch.int32)
    routed = (order, ends, grouped_kernels.tiles_of(ends, count))
    x, u = rows(dtype, 256, count), rows(dtype, 16, count)
    term, bias = (u, torch.zeros(2, 16, 256), 2.0), torch.zeros(2, 256)
    weight = torch.zeros(2, 256, 256, dtype=dtype)
    out, thin = rows(dtype, 256, count), rows(dtype, 16, count)
    codes = torch.zeros(2, 256, 128, dtype=torch.uint8)
    nf4 = (torch.zeros(2, 256, 4), 64, "nf4")
    mxfp4 = (torch.zeros(2, 256, 8, dtype=torch.uint8), 32, "mxfp4")
    for is_summed in (False, True):
        grouped_kernels.grouped_product(
            x, [(0, weight)], is_summed, None, *routed, out, 2, term, bias
        )
    packed = [(0, codes)]
    for packing in (nf4, mxfp4):
        grouped_kernels.grouped_product(x, packed, False, packing, *routed, out, None, term)
    grouped_kernels.grouped_product(x, packed, True, nf4, *routed, out, None, term)
    grouped_kernels.grouped_product(x, [(0, torch.zeros(2, 16, 256))], False, None, *routed, thin)
    made = torch.zeros(2, 16, 256)
    grouped_kernels.outer(u, x, order, ends, made, 2.0, 2, torch.zeros(count))


def grouped_few(dtype: torch.dtype) -> None:
    """The tiles of few rows."""
    grouped(dtype, ROWS)


def four_bit(dtype: torch.dtype) -> None:
    for quant_type, is_nested in (("nf4", True), ("fp4", False)):
        packed = quantize_4bit(
            rows(dtype), quant_type=quant_type, compress_statistics=is_nested, blocksize=64
        )
        packed_weights.launch_unpacking(*packed)
        if is_nested:
            packed_weights.unpack_scales(packed[1])
    exponents = torch.zeros(2, dtype=torch.uint8)
    state = Mxfp4State(exponents, torch.Size((1, 2, 32)), dtype, is_turned=False)
    packed_weights.launch_unpacking(torch.zeros(32, dtype=torch.uint8), state)


def adapters(dtype: torch.dtype) -> None:
    dy, b, xa = rows(dtype), rows(dtype, 4, FEATURES), rows(dtype, 4)
    with patch.object(adapter_gradients, "processors", lambda device: 2):
        adapter_gradients.launch_adapter_gradients([dy], [b], xa, 2.0, torch.float32)


# bytes of shared memory that a program has on GPUs of a capability
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

LAUNCHES = [
    *(glu, cross_entropy, norms, mixture, grouped, float8, four_bit, adapters),
    # small tiles of the kernels whose large ones are compiled in `make test`
    long(grouped_few),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_compiles(launch, dtype, capability):
    if launch is float8 and capability < 89:
        pytest.skip("a GPU without float8")
    if launch in (adapters, grouped, grouped_few) and dtype == torch.float32:
        pytest.skip("kernels of 16 bits")
    most = SHARED_MEMORY[capability]
    with (
        compiling_for(capability) as compiled,
        patch.object(grouped_kernels, "_shared_memory", lambda device: most),
    ):
        launch(dtype)
    assert compiled
    for kernel in compiled:
        assert kernel.metadata.target.arch == capability
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= most
