"""The elementwise half of a gated MLP: h = act(g) * u, and its gradient. Owns the formula; the GPU's kernels are in gated_kernels.

Both activations are a gate on themselves, act(g) = g * sigmoid(p(g)):
    silu        p(g) = g
    gelu_tanh   p(g) = 2 sqrt(2 / pi) (g + 0.044715 g^3), since (1 + tanh(z)) / 2 = sigmoid(2 z)
With s = sigmoid(p):  act'(g) = s + g s (1 - s) p'(g),  dg = dh act'(g) u,  du = dh act(g).
Computed in float32 and rounded once; transformers rounds act(g) to bfloat16 before it multiplies.

Legend: N tokens, I intermediate features.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import GELUTanh, SiLUActivation

Activation = Literal["silu", "gelu_tanh"]
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715


def activation_of(module: nn.Module) -> Activation | None:
    """Return the name that the functions here have for an activation module; None for one that they do not compute."""
    if isinstance(module, nn.SiLU | SiLUActivation):
        return "silu"
    is_tanh = isinstance(module, GELUTanh) or (
        isinstance(module, nn.GELU) and module.approximate == "tanh"
    )
    return "gelu_tanh" if is_tanh else None


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (..., I). Keeps gate and up for backward and nothing else."""
    return GatedFunction.apply(gate, up, activation)


class GatedFunction(torch.autograd.Function):
    """act(gate) * up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return h (..., I) of gate and up (..., I)."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        rows = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
        return gated_forward(*rows, activation).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up."""
        gate, up = (tensor.reshape(-1, tensor.shape[-1]) for tensor in ctx.saved_tensors)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        gated_backward(dh.reshape(gate.shape), gate, up, ctx.activation, dgate, dup)
        return dgate.view(dh.shape), dup.view(dh.shape), None


def gated_forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return h (N, I) of gate and up (N, I), whose rows may lie apart."""
    if gate.is_cuda:
        from sft_play.models.fast import gated_kernels  # Triton looks for a GPU when it is loaded

        return gated_kernels.forward(gate, up, activation)
    g, u = wide(gate), wide(up)
    p, _ = exponent(g, activation)
    return (g * torch.sigmoid(p) * u).to(gate.dtype)


def gated_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None = None,
) -> None:
    """Write the gradients of gate and up to dgate and dup (N, I), and act(gate) * up to h where it is given, which may be dh itself."""
    if gate.is_cuda:
        from sft_play.models.fast import gated_kernels

        return gated_kernels.backward(dh, gate, up, activation, dgate, dup, h)
    g, u, d = wide(gate), wide(up), wide(dh)
    p, slope = exponent(g, activation)
    s = torch.sigmoid(p)
    act = g * s
    dgate.copy_(d * (s + act * (1 - s) * slope) * u)
    dup.copy_(d * act)
    if h is not None:
        h.copy_(act * u)


def exponent(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """Return p(g) and p'(g), the argument of the sigmoid."""
    if activation == "silu":
        return g, 1.0
    return GELU_SLOPE * (g + GELU_CUBE * g**3), GELU_SLOPE * (1 + 3 * GELU_CUBE * g**2)


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
