"""Count the parameters of adapters and of the base, and find the tensors that store them."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_play.models.architecture import encoders_of
from sft_play.models.experts import expert_weights, routing_linears
from sft_play.models.sharding import local_shard

logger = logging.getLogger(__name__)


# A warning is logged if a larger fraction of all weights stays in 16 bits for no known reason
MAX_UNEXPLAINED = 0.01
KNOWN = ("embeddings", "output head", "norms and biases", "routers", "encoders")


@dataclass(frozen=True)
class PackedWeights:
    """The numbers of packed and unpacked weights of a 4-bit model."""

    packed: int
    kept: dict[str, int]  # in 16 bits, by a kind of KNOWN or by the parameter's name
    dtype: torch.dtype  # of the weights in 16 bits

    @property
    def total(self) -> int:
        """Return the number of all weights."""
        return self.packed + sum(self.kept.values())

    @property
    def unexplained(self) -> dict[str, int]:
        """Return the weights that stay in 16 bits for no known reason."""
        return {name: count for name, count in self.kept.items() if name not in KNOWN}

    def line(self) -> str:
        """Return the log line."""
        share = self.packed / self.total
        kept = [kind for kind in KNOWN if kind in self.kept] + _largest(self.unexplained)
        return (
            f"4-bit: {share:.1%} of the weights; {1 - share:.1%} stay in {dtype_name(self.dtype)}: "
            f"{', '.join(kept)}"
        )


class ParameterCount(NamedTuple):
    """The numbers of parameters of a model."""

    trainable: int
    total: int


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters: those that PEFT trains over a frozen base."""
    if not isinstance(model, PeftModel):
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def iter_base_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the stored tensors of all parameters that do not belong to an adapter."""
    adapter_ids = {id(parameter) for parameter in adapter_parameters(model)}
    base = [parameter for parameter in model.parameters() if id(parameter) not in adapter_ids]
    yield from stored_tensors(base)


def stored_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the tensors that store parameters on this rank: ZeRO-3 shards, 4-bit constants."""
    for parameter in parameters:
        yield local_shard(parameter)
        if hasattr(parameter, "ds_tensor"):  # this rank's shard under ZeRO-3
            yield parameter.ds_tensor
        state = getattr(parameter, "quant_state", None)  # bitsandbytes' QuantState
        while state is not None:
            for constant in (state.absmax, state.code, state.offset):
                if constant is not None:
                    yield constant
            state = state.state2  # double quantization: absmax is quantized itself


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters. Sharded (ZeRO-3) and packed 4-bit weights count in full."""
    counts = {parameter: stored_weights(parameter) for parameter in model.parameters()}
    trainable = sum(count for parameter, count in counts.items() if parameter.requires_grad)
    return ParameterCount(trainable, sum(counts.values()))


def stored_weights(parameter: nn.Parameter) -> int:
    """Return the number of weights that a parameter stores: in full if it is sharded."""
    count = getattr(parameter, "ds_numel", None) or parameter.numel()
    if hasattr(parameter, "quant_state"):
        count *= parameter.element_size() * 2  # two 4-bit weights per byte
    return count


def log_packed(model: PreTrainedModel) -> None:
    """Log what is stored in 4 bits; warn if many weights are not, for no known reason."""
    weights = packed_weights(model)
    logger.info("%s", weights.line())
    unexplained = sum(weights.unexplained.values())
    if unexplained > MAX_UNEXPLAINED * weights.total:
        logger.warning(
            "4-bit: %.1f %% of the weights cannot be packed and stay in %s: %s",
            100 * unexplained / weights.total,
            dtype_name(weights.dtype),
            ", ".join(_largest(weights.unexplained)),
        )


def packed_weights(model: PreTrainedModel) -> PackedWeights:
    """Return the numbers of weights of a 4-bit model without adapters."""
    packed = 0
    kept = Counter[str]()
    dtype = torch.float32
    kinds = _kinds(model)
    for name, parameter in model.named_parameters():
        count = stored_weights(parameter)
        if hasattr(parameter, "quant_state"):
            packed += count
            continue
        kind = kinds.get(name)
        if kind is None:
            is_vector = parameter.dim() < 2 or name.endswith("bias")
            kind = "norms and biases" if is_vector else name
        kept[kind] += count
        dtype = parameter.dtype
    return PackedWeights(packed, kept, dtype)


def _kinds(model: PreTrainedModel) -> dict[str, str]:
    """Return the kind of embeddings, head, routers and encoders by the name of the parameter."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    routers = {f"{name}.weight" for name in routing_linears(model)}
    experts_of_block = {
        weight.module_name.rpartition(".")[0]: weight.experts for weight in expert_weights(model)
    }
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        experts = experts_of_block.get(name.rpartition(".")[0])
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if isinstance(module, nn.Embedding) or module is embedding:
                kinds[parameter_name] = "embeddings"
            elif module is head:
                kinds[parameter_name] = "output head"
            elif parameter_name in routers or (experts and len(parameter) == experts):
                kinds[parameter_name] = "routers"
    for name, encoder in encoders_of(model).items():
        kinds |= dict.fromkeys(dict(encoder.named_parameters(prefix=name)), "encoders")
    return kinds


def _largest(names: dict[str, int]) -> list[str]:
    """Return the names of the largest parameters, and the number of others."""
    by_size = sorted(names, key=lambda name: -names[name])
    more = [f"and {len(by_size) - 3} more"] if len(by_size) > 3 else []
    return by_size[:3] + more


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix: bfloat16."""
    return str(dtype).removeprefix("torch.")
