"""Gradients of adapters: dU_i and dB_i in one pass over dy_i.

    dU_i = s dy_i B_i            (N, r)
    dB_i = s dy_i^T (x A_i^T)    (out_i, r)

Each is a thin matrix multiplication, whose time is that of reading dy. Two multiplications read dy
twice. On a Hopper GPU, each program reads a block of rows and columns of dy, one tile at a time,
and accumulates both gradients. A second kernel adds the programs' sums, in float32 and always in
the same order. All linears must have equal ranks and scales, and the ranks must be small. Otherwise
`products` runs two matrix multiplications, which are the reference. Both ways round a sum once.

Legend: N rows, R the sum of the ranks r of all linears that share an input, `out_i` features of
dy_i, P the rank in tl.dot, padded with zeros beyond r.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from sft_kernels.needs import HOPPER
from sft_kernels.triton_kernels import program_number, tl, triton

# A of all linears stacked (R, in), then each B (out, r), in the dtype of the matrix
# multiplications; () without adapters
Factors = Sequence[Tensor]
MOST_SHARING = 3  # linears that share an input: those of queries, keys and values
# The minimum for tl.dot. With 32, writing and adding the sums of a pass took as long on an H200 as
# reading dy again.
LARGEST_RANK = 16
ALIGNMENT = 16  # bytes that a pass over dy loads at once
ROWS = 64  # of a tile of dy
COLUMNS = 512  # of a tile of dy
STAGES = 3  # tiles loaded ahead: as many as fit into a Hopper GPU's shared memory
SUM_ROWS = 16  # rows per program that adds sums
_AT_ONCE = tl.constexpr(8)  # sums that it loads at once


@triton.jit
def _of_linear(linear, first, second, third):
    """Select one of three numbers or addresses by the index of a linear."""
    return tl.where(linear == 0, first, tl.where(linear == 1, second, third))


@triton.jit(do_not_specialize=["end_0", "end_1", "rows", "region_rows"])
def _read(
    dy_0,
    dy_1,
    dy_2,
    b_0,
    b_1,
    b_2,
    stride_0,
    stride_1,
    stride_2,
    out_0,
    out_1,
    out_2,
    end_0,
    end_1,
    xa,
    sums_u,
    sums_b,
    xa_stride,
    rank,
    rows,
    region_rows,
    padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Write the sums of a block of columns and a region of rows.

    dy_i and b_i are addresses of tensors with the dtype of xa. sums_u (blocks, N, P) and sums_b
    (regions, out_0 + out_1 + out_2, P) are float32.
    """
    block = program_number()
    region = tl.program_id(1)
    linear = (block >= end_0).to(tl.int32) + (block >= end_1).to(tl.int32)
    pointer = tl.pointer_type(xa.dtype.element_ty)
    dy = tl.multiple_of(_of_linear(linear, dy_0, dy_1, dy_2).to(pointer), 16)
    b = tl.multiple_of(_of_linear(linear, b_0, b_1, b_2).to(pointer), 16)
    stride = _of_linear(linear, stride_0, stride_1, stride_2)
    out = _of_linear(linear, out_0, out_1, out_2)
    outs_before = _of_linear(linear, 0, out_0, out_0 + out_1)
    column = (block - _of_linear(linear, 0, end_0, end_1)) * tile_columns
    column += tl.arange(0, tile_columns)
    ranks = tl.arange(0, padded)[None, :]
    is_rank = ranks < rank
    is_column = column < out
    b_tile = tl.load(b + column[:, None] * rank + ranks, is_column[:, None] & is_rank, 0.0)
    db = tl.full((tile_columns, padded), 0, tl.float32)
    first = region * region_rows
    for start in range(first, tl.minimum(first + region_rows, rows), tile_rows):
        row = (start + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
        is_row = row < rows
        tile = tl.load(dy + row * stride + column[None, :], is_row & is_column[None, :], 0.0)
        xa_tile = tl.load(xa + row * xa_stride + linear * rank + ranks, is_row & is_rank, 0.0)
        du = tl.dot(tile, b_tile)
        tl.store(sums_u + (block * rows + row) * padded + ranks, du, is_row)
        db = tl.dot(tl.trans(tile), xa_tile, db)
    place = region.to(tl.int64) * (out_0 + out_1 + out_2) + outs_before + column
    tl.store(sums_b + place[:, None] * padded + ranks, db, is_column[:, None])


@triton.jit
def _plus(one, other):
    return one + other


@triton.jit
def _sum_of(sums, first_row, rows, first, end, padded: tl.constexpr, sum_rows: tl.constexpr):
    """The sum (sum_rows, P) of sums[first:end], (rows, P) each, from `first_row` on."""
    size = rows.to(tl.int64) * padded
    row = (first_row + tl.arange(0, sum_rows))[None, :, None]
    place = row * padded + tl.arange(0, padded)[None, None, :]
    total = tl.full((_AT_ONCE, sum_rows, padded), 0, tl.float32)
    for start in range(first, end, _AT_ONCE):
        each = (start + tl.arange(0, _AT_ONCE))[:, None, None]
        total += tl.load(sums + each * size + place, (each < end) & (row < rows), 0.0)
    return tl.reduce(total, 0, _plus)


@triton.jit(do_not_specialize=["end_0", "end_1", "end_2", "linears", "rows", "outs", "regions"])
def _add(
    sums_u,
    sums_b,
    du,
    db,
    end_0,
    end_1,
    end_2,
    linears,
    rank,
    rows,
    outs,
    regions,
    scale,
    padded: tl.constexpr,
    sum_rows: tl.constexpr,
):
    """Write du (N, R), summed over each linear's blocks, and db (outs, r), over all regions."""
    program = program_number()
    programs_of_linear = (rows + sum_rows - 1) // sum_rows
    linear = program // programs_of_linear
    ranks = tl.arange(0, padded)[None, :]
    is_rank = ranks < rank
    if linear < linears:
        first_row = (program - linear * programs_of_linear) * sum_rows
        first = _of_linear(linear, 0, end_0, end_1)
        end = _of_linear(linear, end_0, end_1, end_2)
        total = _sum_of(sums_u, first_row, rows, first, end, padded, sum_rows) * scale
        row = (first_row + tl.arange(0, sum_rows))[:, None]
        tl.store(du + row * (linears * rank) + linear * rank + ranks, total, (row < rows) & is_rank)
    else:
        first_row = (program - linears * programs_of_linear) * sum_rows
        total = _sum_of(sums_b, first_row, outs, 0, regions, padded, sum_rows) * scale
        row = (first_row + tl.arange(0, sum_rows))[:, None]
        tl.store(db + row * rank + ranks, total, (row < outs) & is_rank)


def fit_one_pass(dy: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Return whether one pass over dy can replace two matrix multiplications, and is faster.

    The ranks and scales of the adapters must be equal.
    """
    if not is_hopper(dy[0].device) or dy[0].element_size() != 2:
        return False
    if len(dy) > MOST_SHARING or b[0].shape[1] > LARGEST_RANK or not len(dy[0]):
        return False
    if any(grad.stride(1) != 1 for grad in dy) or not all(each.is_contiguous() for each in b):
        return False
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*dy, *b))


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a Hopper GPU, for which the adapter kernels are written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_adapter_gradients(
    dy: Sequence[Tensor], b: Sequence[Tensor], xa: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return dU (N, R) in the dtype of dy, and dB_i (out_i, r) in `dtype`.

    Inputs: dy_i (N, out_i) with contiguous features, B_i (out_i, r) and xa (N, R), for at most
    MOST_SHARING linears of equal rank.
    """
    rows, linears, rank = len(xa), len(dy), b[0].shape[1]
    assert linears <= MOST_SHARING and rank <= LARGEST_RANK, "too many linears or ranks"
    assert xa.shape[1] == linears * rank, "ranks differ"
    assert xa.stride(1) == 1 and all(each.is_contiguous() for each in b), "numbers lie apart"
    assert all(grad.stride(1) == 1 for grad in dy), "features lie apart"
    outs = [grad.shape[1] for grad in dy]
    blocks = [triton.cdiv(out, COLUMNS) for out in outs]
    # one program per multiprocessor: its tiles fill the shared memory
    regions, region_rows = regions_of(rows, ROWS, processors(xa.device) // sum(blocks))
    sums_u = xa.new_empty(sum(blocks), rows, LARGEST_RANK, dtype=torch.float32)
    sums_b = xa.new_empty(regions, sum(outs), LARGEST_RANK, dtype=torch.float32)
    du = torch.empty_like(xa, memory_format=torch.contiguous_format)
    db = xa.new_empty(sum(outs), rank, dtype=dtype)
    ends = _three(list(accumulate(blocks)), sum(blocks))
    strides = _three([grad.stride(0) for grad in dy], 0)
    sums = linears * triton.cdiv(rows, SUM_ROWS) + triton.cdiv(sum(outs), SUM_ROWS)
    _read[(sum(blocks), regions)](
        *_three([grad.data_ptr() for grad in dy], dy[0].data_ptr()),
        *_three([each.data_ptr() for each in b], b[0].data_ptr()),
        *strides,
        *_three(outs, 0),
        *ends[:2],
        xa,
        sums_u,
        sums_b,
        xa.stride(0),
        rank,
        rows,
        region_rows,
        LARGEST_RANK,
        ROWS,
        COLUMNS,
        num_warps=8,
        num_stages=STAGES,
    )
    _add[(sums,)](
        sums_u,
        sums_b,
        du,
        db,
        *ends,
        linears,
        rank,
        rows,
        sum(outs),
        regions,
        scale,
        LARGEST_RANK,
        SUM_ROWS,
        num_warps=4,
    )
    return du, list(db.split(outs))


def regions_of(rows: int, tile_rows: int, most: int) -> tuple[int, int]:
    """Return the number of row regions, at most `most`, and the rows per region, in full tiles."""
    regions = max(1, min(most, triton.cdiv(rows, tile_rows)))
    region_rows = triton.cdiv(triton.cdiv(rows, regions), tile_rows) * tile_rows
    return triton.cdiv(rows, region_rows), region_rows


def _three(numbers: list[int], rest: int) -> list[int]:
    """Return numbers for three linears; `rest` is used for each missing linear."""
    return numbers + [rest] * (MOST_SHARING - len(numbers))
