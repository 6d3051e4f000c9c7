"""Copies of all adapters in the dtype of products, made once before each forward pass.

Fused linears multiply in 16 bits, and adapters are trained in 32. A kernel that casts the adapters
of one linear is too small to keep a GPU busy: 128 of them take 2 ms of a step of 8B on an H200,
and a few for all adapters do the same work at once. Backward needs the copies anyway.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sft_play.models.architecture import decoder_of
from sft_play.models.fast.recognise import is_linear
from sft_play.models.fast.setup import base_model_of, is_training
from sft_play.models.sharding import is_divided

NAME = "product_copy"  # of the attribute of a parameter


def copy_adapters_at_once(model: nn.Module, wrapped: nn.Module) -> None:
    """Copy a model's adapters before each forward pass of its decoder in training.

    Only where they are complete on one device: `wrapped`, what the trainer calls, is the model or
    DDP.
    """
    decoder = decoder_of(base_model_of(model))
    found = float32_adapters(decoder)
    are_whole = wrapped is model or isinstance(wrapped, DistributedDataParallel)
    if not found or not are_whole or is_divided(model):
        return
    if {parameter.device for parameter in found} == {found[0].device}:
        decoder.register_forward_pre_hook(AdapterCopies(found))


def float32_adapters(decoder: nn.Module) -> list[Tensor]:
    """Return the trained adapters of linears: all A in the order of modules, then all B.

    The A of linears that read the same input then lie side by side, as one matrix.
    """
    layers = [each for each in decoder.modules() if isinstance(each, LoraLayer) and is_linear(each)]
    found = []
    for sides in ("lora_A", "lora_B"):
        for layer in layers:
            found += [linear.weight for linear in getattr(layer, sides).values()]
    return [each for each in found if each.requires_grad and each.dtype == torch.float32]


class AdapterCopies:
    """A hook that copies adapters; `copy_of` finds the copies."""

    def __init__(self, adapters: Sequence[Tensor]):
        self.adapters = list(adapters)
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
        whole = self.adapters[0].new_empty(sum(sizes), dtype=dtype)
        self.copies = []
        for adapter, part in zip(self.adapters, whole.split(sizes), strict=True):
            copy = part.view(adapter.shape)
            setattr(adapter, NAME, copy)
            self.copies.append(copy)


def copy_of(adapter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the copy of an adapter in `dtype`, None where none was made."""
    copy = getattr(adapter, NAME, None)
    return copy if copy is not None and copy.dtype == dtype else None


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices (r_i, in) as one (R, in): without a copy where they lie side by side."""
    first = matrices[0]
    end = first.data_ptr()
    for matrix in matrices:
        if matrix.data_ptr() != end or not matrix.is_contiguous():
            return torch.cat(list(matrices))
        end += matrix.numel() * matrix.element_size()
    ranks = sum(len(matrix) for matrix in matrices)
    return first.as_strided((ranks, first.shape[1]), (first.shape[1], 1))
