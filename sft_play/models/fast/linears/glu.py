"""SwiGLU and GeGLU, the elementwise half of a gated MLP: h = act(g) * u, and its gradient.

With act(g) = g * s, s = sigmoid(p(g)) of `activations`:
    act'(g) = s + g s (1 - s) p'(g),  dg = dh act'(g) u,  du = dh act(g)
Computed in float32 and rounded once; transformers rounds act(g) to bfloat16 before it multiplies.
On a GPU the kernels of `glu_kernels` run, elsewhere the reference below.

Gate and up may come without what their adapters add to them, and dh without what the adapter of
the next linear adds to it: those sums are small products (`LowRank`), which are added to what is
read anyhow. By themselves they would be three passes more over the widest tensors of a layer.

Legend: N tokens, I intermediate features.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft_play.models.fast.linears.activations import Activation, sigmoid_argument
from sft_play.models.fast.linears.products import LowRank
from sft_play.models.float8.format import Quantised
from sft_play.models.float8.quantise import quantise


class Parts(NamedTuple):
    """What adapters add to gate, up and dh (N, I); None where there is nothing to add."""

    gate: LowRank | None = None
    up: LowRank | None = None
    dh: LowRank | None = None


NO_PARTS = Parts()


def glu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (..., I). Saves only gate and up for backward."""
    return GluFunction.apply(gate, up, activation)


class GluFunction(torch.autograd.Function):
    """act(gate) * up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return h (..., I) of gate and up (..., I)."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        h = glu_forward(_flatten(gate), _flatten(up), activation)
        return h.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up."""
        gate, up = (_flatten(tensor) for tensor in ctx.saved_tensors)
        dgate = torch.empty_like(gate)
        dup = torch.empty_like(up)
        glu_backward(dh.reshape(gate.shape), gate, up, ctx.activation, dgate, dup)
        return dgate.view(dh.shape), dup.view(dh.shape), None


def glu_forward(
    gate: Tensor, up: Tensor, activation: Activation, parts: Parts = NO_PARTS
) -> Tensor:
    """Return h (N, I) of gate and up (N, I), whose rows need not be adjacent in memory."""
    if gate.is_cuda:
        return _forward_on_gpu(gate, up, activation, parts)
    g = _complete(gate, parts.gate)
    u = _complete(up, parts.up)
    p, _ = sigmoid_argument(g, activation)
    return (g * torch.sigmoid(p) * u).to(gate.dtype)


def _forward_on_gpu(gate: Tensor, up: Tensor, activation: Activation, parts: Parts) -> Tensor:
    # Triton needs a GPU when it is imported
    from sft_play.models.fast.linears import glu_kernels, glu_lora_kernels

    if not any(parts):
        return glu_kernels.forward(gate, up, activation)
    return glu_lora_kernels.forward(gate, up, activation, parts.gate, parts.up)


def glu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None = None,
    parts: Parts = NO_PARTS,
) -> None:
    """Write the gradients of gate and up to dgate and dup (N, I).

    If `h` is given, act(gate) * up is written to it; it may be dh itself. With `parts` it must be.
    """
    if gate.is_cuda:
        return _backward_on_gpu(dh, gate, up, activation, dgate, dup, h, parts)
    g = _complete(gate, parts.gate)
    u = _complete(up, parts.up)
    d = _complete(dh, parts.dh)
    p, slope = sigmoid_argument(g, activation)
    s = torch.sigmoid(p)
    act = g * s
    dgate.copy_(d * (s + act * (1 - s) * slope) * u)
    dup.copy_(d * act)
    if h is not None:
        h.copy_(act * u)


def _backward_on_gpu(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None,
    parts: Parts,
) -> None:
    from sft_play.models.fast.linears import glu_kernels, glu_lora_kernels

    if not any(parts):
        return glu_kernels.backward(dh, gate, up, activation, dgate, dup, h)
    assert h is not None, "a product that is given up while its adapters are added"
    return glu_lora_kernels.backward(dh, gate, up, activation, dgate, dup, h, *parts)


def glu_forward_float8(
    gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Quantised]:
    """Return h (N, I) of gate and up (N, I), and h in float8; one kernel on a GPU."""
    if gate.is_cuda:
        from sft_play.models.fast.linears import glu_float8_kernels

        return glu_float8_kernels.forward(gate, up, activation)
    h = glu_forward(gate, up, activation)
    return h, quantise(h)


def glu_backward_float8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    gate_scales: Tensor,
    up_scales: Tensor,
) -> tuple[Quantised, Quantised]:
    """Write dgate, dup and, in the place of dh, h; return dgate and dup (N, I) in float8.

    They are multiplied by the scales (I,) of the rows of gate's and up's weights before.
    """
    if gate.is_cuda:
        from sft_play.models.fast.linears import glu_float8_kernels

        scales = (gate_scales, up_scales)
        return glu_float8_kernels.backward(dh, gate, up, activation, dgate, dup, *scales)
    glu_backward(dh, gate, up, activation, dgate, dup, h=dh)
    return quantise(dgate, gate_scales), quantise(dup, up_scales)


def _flatten(x: Tensor) -> Tensor:
    """Return x (..., I) as (N, I)."""
    return x.reshape(-1, x.shape[-1])


def _complete(x: Tensor, part: LowRank | None) -> Tensor:
    """Return x (N, I), widened, with an adapter's part."""
    wide = _widen(x)
    return wide if part is None else part.added_to(wide)


def _widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
