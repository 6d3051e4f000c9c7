"""SwiGLU and GeGLU, the elementwise half of a gated MLP: h = act(g) * u, and its gradient.

With act(g) = g * s, s = sigmoid(p(g)) of `activations`:
    act'(g) = s + g s (1 - s) p'(g),  dg = dh act'(g) u,  du = dh act(g)
Computed in float32 and rounded once; transformers rounds act(g) to bfloat16 before it multiplies.
On a GPU the kernels of `glu_kernels` run, elsewhere the reference below.

The adapter of the linear that reads h has thin products: h A^T (N, r) forward, dA = dU^T h (r, I)
backward. By itself each takes as long as reading h does. On a Hopper GPU the kernel that computes h
has both (`glu_adapter_kernels`), for ranks of at most 16. Elsewhere they are separate products.

Legend: N tokens, I intermediate features, r rank.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft_play.models.fast.linears.activations import Activation, sigmoid_argument
from sft_play.models.fast.linears.products import (
    LARGEST_RANK,
    Factors,
    is_hopper,
)
from sft_play.models.float8.format import Quantized
from sft_play.models.float8.quantize import quantize


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
        h = glu_forward(gate.flatten(0, -2), up.flatten(0, -2), activation)
        return h.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up."""
        gate, up = (tensor.flatten(0, -2) for tensor in ctx.saved_tensors)
        dgate = torch.empty_like(gate)
        dup = torch.empty_like(up)
        glu_backward(dh.reshape(gate.shape), gate, up, ctx.activation, dgate, dup)
        return dgate.view(dh.shape), dup.view(dh.shape), None


def glu_forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return h (N, I) of gate and up (N, I), whose rows need not be adjacent in memory."""
    if gate.is_cuda:
        from sft_play.models.fast.linears import (
            glu_kernels,  # Triton needs a GPU when it is imported
        )

        return glu_kernels.forward(gate, up, activation)
    g = widen(gate)
    u = widen(up)
    p, _ = sigmoid_argument(g, activation)
    return (g * torch.sigmoid(p) * u).to(gate.dtype)


def glu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor | None = None,
) -> None:
    """Write the gradients of gate and up to dgate and dup (N, I).

    If `h` is given, act(gate) * up is written to it; it may be dh itself.
    """
    if gate.is_cuda:
        from sft_play.models.fast.linears import glu_kernels

        return glu_kernels.backward(dh, gate, up, activation, dgate, dup, h)
    g = widen(gate)
    u = widen(up)
    d = widen(dh)
    p, slope = sigmoid_argument(g, activation)
    s = torch.sigmoid(p)
    act = g * s
    dgate.copy_(d * (s + act * (1 - s) * slope) * u)
    dup.copy_(d * act)
    if h is not None:
        h.copy_(act * u)


def glu_forward_float8(
    gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Quantized]:
    """Return h (N, I) of gate and up (N, I), and h in float8; one kernel on a GPU."""
    if gate.is_cuda:
        from sft_play.models.fast.linears import glu_float8_kernels

        return glu_float8_kernels.forward(gate, up, activation)
    h = glu_forward(gate, up, activation)
    return h, quantize(h)


def glu_backward_float8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    gate_scales: Tensor,
    up_scales: Tensor,
) -> tuple[Quantized, Quantized]:
    """Write dgate, dup and, in the place of dh, h; return dgate and dup (N, I) in float8.

    They are multiplied by the scales (I,) of the rows of gate's and up's weights before.
    """
    if gate.is_cuda:
        from sft_play.models.fast.linears import glu_float8_kernels

        scales = (gate_scales, up_scales)
        return glu_float8_kernels.backward(dh, gate, up, activation, dgate, dup, *scales)
    glu_backward(dh, gate, up, activation, dgate, dup, h=dh)
    return quantize(dgate, gate_scales), quantize(dup, up_scales)


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Forward a program computes whole rows: fewer of them would keep few of a GPU's processors busy.
LEAST_ROWS = 4096


def forward_with_adapter(
    gate: Tensor, up: Tensor, activation: Activation, factors: Factors
) -> tuple[Tensor, Tensor | None]:
    """Return h (N, I), and h A^T (N, r) if the kernel has it. A (r, I), if there is an adapter."""
    if not factors or not fit_one_kernel(gate, up, len(factors[0]), LEAST_ROWS):
        return glu_forward(gate, up, activation), None
    from sft_play.models.fast.linears import glu_adapter_kernels  # Triton needs a GPU

    return glu_adapter_kernels.forward(gate, up, activation, factors[0])


def backward_with_adapter(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    du: Tensor | None,
) -> Tensor | None:
    """Write dgate and dup (N, I); return dA (r, I) for dU (N, r) if the kernel has it.

    Otherwise, if there is an adapter, h overwrites dh.
    """
    if du is not None and fit_one_kernel(gate, up, du.shape[1], 1):
        from sft_play.models.fast.linears import glu_adapter_kernels

        return glu_adapter_kernels.backward(dh, gate, up, activation, dgate, dup, du)
    return glu_backward(dh, gate, up, activation, dgate, dup, h=None if du is None else dh)


def fit_one_kernel(gate: Tensor, up: Tensor, rank: int, least_rows: int) -> bool:
    """Return whether one kernel computes h, or its gradient, and the adapter's product."""
    if not is_hopper(gate.device) or gate.element_size() != 2 or rank > LARGEST_RANK:
        return False
    return len(gate) >= least_rows and gate.stride(1) == up.stride(1) == 1
