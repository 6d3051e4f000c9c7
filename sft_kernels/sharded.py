"""Modules whose weights torch's FSDP2 has sharded, and the layers that gather them."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer


def run_within(
    module: nn.Module, context: Callable[[], contextlib.AbstractContextManager]
) -> list[RemovableHandle]:
    """Let a module's forward passes run inside a context; return the hooks.

    The context is always left, also if checkpointing ends its second pass with an exception.
    """
    running = contextlib.ExitStack()

    def enter(*_: Any) -> None:
        running.enter_context(context())

    def leave(*_: Any) -> None:
        running.close()

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def outermost_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of all stacks of a model, including vision parts."""
    found: list[GradientCheckpointingLayer] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # a module comes before its children
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a weight computes on: for a sharded one, the device of its ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.device
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded weights of a model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def units_by_module(model: nn.Module) -> dict[nn.Module, FSDPModule]:
    """Return the unit that each module's weights belong to, {} for a model that is not sharded."""
    found: dict[nn.Module, FSDPModule] = {}
    for module in model.modules():  # a unit comes before the units inside it
        if isinstance(module, FSDPModule):
            found.update(dict.fromkeys(module.modules(), module))
    return found


@contextlib.contextmanager
def gathered_unit(unit: FSDPModule) -> Iterator[None]:
    """Gather a unit's weights in this context, to run modules inside it by themselves."""
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same children and weights; a unit's copy has no FSDP."""
    if not isinstance(module, FSDPModule):
        return copy.copy(module)
    own_class = type(module).__bases__[1]  # fully_shard has put FSDPModule first
    copied = own_class.__new__(own_class)
    copied.__dict__ = {**vars(module), "_forward_hooks": {}, "_forward_pre_hooks": {}}
    return copied
