"""Fused experts compute what transformers' experts with PEFT's wrappers compute, and save less."""

from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from test_mxfp4 import numbers_of_mxfp4
from tiny_models import TINY, WHOLE_BLOCKS, Sizes, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from sft_kernels import mxfp4
from sft_kernels.expert_modules import find_experts, inner_name, is_experts, unwrap
from sft_kernels.experts import function as experts_gates
from sft_kernels.experts.function import ClampedGlu, FusedGlu, OwnGate
from sft_kernels.experts.install import bind_gate, experts_forward, why_experts_not_fusable
from sft_kernels.linears.four_bit import unpack_with_kernel

MODEL_TYPES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "granitemoe"),
    *("ernie4_5_moe", "lfm2_moe", "qwen3_next", "qwen3_5_moe", "jamba", "granitemoehybrid"),
    *("nemotron_h", "deepseek_v3"),
)
EXPERTS, TOKENS, RANK = 6, 11, 3  # the rank is no multiple of what a grouped product wants
EXACT = 1e-5  # float32: sums in another order
FAR = 1e-2


class Pass(NamedTuple):
    """The results of one forward and backward pass, by name."""

    tensors: dict[str, Tensor]


def some_experts(
    model_type: str, targets: str = "both", dtype: torch.dtype = torch.float32, sizes: Sizes = TINY
) -> nn.Module:
    """Return a module of experts with adapters on one of its linears, both or none."""
    model = tiny_model(model_type, sizes, dtype)
    names = [name for name, module in model.named_modules() if is_experts(module)]
    inner = inner_name(model.get_submodule(names[-1]))
    chosen = {"both": (inner, "down_proj"), "inner": (inner,), "down": ("down_proj",), "none": ()}
    parameters = [f"{names[-1]}.{name}" for name in chosen[targets]]
    if parameters:
        adapters = LoraConfig(r=RANK, lora_alpha=5, target_modules=[], target_parameters=parameters)
        model = get_peft_model(model, adapters)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return find_experts(model.train())[-1]


def hidden_size(experts: nn.Module) -> int:
    base = unwrap(experts)[1]
    return base.down_proj.shape[2 if base.is_transposed else 1]


def random_choices() -> Tensor:
    return torch.rand(TOKENS, EXPERTS).topk(2).indices


CHOICES = {
    "random": random_choices,
    "two experts without tokens": lambda: torch.rand(TOKENS, EXPERTS - 2).topk(2).indices + 1,
    "one token an expert": lambda: torch.arange(EXPERTS).view(-1, 2),
    "all tokens to one expert, twice": lambda: torch.full((TOKENS, 2), 4),
}


def run(experts: nn.Module, forward: Callable[..., Tensor], choices: Tensor, seed: int = 0) -> Pass:
    """Return the output of a forward method and the gradients of inputs and adapters."""
    generator = torch.Generator().manual_seed(seed)
    like = unwrap(experts)[1].down_proj
    size = hidden_size(experts)
    x = torch.randn(len(choices), size, generator=generator).to(like).requires_grad_()
    weights = torch.rand(choices.shape, generator=generator).to(like).requires_grad_()
    adapters = {name: p for name, p in experts.named_parameters() if p.requires_grad}
    out = forward(x, choices, weights)
    gradient = torch.randn(out.shape, generator=generator).to(like)
    found = torch.autograd.grad(out, [x, weights, *adapters.values()], gradient)
    names = ("of x", "of the weights", *adapters)
    return Pass({"output": out.detach(), **dict(zip(names, found, strict=True))})


def own(experts: nn.Module, choices: Tensor) -> Pass:
    return run(experts, lambda *inputs: type(experts).forward(experts, *inputs), choices)


def fused(experts: nn.Module, choices: Tensor) -> Pass:
    return run(experts, fused_forward(experts), choices)


def largest_difference(one: Pass, other: Pass) -> float:
    """Return the largest relative difference of two passes' tensors."""
    assert one.tensors.keys() == other.tensors.keys()
    differences = []
    for name, expected in one.tensors.items():
        size = expected.norm().clamp(min=1e-12)
        differences.append(float((other.tensors[name] - expected).norm() / size))
    return max(differences)


@pytest.mark.parametrize(
    "case",
    [
        *((model_type,) for model_type in MODEL_TYPES),
        *(("gpt_oss", targets) for targets in ("inner", "down", "none")),
    ],
)
def test_output_and_gradients_are_those_of_transformers_and_peft(case):
    experts = some_experts(*case)
    assert why_experts_not_fusable(experts) is None
    for seed, choose in enumerate(CHOICES.values()):
        torch.manual_seed(seed)
        choices = choose()
        assert largest_difference(own(experts, choices), fused(experts, choices)) < EXACT


def test_experts_without_tokens_get_exactly_no_gradient():
    experts = some_experts("mixtral")
    result = fused(experts, torch.full((TOKENS, 2), 4))
    for name, gradient in result.tensors.items():
        if "lora_A" in name:
            by_expert = gradient.view(EXPERTS, RANK, -1)
            assert by_expert[4].any()
            assert not by_expert[[0, 1, 2, 3, 5]].any()


def test_a_choice_of_an_expert_of_another_rank_adds_nothing():
    experts = some_experts("qwen3_moe")
    unwrap(experts)[1]._is_expert_parallel = True  # by it newer versions know of other ranks
    torch.manual_seed(0)
    choices = random_choices()
    choices[3, 1] = EXPERTS
    expected = run(experts, lambda *inputs: type(experts).forward(experts, *inputs), choices)
    computed = fused(experts, choices)
    assert largest_difference(expected, computed) < EXACT
    assert computed.tensors["of the weights"][3, 1] == 0


@pytest.mark.parametrize(
    "model_type, gate", [("qwen3_moe", FusedGlu("silu")), ("gpt_oss", ClampedGlu(1.702, 7.0))]
)
def test_a_known_gate_is_recognized(model_type, gate):
    experts = some_experts(model_type, "none")
    assert fused_forward(experts).__self__.fused_gate == gate


def test_a_gate_that_only_looks_clamped_runs_its_own_formula():
    experts = some_experts("gpt_oss", "none")
    formula = type(experts)._apply_gate
    experts._apply_gate = lambda y: 1.5 * formula(experts, y)
    assert isinstance(experts_gates.gate_of(experts), OwnGate)


def test_half_precision_is_as_near_to_float32_as_transformers():
    exact = some_experts("mixtral")
    half = some_experts("mixtral", dtype=torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())  # the same rounded weights
    choices = random_choices()
    reference = own(exact, choices)
    noise = largest_difference(reference, own(half, choices))
    assert largest_difference(reference, fused(half, choices)) < 1.5 * noise < FAR * 3


class Dequantized(nn.Module):
    """What own code reads of a packed parameter."""

    def forward(self, packed: Params4bit) -> Tensor:
        return unpack_with_kernel(packed)


@pytest.mark.parametrize(
    "model_type, quant_type", [("qwen3_moe", "nf4"), ("gpt_oss", "nf4"), ("gpt_oss", "mxfp4")]
)
def test_packed_experts_compute_what_their_dequantized_weights_compute(model_type, quant_type):
    experts = some_experts(model_type, sizes=WHOLE_BLOCKS)
    base = unwrap(experts)[1]
    packed: dict[str, Params4bit] = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(base, name).data
        if quant_type == "nf4":
            packed[name] = Params4bit(weight, quant_type="nf4").to("cpu")
        else:
            numbers = numbers_of_mxfp4(*weight.shape, is_turned=True).to(weight) / 64
            packed[name] = mxfp4.pack_mxfp4(numbers, is_turned=True)
        dequantized = unpack_with_kernel(packed[name])
        setattr(base, name, nn.Parameter(dequantized, requires_grad=False))
    choices = random_choices()
    expected = own(experts, choices)
    for name, weight in packed.items():
        setattr(base, name, weight)
        reader = Dequantized()
        parametrize.register_parametrization(base, name, reader, unsafe=True)
    assert find_experts(nn.ModuleList([experts])) == [experts]
    assert why_experts_not_fusable(experts) is None
    assert largest_difference(expected, fused(experts, choices)) < EXACT


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward pass keeps for backward, weights left out."""
    kept: dict[int, int] = {}

    def keep(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    return sum(kept.values())


def test_what_is_kept_is_the_input_the_first_products_and_the_routing():
    experts = some_experts("qwen3_moe")
    torch.manual_seed(0)
    tokens, size = 64, hidden_size(experts)
    x = torch.randn(tokens, size, requires_grad=True)
    choices = torch.rand(tokens, EXPERTS).topk(2).indices
    weights = torch.rand(tokens, 2, requires_grad=True)
    rows = 2 * tokens
    inner_features = unwrap(experts)[1].gate_up_proj.shape[1]
    floats = tokens * size + rows * (inner_features + 2 * RANK + 1)
    integers = 2 * rows + EXPERTS
    kept = saved_bytes(lambda: fused_forward(experts)(x, choices, weights))
    assert kept <= 4 * floats + 8 * integers
    assert kept < saved_bytes(lambda: type(experts).forward(experts, x, choices, weights)) / 3


def test_a_recomputed_pass_has_the_same_gradients():
    experts = some_experts("gpt_oss")
    choices = random_choices()
    forward = fused_forward(experts)
    again = run(experts, lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False), choices)
    assert largest_difference(fused(experts, choices), again) == 0


def test_evaluation_builds_no_adapted_weights(monkeypatch):
    experts = some_experts("mixtral").eval()
    forward = fused_forward(experts)
    inputs = (torch.randn(TOKENS, hidden_size(experts)), random_choices(), torch.rand(TOKENS, 2))
    with torch.no_grad():
        expected = type(experts).forward(experts, *inputs)
        monkeypatch.setattr(ParamWrapper, "forward", None)
        torch.testing.assert_close(forward(*inputs), expected)


def test_what_cannot_be_fused_says_why():
    experts = some_experts("mixtral")
    base = unwrap(experts)[1]
    base.down_proj.requires_grad_()
    assert why_experts_not_fusable(experts) == "base weights that are trained"
    base.down_proj.requires_grad_(False)
    base.down_proj.ds_id = 7
    assert why_experts_not_fusable(experts) == "weights partitioned by ZeRO-3"
    del base.down_proj.ds_id
    experts.enable_adapters(False)
    assert why_experts_not_fusable(experts) == "adapters disabled or merged"
    choices = random_choices()
    inputs = (torch.randn(TOKENS, hidden_size(experts)), choices, torch.rand(TOKENS, 2))
    assert torch.equal(fused_forward(experts)(*inputs), type(experts).forward(experts, *inputs))


def test_experts_that_are_partitioned_are_found():
    experts = some_experts("mixtral", "none")
    for weight in experts.parameters():
        weight.ds_shape = weight.shape
        weight.data = torch.empty(0)
    assert find_experts(nn.ModuleList([experts])) == [experts]


def fused_forward(experts: nn.Module) -> Callable[..., Tensor]:
    """Return the fused forward method of experts, which is not installed."""
    bind_gate(experts)
    return MethodType(experts_forward, experts)
