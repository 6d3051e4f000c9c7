"""The elementwise part of an expert, between its two products: h = gate(y).

`FusedGlu` is act(g) u of the two halves [g, u] of y. `ClampedGlu` is that of gpt-oss: features of
gate and up in turn, and
    h = (u' + 1) g' sigmoid(alpha g'),  g' = min(g, limit),  u' = min(max(u, -limit), limit)
`OwnGate` is any other formula, run by the module's own code.

The gradient of a routing weight needs no output of an expert. With z = down(h) and dz = w dout,
    dh = down^T dout,  dw = <dout, z> = <dh, h>,  dy = w gate'(y) dh

Legend: S rows, I intermediate features, F features of y (2 I, or I without a gate).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import _default_apply_gate

from sft_play.models.fast.linears.activations import Activation, activation_of
from sft_play.models.fast.linears.glu import glu_backward, glu_forward

GateGradients = tuple[Tensor, Tensor, Tensor]


class Gate(Protocol):
    """The elementwise part of an expert, forward and backward."""

    def forward(self, y: Tensor) -> Tensor:
        """Return h (S, I) of y (S, F)."""

    def backward(self, dh: Tensor, y: Tensor, weights: Tensor) -> GateGradients:
        """Return the gradients of y (S, F) and of the weights (S,) in float32, and h (S, I).

        `dh` (S, I) is without the routing weights (S,) and may be overwritten.
        """


@dataclass(frozen=True)
class FusedGlu:
    """act(g) u, all features of the gate before those of up."""

    activation: Activation

    def forward(self, y: Tensor) -> Tensor:
        return glu_forward(*y.chunk(2, dim=-1), self.activation)

    def backward(self, dh: Tensor, y: Tensor, weights: Tensor) -> GateGradients:
        return fused_glu_backward(dh, y, weights, self.activation)


@dataclass(frozen=True)
class ClampedGlu:
    """(u' + 1) g' sigmoid(alpha g'), the features of gate and up in turn."""

    alpha: float
    limit: float

    def forward(self, y: Tensor) -> Tensor:
        return clamped_glu_forward(y, self.alpha, self.limit)

    def backward(self, dh: Tensor, y: Tensor, weights: Tensor) -> GateGradients:
        return clamped_glu_backward(dh, y, weights, self.alpha, self.limit)


@dataclass(frozen=True)
class OwnGate:
    """A formula of the module itself; autograd differentiates it."""

    function: Callable[[Tensor], Tensor]

    def forward(self, y: Tensor) -> Tensor:
        return self.function(y)

    def backward(self, dh: Tensor, y: Tensor, weights: Tensor) -> GateGradients:
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            h = self.function(y)
        dweights = _row_products(dh, h.detach())
        weighted = dh.mul_(weights.unsqueeze(-1).to(dh.dtype))
        (dy,) = torch.autograd.grad(h, y, weighted)
        return dy, dweights, h.detach()


def gate_of(experts: nn.Module, has_values: bool = True) -> Gate:
    """Return the elementwise part of an experts module of transformers.

    Without values, in a trace, a formula cannot be checked and is taken for what it looks like.
    """
    if not experts.has_gate:
        return OwnGate(experts.act_fn)
    if experts.is_concatenated and type(experts)._apply_gate is _default_apply_gate:
        activation = _activation(experts.act_fn)
        if activation is not None:
            return FusedGlu(activation)
    clamped = _clamped_glu(experts)
    if clamped is not None and (not has_values or _computes(experts, clamped)):
        return clamped
    return OwnGate(experts._apply_gate)


def _activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    if function is functional.silu:
        return "silu"
    return activation_of(function) if isinstance(function, nn.Module) else None


def _clamped_glu(experts: nn.Module) -> ClampedGlu | None:
    """Return the gate that a module with interleaved halves and a limit may have."""
    alpha = getattr(experts, "alpha", None)
    limit = getattr(experts, "limit", None)
    if experts.is_concatenated or not isinstance(alpha, float) or not isinstance(limit, float):
        return None
    return ClampedGlu(alpha, limit)


@torch.no_grad()
def _computes(experts: nn.Module, gate: ClampedGlu) -> bool:
    """Return whether a module's own gate computes `gate`, within its limits and beyond them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(64, 16, generator=generator) * 2 * gate.limit
    return torch.allclose(experts._apply_gate(y), gate.forward(y), rtol=1e-4, atol=1e-5)


def fused_glu_backward(
    dh: Tensor, y: Tensor, weights: Tensor, activation: Activation
) -> GateGradients:
    """Return what `Gate.backward` does, of act(g) u."""
    if y.is_cuda:
        from sft_play.models.fast.experts import kernels  # Triton needs a GPU when it is imported

        return kernels.glu_backward(dh, y, weights, activation)
    gate, up = y.chunk(2, dim=-1)
    dy = torch.empty_like(y)
    h = torch.empty_like(dh)
    glu_backward(dh, gate, up, activation, *dy.chunk(2, dim=-1), h=h)
    return dy * weights.unsqueeze(-1).to(dy.dtype), _row_products(dh, h), h


def clamped_glu_forward(y: Tensor, alpha: float, limit: float) -> Tensor:
    """Return h (S, I) of y (S, 2 I), rounded once."""
    if y.is_cuda:
        from sft_play.models.fast.experts import kernels

        return kernels.clamped_glu_forward(y, alpha, limit)
    gate, up = _widen(y).unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(y.dtype)


def clamped_glu_backward(
    dh: Tensor, y: Tensor, weights: Tensor, alpha: float, limit: float
) -> GateGradients:
    """Return what `Gate.backward` does, of a clamped gate."""
    if y.is_cuda:
        from sft_play.models.fast.experts import kernels

        return kernels.clamped_glu_backward(dh, y, weights, alpha, limit)
    gate, up = _widen(y).unflatten(-1, (-1, 2)).unbind(-1)
    g = gate.clamp(max=limit)
    u = up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * g)
    d = _widen(dh) * weights.unsqueeze(-1)
    dgate = d * (u + 1) * (s + alpha * g * s * (1 - s)) * (gate <= limit)
    dup = d * g * s * (up.abs() <= limit)
    h = (u + 1) * g * s
    dy = torch.stack((dgate, dup), dim=-1).flatten(-2)
    return dy.to(y.dtype), _row_products(dh, h), h.to(dh.dtype)


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows (S,), in float32, of a and b (S, I)."""
    return (a * b).sum(-1, dtype=torch.float32)


def _widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
