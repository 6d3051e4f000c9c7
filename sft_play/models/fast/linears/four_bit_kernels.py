"""The Triton kernel of `four_bit`: one pass over a packed weight. Imported only on a GPU.

A program reads words of 8 codes and looks them up in a table in shared memory, whose 16 entries lie
in banks of their own: no two lanes wait for each other. Each thread writes the 8 weights of a word
side by side. Scales are computed once a block, and reach the threads through shared memory.
"""

import math
import struct

import torch
import triton
import triton.language as tl
from bitsandbytes.functional import QuantState
from torch import Tensor
from triton.language.extra import libdevice

from sft_play.models.float8.kernels import program_number
from sft_play.models.mxfp4 import MXFP4, stored_shape

CODES_A_WORD = 8  # of 4 bytes
TILE = 1024  # words of a program: 64 weights a thread
WARPS = 4
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_SIZES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*FP4_SIZES, *(-size for size in FP4_SIZES))  # its first negative code is -0.0


def _bits_of(codes: tuple[float, ...]) -> tuple[int, ...]:
    """Return float32 numbers as integers: Triton's constants lose the sign of a zero."""
    return struct.unpack("16i", struct.pack("16f", *codes))


_NF4_BITS = tl.constexpr(_bits_of(NF4))
_FP4_BITS = tl.constexpr(_bits_of(FP4))
_MXFP4_BITS = tl.constexpr(_bits_of(MXFP4))
_CODES_A_WORD = tl.constexpr(CODES_A_WORD)


@triton.jit
def table_of(quant_type: tl.constexpr):
    """The bits of the 16 codes."""
    if quant_type == "nf4":
        bits: tl.constexpr = _NF4_BITS
    elif quant_type == "fp4":
        bits: tl.constexpr = _FP4_BITS
    else:
        bits: tl.constexpr = _MXFP4_BITS
    code = tl.arange(0, 16)
    table = tl.full([16], 0, tl.int32)
    for i in tl.static_range(16):
        table = tl.where(code == i, bits[i], table)
    return table


@triton.jit
def power_of_two(exponent):
    """The float32 with so many as its exponent's bits."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scales(
    absmax,
    codes2,
    absmax2,
    offset,
    block,
    inside,
    quant_type: tl.constexpr,
    blocksize2: tl.constexpr,
):
    """The scales of blocks."""
    found = tl.load(absmax + block, inside, 0)
    if quant_type == "mxfp4":
        return power_of_two(found)
    elif blocksize2:
        outer = tl.load(absmax2 + block // blocksize2, inside, 0)
        # mul_rn is not contracted with the sum, and makes 0 of what is too small
        return libdevice.mul_rn(tl.load(codes2 + found.to(tl.int32)), outer) + tl.load(offset)
    else:
        return found


@triton.jit
def _unpack(
    words,
    absmax,
    codes2,
    absmax2,
    offset,
    weights,
    past_blocks,
    total_words,
    total_blocks,
    quant_type: tl.constexpr,
    words_a_block: tl.constexpr,
    blocksize2: tl.constexpr,
    blocks: tl.constexpr,
):
    tile: tl.constexpr = blocks * words_a_block
    first_block = tl.program_id(0).to(tl.int64) * blocks
    first_word = first_block * words_a_block

    word = tl.arange(0, tile)
    inside = word < tl.minimum(total_words - first_word, tile).to(tl.int32)
    past_words = past_blocks * words_a_block
    packed = tl.load(
        words + past_words + first_word + word, inside, 0, eviction_policy="evict_first"
    )

    block = tl.arange(0, blocks)
    has_block = block < tl.minimum(total_blocks - first_block, blocks).to(tl.int32)
    block = past_blocks + first_block + block
    scale = _scales(absmax, codes2, absmax2, offset, block, has_block, quant_type, blocksize2)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], [blocks, words_a_block]), [tile])

    place = tl.arange(0, _CODES_A_WORD)
    if quant_type != "mxfp4":
        place = place ^ 1  # bytes lie from low to high, the codes of a byte from high to low
    code = (packed[:, None] >> (4 * place)[None, :]) & 15
    code = tl.reshape(code, [tile * _CODES_A_WORD])
    found = tl.gather(table_of(quant_type), code, 0).to(tl.float32, bitcast=True)
    found = tl.reshape(found, [tile, _CODES_A_WORD])

    weight = libdevice.mul_rn(found, tl.broadcast_to(scale[:, None], [tile, _CODES_A_WORD]))
    target = first_word * _CODES_A_WORD + word * _CODES_A_WORD
    target = weights + target[:, None] + tl.arange(0, _CODES_A_WORD)[None, :]
    tl.store(target, weight.to(weights.dtype.element_ty), inside[:, None])


@triton.jit
def _unpack_scales(
    absmax, codes2, absmax2, offset, scales, total, blocksize2: tl.constexpr, tile: tl.constexpr
):
    block = program_number() * tile + tl.arange(0, tile)
    inside = block < total
    scale = _scales(absmax, codes2, absmax2, offset, block, inside, "", blocksize2)
    tl.store(scales + block, scale, inside)


def unpack(packed: Tensor, state: QuantState, experts: slice | None = None) -> Tensor:
    """Return a packed weight for which `four_bit.has_kernel`, of the shape that is stored.

    Of `experts` alone, if the blocks of each are its own.
    """
    shape = stored_shape(state)
    past_blocks = 0
    if experts is not None:
        past_blocks = experts.start * (math.prod(shape[1:]) // state.blocksize)
        shape = (experts.stop - experts.start, *shape[1:])
    weights = torch.empty(shape, dtype=state.dtype, device=packed.device)
    words = packed.detach().view(-1).view(torch.int32)
    words_a_block = state.blocksize // CODES_A_WORD
    count = math.prod(shape) // CODES_A_WORD
    sizes = (past_blocks, count, triton.cdiv(count, words_a_block))
    blocksize2 = state.state2.blocksize if state.nested else 0
    flags = (state.quant_type, words_a_block, blocksize2, TILE // words_a_block)
    _unpack[(triton.cdiv(count, TILE),)](
        *(words, *_scale_tensors(state), weights, *sizes, *flags), num_warps=WARPS
    )
    return weights


def unpack_scales(state: QuantState) -> Tensor:
    """Return the scale of each block of weights: in float32, those of MXFP4 as they are."""
    if not state.nested:
        return state.absmax
    total = state.absmax.numel()
    scales = torch.empty(total, dtype=torch.float32, device=state.absmax.device)
    _unpack_scales[(triton.cdiv(total, TILE),)](
        *(*_scale_tensors(state), scales, total, state.state2.blocksize, TILE)
    )
    return scales


def _scale_tensors(state: QuantState) -> tuple[Tensor, ...]:
    if not state.nested:
        return (state.absmax,) * 4
    outer = state.state2
    return state.absmax, outer.code, outer.absmax, state.offset
