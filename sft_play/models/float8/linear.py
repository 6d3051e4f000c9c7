"""Linear layers with a frozen float8 weight that multiply float8 numbers.

`quantizing_to_float8` lets `from_pretrained` quantize weights as it reads them. transformers reads
one tensor after another to its device, where it is quantized. So the GPU stores the float8 model,
and at most two weights in 16 bits.

Legend: N tokens, `in` and `out` features.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.quantizers.base import _assign_is_quantized

from sft_kernels.needs import FLOAT8_CAPABILITY, FLOAT8_MULTIPLE
from sft_play.errors import EnvironmentFault
from sft_play.models.architecture import decoder_layers
from sft_play.models.experts import expert_weights, unquantized_linears
from sft_play.models.fast.setup import to_compute_dtype
from sft_play.models.float8.quantize import (
    float8_product,
    input_product,
    quantize,
    quantize_weight,
    why_not_quantized,
)
from sft_play.models.float8.rows import FLOAT8, Quantized
from sft_play.models.stored_weights import changing_weights, one_tensor_at_a_time

logger = logging.getLogger(__name__)

NAMED = 3  # layers per reason that the log names


class Float8Linear(nn.Linear):
    """y = x W^T + b with x quantized per token, and its gradient with dy quantized per token.

    `weight` (out, in) is float8, `weight_scale` (out,) float32.
    """

    weight_scale: Tensor
    compute_dtype: torch.dtype  # dtype of the replaced layer; PEFT first creates adapters in it

    @classmethod
    def of(cls, linear: nn.Linear, quantized: Quantized) -> Self:
        """Turn a plain linear layer into this one, in place: names and hooks stay."""
        linear.compute_dtype = linear.weight.dtype
        linear.__class__ = cls
        linear.weight = nn.Parameter(quantized.values, requires_grad=False)
        linear.register_buffer("weight_scale", quantized.scales)
        for tensor in (linear.weight, linear.weight_scale):
            # transformers initializes again what it thinks was not loaded
            tensor._is_hf_initialized = True
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return y (..., out) of x (..., in), in autocast's dtype if it is on."""
        x = to_compute_dtype(x)
        y = _Float8Product.apply(x, self.weight, self.weight_scale)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) that the layer computes with."""
        return Quantized(self.weight, self.weight_scale).dequantized(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device, but keep the dtypes: half() would corrupt weight and scales."""

        def keeping_type(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        bias = self._parameters.pop("bias")
        try:
            super()._apply(keeping_type, recurse)
        finally:
            self._parameters["bias"] = bias
        if bias is not None:
            bias.data = fn(bias.data)
        return self


class _Float8Product(torch.autograd.Function):
    """Computes x W^T. Saves only the weight: no gradient of it is computed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        # not saved: FSDP frees the weight's memory and later gathers it into the same tensor
        ctx.weight = weight
        ctx.scales = scales
        flat = x.reshape(-1, x.shape[-1])
        y = float8_product(quantize(flat), weight, scales, x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x."""
        flat = dy.reshape(-1, dy.shape[-1])
        dx = input_product(quantize(flat, ctx.scales), ctx.weight, dy.dtype)
        return dx.view(*dy.shape[:-1], -1), None, None


def is_float8(module: nn.Module) -> bool:
    """Return whether a linear layer, with or without adapters, has a float8 weight."""
    return isinstance(getattr(module, "base_layer", module), Float8Linear)


def has_float8(model: nn.Module) -> bool:
    """Return whether a model has a float8 weight."""
    return any(parameter.dtype == FLOAT8 for parameter in model.parameters())


class Float8LoraLinear(PeftLinear):
    """PEFT's LoRA linear layer, which refuses to merge."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to merge: e4m3 would round most of an adapter away. Raises: ValueError."""
        raise ValueError(
            "an adapter cannot be merged into float8 weights, which would round it away; "
            "`make merge` merges it into 16-bit ones"
        )


def refuse_merging(model: PeftModel) -> None:
    """Make PEFT's linear layers over float8 weights refuse to merge."""
    for module in model.modules():
        if type(module) is PeftLinear and is_float8(module):
            module.__class__ = Float8LoraLinear


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
        elif module.in_features % FLOAT8_MULTIPLE or module.out_features % FLOAT8_MULTIPLE:
            found.kept[name] = f"its sizes are no multiples of {FLOAT8_MULTIPLE}"
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
