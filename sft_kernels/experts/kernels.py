"""Triton kernels of `products` and `function`.

Legend: N tokens, k experts per token, S = N k rows, H hidden, I intermediate features.
"""

import torch
from torch import Tensor

from sft_kernels.linears.glu import BLOCK, argument_and_slope
from sft_kernels.triton_kernels import load_float32, program_number, tl, triton

Form = tuple[str, float, float]  # an activation, or "clamped"; alpha and limit, if clamped


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
    """Whether a row comes after those of all experts; False without `experts`."""
    last = tl.load(ends + experts - 1, experts > 0, 0)
    return (experts > 0) & (row >= last)


@triton.jit
def _load_gate(y, row, columns, features, is_clamped: tl.constexpr):
    """Gate and up of a row, and their places: two halves, or interleaved if clamped."""
    if is_clamped:
        at_gate = 2 * (row * features + columns)
        at_up = at_gate + 1
    else:
        at_gate = row * 2 * features + columns
        at_up = at_gate + features
    inside = columns < features
    return load_float32(y + at_gate, inside), load_float32(y + at_up, inside), at_gate, at_up


@triton.jit
def _clamped(gate, up, limit):
    return tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _forward(y, h, ends, experts, features, alpha, limit, form: tl.constexpr, block: tl.constexpr):
    row = program_number()
    if _is_last(row, ends, experts):
        return
    columns = tl.program_id(1) * block + tl.arange(0, block)
    g, u, _gate, _up = _load_gate(y, row, columns, features, form == "clamped")
    if form == "clamped":
        g, u = _clamped(g, u, limit)
        value = (u + 1) * g * tl.sigmoid(alpha * g)
    else:
        p, _slope = argument_and_slope(g, form == "gelu_tanh")
        value = g * tl.sigmoid(p) * u
    tl.store(h + row * features + columns, value, columns < features)


@triton.jit
def _backward(
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
    form: tl.constexpr,
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
        d = load_float32(dh + row * features + columns, inside)
        gate, up, at_gate, at_up = _load_gate(y, row, columns, features, form == "clamped")
        if form == "clamped":
            g, u = _clamped(gate, up, limit)
            s = tl.sigmoid(alpha * g)
            value = (u + 1) * g * s
            products += d * value
            d *= weight
            dgate = d * (u + 1) * (s + alpha * g * s * (1 - s))
            dgate = tl.where(gate <= limit, dgate, 0)
            dup = tl.where(tl.abs(up) <= limit, d * g * s, 0)
        else:
            p, slope = argument_and_slope(gate, form == "gelu_tanh")
            s = tl.sigmoid(p)
            act = gate * s
            products += d * act * up
            d *= weight
            dgate = d * (s + act * (1 - s) * slope) * up
            dup = d * act
            value = act * up
        tl.store(dy + at_gate, dgate, inside)
        tl.store(dy + at_up, dup, inside)
        tl.store(h + row * features + columns, value, inside)  # h may be dh, which has been read
    tl.store(dweights + row, tl.sum(products, 0))


def sum_choices_kernel(
    values: Tensor, rows: Tensor, ends: Tensor, weights: Tensor | None
) -> Tensor:
    """Return the sums over choices (N, H); see `products.sum_choices`."""
    tokens, choices = rows.shape
    features = values.shape[1]
    assert values.is_contiguous(), "features lie side by side"
    out = torch.empty(tokens, features, dtype=values.dtype, device=values.device)
    factors = out if weights is None else weights.contiguous()  # not read without weights
    _sum_choices[(tokens, triton.cdiv(features, BLOCK))](
        values,
        rows.contiguous(),
        ends,
        factors,
        out,
        features,
        len(ends),
        choices,
        weights is not None,
        BLOCK,
    )
    return out


def expert_glu_forward(y: Tensor, gate: Form, ends: Tensor | None) -> Tensor:
    """Return h (S, I) of y (S, 2 I)."""
    assert y.is_contiguous(), "features lie side by side"
    rows, features = len(y), y.shape[1] // 2
    h = torch.empty(rows, features, dtype=y.dtype, device=y.device)
    form, alpha, limit = gate
    grid = (rows, triton.cdiv(features, BLOCK))
    _forward[grid](y, h, *_last(y, ends), features, alpha, limit, form, BLOCK)
    return h


def expert_glu_backward(
    dh: Tensor, y: Tensor, weights: Tensor, gate: Form, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy (S, 2 I), the gradients of the weights (S,) and h (S, I), which overwrites dh."""
    assert dh.is_contiguous() and y.is_contiguous(), "features lie side by side"
    dy = torch.empty_like(y)
    dweights = torch.empty(len(dh), dtype=torch.float32, device=dh.device)
    form, alpha, limit = gate
    tensors = (dh, y, weights, dy, dh, dweights, *_last(y, ends))
    _backward[(len(dh),)](*tensors, dh.shape[1], alpha, limit, form, BLOCK)
    return dy, dweights, dh


def _last(y: Tensor, ends: Tensor | None) -> tuple[Tensor, int]:
    return (y, 0) if ends is None else (ends, len(ends))
