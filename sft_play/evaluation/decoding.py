"""Attention of one new token to a cache, without a copy of keys and values for each query head.

transformers repeats keys and values where several query heads share them and a mask is given, as
for prompts of different lengths: at every step they copy the whole cache, once for each query head.
The heads that share keys are as well several queries of one head. Their products are the same.

Legend: B rows, H query heads, K key and value heads, S tokens in the cache, D features of a head.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"


@contextlib.contextmanager
def shared_keys() -> Iterator[None]:
    """Let models with transformers' sdpa attention generate without repeated keys and values."""
    own = ALL_ATTENTION_FUNCTIONS[SDPA]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what transformers' function returns, by another way where heads share keys."""
        # what else transformers' function reads, of all that it is given
        is_plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
        if not (is_plain and can_share(query, key, attention_mask)):
            return own(module, query, key, value, attention_mask, **kwargs)
        return attend_one_token(query, key, value, attention_mask, kwargs.get("scaling")), None

    ALL_ATTENTION_FUNCTIONS[SDPA] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[SDPA] = own


def can_share(query: Tensor, key: Tensor, attention_mask: Tensor | None) -> bool:
    """Return whether several query heads (B, H, 1, D) share keys (B, K, S, D) and a mask."""
    has_one_mask = attention_mask is None or attention_mask.shape[1] == 1
    return query.shape[2] == 1 and query.shape[1] > key.shape[1] and has_one_mask


def attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the output (B, 1, H, D) of query (B, H, 1, D) over key and value (B, K, S, D).

    The mask is (B, 1, 1, S), or None where every token is seen.
    """
    rows, heads = query.shape[:2]
    groups = heads // key.shape[1]
    grouped = query.view(rows, key.shape[1], groups, query.shape[-1])
    if attention_mask is not None:
        attention_mask = attention_mask.expand(-1, -1, groups, -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scale
    )
    return output.reshape(rows, 1, heads, value.shape[-1])
