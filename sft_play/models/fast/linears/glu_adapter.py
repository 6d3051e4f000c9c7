"""`glu` with the thin products of the adapter of the linear that reads h.

    h A^T = (act(gate) * up) A^T     (N, r), forward
    dA = dU^T h                      (r, I), backward

By itself each takes as long as reading h does. On a Hopper GPU, for ranks of at most 16, a program
has a tile of h already, which it need not read again; the backward pass does not even write h.
Elsewhere `glu` runs, and they are products of their own.

Legend: N rows, I features, r rank, P the rank that tl.dot takes, with zeros beyond r.
"""

import torch
from torch import Tensor

from sft_play.models.fast.linears import glu
from sft_play.models.fast.linears.activations import Activation
from sft_play.models.fast.linears.adapter_gradients import (
    LARGEST_RANK,
    Factors,
    is_hopper,
    processors,
    regions_of,
)
from sft_play.models.fast.linears.glu import argument_and_slope, gradients
from sft_play.models.float8.kernels import load_float32, program_number
from sft_play.models.optional_triton import tl, triton

FORWARD_ROWS, BACKWARD_ROWS = 16, 32  # of a tile
COLUMNS = 128  # of a tile
STAGES = 3  # tiles of the forward pass that are on their way
PROGRAMS = 12  # of the backward pass for each processor, some after others
WARPS = 4
MOST_REGISTERS = 128  # of a thread: four programs on a processor, of which some wait for memory


@triton.jit
def _once(tile):
    """A tile of 16 bits, which is computed once: else it would be, for each use, from its start."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=2
    )


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    gate,
    up,
    h,
    a,
    xa,
    gate_stride,
    up_stride,
    features,
    rank,
    rows,
    is_gelu: tl.constexpr,
    padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Write some rows of h (N, I) and of xa (N, r)."""
    row = program_number() * tile_rows + tl.arange(0, tile_rows)[:, None]
    is_row = row < rows
    ranks = tl.arange(0, padded)
    total = tl.full((tile_rows, padded), 0, tl.float32)
    for start in range(0, features, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        is_column = column < features
        is_inside = is_row & is_column
        g = load_float32(gate + row * gate_stride + column, is_inside)
        u = load_float32(up + row * up_stride + column, is_inside)
        is_a = (ranks[:, None] < rank) & is_column
        a_tile = tl.load(a + ranks[:, None] * features + column, is_a, 0.0)
        p, _slope = argument_and_slope(g, is_gelu)
        product = _once((g * tl.sigmoid(p) * u).to(h.dtype.element_ty))
        tl.store(h + row * features + column, product, is_inside)
        total = tl.dot(product, tl.trans(a_tile), total)
    tl.store(xa + row * rank + ranks[None, :], total, is_row & (ranks[None, :] < rank))


@triton.jit
def _load(matrix, start, stride, row, column, is_inside):
    """A tile of a matrix from a row on, in float32."""
    place = matrix + start * stride + (row * stride + column)
    return load_float32(place, is_inside)


@triton.jit(do_not_specialize=["rows", "region_rows"])
def _backward_kernel(
    dh,
    gate,
    up,
    dgate,
    dup,
    du,
    sums,
    dh_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    features,
    rank,
    rows,
    region_rows,
    is_gelu: tl.constexpr,
    padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Write some columns of a region of rows of dgate and dup, and their part of dA.

    du (N, r) is dU of the linear behind; sums (regions, r, I) in float32.
    """
    program = program_number()
    blocks = (features + tile_columns - 1) // tile_columns
    region = program // blocks
    block = (program - region * blocks).to(tl.int32)
    column = block * tile_columns + tl.arange(0, tile_columns)[None, :]
    is_column = column < features
    row = tl.arange(0, tile_rows)[:, None]
    ranks = tl.arange(0, padded)
    da = tl.full((padded, tile_columns), 0, tl.float32)
    first = region * region_rows
    for start in range(first, tl.minimum(first + region_rows, rows), tile_rows):
        is_row = start + row < rows
        is_inside = is_row & is_column
        d = _load(dh, start, dh_stride, row, column, is_inside)
        g = _load(gate, start, gate_stride, row, column, is_inside)
        u = _load(up, start, up_stride, row, column, is_inside)
        du_place = du + start * rank + (row * rank + ranks[None, :])
        du_tile = tl.load(du_place, is_row & (ranks[None, :] < rank), 0.0)
        of_gate, of_up, h = gradients(d, g, u, is_gelu)
        place = dgate + start * dgate_stride + (row * dgate_stride + column)
        tl.store(place, of_gate, is_inside)
        place = dup + start * dup_stride + (row * dup_stride + column)
        tl.store(place, of_up, is_inside)
        da = tl.dot(tl.trans(du_tile), _once(h.to(dgate.dtype.element_ty)), da)
    place = sums + (region * rank + ranks[:, None]) * features + column
    tl.store(place, da, is_column & (ranks[:, None] < rank))


# Forward a program computes whole rows: fewer of them would keep few of a GPU's processors busy.
LEAST_ROWS = 4096


def forward_with_adapter(
    gate: Tensor, up: Tensor, activation: Activation, factors: Factors
) -> tuple[Tensor, Tensor | None]:
    """Return h (N, I), and h A^T (N, r) if the kernel has it. A (r, I), if there is an adapter."""
    if not factors or not fit_one_kernel(gate, up, len(factors[0]), LEAST_ROWS):
        return glu.glu_forward(gate, up, activation), None
    return launch_forward(gate, up, activation, factors[0])


def backward_with_adapter(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    du: Tensor | None,
) -> Tensor | None:
    """Write dgate and dup (N, I); return dA (r, I) for dU (N, r) if the kernel has it.

    Otherwise, if there is an adapter, h overwrites dh.
    """
    if du is not None and fit_one_kernel(gate, up, du.shape[1], 1):
        return launch_backward(dh, gate, up, activation, dgate, dup, du)
    return glu.glu_backward(dh, gate, up, activation, dgate, dup, h=None if du is None else dh)


def fit_one_kernel(gate: Tensor, up: Tensor, rank: int, least_rows: int) -> bool:
    """Return whether one kernel computes h, or its gradient, and the adapter's product."""
    if not is_hopper(gate.device) or gate.element_size() != 2 or rank > LARGEST_RANK:
        return False
    return len(gate) >= least_rows and gate.stride(1) == up.stride(1) == 1


def launch_forward(
    gate: Tensor, up: Tensor, activation: Activation, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return h = act(gate) * up (N, I), and h A^T (N, r) for A (r, I)."""
    (rows, features), rank = gate.shape, len(a)
    assert rank <= LARGEST_RANK and a.is_contiguous(), "a rank that is too large, or rows apart"
    h = gate.new_empty(gate.shape)
    xa = gate.new_empty(rows, rank)
    _forward_kernel[(triton.cdiv(rows, FORWARD_ROWS),)](
        *(gate, up, h, a, xa, gate.stride(0), up.stride(0), features, rank, rows),
        *(activation == "gelu_tanh", LARGEST_RANK, FORWARD_ROWS, COLUMNS),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return h, xa


def launch_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    du: Tensor,
) -> Tensor:
    """Write dgate and dup (N, I); return dA (r, I) in float32, for dU (N, r)."""
    (rows, features), rank = gate.shape, du.shape[1]
    assert rank <= LARGEST_RANK and du.is_contiguous(), "a rank that is too large, or rows apart"
    blocks = triton.cdiv(features, COLUMNS)
    most = round(PROGRAMS * processors(dh.device) / blocks)
    regions, region_rows = regions_of(rows, BACKWARD_ROWS, most)
    sums = dh.new_empty(regions, rank, features, dtype=torch.float32)
    matrices = (dh, gate, up, dgate, dup)
    _backward_kernel[(blocks * regions,)](
        *(*matrices, du, sums, *(each.stride(0) for each in matrices)),
        *(features, rank, rows, region_rows, activation == "gelu_tanh"),
        *(LARGEST_RANK, BACKWARD_ROWS, COLUMNS),
        num_warps=WARPS,
        num_stages=1,
        maxnreg=MOST_REGISTERS,
    )
    return sums.sum(0)
