"""SwiGLU and GeGLU, the elementwise part of a gated MLP: h = act(g) * u, and its gradient.

With act(g) = g * s, s = sigmoid(p(g)):
    silu        p(g) = g
    gelu_tanh   p(g) = 2 sqrt(2 / pi) (g + 0.044715 g^3), since (1 + tanh(z)) / 2 = sigmoid(2 z)
    act'(g) = s + g s (1 - s) p'(g),  dg = dh act'(g) u,  du = dh act(g)
Both are computed in float32 and rounded once; transformers rounds act(g) to bfloat16 before it
multiplies. On a GPU, forward and backward are one Triton kernel each; elsewhere the reference runs.
The kernel and the reference differ by 1e-5 in float32, and by one rounding in 16 bits.

Legend: N tokens, I intermediate features.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import GELUTanh, SiLUActivation

from sft_kernels import triton_kernels
from sft_kernels.triton_kernels import load_float32, program_number, tl, triton

Activation = Literal["silu", "gelu_tanh"]
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715


def activation_of(module: nn.Module | Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the name of an activation module or function; None if it is not one of the two."""
    if module is functional.silu or isinstance(module, nn.SiLU | SiLUActivation):
        return "silu"
    is_tanh = isinstance(module, nn.GELU) and module.approximate == "tanh"
    return "gelu_tanh" if is_tanh or isinstance(module, GELUTanh) else None


def sigmoid_argument(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """Return p(g) and its derivative p'(g)."""
    if activation == "silu":
        return g, 1.0
    return GELU_SLOPE * (g + GELU_CUBE * g**3), GELU_SLOPE * (1 + 3 * GELU_CUBE * g**2)


class GluFunction(torch.autograd.Function):
    """act(gate) * up, (..., I). Saves only gate and up for backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return h (..., I) of gate and up (..., I)."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        h = glu_forward(gate.flatten(0, -2), up.flatten(0, -2), activation)
        return h.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up."""
        gate, up = (tensor.flatten(0, -2) for tensor in ctx.saved_tensors)
        dgate = torch.empty_like(gate)
        dup = torch.empty_like(up)
        glu_backward(dh.reshape(gate.shape), gate, up, ctx.activation, dgate, dup)
        return dgate.view(dh.shape), dup.view(dh.shape), None


def glu_forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return h (N, I) of gate and up (N, I), whose rows need not be adjacent in memory."""
    if gate.is_cuda:
        return launch_forward(gate, up, activation)
    if triton_kernels.is_traced:
        return gate.new_empty(gate.shape)
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    p, _ = sigmoid_argument(g, activation)
    return (g * torch.sigmoid(p) * u).to(gate.dtype)


def glu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None = None,
) -> None:
    """Write the gradients of gate and up to dgate and dup (N, I).

    If `h` is given, act(gate) * up is written to it; it may be dh itself.
    """
    if gate.is_cuda:
        return launch_backward(dh, gate, up, activation, dgate, dup, h)
    if triton_kernels.is_traced:
        return None  # nothing is allocated
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), dh.to(wide)
    p, slope = sigmoid_argument(g, activation)
    s = torch.sigmoid(p)
    act = g * s
    dgate.copy_(d * (s + act * (1 - s) * slope) * u)
    dup.copy_(d * act)
    if h is not None:
        h.copy_(act * u)


BLOCK = 1024  # features per program: 8 per thread, one 16-byte load of bfloat16
_SLOPE = tl.constexpr(GELU_SLOPE)
_CUBE = tl.constexpr(GELU_CUBE)


@triton.jit
def argument_and_slope(g, is_gelu: tl.constexpr):
    """p(g) and p'(g)."""
    if is_gelu:
        return _SLOPE * g * (1 + _CUBE * g * g), _SLOPE * (1 + 3 * _CUBE * g * g)
    else:
        return g, tl.full(g.shape, 1.0, tl.float32)


@triton.jit
def _forward_kernel(
    gate, up, h, gate_stride, up_stride, features, is_gelu: tl.constexpr, block: tl.constexpr
):
    row = program_number()
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    g = load_float32(gate + row * gate_stride + columns, inside)
    u = load_float32(up + row * up_stride + columns, inside)
    p, _slope = argument_and_slope(g, is_gelu)
    tl.store(h + row * features + columns, g * tl.sigmoid(p) * u, inside)


@triton.jit
def _backward_kernel(
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
    p, slope = argument_and_slope(g, is_gelu)
    s = tl.sigmoid(p)
    act = g * s
    of_gate, of_up, product = d * (s + act * (1 - s) * slope) * u, d * act, act * u
    tl.store(dgate + row * dgate_stride + columns, of_gate, inside)
    tl.store(dup + row * dup_stride + columns, of_up, inside)
    if with_h:  # h may be dh: each program has already read its part
        tl.store(h + row * features + columns, product, inside)


def launch_forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (N, I)."""
    assert gate.stride(1) == up.stride(1) == 1, "features lie side by side"
    h = gate.new_empty(gate.shape)
    tensors = (gate, up, h)
    sizes = (gate.stride(0), up.stride(0), gate.shape[1])
    _forward_kernel[(len(gate), triton.cdiv(gate.shape[1], BLOCK))](
        *tensors, *sizes, activation == "gelu_tanh", BLOCK
    )
    return h


def launch_backward(
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
    _backward_kernel[(len(gate), triton.cdiv(gate.shape[1], BLOCK))](
        *tensors, *strides, gate.shape[1], *flags, BLOCK
    )
