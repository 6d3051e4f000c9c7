"""Rows of numbers in float8 (e4m3), each with a scale of its own.

    values = round(x / scale),  scale = max |x| / 448 of a row

Rows are tokens of an activation or of a gradient, and outputs of a weight. A row of zeros has scale
1. e4m3 has 3 bits of mantissa: a number is off by at most 1/17 of itself, unless it is smaller than
1/28,672 of the largest one of its row, below which numbers lie evenly.

Legend: N rows, F features of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # that e4m3 holds
# Sizes of a matrix that torch._scaled_mm takes are multiples of this
MULTIPLE = 16
# What half the numbers of a row may be off by, relative to their size. In e4m3's normal range it is
# 2 to 3 %; more says that an outlier, 40,000 times as large, pushes them below that range.
MAX_ROW_ERROR = 1 / 16
SAMPLED = 1024  # numbers of a row that are looked at


class Quantised(NamedTuple):
    """Rows in float8: x = values * scales."""

    values: Tensor  # (N, F) in FLOAT8
    scales: Tensor  # (N,) float32

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (N, F) in `dtype`."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def quantise(x: Tensor, column_scales: Tensor | None = None) -> Quantised:
    """Return rows x (N, F) in float8, multiplied by `column_scales` (F,) before.

    On a GPU one kernel reads and writes them, elsewhere the reference below does.
    """
    if x.is_cuda:
        from sft_play.models.float8 import kernels  # Triton needs a GPU when it is imported

        return kernels.quantise(x, column_scales)
    return quantise_reference(x, column_scales)


def quantise_reference(x: Tensor, column_scales: Tensor | None = None) -> Quantised:
    """Return the same in plain torch."""
    wide = x.float()
    if column_scales is not None:
        wide = wide * column_scales
    return to_float8(wide)


def to_float8(wide: Tensor) -> Quantised:
    """Return float32 rows (N, F) in float8."""
    largest = wide.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    # torch 2.11 makes NaN of what rounding takes beyond the largest number
    values = (wide / scales[:, None]).clamp(-LARGEST, LARGEST)
    return Quantised(values.to(FLOAT8), scales)


def worst_row_error(weight: Tensor, quantised: Quantised) -> float:
    """Return the largest error of the rows of a weight (N, F): what half its numbers are off by.

    It is relative to what half the numbers are smaller than, so that the outlier itself, which is
    right, does not hide the others. NaN where the weight is not finite; 0 for a row of zeros.
    """
    if not weight.isfinite().all():
        return float("nan")
    step = max(1, weight.shape[1] // SAMPLED)
    wide = weight[:, ::step].float()
    values = quantised.values[:, ::step].float() * quantised.scales[:, None]
    sizes = wide.abs().median(dim=-1).values
    errors = (values - wide).abs().median(dim=-1).values
    return float(torch.where(sizes == 0, errors, errors / sizes).max())


def why_not_quantised(weight: Tensor, quantised: Quantised) -> str | None:
    """Return why a layer keeps its weight (out, in) as it was loaded, None if float8 holds it."""
    error = worst_row_error(weight, quantised)
    if error <= MAX_ROW_ERROR:
        return None
    if error != error:
        return "its weight is not finite"
    return f"outliers: half of a row would be off by {error:.0%}, {MAX_ROW_ERROR:.0%} is most"
