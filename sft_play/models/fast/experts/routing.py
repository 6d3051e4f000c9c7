"""Which expert computes which token: sorting token-expert pairs, and sums over a token's experts.

Nothing here waits for the GPU: the number of tokens of an expert stays on the device.

Legend: N tokens, k experts of a token, S = N k rows (a token at one of its experts), E experts, H
features.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The rows of a batch, sorted by expert."""

    order: Tensor  # (S,) int64: row i is choice order[i] % k of token order[i] // k
    rows: Tensor  # (N, k) int64: the row of each choice
    ends: Tensor  # (E,) int32: the rows of expert e end before ends[e]
    is_empty: Tensor  # (E,) bool: whether expert e has no rows

    def by_row(self, per_choice: Tensor) -> Tensor:
        """Return values of choices (N, k) as values of rows (S,)."""
        return per_choice.reshape(-1)[self.order]


def sort_by_expert(choices: Tensor, num_experts: int) -> Routing:
    """Return the rows of `choices` (N, k), experts of 0 to E - 1, sorted by expert."""
    experts, order = torch.sort(choices.reshape(-1).to(torch.int32), stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(num_experts, device=order.device, dtype=torch.int32)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return Routing(order, rows.view(choices.shape), ends, is_empty)


def without_sentinels(choices: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return choices and weights (N, k) in which an expert that is not here has the weight 0.

    Under expert parallelism transformers marks a choice of another rank's expert by the id E.
    """
    is_here = choices < num_experts
    return choices.clamp(max=num_experts - 1), torch.where(is_here, weights, 0)


def take_tokens(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows (S, H) of tokens x (N, H)."""
    choices = routing.rows.shape[1]
    if x.is_cuda:
        from sft_play.models.fast.experts import kernels  # Triton needs a GPU when it is imported

        return kernels.take_tokens(x, routing.order, choices)
    return x.index_select(0, routing.order // choices)


def sum_choices(parts: tuple[Tensor, ...], rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each token the weighted sum (N, H) over its choices, and over `parts`.

    `parts` are one or two summands (S, H) of the rows' values; rows and weights (N, k).
    Summed in float32 and rounded once.
    """
    if parts[0].is_cuda:
        from sft_play.models.fast.experts import kernels

        return kernels.sum_choices(parts, rows, weights)
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = sum(part[rows].to(wide) for part in parts)  # (N, k, H)
    if weights is not None:
        total = total * weights.to(wide).unsqueeze(-1)
    return total.sum(1).to(parts[0].dtype)
