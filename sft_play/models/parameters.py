"""Parameters of a model: which are adapters, which are base weights, and what of them is stored."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from peft import PeftModel
from torch import Tensor, nn


class ParameterCount(NamedTuple):
    """Numbers of parameters of a model."""

    trainable: int
    total: int


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters: those that PEFT trains beside a frozen base."""
    if not isinstance(model, PeftModel):
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def base_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the stored tensors of all parameters that belong to no adapter."""
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    yield from stored_tensors(
        parameter for parameter in model.parameters() if id(parameter) not in adapters
    )


def stored_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the tensors that hold parameters: ZeRO-3's shard and 4-bit constants included."""
    for parameter in parameters:
        yield parameter
        if hasattr(parameter, "ds_tensor"):  # the shard of this rank, by ZeRO-3
            yield parameter.ds_tensor
        state = getattr(parameter, "quant_state", None)  # bitsandbytes' QuantState
        while state is not None:
            constants = (state.absmax, state.code, state.offset)
            yield from (constant for constant in constants if constant is not None)
            state = state.state2  # double quantisation: absmax is quantised itself


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters. Partitioned (ZeRO-3) and packed 4-bit weights count in full."""
    trainable = total = 0
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", None) or parameter.numel()
        if hasattr(parameter, "quant_state"):
            count *= parameter.element_size() * 2  # two 4-bit weights in a byte
        total += count
        if parameter.requires_grad:
            trainable += count
    return ParameterCount(trainable, total)
