"""A gated MLP's h with the products of the adapter behind it on a GPU: exact, and repeatable."""

import pytest
import torch

from sft_play.models.fast.linears import glu_adapter
from sft_play.models.fast.linears.glu import glu_backward, glu_forward
from sft_play.models.fast.linears.glu_adapter import backward_with_adapter, fit_one_kernel
from sft_play.models.fast.linears.products import a_gradient

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rank", [5, 16])
@pytest.mark.parametrize("rows, features", [(1, 151), (100, 8192), (8192, 14336)])
def test_one_kernel_is_as_exact_as_two(rows, features, rank, activation):
    torch.manual_seed(0)
    both = torch.randn(rows, 2 * features, device=GPU).bfloat16()
    gate, up = both.chunk(2, dim=1)
    dh = torch.randn(rows, features, device=GPU).bfloat16()
    a = torch.randn(rank, features, device=GPU).bfloat16()
    du = torch.randn(rows, rank, device=GPU).bfloat16()
    if torch.cuda.get_device_capability(GPU)[0] == 9:
        assert fit_one_kernel(gate, up, rank, rows)
        h, ha = glu_adapter.launch_forward(gate, up, activation, a)
        assert torch.equal(h, glu_forward(gate, up, activation))
        again, again_ha = glu_adapter.launch_forward(gate, up, activation, a)
        assert torch.equal(h, again) and torch.equal(ha, again_ha)
        exact = h.double() @ a.double().t()
        torch.testing.assert_close(ha.double(), exact, rtol=2**-8, atol=2**-10 * features**0.5)
    product = dh.clone()
    wanted = [torch.empty_like(dh) for _ in range(2)]
    glu_backward(product, gate, up, activation, *wanted, h=product)
    exact = du.double().t() @ product.double()
    found = []
    for _ in range(2):
        grads = [torch.empty_like(dh) for _ in range(2)]
        h = dh.clone()
        da = backward_with_adapter(h, gate, up, activation, *grads, du)
        da = a_gradient(du, h, torch.float32) if da is None else da
        assert all(map(torch.equal, grads, wanted)) and da.dtype == torch.float32
        torch.testing.assert_close(da.double(), exact, rtol=1e-4, atol=1e-4 * rows**0.5)
        found.append(da)
    assert torch.equal(*found)
