"""Modules of the last layer that compute the tokens that the loss reads, and few others.

Behind its keys and values a layer mixes no tokens. So what the last one computes after its
attention is of use only where the loss reads a hidden state, and prompts and padding have no label.
The tokens that are computed are labelled ones and, up to the next eighth of the micro-batch,
others, so that shapes are few. The rest gets zeros, which nobody reads, and a gradient of zero,
which it has anyway. `last_layer` finds the modules.

Legend: B rows, T tokens of a row, F features, N labelled tokens, C computed tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_play.models.fast.linears.room import empty_with_room, flat_rows, leave_room, take_room
from sft_play.models.fast.setup import base_model_of, is_training
from sft_play.models.float8.handover import take

NAME = "labelled_tokens"
PARTS = 8  # of a micro-batch: computed are so many of them as hold the labelled tokens


class LabelledTokens:
    """The labelled tokens of the micro-batch that a model computes, for its last layer."""

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.positions: Tensor | None = None  # (N,), None where all tokens are computed
        self._computed: Tensor | None = None  # (C,), once it is known

    @contextlib.contextmanager
    def known(self, positions: Tensor) -> Iterator[None]:
        """Compute no more than `positions` (N,) need in the one forward pass inside this context.

        A layer that is recomputed in the backward pass, outside of it, computes all tokens.
        """
        is_recomputed = getattr(self.layer, "gradient_checkpointing", False)
        self.positions = None if is_recomputed else positions
        self._computed = None
        try:
            yield
        finally:
            self.positions = self._computed = None

    @contextlib.contextmanager
    def computing(self, tokens: Tensor | None) -> Iterator[None]:
        """Compute `tokens` (C,) inside this context, None for all."""
        before = (self.positions, self._computed)
        self.positions, self._computed = None, tokens
        try:
            yield
        finally:
            self.positions, self._computed = before

    def computed_of(self, x: Tensor) -> Tensor | None:
        """Return the tokens (C,) of x (B, T, F) that are computed, None for all."""
        if self._computed is None and self.positions is not None:
            self._computed = computed_tokens(self.positions, x.shape[:-1].numel())
        return None if self._computed is None else self._computed.to(x.device)


def labelled_tokens_of(model: nn.Module) -> LabelledTokens | None:
    """Return what a model's last layer is told, None where it computes all tokens."""
    found: LabelledTokens | None = vars(base_model_of(model)).get(NAME)
    return found


def known_to_last_layer(
    model: nn.Module, positions: Tensor
) -> contextlib.AbstractContextManager[None]:
    """Tell the last layer of a model the labelled tokens (N,), where it computes those alone."""
    found = labelled_tokens_of(model)
    return contextlib.nullcontext() if found is None else found.known(positions)


def computed_count(labelled: int, tokens: int) -> int:
    """Return how many of a micro-batch's tokens are computed.

    >>> [computed_count(labelled, 8192) for labelled in (0, 1638, 7168, 7169)]
    [1024, 2048, 7168, 8192]
    """
    part = -(-tokens // PARTS)
    return min(tokens, max(1, -(-labelled // part)) * part)


def computed_tokens(positions: Tensor, tokens: int) -> Tensor | None:
    """Return the tokens (C,) int64 to compute, `positions` (N,) and others; None for all."""
    count = computed_count(len(positions), tokens)
    if count == tokens:
        return None
    is_labelled = positions.new_zeros(tokens, dtype=torch.uint8).index_fill_(0, positions, 1)
    return is_labelled.argsort(descending=True, stable=True)[:count]


def on_labelled(module: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `function` of x (B, T, F), a row for each token; zeros for tokens not computed.

    A module that is not of the last layer computes all tokens, and so does one in evaluation.
    """
    labelled: LabelledTokens | None = vars(module).get(NAME)
    tokens = labelled.computed_of(x) if labelled is not None and is_training(module) else None
    if tokens is None:
        return function(x)
    take(x)  # in float8, of all tokens
    room = take_room(x)
    chosen = _Chosen.apply(x, tokens, room)
    leave_room(chosen, room)
    return _Spread.apply(function(chosen), tokens, x.shape[:-1])


class _Chosen(torch.autograd.Function):
    """Rows (1, C, F) of x (B, T, F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, room: int) -> Tensor:
        """Return the rows of `tokens` (C,), with room beside them."""
        ctx.save_for_backward(tokens)
        ctx.shape = x.shape
        return _rows(x, tokens, room)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, zero for the rows that were not chosen."""
        (tokens,) = ctx.saved_tensors
        return _spread(dy, tokens, ctx.shape[:-1]), None, None


class _Spread(torch.autograd.Function):
    """Rows (1, C, F) at their places among (B, T, F), the others zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, places: torch.Size) -> Tensor:
        """Return (B, T, F)."""
        ctx.save_for_backward(tokens)
        return _spread(y, tokens, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of y, with the room that was beside that of all rows."""
        (tokens,) = ctx.saved_tensors
        room = take_room(dy)
        gradient = _rows(dy, tokens, room)
        leave_room(gradient, room)
        return gradient, None, None


def _rows(x: Tensor, tokens: Tensor, room: int) -> Tensor:
    rows = empty_with_room((1, len(tokens), x.shape[-1]), room, x)
    torch.index_select(flat_rows(x), 0, tokens, out=rows[0])
    return rows


def _spread(y: Tensor, tokens: Tensor, places: torch.Size) -> Tensor:
    whole = y.new_zeros(
        *places, y.shape[-1]
    )  # returned itself: a view may not be added to in place
    whole.view(-1, y.shape[-1]).index_copy_(0, tokens, flat_rows(y))
    return whole
