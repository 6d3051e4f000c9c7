"""The Triton kernels of float8 compute what their references do, in Triton's interpreter."""

import os
import sys

import pytest
from calls import outcome_of


@pytest.mark.long
def test_the_gpus_kernels_compute_what_the_references_do():
    """Run the kernels in Triton's interpreter, which must be set when a process starts.

    It rounds to float8 wrongly: numbers are compared before they are rounded.
    """
    run = outcome_of([sys.executable, "-c", INTERPRETED], {**os.environ, "TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr[-2000:]


INTERPRETED = """
import torch
from sft_kernels.e4m3 import rows as kernels
from sft_kernels.e4m3.rows import FLOAT8
from sft_kernels.e4m3.quantize import quantize_reference

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
        found, expected = kernels.quantize_rows(x, columns), quantize_reference(x, columns)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(bits(found.values), bits(expected.values))

x = torch.randn(3, 64)
x[1, 5], x[2, 7] = float("nan"), float("inf")
found = kernels.quantize_rows(x).values
assert found.isnan().any(1).tolist() == [False, True, True]
"""
