"""Copies of modules with weights in full, whose own code is compared with fused code."""

import copy

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sft_play.models.bnb import unpack
from sft_play.models.experts import packed_weight
from sft_play.models.float8.linear import Float8Linear


@torch.no_grad()
def in_float32(module: nn.Module) -> nn.Module:
    """Return a copy of a module, which may have adapters, with every weight in float32.

    4-bit weights are unpacked: those of experts, and those of linear layers. So are float8 ones.
    """
    copied = copy.deepcopy(module)
    for child in list(copied.modules()):
        make_plain(child, {name: getattr(child, name).float() for name in own_packed(child)})
        vars(child).pop("_activate_lora", None)  # of `unpack_with_adapter`
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
    """Give the copy of a module plain parameters in place of its packed ones, by their names.

    torch's own function would take the names from the module's class, which is that of the copied
    module too.
    """
    if not weights:
        return
    copied.__class__ = parametrize.type_before_parametrizations(copied)
    del copied.parametrizations
    for name, weight in weights.items():
        copied.register_parameter(name, nn.Parameter(weight, requires_grad=False))
