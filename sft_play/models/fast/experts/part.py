"""A few experts of a module, in place of all, for the module's own code in a proof.

Own code unpacks and adapts the matrices of every expert, several times over: 12 GiB for a layer of
gpt-oss-120b. So the tokens of a proof are sent to the first and the last experts. The fused code
runs them in the whole module, and the own code in a copy that has no others.

Legend: E experts, r rank of an adapter.
"""

import copy

import torch
from torch import Tensor, nn

from sft_play.models.experts import (
    SharedParamWrapper,
    packed_weight,
    ranks_of_experts,
    true_shape,
    unwrap,
    weight_of,
)
from sft_play.models.fast.linears.four_bit import lines_of, unpack
from sft_play.models.fast.proof import Call, Part, Taker
from sft_play.models.unpacked import make_plain, own_packed
from sft_play.plan.fast import PROVEN_EXPERTS


def few_experts(module: nn.Module, call: Call) -> Part | None:
    """Return a copy that has PROVEN_EXPERTS, and how to call it; None if all of them run.

    They do if a module has no more, and if ranks share its experts.
    """
    wrappers, experts = unwrap(module)
    count = true_shape(weight_of(experts, "down_proj"))[0]
    if count <= PROVEN_EXPERTS or ranks_of_experts(module) > 1 or len(call.args) != 3:
        return None
    x, choices, weights = call.args
    side = PROVEN_EXPERTS // 2
    chosen = torch.tensor([*range(side), *range(count - side, count)], device=choices.device)
    places = choices % PROVEN_EXPERTS
    takers = {
        name: _taker(name, wrappers[name.count("base_layer.")], chosen, count)
        for name, _ in module.named_parameters()
        if "lora_" in name
    }
    memo = {}  # by the identity of a parameter, what stands for it in the copy
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            take = takers.get(name)
            few = take(parameter) if take else _few_of(parameter, chosen, count)
            memo[id(parameter)] = nn.Parameter(few, parameter.requires_grad)
    return Part(
        _copied(module, memo),
        call._replace(args=(x, places, weights)),
        call._replace(args=(x, chosen[places], weights)),
        takers,
    )


def _taker(name: str, wrapper: nn.Module, chosen: Tensor, count: int) -> Taker:
    """Return what takes the part of the chosen experts of lora_A (E r, in) or lora_B (out, r E)."""
    if isinstance(wrapper, SharedParamWrapper):
        return Tensor.clone
    if "lora_A" in name:
        return lambda a: a.unflatten(0, (count, -1))[chosen].flatten(0, 1)
    return lambda b: b.unflatten(1, (-1, count))[..., chosen].flatten(1)


def _few_of(parameter: nn.Parameter, chosen: Tensor, count: int) -> Tensor:
    """Return the chosen experts of a weight or bias, in full if it is packed."""
    if true_shape(parameter)[0] != count:
        return parameter.clone()
    if not hasattr(parameter, "quant_state"):
        return parameter[chosen]
    lines = lines_of(parameter) if parameter.is_cuda else None
    if lines is None:
        return unpack(parameter)[chosen]
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
        vars(child).pop("_activate_lora", None)  # of `unpack_with_adapter`
        if not isinstance(child, SharedParamWrapper):
            child.num_experts = PROVEN_EXPERTS
    return copied
