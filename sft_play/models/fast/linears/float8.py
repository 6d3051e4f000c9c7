"""The frozen part of LoRA linears over float8 weights; the formulas are in `models.float8`.

LoRA's thin products read the input as it was, and are added to what the float8 product has rounded
to 16 bits.

Legend: N tokens, `in` and `out` features.
"""

import torch
from torch import Tensor

from sft_play.models.float8.format import Quantised
from sft_play.models.float8.products import input_product, product
from sft_play.models.float8.quantise import quantise


def float8_output(
    x: Quantised, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return y (N, out) in `dtype`, without an adapter's part."""
    y = product(x, weight, scales, dtype)
    return y if bias is None else y.add_(bias)


def add_input_gradient(
    dx: Tensor | None, dy: Tensor, weight: Tensor, scales: Tensor, known: Quantised | None
) -> Tensor:
    """Return dx (N, in), with the part of dy (N, out) added to it.

    `known` is dy in float8, where the kernel that computed it has quantised it.
    """
    if known is None:
        known = quantise(dy, scales)
    part = input_product(known, weight, dy.dtype)
    return part if dx is None else dx.add_(part)
