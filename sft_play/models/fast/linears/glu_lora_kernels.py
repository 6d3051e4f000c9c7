"""Triton kernels of `glu` where the adapters' parts of its inputs are added in the same pass.

A tile of tokens and features is read once; the products of the adapters' thin matrices are added
to it in registers, by the matrix units. Imported only on a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.fast.linears.activations import Activation
from sft_play.models.fast.linears.glu_kernels import gradients, sigmoid_argument
from sft_play.models.fast.linears.products import LowRank
from sft_play.models.float8.kernels import on_device_of

# Tokens and features of a tile, and its warps
FORWARD_TILE = (32, 128, 4)
BACKWARD_TILE = (32, 128, 8)
RANKS = 64  # at most so many columns of the thin matrices at a time
LEAST_RANKS = 16  # that the matrix units take


@triton.jit
def _add_part(
    x,
    part,
    tokens,
    columns,
    rows,
    features,
    rank: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    """x + scale * left @ right^T, of a tile."""
    x = x.to(tl.float32)
    if rank == 0:
        return x
    else:
        left, right, left_stride, right_stride, rank_stride, scale = part
        total = tl.zeros(x.shape, tl.float32)
        for start in tl.static_range(0, rank, block):
            k = start + tl.arange(0, block)
            at = tokens[:, None] * left_stride + k[None, :]
            a = tl.load(left + at, (tokens[:, None] < rows) & (k[None, :] < rank), 0)
            at = columns[None, :] * right_stride + k[:, None] * rank_stride
            b = tl.load(right + at, (columns[None, :] < features) & (k[:, None] < rank), 0)
            total = tl.dot(a, b, total, input_precision=precision)
        return x + scale * total


@triton.jit
def _forward(
    gate,
    up,
    h,
    gate_stride,
    up_stride,
    gate_part,
    up_part,
    rows,
    features,
    gate_rank: tl.constexpr,
    gate_block: tl.constexpr,
    up_rank: tl.constexpr,
    up_block: tl.constexpr,
    is_gelu: tl.constexpr,
    precision: tl.constexpr,
    token_block: tl.constexpr,
    feature_block: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * feature_block + tl.arange(0, feature_block)
    tokens = tl.program_id(1).to(tl.int64) * token_block + tl.arange(0, token_block)
    inside = (tokens[:, None] < rows) & (columns[None, :] < features)
    g = tl.load(gate + tokens[:, None] * gate_stride + columns[None, :], inside, 0)
    u = tl.load(up + tokens[:, None] * up_stride + columns[None, :], inside, 0)
    places = (tokens, columns, rows, features)
    g = _add_part(g, gate_part, *places, gate_rank, gate_block, precision)
    u = _add_part(u, up_part, *places, up_rank, up_block, precision)
    p, _slope = sigmoid_argument(g, is_gelu)
    tl.store(h + tokens[:, None] * features + columns[None, :], g * tl.sigmoid(p) * u, inside)


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
    gate_part,
    up_part,
    dh_part,
    rows,
    features,
    gate_rank: tl.constexpr,
    gate_block: tl.constexpr,
    up_rank: tl.constexpr,
    up_block: tl.constexpr,
    dh_rank: tl.constexpr,
    dh_block: tl.constexpr,
    is_gelu: tl.constexpr,
    precision: tl.constexpr,
    token_block: tl.constexpr,
    feature_block: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * feature_block + tl.arange(0, feature_block)
    tokens = tl.program_id(1).to(tl.int64) * token_block + tl.arange(0, token_block)
    inside = (tokens[:, None] < rows) & (columns[None, :] < features)
    at = tokens[:, None] * features + columns[None, :]
    d = tl.load(dh + at, inside, 0)
    g = tl.load(gate + tokens[:, None] * gate_stride + columns[None, :], inside, 0)
    u = tl.load(up + tokens[:, None] * up_stride + columns[None, :], inside, 0)
    places = (tokens, columns, rows, features)
    g = _add_part(g, gate_part, *places, gate_rank, gate_block, precision)
    u = _add_part(u, up_part, *places, up_rank, up_block, precision)
    d = _add_part(d, dh_part, *places, dh_rank, dh_block, precision)
    of_gate, of_up, product = gradients(d, g, u, is_gelu)
    tl.store(dgate + tokens[:, None] * dgate_stride + columns[None, :], of_gate, inside)
    tl.store(dup + tokens[:, None] * dup_stride + columns[None, :], of_up, inside)
    tl.debug_barrier()  # h may be dh, of which other threads have read what this one writes
    tl.store(h + at, product, inside)


def forward(
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    gate_part: LowRank | None,
    up_part: LowRank | None,
) -> Tensor:
    """Return act(gate) * up, (N, I), with the adapters' parts added to gate and up before."""
    assert gate.stride(1) == up.stride(1) == 1, "features lie side by side"
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    parts = [_arguments(gate, part) for part in (gate_part, up_part)]
    token_block, feature_block, warps = FORWARD_TILE
    with on_device_of(gate):
        _forward[_grid(gate, token_block, feature_block)](
            *(gate, up, h, gate.stride(0), up.stride(0)),
            *(part for part, _ in parts),
            *gate.shape,
            *(size for _, sizes in parts for size in sizes),
            *(activation == "gelu_tanh", _precision(gate), token_block, feature_block),
            num_warps=warps,
        )
    return h


def backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor,
    gate_part: LowRank | None,
    up_part: LowRank | None,
    dh_part: LowRank | None,
) -> None:
    """Write dgate, dup and h, all (N, I); the adapters' parts are added to what is read."""
    assert dh.is_contiguous() and h.is_contiguous(), "rows lie side by side"
    inputs_and_gradients = (gate, up, dgate, dup)
    are_adjacent = all(tensor.stride(1) == 1 for tensor in inputs_and_gradients)
    assert are_adjacent, "features lie side by side"
    parts = [_arguments(gate, part) for part in (gate_part, up_part, dh_part)]
    token_block, feature_block, warps = BACKWARD_TILE
    with on_device_of(gate):
        _backward[_grid(gate, token_block, feature_block)](
            *(dh, *inputs_and_gradients, h),
            *(tensor.stride(0) for tensor in inputs_and_gradients),
            *(part for part, _ in parts),
            *gate.shape,
            *(size for _, sizes in parts for size in sizes),
            *(activation == "gelu_tanh", _precision(gate), token_block, feature_block),
            num_warps=warps,
        )


def _arguments(x: Tensor, part: LowRank | None) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Return the thin matrices with strides and scale, and the rank and its block."""
    if part is None:
        return (x, x, 0, 0, 0, 0.0), (0, LEAST_RANKS)
    left, right, scale = part
    assert left.stride(1) == 1, "ranks lie side by side"
    rank = left.shape[1]
    block = min(RANKS, max(LEAST_RANKS, triton.next_power_of_2(rank)))
    return (left, right, left.stride(0), *right.stride(), scale), (rank, block)


def _precision(x: Tensor) -> str:
    """Return how the matrix units multiply float32: not in TF32, which rounds to 10 bits."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _grid(x: Tensor, token_block: int, feature_block: int) -> tuple[int, int]:
    return triton.cdiv(x.shape[1], feature_block), triton.cdiv(x.shape[0], token_block)
