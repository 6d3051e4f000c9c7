"""Causal attention without a mask, of rows of one document and of packed ones, and the attention modules that call it.

transformers hands attention a mask of (T, T) where rows are packed or padded, which keeps fast kernels away, and finds out on
the way whether it has to, which waits for the GPU. Neither is needed: the collator knows where documents begin, and padding on
the right is seen by no token before it. `route` puts UNMASKED in the place of the mask; attention modules that find it do as
written here, and as their class does without it: in evaluation, in generation, with a cache.

Legend: B rows, T tokens of a row, N documents, H query heads, K key and value heads, D features of a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from sft_play.models.fast.lora import lora_linears
from sft_play.models.fast.norms import is_training, rotate

UNMASKED = torch.empty(
    (1, 1, 0, 0)
)  # transformers passes a mask of four dimensions on as it is; no other attention can take this one
LARGEST_HEAD = 256  # features of a head that flash attention takes
MOST_ELEMENTS = 2**31  # of a packed batch's queries: its kernels count with 32 bits


def route(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a decoder: take the mask from batches that need none.

    Those are batches that name the boundaries of their documents, and batches that train, whose padding is on the right.
    """
    is_packed = kwargs.get("cu_seq_lens_q") is not None
    is_plain_step = (
        is_training(module) and kwargs.get("position_ids") is None
    )  # restarting ones pack without boundaries
    if kwargs.get("past_key_values") is not None or not (is_packed or is_plain_step):
        return None
    return args, {**kwargs, "attention_mask": UNMASKED, "use_cache": False}


def is_unmasked(mask: torch.Tensor | None) -> bool:
    """Return whether a mask is the one that `route` puts in."""
    return isinstance(mask, torch.Tensor) and mask.shape == UNMASKED.shape


def attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward method of an attention module with rotary embeddings: (B, T, H * D) behind o_proj, and no attention weights."""
    if not is_unmasked(attention_mask):
        inputs = {
            "position_embeddings": position_embeddings,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
        }
        return type(self).forward(self, hidden_states, **inputs, **kwargs)
    query, key, value = (
        part.unflatten(-1, (-1, self.head_dim)) for part in _projected(self, hidden_states)
    )  # (B, T, H or K, D)
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = rotate(query, key, *position_embeddings)
    boundaries, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q", 0)
    mixed = attend(query, key, value, self.scaling, _window(self), boundaries, longest)
    return _linears(self, mixed.flatten(-2), (self.o_proj,))[0], None


def projections(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linears of an attention module that read its input: of queries, keys and values, or (Phi 3) one of all three."""
    return (
        (module.qkv_proj,)
        if hasattr(module, "qkv_proj")
        else (module.q_proj, module.k_proj, module.v_proj)
    )


def _projected(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries (B, T, H * D), keys and values (B, T, K * D)."""
    outputs = _linears(module, hidden, projections(module))
    if len(outputs) == 3:
        return outputs
    keys = module.num_key_value_heads * module.head_dim
    return outputs[0].split((outputs[0].shape[-1] - 2 * keys, keys, keys), dim=-1)


def _linears(
    module: nn.Module, x: torch.Tensor, linears: tuple[nn.Module, ...]
) -> tuple[torch.Tensor, ...]:
    return (
        lora_linears(x, linears) if is_training(module) else tuple(linear(x) for linear in linears)
    )


def _window(module: nn.Module) -> int | None:
    """Tokens that a token sees, itself included; None is all before it. Modules without the attribute have it in their config."""
    return (
        module.sliding_window
        if hasattr(module, "sliding_window")
        else getattr(module.config, "sliding_window", None)
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    boundaries: torch.Tensor | None = None,
    longest: int = 0,
) -> torch.Tensor:
    """Return softmax(scale * query key^T) value, (B, T, H, D), where each token sees its document up to itself.

    query (B, T, H, D), key and value (B, T, K, D). `boundaries` (N + 1,) int32 are the first tokens of all documents of the
    flattened rows, and `longest` is the tokens of the longest; without them, each row is a document. `window`: a token sees
    itself and the `window` - 1 before it.
    """
    rows, tokens = query.shape[:2]
    is_whole = boundaries is None or (
        len(boundaries) == rows + 1 and longest == tokens
    )  # no document spans rows
    if is_whole:
        boundaries, longest = None, tokens
    if window is not None and window >= longest:
        window = None
    if is_whole and window is None:
        return _rows(query, key, value, scale)
    if boundaries is None:
        boundaries = torch.arange(
            0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device
        )
    kernel = _varlen if query.is_cuda else _by_document
    flat = kernel(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        scale,
        window,
        boundaries,
        longest,
    )
    return flat.unflatten(0, (rows, tokens))


def _rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each row a document: no mask and no boundaries, which is what the fastest kernels ask for."""
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    is_grouped = key.shape[2] != query.shape[2]
    return functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=is_grouped
    ).transpose(1, 2)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    boundaries: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Torch's kernel for documents of any lengths: query (B * T, H, D), key and value (B * T, K, D), 16 bits wide."""
    assert query.numel() < MOST_ELEMENTS, (
        f"{query.shape[0]} packed tokens of {query.shape[1:].numel()} features; set a smaller TRAIN_BATCH_SIZE"
    )
    known = _varlen_options()
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in known:  # without the word, fewer keys than queries are grouped all the same
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    if "scale" in known:
        options["scale"] = scale
    else:
        query = query * (scale * query.shape[-1] ** 0.5)  # its own is 1 / sqrt(D)
    return varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)


@cache
def _varlen_options() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    boundaries: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """The same where torch has no such kernel, as on a CPU: document after document. Shapes as in `_varlen`."""
    lengths = boundaries.diff().tolist()
    documents = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat(
        [_document(*(part[None] for part in document), scale, window)[0] for document in documents]
    )


def _document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    tokens = query.shape[1]
    if window is None or window >= tokens:
        return _rows(query, key, value, scale)
    near = (
        torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    )  # (T, T), itself and window - 1 before
    groups = query.shape[2] // key.shape[2]
    heads_first = (
        query.transpose(1, 2),
        *(tensor.transpose(1, 2).repeat_interleave(groups, dim=1) for tensor in (key, value)),
    )
    return functional.scaled_dot_product_attention(
        *heads_first, attn_mask=near, scale=scale
    ).transpose(1, 2)
