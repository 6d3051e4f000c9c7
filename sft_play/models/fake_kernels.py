"""What the kernels of a GPU allocate and keep, without computing: for a trace where there is neither a GPU nor data.

Each has the outputs, the tensors saved for backward and the buffers of the kernel that it stands for, and no number in them.

Legend: B rows, T tokens, H query heads, K key and value heads, D features of a head, N tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn
from torch.nn import functional
from transformers import masking_utils

from sft_play.models.fast import attention, gated, install, lora, loss, mlp, norms, residual
from sft_play.models.fast.norms import is_training


class FlashAttention(torch.autograd.Function):
    """Flash attention over (B, H, T, D), or flattened (N, H, D): keeps queries, keys, values, its output and a float32 a query.

    A mask is an additive one in the type of the queries, which the memory-efficient kernel keeps with them. Backward sums the
    gradient of the queries in float32, and those of grouped keys and values by query head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return an output of the shape, type and layout of the queries."""
        out = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the layout of what they belong to."""
        query, key, value, *_ = ctx.saved_tensors
        sums = [
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        ]
        if key.numel() < query.numel():
            sums += [torch.empty_like(query), torch.empty_like(query)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Torch's attention on a GPU, in the type that autocast says."""
    return FlashAttention.apply(
        *(lora.in_compute_type(tensor) for tensor in (query, key, value)), attn_mask
    )


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Torch's kernel for documents of any lengths: (N, H, D) of queries (N, H, D), keys and values (N, K, D)."""
    return FlashAttention.apply(query, key, value, None)


class RmsNorm(torch.autograd.Function):
    """Liger's RMS norm: keeps its input and a float32 a token; backward may write over the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        """Return an output like x."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and, where it is trained, of the weight."""
        x, weight, _ = ctx.saved_tensors
        return (
            grad if ctx.in_place else torch.empty_like(x),
            torch.empty_like(weight) if ctx.needs_input_grad[1] else None,
            None,
        )


def norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """`norms.norm_forward` over the norm here."""
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    return RmsNorm.apply(hidden_states, self.weight, self.norm_kind.in_place)


class Rotation(torch.autograd.Function):
    """Liger's rotary embedding: writes over queries and keys, and over their gradients; keeps cosines and sines."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that it was given."""
        ctx.save_for_backward(cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that it was given."""
        return query, key, None, None


class JoinedNorm:
    """`residual_kernels`: a sum and its norm in one pass."""

    @staticmethod
    def forward(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and s like x, and a float32 a token."""
        return (
            torch.empty_like(x),
            x if residual is None else torch.empty_like(x),
            x.new_empty(x.shape[:-1], dtype=torch.float32),
        )

    @staticmethod
    def backward(dy: Tensor, ds: Tensor, s: Tensor, *_: Any) -> Tensor:
        """Return dx like s."""
        return torch.empty_like(s)


def gated_forward(gate: Tensor, *_: Any) -> Tensor:
    """`gated_kernels.forward`: its output alone."""
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def gated_backward(*_: Any, **__: Any) -> None:
    """`gated_kernels.backward`, which writes into what it is given."""


def nll_to_gradient_(logits: Tensor, *_: Any) -> Tensor:
    """`loss_kernel.nll_to_gradient_`: a float32 a token beside the logits."""
    return logits.new_empty(len(logits), dtype=torch.float32).sum()


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`lora.dense`, which knows 4-bit weights by a class that tensors without data cannot have."""
    state = getattr(weight, "quant_state", None)
    return (
        weight.to(dtype) if state is None else dequantize_4bit(weight.view(-1, 1), state).to(dtype)
    )


_is_autocast_enabled = torch.is_autocast_enabled


def is_autocast_enabled(device_type: str = "cpu") -> bool:
    """`torch.is_autocast_enabled`, which asks for a GPU's where it is not told: PEFT keeps 16-bit inputs as they are under it."""
    return _is_autocast_enabled(device_type)


Replacement = tuple[Any, str, Callable[..., Any]]
# Where there is no data: nothing can be looked up in it.
WITHOUT_DATA: tuple[Replacement, ...] = (
    (lora, "dense", dense),
    (
        loss,
        "_logits_are_the_heads",
        lambda model, head: True,
    ),  # as tests show for every model of plan.fast
    (attention, "_by_document", attend_by_document),
    (
        masking_utils,
        "find_packed_sequence_indices",
        lambda position_ids: None,
    ),  # a mask for packed rows is given
)
OF_A_GPU: tuple[Replacement, ...] = (
    (functional, "scaled_dot_product_attention", scaled_dot_product_attention),
    (torch, "is_autocast_enabled", is_autocast_enabled),
    (attention, "rotate", Rotation.apply),
    (gated, "gated_forward", gated_forward),
    (gated, "gated_backward", gated_backward),
    (mlp, "gated_forward", gated_forward),
    (mlp, "gated_backward", gated_backward),
    (norms, "norm_forward", norm_forward),
    (residual, "_kernels", lambda x: JoinedNorm),
    (loss, "nll_to_gradient_", nll_to_gradient_),
    (torch.cuda, "get_device_capability", lambda device=None: install.FIRST_CAPABILITY),
)


@contextlib.contextmanager
def fake_kernels(is_gpu: bool) -> Iterator[None]:
    """Let the functions here stand in for kernels: those that read data and, for a GPU's run, those that only a GPU has."""
    replacements = (*WITHOUT_DATA, *(OF_A_GPU if is_gpu else ()))
    before = [getattr(module, name) for module, name, _ in replacements]
    try:
        for module, name, function in replacements:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(replacements, before, strict=True):
            setattr(module, name, function)
