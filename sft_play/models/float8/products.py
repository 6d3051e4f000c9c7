"""The two products with a frozen float8 weight W, of which row o is W_q[o] * s[o].

    forward         y = x W^T    = (x_q W_q^T) * scale of the token * s
    input gradient  dx = dy W    = ((dy * s)_q W_q) * scale of the token

s stands on the inner dimension of the second one, where no kernel takes it: dy is multiplied by it
before it is quantised.

A GPU multiplies float8 rows by rows: the second product wants W_q^T, which is made in a scratch
buffer each time. That reads and writes a byte of each weight, about 2 % of the product's time at
8,192 tokens; a second copy would take as many bytes as the weights.

Fast accumulation: on Hopper sums are kept to 14 bits instead of 24. The error is some 0.1 % of an
output, and float8's own is 3.7 %; sums in 24 bits take a tenth longer (H200). torchao's row-wise
recipe trains with it too.

Legend: N tokens, `in` and `out` features.
"""

import torch
from torch import Tensor

from sft_play.models.float8.format import Quantised

FAST_ACCUMULATION = True


def product(x: Quantised, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y (N, out) in `dtype` of x (N, in), weight (out, in) and its scales (out,)."""
    if weight.is_cuda:
        return _scaled_mm(x, weight.t(), scales).to(dtype)
    return _reference(x, weight.t(), scales).to(dtype)


def input_product(dy: Quantised, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dx (N, in) in `dtype` of dy (N, out), which the weight's scales have multiplied."""
    ones = torch.ones(weight.shape[1], device=weight.device)
    if weight.is_cuda:
        from sft_play.models.float8 import kernels

        return _scaled_mm(dy, kernels.transposed(weight).t(), ones).to(dtype)
    return _reference(dy, weight, ones).to(dtype)


def _scaled_mm(rows: Quantised, columns: Tensor, scales: Tensor) -> Tensor:
    """Return the product (N, M) in bfloat16; `columns` (K, M) lie side by side in memory.

    Row-wise scales give bfloat16 alone.
    """
    return torch._scaled_mm(
        rows.values,
        columns,
        scale_a=rows.scales[:, None],
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUMULATION,
    )


def _reference(rows: Quantised, columns: Tensor, scales: Tensor) -> Tensor:
    """Return the product (N, M) in float32."""
    with torch.autocast(rows.values.device.type, enabled=False):
        sums = rows.values.float() @ columns.float()
    return sums * rows.scales[:, None] * scales
