"""Attention of rows that several ranks share (DeepSpeed-Ulysses, arXiv:2309.14509).

Each of the c ranks of a group has T / c tokens of every row, one part after another, and computes
on them whatever concerns a token alone. In attention they exchange: each rank gets all tokens of
H / c heads, attends as if it were alone, with the boundaries of whole documents, and gives back to
each rank the outputs of its tokens. If there are fewer heads of keys and values than ranks, each
is given to several ranks, and their gradients are added.

Each exchange is one all-to-all; its gradient is the exchange back.

Legend: B rows, T tokens of a row, H query heads, K key and value heads, D features of a head.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed

from sft_play.data.collate import RowPart
from sft_play.process import Process


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows; this one has the `rank`-th part of each."""

    rank: int
    size: int
    group: Any  # torch's process group of them

    @property
    def part(self) -> RowPart:
        """What this rank computes of each row."""
        return RowPart(self.rank, self.size)

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor without gradient over the ranks."""
        distributed.all_reduce(x, group=self.group)
        return x

    def heads(self, x: Tensor) -> Tensor:
        """Return all tokens (B, T, H / c, D) of this rank's heads, of its tokens (B, T / c, H, D).

        Of fewer than c heads each is repeated.
        """
        if x.shape[2] < self.size:
            x = x.repeat_interleave(self.size // x.shape[2], dim=2)
        parts = x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """Return the way back: this rank's tokens (B, T / c, H, D) of all (B, T, H / c, D)."""
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, x: Tensor | None) -> Tensor | None:
        """Return the elements (H / c,) of this rank's heads, of one for each head (H,)."""
        return None if x is None else x.unflatten(0, (self.size, -1))[self.rank]


@cache
def context_group(process: Process, size: int) -> ContextGroup | None:
    """Return the group of this rank among groups of consecutive ranks, None for groups of one.

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
    """Part r of x (c, ...) goes to rank r of the group, and part r of the result comes from it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        """Return the parts that the ranks have sent (c, ...)."""
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of each part from the rank that got it."""
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=group)
    return received
