"""Triton kernels of `residual`, one program per token. Imported only on a GPU.

`kind` is a `residual.NormKind`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.float8.kernels import load_float32, program_number

FEATURES_PER_WARP = 512  # 16 per thread: two 16-byte loads of bfloat16


@triton.jit
def _forward(
    x,
    residual,
    weight,
    y,
    s,
    inverse,
    features,
    eps,
    offset,
    is_gemma: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    columns = tl.arange(0, block)
    inside = columns < features
    at = row * features + columns
    stream = tl.load(x + at, inside, 0)
    if has_residual:  # the norm reads the rounded sum, as a norm by itself does
        added = load_float32(residual + at, inside)
        stream = (stream.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(s + at, stream, inside)
    wide = stream.to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(wide * wide, 0) / features + eps)
    tl.store(inverse + row, factor)
    normed = wide * factor
    if not is_gemma:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    scale = load_float32(weight + columns, inside) + offset
    tl.store(y + at, (normed * scale).to(y.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy,
    ds,
    s,
    weight,
    inverse,
    dx,
    features,
    offset,
    block: tl.constexpr,
):
    row = program_number()
    columns = tl.arange(0, block)
    inside = columns < features
    factor = tl.load(inverse + row)
    at = row * features + columns
    n = load_float32(s + at, inside) * factor
    scale = load_float32(weight + columns, inside) + offset
    m = load_float32(dy + at, inside) * scale
    stream = load_float32(ds + at, inside)
    mean = tl.sum(m * n, 0) / features
    tl.store(dx + at, stream + factor * (m - n * mean), inside)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and s (..., H), and 1 / rms(s) (N,) float32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    s = x
    if residual is not None:
        residual = residual.to(x.dtype).contiguous()
        s = torch.empty_like(x)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    features, block, warps = _sizes(x)
    tensors = (x, residual, weight, y, s, inverse)
    flags = (kind.casting == "gemma", residual is not None)
    _forward[(inverse.numel(),)](
        *tensors, features, eps, kind.offset, *flags, block, num_warps=warps
    )
    return y, s, inverse


def backward(
    dy: Tensor,
    ds: Tensor,
    s: Tensor,
    weight: Tensor,
    inverse: Tensor,
    kind: Any,
) -> Tensor:
    """Return dx (..., H)."""
    dx = torch.empty_like(s)
    features, block, warps = _sizes(s)
    dy, ds = dy.contiguous(), ds.contiguous()
    tensors = (dy, ds, s, weight, inverse, dx)
    sizes = (features, kind.offset, block)
    _backward[(inverse.numel(),)](*tensors, *sizes, num_warps=warps)
    return dx


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the number of features per token, their block size, and its number of warps."""
    features = x.shape[-1]
    block = triton.next_power_of_2(features)
    return features, block, min(32, max(1, block // FEATURES_PER_WARP))
