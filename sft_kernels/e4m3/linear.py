"""Linear layers with a frozen float8 weight that multiply float8 numbers.

Legend: N tokens, `in` and `out` features.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_kernels.e4m3.quantize import (
    float8_product,
    input_product,
    quantize,
    quantize_weight,
    why_not_quantized,
)
from sft_kernels.e4m3.rows import FLOAT8, Quantized
from sft_kernels.needs import FLOAT8_CAPABILITY, FLOAT8_MULTIPLE
from sft_kernels.training_setup import to_compute_dtype


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


def float8(model: PeftModel) -> dict[str, str]:
    """Store the weights under a model's adapters in float8; return the layers that stay, and why.

    Call it on the device that trains, before `fuse`. Only plain linear layers change.

    Raises: ValueError for a GPU that does not multiply float8.
    """
    kept = {}
    for name, module in model.named_modules():
        linear = getattr(module, "base_layer", None)
        if type(linear) is not nn.Linear:
            continue
        weight = linear.weight.data
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FLOAT8_CAPABILITY:
            raise ValueError(f"{weight.device} has no float8; Ada, Hopper and later GPUs have")
        reason = why_no_float8_sizes(linear)
        if reason is None:
            quantized = quantize_weight(weight)
            reason = why_not_quantized(weight, quantized)
        if reason is None:
            Float8Linear.of(linear, quantized)
        else:
            kept[name] = reason
    refuse_merging(model)
    return kept


def why_no_float8_sizes(linear: nn.Linear) -> str | None:
    """Return why a layer is not multiplied in float8, None if its sizes allow it."""
    if linear.in_features % FLOAT8_MULTIPLE or linear.out_features % FLOAT8_MULTIPLE:
        return f"its sizes are no multiples of {FLOAT8_MULTIPLE}"
    return None


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
            "an adapter cannot be merged into float8 weights, which would round it away; merge it "
            "into the 16-bit weights that were loaded"
        )


def refuse_merging(model: PeftModel) -> None:
    """Make PEFT's linear layers over float8 weights refuse to merge."""
    for module in model.modules():
        if type(module) is PeftLinear and is_float8(module):
            module.__class__ = Float8LoraLinear
