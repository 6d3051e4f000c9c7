"""Products of linears whose weights are frozen and that may have adapters, and their gradients.

    dU_i = s_i dy_i B_i                  the gradient of x A_i^T
    dB_i = s_i dy_i^T (x A_i^T),         dA_i = dU_i^T x

The other formulas are in `lora`. Base weights may be plain, packed in 4 bits or in float8. LoRA's
thin products read the input as it was, and are added to what a float8 product has rounded to 16
bits.

dU_i and dB_i both read dy_i, which is all that takes time. On a Hopper GPU one pass computes both
(`adapter_kernels`) if the ranks of all linears are equal and small. Elsewhere they are products.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share
an input.
"""

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.models.delivered import DeliveredLinear
from sft_play.models.fast.linears.four_bit import unpack
from sft_play.models.float8.format import Quantized
from sft_play.models.float8.quantize import input_product, product, quantize
from sft_play.models.partitioned import gathered
from sft_play.plan.needs import HOPPER


class FrozenLinear(NamedTuple):
    """The frozen part of a LoRA linear, or of a linear without an adapter."""

    weight: Tensor  # (out, in), or packed 4-bit, or float8 with row_scales
    bias: Tensor | None  # (out,)
    scale: float  # of the adapter, 0 without one
    rank: int  # of the adapter, 0 without one
    columns: slice  # of x A^T (N, R), that are the adapter's
    row_scales: Tensor | None = None  # (out,) float32, of a float8 weight
    is_partitioned: bool = False  # by ZeRO-3
    delivered: DeliveredLinear | None = None  # the layer, if it rounds
    adapter: tuple[Tensor | None, Tensor | None] = (None, None)  # A and B as they are trained

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) that a layer which rounds multiplies by, adapter included."""
        return self.delivered.rounded_weight(*self.adapter, self.scale).to(dtype)


class Adapters(NamedTuple):
    """The adapters of linears that share an input, in the dtype of the products."""

    a: Tensor | None  # (R, in): all A, stacked
    b: tuple[Tensor | None, ...]  # (out, r) each; None for a linear without an adapter


def flatten_tokens(x: Tensor) -> Tensor:
    """Return x (..., features) as (N, features)."""
    return x.reshape(-1, x.shape[-1])


def cast_adapters(parameters: Sequence[Tensor | None], dtype: torch.dtype) -> Adapters:
    """Return A_1, B_1, A_2, ... in `dtype`, by one kernel for all.

    The A are stacked to one matrix, so that x is read once for all of them.
    """
    a = [tensor for tensor in parameters[0::2] if tensor is not None]
    b = [tensor for tensor in parameters[1::2] if tensor is not None]
    if not a:
        return Adapters(None, (None,) * (len(parameters) // 2))
    ranks = [len(tensor) for tensor in a]
    stacked = a[0].new_empty(sum(ranks), a[0].shape[1], dtype=dtype)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in b]
    torch._foreach_copy_([*stacked.split(ranks), *copies], [*a, *b])
    remaining = iter(copies)
    cast_b: list[Tensor | None] = []
    for tensor in parameters[1::2]:
        cast_b.append(None if tensor is None else next(remaining))
    return Adapters(stacked, tuple(cast_b))


def adapters_in(
    dtype: torch.dtype, copies: Adapters | None, parameters: Sequence[Tensor | None]
) -> Adapters:
    """Return the copies of adapters if they are in `dtype`, else the parameters cast to it."""
    if copies is not None and copies.a is not None and copies.a.dtype == dtype:
        return copies
    return cast_adapters(parameters, dtype)


def adapter_dtype(parameters: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the dtype of the adapters and of their gradients; None without adapters."""
    for parameter in parameters:
        if parameter is not None:
            return parameter.dtype
    return None


def dequantize(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight (out, in) in `dtype`; a 4-bit weight becomes a new, full-size tensor."""
    if getattr(weight, "quant_state", None) is None:
        return weight.to(dtype)
    return unpack(weight).to(dtype)


def project(
    x: Tensor,
    linears: Sequence[FrozenLinear],
    adapters: Adapters,
    known: Quantized | None = None,
    xa: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return y_i (..., out_i) of x (..., in), and x A^T (N, R).

    `known` is x in float8, and `xa` is x A^T, if whoever computed x has them.
    """
    flat = x.reshape(-1, x.shape[-1])
    if xa is None and adapters.a is not None:
        xa = flat @ adapters.a.t()
    quantized = known
    outputs = []
    for linear, b in zip(linears, adapters.b, strict=True):
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        if linear.delivered is not None:
            rounded = linear.delivered.rounding.inputs(x)
            outputs.append(functional.linear(rounded, linear.rounded_weight(x.dtype), bias))
            continue
        if linear.row_scales is not None:
            quantized = quantize(flat) if quantized is None else quantized
            y = product(quantized, linear.weight, linear.row_scales, x.dtype)
            if bias is not None:
                y.add_(bias)
            if b is not None:
                y.addmm_(xa[:, linear.columns], b.t(), alpha=linear.scale)
            # no view: a model may add to what it gets in place
            outputs.append(torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]]))
            continue
        if b is None:
            outputs.append(functional.linear(x, dequantize(linear.weight, x.dtype), bias))
            continue
        # Allocate the output before the dequantized weight: otherwise freeing the weight fragments
        # the allocator, by 2.4 GiB for an 8B model.
        y = x.new_empty(*x.shape[:-1], len(b))
        flat_y = y.view(-1, len(b))
        if bias is None:
            flat_y.addmm_(xa[:, linear.columns], b.t(), beta=0, alpha=linear.scale)
        else:
            torch.addmm(bias, xa[:, linear.columns], b.t(), alpha=linear.scale, out=flat_y)
        flat_y.addmm_(flat, dequantize(linear.weight, x.dtype).t())
        outputs.append(y)
    return tuple(outputs), xa


def input_gradient(
    dy: Sequence[Tensor],
    du: Tensor | None,
    linears: Sequence[FrozenLinear],
    adapters: Adapters,
    known: Sequence[Quantized | None] | None = None,
) -> Tensor:
    """Return dx (N, in) = dU A + sum_i dy_i W_i, accumulated in one buffer.

    A rounded W_i has its adapter in it. `known` are dy_i in float8, multiplied by the scales of the
    weight, or None.
    """
    known = known or [None] * len(dy)
    # a float8 product has an output of its own, which the adapters' part is added to
    is_float8 = False
    for linear in linears:
        is_float8 = is_float8 or linear.row_scales is not None
    is_rounded = linears[0].delivered is not None
    dx = None if du is None or is_float8 or is_rounded else du @ adapters.a
    for grad, linear, quantized in zip(dy, linears, known, strict=True):
        if linear.row_scales is not None:
            if quantized is None:
                quantized = quantize(grad, linear.row_scales)
            part = input_product(quantized, linear.weight, grad.dtype)
            dx = part if dx is None else dx.add_(part)
            continue
        with gathered([linear.weight]) if linear.is_partitioned else contextlib.nullcontext():
            if is_rounded:
                weight = linear.rounded_weight(grad.dtype)
            else:
                weight = dequantize(linear.weight, grad.dtype)
            dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
            del weight  # before the next one is dequantized
    return dx.addmm_(du, adapters.a) if is_float8 and du is not None else dx


# With 32, what a pass writes and adds up took as long on an H200 as reading dy again.
LARGEST_RANK = 16
ALIGNMENT = 16  # bytes that it loads at once


def rank_and_output_gradients(
    dy: Sequence[Tensor],
    xa: Tensor | None,
    linears: Sequence[FrozenLinear],
    adapters: Adapters,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dU (N, R), and dB_i (out_i, r_i) in `dtype` or in that of dy; None without adapters.

    dy_i (N, out_i), xa (N, R).
    """
    if xa is None:
        return None, [None] * len(linears)
    own_dy, own_b = [], []
    for grad, b in zip(dy, adapters.b, strict=True):
        if b is not None:
            own_dy.append(grad)
            own_b.append(b)
    own = [linear for linear in linears if linear.rank]
    if fit_one_pass(own_dy, own_b, own):
        from sft_play.models.fast.linears import adapter_kernels  # Triton needs a GPU

        scale = own[0].scale
        du, db = adapter_kernels.rank_and_output_gradients(own_dy, own_b, xa, scale, dtype)
        own_db = db.split([grad.shape[1] for grad in own_dy])
    else:
        du = xa.new_empty(xa.shape)
        own_db = []
        for grad, b, linear in zip(own_dy, own_b, own, strict=True):
            own_xa = xa[:, linear.columns]
            du[:, linear.columns].addmm_(grad, b, beta=0, alpha=linear.scale)
            db = torch.empty_like(b).addmm_(grad.t(), own_xa, beta=0, alpha=linear.scale)
            own_db.append(db)
    remaining = iter(own_db)
    return du, [next(remaining) if linear.rank else None for linear in linears]


def fit_one_pass(
    dy: Sequence[Tensor], b: Sequence[Tensor], linears: Sequence[FrozenLinear]
) -> bool:
    """Return whether one pass over dy computes what it takes two products for, and sooner."""
    first = linears[0]
    if not is_hopper(dy[0].device) or dy[0].element_size() != 2:
        return False
    from sft_play.models.fast.linears.adapter_kernels import MOST_SHARING  # Triton needs a GPU

    if len(linears) > MOST_SHARING or first.rank > LARGEST_RANK or not len(dy[0]):
        return False
    if any((linear.rank, linear.scale) != (first.rank, first.scale) for linear in linears):
        return False
    if any(grad.stride(1) != 1 for grad in dy) or not all(each.is_contiguous() for each in b):
        return False
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*dy, *b))


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU for which the kernels of adapters are made."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def adapter_gradients(
    x: Tensor,
    du: Tensor | None,
    db: Sequence[Tensor | None],
    linears: Sequence[FrozenLinear],
    dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Return dA_1 (r_1, in), dB_1 (out_1, r_1), dA_2, ... in `dtype`; x (N, in), du (N, R)."""
    if du is None:
        return [None, None] * len(linears)
    all_da = a_gradient(du, x, dtype).split([linear.rank for linear in linears])
    gradients: list[Tensor | None] = []
    for linear, da, each_db in zip(linears, all_da, db, strict=True):
        gradients += [da, each_db] if linear.rank else [None, None]
    return cast(gradients, dtype)


def a_gradient(du: Tensor, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return dA (R, in) = dU^T x for dU (N, R) and x (N, in).

    In `dtype` if that is float32 and a GPU multiplies 16 bits: it adds in float32.
    """
    if x.is_cuda and len(x) and x.element_size() == 2 and dtype == torch.float32:
        return torch.mm(du.t(), x, out_dtype=dtype)
    return du.t() @ x


def cast(tensors: list[Tensor | None], dtype: torch.dtype | None) -> list[Tensor | None]:
    """Return tensors in a dtype; one kernel casts those of another."""
    others = {
        place: torch.empty_like(each, dtype=dtype)
        for place, each in enumerate(tensors)
        if each is not None and each.dtype != dtype
    }
    if others:
        torch._foreach_copy_(list(others.values()), [tensors[place] for place in others])
    return [others.get(place, each) for place, each in enumerate(tensors)]
