"""Attention in plain torch: what the kernels of a GPU are held against, and what a CPU runs.

Legend: B rows, T tokens of a row, N tokens of all documents, H query heads, K key and value heads,
D features of a head of queries and keys, V of values.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.models.fast.attention.scoring import Scoring


def attend_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend within rows, without mask and boundaries, as the fastest kernels require."""
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    is_grouped = key.shape[2] != query.shape[2]
    mixed = functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return mixed.transpose(1, 2)


def attend_lengths(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, lengths: list[int]
) -> Tensor:
    """Attend within documents of these lengths.

    query (N, H, D), key (N, K, D), value (N, K, V); the output is (N, H, V).
    """
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    outputs = []
    for q, k, v in parts:
        output = _attend_document(q[None], k[None], v[None], scoring.within(len(q)))
        outputs.append(output[0])
    return torch.cat(outputs)


def _attend_document(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend within one document: query (1, T, H, D), key (1, T, K, D), value (1, T, K, V)."""
    if scoring.is_plain:
        return attend_rows(query, key, value, scoring.scale)
    tokens, heads = query.shape[1:3]
    groups = heads // key.shape[2]
    key = key.repeat_interleave(groups, dim=2)
    value = value.repeat_interleave(groups, dim=2)
    # (1, H, T, T)
    scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    sees = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if scoring.window is not None:
        sees = sees.triu(1 - scoring.window)
    scores = scores.masked_fill(~sees, -torch.inf).float()
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, heads, 1, 1).expand(1, heads, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :tokens].to(value.dtype)
    return torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2)
