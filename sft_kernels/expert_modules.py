"""Find the experts of a layer, in the form of transformers' `use_experts_implementation`.

It sets flags on a module that describe the memory layout of its matrices. PEFT wraps such a module
once for each adapted parameter. The outermost wrapper gets the fused forward method.

Legend: E experts, r rank, `in` and `out` features.
"""

from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


def ranks_of_experts(model: nn.Module) -> int:
    """Return how many ranks share the experts of a model, 1 if each rank has all of them."""
    found = (getattr(module, "expert_ranks", None) for module in model.modules())
    return next((ranks.process.world_size for ranks in found if ranks is not None), 1)


def packed_weight(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the 4-bit parameter that stores an expert parameter, None if it is not packed.

    It is bitsandbytes' Params4bit; its `quant_state.shape` is (experts, out, in) or transposed.
    """
    if not is_parametrized(module, name):
        return None
    original = module.parametrizations[name].original
    return original if hasattr(original, "quant_state") else None


def true_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter, also if it is sharded (ZeRO-3) or packed."""
    state = getattr(parameter, "quant_state", None)
    shape = parameter.shape if state is None else state.shape
    return tuple(getattr(parameter, "ds_shape", shape))


FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return the expert modules of a model: the outermost wrapper if PEFT has wrapped one."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # a wrapper comes before the module that it wraps
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
    """Return whether a module contains experts in transformers' form."""
    if not all(hasattr(module, flag) for flag in FLAGS):
        return False
    weights = (weight_of(module, inner_name(module)), weight_of(module, "down_proj"))
    return all(weight is not None and len(true_shape(weight)) == 3 for weight in weights)


def inner_name(experts: nn.Module) -> str:
    """Return the name of the parameter that reads the hidden states."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def weight_of(experts: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter as it is stored: packed if it is in 4 bits."""
    if name in experts._parameters:
        return experts._parameters[name]
    return packed_weight(experts, name)


class SharedParamWrapper(ParamWrapper):
    """One adapter for all experts of a layer, W_e + s B A: lora_A (r, in) and lora_B (out, r).

    PEFT publishes the factors of each expert. In lora_A (E r, in), the ranks of one expert follow
    each other. In lora_B (out, r E), the experts of one rank follow each other. So a shared adapter
    is published with the same factors for every expert.
    """

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        sizes = super()._get_in_out_features(module)
        self.experts = self.num_experts
        self.num_experts = 1
        return sizes

    def get_delta_weight(self, adapter_name: str, *args: Any, **options: Any) -> Tensor:
        """Return the change of each expert's matrix, in the parameter's layout."""
        delta = super().get_delta_weight(adapter_name, *args, **options)  # (out, in)
        return delta if self._did_swap_in_out_features else delta.T
