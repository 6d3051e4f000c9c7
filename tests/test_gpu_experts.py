"""Fused experts on a GPU: kernels compute their formulas, and nothing waits for the device."""

import pytest
import torch
from bitsandbytes.nn import Params4bit
from test_fast_experts import (
    EXPERTS,
    fused_forward,
    hidden_size,
    largest_difference,
    own,
    run,
    some_experts,
)
from test_mxfp4 import numbers_of_mxfp4
from tiny_models import GPU_SIZES
from torch import Tensor

from sft_kernels import mxfp4
from sft_kernels.experts import function as experts_gates
from sft_kernels.experts.products import (
    ExpertLinear,
    Packed,
    Routing,
    Term,
    rows_outer,
    rows_times,
    sort_by_expert,
    sum_choices,
)

pytestmark = pytest.mark.gpu
TOKENS, CHOICES = 37, 3
# A result is rounded once: one step of bfloat16 is 2^-8. Float32 sums have another order.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2},
}


def routing(tokens: int = TOKENS, experts: int = EXPERTS) -> Routing:
    torch.manual_seed(0)
    return sort_by_expert(torch.rand(tokens, experts).topk(CHOICES).indices, experts)


def to_gpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def routing_on_gpu(choices: Tensor, experts: int) -> Routing:
    return sort_by_expert(choices.cuda(), experts)


@pytest.mark.parametrize("features", [40, 2048, 2880])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_choices_are_summed(features, dtype):
    rows = routing()
    on_gpu = Routing(*to_gpu(*rows[:3]), None)
    values = torch.randn(TOKENS * CHOICES, features).to(dtype)
    weights = torch.rand(TOKENS, CHOICES)
    for factors in (None, weights, weights.to(dtype)):
        wanted = sum_choices(values, rows, factors)
        found = sum_choices(values.cuda(), on_gpu, None if factors is None else factors.cuda())
        torch.testing.assert_close(found.cpu(), wanted, **TOLERANCES[dtype])


# few rows of an expert, some, many: tiles of each size, and both ways to unpack
@pytest.mark.parametrize("tokens", [20, 300, 2500])
@pytest.mark.parametrize("kind", ["plain", "nf4", "nf4 nested", "fp4", "mxfp4"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_are_multiplied_by_the_matrices_of_their_experts(kind, tokens, is_transposed):
    torch.manual_seed(0)
    experts, sides = 9, (320, 448)
    choices = torch.rand(tokens, experts - 1).topk(CHOICES).indices
    choices[:7, 1] = experts  # not here
    on_cpu, on_gpu = sort_by_expert(choices, experts), routing_on_gpu(choices, experts)
    assert torch.equal(on_gpu.order.cpu(), on_cpu.order)
    weight = numbers_of_mxfp4(experts, *sides, is_turned=is_transposed).bfloat16().cuda() / 64
    if kind == "mxfp4":
        weight = mxfp4.pack_mxfp4(weight, is_transposed)
    elif kind != "plain":
        weight = Params4bit(
            weight, requires_grad=False, quant_type=kind[:3], compress_statistics="nested" in kind
        ).cuda()
    linear = ExpertLinear(weight, None, is_transposed, experts, 1.0)
    whole = linear.matrices(torch.bfloat16)
    assert isinstance(whole, Packed) == (kind != "plain")
    for matrices in (whole, whole.transpose(1, 2)):
        reference = matrices if kind == "plain" else matrices.unpacked(torch.bfloat16)
        _, summed, features = matrices.shape
        x = torch.randn(tokens, summed).bfloat16()
        term = Term(torch.randn(tokens * CHOICES, 9), torch.randn(experts, 9, features), 0.5)
        bias = torch.randn(experts, features)
        wanted = rows_times(x.float(), reference.float().cpu(), on_cpu, term, bias, True)
        here = int(on_cpu.ends[-1])
        on_gpu_term = Term(term.ranks.bfloat16().cuda(), term.factors.cuda(), 0.5)
        found = rows_times(x.cuda(), matrices, on_gpu, on_gpu_term, bias.cuda(), True)
        error = (found[:here].cpu().float() - wanted[:here]).norm() / wanted[:here].norm()
        assert error < 4e-3


@pytest.mark.parametrize("of_tokens", [False, True])
def test_rows_of_experts_are_summed_to_matrices(of_tokens):
    rows = routing(300)
    on_gpu = Routing(*to_gpu(*rows[:3]), None)
    x = torch.randn(900, 12).bfloat16()
    y = torch.randn(300 if of_tokens else 900, 200).bfloat16()
    weights = torch.rand(900)
    wanted = torch.empty(EXPERTS, 12, 200)
    rows_outer(x.float(), y.float(), rows, wanted, 0.5, weights, of_tokens)
    made = torch.full((200, 12, EXPERTS), torch.nan, device="cuda")
    found = made.permute(2, 1, 0)
    rows_outer(*to_gpu(x, y), on_gpu, found, 0.5, weights.cuda(), of_tokens)
    assert (found.cpu() - wanted).norm() / wanted.norm() < 4e-3


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
def test_gates_compute_their_formulas(gate, dtype, features):
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


@pytest.mark.parametrize(
    "gate", [experts_gates.FusedGlu("silu"), experts_gates.ClampedGlu(1.702, 7.0)]
)
def test_gates_leave_out_rows_behind_the_last_expert(gate):
    ends = torch.tensor([2, 2, TOKENS - 5], dtype=torch.int32, device="cuda")
    y = torch.randn(TOKENS, 48, device="cuda", dtype=torch.bfloat16)
    dh, weights = torch.randn_like(y[:, ::2]), torch.rand(TOKENS, device="cuda")
    y[-5:] = torch.nan
    dh = dh.contiguous()
    found = [gate.forward(y, ends), *gate.backward(dh.clone(), y, weights, ends)]
    wanted = [gate.forward(y), *gate.backward(dh.clone(), y, weights)]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[:-5], other[:-5])
    assert torch.equal(found[3][-5:], dh[-5:]), "h is written over dh, but not there"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_fused_step_is_as_near_to_float32_as_a_plain_one(model_type):
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
def test_a_fused_step_never_waits_for_the_gpu(model_type):
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
