"""How formats of 8 and 4 bits round: as the files are read back, in torch and in the kernel."""

import itertools
from types import ModuleType

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor

pytest.importorskip("triton", reason="there is no Triton for this system")

import triton.language as tl
from interpreted_kernels import interpreted
from triton.runtime.interpreter import TensorHandle

from sft_play.inference.export_compressed import compress
from sft_play.models import compressed
from sft_play.models.compressed import KINDS, Rounding


def rounding(kind: str, inputs: int = 256) -> Rounding:
    return Rounding.of(kind, [torch.nn.Linear(inputs, 8)], "a model")


def weight(dtype: torch.dtype, rows: int = 24, inputs: int = 256) -> torch.Tensor:
    """A weight with outliers, a row of zeros, and numbers between two codes."""
    torch.manual_seed(0)
    made = torch.randn(rows, inputs) * torch.logspace(-4, 1, rows)[:, None]
    made[:, 3] *= 50
    made[5] = 0
    made[6, :15] = torch.arange(15) / 2.0 - 3.75
    return made.to(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*itertools.product(KINDS, [torch.bfloat16]), ("fp8", torch.float16)]
)
def test_a_weight_is_rounded_to_what_the_files_are_read_as(kind, dtype) -> None:
    scheme = rounding(kind).scheme
    stored, error = compress(weight(dtype), scheme, KINDS[kind].format)
    compressor = BaseCompressor.get_value_from_registry(KINDS[kind].format)
    read = compressor.decompress(stored, scheme)["weight"].to(dtype)
    rounded = rounding(kind).weight(weight(dtype))
    assert rounded.equal(read) and not rounded[5].any()
    wide = weight(dtype).float()
    assert ((rounded.float() - wide).norm() / wide.norm()).item() == pytest.approx(error, rel=1e-3)
    assert rounding(kind).weight(rounded).dtype == dtype


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The kernel as Triton's interpreter runs it, but for numbers of 8 bits: it truncates them."""
    kernels = interpreted(compressed)
    kernels._e4m3 = e4m3
    return kernels


def e4m3(x: tl.tensor) -> tl.tensor:
    """Round to e4m3 as torch does."""
    numbers = torch.from_numpy(x.handle.data).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return tl.tensor(TensorHandle(numbers.numpy(), x.handle.dtype), x.type)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_rounds_to_the_same_bits(kernels, kind) -> None:
    # float16: the interpreter rounds to bfloat16 towards zero, which is left to a GPU
    given = weight(torch.float16)
    group = rounding(kind).scheme.weights.group_size or given.shape[1]
    assert kernels.rounded_groups(given, kind, group).equal(rounding(kind).weight(given))


def test_inputs_are_rounded_a_token_at_a_time(kernels) -> None:
    x = weight(torch.float16).view(2, 12, 256)
    rounded = rounding("fp8").inputs(x)
    assert rounded.shape == x.shape and not rounded.equal(x)
    assert rounded[0, 3:4].equal(rounding("fp8").inputs(x[0, 3:4]))  # other tokens change nothing
    assert kernels.rounded_groups(x, "fp8", 256).equal(rounded)
    assert rounding("int4").inputs(x) is x and rounding("nvfp4").inputs(x) is x
