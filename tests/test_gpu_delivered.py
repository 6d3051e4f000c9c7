"""Rounded weights on a GPU: the kernel's bits, the merged weight, and a step's speed in products."""

import pytest
import torch
from test_delivered import linears, own_and_fused
from torch import nn

from sft_play.models.compressed import KINDS, Rounding, has_rounding_kernel, scales_of
from sft_play.models.delivered import merged_weight

pytestmark = pytest.mark.gpu


def weight(dtype: torch.dtype, rows: int = 384, inputs: int = 14_336) -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(rows, inputs, device="cuda") * torch.logspace(-4, 1, rows).cuda()[:, None]
    made[:, ::100] *= 50
    made[5] = 0
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_rounds_to_the_bits_of_the_reference(kind, dtype):
    rounding = Rounding.of(kind, [nn.Linear(256, 8)], "a model")
    given = weight(dtype)
    assert has_rounding_kernel(given)
    on_cpu = rounding.weight(given.cpu())  # what the writer computes
    assert rounding.weight(given).cpu().equal(on_cpu)
    assert rounding.weight(torch.zeros_like(given)).eq(0).all()
    scale, _, _ = scales_of(given, rounding.scheme)
    assert scale.isfinite().all()
    assert rounding.inputs(given[None]).cpu().equal(rounding.inputs(given[None].cpu()))


def test_an_adapter_is_merged_to_a_step_of_its_type():
    torch.manual_seed(0)
    base = torch.randn(512, 1024, device="cuda").bfloat16()
    a, b = torch.randn(16, 1024, device="cuda") * 0.02, torch.randn(512, 16, device="cuda") * 0.02
    exact = torch.addmm(base.double(), b.double(), a.double(), alpha=2.0).bfloat16()
    found = merged_weight(base, a, b, 2.0)
    assert found.dtype == torch.bfloat16
    assert (found != exact).double().mean() < 0.02
    torch.testing.assert_close(found, exact, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_linears_compute_the_same_in_16_bits(kind):
    modules = [module.cuda() for module in linears(kind, count=3)]
    for module in modules:
        module.base_layer.bfloat16()
    x = torch.randn(2, 40, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    own, fused = own_and_fused(modules, x)
    for one, other in zip(fused, own, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 2e-2
