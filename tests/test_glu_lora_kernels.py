"""The gated MLP's Triton kernels that add adapters' parts compute what the reference does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sft_play.models.fast.linears.glu import Parts, glu_backward, glu_forward
from sft_play.models.fast.linears.products import LowRank

ROOT = Path(__file__).resolve().parents[1]
TOKENS, FEATURES = 70, 300  # no multiples of a tile
# gate's, up's and down's ranks: all, one alone, none of gate and up, more than one block
RANKS = [(16, 16, 16), (4, None, None), (None, None, 8), (None, 100, 3)]


def part(tokens: int, features: int, rank: int | None, is_transposed: bool) -> LowRank | None:
    """Return a part whose thin matrices are views, as in a layer."""
    if rank is None:
        return None
    left = torch.randn(tokens, rank + 5)[:, 2 : rank + 2]
    right = torch.randn(rank, features).t() if is_transposed else torch.randn(features, rank)
    return LowRank(left, right, 0.5)


def moved(parts: Parts, device: str, dtype: torch.dtype) -> Parts:
    """Return parts on a device, with their strides."""
    return Parts(
        *(
            None
            if each is None
            else LowRank(
                *(
                    torch.empty_strided(x.shape, x.stride(), device=device, dtype=dtype).copy_(x)
                    for x in each[:2]
                ),
                each.scale,
            )
            for each in parts
        )
    )


def largest_errors(
    ranks: tuple[int | None, ...], activation: str, dtype: torch.dtype, device: str
) -> list[float]:
    """Return how far h forward, and dgate, dup and h backward, are from those of float64."""
    from sft_play.models.fast.linears import glu_lora_kernels as kernels

    torch.manual_seed(0)
    both = torch.randn(TOKENS, 2 * FEATURES, dtype=dtype)
    dh = torch.randn(TOKENS, FEATURES, dtype=dtype)
    parts = Parts(*(part(TOKENS, FEATURES, rank, i == 2) for i, rank in enumerate(ranks)))
    parts = moved(parts, "cpu", dtype)
    wide = moved(parts, "cpu", torch.float64)
    gate, up = both.double().chunk(2, -1)
    expected = [glu_forward(gate, up, activation, wide)]
    dgate, dup, h = (torch.empty(TOKENS, FEATURES, dtype=torch.float64) for _ in range(3))
    glu_backward(dh.double(), gate, up, activation, dgate, dup, h, wide)
    expected += [dgate, dup, h]

    near = moved(parts, device, dtype)
    gate, up = both.to(device).chunk(2, -1)
    found = [kernels.forward(gate, up, activation, near.gate, near.up)]
    gradients, product = torch.empty_like(both, device=device), dh.to(device, copy=True)
    halves = gradients.chunk(2, -1)
    kernels.backward(product, gate, up, activation, *halves, product, *near)
    found += [*halves, product]
    return [
        float((one.cpu().double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_a_gpu_computes_the_formula(
    ranks: tuple[int | None, ...], activation: str, dtype: torch.dtype
) -> None:
    # float32: sums in another order, and Triton's exponential; 16 bits: one rounding of a result
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    assert max(largest_errors(ranks, activation, dtype, "cuda")) < tolerance


@pytest.mark.long
def test_the_kernels_compute_the_formula_in_tritons_interpreter() -> None:
    """The interpreter must be set when a process starts."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    code = (
        "import torch, test_glu_lora_kernels as tests\n"
        "for ranks in tests.RANKS:\n"
        "    found = tests.largest_errors(ranks, 'silu', torch.float32, 'cpu')\n"
        "    assert max(found) < 1e-5, (ranks, found)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
