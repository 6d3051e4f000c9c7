"""Fakes for a trace of functions of torch, transformers and linear layers.

They allocate what the real functions do on a GPU, without computing: outputs, buffers and what is
saved for backward. Other kernels have this next to their reference (`traced_gpu`).

Legend: S rows of experts, E experts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import masking_utils

from sft_play.models.fast.attention.reference import AllocatedFlashAttention
from sft_play.models.fast.setup import Gradients, to_compute_dtype
from sft_play.models.traced_gpu import tracing_gpu
from sft_play.plan.fast import MIN_CAPABILITY

torch_attention = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **settings: Any,
) -> Tensor:
    """Torch's attention on a GPU, in the dtype of autocast.

    Real tensors are attended to: `recognize` asks on numbers what a module computes.
    """
    if not isinstance(query, FakeTensor):
        return torch_attention(query, key, value, attn_mask, *more, **settings)
    cast = [to_compute_dtype(tensor) for tensor in (query, key, value)]
    return AllocatedFlashAttention.apply(*cast, attn_mask)


class FakeGroupedProduct(torch.autograd.Function):
    """`functional.grouped_mm`, which takes no float32 fake tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor, groups: int) -> Tensor:
        """Return (S, out) of x (S, in) and matrices (E, in, out); (E, in, out) of two matrices."""
        ctx.save_for_backward(x, other)
        if other.dim() == 2:
            return x.new_empty(groups, x.shape[0], other.shape[1])
        return x.new_empty(x.shape[0], other.shape[2])

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return the gradients that are needed."""
        gradients: list[Tensor | None] = [None, None, None]
        for index, tensor in enumerate(ctx.saved_tensors):
            if ctx.needs_input_grad[index]:
                gradients[index] = torch.empty_like(tensor)
        return tuple(gradients)


def grouped_mm(x: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """`functional.grouped_mm` of two-dimensional x, which allocates only its output."""
    return FakeGroupedProduct.apply(x, other, len(offs))


_is_autocast_enabled = torch.is_autocast_enabled


def is_autocast_enabled(device_type: str = "cpu") -> bool:
    """`torch.is_autocast_enabled`, whose default device is the GPU; here it is the CPU.

    PEFT calls it without a device, and leaves 16-bit inputs as they are under autocast.
    """
    return _is_autocast_enabled(device_type)


def dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout on a GPU, which keeps a mask of one byte per element; a CPU keeps floats."""
    return torch.native_dropout(tensor, p, True)[0] if p and training else tensor


# Functions that read the values of tensors, which fake tensors do not have, by where they are
VALUE_READERS: dict[Any, dict[str, Any]] = {
    functional: {"grouped_mm": grouped_mm},
    # the step passes its own mask for packed rows
    masking_utils: {"find_packed_sequence_indices": lambda position_ids: None},
}
GPU_KERNELS: dict[Any, dict[str, Any]] = {
    functional: {"scaled_dot_product_attention": scaled_dot_product_attention, "dropout": dropout},
    torch: {"is_autocast_enabled": is_autocast_enabled},
    torch.cuda: {"get_device_capability": lambda device=None: MIN_CAPABILITY},
}


@contextlib.contextmanager
def fake_kernels(is_gpu: bool) -> Iterator[None]:
    """Replace the functions that read values and, for a run on a GPU, those that need one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_gpu(is_gpu))
        for table in (VALUE_READERS, GPU_KERNELS if is_gpu else {}):
            for owner, fakes in table.items():
                stack.enter_context(patch.multiple(owner, **fakes))
        yield
