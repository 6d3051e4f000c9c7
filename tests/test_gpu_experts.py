"""Fused experts on a GPU: kernels compute their formulas, and nothing waits for the device."""

import pytest
import torch
from test_fast_experts import (
    EXPERTS,
    fused_forward,
    hidden_size,
    largest_difference,
    own,
    run,
    some_experts,
)
from tiny_models import GPU_SIZES
from torch import Tensor

from sft_play.models.fast.experts import function as experts_gates
from sft_play.models.fast.experts.products import Routing, sort_by_expert, sum_choices, take_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOKENS, CHOICES = 37, 3
# A result is rounded once: one step of bfloat16 is 2^-8. Float32 sums have another order.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2},
}


def routing() -> Routing:
    torch.manual_seed(0)
    return sort_by_expert(torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices, EXPERTS)


def to_gpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("features", [40, 2048, 2880])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tokens_are_gathered_and_summed(features: int, dtype: torch.dtype) -> None:
    rows = routing()
    on_gpu = Routing(*to_gpu(*rows))
    x = torch.randn(TOKENS, features).to(dtype)
    assert torch.equal(take_tokens(x.cuda(), on_gpu).cpu(), take_tokens(x, rows))
    one, two = torch.randn(2, TOKENS * CHOICES, features).to(dtype)
    weights = torch.rand(TOKENS, CHOICES)
    for parts in ((one,), (one, two)):
        for factors in (None, weights, weights.to(dtype)):
            wanted = sum_choices(parts, rows.rows, factors)
            given = None if factors is None else factors.cuda()
            found = sum_choices(tuple(to_gpu(*parts)), on_gpu.rows, given)
            torch.testing.assert_close(found.cpu(), wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize("features", [24, 768, 2880])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "gate",
    [
        experts_gates.FusedGlu("silu"),
        experts_gates.FusedGlu("gelu_tanh"),
        experts_gates.ClampedGlu(1.702, 7.0),
    ],
    ids=["silu", "gelu", "clamped"],
)
def test_gates_compute_their_formulas(
    gate: experts_gates.Gate, dtype: torch.dtype, features: int
) -> None:
    torch.manual_seed(0)
    y = (4 * torch.randn(TOKENS, 2 * features)).to(dtype)
    dh = torch.randn(TOKENS, features).to(dtype)
    weights = torch.rand(TOKENS)
    found = gate.forward(y.cuda()).cpu()
    torch.testing.assert_close(found, gate.forward(y), **TOLERANCES[dtype])
    wanted = gate.backward(dh.float(), y.float(), weights)
    found = gate.backward(*to_gpu(dh, y, weights))
    for one, two, scale in zip(found, wanted, (1, features**0.5, 1), strict=True):
        tolerance = TOLERANCES[dtype]
        atol = 4 * scale * tolerance["atol"]
        torch.testing.assert_close(one.cpu().float(), two, rtol=tolerance["rtol"], atol=atol)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_fused_step_is_as_near_to_float32_as_a_plain_one(model_type: str) -> None:
    exact = some_experts(model_type, sizes=GPU_SIZES)
    half = some_experts(model_type, sizes=GPU_SIZES, dtype=torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())  # the same rounded weights
    exact.cuda()
    half.cuda()
    choices = torch.rand(TOKENS, EXPERTS).topk(2).indices.cuda()
    reference = own(exact, choices)
    noise = largest_difference(reference, own(half, choices))
    assert largest_difference(reference, run(half, fused_forward(half), choices)) < 1.5 * noise


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_fused_step_never_waits_for_the_gpu(model_type: str) -> None:
    experts = some_experts(model_type, sizes=GPU_SIZES, dtype=torch.bfloat16).cuda()
    forward = fused_forward(experts)
    x = torch.randn(TOKENS, hidden_size(experts), device="cuda", dtype=torch.bfloat16)
    choices = torch.rand(TOKENS, EXPERTS, device="cuda").topk(2).indices
    weights = torch.rand(TOKENS, 2, device="cuda", dtype=torch.bfloat16).requires_grad_()
    x.requires_grad_()
    forward(x, choices, weights).sum().backward()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    x.grad = None
    try:
        forward(x, choices, weights).sum().backward()  # torch raises where it would wait
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()
