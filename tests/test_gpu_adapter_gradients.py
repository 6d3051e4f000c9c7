"""Gradients of adapters on a GPU: one pass over dy is as exact as two products, and repeatable."""

import pytest
import torch

from sft_kernels.linears.adapter_gradients import fit_one_pass
from sft_kernels.linears.products import AdaptedLinear, BoundLinears, LinearAdapter

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SCALE = 1.5


@pytest.mark.parametrize("rank", [8, 12, 16])
@pytest.mark.parametrize(
    "outs", [(4096, 1024, 1024), (14336, 14336), (2048,), (512, 8), (151,), (36864,)], ids=str
)
@pytest.mark.parametrize("rows", [1, 100, 8192])
def test_one_pass_is_as_exact_as_two_products(rows, outs, rank):
    torch.manual_seed(0)
    dy = [torch.randn(rows, out + 64, device=GPU).bfloat16()[:, :out] for out in outs]
    b = [torch.randn(out, rank, device=GPU).bfloat16() for out in outs]
    xa = torch.randn(rows, rank * len(outs), device=GPU).bfloat16()
    linears = []
    for number, each in enumerate(b):
        columns = slice(rank * number, rank * (number + 1))
        adapter = LinearAdapter(torch.empty(rank, 1), each.float(), SCALE, rank, number, columns)
        linears.append(AdaptedLinear(torch.nn.Linear(1, 1), adapter))
    bound = BoundLinears(linears)
    if torch.cuda.get_device_capability(GPU)[0] == 9:
        assert bound.are_equal and fit_one_pass(dy, b)
    du, db = bound.rank_and_output_gradients(dy, xa, (xa, *b))
    again_du, again_db = bound.rank_and_output_gradients(dy, xa, (xa, *b))
    assert torch.equal(du, again_du) and all(map(torch.equal, db, again_db))
    for index, (grad, each) in enumerate(zip(dy, b, strict=True)):
        part = slice(index * rank, (index + 1) * rank)
        exact_du = SCALE * grad.double() @ each.double()
        exact_db = SCALE * grad.double().t() @ xa[:, part].double()
        torch.testing.assert_close(du[:, part].double(), exact_du, rtol=2**-8, atol=1e-3)
        torch.testing.assert_close(db[index].double(), exact_db, rtol=2**-8, atol=1e-2)
