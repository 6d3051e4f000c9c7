"""A few experts of a module, in place of all, for the module's own code in a proof.

Own code unpacks and adapts the matrices of every expert, several times over: 12.8 GiB for a layer
of gpt-oss-120b. So the tokens of a proof are sent to the first and the last experts. The fused code
runs them in the whole module, and the own code in a copy that has no others.

Legend: E experts, F of them in the copy, N tokens, k experts of a token, r rank of an adapter.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sft_play.models.experts import packed_weight, ranks_of_experts, true_shape
from sft_play.models.fast.experts.find import unwrap, weight_of
from sft_play.models.fast.linears.four_bit import lines_of, unpack
from sft_play.models.fast.proof import Call, Part
from sft_play.models.shared_experts import SharedParamWrapper
from sft_play.models.unpacked import make_plain, own_packed
from sft_play.plan.fast import PROVEN_EXPERTS


def few_experts(module: nn.Module, call: Call) -> Part | None:
    """Return a module of PROVEN_EXPERTS and how to call it; None where all of them run.

    They do where a module has no more, and where ranks share its experts.
    """
    wrappers, experts = unwrap(module)
    count = true_shape(weight_of(experts, "down_proj"))[0]
    if count <= PROVEN_EXPERTS or ranks_of_experts(module) > 1 or len(call.args) != 3:
        return None
    x, choices, *rest = call.args
    places = choices % PROVEN_EXPERTS
    first = PROVEN_EXPERTS // 2
    ids = torch.where(places < first, places, places + count - PROVEN_EXPERTS)
    takers = {
        name: _taker(name, parameter, count, wrappers)
        for name, parameter in module.named_parameters()
    }
    return Part(
        _copy_of_few(module, takers),
        call._replace(args=(x, places, *rest)),
        call._replace(args=(x, ids, *rest)),
        {name: take for name, take in takers.items() if "lora_" in name},
    )


Taker = Callable[[Tensor], Tensor]  # from a tensor of all experts that of a few


def _taker(name: str, parameter: nn.Parameter, count: int, wrappers: list[nn.Module]) -> Taker:
    """Return what takes the part of a few experts of a parameter, or of its gradient."""
    ends = (
        slice(0, PROVEN_EXPERTS // 2),
        slice(count - PROVEN_EXPERTS + PROVEN_EXPERTS // 2, count),
    )

    if "lora_" not in name and true_shape(parameter)[0] != count:
        return Tensor.clone

    def of_first_side(stacked: Tensor) -> Tensor:
        return torch.cat([stacked[own] for own in ends])

    def of_packed(packed: Tensor) -> Tensor:
        lines = lines_of(packed) if packed.is_cuda else None
        if lines is None:
            return of_first_side(unpack(packed))
        stored = torch.cat([lines.unpack(packed, own) for own in ends])
        return stored.transpose(1, 2) if lines.is_turned else stored

    if "lora_" in name:
        owner = wrappers[name.count("base_layer.")]
        if isinstance(owner, SharedParamWrapper):
            return Tensor.clone
        if "lora_A" in name:  # (E r, in)
            return lambda a: of_first_side(a.unflatten(0, (count, -1))).flatten(0, 1)
        return lambda b: (
            of_first_side(b.unflatten(1, (-1, count)).movedim(2, 0)).movedim(0, 2).flatten(1)
        )
    return of_packed if hasattr(parameter, "quant_state") else of_first_side


@torch.no_grad()
def _copy_of_few(module: nn.Module, takers: dict[str, Taker]) -> nn.Module:
    """Return a copy of experts and their adapters with what `takers` take of each parameter."""
    memo = {}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(takers[name](parameter), parameter.requires_grad)
    own = unwrap(module)[1]
    unpacked = {name: memo[id(packed_weight(own, name))] for name in own_packed(own)}
    copied = copy.deepcopy(module, memo)
    wrappers, experts = unwrap(copied)
    make_plain(experts, unpacked)
    for child in (*wrappers, experts):
        vars(child).pop("_activate_lora", None)  # of `unpack_with_adapter`
        if not isinstance(child, SharedParamWrapper):
            child.num_experts = PROVEN_EXPERTS
    return copied
