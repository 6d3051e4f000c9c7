"""Attention with torch's flex_attention, for scores that no other kernel computes.

A token attends to a contiguous range: from the start of its document or window up to itself. A
block of queries therefore needs a range of key blocks. The range is computed from the boundaries,
without a mask of all pairs: 4 MiB of indices at 131,072 tokens.

flex_attention is compiled on a GPU. Elsewhere it stores all scores, and has no backward pass.

Legend: N tokens, Q blocks of BLOCK tokens, H query heads, K key and value heads, D features per
head of queries and keys, V of values.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from sft_play.data.documents import Documents
from sft_play.data.packing import padded_width
from sft_play.models.fast.attention.reference import Scoring

BLOCK = 128  # tokens
SHAPES = 64  # recompile limit of torch: there are few widths, kinds of layers and modes

# boundaries: (tokens, window): mask. All layers of a step share them.
_MASKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention (N, H, V) of query (N, H, D), key (N, K, D) and value (N, K, V)."""
    cap = scoring.softcap

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    tokens = len(query)
    # with fewer tokens than a block, torch would use its decoding kernel, which has no blocks
    width = max(BLOCK, padded_width(tokens))
    heads_first = []
    for tensor in (query, key, value):
        if tokens < width:
            tensor = functional.pad(tensor, (0, 0, 0, 0, 0, width - tokens))
        heads_first.append(tensor.transpose(0, 1)[None])
    has_sinks = scoring.sinks is not None
    options: dict[str, Any] = {
        "score_mod": None if cap is None else capped,
        "block_mask": _block_mask(documents, width, scoring.window),
        "scale": scoring.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if has_sinks:
        options["return_aux"] = AuxRequest(lse=True)
    kernel = _compiled() if query.is_cuda else flex_attention
    found = kernel(*heads_first, **options)
    if has_sinks:
        out, aux = found
        found = _with_sinks(out, aux.lse, scoring.sinks)
    return found[0].transpose(0, 1)[:tokens]


def _with_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return out (1, H, N, V) scaled for sinks (H,), with log_sums (1, H, N)."""
    share_of_tokens = torch.sigmoid(log_sums - sinks.to(log_sums.dtype)[:, None])
    return out * share_of_tokens[..., None].to(out.dtype)


@cache
def _compiled() -> Any:
    # beyond the limit torch runs flex_attention uncompiled, with all scores in memory
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(documents: Documents, tokens: int, window: int | None) -> BlockMask:
    masks = _MASKS.setdefault(documents.boundaries, {})
    if (tokens, window) not in masks:
        masks[tokens, window] = make_block_mask(documents.boundaries, tokens, window)
    return masks[tokens, window]


def make_block_mask(boundaries: Tensor, tokens: int, window: int | None) -> BlockMask:
    """Return the mask of causal attention within documents, and within a window of tokens.

    boundaries (documents + 1,) begin at 0; tokens after the last one form a separate document.
    """
    device = boundaries.device
    position = torch.arange(tokens, device=device)
    document = torch.searchsorted(boundaries, position, right=True) - 1
    first = boundaries[document]  # (N,): the first token that each token attends to
    if window is not None:
        first = torch.maximum(first, position - window + 1)
    first = first.int()

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    # `first` never decreases: a block's first query has the earliest first key, its last the latest
    begins = torch.arange(0, tokens, BLOCK, device=device)
    last = (begins + BLOCK - 1).clamp(max=tokens - 1)
    own = begins // BLOCK  # (Q,), the key block with the same tokens as the query block
    earliest = first[begins] // BLOCK
    # from here up to its own block, every query of the block attends to every key
    full_from = torch.minimum((first[last] + BLOCK - 1) // BLOCK, own)
    full = own - full_from
    partial = full_from - earliest + 1  # its own block, and those before the full ones
    counted = own[None, :]  # (1, Q)
    partial_at = torch.where(
        counted < (partial - 1)[:, None], earliest[:, None] + counted, own[:, None]
    )
    full_at = torch.where(counted < full[:, None], full_from[:, None] + counted, own[:, None])
    return BlockMask.from_kv_blocks(
        _of_all_heads(partial),
        _of_all_heads(partial_at),
        _of_all_heads(full),
        _of_all_heads(full_at),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _of_all_heads(blocks: Tensor) -> Tensor:
    """Return blocks as int32, with dimensions for batch and heads."""
    return blocks.int()[None, None].contiguous()
