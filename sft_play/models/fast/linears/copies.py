"""Copies of all adapters in the dtype of products, made once before each forward pass.

Fused linears multiply in 16 bits, and adapters are trained in 32. A kernel that casts the adapters
of one linear is too small to keep a GPU busy: 128 of them take 2 ms of a step of 8B on an H200,
and a few for all adapters do the same work at once. Backward needs the copies anyway.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sft_play.models.architecture import decoder_of
from sft_play.models.fast.linears.lora import LinearGroup
from sft_play.models.fast.linears.products import Adapters
from sft_play.models.fast.setup import base_model_of, is_training
from sft_play.models.sharding import is_divided


def copy_adapters_at_once(model: nn.Module, wrapped: nn.Module) -> None:
    """Copy a model's adapters before each forward pass of its decoder in training.

    Only where they are complete on one device: `wrapped`, what the trainer calls, is the model or
    DDP.
    """
    decoder = decoder_of(base_model_of(model))
    groups = [group for group in groups_of(decoder) if _is_trained_in_float32(group)]
    are_complete = wrapped is model or isinstance(wrapped, DistributedDataParallel)
    if not groups or not are_complete or is_divided(model):
        return
    copies = AdapterCopies(groups)
    if len({adapter.device for adapter in copies.adapters}) == 1:
        decoder.register_forward_pre_hook(copies)


def groups_of(decoder: nn.Module) -> list[LinearGroup]:
    """Return the groups of fused linears, in the order of modules."""
    found = []
    for module in decoder.modules():
        found += [value for value in vars(module).values() if isinstance(value, LinearGroup)]
    return found


def _is_trained_in_float32(group: LinearGroup) -> bool:
    bound = group.bind()
    adapters = [] if bound is None else [each for each in bound.adapters if each is not None]
    return bool(adapters) and all(
        each.requires_grad and each.dtype == torch.float32 for each in adapters
    )


class AdapterCopies:
    """A hook that copies the adapters of groups of linears to `LinearGroup.copies`."""

    def __init__(self, groups: Sequence[LinearGroup]):
        self.groups = list(groups)
        self.adapters: list[Tensor] = []  # of each group all A, then all B
        for group in self.groups:
            bound = group.bind()
            for side in (bound.adapters[0::2], bound.adapters[1::2]):
                self.adapters += [adapter for adapter in side if adapter is not None]
        self.copies: list[Tensor] = []

    def __call__(self, decoder: nn.Module, *_: Any) -> None:
        """Refresh the copies where adapters are multiplied in another dtype than their own."""
        if not is_training(decoder):
            return
        device = self.adapters[0].device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif self.copies:  # products of weights in 16 bits find them without autocast, too
            dtype = self.copies[0].dtype
        else:
            return
        with torch.no_grad():
            if not self.copies or self.copies[0].dtype != dtype:
                self._allocate(dtype)
            torch._foreach_copy_(self.copies, self.adapters)

    def _allocate(self, dtype: torch.dtype) -> None:
        sizes = [adapter.numel() for adapter in self.adapters]
        flat = self.adapters[0].new_empty(sum(sizes), dtype=dtype)
        shapes = [adapter.shape for adapter in self.adapters]
        self.copies = [part.view(of) for part, of in zip(flat.split(sizes), shapes, strict=True)]
        remaining = iter(self.copies)
        for group in self.groups:
            bound = group.bind()
            a = [next(remaining) for each in bound.adapters[0::2] if each is not None]
            b = [None if each is None else next(remaining) for each in bound.adapters[1::2]]
            ranks = sum(map(len, a))  # the A of a group are neighbours in `flat`
            stacked = a[0].as_strided((ranks, a[0].shape[1]), (a[0].shape[1], 1))
            group.copies = Adapters(stacked, tuple(b))
