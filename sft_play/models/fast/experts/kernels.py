"""Triton kernels of `products` and `function`. Imported only on a GPU.

Legend: N tokens, k experts of a token, S = N k rows, H hidden, I intermediate features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.fast.linears.activations import Activation
from sft_play.models.fast.linears.glu_kernels import BLOCK, sigmoid_argument
from sft_play.models.float8.kernels import load_float32, program_number


@triton.jit
def _sum_choices(
    values,
    rows,
    ends,
    weights,
    out,
    features,
    experts,
    choices: tl.constexpr,
    has_weights: tl.constexpr,
    block: tl.constexpr,
):
    token = program_number()
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    last = tl.load(ends + experts - 1)
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):
        row = tl.load(rows + token * choices + choice)
        value = load_float32(values + row * features + columns, inside & (row < last))
        if has_weights:
            value *= tl.load(weights + token * choices + choice).to(tl.float32)
        total += value
    tl.store(out + token * features + columns, total, inside)


@triton.jit
def _is_last(row, ends, experts):
    """Whether a row lies behind those of all experts; never without `experts`."""
    last = tl.load(ends + experts - 1, experts > 0, 0)
    return (experts > 0) & (row >= last)


@triton.jit
def _glu_forward(y, h, ends, experts, features, is_gelu: tl.constexpr, block: tl.constexpr):
    row = program_number()
    if _is_last(row, ends, experts):
        return
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    at_gate = row * 2 * features + columns
    g = load_float32(y + at_gate, inside)
    u = load_float32(y + at_gate + features, inside)
    p, _ = sigmoid_argument(g, is_gelu)
    tl.store(h + row * features + columns, g * tl.sigmoid(p) * u, inside)


@triton.jit
def _glu_backward(
    dh,
    y,
    weights,
    dy,
    h,
    dweights,
    ends,
    experts,
    features,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    if _is_last(row, ends, experts):
        return
    weight = tl.load(weights + row)
    products = tl.zeros((block,), tl.float32)
    for start in range(0, features, block):
        columns = start + tl.arange(0, block)
        inside = columns < features
        at_gate = row * 2 * features + columns
        at_up = at_gate + features
        d = load_float32(dh + row * features + columns, inside)
        g = load_float32(y + at_gate, inside)
        u = load_float32(y + at_up, inside)
        p, slope = sigmoid_argument(g, is_gelu)
        s = tl.sigmoid(p)
        act = g * s
        products += d * act * u
        d *= weight
        tl.store(dy + at_gate, d * (s + act * (1 - s) * slope) * u, inside)
        tl.store(dy + at_up, d * act, inside)
        tl.store(h + row * features + columns, act * u, inside)  # h may be dh, which has been read
    tl.store(dweights + row, tl.sum(products, 0))


@triton.jit
def _clamped_glu_forward(y, h, ends, experts, features, alpha, limit, block: tl.constexpr):
    row = program_number()
    if _is_last(row, ends, experts):
        return
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < features
    at_gate = 2 * (row * features + columns)
    g = tl.minimum(load_float32(y + at_gate, inside), limit)
    u = load_float32(y + at_gate + 1, inside)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    tl.store(h + row * features + columns, (u + 1) * g * tl.sigmoid(alpha * g), inside)


@triton.jit
def _clamped_glu_backward(
    dh,
    y,
    weights,
    dy,
    h,
    dweights,
    ends,
    experts,
    features,
    alpha,
    limit,
    block: tl.constexpr,
):
    row = program_number()
    if _is_last(row, ends, experts):
        return
    weight = tl.load(weights + row)
    products = tl.zeros((block,), tl.float32)
    for start in range(0, features, block):
        columns = start + tl.arange(0, block)
        inside = columns < features
        at_gate = 2 * (row * features + columns)
        d = load_float32(dh + row * features + columns, inside)
        gate = load_float32(y + at_gate, inside)
        up = load_float32(y + at_gate + 1, inside)
        g = tl.minimum(gate, limit)
        u = tl.minimum(tl.maximum(up, -limit), limit)
        s = tl.sigmoid(alpha * g)
        value = (u + 1) * g * s
        products += d * value
        d *= weight
        dgate = d * (u + 1) * (s + alpha * g * s * (1 - s))
        tl.store(dy + at_gate, tl.where(gate <= limit, dgate, 0), inside)
        tl.store(dy + at_gate + 1, tl.where(tl.abs(up) <= limit, d * g * s, 0), inside)
        tl.store(h + row * features + columns, value, inside)
    tl.store(dweights + row, tl.sum(products, 0))


def sum_choices(values: Tensor, rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums over choices (N, H); see `products.sum_choices`."""
    tokens, choices = rows.shape
    features = values.shape[1]
    assert values.is_contiguous(), "features lie side by side"
    out = torch.empty(tokens, features, dtype=values.dtype, device=values.device)
    factors = out if weights is None else weights.contiguous()  # not read without weights
    _sum_choices[(tokens, triton.cdiv(features, BLOCK))](
        *(values, rows.contiguous(), ends, factors, out, features, len(ends)),
        *(choices, weights is not None, BLOCK),
    )
    return out


def glu_forward(y: Tensor, activation: Activation, ends: Tensor | None) -> Tensor:
    """Return h (S, I) of y (S, 2 I)."""
    h, grid = _gated(y)
    is_gelu = activation == "gelu_tanh"
    _glu_forward[grid](y, h, *_last(y, ends), h.shape[1], is_gelu, BLOCK)
    return h


def glu_backward(
    dh: Tensor, y: Tensor, weights: Tensor, activation: Activation, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy (S, 2 I), the gradients of the weights (S,) and h (S, I), which overwrites dh."""
    dy, dweights = _gradients(dh, y)
    tensors = (dh, y, weights, dy, dh, dweights, *_last(y, ends))
    _glu_backward[(len(dh),)](*tensors, dh.shape[1], activation == "gelu_tanh", BLOCK)
    return dy, dweights, dh


def clamped_glu_forward(y: Tensor, alpha: float, limit: float, ends: Tensor | None) -> Tensor:
    """Return h (S, I) of y (S, 2 I)."""
    h, grid = _gated(y)
    _clamped_glu_forward[grid](y, h, *_last(y, ends), h.shape[1], alpha, limit, BLOCK)
    return h


def clamped_glu_backward(
    dh: Tensor, y: Tensor, weights: Tensor, alpha: float, limit: float, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy (S, 2 I), the gradients of the weights (S,) and h (S, I), which overwrites dh."""
    dy, dweights = _gradients(dh, y)
    tensors = (dh, y, weights, dy, dh, dweights, *_last(y, ends))
    _clamped_glu_backward[(len(dh),)](*tensors, dh.shape[1], alpha, limit, BLOCK)
    return dy, dweights, dh


def _last(y: Tensor, ends: Tensor | None) -> tuple[Tensor, int]:
    return (y, 0) if ends is None else (ends, len(ends))


def _gated(y: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the memory for h (S, I) of y (S, 2 I), and the grid that fills it."""
    assert y.is_contiguous(), "features lie side by side"
    rows, features = len(y), y.shape[1] // 2
    h = torch.empty(rows, features, dtype=y.dtype, device=y.device)
    return h, (rows, triton.cdiv(features, BLOCK))


def _gradients(dh: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the memory for the gradients of y (S, 2 I) and of the weights (S,)."""
    assert dh.is_contiguous() and y.is_contiguous(), "features lie side by side"
    return torch.empty_like(y), torch.empty(len(dh), dtype=torch.float32, device=dh.device)
