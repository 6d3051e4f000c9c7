"""The Triton kernel of `compressed`: round weights or inputs as files and servers do.

Imported only on a GPU. The formulas are in `compressed`. A program rounds several groups, one per
row of a tile, and reads them once.

Legend: M groups, G numbers per group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.float8.kernels import on_device_of, program_number

TILE = 4096  # numbers per program, at least one group
WARP_NUMBERS = 1024  # numbers of a tile per warp
_E4M3, _LARGEST = tl.constexpr(448.0), tl.constexpr(2688.0)  # e4m3, and 6 (e2m1) times that
_ONE_APART = tl.constexpr(1.5 * 2**23)  # float32 numbers of this size are one apart


@triton.jit
def _nearest(x):
    """Return x rounded to an integer, halves to even; |x| must be below 2^22."""
    return (x + _ONE_APART) - _ONE_APART


@triton.jit
def _as(x, like):
    """Return x in float32, rounded to the dtype of `like`."""
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _e4m3(x):
    return tl.clamp(x, -_E4M3, _E4M3).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _e2m1(x):
    """Return x rounded to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign; ties go to the even code."""
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    rounded = _nearest(size / step) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _round(
    x,
    output,
    largest_of_all,
    groups,
    group,
    kind: tl.constexpr,
    rows: tl.constexpr,
    padded: tl.constexpr,
):
    """Write `rows` groups of x (M, G), rounded. `largest_of_all` (1,) is read only for nvfp4."""
    row = program_number() * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, padded)[None, :]
    inside = (row < groups) & (column < group)
    stored = tl.load(x + row * group + column, inside, 0)
    wide = stored.to(tl.float32)
    largest = tl.reduce(tl.abs(wide), 1, _larger)[:, None]
    if kind == "nvfp4":
        of_all = tl.load(largest_of_all).to(tl.float32)
        whole = tl.where(of_all > 0, _as(tl.div_rn(_LARGEST, of_all), stored), 1.0)
        scale = _e4m3(whole * _as(tl.div_rn(largest, 6.0), stored))
        scale = tl.div_rn(tl.where(scale == 0, 0.125, scale), whole)
    elif kind == "int4":
        scale = _as(tl.div_rn(largest, 7.5), stored)
    else:
        scale = _as(tl.div_rn(largest, _E4M3), stored)
    scale = tl.where(scale == 0, 1.0, scale)  # for zeros
    code = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape))
    if kind == "nvfp4":
        code = _e2m1(code)
    elif kind == "int4":
        code = _nearest(tl.clamp(code, -8.0, 7.0))
    else:
        code = _e4m3(code)
    tl.store(output + row * group + column, (code * scale).to(stored.dtype), inside)


def rounded(x: Tensor, kind: str, group: int) -> Tensor:
    """Return x (..., I) in 16 bits, rounded in groups of `group` numbers, which must divide I."""
    x = x.contiguous()
    output = torch.empty_like(x)
    largest = x.abs().max() if kind == "nvfp4" else x
    padded = triton.next_power_of_2(group)
    rows = max(1, TILE // padded)
    groups = x.numel() // group
    warps = min(16, max(4, rows * padded // WARP_NUMBERS))
    with on_device_of(x):
        _round[(triton.cdiv(groups, rows),)](
            *(x, output, largest, groups, group, kind, rows, padded), num_warps=warps
        )
    return output
