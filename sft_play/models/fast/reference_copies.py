"""Copies of a module with only a few experts, for its original implementation in a proof.

The original implementation unpacks and adapts the matrices of every expert, several times: 12 GiB
for a layer of gpt-oss-120b. A proof therefore sends its tokens only to the first and last experts.
The fused code runs them in the full module. The original runs in a copy with only these experts.

Legend: E experts, r rank of an adapter.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sft_play.models.bnb import unpack
from sft_play.models.experts import (
    SharedParamWrapper,
    packed_weight,
    ranks_of_experts,
    true_shape,
    unwrap,
    weight_of,
)
from sft_play.models.fast.capture import Call
from sft_play.models.fast.linears import four_bit
from sft_play.models.float8.linear import Float8Linear
from sft_play.plan.fast import PROVEN_EXPERTS


class Part(NamedTuple):
    """A smaller module and its call for the original, if the full one needs too much memory."""

    module: nn.Module
    call: Call
    whole_call: Call  # of the full module, which the fused code runs
    take: Callable[[str, Tensor], Tensor]  # the part of a lora_A (E r, in) or lora_B (out, r E)

    def of_whole(self, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the tensors of the full module, reduced to the experts of the part."""
        return {
            name: self.take(name, tensor) if "lora_" in name and tensor is not None else tensor
            for name, tensor in tensors.items()
        }


def few_experts(module: nn.Module, call: Call) -> Part | None:
    """Return a copy with PROVEN_EXPERTS experts, and its call; None if all experts run.

    All experts run if a module does not have more, or if ranks share its experts.
    """
    wrappers, experts = unwrap(module)
    count = true_shape(weight_of(experts, "down_proj"))[0]
    if count <= PROVEN_EXPERTS or ranks_of_experts(module) > 1 or len(call.args) != 3:
        return None
    x, choices, weights = call.args
    side = PROVEN_EXPERTS // 2
    chosen = torch.tensor([*range(side), *range(count - side, count)], device=choices.device)
    places = choices % PROVEN_EXPERTS

    def take(name: str, factor: Tensor) -> Tensor:
        if isinstance(wrappers[name.count("base_layer.")], SharedParamWrapper):
            return factor.clone()
        if "lora_A" in name:
            return factor.unflatten(0, (count, -1))[chosen].flatten(0, 1)
        return factor.unflatten(1, (-1, count))[..., chosen].flatten(1)

    memo = {}  # identity of a parameter: its replacement in the copy
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            few = take(name, parameter) if "lora_" in name else _few_of(parameter, chosen, count)
            memo[id(parameter)] = nn.Parameter(few, parameter.requires_grad)
    return Part(
        _copied(module, memo),
        call._replace(args=(x, places, weights)),
        call._replace(args=(x, chosen[places], weights)),
        take,
    )


def _few_of(parameter: nn.Parameter, chosen: Tensor, count: int) -> Tensor:
    """Return the chosen experts of a weight or bias, unpacked if it is packed."""
    if true_shape(parameter)[0] != count:
        return parameter.clone()
    if not hasattr(parameter, "quant_state"):
        return parameter[chosen]
    lines = four_bit.lines_of(parameter) if parameter.is_cuda else None
    if lines is None:
        return four_bit.unpack(parameter)[chosen]
    stored = [lines.unpack(parameter, slice(each, each + 1)) for each in chosen.tolist()]
    few = torch.cat(stored)
    return few.transpose(1, 2) if lines.is_turned else few


def _copied(module: nn.Module, memo: dict[int, nn.Parameter]) -> nn.Module:
    """Return a copy of experts and their adapters with other parameters."""
    own = unwrap(module)[1]
    in_full = {name: memo[id(packed_weight(own, name))] for name in own_packed(own)}
    copied = copy.deepcopy(module, memo)
    wrappers, experts = unwrap(copied)
    make_plain(experts, in_full)
    for child in (*wrappers, experts):
        vars(child).pop("_activate_lora", None)  # set by `unpack_with_adapter`
        if not isinstance(child, SharedParamWrapper):
            child.num_experts = PROVEN_EXPERTS
    return copied


@torch.no_grad()
def in_float32(module: nn.Module) -> nn.Module:
    """Return a copy of a module, which may have adapters, with every weight in float32.

    4-bit weights of experts and linear layers are unpacked, and so are float8 weights.
    """
    copied = copy.deepcopy(module)
    for child in list(copied.modules()):
        make_plain(child, {name: getattr(child, name).float() for name in own_packed(child)})
        vars(child).pop("_activate_lora", None)  # set by `unpack_with_adapter`
        for name, linear in child.named_children():
            if isinstance(linear, Linear4bit):
                weight = unpack(linear.weight).float()
            elif isinstance(linear, Float8Linear):
                weight = linear.dequantized_weight(torch.float32)
            else:
                continue
            plain = nn.Linear(linear.in_features, linear.out_features, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = linear.bias
            setattr(child, name, plain)
    return copied.float()


def own_packed(module: nn.Module) -> list[str]:
    """Return the names of a module's packed parameters."""
    names = getattr(module, "parametrizations", ())
    return [name for name in names if packed_weight(module, name) is not None]


def make_plain(copied: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace the packed parameters of a module's copy with plain ones, given by name.

    torch's function would remove the names from the module's class, which the original module
    shares with the copy.
    """
    if not weights:
        return
    copied.__class__ = parametrize.type_before_parametrizations(copied)
    del copied.parametrizations
    for name, weight in weights.items():
        copied.register_parameter(name, nn.Parameter(weight, requires_grad=False))
