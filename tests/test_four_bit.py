"""4-bit weights in full: the kernel computes what bitsandbytes does, in Triton's interpreter."""

import copy
import itertools
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

pytest.importorskip("triton", reason="there is no Triton for this system")

import triton.language as tl
from interpreted_kernels import interpreted
from kernel_compiler import compiling_for

from sft_kernels.linears import four_bit

SMALLEST = torch.finfo(torch.float32).tiny
SHAPES = [(64, 128), (37, 40), (3, 24, 24)]  # rows of whole blocks, none, and experts
KINDS = list(itertools.product(["nf4", "fp4"], [False, True]))


@pytest.fixture(scope="module")
def kernels():
    """The kernels as Triton's interpreter runs them; it lacks the GPU's own multiplication.

    It also rounds to bfloat16 towards zero: that is left to the tests on a GPU.
    """
    return interpreted_unpacking()


def interpreted_unpacking() -> ModuleType:
    kernels = interpreted(four_bit)

    def mul_rn(a, b):
        product = a * b
        return tl.where(tl.abs(product) < SMALLEST, product * 0, product)

    kernels.libdevice = SimpleNamespace(mul_rn=mul_rn)
    kernels.TILE = 512  # several programs a weight, the last one not full
    return kernels


def packed_weight(
    shape: tuple[int, ...],
    quant_type: str = "nf4",
    is_nested: bool = True,
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor, QuantState]:
    """Return random weights packed by bitsandbytes; every byte occurs, where they are enough."""
    torch.manual_seed(0)
    packed, state = quantize_4bit(
        torch.randn(shape, dtype=dtype),
        blocksize=blocksize,
        compress_statistics=is_nested,
        quant_type=quant_type,
        quant_storage=storage,
    )
    as_bytes = packed.view(-1).view(torch.uint8)
    every_byte = torch.arange(256, dtype=torch.uint8)[: len(as_bytes)]
    as_bytes[: len(every_byte)] = every_byte
    return packed, state


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < SMALLEST, x * 0, x)


def formula(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return what bitsandbytes' kernels for GPUs compute."""
    as_bytes = packed.view(-1).view(torch.uint8)
    codes = torch.stack((as_bytes >> 4, as_bytes & 15), dim=1).flatten().long()
    is_nf4 = state.quant_type == "nf4"
    table = torch.tensor(four_bit.NF4 if is_nf4 else four_bit.FP4)
    scales = state.absmax
    if state.nested:
        outer = state.state2
        absmax2 = outer.absmax.repeat_interleave(outer.blocksize)[: len(scales)]
        scales = flushed(outer.code[scales.long()] * absmax2) + state.offset
    scales = scales.repeat_interleave(state.blocksize)[: len(codes)]
    return flushed(table[codes] * scales).to(state.dtype).view(state.shape)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.is_contiguous()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


FORMS = [
    *(
        {"dtype": dtype, "shape": shape}
        for dtype in (torch.float32, torch.float16)
        for shape in SHAPES
    ),
    *({"storage": storage, "shape": SHAPES[0]} for storage in (torch.bfloat16, torch.float32)),
    *({"blocksize": size, "shape": (9, 1000)} for size in four_bit.BLOCK_SIZES),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("quant_type, is_nested", KINDS)
def test_the_kernel_unpacks_to_the_bits_of_its_formula(kernels, quant_type, is_nested, form):
    """Bytes may be stored as numbers of another type."""
    packed, state = packed_weight(quant_type=quant_type, is_nested=is_nested, **form)
    assert four_bit.has_unpacking_kernel(packed, state)
    assert_same_bits(kernels.launch_unpacking(packed, state), formula(packed, state))


@pytest.mark.parametrize("quant_type, is_nested", KINDS)
def test_the_kernel_unpacks_to_the_numbers_of_bitsandbytes(kernels, quant_type, is_nested):
    packed, state = packed_weight((64, 128), quant_type, is_nested)
    expected = dequantize_4bit(packed, state)  # on a CPU no zero of fp4 is negative
    assert torch.equal(kernels.launch_unpacking(packed, state), expected)


def test_nothing_is_written_behind_a_weight(kernels, monkeypatch):
    packed, state = packed_weight((37, 40))
    size = state.shape.numel()
    memory = torch.full((size + 8 * kernels.TILE,), 7.0)

    def empty(shape, **_options):
        return memory[:size].view(shape)

    monkeypatch.setattr(kernels, "torch", SimpleNamespace(empty=empty, int32=torch.int32))
    monkeypatch.setattr(kernels, "TILE", 64)
    assert_same_bits(kernels.launch_unpacking(packed, state), formula(packed, state))
    assert (memory[size:] == 7).all()


def test_scales_may_be_views_of_a_larger_tensor(kernels):
    packed, state = packed_weight((64, 128))
    state.absmax = torch.cat((state.absmax[:3], state.absmax))[3:]
    assert_same_bits(kernels.launch_unpacking(packed, state), formula(packed, state))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_what_is_too_small_or_not_finite_is_what_a_gpu_makes_of_it(kernels, quant_type):
    packed, state = packed_weight((8, 64), quant_type, is_nested=False)
    state.absmax[:6] = torch.tensor([0.0, 1e-38, 1e-36, -2e-38, 3e38, float("inf")])
    found, expected = kernels.launch_unpacking(packed, state), formula(packed, state)
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert (found[1] == 0).sum() > (packed[32:64] == 0x77).sum()


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_codes_are_those_of_bitsandbytes(quant_type):
    _, state = packed_weight((8, 64), quant_type)
    table = four_bit.NF4 if quant_type == "nf4" else four_bit.FP4
    assert torch.equal(torch.tensor(table), state.code)


@pytest.mark.long
def test_the_gpu_neither_fuses_the_product_and_the_sum_nor_keeps_what_is_too_small():
    packed, state = packed_weight((64, 64), dtype=torch.bfloat16)
    with compiling_for(90) as compiled:
        four_bit.launch_unpacking(packed, state)
    (kernel,) = compiled
    code = kernel.asm["ptx"]
    assert "mul.rn.ftz.f32" in code and "mul.f32" not in code
    assert "fma" not in code
    assert "cvt.rn.bf16" in code
    # 16 bytes a thread, whole weights of a warp side by side
    assert "st.global.v4.b32" in code and "st.global.b16" not in code


def changed(state: QuantState, **changes: object) -> QuantState:
    state = copy.copy(state)
    state.state2 = copy.copy(state.state2)
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def test_only_what_the_kernel_knows_is_given_to_it():
    packed, state = packed_weight((64, 128))
    assert four_bit.has_unpacking_kernel(packed, state)
    for wrong in (
        {"quant_type": "int4"},
        {"blocksize": 96},
        {"dtype": torch.float64},
        {"shape": torch.Size((65, 128))},
        {"offset": state.offset.double()},
        {"absmax": state.absmax.float()},
    ):
        assert not four_bit.has_unpacking_kernel(packed, changed(state, **wrong)), wrong
    shifted = torch.cat((packed[:1], packed))[1:]  # one byte behind a word
    assert not four_bit.has_unpacking_kernel(shifted, state)
    odd = packed_weight((3, 41))
    assert not four_bit.has_unpacking_kernel(*odd)
