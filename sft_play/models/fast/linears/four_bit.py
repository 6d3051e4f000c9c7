"""4-bit weights in full, as bitsandbytes unpacks them on a GPU, bit for bit.

Blocks of weights (64 of them, say) share a scale, and a weight is a code of 4 bits:

    w = round(codes[code] s)
    s = absmax, or codes2[absmax] absmax2 + offset if the absmax are packed too (8 bits each)

Products and sums are float32, each rounded on its own; products too small for a normal float32 are
0. Two codes lie in a byte, the first one in its high bits. bitsandbytes launches one kernel for
that, and two more for packed absmax; `four_bit_kernels` does all in one, at the speed of memory.
bitsandbytes itself is the reference, and runs if there is no kernel.
"""

from typing import NamedTuple

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import Tensor

from sft_play.models import mxfp4
from sft_play.models.mxfp4 import Mxfp4State, is_turned, stored_shape

WORD_BYTES = 4  # the kernel reads 8 codes at once
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights; those of bitsandbytes
UNPACKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LINE_BLOCKS = (32, 64)  # weights that share a scale if kernels read lines


def unpack(weight: Params4bit) -> Tensor:
    """Return a 4-bit weight in full, of the shape and dtype that it was packed from."""
    state = weight.quant_state
    if weight.is_cuda and has_kernel(weight, state):
        # Triton needs a GPU when it is imported
        from sft_play.models.fast.linears import four_bit_kernels

        stored = four_bit_kernels.unpack(weight, state)
        return stored.transpose(1, 2) if is_turned(state) else stored
    if isinstance(state, Mxfp4State):
        return mxfp4.unpack(weight, state)
    return dequantize_4bit(weight.view(-1, 1), state)


class InLines(NamedTuple):
    """3-D weights in lines of features, each of them with scales of its own."""

    shape: tuple[int, ...]  # as stored: experts, lines, features of a line
    is_turned: bool  # lines are the last dimension of the weight, not the one before

    def unpack(self, weight: Params4bit, experts: slice) -> Tensor:
        """Return the weights (experts, lines, features) of some experts, on a GPU."""
        from sft_play.models.fast.linears import four_bit_kernels  # Triton needs a GPU

        return four_bit_kernels.unpack(weight, weight.quant_state, experts)

    def read(self, weight: Params4bit) -> tuple[Tensor, tuple[Tensor, int, str]]:
        """Return codes (E, lines, features / 2) uint8, scales, weights a scale, and the type."""
        from sft_play.models.fast.linears import four_bit_kernels

        experts, lines, features = self.shape
        state = weight.quant_state
        codes = weight.detach().view(-1).view(torch.uint8).view(experts, lines, features // 2)
        return codes, (four_bit_kernels.unpack_scales(state), state.blocksize, state.quant_type)


def lines_of(weight: Tensor) -> InLines | None:
    """Return how packed 3-D weights lie, None for others and if a block is in two lines."""
    state = getattr(weight, "quant_state", None)
    if state is None or len(state.shape) != 3 or state.blocksize not in LINE_BLOCKS:
        return None
    shape = stored_shape(state)
    if shape[-1] % state.blocksize or not has_kernel(weight, state):
        return None
    return InLines(shape, is_turned(state))


def has_kernel(packed: Tensor, state: QuantState | Mxfp4State) -> bool:
    """Return whether the kernel unpacks weights that are packed like this."""
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
