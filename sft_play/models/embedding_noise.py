"""NEFTune: add uniform noise to the embeddings in training (Jain et al., arXiv 2310.05914).

    noise ~ Uniform(-1, 1) * alpha / sqrt(L * H)

L is the number of tokens of the row itself. transformers uses the width of the batch, so a row's
noise would depend on the other rows of the batch. For packed rows it would be several times
smaller.

Legend: B sequences, T tokens, H hidden features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_kernels.training_setup import base_model_of


class EmbeddingNoise:
    """Forward hooks that add the noise while the model is in training mode."""

    def __init__(self, alpha: float):
        self.alpha = alpha
        self._lengths: Tensor | None = None  # (B, T): the number of tokens in each token's row

    def attach(self, model: PreTrainedModel) -> None:
        """Add noise in the forward passes of `model`, which already has its adapters."""
        model.register_forward_pre_hook(self.note_lengths, with_kwargs=True)
        base_model_of(model).get_input_embeddings().register_forward_hook(self.add_noise)

    def note_lengths(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the row lengths of this batch."""
        self._lengths = row_lengths(**kwargs) if model.training else None

    def add_noise(self, module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        """Return embedded (B, T, H) with noise."""
        if self._lengths is None or not module.training:
            return embedded
        scale = self.alpha / (self._lengths * embedded.shape[-1]).sqrt()  # (B, T) float32
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * scale[..., None].to(embedded.dtype)


def row_lengths(
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return for each token (B, T) the number of tokens in its row, without padding; float32.

    The documents of a packed sequence start where position_ids are 0. No value is read from the
    device, because that would wait for it.
    """
    if position_ids is not None:
        document = position_ids.eq(0).flatten().cumsum(0)  # (B * T,), from 1
        counts = torch.zeros(document.numel() + 1, device=document.device)
        counts.scatter_add_(0, document, torch.ones_like(document, dtype=counts.dtype))
        return counts[document].view_as(position_ids)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    return attention_mask.sum(1, keepdim=True).float().clamp(min=1).expand_as(input_ids)
