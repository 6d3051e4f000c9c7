"""The Triton kernel of `columns`: many small matrices to rows of others. Imported only on a GPU."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft_play.models.float8.kernels import on_device_of

BLOCK = 2048  # numbers of a program at a time
PROGRAMS = 16  # of a matrix


@triton.jit
def _write(sources, targets, columns, strides, sizes, scales, like, block: tl.constexpr):
    """Write matrix by matrix; `like` is a tensor of their dtype."""
    matrix = tl.program_id(0).to(tl.int64)
    width = tl.load(columns + matrix)
    size = tl.load(sizes + matrix)
    source = tl.load(sources + matrix).to(tl.pointer_type(like.dtype.element_ty))
    target = tl.load(targets + matrix).to(tl.pointer_type(like.dtype.element_ty))
    scale = tl.load(scales + matrix)
    stride = tl.load(strides + matrix)
    for start in range(tl.program_id(1) * block, size, tl.num_programs(1) * block):
        at = start + tl.arange(0, block)
        inside = at < size
        row = at // width
        value = tl.load(source + at, inside, 0).to(tl.float32) * scale
        place = row.to(tl.int64) * stride + at % width
        tl.store(target + place, value.to(like.dtype.element_ty), inside)


def table_of(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scales: Sequence[float]
) -> tuple[Tensor, ...]:
    """Return what the kernel reads of M matrices, (M,) each: on their device."""
    for source, target in zip(sources, targets, strict=True):
        assert source.is_contiguous() and target.stride(1) == 1, "numbers of a row lie apart"
        assert source.shape == target.shape and source.dtype == target.dtype, "other matrices"
    columns = [source.shape[1] for source in sources]
    strides = [target.stride(0) for target in targets]
    sizes = [source.numel() for source in sources]
    lists = (
        ([source.data_ptr() for source in sources], torch.int64),
        ([target.data_ptr() for target in targets], torch.int64),
        (columns, torch.int32),
        (strides, torch.int64),
        (sizes, torch.int32),
        (scales, torch.float32),
    )
    device = sources[0].device
    return tuple(torch.tensor(numbers, dtype=dtype, device=device) for numbers, dtype in lists)


def write(table: tuple[Tensor, ...], like: Tensor) -> None:
    """Write the matrices of a table; `like` is one of them."""
    with on_device_of(like):
        _write[(len(table[0]), PROGRAMS)](*table, like, BLOCK)
