"""Ranks that share each row's tokens: what each computes, and what they exchange.

DeepSpeed-Ulysses (arXiv:2309.14509): each of the c ranks in a
`ContextGroup` has T / c consecutive tokens of every row. It runs all per-token modules on these
tokens. For attention, the ranks exchange data: each rank receives all tokens of H / c heads. It
computes attention as on a single rank, with the boundaries of full documents, and sends each rank
the outputs of that rank's tokens. If there are fewer key and value heads than ranks, each head is
sent to several ranks, and their gradients are summed. Each exchange is one all-to-all. Its gradient
is the reverse exchange.

A batch is collated in full and then cut: part r of c has tokens r T / c to (r + 1) T / c of every
row. Document boundaries are those of the full rows. Every labeled token belongs to the part of the
token that predicts it, so a document's labels may be on other ranks than its tokens.

Legend: B rows, T tokens per row, H query heads, K key and value heads, D features per head, c
parts.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from sft_kernels.boundaries import Documents
from sft_kernels.loss.tokens import LossTokens
from sft_kernels.process import Process
from sft_play.data.batch import Batch

CUT = ("input_ids", "position_ids")  # (B, T) each


@dataclass(frozen=True)
class RowPart:
    """Part number `rank` of `size` parts of every row."""

    rank: int
    size: int

    def tokens(self, width: int) -> int:
        """Return the tokens of a part of rows of `width` tokens."""
        return -(-width // self.size)

    def cut(self, batch: Batch) -> Batch:
        """Return this part of every row, which is padded to a multiple of the number of parts.

        The padding belongs to the row's last document. Without documents each row is one.
        """
        rows, width = batch.ids.shape
        padding = self.size * self.tokens(width) - width
        inputs = {name: value for name, value in batch.inputs.items() if name != "attention_mask"}
        documents = batch.documents
        if documents is None:
            inputs["position_ids"] = torch.arange(width).expand(rows, width)
            documents = Documents.of_lengths([width] * rows)
        for name in CUT:
            whole = functional.pad(inputs[name], (0, padding))
            inputs[name] = whole.unflatten(1, (self.size, -1))[:, self.rank].contiguous()
        documents = replace(
            documents,
            boundaries=documents.boundaries + padding * (documents.boundaries // width),
            longest=documents.longest + padding,
            given_lengths=None,
        )
        branches = () if self.rank else batch.branches  # counted once
        return Batch(inputs, None, self._predicted(batch.loss, width), branches, documents)

    def _predicted(self, tokens: LossTokens, width: int) -> LossTokens:
        """Return the tokens that this part of rows of `width` tokens predicts."""
        is_here, positions = self.own(tokens.positions, width)
        found = tokens._replace(positions=positions, targets=tokens.targets[is_here])
        if tokens.counts is None:
            return found._replace(total_weight=float(len(positions)))
        counts = torch.stack([each.sum() for each in is_here.split(tokens.counts)])
        weights = torch.ones(len(counts)) if tokens.weights is None else tokens.weights
        total = (weights.double() @ counts.double()).item()
        return found._replace(counts=counts.tolist(), total_weight=total)

    def own(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return which of positions (N,) in rows of `width` tokens are here, and where (own,)."""
        tokens = self.tokens(width)
        rows, columns = positions // width, positions % width - self.rank * tokens
        is_here = (columns >= 0) & (columns < tokens)
        return is_here, (rows * tokens + columns)[is_here]


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows; this rank has the `rank`-th part of each row."""

    rank: int
    size: int
    group: Any  # their process group in torch

    @property
    def part(self) -> RowPart:
        """The part of each row that this rank computes."""
        return RowPart(self.rank, self.size)

    def shared(self, batch: Batch) -> Batch:
        """Return a part of a batch for a pass that the ranks compute together."""
        assert batch.documents is not None, "a cut batch has documents"
        return replace(batch, documents=replace(batch.documents, context=self))

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks; it is not differentiable."""
        distributed.all_reduce(x, group=self.group)
        return x

    def heads(self, x: Tensor) -> Tensor:
        """Return all tokens (B, T, H / c, D) of this rank's heads from its tokens (B, T / c, H, D).

        With fewer than c heads, each head is repeated.
        """
        if x.shape[2] < self.size:
            x = x.repeat_interleave(self.size // x.shape[2], dim=2)
        parts = x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, T / c, H, D) from all (B, T, H / c, D); undoes `heads`."""
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, x: Tensor | None) -> Tensor | None:
        """Return this rank's elements (H / c,) of a tensor with one element per head (H,)."""
        return None if x is None else x.unflatten(0, (self.size, -1))[self.rank]


@cache
def context_group(process: Process, size: int) -> ContextGroup | None:
    """Return this rank's group of `size` consecutive ranks; None if `size` is 1.

    Every rank must call it.
    """
    if size == 1:
        return None
    own = None
    for first in range(0, process.world_size, size):
        members = list(range(first, first + size))
        group = distributed.new_group(members, timeout=process.timeout)
        if process.rank in members:
            own = ContextGroup(process.rank - first, size, group)
    return own


class _Exchange(torch.autograd.Function):
    """Send part r of x (c, ...) to rank r of the group, and receive part r from it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        """Return the parts (c, ...) received from the ranks."""
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of each part, received from the rank that got the part."""
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=group)
    return received
