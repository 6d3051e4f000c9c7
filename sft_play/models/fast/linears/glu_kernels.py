"""Triton kernels of `glu`: one pass over the rows forward, one backward. Imported only on a GPU.

The formulas are in `activations` and `glu`.
"""

import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.fast.linears.activations import GELU_CUBE, GELU_SLOPE, Activation
from sft_play.models.float8.kernels import load_float32, program_number

BLOCK = 1024  # features of a program: 8 of a thread, one 16-byte load of bfloat16
_SLOPE = tl.constexpr(GELU_SLOPE)
_CUBE = tl.constexpr(GELU_CUBE)


@triton.jit
def sigmoid_argument(g, is_gelu: tl.constexpr):
    """p(g) and p'(g)."""
    if is_gelu:
        return _SLOPE * g * (1 + _CUBE * g * g), _SLOPE * (1 + 3 * _CUBE * g * g)
    else:
        return g, tl.full(g.shape, 1.0, tl.float32)


@triton.jit
def gradients(d, g, u, is_gelu: tl.constexpr):
    """dg, du and h of dh, g and u."""
    p, slope = sigmoid_argument(g, is_gelu)
    s = tl.sigmoid(p)
    act = g * s
    return d * (s + act * (1 - s) * slope) * u, d * act, act * u


@triton.jit
def _forward(
    gate,
    up,
    h,
    gate_stride,
    up_stride,
    features,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    g = load_float32(gate + row * gate_stride + columns, inside)
    u = load_float32(up + row * up_stride + columns, inside)
    p, _slope = sigmoid_argument(g, is_gelu)
    tl.store(h + row * features + columns, g * tl.sigmoid(p) * u, inside)


@triton.jit
def _backward(
    dh,
    gate,
    up,
    dgate,
    dup,
    h,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    features,
    is_gelu: tl.constexpr,
    with_h: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    d = load_float32(dh + row * features + columns, inside)
    g = load_float32(gate + row * gate_stride + columns, inside)
    u = load_float32(up + row * up_stride + columns, inside)
    of_gate, of_up, product = gradients(d, g, u, is_gelu)
    tl.store(dgate + row * dgate_stride + columns, of_gate, inside)
    tl.store(dup + row * dup_stride + columns, of_up, inside)
    if with_h:  # h may be dh: each program has read its part of it
        tl.store(h + row * features + columns, product, inside)


def forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (N, I)."""
    assert gate.stride(1) == up.stride(1) == 1, "features lie side by side"
    h = gate.new_empty(gate.shape)
    tensors = (gate, up, h)
    sizes = (gate.stride(0), up.stride(0), gate.shape[1])
    _forward[(len(gate), triton.cdiv(gate.shape[1], BLOCK))](
        *tensors, *sizes, activation == "gelu_tanh", BLOCK
    )
    return h


def backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None,
) -> None:
    """Write dgate, dup and, if it is given, h; all (N, I)."""
    dh = dh.contiguous()
    inputs_and_gradients = (gate, up, dgate, dup)
    are_adjacent = all(tensor.stride(1) == 1 for tensor in inputs_and_gradients)
    assert are_adjacent and (h is None or h.is_contiguous()), "features lie side by side"
    tensors = (dh, *inputs_and_gradients, dh if h is None else h)
    strides = [tensor.stride(0) for tensor in inputs_and_gradients]
    flags = (activation == "gelu_tanh", h is not None)
    _backward[(len(gate), triton.cdiv(gate.shape[1], BLOCK))](
        *tensors, *strides, gate.shape[1], *flags, BLOCK
    )
