"""Read the linear layers of a base as float8.

`quantizing_to_float8` lets `from_pretrained` quantize weights as it reads them. transformers reads
one tensor after another to its device, where it is quantized. So the GPU stores the float8 model,
and at most two weights in 16 bits.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.quantizers.base import _assign_is_quantized

from sft_kernels.e4m3.linear import Float8Linear, why_no_float8_sizes
from sft_kernels.e4m3.quantize import quantize_weight, why_not_quantized
from sft_kernels.e4m3.rows import FLOAT8, Quantized
from sft_kernels.needs import FLOAT8_CAPABILITY
from sft_play.errors import EnvironmentFault
from sft_play.models.architecture import decoder_layers
from sft_play.models.experts import expert_weights, unquantized_linears
from sft_play.models.stored_weights import changing_weights, one_tensor_at_a_time

logger = logging.getLogger(__name__)


NAMED = 3  # layers per reason that the log names


@dataclass
class Float8Layers:
    """Which linear layers of a model became float8, and which did not, by name."""

    quantized: dict[str, nn.Linear] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # why they stay as they were loaded

    def lines(self) -> list[str]:
        """Return the log lines: a count, and a line for each reason."""
        count = len(self.quantized)
        lines = [f"float8: {count} of {count + len(self.kept)} linears of the layers"]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"float8: {', '.join(names[:NAMED])}{more} not: {reason}")
        return lines


def float8_candidates(model: PreTrainedModel) -> Float8Layers:
    """Return the linear layers that may become float8, and why others do not.

    Candidates are frozen linear layers of the decoder: not embeddings, the head, routers or 3-D
    experts.
    """
    routers = unquantized_linears(model)
    of_layers = {module for layer in decoder_layers(model) for module in layer.modules()}
    found = Float8Layers()
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module not in of_layers:
            continue
        if name in routers:
            found.kept[name] = "it chooses experts, or code reads its weight"
        elif (reason := why_no_float8_sizes(module)) is not None:
            found.kept[name] = reason
        else:
            found.quantized[name] = module
    for weight in expert_weights(model):
        found.kept[weight.name] = "experts in one parameter"
    return found


def float8_on_meta(model: PreTrainedModel) -> None:
    """Make the linear layers of a model without weights those of a float8 base."""
    for linear in float8_candidates(model).quantized.values():
        values = torch.empty_like(linear.weight, dtype=FLOAT8)
        scales = torch.empty(len(values), dtype=torch.float32, device=values.device)
        Float8Linear.of(linear, Quantized(values, scales))


def leave_to_each_rank(model: nn.Module) -> None:
    """Keep DDP from sending float8 weights and their scales: every rank reads the same files.

    gloo cannot send float8.
    """
    names = [name for name, weight in model.named_parameters() if weight.dtype == FLOAT8]
    scales = [f"{name}_scale" for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names + scales)


@contextlib.contextmanager
def quantizing_to_float8(device: torch.device) -> Iterator[None]:
    """Let `from_pretrained` quantize linear layers to float8 as it reads their weights to `device`.

    A layer that float8 cannot represent stays plain. The log names it and the reason.

    Raises: EnvironmentFault for a GPU without float8. This happens if a run that was trained
    elsewhere is used.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise EnvironmentFault(
            f"tuning.base_dtype=float8: {device} has capability {found}, and float8 products need "
            "8.9 (Ada, Hopper and later); set DEVICE=cpu, or merge the run and use that model"
        )
    layers = Float8Layers()

    def candidates(model: PreTrainedModel) -> Iterable[nn.Linear]:
        nonlocal layers
        layers = float8_candidates(model)
        _assign_is_quantized(model)  # Jamba's mixers then use no weight without its layer
        return layers.quantized.values()

    def quantize_layer(weight: nn.Parameter, parameter_name: str) -> None:
        """Make the layer of a weight a float8 layer, or record why it stays plain."""
        name = parameter_name.removesuffix(".weight")
        if name not in layers.quantized:  # a bias
            return
        quantized = quantize_weight(weight.data)
        reason = why_not_quantized(weight.data, quantized)
        if reason is None:
            Float8Linear.of(layers.quantized[name], quantized)
        else:
            del layers.quantized[name]
            layers.kept[name] = reason

    with changing_weights(candidates, quantize_layer), one_tensor_at_a_time():
        yield
    for line in layers.lines():
        logger.info("%s", line)
