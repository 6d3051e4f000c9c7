"""Rotary position embeddings (RoPE): Liger's kernel on a GPU, the formula elsewhere.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)  over the halves of the first R features

Legend: B rows, T tokens, H query heads, K key heads, D features of a head, R of them rotated.
"""

import torch
from torch import Tensor


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return query (B, T, H, D) and key (B, T, K, D), rotated by cos and sin (B or 1, T, R).

    On a GPU query and key are overwritten: nothing else may read them afterwards.
    """
    if query.is_cuda:
        from liger_kernel.ops import LigerRopeFunction

        # it takes (B, H, T, D), and transposes back to (B, T, H, D) to compute
        rotated_query, rotated_key = LigerRopeFunction.apply(
            query.transpose(1, 2), key.transpose(1, 2), cos, sin
        )
        return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)
    return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)


def rotate_reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states (B, T, H, D), their first R features rotated."""
    width = cos.shape[-1]
    rotated = states[..., :width]
    rest = states[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos.unsqueeze(2) + turned * sin.unsqueeze(2)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
