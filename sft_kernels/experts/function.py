"""Experts of an MoE layer with LoRA, as one autograd function.

    out_n = sum_j w_nj (down_e(gate(in_e(x_n))) + b_e),  e = choice j of token n

Saved for backward: x, the routing, the outputs of the inner linear (S, F), and x A^T and h A^T of
the adapters. h is recomputed, and the outputs of the experts are not needed.
The reference is the module's original forward with PEFT's wrappers, which compute the full adapted
weight in each pass.

h = gate(y) is elementwise. `FusedGlu` is act(g) u of the two halves [g, u] of y. `ClampedGlu` is
the formula of gpt-oss: features of gate and up are interleaved, and
    h = (u' + 1) g' sigmoid(alpha g'),  g' = min(g, limit),  u' = min(max(u, -limit), limit)
`OwnGate` is any other formula, computed by the module's original implementation.

The gradient of a routing weight does not need an expert's output. With z = down(h), dz = w dout,
    dh = down^T dout,  dw = <dout, z> = <dh, h>,  dy = w gate'(y) dh

Legend: N tokens, k experts per token, S = N k rows, H hidden, I intermediate features, F features
of y, the output of the inner linear (2 I, or I without a gate).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import _default_apply_gate

from sft_kernels import triton_kernels
from sft_kernels.experts import kernels
from sft_kernels.experts.products import (
    ExpertAdapters,
    ExpertLinear,
    Routing,
    Term,
    adapter_of,
    gradient_of_a,
    gradient_of_b,
    rows_times,
    sum_choices,
)
from sft_kernels.linears.glu import Activation, activation_of, glu_forward
from sft_kernels.partitioned import gathered_parameters

GateGradients = tuple[Tensor, Tensor, Tensor]


class Glu:
    """A gated linear unit: computed by `kernels` on a GPU, and by a formula in torch elsewhere."""

    form: tuple[str, float, float]  # `kernels.Form`
    reference: Callable[[Tensor], Tensor]  # h (S, I) of y (S, F), computed in float32 and rounded

    def forward(self, y: Tensor, ends: Tensor | None = None) -> Tensor:
        """Return h (S, I) of y (S, F); rows after the last of `ends` (E,) may be skipped."""
        if y.is_cuda:
            return kernels.expert_glu_forward(y, self.form, ends)
        if triton_kernels.is_traced:
            return y.new_empty(len(y), y.shape[1] // 2)
        return self.reference(y)

    def backward(
        self, dh: Tensor, y: Tensor, weights: Tensor, ends: Tensor | None = None
    ) -> GateGradients:
        """Return the gradients of y (S, F) and of the weights (S,) in float32, and h (S, I).

        `dh` (S, I) is without the routing weights (S,) and may be overwritten.
        """
        if y.is_cuda:
            return kernels.expert_glu_backward(dh, y, weights, self.form, ends)
        if triton_kernels.is_traced:
            return torch.empty_like(y), y.new_empty(len(y), dtype=torch.float32), dh
        wide = torch.promote_types(y.dtype, torch.float32)
        dy, dweights, h = _gate_gradients(self.reference, dh.to(wide), y.to(wide), weights)
        return dy.to(y.dtype), dweights, h.to(y.dtype)


@dataclass(frozen=True)
class FusedGlu(Glu):
    """act(g) u, with all features of gate before those of up."""

    activation: Activation

    @property
    def form(self) -> tuple[str, float, float]:
        return self.activation, 0.0, 0.0

    def reference(self, y: Tensor) -> Tensor:
        return glu_forward(*y.chunk(2, dim=-1), self.activation)


@dataclass(frozen=True)
class ClampedGlu(Glu):
    """(u' + 1) g' sigmoid(alpha g'), with interleaved features of gate and up."""

    alpha: float
    limit: float

    @property
    def form(self) -> tuple[str, float, float]:
        return "clamped", self.alpha, self.limit

    def reference(self, y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        gate, up = y.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).to(y.dtype)


@dataclass(frozen=True)
class OwnGate:
    """The module's original formula; autograd differentiates it."""

    function: Callable[[Tensor], Tensor]

    def forward(self, y: Tensor, ends: Tensor | None = None) -> Tensor:
        return self.function(y)

    def backward(
        self, dh: Tensor, y: Tensor, weights: Tensor, ends: Tensor | None = None
    ) -> GateGradients:
        """Return what `Glu.backward` does."""
        return _gate_gradients(self.function, dh, y, weights)


Gate = Glu | OwnGate  # the elementwise part of an expert, forward and backward


def gate_of(experts: nn.Module, has_values: bool = True) -> Gate:
    """Return the elementwise part of an experts module of transformers.

    In a trace, which has no values, a formula cannot be checked. It is then assumed from the
    module's structure.
    """
    if not experts.has_gate:
        return OwnGate(experts.act_fn)
    if experts.is_concatenated and type(experts)._apply_gate is _default_apply_gate:
        activation = activation_of(experts.act_fn)
        if activation is not None:
            return FusedGlu(activation)
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if not experts.is_concatenated and isinstance(alpha, float) and isinstance(limit, float):
        clamped = ClampedGlu(alpha, limit)
        if not has_values or _computes(experts, clamped):
            return clamped
    return OwnGate(experts._apply_gate)


@torch.no_grad()
def _computes(experts: nn.Module, gate: ClampedGlu) -> bool:
    """Return whether a module's gate computes the same as `gate`, inside and outside its limits."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(64, 16, generator=generator) * 2 * gate.limit
    return torch.allclose(experts._apply_gate(y), gate.forward(y), rtol=1e-4, atol=1e-5)


def _gate_gradients(
    formula: Callable[[Tensor], Tensor], dh: Tensor, y: Tensor, weights: Tensor
) -> GateGradients:
    """Return what `Glu.backward` does, for a formula that autograd differentiates."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        h = formula(y)
    dweights = _row_products(dh, h.detach())
    (dy,) = torch.autograd.grad(h, y, dh.mul_(weights.unsqueeze(-1).to(dh.dtype)))
    return dy, dweights, h.detach()


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products (S,), in float32, of the rows of a and b (S, I)."""
    return (a * b).sum(-1, dtype=torch.float32)


@dataclass(frozen=True)
class FrozenExperts:
    """The frozen parts of a module of experts."""

    inner: ExpertLinear  # gate and up, or only up
    gate: Gate
    down: ExpertLinear


class LoraExpertsFunction(torch.autograd.Function):
    """The weighted sum of the experts of each token."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weights: Tensor,
        routing: Routing,
        experts: FrozenExperts,
        *adapters: Tensor | None,
    ) -> Tensor:
        """Return (N, H) of x (N, H) and routing weights (N, k).

        `adapters` are lora_A and lora_B of the inner linear, then those of down; None if there
        is no adapter.
        """
        inner, down = _adapters(adapters, experts, x.dtype)
        y, xa = _project(x, experts.inner, inner, routing, of_tokens=True)
        z, ha = _project(experts.gate.forward(y, routing.ends), experts.down, down, routing)
        ctx.save_for_backward(x, weights, y, xa, ha, *routing, *adapters)
        ctx.experts = experts
        return sum_choices(z, routing, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the routing weights and the adapters."""
        inner, down = ctx.experts.inner, ctx.experts.down
        saved = ctx.saved_tensors
        with gathered_parameters([inner.weight, down.weight, inner.bias, down.bias, *saved[-4:]]):
            return _gradients(saved, ctx.experts, dout)


def _project(
    x: Tensor,
    linear: ExpertLinear,
    adapter: ExpertAdapters | None,
    routing: Routing,
    of_tokens: bool = False,
    is_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the adapted linear's output (S, out) for x (S or N, in), and x A^T (S, r).

    With `is_backward`, x is dy (S or N, out): return dy W_e^T + s dU A_e and dU = dy B_e^T (S, r).
    """
    matrices, bias = linear.matrices(x.dtype), linear.bias
    if is_backward:
        matrices, bias = matrices.transpose(1, 2), None
    xa = term = None
    if adapter is not None:
        first, second = (adapter.b, adapter.a) if is_backward else (adapter.a, adapter.b)
        xa = rows_times(x, first.transpose(1, 2), routing, of_tokens=of_tokens)
        term = Term(xa, second, adapter.scale)
    return rows_times(x, matrices, routing, term, bias, of_tokens), xa


def _gradients(
    kept: Sequence[Tensor | None], experts: FrozenExperts, dout: Tensor
) -> tuple[Tensor | None, ...]:
    x, weights, y, xa, ha, *saved = kept
    routing = Routing(*saved[:-4])
    adapters = saved[-4:]
    inner, down = _adapters(adapters, experts, x.dtype)
    row_weights = routing.by_row(weights).float()
    gradients: list[Tensor | None] = [None] * 4
    dout = dout.contiguous()  # without the weights
    dh, du = _project(dout, experts.down, down, routing, of_tokens=True, is_backward=True)
    dy, dweights, h = experts.gate.backward(dh, y, row_weights, routing.ends)
    if down is not None:
        gradients[2] = gradient_of_a(du, h, down, adapters[2], routing, row_weights)
        gradients[3] = gradient_of_b(ha, dout, down, adapters[3], routing, row_weights, True)
    if experts.down.bias is not None:  # <dout, b_e>
        biases = experts.down.bias.unsqueeze(2).to(x.dtype)
        dweights += rows_times(dout, biases, routing, of_tokens=True).squeeze(1)
    del dh, h, du
    dx, du = _project(dy, experts.inner, inner, routing, is_backward=True)
    if inner is not None:
        gradients[1] = gradient_of_b(xa, dy, inner, adapters[1], routing)
        gradients[0] = gradient_of_a(du, x, inner, adapters[0], routing, of_tokens=True)
    dweights = routing.by_choice(dweights).to(weights.dtype)
    return sum_choices(dx, routing), dweights, None, None, *gradients


def _adapters(
    adapters: Sequence[Tensor | None], experts: FrozenExperts, dtype: torch.dtype
) -> tuple[ExpertAdapters | None, ExpertAdapters | None]:
    """Return the adapters of the inner linear and of down."""
    inner = adapter_of(*adapters[:2], experts.inner, dtype)
    return inner, adapter_of(*adapters[2:], experts.down, dtype)
