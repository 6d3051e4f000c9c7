"""Recognize modules of experts, and what PEFT has wrapped around them.

They are recognized by what transformers' `use_experts_implementation` leaves on a module: the
matrices of all experts in one parameter, and flags that say how they lie in memory. PEFT wraps such
a module once for each adapted parameter; the outermost wrapper gets the fused forward method.
"""

from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from sft_play.models.experts import packed_weight, true_shape

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules of experts: the outermost wrapper if PEFT has wrapped one."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # a wrapper comes before what it wraps
        if module in inside:
            continue
        wrappers, experts = unwrap(module)
        if is_experts(experts):
            found.append(module)
            inside.update(wrappers, [experts])
    return found


def unwrap(module: nn.Module) -> tuple[list[ParamWrapper], nn.Module]:
    """Return PEFT's wrappers around a module, outermost first, and the module."""
    wrappers: list[ParamWrapper] = []
    while isinstance(module, ParamWrapper):
        wrappers.append(module)
        module = module.base_layer
    return wrappers, module


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts in transformers' form."""
    if not all(hasattr(module, flag) for flag in FLAGS):
        return False
    weights = (weight_of(module, inner_name(module)), weight_of(module, "down_proj"))
    return all(weight is not None and len(true_shape(weight)) == 3 for weight in weights)


def inner_name(experts: nn.Module) -> str:
    """Return the name of the parameter that reads the hidden states."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def weight_of(experts: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter as it is stored, packed if it is in 4 bits (`models.experts`)."""
    if name in experts._parameters:
        return experts._parameters[name]
    return packed_weight(experts, name)
