"""What stands in place of the mask of a batch that needs none, and tells where documents begin.

For packed or padded rows transformers passes attention a (T, T) mask. The fastest kernels do not
take one, and checking whether a mask is needed synchronizes with the GPU. Neither is necessary: the
collator knows where documents begin, and causal attention never reads padding on the right.
`remove_mask` replaces the mask with what `unmasked` returns.

Legend: T tokens of a row.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.fast.documents import Documents, named_documents
from sft_play.models.fast.setup import is_training

# transformers passes a mask with four dimensions through; no other attention accepts these shapes
UNMASKED = torch.empty((1, 1, 0, 0))
PACKED_SHAPE = (1, 1, 0, 1)  # of the masks of packed batches, which carry their documents


def remove_mask(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a decoder: replace the mask of batches that need none.

    Those are batches with document boundaries, and training batches of unpacked rows, whose padding
    is on the right.
    """
    documents = named_documents(kwargs)
    is_packed = documents is not None
    # a training batch with position ids but without boundaries is packed and needs its mask
    is_plain_step = is_training(module) and kwargs.get("position_ids") is None
    if kwargs.get("past_key_values") is not None or not (is_packed or is_plain_step):
        return None
    mask = unmasked(documents)
    return args, {**kwargs, "attention_mask": mask, "use_cache": False}


def unmasked(documents: Documents | None) -> Tensor:
    """Return what `remove_mask` gives in place of a mask: UNMASKED, or one with documents.

    Layers pass their mask on to their attention, and not all of them pass other arguments on.
    """
    if documents is None:
        return UNMASKED
    mask = torch.empty(PACKED_SHAPE)
    mask.documents = documents
    return mask


def is_unmasked(mask: Tensor | None) -> bool:
    """Return whether a mask is one that `unmasked` returns."""
    return isinstance(mask, Tensor) and mask.shape in (UNMASKED.shape, PACKED_SHAPE)


def documents_of(mask: Tensor, kwargs: dict[str, Any]) -> Documents | None:
    """Return the documents of a batch, from `unmasked` or from transformers' keywords.

    Raises: ValueError if the mask was of a packed batch and has lost them on its way.
    """
    documents = getattr(mask, "documents", None)
    if documents is None:
        documents = named_documents(kwargs)
    if documents is None and mask.shape == PACKED_SHAPE:
        raise ValueError("a layer has copied its mask, which told where documents begin")
    return documents
