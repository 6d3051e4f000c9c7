"""Bidirectional attention within images, e.g. in Gemma.

Attention without a mask is causal. In the model's own mask, the tokens of an image attend to each
other. Only that mask's rows of image tokens are stored, and attention is recomputed for these rows.
The result of text tokens does not change.

Legend: B rows, T tokens per row, I images, Q tokens of the longest image, S tokens that it attends
to, H query heads, K key and value heads, D features per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.models.fast.attention.reference import Scoring
from sft_play.models.fast.documents import UNMASKED, ImageBlock

ALIGNED = 8  # a mask's rows are multiples of this, for torch's memory-efficient kernel
ROWS = "image_rows"  # attribute of an UNMASKED mask with images


@dataclass(frozen=True)
class ImageRows:
    """The tokens that image tokens attend to, as indices in the flattened rows."""

    queries: Tensor  # (I, Q): tokens of each image, the last one repeated
    keys: Tensor  # (I, S): from its document's start to the image's end, the last one repeated
    seen: Tensor  # (I, 1, Q, S) bool
    places: Tensor  # of the tokens of all images
    kept: Tensor  # the index of each of those in the flattened queries


Masks = Tensor | None | dict[str, Tensor | None]


def image_masks(masks: Masks, blocks: Sequence[ImageBlock]) -> Tensor | dict[str, Tensor]:
    """Return UNMASKED with the rows of images, in place of a model's masks (B, 1, T, T) bool.

    There may be several masks, by kind of layer. A mask that is None is causal, and becomes
    UNMASKED.
    """
    if isinstance(masks, dict):
        return {kind: image_masks(mask, blocks) for kind, mask in masks.items()}
    if masks is None:
        return UNMASKED
    mask = torch.empty_like(UNMASKED)
    setattr(mask, ROWS, _rows_of(masks, blocks))
    return mask


def _rows_of(mask: Tensor, blocks: Sequence[ImageBlock]) -> ImageRows:
    tokens = mask.shape[-1]
    queries = _padded([range(start, end) for start, end, _ in blocks])
    keys = _padded([range(document, end) for _, end, document in blocks])
    are_own = [torch.arange(keys.shape[1]) < end - document for _, end, document in blocks]
    lengths = torch.tensor([end - start for start, end, _ in blocks])
    kept = (torch.arange(queries.shape[1]) < lengths[:, None]).flatten().nonzero()[:, 0]
    device = mask.device
    places = queries.flatten()[kept].to(device)
    rows = (queries[:, :1] // tokens)[..., None].to(device)
    queries, keys = queries.to(device), keys.to(device)
    seen = mask[rows, 0, (queries % tokens)[:, :, None], (keys % tokens)[:, None]]
    if seen.dtype != torch.bool:  # an additive mask
        seen = seen == 0
    seen = seen & torch.stack(are_own).to(device)[:, None]
    return ImageRows(queries, keys, seen[:, None], places, kept.to(device))


def _padded(ranges: Sequence[range]) -> Tensor:
    width = -(-max(map(len, ranges)) // ALIGNED) * ALIGNED
    rows = [torch.arange(each.start, each.start + width).clamp(max=each[-1]) for each in ranges]
    return torch.stack(rows)


def with_image_rows(
    mixed: Tensor, inputs: Sequence[Tensor], scoring: Scoring, mask: Tensor
) -> Tensor:
    """Return causal attention (B, T, H, D), with the rows of images as defined by the mask.

    `inputs` are query (B, T, H, D), key (B, T, K, D) and value.

    Raises: ValueError for scores with a cap or sinks. No model with bidirectional images has them.
    """
    rows: ImageRows | None = getattr(mask, ROWS, None)
    if rows is None:
        return mixed
    if scoring.softcap is not None or scoring.sinks is not None:
        raise ValueError("images that are read in both directions have no soft cap and no sinks")
    query, key, value = (tensor.flatten(0, 1) for tensor in inputs)
    # (I, H or K, Q or S, D)
    query, key, value = (
        tensor[places].transpose(1, 2)
        for tensor, places in ((query, rows.queries), (key, rows.keys), (value, rows.keys))
    )
    if query.shape[1] != key.shape[1]:  # no fused kernel accepts both a mask and shared keys
        shared = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    found = functional.scaled_dot_product_attention(
        query, key, value.to(query.dtype), attn_mask=rows.seen, scale=scoring.scale
    )
    found = found.transpose(1, 2).flatten(0, 1)[rows.kept]
    flat = mixed.flatten(0, 1).index_copy(0, rows.places, found.to(mixed.dtype))
    return flat.view_as(mixed)
