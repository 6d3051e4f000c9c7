"""Handle weights that DeepSpeed's ZeRO-3 shards across the ranks.

DeepSpeed gathers a module's direct weights by hooks, before the module's forward pass and around
its backward pass. Fused functions read weights of modules that they do not call. So the weights of
a decoder layer are registered with the layer. The layer gathers them all before its forward pass,
frees them during it, and gathers them again around its backward pass.

A weight that is gathered again has another memory address. A function stores the parameter for its
backward pass, and no tensor derived from it.

Until DeepSpeed's engine exists, nothing gathers weights. `gathered_parameters` and
`gathering_layers` gather them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from torch import Tensor, nn

from sft_kernels.sharded import outermost_layers, run_within

FREED = "NOT_AVAILABLE"  # DeepSpeed's ZeroParamStatus of a weight that is not gathered


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 shards a parameter."""
    return hasattr(parameter, "ds_id")


def is_gatherable(parameter: Tensor) -> bool:
    """Return whether a parameter can be used in computations once it is gathered."""
    return not (is_partitioned(parameter) and isinstance(parameter, Params4bit))


def is_missing(parameter: Tensor) -> bool:
    """Return whether a parameter is gathered only with its module, not with its layer."""
    return is_partitioned(parameter) and not hasattr(parameter, "is_gathered_with_layer")


def gather_with_layer(layer: nn.Module) -> None:
    """Let DeepSpeed gather all weights of a layer before the layer runs, and in its backward pass.

    Gradients are still reduced one parameter at a time.
    """
    from deepspeed.runtime.zero import register_external_parameter

    parameters = list(layer.parameters())
    if not any(map(is_partitioned, parameters)):
        return
    for parameter in parameters:
        register_external_parameter(layer, parameter)
        parameter.is_gathered_with_layer = True


def is_hooked_by_deepspeed(module: nn.Module) -> bool:
    """Return whether DeepSpeed's engine has put its hooks on a module."""
    return "pre_bwd_fn" in vars(module)


@contextlib.contextmanager
def gathered_parameters(parameters: Iterable[Tensor | None]) -> Iterator[None]:
    """Gather parameters that ZeRO-3 has freed. All ranks must pass the same parameters."""
    divided = [each for each in parameters if each is not None and is_partitioned(each)]
    freed = [parameter for parameter in divided if parameter.ds_status.name == FREED]
    if not freed:
        yield
        return
    with torch.no_grad():
        freed[0].all_gather(param_list=freed)
    try:
        yield
    finally:
        with torch.no_grad():
            freed[0].partition(param_list=freed)


def layers_by_module(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the layer of each module, or the model for modules outside of layers.

    Return {} for a model that ZeRO-3 does not shard.
    """
    if not any(is_partitioned(parameter) for parameter in model.parameters()):
        return {}
    found = dict.fromkeys(model.modules(), model)
    for layer in outermost_layers(model):
        found.update(dict.fromkeys(layer.modules(), layer))
    return found


def unit_parameters(unit: nn.Module, units: dict[nn.Module, nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of a unit of `layers_by_module`, without those of other units."""
    owners = [module for module, of in units.items() if of is unit]
    found = [each for module in owners for each in module.parameters(recurse=False)]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def gathering_layers(model: nn.Module) -> Iterator[None]:
    """Gather each layer that ZeRO-3 shards while it runs, as DeepSpeed's engine will."""
    hooks: list[Any] = []
    for layer in outermost_layers(model):
        parameters = [each for each in layer.parameters() if is_partitioned(each)]
        if parameters:
            hooks += run_within(layer, partial(gathered_parameters, parameters))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
