"""4-bit weights in full, as bitsandbytes unpacks them on a GPU, bit for bit.

Blocks of weights (64 of them, say) share a scale, and a weight is a code of 4 bits:

    w = round(codes[code] s)
    s = absmax, or codes2[absmax] absmax2 + offset where the absmax are packed too (8 bits each)

Products and sums are float32, each rounded on its own; products too small for a normal float32 are
0. Two codes lie in a byte, the first one in its high bits. bitsandbytes launches one kernel for
that, and two more for packed absmax; `four_bit_kernels` does all in one, at the speed of memory.
bitsandbytes itself is the reference, and runs where there is no kernel.
"""

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import Tensor

WORD_BYTES = 4  # the kernel reads 8 codes at once
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights; those of bitsandbytes
UNPACKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unpack(weight: Params4bit) -> Tensor:
    """Return a 4-bit weight in full, of the shape and dtype that it was packed from."""
    if weight.is_cuda and has_kernel(weight, weight.quant_state):
        # Triton needs a GPU when it is imported
        from sft_play.models.fast.linears import four_bit_kernels

        return four_bit_kernels.unpack(weight, weight.quant_state)
    return dequantize_4bit(weight.view(-1, 1), weight.quant_state)


def has_kernel(packed: Tensor, state: QuantState) -> bool:
    """Return whether the kernel unpacks weights that are packed like this."""
    is_known = (
        state.quant_type in ("nf4", "fp4")
        and state.blocksize in BLOCK_SIZES
        and state.dtype in UNPACKED_DTYPES
    )
    is_in_words = (
        packed.is_contiguous()
        and state.shape.numel() == 2 * packed.nbytes
        and packed.nbytes % WORD_BYTES == 0
        and packed.data_ptr() % WORD_BYTES == 0
    )
    return is_known and is_in_words and _has_known_scales(state)


def _has_known_scales(state: QuantState) -> bool:
    if not state.absmax.is_contiguous():
        return False
    if not state.nested:
        return state.absmax.dtype == torch.float32
    outer = state.state2
    scales = (outer.absmax, outer.code, state.offset)
    return (
        state.absmax.dtype == torch.uint8
        and not outer.nested
        and outer.dtype == torch.float32
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in scales)
        and outer.code.device == state.absmax.device
    )
