"""Matrix multiplications of frozen linears, with or without adapters, and their gradients.

    y_i = x W_i^T + b_i + s_i U_i B_i^T,        U_i = x A_i^T
    dU_i = s_i dy_i B_i,  dx = sum_i dU_i A_i + dy_i W_i
    dB_i = s_i dy_i^T U_i,                      dA_i = dU_i^T x

A weight may be plain, packed in 4 bits or in float8. Each form has a class, chosen when linears are
bound. LoRA's thin GEMMs read the input before quantization, and are added to the result of a float8
GEMM, rounded to 16 bits. In a layer that rounds, W_i is the rounded sum of weight and adapter.

dU_i and dB_i both read dy_i, and this read determines their time. On a Hopper GPU, one pass
computes both (`adapter_gradients`) if the ranks of all linears are equal and small. Otherwise each
is a GEMM.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share
an input.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn import functional

from sft_kernels.e4m3.linear import Float8Linear
from sft_kernels.e4m3.quantize import float8_product, input_product, quantize
from sft_kernels.e4m3.rows import Quantized
from sft_kernels.linears import adapter_gradients
from sft_kernels.linears.adapter_gradients import Factors
from sft_kernels.linears.four_bit import unpack_with_kernel
from sft_kernels.partitioned import gathered_parameters, is_partitioned


def dequantize(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight (out, in) in `dtype`; a 4-bit weight becomes a new, full-size tensor."""
    if getattr(weight, "quant_state", None) is None:
        return weight.to(dtype)
    return unpack_with_kernel(weight).to(dtype)


class LinearAdapter(NamedTuple):
    """The adapter of a linear, as it is trained."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scale: float
    rank: int  # ZeRO-3 may have freed the tensors
    number: int  # index among the adapters of linears that share an input
    columns: slice  # of x A^T (N, R)


class Inputs(NamedTuple):
    """The shared inputs of linears."""

    x: Tensor  # (N, in)
    factors: Factors
    xa: Tensor | None  # x A^T (N, R)
    in_float8: Quantized | None


class FrozenLinear:
    """A linear without an adapter; its weight is plain or in 4 bits."""

    def __init__(self, base: nn.Module, adapter: LinearAdapter | None = None):
        self.weight, self.bias = base.weight, base.bias
        self.adapter = adapter
        self.full_weight = self.weight.to  # (dtype) -> (out, in)
        if isinstance(base, Linear4bit):
            self.full_weight = partial(dequantize, self.weight)
        self.gathering: Callable[..., Any] = contextlib.nullcontext
        if is_partitioned(self.weight):
            self.gathering = partial(gathered_parameters, [self.weight])

    def output(self, inputs: Inputs) -> Tensor:
        """Return y (N, out)."""
        dtype = inputs.x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(inputs.x, self.full_weight(dtype), bias)

    def input_gradient(self, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Return dx + dy W (N, in)."""
        with self.gathering():
            weight = self.full_weight(dy.dtype)
            return dy @ weight if dx is None else dx.addmm_(dy, weight)


class AdaptedLinear(FrozenLinear):
    """A linear with an adapter, added in the float32 accumulator of the large GEMM."""

    def output(self, inputs: Inputs) -> Tensor:
        """Return y (N, out)."""
        # Allocate the output before the dequantized weight: otherwise freeing the weight fragments
        # the allocator, by 2.4 GiB for an 8B model.
        x, adapter = inputs.x, self.adapter
        b, u = inputs.factors[1 + adapter.number], inputs.xa[:, adapter.columns]
        y = x.new_empty(len(x), len(b))
        if self.bias is None:
            y.addmm_(u, b.t(), beta=0, alpha=adapter.scale)
        else:
            torch.addmm(self.bias.to(x.dtype), u, b.t(), alpha=adapter.scale, out=y)
        return y.addmm_(x, self.full_weight(x.dtype).t())


class RoundedLinear(AdaptedLinear):
    """A linear that rounds its input and its weight, including the adapter.

    `base.rounded_weight(A, B, scale)` returns the weight (out, in), and `base.rounding.inputs(x)`
    the input (N, in).
    """

    def __init__(self, base: nn.Module, adapter: LinearAdapter | None = None):
        super().__init__(base, adapter)
        factors = () if adapter is None else adapter[:3]
        self.full_weight = lambda dtype: base.rounded_weight(*factors).to(dtype)
        self.rounding = base.rounding

    def output(self, inputs: Inputs) -> Tensor:
        """Return y (N, out)."""
        return FrozenLinear.output(self, inputs._replace(x=self.rounding.inputs(inputs.x)))


class QuantizedLinear(AdaptedLinear):
    """A linear in float8."""

    def __init__(self, base: Float8Linear, adapter: LinearAdapter | None = None):
        super().__init__(base, adapter)
        self.row_scales = base.weight_scale  # (out,) float32

    def output(self, inputs: Inputs) -> Tensor:
        """Return y (N, out)."""
        y = float8_product(inputs.in_float8, self.weight, self.row_scales, inputs.x.dtype)
        if self.bias is not None:
            y.add_(self.bias.to(y.dtype))
        adapter = self.adapter
        if adapter is not None:
            b, u = inputs.factors[1 + adapter.number], inputs.xa[:, adapter.columns]
            y.addmm_(u, b.t(), alpha=adapter.scale)
        return y

    def input_gradient(self, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Return dx + dy W (N, in)."""
        part = input_product(quantize(dy, self.row_scales), self.weight, dy.dtype)
        return part if dx is None else dx.add_(part)


def frozen_linear(base: nn.Module, adapter: LinearAdapter | None) -> FrozenLinear:
    """Return a base layer and its adapter as the class for its form of weight."""
    if hasattr(base, "rounded_weight"):
        return RoundedLinear(base, adapter)
    if isinstance(base, Float8Linear):
        return QuantizedLinear(base, adapter)
    return FrozenLinear(base) if adapter is None else AdaptedLinear(base, adapter)


class BoundLinears:
    """Linears that share an input; valid while their modules do not change."""

    def __init__(self, linears: Sequence[FrozenLinear]):
        self.linears = linears
        self.is_float8 = any(isinstance(each, QuantizedLinear) for each in linears)
        self.is_rounded = isinstance(linears[0], RoundedLinear)
        self.adapters = [each.adapter for each in linears if each.adapter is not None]
        self.adapted = [place for place, each in enumerate(linears) if each.adapter is not None]
        self.ranks = [adapter.rank for adapter in self.adapters]
        self.parameters = (*(each.a for each in self.adapters), *(each.b for each in self.adapters))
        self.are_equal = len({(each.rank, each.scale) for each in self.adapters}) == 1
        self.copies: Factors = ()  # the factors, if `AdapterCopies` casts them

    def factors(self, dtype: torch.dtype) -> Factors:
        """Return the adapters in `dtype`, cast by one kernel.

        All A are stacked into one matrix, so that x is read only once.
        """
        if not self.adapters:
            return ()
        if self.copies and self.copies[0].dtype == dtype:
            return self.copies
        a = self.parameters[0]
        stacked = a.new_empty(sum(self.ranks), a.shape[1], dtype=dtype)
        cast_b = [torch.empty_like(each.b, dtype=dtype) for each in self.adapters]
        torch._foreach_copy_([*stacked.split(self.ranks), *cast_b], self.parameters)
        return stacked, *cast_b

    def project(self, x: Tensor, factors: Factors) -> tuple[list[Tensor], Tensor | None]:
        """Return y_i (N, out_i) of x (N, in), and x A^T (N, R)."""
        xa = x @ factors[0].t() if factors else None
        inputs = Inputs(x, factors, xa, quantize(x) if self.is_float8 else None)
        return [linear.output(inputs) for linear in self.linears], xa

    def input_gradient(self, dy: Sequence[Tensor], du: Tensor | None, factors: Factors) -> Tensor:
        """Return dx (N, in) = dU A + sum_i dy_i W_i, accumulated in one buffer.

        A rounded W_i includes its adapter.
        """
        # a float8 GEMM has a separate output, to which the adapters' part is added
        is_first = bool(factors) and not (self.is_float8 or self.is_rounded)
        dx = du @ factors[0] if is_first else None
        for grad, linear in zip(dy, self.linears, strict=True):
            dx = linear.input_gradient(grad, dx)
        return dx.addmm_(du, factors[0]) if factors and self.is_float8 else dx

    def rank_and_output_gradients(
        self, dy: Sequence[Tensor], xa: Tensor | None, factors: Factors
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return dU (N, R), and dB_i (out_i, r_i) of each adapter; None without adapters.

        dy_i (N, out_i) of all linears, xa (N, R). dB_i has the dtype of dy or of the adapters.
        """
        if not self.adapters:
            return None, []
        dy, b = [dy[place] for place in self.adapted], factors[1:]
        if self.are_equal and adapter_gradients.fit_one_pass(dy, b):
            scale, dtype = self.adapters[0].scale, self.parameters[0].dtype
            return adapter_gradients.launch_adapter_gradients(dy, b, xa, scale, dtype)
        du = xa.new_empty(xa.shape)
        db = []
        for grad, each, adapter in zip(dy, b, self.adapters, strict=True):
            columns, scale = adapter.columns, adapter.scale
            du[:, columns].addmm_(grad, each, beta=0, alpha=scale)
            db.append(torch.empty_like(each).addmm_(grad.t(), xa[:, columns], beta=0, alpha=scale))
        return du, db

    def adapter_gradients(self, x: Tensor, du: Tensor | None, db: list[Tensor]) -> list[Tensor]:
        """Return the gradients of `parameters` in their dtype; x (N, in), du (N, R)."""
        if not self.adapters:
            return []
        dtype = self.parameters[0].dtype
        if x.is_cuda and len(x) and x.element_size() == 2 and dtype == torch.float32:
            # the GPU accumulates in float32, so the result does not have to be rounded
            da = torch.mm(du.t(), x, out_dtype=dtype)
        else:
            rounded_da = du.t() @ x
            da = rounded_da.to(dtype)
        if db[0].dtype != dtype:
            rounded_db, db = db, [torch.empty_like(each, dtype=dtype) for each in db]
            torch._foreach_copy_(db, rounded_db)  # by one kernel
        return [*da.split(self.ranks), *db]
