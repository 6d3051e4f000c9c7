"""Triton kernels of `products`: grouped GEMMs of rows with the matrices of their experts.

A program multiplies tiles of rows of one expert by a tile of columns, and sums in float32. Rows of
tokens are read in place, without sorting a copy. `tiles` contains the rows of each tile, so the CPU
never waits for the GPU. Rows after the last expert's belong to no expert and are not written.

4-bit weights are unpacked tile by tile, to the same numbers as in `four_bit`. A launch may cover
only some experts; it does not change the rows of the others. It has as many programs as their equal
share of the rows needs. If a router sends them more, a program computes several tiles.

Legend: N tokens, k experts per token, S rows, E experts, K features that are summed over, M
features of the result, r rank of an adapter, P and M the sides of an outer product.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from sft_kernels.linears.four_bit import power_of_two, table_of
from sft_kernels.triton_kernels import program_number, tl, triton

SUMMED_BLOCK = 64  # features that are summed at once, and the most that share a packed scale
STAGES = 3  # of the pipeline that loads ahead of tl.dot
MOST_RANKS = 64  # ranks of an adapter multiplied at once, at most
SMALLEST_SIDE = 16  # of a tile that tl.dot accepts
TILE_ROWS = (128, 64)  # used if experts have more than half as many rows on average
LARGE_SHARED_MEMORY = 160 << 10  # bytes per multiprocessor; the A100 and the H100 have this much


@triton.jit
def _add(one, other):
    return one + other


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _write_tiles(ends, tiles, experts, most, rows: tl.constexpr, block: tl.constexpr):
    """Write the expert and first row of each tile, and the first tile of each expert."""
    expert = tl.arange(0, block)
    inside = expert < experts
    end = tl.load(ends + expert, inside, 0)
    begin = tl.load(ends + expert - 1, inside & (expert > 0), 0)
    count = tl.where(inside, (end - begin + rows - 1) // rows, 0)
    place = tl.associative_scan(count, 0, _add) - count
    tl.store(tiles + 2 * most + expert, place, expert <= experts)
    for number in range(tl.reduce(count, 0, _larger)):
        has_tile = number < count
        tl.store(tiles + place + number, expert, has_tile)
        tl.store(tiles + most + place + number, begin + number * rows, has_tile)


@triton.jit
def _unpacked(codes, scale, quant_type: tl.constexpr):
    """Weights (lines, features) of bytes (lines, features / 2) and scales (lines, blocks)."""
    lines: tl.constexpr = codes.shape[0]
    features: tl.constexpr = 2 * codes.shape[1]
    blocks: tl.constexpr = scale.shape[1]
    byte = codes.to(tl.int32)
    if quant_type == "mxfp4":
        code = tl.join(byte & 15, byte >> 4)
        scale = power_of_two(scale)
    else:
        code = tl.join(byte >> 4, byte & 15)
    code = tl.reshape(code, [lines * features])
    number = tl.gather(table_of(quant_type), code, 0).to(tl.float32, bitcast=True)
    number = tl.reshape(number, [lines, blocks, features // blocks])
    weight = number * tl.reshape(scale, [lines, blocks, 1])
    return tl.reshape(weight, [lines, features])


@triton.jit
def _product(
    x,
    out,
    order,
    place,
    matrices,
    term,
    biases,
    sizes,
    of_tokens: tl.constexpr,
    lines_are_summed: tl.constexpr,
    quant_type: tl.constexpr,
    weights_a_scale: tl.constexpr,
    has_term: tl.constexpr,
    has_bias: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
    summed_block: tl.constexpr,
    ranks_block: tl.constexpr,
):
    tiles, most, ends, first_expert, last_expert, together = place
    summed, features, choices = sizes
    column_tiles = (features + block - 1) // block
    first_column = (program_number() % column_tiles * block).to(tl.int32)
    column = first_column + tl.arange(0, block)
    has_column = column < features
    first_tile = tl.load(tiles + 2 * most + first_expert)
    last_tile = tl.load(tiles + 2 * most + last_expert)
    first_tile += (program_number() // column_tiles).to(tl.int32)
    for tile in range(first_tile, last_tile, together):
        expert = tl.load(tiles + tile).to(tl.int64)
        row = tl.load(tiles + most + tile) + tl.arange(0, rows_block)
        inside = row < tl.load(ends + expert)
        row = row.to(tl.int64)
        source = row
        if of_tokens:
            source = (tl.load(order + row, inside, 0) // choices).to(tl.int64)

        total = tl.full((rows_block, block), 0, tl.float32)
        if has_term:
            total = _add_term(total, term, expert, row, inside, column, features, ranks_block)
        if has_bias:
            bias = tl.load(biases + expert * features + column, has_column, 0)
            total += bias.to(tl.float32)[None, :]
        x_row = x + source[:, None] * summed
        for start in range(0, summed, summed_block):
            index = start + tl.arange(0, summed_block)
            value = tl.load(x_row + index[None, :], inside[:, None] & (index < summed)[None, :], 0)
            if lines_are_summed:
                line, lines, first, across, size = index, summed, first_column, column, features
            else:
                line, lines, first, across, size = column, features, start, index, summed
            of_lines = (line, line < lines, first, across, size)
            found = _weights(matrices, expert - first_expert, of_lines, quant_type, weights_a_scale)
            found = found.to(value.dtype)
            total = tl.dot(value, found if lines_are_summed else found.T, total)
        written = out + row[:, None] * features + column[None, :]
        tl.store(written, total.to(out.dtype.element_ty), inside[:, None] & has_column[None, :])


@triton.jit
def _add_term(total, term, expert, row, inside, column, features, ranks_block: tl.constexpr):
    """A tile plus the matrix product of ranks (S, r) and factors (E, r, M), scaled."""
    ranks, factors, stride_expert, scale, rank = term
    for start in range(0, rank, ranks_block):
        number = start + tl.arange(0, ranks_block)
        has_rank = number < rank
        place = ranks + row[:, None] * rank + number[None, :]
        value = tl.load(place, inside[:, None] & has_rank[None, :], 0)
        place = factors + expert * stride_expert + number[:, None] * features + column[None, :]
        factor = tl.load(place, has_rank[:, None] & (column < features)[None, :], 0)
        total = tl.dot(value, factor.to(value.dtype), total)
    return total * scale


@triton.jit
def _weights(matrices, matrix, of_lines, quant_type: tl.constexpr, weights_a_scale: tl.constexpr):
    """Weights (lines, features across) of one matrix, whose lines have `size` features."""
    line, has_line, first, across, size = of_lines
    weight, scales, stride_matrix, stride_line = matrices
    weight += matrix * stride_matrix + line[:, None] * stride_line
    if quant_type is None:
        return tl.load(weight + across[None, :], has_line[:, None] & (across < size)[None, :], 0)
    else:
        width: tl.constexpr = across.shape[0]
        byte = first // 2 + tl.arange(0, width // 2)
        codes = tl.load(weight + byte[None, :], has_line[:, None] & (byte < size // 2)[None, :], 0)
        blocks = size // weights_a_scale
        block = first // weights_a_scale + tl.arange(0, width // weights_a_scale)
        scales += matrix * (2 * stride_matrix // weights_a_scale) + line[:, None] * blocks
        scale = tl.load(scales + block[None, :], has_line[:, None] & (block < blocks)[None, :], 0)
        return _unpacked(codes, scale, quant_type)


@triton.jit
def _outer(
    x,
    y,
    order,
    ends,
    weights,
    out,
    first_side,
    second_side,
    choices,
    stride_expert,
    stride_first,
    stride_second,
    scale,
    of_tokens: tl.constexpr,
    has_weights: tl.constexpr,
    first_block: tl.constexpr,
    second_block: tl.constexpr,
    rows_block: tl.constexpr,
):
    expert = program_number()
    first = tl.program_id(2) * first_block + tl.arange(0, first_block)
    second = tl.program_id(1) * second_block + tl.arange(0, second_block)
    has_first = first < first_side
    has_second = second < second_side
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, expert > 0, 0)
    total = tl.full((first_block, second_block), 0, tl.float32)
    for start in range(begin, end, rows_block):
        row = (start + tl.arange(0, rows_block)).to(tl.int64)
        inside = row < end
        source = row
        if of_tokens:
            source = (tl.load(order + row, inside, 0) // choices).to(tl.int64)
        place = x + row[None, :] * first_side + first[:, None]
        left = tl.load(place, has_first[:, None] & inside[None, :], 0)
        if has_weights:
            left = (left * tl.load(weights + row, inside, 0)[None, :]).to(x.dtype.element_ty)
        place = y + source[:, None] * second_side + second[None, :]
        right = tl.load(place, inside[:, None] & has_second[None, :], 0)
        total = tl.dot(left, right, total)
    place = out + expert * stride_expert
    place += first[:, None] * stride_first + second[None, :] * stride_second
    tl.store(
        place, (total * scale).to(out.dtype.element_ty), has_first[:, None] & has_second[None, :]
    )


def rows_of_tile(rows: int, experts: int) -> int:
    """Return the number of rows per tile, for this total number of rows of all experts."""
    found = (tile for tile in TILE_ROWS if 2 * rows > tile * experts)
    return next(found, SMALLEST_SIDE)


def tiles_of(ends: Tensor, rows: int) -> Tensor:
    """Return (3, T) int32: the expert of each tile, its first row, and each expert's first tile.

    The last expert's first tile is followed by the number of tiles, which is less than T.
    """
    experts = len(ends)
    tile_rows = rows_of_tile(rows, experts)
    tiles = torch.empty(3, rows // tile_rows + experts + 1, dtype=torch.int32, device=ends.device)
    block = triton.next_power_of_2(experts + 1)
    _write_tiles[(1,)](ends, tiles, experts, tiles.shape[1], tile_rows, block)
    return tiles


def grouped_product(
    x: Tensor,
    parts: Iterable[tuple[int, Tensor]],
    lines_are_summed: bool,
    packing: tuple[Tensor, int, str] | None,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    out: Tensor,
    choices: int | None = None,
    term: tuple[Tensor, Tensor, float] | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write the rows of `products.rows_times` to `out` (S, M), for the experts of all parts.

    A part is the number of its first expert, and weights (experts, lines, ...) with contiguous
    lines; it is freed before the next one is made. Lines are K if lines_are_summed, else M.
    `packing` contains the scales of packed weights, the number of weights per scale, and their
    type. `choices` is k if x are tokens.
    """
    summed, features = x.shape[1], out.shape[1]
    rows, experts, most = order.shape[0], ends.shape[0], tiles.shape[1]
    scales, weights_a_scale, quant_type = packing or (x, 1, None)
    of_term = (x, x, 0, 1.0, 0)
    if term is not None:
        ranks, factors, scale = term
        of_term = (ranks, factors, factors.stride(0), scale, ranks.shape[1])
    tile_rows = rows_of_tile(rows, experts)
    block = min(columns_of_tile(x.device, tile_rows, bool(packing)), _side(features, 256))
    column_tiles = triton.cdiv(features, block)
    ranks_block = _side(of_term[-1], MOST_RANKS)
    for first, weight in parts:
        count = weight.shape[0]
        together = rows * count // (experts * tile_rows) + count
        _product[(together * column_tiles,)](
            x,
            out,
            order,
            (tiles, most, ends, first, first + count, together),
            (weight, scales, weight.stride(0), weight.stride(1)),
            of_term,
            x if bias is None else bias,
            (summed, features, choices or 1),
            choices is not None,
            lines_are_summed,
            quant_type,
            weights_a_scale,
            term is not None,
            bias is not None,
            tile_rows,
            block,
            SUMMED_BLOCK,
            ranks_block,
            num_warps=8 if tile_rows * block > 64 * 128 else 4,
            num_stages=STAGES,
        )
        del weight


def outer(
    x: Tensor,
    y: Tensor,
    order: Tensor,
    ends: Tensor,
    out: Tensor,
    scale: float,
    choices: int | None = None,
    weights: Tensor | None = None,
) -> None:
    """Write the sums of `products.rows_outer` to `out` (E, P, M), which may have any strides.

    `choices` is k if y are tokens.
    """
    first, second = x.shape[1], y.shape[1]
    first_block, second_block = _side(first, MOST_RANKS), _side(second, 128)
    grid = (len(ends), triton.cdiv(second, second_block), triton.cdiv(first, first_block))
    _outer[grid](
        x,
        y,
        order,
        ends,
        x if weights is None else weights,
        out,
        first,
        second,
        choices or 1,
        *out.stride(),
        scale,
        choices is not None,
        weights is not None,
        first_block,
        second_block,
        64,
        num_warps=4,
        num_stages=STAGES,
    )


def _side(features: int, most: int) -> int:
    """Return the side of a tile for this number of features, at most `most`."""
    return min(most, max(SMALLEST_SIDE, triton.next_power_of_2(features)))


def columns_of_tile(device: torch.device, tile_rows: int, is_packed: bool) -> int:
    """Return the columns per tile: as many as fit into the GPU's shared memory."""
    if is_packed or tile_rows < max(TILE_ROWS):
        return 128
    return 256 if _shared_memory(device) >= LARGE_SHARED_MEMORY else 128


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
