"""Attention with sinks: one logit of each head that takes part in the softmax without a value.

    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink)),  o_i = sum_j p_ij v_j

Flash attention knows no sinks, and needs none. It returns the output o and, of each query, the log
of the sum of exponentials lse. With sinks they are
    lse' = log(exp(lse) + exp(sink)),  o' = o exp(lse - lse').
Its backward pass computes p from lse, and delta_i = do_i o_i from the output. Given lse' and o' in
their place, it returns the gradients of queries, keys and values with sinks,
    ds_ij = p'_ij (do_i v_j - delta'_i),
and the sink gets dsink = -sum_i exp(sink - lse'_i) delta'_i.

Legend: N tokens of all documents, H query heads, K key and value heads, D features of a head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft_play.models.fast.attention.reference import Scoring
from sft_play.models.fast.documents import Documents


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention with sinks (N, H, D), on a GPU and in 16 bits.

    query (N, H, D), key and value (N, K, D); D is a multiple of 8 and at most 256.
    """
    without_sinks = replace(scoring, sinks=None)
    return SinkAttention.apply(query, key, value, scoring.sinks, without_sinks, documents)


class SinkAttention(torch.autograd.Function):
    """Flash attention, with the sinks' share added after forward and before backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        scoring: Scoring,
        documents: Documents,
    ) -> Tensor:
        """Return the output (N, H, D)."""
        out, log_sums, random_state = flash_forward(query, key, value, scoring, documents)
        with_sinks = torch.logaddexp(log_sums, sinks.float()[:, None])  # (H, N)
        out.mul_((log_sums - with_sinks).exp_().t()[:, :, None])
        ctx.save_for_backward(query, key, value, sinks, out, with_sinks, random_state)
        ctx.scoring = scoring
        ctx.documents = documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks."""
        query, key, value, sinks, *results = ctx.saved_tensors
        out, log_sums, _ = results
        grad = grad.contiguous()
        gradients = flash_backward(grad, (query, key, value), results, ctx.scoring, ctx.documents)
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            delta = (grad.float() * out.float()).sum(-1)  # (N, H)
            share = (sinks.float()[:, None] - log_sums).exp()  # (H, N)
            grad_sinks = -(share.t() * delta).sum(0).to(sinks.dtype)
        return *gradients, grad_sinks, None, None


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """Return flash attention's output (N, H, D), log sums (H, N) float32 and random state."""
    out, log_sums, random_state, _, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *_lengths(documents),
        0.0,  # dropout
        scoring.window is None,  # is_causal: a window says it with its right end
        False,  # return_debug_mask
        **_options(scoring),
    )
    return out, log_sums, random_state


def flash_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: list[Tensor],
    scoring: Scoring,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, the `inputs` of `flash_forward`.

    `results` are what it returned.
    """
    out, log_sums, random_state = results
    return torch.ops.aten._flash_attention_backward(
        grad,
        *inputs,
        out,
        log_sums,
        *_lengths(documents),
        0.0,  # dropout
        scoring.window is None,
        random_state,
        torch.empty(0, device=grad.device),  # unused
        **_options(scoring),
    )


def _lengths(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """Return the boundaries of queries and of keys, and the longest of both."""
    starts, longest = documents
    return starts, starts, longest, longest


def _options(scoring: Scoring) -> dict[str, float | int]:
    left = -1 if scoring.window is None else scoring.window - 1
    return {"scale": scoring.scale, "window_size_left": left, "window_size_right": 0}
