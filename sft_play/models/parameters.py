"""Parameters of a model: adapters, base weights, and the tensors that store them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from peft import PeftModel
from torch import Tensor, nn

from sft_play.models.sharding import own_part


class ParameterCount(NamedTuple):
    """Numbers of parameters of a model."""

    trainable: int
    total: int


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters: those that PEFT trains over a frozen base."""
    if not isinstance(model, PeftModel):
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def base_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the stored tensors of all parameters that belong to no adapter."""
    adapter_ids = {id(parameter) for parameter in adapter_parameters(model)}
    base = [parameter for parameter in model.parameters() if id(parameter) not in adapter_ids]
    yield from stored_tensors(base)


def stored_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield what stores parameters on this rank, with ZeRO-3's shards and 4-bit constants."""
    for parameter in parameters:
        yield own_part(parameter)
        if hasattr(parameter, "ds_tensor"):  # this rank's shard under ZeRO-3
            yield parameter.ds_tensor
        state = getattr(parameter, "quant_state", None)  # bitsandbytes' QuantState
        while state is not None:
            for constant in (state.absmax, state.code, state.offset):
                if constant is not None:
                    yield constant
            state = state.state2  # double quantisation: absmax is quantised itself


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters. Partitioned (ZeRO-3) and packed 4-bit weights count in full."""
    trainable = 0
    total = 0
    for parameter in model.parameters():
        count = stored_weights(parameter)
        total += count
        if parameter.requires_grad:
            trainable += count
    return ParameterCount(trainable, total)


def stored_weights(parameter: nn.Parameter) -> int:
    """Return the number of weights that a parameter stores: in full where it is partitioned."""
    count = getattr(parameter, "ds_numel", None) or parameter.numel()
    if hasattr(parameter, "quant_state"):
        count *= parameter.element_size() * 2  # two 4-bit weights in a byte
    return count
