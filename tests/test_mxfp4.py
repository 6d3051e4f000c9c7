"""Experts in MXFP4 are packed without a loss, and unpacked to what transformers reads."""

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft_kernels import mxfp4
from sft_kernels.linears.four_bit import unpack_with_kernel


def numbers_of_mxfp4(experts: int, first: int, second: int, is_turned: bool) -> Tensor:
    """Return a weight as transformers reads it of random codes: every code and exponents apart."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (experts, second, first // 32, 16), dtype=torch.uint8)
    codes[0, 0, 0] = 0  # a block of zeros
    codes[0, 1, 0] = torch.arange(16, dtype=torch.uint8) % 2  # its largest number is a half
    exponents = torch.randint(110, 130, (experts, second, first // 32), dtype=torch.uint8)
    weight = convert_moe_packed_tensors(codes, exponents)  # (experts, first, second)
    return weight if is_turned else weight.transpose(1, 2).contiguous()


def test_every_number_comes_back() -> None:
    for is_turned in (True, False):
        weight = numbers_of_mxfp4(3, 64, 48, is_turned)
        packed = mxfp4.pack_mxfp4(weight, is_turned)
        assert packed.nbytes == weight.numel() // 2
        assert torch.equal(unpack_with_kernel(packed), weight)
        assert unpack_with_kernel(packed).dtype == weight.dtype


def test_a_weight_of_other_numbers_is_not_packed() -> None:
    weight = numbers_of_mxfp4(3, 64, 48, is_turned=True)
    weight[2, 5, 7] *= 1.125
    assert mxfp4.pack_mxfp4(weight, is_turned=True) is None
    assert mxfp4.pack_mxfp4(weight[:, :40], is_turned=True) is None


def test_numbers_and_exponents_move_together_as_in_bitsandbytes() -> None:
    packed = mxfp4.pack_mxfp4(numbers_of_mxfp4(3, 64, 48, is_turned=True), is_turned=True)
    packed.quant_state.to(torch.device("meta"))
    assert packed.quant_state.absmax.is_meta
