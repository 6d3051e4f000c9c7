"""Rows of numbers in float8 (e4m3) that each have a scale, and the Triton kernels that write them.

The formulas are in `quantize`. Each program quantizes one row. It finds the
largest number, then reads the row again, which is then in the cache. NaN stays NaN, so that a
diverging loss is visible.

Legend: N rows, F features per row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sft_kernels.triton_kernels import load_float32, on_device_of, program_number, tl, triton

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest e4m3 number
# Scales are multiplied by it. On a GPU, torch does the same when a tensor is divided by a number.
ONE_OVER_LARGEST = 1 / LARGEST


class Quantized(NamedTuple):
    """Rows in float8: x = values * scales."""

    values: Tensor  # (N, F) in FLOAT8
    scales: Tensor  # (N,) float32

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (N, F) in `dtype`."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


BLOCK = 2048  # features at a time: 8 per thread, one 16-byte load of bfloat16
TILE = 128  # rows and columns of a weight that a program transposes
_LARGEST = tl.constexpr(LARGEST)
_ONE_OVER_LARGEST = tl.constexpr(ONE_OVER_LARGEST)


@triton.jit
def _load(x, columns, offsets, features, has_columns: tl.constexpr):
    inside = offsets < features
    value = load_float32(x + offsets, inside)
    if has_columns:
        value = value * tl.load(columns + offsets, inside, 0)
    return value


@triton.jit
def _quantize(
    x, columns, values, scales, stride, features, has_columns: tl.constexpr, block: tl.constexpr
):
    row = program_number()
    x += row * stride
    largest = tl.zeros((block,), tl.float32)
    for start in range(0, features, block):
        offsets = start + tl.arange(0, block)
        value = _load(x, columns, offsets, features, has_columns)
        largest = tl.maximum(largest, tl.abs(value))
    largest = tl.max(largest, 0)
    scale = tl.where(largest > 0, largest * _ONE_OVER_LARGEST, 1.0)  # 1 for zeros and NaN
    tl.store(scales + row, scale)
    values += row * features
    for start in range(0, features, block):
        offsets = start + tl.arange(0, block)
        value = _load(x, columns, offsets, features, has_columns)
        scaled = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        scaled = tl.where(scaled > _LARGEST, _LARGEST, scaled)
        scaled = tl.where(scaled < -_LARGEST, -_LARGEST, scaled)
        tl.store(values + offsets, scaled.to(values.dtype.element_ty), offsets < features)


@triton.jit
def _transpose(source, target, rows, columns, tile: tl.constexpr):
    row = program_number() * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    part = tl.load(source + row[:, None] * columns + column[None, :], inside, 0)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(part), inside)


def quantize_rows(x: Tensor, column_scales: Tensor | None = None) -> Quantized:
    """Return rows x (N, F) in float8, after multiplying them by `column_scales` (F,)."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, features = x.shape
    values = torch.empty(rows, features, dtype=FLOAT8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    has_columns = column_scales is not None
    columns = column_scales if has_columns else scales  # not read
    with on_device_of(x):
        tensors = (x, columns, values, scales)
        _quantize[(rows,)](*tensors, x.stride(0), features, has_columns, BLOCK, num_warps=8)
    return Quantized(values, scales)


def transposed(weight: Tensor) -> Tensor:
    """Return a float8 weight (out, in) as (in, out), in new memory."""
    rows, columns = weight.shape
    target = torch.empty(columns, rows, dtype=FLOAT8, device=weight.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    with on_device_of(weight):
        parts = (weight.contiguous().view(torch.uint8), target.view(torch.uint8))
        _transpose[grid](*parts, rows, columns, TILE)
    return target
