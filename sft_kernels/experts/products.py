"""Multiply rows by the matrices of their experts, and by the experts' LoRA factors.

    y = x W_e + b_e + s (x A_e^T) B_e        for a row x of expert e

PEFT stores the factors of all experts in two matrices (`ParamWrapper`). In lora_A (E r, in), the r
rows of an expert are contiguous. In lora_B (out, r E), the columns of all experts for one rank are
contiguous. Here the factors are A (E, r, in) in its training dtype, and B (E, r, out) in the dtype
of the matrix multiplications. An adapter that all experts share has (r, in) and (out, r). Its
factors use the same memory for all experts, and their gradient is the sum over experts.

On a GPU, one kernel computes y (`grouped_kernels`). It reads rows of tokens in place and adds the
adapter before it rounds. It unpacks 4-bit weights tile by tile; if experts have many rows, a few
experts are unpacked at a time instead. Elsewhere each expert runs separate matrix multiplications,
which are the reference.

Tokens are sorted by expert, and the results of a token's experts are summed. Nothing here waits
for the GPU: the number of tokens per expert stays on the device. If the chosen expert is on another
rank, the choice gets a row after all others, which is not computed.

Legend: N tokens, k experts per token, S = N k rows sorted by expert, E experts, H features, r rank
of an adapter, `in` and `out` features, K features that are summed over, M those of a result.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sft_kernels import triton_kernels
from sft_kernels.experts import grouped_kernels, kernels
from sft_kernels.linears.four_bit import InLines, block_lines
from sft_kernels.linears.products import dequantize


class Routing(NamedTuple):
    """The rows of a batch, sorted by expert."""

    order: Tensor  # (S,) int64: row i is choice order[i] % k of token order[i] // k
    rows: Tensor  # (N, k) int64: the row of each choice
    ends: Tensor  # (E,) int32: the rows of expert e end before ends[e]
    tiles: Tensor | None  # for `grouped_kernels`, on a GPU

    def by_row(self, per_choice: Tensor) -> Tensor:
        """Return the values of choices (N, k) in the order of rows (S,)."""
        return per_choice.reshape(-1)[self.order]

    def by_choice(self, per_row: Tensor) -> Tensor:
        """Return the values of rows (S,) per choice (N, k); 0 for experts on other ranks."""
        return torch.where(self.rows < self.ends[-1], per_row[self.rows], 0)

    @property
    def choices(self) -> int:
        """Return the number of experts per token."""
        return self.rows.shape[1]


def sort_by_expert(choices: Tensor, num_experts: int) -> Routing:
    """Return the rows of `choices` (N, k), sorted by expert id from 0 to E - 1.

    Under expert parallelism, transformers marks the choice of another rank's expert by the id E.
    """
    experts, order = torch.sort(choices.reshape(-1).to(torch.int32), stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(num_experts, device=order.device, dtype=torch.int32)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    tiles = None
    if choices.is_cuda:
        tiles = grouped_kernels.tiles_of(ends, len(order))
    return Routing(order, rows.view(choices.shape), ends, tiles)


def sum_choices(values: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum (N, H) of its rows' values (S, H); weights (N, k).

    The sum is in float32 and rounded once.
    """
    if values.is_cuda:
        return kernels.sum_choices_kernel(values, routing.rows, routing.ends, weights)
    if triton_kernels.is_traced:
        return values.new_empty(len(routing.rows), values.shape[1])
    wide = torch.promote_types(values.dtype, torch.float32)
    rows = values[routing.rows].to(wide)  # (N, k, H)
    if weights is not None:
        rows = rows * weights.to(wide).unsqueeze(-1)
    is_here = routing.rows < routing.ends[-1]
    return torch.where(is_here.unsqueeze(-1), rows, 0).sum(1).to(values.dtype)


# Up to this average number of rows per expert, codes are unpacked tile by tile, once for each tile
# of rows. With more rows, a few experts are unpacked at a time: for 128 experts of 512 rows each,
# an H100 needed 1.2 ms instead of 2.5.
FEW_ROWS = 128
UNPACKED_BYTES = 512 << 20  # size of the experts that are unpacked at a time


def unpacks_tiles(rows: int, experts: int) -> bool:
    """Return whether `rows` rows of all experts are few, so that codes are unpacked by tiles."""
    return rows <= FEW_ROWS * experts


class Packed(NamedTuple):
    """Matrices (E, K, M) in 4 bits: lines of features as stored, or the transposed matrices."""

    weight: Tensor
    lines: InLines
    is_transposed: bool

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the unpacked matrices."""
        whole = dequantize(self.weight, dtype)
        return whole.transpose(1, 2) if self.is_transposed != self.lines.is_turned else whole

    def transpose(self, *_: int) -> "Packed":
        """Return the transposed matrices."""
        return self._replace(is_transposed=not self.is_transposed)

    @property
    def shape(self) -> torch.Size:
        """Return (E, K, M)."""
        experts, first, second = self.lines.shape
        return torch.Size((experts, second, first) if self.is_transposed else self.lines.shape)


class ExpertLinear(NamedTuple):
    """One frozen linear of all experts."""

    weight: Tensor  # (E, out, in); (E, in, out) if transposed; or packed in 4 bits
    bias: Tensor | None  # (E, out)
    is_transposed: bool
    experts: int
    scale: float = 0.0  # of the adapter
    is_shared: bool = False  # whether all experts share one adapter

    def matrices(self, dtype: torch.dtype) -> Tensor | Packed:
        """Return the matrices (E, in, out); 4-bit ones stay packed if a kernel can read them.

        Otherwise 4-bit matrices become a new tensor in `dtype`.
        """
        lines = block_lines(self.weight)
        if lines is None:
            found = dequantize(self.weight, dtype)
        else:
            found = Packed(self.weight, lines, lines.is_turned)
        return found if self.is_transposed else found.transpose(1, 2)


class ExpertAdapters(NamedTuple):
    """The LoRA factors of all experts."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, r, out), in the dtype of the matrix multiplications
    scale: float


class Term(NamedTuple):
    """A term added to a matrix product: s u_i F_e."""

    ranks: Tensor  # (S, r): u
    factors: Tensor  # (E, r, M): F
    scale: float


def adapter_of(
    a: Tensor | None, b: Tensor | None, linear: ExpertLinear, dtype: torch.dtype
) -> ExpertAdapters | None:
    """Return the adapter for lora_A (E r, in) and lora_B (out, r E); None if they are None.

    Factors of a shared adapter are (r, in) and (out, r).
    """
    if a is None or b is None:
        return None
    adapters = 1 if linear.is_shared else linear.experts
    rank = len(a) // adapters
    by_adapter = b.view(len(b), rank, adapters).permute(2, 1, 0)
    copied = torch.empty(by_adapter.shape, dtype=dtype, device=b.device).copy_(by_adapter)
    of_experts = (linear.experts, -1, -1)
    return ExpertAdapters(
        a.view(adapters, rank, -1).expand(of_experts), copied.expand(of_experts), linear.scale
    )


def rows_times(
    x: Tensor,
    matrices: Tensor | Packed,
    routing: Routing,
    term: Term | None = None,
    bias: Tensor | None = None,
    of_tokens: bool = False,
) -> Tensor:
    """Return x_i M_e + s u_i F_e + b_e (S, M), for x of rows (S, K) or of tokens (N, K).

    matrices (E, K, M), bias (E, M). The values of rows without an expert are undefined.
    """
    if x.is_cuda:
        return _on_gpu(x, matrices, routing, term, bias, of_tokens)
    if isinstance(x, FakeTensor):
        return _allocated(x, matrices, routing)
    if isinstance(matrices, Packed):
        matrices = matrices.unpacked(x.dtype)
    rows = x[routing.order // routing.choices] if of_tokens else x
    out = rows.new_zeros(len(routing.order), matrices.shape[2])
    for expert, own in _rows_of_experts(routing):
        torch.mm(rows[own], matrices[expert].to(x.dtype), out=out[own])
        if term is not None:
            factors = term.factors[expert].to(x.dtype)
            out[own].addmm_(term.ranks[own], factors, alpha=term.scale)
        if bias is not None:
            out[own] += bias[expert]
    return out


def rows_outer(
    x: Tensor,
    y: Tensor,
    routing: Routing,
    out: Tensor,
    scale: float,
    weights: Tensor | None = None,
    of_tokens: bool = False,
) -> None:
    """Write the sum of s w_i x_i^T y_i over each expert's rows to `out` (E, P, M).

    x (S, P), y of rows (S, M) or of tokens (N, M), weights (S,). The sum is 0 for experts without
    rows.
    """
    if x.is_cuda:
        choices = routing.choices if of_tokens else None
        grouped_kernels.outer(x, y, routing.order, routing.ends, out, scale, choices, weights)
        return
    if isinstance(x, FakeTensor):
        return
    rows = y[routing.order // routing.choices] if of_tokens else y
    if weights is not None:
        x = x * weights.unsqueeze(-1).to(x.dtype)
    out.zero_()
    for expert, own in _rows_of_experts(routing):
        out[expert] = scale * (x[own].t() @ rows[own])


def _on_gpu(
    x: Tensor,
    matrices: Tensor | Packed,
    routing: Routing,
    term: Term | None,
    bias: Tensor | None,
    of_tokens: bool,
) -> Tensor:
    experts, _, features = matrices.shape
    rows = len(routing.order)
    out = x.new_empty(rows, features)
    packing = None
    if not isinstance(matrices, Packed):
        is_turned = matrices.stride(2) != 1
        parts = [(0, matrices.transpose(1, 2) if is_turned else matrices)]
    else:
        is_turned = matrices.is_transposed
        if unpacks_tiles(rows, experts):
            codes, packing = matrices.lines.read(matrices.weight)
            parts = [(0, codes)]
        else:
            parts = _unpacked_parts(matrices)
    place = (routing.order, routing.ends, routing.tiles, out)
    choices = routing.choices if of_tokens else None
    grouped_kernels.grouped_product(x, parts, not is_turned, packing, *place, choices, term, bias)
    return out


def _unpacked_parts(matrices: Packed) -> Iterator[tuple[int, Tensor]]:
    """Yield the unpacked weights of a few experts at a time, and the number of the first."""
    experts, together = matrices.shape[0], _experts_a_part(matrices)
    for first in range(0, experts, together):
        own = slice(first, min(first + together, experts))
        yield first, matrices.lines.unpack(matrices.weight, own)


def _experts_a_part(matrices: Packed) -> int:
    """Return how many experts are unpacked at a time.

    In equal parts they need the least memory, and launches for parts of 16 use one binary.
    """
    parts = math.ceil(2 * matrices.shape.numel() / UNPACKED_BYTES)
    return math.ceil(matrices.shape[0] / parts)


def _allocated(x: Tensor, matrices: Tensor | Packed, routing: Routing) -> Tensor:
    """Return what `rows_times` allocates: its output, and a few unpacked experts before it."""
    if isinstance(matrices, Packed):
        x.new_empty(_experts_a_part(matrices), *matrices.shape[1:])
    return x.new_empty(len(routing.order), matrices.shape[2])


def _rows_of_experts(routing: Routing) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its rows."""
    begin = 0
    for expert, end in enumerate(routing.ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def gradient_of_a(
    du: Tensor,
    x: Tensor,
    adapter: ExpertAdapters,
    like: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    of_tokens: bool = False,
) -> Tensor:
    """Return the gradient of lora_A, (E r, in) or (r, in), from dU = dy B_e^T (S, r) and x.

    x of rows (S, in) or of tokens (N, in); weights (S,) of the rows.
    """
    by_expert = torch.empty(adapter.a.shape, dtype=like.dtype, device=like.device)
    rows_outer(du, x, routing, by_expert, adapter.scale, weights, of_tokens)
    is_shared = len(like) == adapter.a.shape[1]
    return by_expert.sum(0) if is_shared else by_expert.view(like.shape)


def gradient_of_b(
    xa: Tensor,
    dy: Tensor,
    adapter: ExpertAdapters,
    like: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    of_tokens: bool = False,
) -> Tensor:
    """Return the gradient of lora_B, (out, r E) or (out, r), from x A^T (S, r) and dy.

    dy of rows (S, out) or of tokens (N, out); weights (S,) of the rows.
    """
    experts, rank, features = adapter.b.shape
    made = torch.empty(features, rank, experts, dtype=like.dtype, device=like.device)
    by_expert = made.permute(2, 1, 0)
    rows_outer(xa, dy, routing, by_expert, adapter.scale, weights, of_tokens)
    is_shared = like.shape[1] == rank
    return made.sum(2) if is_shared else made.view(like.shape)
