"""Unpack 4-bit weights on a GPU, bit for bit as bitsandbytes does.

A block of weights (e.g. 64) shares a scale, and each weight is a 4-bit code:

    w = round(codes[code] s)
    s = absmax, or codes2[absmax] absmax2 + offset if the absmax are packed too (8 bits each)

Multiplications and additions are in float32, and each is rounded separately. A product too small
for a normal float32 becomes 0. A byte contains two codes, the first one in its high bits.
bitsandbytes launches one kernel for weights, and two more for packed absmax. The Triton kernel here
does everything in one launch, at memory bandwidth. bitsandbytes is the reference, and runs if the
kernel cannot.

A program reads words of 8 codes and looks them up in a table in shared memory. Its 16 entries are
in separate banks, so lanes never wait for each other. Each thread writes the 8 weights of a word
contiguously. Scales are computed once per block, and reach the threads through shared memory.
"""

import math
import struct
from typing import NamedTuple

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn

from sft_kernels import mxfp4
from sft_kernels.mxfp4 import MXFP4, Mxfp4State, is_transposed, packed_shape
from sft_kernels.triton_kernels import libdevice, program_number, tl, triton

WORD_BYTES = 4  # the kernel reads 8 codes at once
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights per scale in bitsandbytes
UNPACKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LINE_BLOCKS = (32, 64)  # weights per scale for kernels that read lines


def unpack_with_kernel(weight: Params4bit) -> Tensor:
    """Return an unpacked 4-bit weight, in its original shape and dtype."""
    state = weight.quant_state
    if weight.is_cuda and has_unpacking_kernel(weight, state):
        stored = launch_unpacking(weight, state)
        return stored.transpose(1, 2) if is_transposed(state) else stored
    if isinstance(state, Mxfp4State):
        return mxfp4.unpack_mxfp4(weight, state)
    return dequantize_4bit(weight.view(-1, 1), state)


class InLines(NamedTuple):
    """3-D weights stored in lines of features; no scale is shared between lines."""

    shape: tuple[int, ...]  # as stored: experts, lines, features per line
    is_turned: bool  # whether lines are the weight's last dimension, not the second to last

    def unpack(self, weight: Params4bit, experts: slice) -> Tensor:
        """Return the weights (experts, lines, features) of some experts, on a GPU."""
        return launch_unpacking(weight, weight.quant_state, experts)

    def read(self, weight: Params4bit) -> tuple[Tensor, tuple[Tensor, int, str]]:
        """Return codes (E, lines, features / 2) uint8, and (scales, weights per scale, type)."""
        experts, lines, features = self.shape
        state = weight.quant_state
        codes = weight.detach().view(-1).view(torch.uint8).view(experts, lines, features // 2)
        return codes, (unpack_scales(state), state.blocksize, state.quant_type)


def block_lines(weight: Tensor) -> InLines | None:
    """Return the layout of packed 3-D weights; None for others, or if blocks span two lines."""
    state = getattr(weight, "quant_state", None)
    if state is None or len(state.shape) != 3 or state.blocksize not in LINE_BLOCKS:
        return None
    shape = packed_shape(state)
    if shape[-1] % state.blocksize or not has_unpacking_kernel(weight, state):
        return None
    return InLines(shape, is_transposed(state))


def has_unpacking_kernel(packed: Tensor, state: QuantState | Mxfp4State) -> bool:
    """Return whether the kernel can unpack weights that are packed like this."""
    is_known = (
        state.quant_type in ("nf4", "fp4", "mxfp4")
        and state.blocksize in BLOCK_SIZES
        and state.dtype in UNPACKED_DTYPES
    )
    is_in_words = (
        packed.is_contiguous()
        and state.shape.numel() == 2 * packed.nbytes
        and packed.nbytes % WORD_BYTES == 0
        and packed.storage_offset() * packed.element_size() % WORD_BYTES == 0
    )
    if not (is_known and is_in_words and state.absmax.is_contiguous()):
        return False
    if not state.nested:
        is_bytes = isinstance(state, Mxfp4State)
        return state.absmax.dtype == (torch.uint8 if is_bytes else torch.float32)
    outer = state.state2
    scales = (outer.absmax, outer.code, state.offset)
    return (
        state.absmax.dtype == torch.uint8
        and not outer.nested
        and outer.dtype == torch.float32
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in scales)
        and outer.code.device == state.absmax.device
    )


CODES_A_WORD = 8  # of 4 bytes
TILE = 1024  # words per program: 64 weights per thread
WARPS = 4
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
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
    """The float32 with these exponent bits."""
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
        # mul_rn is not fused with the addition, and flushes subnormal results to 0
        return libdevice.mul_rn(tl.load(codes2 + found.to(tl.int32)), outer) + tl.load(offset)
    else:
        return found


@triton.jit
def _unpack_kernel(
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
        place = place ^ 1  # bytes go from low to high, codes within a byte from high to low
    code = (packed[:, None] >> (4 * place)[None, :]) & 15
    code = tl.reshape(code, [tile * _CODES_A_WORD])
    found = tl.gather(table_of(quant_type), code, 0).to(tl.float32, bitcast=True)
    found = tl.reshape(found, [tile, _CODES_A_WORD])

    weight = libdevice.mul_rn(found, tl.broadcast_to(scale[:, None], [tile, _CODES_A_WORD]))
    target = first_word * _CODES_A_WORD + word * _CODES_A_WORD
    target = weights + target[:, None] + tl.arange(0, _CODES_A_WORD)[None, :]
    tl.store(target, weight.to(weights.dtype.element_ty), inside[:, None])


@triton.jit
def _scales_kernel(
    absmax, codes2, absmax2, offset, scales, total, blocksize2: tl.constexpr, tile: tl.constexpr
):
    block = program_number() * tile + tl.arange(0, tile)
    inside = block < total
    scale = _scales(absmax, codes2, absmax2, offset, block, inside, "", blocksize2)
    tl.store(scales + block, scale, inside)


def launch_unpacking(packed: Tensor, state: QuantState, experts: slice | None = None) -> Tensor:
    """Return an unpacked weight in its stored shape; `has_unpacking_kernel` must be true.

    `experts` limits it to some experts, which must not share blocks with others.
    """
    shape = packed_shape(state)
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
    _unpack_kernel[(triton.cdiv(count, TILE),)](
        words, *_scale_tensors(state), weights, *sizes, *flags, num_warps=WARPS
    )
    return weights


def unpack_scales(state: QuantState) -> Tensor:
    """Return the scale of each block of weights: float32, or as stored for MXFP4."""
    if not state.nested:
        return state.absmax
    total = state.absmax.numel()
    scales = torch.empty(total, dtype=torch.float32, device=state.absmax.device)
    _scales_kernel[(triton.cdiv(total, TILE),)](
        *_scale_tensors(state), scales, total, state.state2.blocksize, TILE
    )
    return scales


def _scale_tensors(state: QuantState) -> tuple[Tensor, ...]:
    if not state.nested:
        return (state.absmax,) * 4
    outer = state.state2
    return state.absmax, outer.code, outer.absmax, state.offset


def keep_differentiable(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights when the model is evaluated on a CPU.

    On a CPU with AVX512-BF16 it repacks them for inference and never packs them back. Its matrix
    multiplication with repacked weights has no gradient. Training after an evaluation would
    continue with gradients that are wrong by 100 %, and with scales rounded to bfloat16.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
