"""Attention and rotary positions in plain torch: for CPUs, and the reference for kernels.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)  over the halves of the first R features

Rotary position embeddings (RoPE) use Liger's kernel on a GPU, and the formula elsewhere. In a
trace, attention and RoPE allocate the same as the kernels.

The tokens of an image may attend to each other, e.g. in Gemma, while attention without a mask is
causal. Only the rows of image tokens in the model's mask are stored, and attention is
recomputed for these rows. The result of text tokens does not change.

Legend: B rows, T tokens per row, N tokens in all documents, H query heads, K key and value heads,
D features per head of queries and keys, R of them rotated, V of values, I images, Q tokens of the
longest image, S tokens that it attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from sft_kernels import triton_kernels
from sft_kernels.boundaries import Documents, ImageBlock, TreeRows
from sft_kernels.packed import UNMASKED
from sft_kernels.training_setup import Gradients


@dataclass(frozen=True)
class Scoring:
    """How a token weights the tokens that it attends to.

    softmax(cap(scale * q k^T)) with cap(s) = softcap * tanh(s / softcap). A sink is part of the
    softmax of its head, but has no value.
    """

    scale: float
    window: int | None = None  # tokens that a token attends to, including itself; None for all
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,), a logit for each query head

    @property
    def is_plain(self) -> bool:
        """Whether a token attends to all tokens before it, without cap and sinks."""
        return self.window is None and self.softcap is None and self.sinks is None

    def within(self, tokens: int) -> "Scoring":
        """Return the same for documents of at most `tokens` tokens, without a longer window."""
        if self.window is None or self.window < tokens:
            return self
        return replace(self, window=None)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return attention within rows, without mask and boundaries, for the fastest kernels."""
    is_grouped = key.shape[2] != query.shape[2]
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return mixed.transpose(1, 2)


def attend_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    lengths: list[int],
    tree: TreeRows | None = None,
) -> Tensor:
    """Return attention within documents of these lengths.

    query (N, H, D), key (N, K, D), value (N, K, V); the output is (N, H, V).
    """
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    outputs = []
    begin = 0
    for q, k, v in parts:
        end = begin + len(q)
        of_document = tree and TreeRows(tree.positions[begin:end], tree.ends[begin:end] - begin)
        inputs = q[None], k[None], v[None]
        output = attend_document(*inputs, scoring.within(len(q)), of_document)
        outputs.append(output[0])
        begin = end
    return torch.cat(outputs)


def _seen(tokens: int, scoring: Scoring, tree: TreeRows | None, device: torch.device) -> Tensor:
    """Return the tokens (T, T) that each token of a document attends to."""
    place = torch.arange(tokens, device=device)
    sees = place[:, None] >= place
    if tree is not None:
        sees &= place[:, None] < tree.ends
        place = tree.positions
    if scoring.window is not None:
        sees &= place[:, None] - place < scoring.window
    return sees


def attend_document(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, tree: TreeRows | None = None
) -> Tensor:
    """Return attention in a document: query (1, T, H, D), key (1, T, K, D), value (1, T, K, V)."""
    if scoring.is_plain and tree is None:
        return attend_rows(query, key, value, scoring.scale)
    tokens, heads = query.shape[1:3]
    groups = heads // key.shape[2]
    key = key.repeat_interleave(groups, dim=2)
    value = value.repeat_interleave(groups, dim=2)
    # (1, H, T, T)
    scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    sees = _seen(tokens, scoring, tree, query.device)
    scores = scores.masked_fill(~sees, -torch.inf).float()
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, heads, 1, 1).expand(1, heads, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :tokens].to(value.dtype)
    return torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2)


def apply_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return query (B, T, H, D) and key (B, T, K, D) with their first R = `width` features rotated.

    cos and sin (B or 1, T, R / 2 or more); only R / 2 features are read. On a GPU, query and key
    are overwritten: no other code may read them afterwards.
    """
    if query.is_cuda:
        from liger_kernel.ops import LigerRopeFunction

        # Liger expects (B, H, T, D), and transposes it back to (B, T, H, D)
        rotated_query, rotated_key = LigerRopeFunction.apply(
            query.transpose(1, 2), key.transpose(1, 2), cos, sin, None, 1, width
        )
        return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)
    if triton_kernels.is_traced:
        return AllocatedRotary.apply(query, key, cos, sin)
    tables = cos[..., : width // 2], sin[..., : width // 2]
    return rotate_reference(query, *tables), rotate_reference(key, *tables)


def rotate_reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states (B, T, H, D), rotated by cos and sin (B or 1, T, R / 2)."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = cos.shape[-1]
    first, second, rest = states.split((half, half, states.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class AllocatedRotary(torch.autograd.Function):
    """What Liger's rotary embedding allocates in a trace: nothing. It saves cos and sin."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the queries and keys."""
        ctx.save_for_backward(cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor) -> Gradients:
        """Return the gradients of the outputs unchanged."""
        return query, key, None, None


class AllocatedFlashAttention(torch.autograd.Function):
    """What flash attention over (B, H, T, D), or flattened (N, H, D), allocates in a trace.

    Saves queries, keys, values, its output and one float32 per query. The memory-efficient kernel
    also saves the mask, in additive form and in the dtype of the queries. Backward sums the
    gradient of the queries in float32. Gradients of grouped keys and values are computed per query
    head.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return an output with the dtype and layout of the queries and the features of values."""
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:  # latent attention
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return gradients with the layouts of queries, keys and values."""
        query, key, value, *_ = ctx.saved_tensors
        # alive while the gradients are allocated
        buffers = [
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        ]
        if key.numel() < query.numel():
            buffers += [torch.empty_like(query), torch.empty_like(query)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


ALIGNED = 8  # a mask's rows are multiples of this, for torch's memory-efficient kernel


@dataclass(frozen=True)
class ImageRows:
    """The tokens that image tokens attend to, as indices in the flattened rows."""

    queries: Tensor  # (I, Q): tokens of each image, the last one repeated
    keys: Tensor  # (I, S): from its document's start to the image's end, the last one repeated
    seen: Tensor  # (I, 1, Q, S) bool
    places: Tensor  # of the tokens of all images
    kept: Tensor  # the index of each of those in the flattened queries


Masks = Tensor | None | dict[str, Tensor | None]


def image_masks(masks: Masks, documents: Documents) -> Tensor | dict[str, Tensor]:
    """Return copies of UNMASKED in place of a model's masks (B, 1, T, T) bool.

    The rows of images are stored in `documents`, by copy. There may be several masks, by kind of
    layer. A mask that is None is causal, and becomes UNMASKED.
    """
    if isinstance(masks, dict):
        return {kind: image_masks(mask, documents) for kind, mask in masks.items()}
    if masks is None:
        return UNMASKED
    mask = torch.empty_like(UNMASKED)
    documents.image_rows[mask] = _rows_of(masks, documents.image_blocks)
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
    mixed: Tensor, inputs: Sequence[Tensor], scoring: Scoring, rows: ImageRows
) -> Tensor:
    """Return causal attention (B, T, H, D), with the rows of images as defined by `rows`.

    `inputs` are query (B, T, H, D), key (B, T, K, D) and value.

    Raises: ValueError for scores with a cap or sinks. No model with bidirectional images has them.
    """
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
