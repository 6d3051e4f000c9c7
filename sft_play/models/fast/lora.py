"""LoRA linears as one autograd function each, or one for several that read the same input. Owns the matrix products alone.

    forward    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T
    backward   dU_i = s_i dy_i B_i,  dB_i = s_i dy_i^T (x A_i^T),  dA_i = dU_i^T x,  dx = sum_i dU_i A_i + dy_i W_i

The adapter's part is written first and the base product added on top of it: the addition then happens inside the large
product, in its float32 accumulator, instead of in a pass of its own over the output. Kept for backward: x, which is the
tensor that other modules keep too, and x A^T. PEFT keeps x again as float32, and the adapter's output.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share an input.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Without a gradient and with fewer tokens than this, bitsandbytes multiplies by packed weights faster than they are unpacked.
FEW_TOKENS = 64


class Weights(NamedTuple):
    """What the functions need of one linear: weight (out, in) or packed 4-bit, bias (out,); scale and rank are 0 without an adapter."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    rank: int


class Adapters(NamedTuple):
    """The adapters of linears that share an input, in the type of the products: A of all, one below the other, and B of each."""

    a: Tensor | None  # (R, in)
    b: tuple[Tensor | None, ...]  # (out, r) each; None where a linear has no adapter


def can_fuse(module: nn.Module) -> str | None:
    """Return why a linear, with adapters or without, keeps its own forward; None when the functions here compute the same."""
    if isinstance(module, LoraLayer):
        return _adapter_obstacle(module) or _base_obstacle(module.base_layer)
    return _base_obstacle(module)


def _adapter_obstacle(module: LoraLayer) -> str | None:
    if not isinstance(module, PeftLinear | PeftLinear4bit):
        return f"adapters on a {type(module.base_layer).__name__}"
    if module.disable_adapters or module.merged:
        return "adapters disabled or merged"
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) > 1:
        return f"{len(active)} active adapters"
    for name in active:
        if name in module.lora_variant:
            return f"a variant of LoRA ({type(module.lora_variant[name]).__name__})"
        if module.lora_bias[name]:
            return "adapters with a bias"
        if getattr(module.lora_dropout[name], "p", 0.0):
            return "dropout on the adapters' input (tuning.lora.dropout=0 has none)"
        if hasattr(module.lora_A[name].weight, "ds_id"):
            return "weights partitioned by ZeRO-3"
    return _hooked(module)


def _base_obstacle(base: nn.Module) -> str | None:
    if type(base) not in (nn.Linear, Linear4bit):
        return f"a base layer of type {type(base).__name__}"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "base weights that are trained"
    if hasattr(base.weight, "ds_id"):
        return "weights partitioned by ZeRO-3"
    if type(base) is Linear4bit:
        state = base.weight.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False):
            return "4-bit weights in no form to train on"
    return _hooked(base)


def _hooked(module: nn.Module) -> str | None:
    """A function that reads a module's weights would pass its hooks by."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    ):
        return "hooks, or a forward of its own, on the linear"
    return None


class FusedLinear(PeftLinear):
    """PEFT's LoRA linear, computed by `lora_linears` whenever it may be."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        if args or kwargs or can_fuse(self):
            return super().forward(x, *args, **kwargs)
        return _apply(x, (self,))[0]


class FusedLinear4bit(PeftLinear4bit):
    """PEFT's LoRA linear over 4-bit weights, computed by `lora_linears` whenever it may be."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        if args or kwargs or can_fuse(self) or is_decoding(x):
            return super().forward(x, *args, **kwargs)
        return _apply(x, (self,))[0]


FUSED = {PeftLinear: FusedLinear, PeftLinear4bit: FusedLinear4bit}


def fuse_linear(module: LoraLayer) -> None:
    """Let a LoRA linear compute by the functions here. Its class changes and nothing else: names, weights, what is saved and merged stay.

    Raises: ValueError with what `can_fuse` says.
    """
    if obstacle := can_fuse(module):
        raise ValueError(f"a linear that cannot be fused: {obstacle}")
    module.__class__ = FUSED.get(type(module), type(module))


def lora_linears(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return y_i (..., out_i) of linears that all read x (..., in); as each of them would, where one cannot be fused."""
    if any(map(can_fuse, modules)) or (is_decoding(x) and any(map(is_packed, modules))):
        return tuple(module(x) for module in modules)
    return _apply(x, modules)


def is_decoding(x: Tensor) -> bool:
    """Whether x (..., in) is so few tokens, without a gradient, that packed weights had better not be unpacked."""
    return not torch.is_grad_enabled() and x.numel() < FEW_TOKENS * x.shape[-1]


def is_packed(module: nn.Module) -> bool:
    """Whether a linear, with adapters or without, has 4-bit weights."""
    return isinstance(getattr(module, "base_layer", module), Linear4bit)


def _apply(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    linears, adapters = weights_of(modules)
    return LinearsFunction.apply(in_compute_type(x), linears, *adapters)


def in_compute_type(x: Tensor) -> Tensor:
    """Return x in the type that products have here: autocast's where it is on, else its own."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def weights_of(modules: Sequence[nn.Module]) -> tuple[tuple[Weights, ...], list[Tensor | None]]:
    """Return the frozen weights of linears and their adapters A_1, B_1, A_2, ..., None where a linear has none."""
    linears, adapters = [], []
    for module in modules:
        base, a, b, scale = module, None, None, 0.0
        if isinstance(module, LoraLayer):
            base = module.base_layer
            for name in module.active_adapters:  # can_fuse has seen that there is one at most
                if name in module.lora_A:
                    a, b, scale = (
                        module.lora_A[name].weight,
                        module.lora_B[name].weight,
                        module.scaling[name],
                    )
        linears.append(Weights(base.weight, base.bias, scale, 0 if a is None else a.shape[0]))
        adapters += [a, b]
    return tuple(linears), adapters


class LinearsFunction(torch.autograd.Function):
    """y_i of linears that share x. Saves x, x A^T and the adapters in the type of the products."""

    @staticmethod
    def forward(
        ctx, x: Tensor, linears: tuple[Weights, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return y_i (..., out_i); parameters: A_1 (r_1, in), B_1 (out_1, r_1), A_2, ... in any floating type."""
        adapters = cast_adapters(parameters, x.dtype)
        outputs, xa = project(x, linears, adapters)
        ctx.save_for_backward(x, xa, adapters.a, *adapters.b)
        ctx.linears, ctx.type = linears, type_of(parameters)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, nothing for the frozen weights, and those of A_1, B_1, A_2, ..."""
        x, xa, a, *b = ctx.saved_tensors
        adapters = Adapters(a, tuple(b))
        dy = [rows(grad) for grad in grads]
        du = adapter_inputs_gradient(dy, ctx.linears, adapters)
        dx = (
            input_gradient(dy, du, ctx.linears, adapters).view(x.shape)
            if ctx.needs_input_grad[0]
            else None
        )
        return dx, None, *adapter_gradients(rows(x), xa, dy, du, ctx.linears, ctx.type)


def rows(x: Tensor) -> Tensor:
    """Return x (..., features) as (N, features)."""
    return x.reshape(-1, x.shape[-1])


def cast_adapters(parameters: Sequence[Tensor | None], dtype: torch.dtype) -> Adapters:
    """Return A_1, B_1, A_2, ... in `dtype`, the A's as one matrix so that x is read once for all of them. One kernel copies all."""
    a, b = ([tensor for tensor in parameters[start::2] if tensor is not None] for start in (0, 1))
    if not a:
        return Adapters(None, (None,) * (len(parameters) // 2))
    ranks = [len(tensor) for tensor in a]
    stacked = a[0].new_empty(sum(ranks), a[0].shape[1], dtype=dtype)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in b]
    torch._foreach_copy_([*stacked.split(ranks), *copies], [*a, *b])
    following = iter(copies)
    return Adapters(
        stacked, tuple(None if tensor is None else next(following) for tensor in parameters[1::2])
    )


def type_of(parameters: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the type of the adapters' gradients, which is the parameters'; None without adapters."""
    return next((parameter.dtype for parameter in parameters if parameter is not None), None)


def columns(linears: Sequence[Weights]) -> list[slice]:
    """Return where each linear's adapter lies in the R columns of x A^T."""
    ends = [0]
    for linear in linears:
        ends.append(ends[-1] + linear.rank)
    return [slice(start, end) for start, end in pairwise(ends)]


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight (out, in) in `dtype`; 4-bit ones are unpacked, into memory that is free again after the product."""
    if isinstance(weight, Params4bit):
        return dequantize_4bit(weight.view(-1, 1), weight.quant_state).to(dtype)
    return weight.to(dtype)


def project(
    x: Tensor, linears: Sequence[Weights], adapters: Adapters
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return y_i (..., out_i) of x (..., in), and x A^T (N, R)."""
    flat = rows(x)
    xa = None if adapters.a is None else flat @ adapters.a.t()
    outputs = []
    for linear, b, part in zip(linears, adapters.b, columns(linears), strict=True):
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        if b is None:
            outputs.append(functional.linear(x, dense(linear.weight, x.dtype), bias))
            continue
        y = x.new_empty(
            *x.shape[:-1], len(b)
        )  # which stays, before an unpacked weight, which leaves no hole then: 2.4 GiB of them at 8B
        if bias is None:
            rows(y).addmm_(xa[:, part], b.t(), beta=0, alpha=linear.scale)
        else:
            torch.addmm(bias, xa[:, part], b.t(), alpha=linear.scale, out=rows(y))
        rows(y).addmm_(flat, dense(linear.weight, x.dtype).t())
        outputs.append(y)
    return tuple(outputs), xa


def adapter_inputs_gradient(
    dy: Sequence[Tensor], linears: Sequence[Weights], adapters: Adapters
) -> Tensor | None:
    """Return dU (N, R), the gradient of x A^T, of dy_i (N, out_i)."""
    if adapters.a is None:
        return None
    du = dy[0].new_empty(len(dy[0]), len(adapters.a))
    for grad, linear, b, part in zip(dy, linears, adapters.b, columns(linears), strict=True):
        if b is not None:
            du[:, part].addmm_(grad, b, beta=0, alpha=linear.scale)
    return du


def input_gradient(
    dy: Sequence[Tensor], du: Tensor | None, linears: Sequence[Weights], adapters: Adapters
) -> Tensor:
    """Return dx (N, in) = dU A + sum_i dy_i W_i, accumulated in one buffer."""
    dx = None if du is None else du @ adapters.a
    for grad, linear in zip(dy, linears, strict=True):
        weight = dense(linear.weight, grad.dtype)
        dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
        del weight  # before the next is unpacked
    return dx


def adapter_gradients(
    x: Tensor,
    xa: Tensor | None,
    dy: Sequence[Tensor],
    du: Tensor | None,
    linears: Sequence[Weights],
    dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Return dA_1 (r_1, in), dB_1 (out_1, r_1), dA_2, ... in `dtype`; x (N, in), dy_i (N, out_i), xa and du (N, R).

    They are parts of one buffer, which one kernel casts.
    """
    if du is None:
        return [None, None] * len(linears)
    ranks = du.shape[1]
    sizes = [
        ranks * x.shape[1],
        *(grad.shape[1] * linear.rank for grad, linear in zip(dy, linears, strict=True)),
    ]
    buffer = x.new_empty(sum(sizes))
    of_a, *of_b = buffer.split(sizes)
    torch.mm(du.t(), x, out=of_a.view(ranks, -1))
    for grad, linear, db, part in zip(dy, linears, of_b, columns(linears), strict=True):
        if linear.rank:
            db.view(-1, linear.rank).addmm_(grad.t(), xa[:, part], beta=0, alpha=linear.scale)
    of_a, *of_b = buffer.to(dtype).split(sizes)
    of_a = of_a.view(ranks, -1).split([linear.rank for linear in linears])
    return [
        gradient
        for linear, da, db in zip(linears, of_a, of_b, strict=True)
        for gradient in ((da, db.view(-1, linear.rank)) if linear.rank else (None, None))
    ]
