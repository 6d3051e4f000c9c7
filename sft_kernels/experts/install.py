"""Fuse modules of experts with their adapters.

Evaluation and generation run the fused forward method too: PEFT's wrappers build all adapted
weights in every call.
"""

import torch
from bitsandbytes.nn import Params4bit
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sft_kernels.expert_modules import (
    SharedParamWrapper,
    find_experts,
    inner_name,
    true_shape,
    unwrap,
    weight_of,
)
from sft_kernels.experts.function import FrozenExperts, LoraExpertsFunction, gate_of
from sft_kernels.experts.products import ExpertLinear, sort_by_expert
from sft_kernels.linears.lora import active_adapters, why_adapter_not_fusable, why_hooked
from sft_kernels.needs import ZERO_3
from sft_kernels.partitioned import is_missing
from sft_kernels.proof import prove
from sft_kernels.training_setup import TrainingSetup, Unsupported, fuse, to_compute_dtype
from sft_kernels.trial import few_experts


def install_experts(setup: TrainingSetup) -> int:
    """Fuse the experts of a model with their adapters; return the number of modules.

    Raises: Unsupported if the model has experts but none of them can be fused.
    """
    modules = find_experts(setup.decoder)
    if not modules:
        return 0
    if setup.is_full:
        raise Unsupported("mode full trains the experts themselves")
    if setup.on_gpu and setup.process.compute_dtype != torch.bfloat16:
        raise Unsupported("its kernels compute in bfloat16")
    reasons = {module: why_experts_not_fusable(module) for module in modules}
    candidates = setup.without_reason(reasons)
    for module in candidates:
        bind_gate(module, setup.has_values)
    agreed = prove(candidates, experts_forward, setup, part_of=few_experts)
    fuse(agreed, experts_forward)
    return len(agreed)


def why_experts_not_fusable(module: nn.Module) -> str | None:
    """Return why experts, with or without adapters, cannot be fused; None if they can.

    Hooks of 4-bit experts are ignored: they only cache what the original code unpacks.
    """
    wrappers, experts = unwrap(module)
    names = [wrapper.parameter_name for wrapper in wrappers]
    for index, wrapper in enumerate(wrappers):
        if wrapper.parameter_name not in (inner_name(experts), "down_proj"):
            return f"adapters on {wrapper.parameter_name}"
        if wrapper.num_experts == 1 and not isinstance(wrapper, SharedParamWrapper):
            return "a single expert, which PEFT adapts as one linear"
        reason = why_adapter_not_fusable(wrapper)
        if reason is None and index > 0:  # hooks of the outermost module are still called
            reason = why_hooked(wrapper)
        if reason:
            return reason
    if len(set(names)) < len(names):
        return "two adapters on one parameter"
    reason = why_hooked(experts) if wrappers and not is_parametrized(experts) else None
    return reason or _why_base_not_fusable(experts)


def _why_base_not_fusable(experts: nn.Module) -> str | None:
    for parameter in experts.parameters(recurse=False):
        if parameter.requires_grad:
            return "base weights that are trained"
        if is_missing(parameter):
            return ZERO_3
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm after each expert"
    for name in (inner_name(experts), "down_proj"):
        weight = weight_of(experts, name)
        if isinstance(weight, Params4bit) and weight.quant_state is None:
            return "4-bit weights in no form to train on"
    return None


def bind_gate(module: nn.Module, has_values: bool = True) -> None:
    """Set the gate that `experts_forward` reads, on the experts or their outermost wrapper."""
    module.fused_gate = gate_of(unwrap(module)[1], has_values)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Forward method of experts: fused, or that of the class if it cannot be fused.

    Shapes: hidden states (N, H), experts of each token and their weights (N, k), to (N, H).
    """
    x = to_compute_dtype(hidden_states)
    has_kernels = not x.is_cuda or x.dtype == torch.bfloat16  # generation may not be in 16 bits
    if not has_kernels or why_experts_not_fusable(self):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    wrappers, module = unwrap(self)
    inner, inner_adapter = _split(module, inner_name(module), wrappers)
    down, down_adapter = _split(module, "down_proj", wrappers)
    experts = FrozenExperts(inner, self.fused_gate, down)
    routing = sort_by_expert(top_k_index, inner.experts)
    adapters = (*inner_adapter, *down_adapter)
    out = LoraExpertsFunction.apply(x.contiguous(), top_k_weights, routing, experts, *adapters)
    return out.to(hidden_states.dtype)


def _split(
    experts: nn.Module, name: str, wrappers: list[ParamWrapper]
) -> tuple[ExpertLinear, tuple[Tensor | None, Tensor | None]]:
    """Return the frozen part of a linear of all experts, and its lora_A and lora_B."""
    weight = weight_of(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    linear = ExpertLinear(weight, bias, experts.is_transposed, true_shape(weight)[0])
    for wrapper in wrappers:
        active = active_adapters(wrapper)
        if wrapper.parameter_name == name and active:
            is_shared = isinstance(wrapper, SharedParamWrapper)
            linear = linear._replace(scale=wrapper.scaling[active[0]], is_shared=is_shared)
            return linear, (wrapper.lora_A[active[0]].weight, wrapper.lora_B[active[0]].weight)
    return linear, (None, None)
