"""`glu` for linears in float8: what it computes is quantized in the same pass.

One program a row. It writes the row in 16 bits, which LoRA's products read, seeks the largest
number meanwhile, and reads the row again from the cache to quantize it. The reference computes and
then quantizes.

Legend: N tokens, I intermediate features.
"""

import torch
from torch import Tensor

from sft_play.models.fast.linears import glu
from sft_play.models.fast.linears.activations import Activation
from sft_play.models.fast.linears.glu import argument_and_slope, gradients
from sft_play.models.float8.format import Quantized
from sft_play.models.float8.kernels import (
    empty_rows,
    load_float32,
    program_number,
    quantize_row,
    scale_of,
)
from sft_play.models.float8.quantize import quantize
from sft_play.models.optional_triton import tl, triton

BLOCK = 2048  # features at a time: 8 of a thread, one 16-byte load of bfloat16
WARPS = 8


@triton.jit
def _forward_kernel(
    gate,
    up,
    h,
    values,
    scales,
    gate_stride,
    up_stride,
    features,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    largest = tl.zeros((block,), tl.float32)
    for start in range(0, features, block):
        at = start + tl.arange(0, block)
        inside = at < features
        g = load_float32(gate + row * gate_stride + at, inside)
        u = load_float32(up + row * up_stride + at, inside)
        p, _slope = argument_and_slope(g, is_gelu)
        product = (g * tl.sigmoid(p) * u).to(h.dtype.element_ty)
        tl.store(h + row * features + at, product, inside)
        largest = tl.maximum(largest, tl.abs(product.to(tl.float32)))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + row, scale)
    at_row = row * features
    tl.debug_barrier()  # other threads of this program have written parts of the row
    quantize_row(h + at_row, scales, values + at_row, scale, features, False, block)


@triton.jit
def _backward_kernel(
    dh,
    gate,
    up,
    dgate,
    dup,
    gate_columns,
    up_columns,
    gate_values,
    gate_scales,
    up_values,
    up_scales,
    gate_stride,
    up_stride,
    features,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    at_row = row * features
    largest_gate = tl.zeros((block,), tl.float32)
    largest_up = tl.zeros((block,), tl.float32)
    for start in range(0, features, block):
        at = start + tl.arange(0, block)
        inside = at < features
        d = load_float32(dh + at_row + at, inside)
        g = load_float32(gate + row * gate_stride + at, inside)
        u = load_float32(up + row * up_stride + at, inside)
        of_gate, of_up, product = gradients(d, g, u, is_gelu)
        of_gate = of_gate.to(dgate.dtype.element_ty)
        of_up = of_up.to(dup.dtype.element_ty)
        tl.store(dgate + at_row + at, of_gate, inside)
        tl.store(dup + at_row + at, of_up, inside)
        tl.store(dh + at_row + at, product, inside)  # h, if this program has read dh
        scaled = of_gate.to(tl.float32) * tl.load(gate_columns + at, inside, 0)
        largest_gate = tl.maximum(largest_gate, tl.abs(scaled))
        scaled = of_up.to(tl.float32) * tl.load(up_columns + at, inside, 0)
        largest_up = tl.maximum(largest_up, tl.abs(scaled))
    scale = scale_of(tl.max(largest_gate, 0))
    tl.store(gate_scales + row, scale)
    tl.debug_barrier()  # as in `_forward_kernel`
    quantize_row(dgate + at_row, gate_columns, gate_values + at_row, scale, features, True, block)
    scale = scale_of(tl.max(largest_up, 0))
    tl.store(up_scales + row, scale)
    tl.debug_barrier()
    quantize_row(dup + at_row, up_columns, up_values + at_row, scale, features, True, block)


def glu_forward_float8(
    gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Quantized]:
    """Return h (N, I) of gate and up (N, I), and h in float8; one kernel on a GPU."""
    if gate.is_cuda:
        return launch_forward(gate, up, activation)
    h = glu.glu_forward(gate, up, activation)
    return h, quantize(h)


def glu_backward_float8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    gate_scales: Tensor,
    up_scales: Tensor,
) -> tuple[Quantized, Quantized]:
    """Write dgate, dup and, in the place of dh, h; return dgate and dup (N, I) in float8.

    They are multiplied by the scales (I,) of the rows of gate's and up's weights before.
    """
    if gate.is_cuda:
        scales = (gate_scales, up_scales)
        return launch_backward(dh, gate, up, activation, dgate, dup, *scales)
    glu.glu_backward(dh, gate, up, activation, dgate, dup, h=dh)
    return quantize(dgate, gate_scales), quantize(dup, up_scales)


def launch_forward(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Quantized]:
    """Return h = act(gate) * up (N, I), and h in float8."""
    assert gate.stride(1) == up.stride(1) == 1, "features lie side by side"
    rows, features = gate.shape
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    quantized = empty_rows(rows, features, gate.device)
    strides = (gate.stride(0), up.stride(0))
    flags = (activation == "gelu_tanh", BLOCK)
    _forward_kernel[(rows,)](gate, up, h, *quantized, *strides, features, *flags, num_warps=WARPS)
    return h, quantized


def launch_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    gate_scales: Tensor,
    up_scales: Tensor,
) -> tuple[Quantized, Quantized]:
    """Write dgate and dup, and h in the place of dh; return dgate and dup in float8."""
    assert gate.stride(1) == up.stride(1) == 1, "features lie side by side"
    assert all(tensor.is_contiguous() for tensor in (dh, dgate, dup)), "rows lie side by side"
    rows, features = gate.shape
    of_gate, of_up = (empty_rows(rows, features, gate.device) for _ in range(2))
    tensors = (dh, gate, up, dgate, dup, gate_scales, up_scales, *of_gate, *of_up)
    strides = (gate.stride(0), up.stride(0))
    flags = (activation == "gelu_tanh", BLOCK)
    _backward_kernel[(rows,)](*tensors, *strides, features, *flags, num_warps=WARPS)
    return of_gate, of_up
