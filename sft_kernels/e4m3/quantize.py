"""Convert to float8 (e4m3), with a scale per row, and multiply such rows.

    values = round(x / scale),  scale = max |x| / 448 of a row

Rows are tokens of an activation or of a gradient, and outputs of a weight. A row of zeros has scale
1. e4m3 has 3 bits of mantissa: the error of a number is at most 1/17 of it. This does not apply to
numbers smaller than 1/28,672 of the row's largest number, where e4m3's numbers are evenly spaced.

The two matrix multiplications with a frozen float8 weight W, of which row o is W_q[o] * s[o]:

    forward         y = x W^T    = (x_q W_q^T) * scale of the token * s
    input gradient  dx = dy W    = ((dy * s)_q W_q) * scale of the token

In the second one, s is on the inner dimension, where no kernel supports it. So dy is multiplied by
s before it is quantized.

A GPU multiplies float8 rows by rows. The second multiplication needs W_q^T, which is written to a
scratch buffer each time. That reads and writes one byte per weight, about 2 % of the
multiplication's time at 8,192 tokens.

Fast accumulation: on Hopper, sums have 14 bits instead of 24. The error is about 0.1 % of an
output, while float8's error is 3.7 %. Sums in 24 bits take a tenth longer (H200).

Legend: N rows or tokens, F features per row, `in` and `out` features of a weight.
"""

import torch
from torch import Tensor

from sft_kernels import triton_kernels
from sft_kernels.e4m3 import rows
from sft_kernels.e4m3.rows import FLOAT8, LARGEST, ONE_OVER_LARGEST, Quantized

# The maximum relative error of half the numbers of a row. In e4m3's normal range it is 2 to 3 %. A
# larger error means that an outlier, 40,000 times as large, pushes them below that range.
MAX_ROW_ERROR = 1 / 16
SCALES = 8  # scales per octave that are tried for a weight's row
SCALED_AT_A_TIME = 1 << 24  # weights; the trials make copies
SAMPLED = 1024  # numbers per row that are inspected


def quantize(x: Tensor, column_scales: Tensor | None = None) -> Quantized:
    """Return rows x (N, F) in float8, after multiplying them by `column_scales` (F,).

    On a GPU, one kernel reads and writes them. On other devices, the reference below is used.
    """
    if x.is_cuda:
        return rows.quantize_rows(x, column_scales)
    if triton_kernels.is_traced:
        scales = x.new_empty(len(x), dtype=torch.float32)
        return Quantized(torch.empty_like(x, dtype=FLOAT8), scales)
    return quantize_reference(x, column_scales)


def quantize_reference(x: Tensor, column_scales: Tensor | None = None) -> Quantized:
    """Return the same as `quantize`, in plain torch."""
    wide = x.float()
    if column_scales is not None:
        wide = wide * column_scales
    return to_float8(wide)


def to_float8(wide: Tensor) -> Quantized:
    """Return float32 rows (N, F) in float8."""
    largest = wide.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest * ONE_OVER_LARGEST, 1.0)
    # torch 2.11 turns numbers that round beyond the largest number into NaN
    values = (wide / scales[:, None]).clamp(-LARGEST, LARGEST)
    return Quantized(values.to(FLOAT8), scales)


def quantize_weight(weight: Tensor) -> Quantized:
    """Return a weight (N, F) in float8, each row with the scale that has the smallest error.

    A scale larger than that of the largest number shifts a row relative to the steps of e4m3. The
    best scale of an octave removes a seventh of the squared error.
    """
    parts = []
    for some in weight.split(max(1, SCALED_AT_A_TIME // weight.shape[1])):
        parts.append(_best_scaled(some.float()))
    return Quantized(
        torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    )


def _best_scaled(wide: Tensor) -> Quantized:
    """Return float32 rows with the best of SCALES scales."""
    best = to_float8(wide)
    least = (best.dequantized(torch.float32) - wide).square().sum(-1)
    smallest = best.scales
    for number in range(1, SCALES):
        scales = smallest * 2 ** (number / SCALES)
        values = (wide / scales[:, None]).to(FLOAT8)
        error = (Quantized(values, scales).dequantized(torch.float32) - wide).square().sum(-1)
        is_less = error < least
        least = torch.where(is_less, error, least)
        best = Quantized(
            torch.where(
                is_less[:, None], values.view(torch.uint8), best.values.view(torch.uint8)
            ).view(FLOAT8),
            torch.where(is_less, scales, best.scales),
        )
    return best


def worst_row_error(weight: Tensor, quantized: Quantized) -> float:
    """Return the largest error of the rows of a weight (N, F): the error of half its numbers.

    It is relative to the size that half the numbers are below. So the outlier itself, which is
    right, does not hide the other numbers. NaN if the weight is not finite; 0 for a row of zeros.
    """
    if not weight.isfinite().all():
        return float("nan")
    step = max(1, weight.shape[1] // SAMPLED)
    wide = weight[:, ::step].float()
    values = quantized.values[:, ::step].float() * quantized.scales[:, None]
    sizes = wide.abs().median(dim=-1).values
    errors = (values - wide).abs().median(dim=-1).values
    return float(torch.where(sizes == 0, errors, errors / sizes).max())


def why_not_quantized(weight: Tensor, quantized: Quantized) -> str | None:
    """Return why a layer keeps its loaded weight (out, in), None if float8 can represent it."""
    error = worst_row_error(weight, quantized)
    if error <= MAX_ROW_ERROR:
        return None
    if error != error:
        return "its weight is not finite"
    return f"outliers: half of a row would be off by {error:.0%}, {MAX_ROW_ERROR:.0%} is most"


def float8_product(x: Quantized, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y (N, out) in `dtype` of x (N, in), weight (out, in) and its scales (out,)."""
    if weight.is_cuda:
        return _scaled_mm(x, weight.t(), scales).to(dtype)
    if triton_kernels.is_traced:
        return scales.new_empty(len(x.scales), len(weight), dtype=dtype)
    return _reference(x, weight.t(), scales).to(dtype)


def input_product(dy: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dx (N, in) in `dtype`, from dy (N, out) already multiplied by the weight's scales."""
    if triton_kernels.is_traced:
        transposed = torch.empty_like(weight)
        dx = dy.scales.new_empty(len(dy.scales), weight.shape[1], dtype=dtype)
        del transposed
        return dx
    ones = torch.ones(weight.shape[1], device=weight.device)
    if weight.is_cuda:
        return _scaled_mm(dy, rows.transposed(weight).t(), ones).to(dtype)
    return _reference(dy, weight, ones).to(dtype)


def _scaled_mm(rows: Quantized, columns: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix product (N, M) in bfloat16; `columns` (K, M) are contiguous in memory.

    With row-wise scales, torch returns only bfloat16.
    """
    return torch._scaled_mm(
        rows.values,
        columns,
        scale_a=rows.scales[:, None],
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _reference(rows: Quantized, columns: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix product (N, M) in float32."""
    with torch.autocast(rows.values.device.type, enabled=False):
        sums = rows.values.float() @ columns.float()
    return sums * rows.scales[:, None] * scales
