"""Run a per-token function over a long row tile by tile (TiledMLP of ALST, arXiv:2506.13996).

The memory of an MLP grows with its intermediate features, and is the largest part of a recomputed
layer. Here the forward pass saves only the input. The backward pass recomputes one tile, computes
its gradients, and frees it. The gradients of weights are summed over tiles.

Nothing is computed more often than with checkpointing. A separate function saves the input: if the
MLP is the end of a layer, recomputing that layer stops there, before the MLP.

Legend: N tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sft_kernels.partitioned import is_partitioned

TILE_TOKENS = 16_384  # enough to keep a GPU busy; rows of at least two tiles are cut
Function = Callable[[Tensor], Tensor]


def in_tiles(function: Function, x: Tensor, module: nn.Module) -> Tensor:
    """Return function(x) (..., out) of x (..., in), which requires a gradient.

    The function belongs to the module, is deterministic, and computes each token separately.
    """
    held = _Hold.apply(x)
    trained = [each for each in module.parameters() if each.requires_grad]
    return _Tiles.apply(held, held.grad_fn, function, module, *trained)


def without_gradients(function: Function, x: Tensor) -> Tensor:
    """Return function(x) (..., out) of x (..., in), tile by tile."""
    tokens = x.flatten(0, -2)  # (N, in)
    output = None
    for first in range(0, len(tokens), TILE_TOKENS):
        part = function(tokens[first : first + TILE_TOKENS])
        if output is None:
            output = part.new_empty(len(tokens), part.shape[-1])
        output[first : first + TILE_TOKENS] = part
    return output.unflatten(0, x.shape[:-1])


def set_tiled(layer: nn.Module, is_on: bool) -> None:
    """Enable or disable tiles for long rows in the MLPs of a recomputed layer.

    Tiles stay disabled with dropout, which would differ, and if ZeRO-3 shards the weights.
    """
    for module in layer.modules():
        if "is_tiled" in vars(module):
            dropouts = [each.p for each in module.modules() if isinstance(each, nn.Dropout)]
            is_divided = any(map(is_partitioned, module.parameters()))
            module.is_tiled = is_on and not any(dropouts) and not is_divided


class _Hold(torch.autograd.Function):
    """x, saved for the backward pass of functions that read it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _Tiles(torch.autograd.Function):
    """function(x), recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx, x: Tensor, holder: Any, function: Function, module: nn.Module, *weights: Tensor
    ) -> Tensor:
        """Return the output (..., out)."""
        device = x.device.type
        is_on = torch.is_autocast_enabled(device)
        ctx.autocast = {"enabled": is_on, "dtype": torch.get_autocast_dtype(device)}
        ctx.holder, ctx.function, ctx.module = holder, function, module
        return without_gradients(function, x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weights."""
        (x,) = ctx.holder.saved_tensors
        weights = [each for each in ctx.module.parameters() if each.requires_grad]
        tokens, grads = x.flatten(0, -2), dy.flatten(0, -2)
        dx = torch.empty_like(tokens)
        sums: list[Tensor] = []
        for first in range(0, len(tokens), TILE_TOKENS):
            part = slice(first, first + TILE_TOKENS)
            tile = tokens[part].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(x.device.type, **ctx.autocast):
                output = ctx.function(tile)
            dx[part], *found = torch.autograd.grad(output, [tile, *weights], grads[part])
            if sums:
                torch._foreach_add_(sums, found)
            sums = sums or found
        return dx.view_as(x), None, None, None, *sums
