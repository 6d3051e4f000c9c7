"""4-bit weights on a GPU: the kernel unpacks them to the bits of bitsandbytes' own kernels."""

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Params4bit

from sft_kernels.linears import four_bit
from sft_kernels.linears.products import dequantize

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SHAPES = [
    (14336, 4096),
    (1024, 4096),
    (4096, 14336),
    (37, 40),  # no row is of whole blocks, and the last block is not full
    (1, 8),
    (8, 96, 200),  # experts
    (999, 1001),  # not whole words: bitsandbytes unpacks it
]


def packed_weight(
    shape: tuple[int, ...],
    quant_type: str = "nf4",
    is_nested: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> Params4bit:
    """Return random bytes with the scales of random weights."""
    torch.manual_seed(0)
    weights = torch.randn(shape, dtype=dtype, device=GPU) * 0.02
    packed, state = quantize_4bit(
        weights, quant_type=quant_type, compress_statistics=is_nested, **options
    )
    as_bytes = packed.view(-1).view(torch.uint8)
    as_bytes.copy_(torch.randint_like(as_bytes, 256))
    return Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)


def launched_kernels(weight: Params4bit) -> list[str]:
    """Return the names of the kernels that unpack a weight."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        four_bit.unpack_with_kernel(weight)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


def assert_same_bits(weight: Params4bit) -> None:
    state: QuantState = weight.quant_state
    found = four_bit.unpack_with_kernel(weight)
    expected = dequantize_4bit(weight.data.view(-1, 1), state)
    assert found.is_contiguous()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_unpacked_to_the_bits_of_bitsandbytes(shape, quant_type, is_nested, dtype):
    weight = packed_weight(shape, quant_type, is_nested, dtype)
    is_whole_words = weight.quant_state.shape.numel() % 8 == 0
    assert four_bit.has_unpacking_kernel(weight, weight.quant_state) == is_whole_words
    assert_same_bits(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_scales_that_are_tiny_huge_or_not_finite_give_the_same_bits(quant_type, dtype):
    weight = packed_weight((64, 64), quant_type, is_nested=False, dtype=dtype)
    scales = [0.0, 1e-38, 1e-40, 1.2e-38, 2e-36, -2e-38, 3e38, float("inf"), float("nan")]
    weight.quant_state.absmax[: len(scales)] = torch.tensor(scales, device=GPU)
    assert_same_bits(weight)


@pytest.mark.parametrize("is_nested", [False, True])
def test_one_kernel_unpacks_a_weight(is_nested):
    weight = packed_weight((1024, 4096), is_nested=is_nested)
    four_bit.unpack_with_kernel(weight)
    assert launched_kernels(weight) == ["_unpack_kernel"]


def test_a_weight_is_unpacked_to_another_dtype_through_its_own():
    weight = packed_weight((256, 512), dtype=torch.float16)
    found = dequantize(weight, torch.bfloat16)
    assert torch.equal(found, four_bit.unpack_with_kernel(weight).to(torch.bfloat16))


def test_more_weights_than_32_bits_count_are_unpacked():
    columns = 1 << 16
    rows = (1 << 31) // columns + 8
    needed = 5 << 30  # bytes: 2 a weight, and those packed
    if torch.cuda.mem_get_info(GPU)[0] < 2 * needed:
        pytest.skip("needs 10 GiB of GPU memory")
    part = packed_weight((8, columns), is_nested=False)
    state = part.quant_state
    repeats = rows // 8
    whole = QuantState(
        state.absmax.repeat(repeats),
        torch.Size((rows, columns)),
        state.code,
        state.blocksize,
        state.quant_type,
        state.dtype,
    )
    packed = Params4bit(
        part.data.repeat(repeats, 1), requires_grad=False, quant_state=whole, bnb_quantized=True
    )
    found = four_bit.unpack_with_kernel(packed)
    expected = four_bit.unpack_with_kernel(part)
    assert torch.equal(found[:8], expected)
    assert torch.equal(found[-8:], expected)
