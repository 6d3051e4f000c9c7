"""Mixture of experts with LoRA as one autograd function.

    out_n = sum_j w_nj (down_e(gate(in_e(x_n))) + b_e),  e = choice j of token n

Saved for backward: x, the routing, the outputs of the inner linear (S, F), and x A^T and h A^T of
the adapters. The rows of x and h are computed again, and the outputs of the experts are not needed:
see `gates` for the gradient of a routing weight.
The reference is the module's own forward with PEFT's wrappers, which make the whole adapted weight
in each pass.

Legend: N tokens, k experts of a token, S = N k rows, H hidden, I intermediate features, F features
of the inner linear (2 I with a gate).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft_play.models.fast.experts.gates import Gate
from sft_play.models.fast.experts.products import (
    ExpertLinear,
    Factors,
    Routing,
    factors_of,
    gradient_of_a,
    gradient_of_b,
    input_gradient,
    project,
    sum_choices,
    take_tokens,
)
from sft_play.models.partitioned import gathered


@dataclass(frozen=True)
class FrozenExperts:
    """The frozen parts of a module of experts."""

    inner: ExpertLinear  # gate and up, or up alone
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

        `adapters` are lora_A and lora_B of the inner linear, then those of down; None without.
        """
        inner, down = _factors(adapters, experts, x.dtype)
        y, y_adapter, xa = project(take_tokens(x, routing), experts.inner, inner, routing)
        if y_adapter is not None:
            y.add_(y_adapter)
            del y_adapter
        z, z_adapter, ha = project(experts.gate.forward(y), experts.down, down, routing)
        parts = (z,) if z_adapter is None else (z, z_adapter)
        out = sum_choices(parts, routing.rows, weights)
        ctx.save_for_backward(x, weights, y, xa, ha, *routing, *adapters)
        ctx.experts = experts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the routing weights and the adapters."""
        experts = ctx.experts
        saved = ctx.saved_tensors
        read = [linear.weight for linear in (experts.inner, experts.down)]
        read += [linear.bias for linear in (experts.inner, experts.down)]
        with gathered([*read, *saved[-4:]]):
            return _gradients(saved, experts, dout)


def _gradients(
    kept: Sequence[Tensor | None], experts: FrozenExperts, dout: Tensor
) -> tuple[Tensor | None, ...]:
    x, weights, y, xa, ha, *saved = kept
    routing = Routing(*saved[:-4])
    adapters = saved[-4:]
    inner, down = _factors(adapters, experts, x.dtype)
    row_weights = routing.by_row(weights).float()
    gradients: list[Tensor | None] = [None] * 4
    dz = take_tokens(dout, routing)  # without the weights
    dh, dh_adapter, du = input_gradient(dz, experts.down, down, routing)
    if dh_adapter is not None:
        dh.add_(dh_adapter)
        ha = _weighted(ha, row_weights)
        gradients[3] = gradient_of_b(ha, dz, experts.down, adapters[3], routing)
    del dz, dh_adapter
    dy, dweights, h = experts.gate.backward(dh, y, row_weights)
    if gradients[3] is not None:
        gradients[2] = gradient_of_a(_weighted(du, row_weights), h, adapters[2], routing)
    if down is not None and down.bias is not None:
        dweights += du[:, down.bias]  # <dout, b_e>
    del dh, h, du
    dx, dx_adapter, du = input_gradient(dy, experts.inner, inner, routing)
    if dx_adapter is not None:
        gradients[1] = gradient_of_b(xa, dy, experts.inner, adapters[1], routing)
    del dy
    parts = (dx,) if dx_adapter is None else (dx, dx_adapter)
    dx = sum_choices(parts, routing.rows)
    if gradients[1] is not None:
        del parts, dx_adapter
        gradients[0] = gradient_of_a(du, take_tokens(x, routing), adapters[0], routing)
    return dx, dweights[routing.rows].to(weights.dtype), None, None, *gradients


def _factors(
    adapters: Sequence[Tensor | None], experts: FrozenExperts, dtype: torch.dtype
) -> tuple[Factors | None, Factors | None]:
    """Return the factors of the inner linear and of down."""
    inner = factors_of(*adapters[:2], experts.inner, dtype)
    return inner, factors_of(*adapters[2:], experts.down, dtype)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Return values (S, r), each row times its weight (S,)."""
    return (values * weights.unsqueeze(-1)).to(values.dtype)
