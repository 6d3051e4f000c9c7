"""Products of rows with the matrices of their experts, and with the experts' LoRA factors.

    y = x W_e + b_e + s (x A_e^T) B_e        for a row x of expert e

PEFT keeps the factors of all experts in two matrices (`ParamWrapper`): lora_A (E r, in) has the
r rows of an expert one after another, lora_B (out, r E) has the columns of a rank's experts one
after another. Here they are A (E, R, in) and s B (E, R, out) in the dtype of the products. A bias
is one rank more: the value of that rank is 1, and its row of B is the bias. An adapter that all
experts share is copied for each of them; its gradient is a sum over all rows.

torch's grouped product has one kernel for all experts on a GPU (bfloat16, capability 8.0 and
newer), and a loop elsewhere. It wants rows of 16 bytes: ranks are padded with zeros.

Tokens are sorted by expert, and the results of a token's experts are summed. Nothing here waits
for the GPU: the number of tokens of an expert stays on the device.

Legend: N tokens, k experts of a token, S = N k rows sorted by expert, E experts, H features, r rank
of an adapter, R with the bias and the padding, `in` and `out` features.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.models.fast.linears.products import dequantize


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


ROW_BYTES = 16  # the rows of a matrix in a grouped product start at multiples of this


class ExpertLinear(NamedTuple):
    """One frozen linear of all experts."""

    weight: Tensor  # (E, out, in); (E, in, out) if transposed; or packed 4-bit
    bias: Tensor | None  # (E, out)
    is_transposed: bool
    experts: int
    scale: float  # of the adapter, 0 without one
    is_shared: bool = False  # lora_A (r, in) and lora_B (out, r) are those of every expert

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices (E, in, out) in `dtype`; 4-bit weights become a new tensor."""
        weight = dequantize(self.weight, dtype)
        return weight if self.is_transposed else weight.transpose(1, 2)


class Factors(NamedTuple):
    """The LoRA factors and the biases of all experts, in the dtype of the products."""

    a: Tensor | None  # (E, R, in); None without an adapter
    b: Tensor  # (E, R, out), with the adapter's scale
    bias: int | None  # the rank that is the bias


def factors_of(
    a: Tensor | None, b: Tensor | None, linear: ExpertLinear, dtype: torch.dtype
) -> Factors | None:
    """Return the factors of lora_A (E r, in) and lora_B (out, r E), and the bias; None without any.

    Shared ones are (r, in) and (out, r).
    """
    has_adapter = a is not None and b is not None
    if not has_adapter and linear.bias is None:
        return None
    experts = linear.experts
    adapters = 1 if linear.is_shared else experts
    rank = len(a) // adapters if has_adapter else 0
    cast_a = None
    cast_b = None
    if has_adapter:
        by_expert = a.view(adapters, rank, -1).expand(experts, -1, -1)
        cast_a = _with_padded_ranks(by_expert, linear, dtype)
        cast_a[:, :rank].copy_(by_expert)
        by_rank = b.view(len(b), rank, adapters).permute(2, 1, 0)  # (E, r, out)
        by_rank = by_rank.expand(experts, -1, -1)
        cast_b = _with_padded_ranks(by_rank, linear, dtype)
        torch.mul(by_rank, linear.scale, out=cast_b[:, :rank])
    if linear.bias is None:
        return Factors(cast_a, cast_b, None)
    if cast_b is None:
        cast_b = _with_padded_ranks(linear.bias.unsqueeze(1)[:, :0], linear, dtype)
    cast_b[:, rank] = linear.bias
    return Factors(cast_a, cast_b, rank)


def _with_padded_ranks(like: Tensor, linear: ExpertLinear, dtype: torch.dtype) -> Tensor:
    """Return memory (E, R, features) for (E, r, features), its further ranks 0."""
    experts, rank, features = like.shape
    needed = rank + (linear.bias is not None)
    step = ROW_BYTES // dtype.itemsize
    padded = -(-needed // step) * step
    made = torch.empty(experts, padded, features, dtype=dtype, device=like.device)
    if padded > rank:
        made[:, rank:] = 0
    return made


def rows_times(x: Tensor, matrices: Tensor, routing: Routing) -> Tensor:
    """Return x_i M_e (S, out) of rows x (S, in) and matrices (E, in, out)."""
    return functional.grouped_mm(x, matrices, offs=routing.ends)


def rows_outer(x: Tensor, y: Tensor, routing: Routing) -> Tensor:
    """Return the sums over the rows of each expert of x_i^T y_i, (E, in, out); x (S, in).

    Exactly 0 for an expert without rows: not every kernel writes there (torch issue 172439).
    """
    sums = functional.grouped_mm(x.t(), y, offs=routing.ends)
    return sums.masked_fill_(routing.is_empty.view(-1, 1, 1), 0)


def project(
    x: Tensor, linear: ExpertLinear, factors: Factors | None, routing: Routing
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x W_e (S, out) of x (S, in); s (x A_e^T) B_e + b_e; and the ranks' values (S, R)."""
    y = rows_times(x, linear.matrices(x.dtype), routing)
    if factors is None:
        return y, None, None
    if factors.a is None:
        xa = x.new_zeros(len(x), factors.b.shape[1])
    else:
        xa = rows_times(x, factors.a.transpose(1, 2), routing)
    if factors.bias is not None:
        xa[:, factors.bias] = 1
    return y, rows_times(xa, factors.b, routing), xa


def input_gradient(
    dy: Tensor, linear: ExpertLinear, factors: Factors | None, routing: Routing
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dy W_e^T (S, in) of dy (S, out); the adapter's part dU A_e; and dU = dy (s B_e)^T."""
    dx = rows_times(dy, linear.matrices(dy.dtype).transpose(1, 2), routing)
    if factors is None:
        return dx, None, None
    du = rows_times(dy, factors.b.transpose(1, 2), routing)
    if factors.a is None:
        return dx, None, du
    return dx, rows_times(du, factors.a, routing), du


def gradient_of_a(
    du: Tensor, x: Tensor, linear: ExpertLinear, like: Tensor, routing: Routing
) -> Tensor:
    """Return the gradient of lora_A (E r, in), or (r, in), from dU (S, r) and x (S, in)."""
    if linear.is_shared:
        return (du[:, : len(like)].t() @ x).to(like.dtype)
    da = rows_outer(du, x, routing)
    rank = len(like) // len(da)
    return da[:, :rank].reshape(like.shape).to(like.dtype)


def gradient_of_b(
    xa: Tensor, dy: Tensor, linear: ExpertLinear, like: Tensor, routing: Routing
) -> Tensor:
    """Return the gradient of lora_B (out, r E), or (out, r), from x A^T (S, r) and dy (S, out)."""
    if linear.is_shared:
        return (dy.t() @ xa[:, : like.shape[1]]).to(like.dtype) * linear.scale
    db = rows_outer(xa, dy, routing)
    rank = like.shape[1] // len(db)
    scaled = torch.empty(len(like), rank, len(db), dtype=like.dtype, device=like.device)
    torch.mul(db[:, :rank].permute(2, 1, 0), linear.scale, out=scaled)
    return scaled.view(like.shape)
