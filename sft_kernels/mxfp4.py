"""Pack experts in MXFP4 without loss, as gpt-oss publishes them, and unpack them.

    w = code 2^(exponent - 127),  code one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

32 weights along the input features share an exponent. The first of two codes is in the low bits of
a byte (OCP Microscaling Formats, version 1.0, 5.3.3). Files are read as numbers (`stored_weights`).
Each block has an exponent for which all its numbers are codes. This module uses the exponent that
makes the largest number 4 or 6. It may differ from the one in the file.

Legend: E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from torch import Tensor

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = (*SIZES, *(-size for size in SIZES))
BLOCK = 32
BLOCKS_AT_ONCE = 1 << 18  # packed at a time: each number needs about 30 bytes meanwhile
BIAS = 127  # of an exponent
LARGEST = 2  # the exponent of 4; the largest code has it


@dataclass
class Mxfp4State:
    """Has the attributes of bitsandbytes' QuantState for its formats."""

    absmax: Tensor  # uint8: the exponent of each block
    shape: torch.Size  # of the weight
    dtype: torch.dtype
    is_turned: bool  # stored (E, out, in), while the weight is (E, in, out)
    quant_type = "mxfp4"
    blocksize = BLOCK
    nested = False
    code = offset = state2 = None

    def to(self, device: torch.device) -> None:
        """Move the state to a device, in place as bitsandbytes does."""
        self.absmax = self.absmax.to(device)


def is_transposed(state: Any) -> bool:
    """Return whether a packed weight, of any format, is stored with its last dimensions swapped."""
    return isinstance(state, Mxfp4State) and state.is_turned


def packed_shape(state: Any) -> tuple[int, ...]:
    """Return the shape in which a packed weight, of any format, is stored."""
    if not is_transposed(state):
        return tuple(state.shape)
    experts, first, second = state.shape
    return experts, second, first


def pack_mxfp4(weight: Tensor, is_turned: bool) -> Params4bit | None:
    """Return a 3-D weight in MXFP4, None if MXFP4 cannot represent every number exactly."""
    stored = weight.transpose(1, 2) if is_turned else weight
    if stored.shape[-1] % BLOCK:
        return None
    lines = weight.new_empty(stored.numel() // BLOCK, BLOCK // 2, dtype=torch.uint8)
    exponents = weight.new_empty(len(lines), dtype=torch.uint8)
    done = 0
    for expert in stored:
        for blocks in expert.reshape(-1, BLOCK).split(BLOCKS_AT_ONCE):
            found = _written(blocks.float())
            if found is None:
                return None
            own = slice(done, done + len(blocks))
            lines[own], exponents[own] = found
            done = own.stop
    state = Mxfp4State(exponents, weight.shape, weight.dtype, is_turned)
    return Params4bit(
        lines.view(-1, 1),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=False,
        quant_type=Mxfp4State.quant_type,
        bnb_quantized=True,
    )


def _written(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return codes, two per byte, and exponents of blocks (N, 32), None if one is not exact."""
    largest = blocks.abs().amax(1)
    exponent = (torch.frexp(largest).exponent - 1 - LARGEST).clamp(-BIAS, BIAS)
    sizes = torch.tensor(SIZES, device=blocks.device)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(1))
    code = torch.searchsorted(sizes, scaled.abs(), out_int32=True).clamp(max=len(SIZES) - 1)
    if not torch.equal(sizes[code], scaled.abs()):
        return None
    code += len(SIZES) * (scaled < 0).int()
    packed = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
    return packed, (exponent + BIAS).to(torch.uint8)


def unpack_mxfp4(packed: Tensor, state: Mxfp4State) -> Tensor:
    """Return the weight, unpacked per expert: an index needs 16 times the bytes of its codes."""
    numbers = torch.tensor(MXFP4, dtype=state.dtype, device=packed.device)
    shape = packed_shape(state)
    weight = numbers.new_empty(shape)
    of_experts = zip(packed.view(shape[0], -1), state.absmax.view(shape[0], -1), strict=True)
    for expert, (flat, exponents) in zip(weight, of_experts, strict=True):
        codes = torch.stack((flat & 15, flat >> 4), dim=-1).view(-1, BLOCK)
        scales = torch.exp2(exponents.float() - BIAS).to(state.dtype)
        expert.copy_((numbers[codes.int()] * scales.unsqueeze(1)).view_as(expert))
    return weight.transpose(1, 2) if state.is_turned else weight
