"""A gated MLP over LoRA linears as one autograd function: y = down(act(gate(x)) * up(x)).

Kept for backward: x, gate's output and up's, and what the adapters read (rank features a token). Their product h, which the
down projection reads, is computed again: it is elementwise, and costs I features a token to keep (28 KiB at 8B).

Legend: N tokens, I intermediate features.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_play.models.fast.gated import Activation, gated, gated_backward, gated_forward
from sft_play.models.fast.lora import (
    Adapters,
    Weights,
    adapter_gradients,
    adapter_inputs_gradient,
    can_fuse,
    cast_adapters,
    in_compute_type,
    input_gradient,
    is_decoding,
    is_packed,
    lora_linears,
    project,
    rows,
    type_of,
    weights_of,
)


def lora_mlp(
    x: Tensor, gate: nn.Module, up: nn.Module | None, down: nn.Module, activation: Activation
) -> Tensor:
    """Return down(act(gate(x)) * up(x)), (..., out) of x (..., in).

    Without `up` the outputs of `gate` are both, gate's features before up's (Phi 3). Linears that cannot be fused, such as
    those whose weights are trained, compute as they do, with the elementwise part alone fused.
    """
    inner = (gate,) if up is None else (gate, up)
    modules = (*inner, down)
    if any(map(can_fuse, modules)) or (is_decoding(x) and any(map(is_packed, modules))):
        return down(gated(*halves(lora_linears(x, inner)), activation))
    linears, adapters = weights_of(modules)
    return MlpFunction.apply(in_compute_type(x), linears, activation, *adapters)


def halves(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return gate's and up's outputs (..., I), of two linears or of one that computes both."""
    return outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)


class MlpFunction(torch.autograd.Function):
    """down(act(gate(x)) * up(x)); `linears` and their adapters are gate's, up's (unless gate's outputs are both) and down's."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        linears: tuple[Weights, ...],
        activation: Activation,
        *parameters: Tensor | None,
    ) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        *inner, down = linears
        of_inner, of_down = (
            cast_adapters(parameters[:-2], x.dtype),
            cast_adapters(parameters[-2:], x.dtype),
        )
        outputs, xa = project(rows(x), inner, of_inner)
        h = gated_forward(*halves(outputs), activation)
        (y,), ha = project(h, (down,), of_down)
        ctx.save_for_backward(x, xa, ha, of_inner.a, *of_inner.b, of_down.a, *of_down.b, *outputs)
        ctx.linears, ctx.activation, ctx.types = (
            linears,
            activation,
            (type_of(parameters[:-2]), type_of(parameters[-2:])),
        )
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the adapters."""
        *inner, down = ctx.linears
        count = len(inner)
        x, xa, ha, a, *rest = ctx.saved_tensors
        of_inner, of_down = (
            Adapters(a, tuple(rest[:count])),
            Adapters(rest[count], (rest[count + 1],)),
        )
        grads, of_h = down_backward(
            rows(dy), ha, rest[count + 2 :], down, of_down, ctx.activation, ctx.types[1]
        )
        du = adapter_inputs_gradient(grads, inner, of_inner)
        dx = (
            input_gradient(grads, du, inner, of_inner).view(x.shape)
            if ctx.needs_input_grad[0]
            else None
        )
        return (
            dx,
            None,
            None,
            *adapter_gradients(rows(x), xa, grads, du, inner, ctx.types[0]),
            *of_h,
        )


def down_backward(
    dy: Tensor,
    ha: Tensor | None,
    outputs: list[Tensor],
    down: Weights,
    adapters: Adapters,
    activation: Activation,
    dtype: torch.dtype | None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of gate's and up's outputs (N, I), or of both as one (N, 2 I), and those of down's adapter; dy (N, out)."""
    du = adapter_inputs_gradient([dy], [down], adapters)
    dh = input_gradient([dy], du, [down], adapters)
    grads = [torch.empty_like(output) for output in outputs]
    # h takes the place of dh; gate's and up's outputs are not written over, since a second backward may need them
    gated_backward(dh, *halves(tuple(outputs)), activation, *halves(tuple(grads)), h=dh)
    return grads, adapter_gradients(dh, ha, [dy], du, [down], dtype)
