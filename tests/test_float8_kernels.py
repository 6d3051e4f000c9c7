"""The Triton kernels of float8 compute what their references do, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_the_gpus_kernels_compute_what_the_references_do():
    """Run the kernels in Triton's interpreter, which must be set when a process starts.

    It rounds to float8 wrongly: numbers are compared before they are rounded.
    """
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]


INTERPRETED = """
from types import SimpleNamespace

import torch
from sft_play.models.fast.linears import glu_float8
from sft_play.models.fast.norms import residual, residual_kernels
from sft_play.models.fast.norms.rms import GEMMA, LLAMA
from sft_play.models.float8 import kernels
from sft_play.models.float8.format import FLOAT8
from sft_play.models.float8.quantize import quantize_reference

kernels.BLOCK, kernels.TILE = 64, 16  # several a row, the last one not full
torch.manual_seed(0)


def bits(x):
    return x.to(FLOAT8).view(torch.uint8)


weight = torch.randn(48, 80).to(FLOAT8)
assert torch.equal(bits(kernels.transposed(weight)), bits(weight.t().contiguous()))

kernels.FLOAT8 = torch.float32
rows = torch.randn(7, 300) * torch.tensor([1e-6, 1, 300, 0, 1e6, 1e-30, 5])[:, None]
rows[1, 3] = 1e5
strided = torch.randn(6, 128)[:, :64]
for x in (rows, rows.bfloat16(), rows[:, :48].contiguous(), strided, strided.t()):
    for columns in (None, torch.rand(x.shape[1]) + 0.1):
        found, expected = kernels.quantize(x, columns), quantize_reference(x, columns)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(bits(found.values), bits(expected.values))

glu_float8.BLOCK = 64


def agree(found, expected):
    torch.testing.assert_close(found.scales, expected.scales, rtol=2e-2, atol=0)
    found = found._replace(values=found.values.to(FLOAT8))
    off = found.dequantized(torch.float32) - expected.dequantized(torch.float32)
    assert off.norm() <= 0.02 * expected.dequantized(torch.float32).norm()


for activation in ("silu",):  # the interpreter does not multiply gelu's constants
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = torch.randn(5, 300).to(dtype).chunk(2, -1)
        gate[3], up[4] = 0, 1e4
        h, in_float8 = glu_float8.launch_forward(gate, up, activation)
        expected, rows_in_float8 = glu_float8.glu_forward_float8(gate, up, activation)
        torch.testing.assert_close(h, expected, rtol=2**-7, atol=1e-6)
        agree(in_float8, rows_in_float8)
        assert not in_float8.values[3].any() and in_float8.scales[3] == 1
        columns = torch.rand(2, 150) + 0.1
        ours, theirs = (
            SimpleNamespace(h=dh, gate=torch.empty(5, 150).to(dtype), up=torch.empty(5, 150).to(dtype))
            for dh in [torch.randn(5, 150).to(dtype)] * 2
        )
        theirs.h = ours.h.clone()
        found = glu_float8.launch_backward(
            ours.h, gate, up, activation, ours.gate, ours.up, *columns
        )
        wanted = glu_float8.glu_backward_float8(
            theirs.h, gate, up, activation, theirs.gate, theirs.up, *columns
        )
        for name in ("h", "gate", "up"):
            one, other = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-5)
        agree(found[0], wanted[0])
        agree(found[1], wanted[1])

for kind in (LLAMA, GEMMA):
    x, stream, weight = torch.randn(4, 100), torch.randn(4, 100), torch.rand(100)
    y, s, _, in_float8 = residual_kernels.forward(x, stream, weight, 1e-6, kind, True)
    expected, _, _, wanted = residual.Reference.forward(x, stream, weight, 1e-6, kind, True)
    torch.testing.assert_close(y, expected)
    agree(in_float8, wanted)
    assert residual_kernels.forward(x, stream, weight, 1e-6, kind)[3] is None

x = torch.randn(3, 64)
x[1, 5], x[2, 7] = float("nan"), float("inf")
found = kernels.quantize(x).values
assert found.isnan().any(1).tolist() == [False, True, True]
"""
