"""Causal attention without a mask, of whole rows and of packed documents (variable length).

    softmax(scale * q k^T) v,  where a token attends to its own document up to itself

For packed or padded rows transformers passes attention a (T, T) mask. The fastest kernels do not
take one, and checking whether a mask is needed synchronizes with the GPU. Neither is necessary: the
collator knows where documents begin, and causal attention never reads padding on the right.
`remove_mask` replaces the mask with UNMASKED. Attention modules that get UNMASKED run
`attention_forward`; otherwise, as in evaluation, in generation and with a cache, they run the code
of their class.

Legend: B rows, T tokens of a row, N documents, H query heads, K key and value heads, D features of
a head.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from sft_play.models.fast.lora import lora_linears
from sft_play.models.fast.norms import is_training
from sft_play.models.fast.rope import apply_rotary

# transformers passes a mask with four dimensions through; no other attention accepts this shape
UNMASKED = torch.empty((1, 1, 0, 0))
LARGEST_HEAD = 256  # features of a head that flash attention takes
MAX_ELEMENTS = 2**31  # of a packed batch's queries: the kernels index with 32 bits


class Documents(NamedTuple):
    """Where the documents of a batch's flattened rows begin."""

    boundaries: Tensor  # (N + 1,) int32, the cu_seq_lens of flash attention
    longest: int  # tokens of the longest document


def remove_mask(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a decoder: replace the mask of batches that need none.

    Those are batches with document boundaries, and training batches of unpacked rows, whose padding
    is on the right.
    """
    is_packed = kwargs.get("cu_seq_lens_q") is not None
    # a training batch with position ids but without boundaries is packed and needs its mask
    is_plain_step = is_training(module) and kwargs.get("position_ids") is None
    if kwargs.get("past_key_values") is not None or not (is_packed or is_plain_step):
        return None
    return args, {**kwargs, "attention_mask": UNMASKED, "use_cache": False}


def is_unmasked(mask: Tensor | None) -> bool:
    """Return whether a mask is the UNMASKED of `remove_mask`."""
    return isinstance(mask, Tensor) and mask.shape == UNMASKED.shape


def attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward method of an attention module with rotary embeddings.

    Returns the output (B, T, H * D) of o_proj, and no attention weights.
    """
    if not is_unmasked(attention_mask):
        return type(self).forward(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
    projected = _project(self, hidden_states)
    heads = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in projected)
    query, key, value = heads  # (B, T, H or K, D)
    if hasattr(self, "q_norm"):
        query = self.q_norm(query)
        key = self.k_norm(key)
    query, key = apply_rotary(query, key, *position_embeddings)
    documents = None
    if kwargs.get("cu_seq_lens_q") is not None:
        documents = Documents(kwargs["cu_seq_lens_q"], kwargs.get("max_length_q", 0))
    mixed = attend(query, key, value, self.scaling, _window(self), documents)
    (output,) = _run_linears(self, mixed.flatten(-2), (self.o_proj,))
    return output, None


def projections(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linears of queries, keys and values, or in Phi 3 the one that computes all."""
    if hasattr(module, "qkv_proj"):
        return (module.qkv_proj,)
    return (module.q_proj, module.k_proj, module.v_proj)


def _project(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return queries (B, T, H * D), keys and values (B, T, K * D)."""
    outputs = _run_linears(module, hidden, projections(module))
    if len(outputs) == 3:
        return outputs
    keys = module.num_key_value_heads * module.head_dim
    queries = outputs[0].shape[-1] - 2 * keys
    return outputs[0].split((queries, keys, keys), dim=-1)


def _run_linears(
    module: nn.Module, x: Tensor, linears: tuple[nn.Module, ...]
) -> tuple[Tensor, ...]:
    if is_training(module):
        return lora_linears(x, linears)
    return tuple(linear(x) for linear in linears)


def _window(module: nn.Module) -> int | None:
    """Return how many tokens a token attends to, itself included; None for all before it."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return getattr(module.config, "sliding_window", None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Return softmax(scale * query key^T) value, (B, T, H, D), causal within each document.

    query (B, T, H, D), key and value (B, T, K, D). Without `documents` each row is one document.
    With a `window` a token attends to itself and the `window` - 1 tokens before it.
    """
    rows, tokens = query.shape[:2]
    if documents is not None:
        boundaries, longest = documents
        if len(boundaries) == rows + 1 and longest == tokens:
            documents = None  # each row is one document
    longest = tokens if documents is None else documents.longest
    if window is not None and window >= longest:
        window = None
    if documents is None and window is None:
        return _attend_rows(query, key, value, scale)
    if documents is None:
        starts = torch.arange(
            0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device
        )
        documents = Documents(starts, tokens)
    kernel = _attend_varlen if query.is_cuda else _attend_by_document
    flat = kernel(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), scale, window, documents
    )
    return flat.unflatten(0, (rows, tokens))


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend within rows, without mask and boundaries, as the fastest kernels require."""
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    is_grouped = key.shape[2] != query.shape[2]
    mixed = functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return mixed.transpose(1, 2)


def _attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    documents: Documents,
) -> Tensor:
    """Attend document by document: the reference for `_attend_varlen`, with the same shapes."""
    lengths = documents.boundaries.diff().tolist()
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    outputs = []
    for q, k, v in parts:
        output = _attend_document(q[None], k[None], v[None], scale, window)
        outputs.append(output[0])
    return torch.cat(outputs)


def _attend_document(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend within one document: query (1, T, H, D), key and value (1, T, K, D)."""
    tokens = query.shape[1]
    if window is None or window >= tokens:
        return _attend_rows(query, key, value, scale)
    # (T, T): a token itself and the window - 1 tokens before it
    is_near = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
    is_near = is_near.tril().triu(1 - window)
    groups = query.shape[2] // key.shape[2]
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2).repeat_interleave(groups, dim=1),
        value.transpose(1, 2).repeat_interleave(groups, dim=1),
        attn_mask=is_near,
        scale=scale,
    )
    return mixed.transpose(1, 2)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    documents: Documents,
) -> Tensor:
    """Attend with torch's variable-length kernel, in 16 bits.

    query (B * T, H, D), key and value (B * T, K, D).
    """
    assert query.numel() < MAX_ELEMENTS, (
        f"{query.shape[0]} packed tokens of {query.shape[1:].numel()} features; "
        "set a smaller TRAIN_BATCH_SIZE"
    )
    if torch.is_autocast_enabled(query.device.type):
        # autocast knows torch's other attention and not this one; norms of queries and keys with
        # float32 weights return float32, and so does DoRA
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    known = _varlen_parameters()
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in known:  # a torch without the option groups query heads by itself
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    if "scale" in known:
        options["scale"] = scale
    else:
        query = query * (scale * query.shape[-1] ** 0.5)  # the kernel's own scale is 1 / sqrt(D)
    starts, longest = documents
    return varlen_attn(query, key, value, starts, starts, longest, longest, **options)


@cache
def _varlen_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)
