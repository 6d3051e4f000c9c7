"""Attention with torch's flex_attention, for scores that no other kernel computes.

Token i attends to token j if j <= i < end of j: the end of its document, or in a tree that of the
samples that have it. A block of queries needs the blocks of keys with an end behind its first
token. This is computed without a mask of all pairs of tokens: 4 MiB of indices at 131,072 tokens.

flex_attention is compiled on a GPU. Elsewhere it stores all scores, and has no backward pass.

Legend: N tokens, Q blocks of BLOCK tokens, H query heads, K key and value heads, D features per
head of queries and keys, V of values.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import config
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from sft_kernels.attention.reference import Scoring
from sft_kernels.boundaries import Documents

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
    width = kernel_width(tokens)
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


def kernel_width(tokens: int) -> int:
    """Return the tokens that the kernel computes: the compiler takes seconds for each number.

    There are four widths between consecutive powers of two; the padding costs little, as its tokens
    attend only to themselves.

    >>> [kernel_width(tokens) for tokens in (1, 1000, 1025, 15000)]
    [128, 1024, 1280, 16384]
    """
    step = max(BLOCK, 1 << tokens.bit_length() >> 3)
    return -(-tokens // step) * step


def _with_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return out (1, H, N, V) scaled for sinks (H,), with log_sums (1, H, N)."""
    share_of_tokens = torch.sigmoid(log_sums - sinks.to(log_sums.dtype)[:, None])
    return out * share_of_tokens[..., None].to(out.dtype)


@cache
def _compiled() -> Any:
    # beyond the limit torch runs flex_attention uncompiled, with all scores in memory
    config.recompile_limit = max(SHAPES, config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(documents: Documents, tokens: int, window: int | None) -> BlockMask:
    masks = _MASKS.setdefault(documents.boundaries, {})
    if (tokens, window) not in masks:
        masks[tokens, window] = make_block_mask(documents, tokens, window)
    return masks[tokens, window]


def make_block_mask(documents: Documents, tokens: int, window: int | None) -> BlockMask:
    """Return the mask of causal attention within documents, and within a window of tokens.

    Each token after the last document attends only to itself; `tokens` is a multiple of BLOCK.
    """
    place = torch.arange(tokens, device=documents.boundaries.device, dtype=torch.int32)
    boundaries = functional.pad(documents.boundaries, (0, 1))
    ends = boundaries[torch.searchsorted(boundaries[:-1], place, right=True)]
    positions = place  # only their differences in a document are read
    if documents.tree is not None:
        missing = (0, tokens - len(documents.tree.ends))
        ends, positions = (
            functional.pad(facts, missing)
            for facts in (documents.tree.ends, documents.tree.positions)
        )
    ends = torch.maximum(ends, place + 1)  # of padding, which has none yet
    reach = tokens if window is None else window

    def follows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    def is_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return positions[query] - positions[key] < reach

    blocks = place.view(-1, BLOCK)
    first, last = blocks[:, :1], blocks[:, -1:]  # of a block of queries
    earliest, latest = positions.view(-1, BLOCK).aminmax(dim=1)
    first_end, last_end = ends.view(-1, BLOCK).aminmax(dim=1)  # of a block of keys
    is_before = first > first.T
    is_seen = is_before & (last_end > first) & (earliest[:, None] - latest < reach)
    is_full = is_before & (first_end > last) & (latest[:, None] - earliest < reach)
    is_partial = (is_seen & ~is_full) | (first == first.T)
    return BlockMask.from_kv_blocks(
        *_of_all_heads(is_partial),
        *_of_all_heads(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=follows if window is None else and_masks(follows, is_near),
        seq_lengths=(tokens, tokens),
    )


def _of_all_heads(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has (1, 1, Q), and their indices (1, 1, Q, Q)."""
    ordered = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1, dtype=torch.int32)[None, None], ordered[None, None].contiguous()
