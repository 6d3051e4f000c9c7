"""Causal attention without a mask: the choice of a kernel on a GPU, and plain torch elsewhere.

    softmax(cap(scale * q k^T)) v;  a token attends to the tokens of its document up to itself

On a GPU:
- full rows: torch's scaled_dot_product_attention
- documents, windows: torch's variable-length flash attention; sinks are added to its softmax
- values and keys of different size: flash attention, padded with zeros
- heads above 256 features: torch's memory-efficient kernel
- soft caps, trees, and windows or sinks of heads above 256 features: flex_attention, compiled

Legend: B rows, T tokens per row, N = B * T, H query heads, K key and value heads, D features per
head of queries and keys, V of values.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from sft_kernels import triton_kernels
from sft_kernels.attention.flex import attend_flex
from sft_kernels.attention.reference import (
    AllocatedFlashAttention,
    Scoring,
    attend_lengths,
    attend_rows,
)
from sft_kernels.boundaries import Documents
from sft_kernels.training_setup import Gradients, to_compute_dtype

LARGEST_FLASH_HEAD = 256  # features per head that flash attention supports, at most
FLASH_HEAD_STEP = 8  # the number of features per head is a multiple of this
MAX_ELEMENTS = 2**31  # of queries per kernel call: some kernels index with 32 bits
VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)  # of the installed torch
CAUSAL = 1  # custom_mask_type of torch's memory-efficient kernel

Kernel = Callable[[Tensor, Tensor, Tensor, Scoring, Documents], Tensor]


def attend(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents | None = None
) -> Tensor:
    """Return attention (B, T, H, V), causal within each document.

    query (B, T, H, D), key (B, T, K, D) and value (B, T, K, V). Without `documents` each row is one
    document.
    """
    if documents is not None and documents.context is not None:
        return _attend_shared(query, key, value, scoring, documents)
    if query.numel() >= MAX_ELEMENTS and key.shape[2] > 1:
        return _attend_by_heads(query, key, value, scoring, documents)
    rows, tokens = query.shape[:2]
    longest = tokens if documents is None else documents.longest
    tree = None if documents is None else documents.tree
    are_whole_rows = documents is None
    if tree is None and documents is not None:
        # each row is one document
        are_whole_rows = len(documents.boundaries) == rows + 1 and longest == tokens
    scoring = scoring.within(longest)
    if are_whole_rows and _are_whole_rows_enough(query, value, scoring):
        return attend_rows(query, key, value, scoring.scale)
    if documents is None:
        starts = torch.arange(
            0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device
        )
        documents = Documents(starts, tokens)
    flat = (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    kernel = _attend_by_document
    if query.is_cuda:
        kernel = attend_flex if tree else _gpu_kernel(query, scoring)
        flat = _in_16_bits(*flat)
    return kernel(*flat, scoring, documents).unflatten(0, (rows, tokens))


def _attend_shared(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention over full rows when each rank has a part of the tokens."""
    context = documents.context
    heads = [context.heads(tensor) for tensor in (query, key, value)]
    scoring = replace(scoring, sinks=context.own_heads(scoring.sinks))
    return context.tokens(attend(*heads, scoring, replace(documents, context=None)))


def _attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents | None
) -> Tensor:
    """Return attention computed with half of the heads, then with the other half."""
    heads = key.shape[2]
    groups = query.shape[2] // heads
    outputs = []
    for first, end in ((0, heads // 2), (heads // 2, heads)):
        of_queries = slice(first * groups, end * groups)
        sinks = None if scoring.sinks is None else scoring.sinks[of_queries]
        parts = (query[:, :, of_queries], key[:, :, first:end], value[:, :, first:end])
        parts = tuple(part.contiguous() for part in parts)
        outputs.append(attend(*parts, replace(scoring, sinks=sinks), documents))
    return torch.cat(outputs, dim=2)


def _are_whole_rows_enough(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return whether scaled_dot_product_attention has a fast kernel for these inputs."""
    if not scoring.is_plain:
        return False
    if not query.is_cuda:
        return True
    features, value_features = query.shape[-1], value.shape[-1]
    return features == value_features <= LARGEST_FLASH_HEAD


def _gpu_kernel(query: Tensor, scoring: Scoring) -> Kernel:
    if scoring.softcap is not None:
        return attend_flex
    if query.shape[-1] > LARGEST_FLASH_HEAD:
        return _attend_efficient if scoring.is_plain else attend_flex
    return _attend_varlen


def _attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention document by document: the reference for the kernels, with their shapes.

    query (N, H, D), key (N, K, D), value (N, K, V); the output is (N, H, V).
    """
    if triton_kernels.is_traced:
        padded = padded_to_one_size(query, key, value)
        return AllocatedFlashAttention.apply(*padded, None)[..., : value.shape[-1]]
    if isinstance(query, FakeTensor):  # in a traced step, each row is one document
        whole, rest = divmod(len(query), documents.longest)
        lengths = [documents.longest] * whole + [rest] * bool(rest)
    else:
        lengths = documents.boundaries.diff().tolist()
    return attend_lengths(query, key, value, scoring, lengths, documents.tree)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention by torch's variable-length flash attention, in 16 bits."""
    features = value.shape[-1]
    query, key, value = padded_to_one_size(query, key, value)
    compute = attend_torch_varlen if scoring.sinks is None else attend_with_sinks
    return compute(query, key, value, scoring, documents)[..., :features]


def attend_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention (N, H, D) by torch's kernel, which has no sinks and no soft caps."""
    window = scoring.window
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in VARLEN_OPTIONS:  # without this option, torch groups query heads itself
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    if "scale" in VARLEN_OPTIONS:
        options["scale"] = scoring.scale
    else:  # the kernel's scale is always 1 / sqrt(D)
        query = query * (scoring.scale * query.shape[-1] ** 0.5)
    return varlen_attn(query, key, value, *_lengths(documents), **options)


def padded_to_one_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, with features padded with zeros to one size that flash attention supports.

    Zeros do not change scores. Padded values only add zeros to the output.
    """
    widest = max(query.shape[-1], value.shape[-1])
    features = -(-widest // FLASH_HEAD_STEP) * FLASH_HEAD_STEP
    padded = []
    for tensor in (query, key, value):
        missing = features - tensor.shape[-1]
        padded.append(functional.pad(tensor, (0, missing)) if missing else tensor)
    return padded[0], padded[1], padded[2]


def _attend_efficient(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention by torch's memory-efficient kernel, which supports heads of any size."""
    groups = query.shape[1] // key.shape[1]
    out, *_ = torch.ops.aten._efficient_attention_forward(
        query[None],
        key.repeat_interleave(groups, dim=1)[None],
        value.repeat_interleave(groups, dim=1)[None],
        None,  # bias
        *_lengths(documents),
        0.0,  # dropout
        CAUSAL,
        True,  # compute_log_sumexp
        scale=scoring.scale,
    )
    return out[0]


def _in_16_bits(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs in autocast's dtype; autocast does not cast for these kernels.

    Norms of queries and keys with float32 weights return float32, and so does DoRA.
    """
    assert query.numel() < MAX_ELEMENTS, (
        f"{query.shape[0]} packed tokens of {query.shape[1:].numel()} features; "
        "train smaller batches or shorter rows"
    )
    return to_compute_dtype(query), to_compute_dtype(key), to_compute_dtype(value)


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention with sinks (N, H, D), on a GPU and in 16 bits.

    query (N, H, D), key and value (N, K, D); D is a multiple of 8 and at most 256.
    """
    return SinkAttention.apply(query, key, value, scoring.sinks, scoring, documents)


class SinkAttention(torch.autograd.Function):
    """Flash attention, with the sinks' share added after forward and before backward.

    A sink is one logit per head that is part of the softmax but has no value:

        p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink)),  o_i = sum_j p_ij v_j

    Flash attention does not support sinks, and does not have to. It returns the output o and, per
    query, the log of the sum of exponentials lse. With sinks they are
        lse' = log(exp(lse) + exp(sink)),  o' = o exp(lse - lse').
    Its backward pass computes p from lse, and delta_i = do_i o_i from the output. Given lse' and o'
    instead, it returns the gradients of queries, keys and values with sinks,
        ds_ij = p'_ij (do_i v_j - delta'_i),
    and the sink gets dsink = -sum_i exp(sink - lse'_i) delta'_i.
    """

    @staticmethod
    def forward(
        ctx,
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
    def backward(ctx, grad: Tensor) -> Gradients:
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
        scoring.window is None,  # is_causal: with a window, its right end makes it causal
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
    """Return the boundaries and the longest document, each for queries and for keys."""
    starts, longest = documents.boundaries, documents.longest
    return starts, starts, longest, longest


def _options(scoring: Scoring) -> dict[str, float | int]:
    left = -1 if scoring.window is None else scoring.window - 1
    return {"scale": scoring.scale, "window_size_left": left, "window_size_right": 0}
