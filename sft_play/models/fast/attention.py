"""Attention modules without a mask, of whole rows and of packed documents (variable length).

For packed or padded rows transformers passes attention a (T, T) mask. The fastest kernels do not
take one, and checking whether a mask is needed synchronizes with the GPU. Neither is necessary: the
collator knows where documents begin, and causal attention never reads padding on the right.
`remove_mask` replaces the mask with what `unmasked` returns. Attention modules that get that run
`attention_forward`; otherwise, as in evaluation, in generation and with a cache, they run the code
of their class.

Legend: B rows, T tokens of a row, N documents, H query heads, K key and value heads, D features of
a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.fast.attention_kernels import attend
from sft_play.models.fast.attention_scoring import Documents, Scoring
from sft_play.models.fast.lora import lora_linears
from sft_play.models.fast.norms import is_training
from sft_play.models.fast.rope import apply_rotary

# transformers passes a mask with four dimensions through; no other attention accepts these shapes
UNMASKED = torch.empty((1, 1, 0, 0))
PACKED_SHAPE = (1, 1, 0, 1)  # of the masks of packed batches, which carry their documents


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
    mask = unmasked(_named_documents(kwargs))
    return args, {**kwargs, "attention_mask": mask, "use_cache": False}


def unmasked(documents: Documents | None) -> Tensor:
    """Return what `remove_mask` gives in place of a mask: UNMASKED, or one with documents.

    Layers pass their mask on to their attention, and not all of them pass other arguments on.
    """
    if documents is None:
        return UNMASKED
    mask = torch.empty(PACKED_SHAPE)
    mask.documents = documents
    return mask


def is_unmasked(mask: Tensor | None) -> bool:
    """Return whether a mask is one that `unmasked` returns."""
    return isinstance(mask, Tensor) and mask.shape in (UNMASKED.shape, PACKED_SHAPE)


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
    if self.has_rotary:  # set where this method is installed: some layers know no positions
        query, key = apply_rotary(query, key, *position_embeddings)
    scoring = Scoring(self.scaling, _window(self))
    mixed = attend(query, key, value, scoring, documents_of(attention_mask, kwargs))
    (output,) = _run_linears(self, mixed.flatten(-2), (self.o_proj,))
    return output, None


def documents_of(mask: Tensor, kwargs: dict[str, Any]) -> Documents | None:
    """Return the documents of a batch, from `unmasked` or from transformers' keywords.

    Raises: ValueError if the mask was of a packed batch and has lost them on its way.
    """
    documents = getattr(mask, "documents", None)
    if documents is None:
        documents = _named_documents(kwargs)
    if documents is None and mask.shape == PACKED_SHAPE:
        raise ValueError("a layer has copied its mask, which told where documents begin")
    return documents


def _named_documents(kwargs: dict[str, Any]) -> Documents | None:
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is None:
        return None
    return Documents(boundaries, kwargs["max_length_q"])


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
    if not _reads_window(type(module)):
        return None  # a class that gives windows to some layers, and not to this one
    return getattr(module.config, "sliding_window", None)


@cache
def _reads_window(module_class: type[nn.Module]) -> bool:
    """Return whether the code of a class names a window."""
    code = inspect.unwrap(module_class.forward).__code__
    return "sliding_window" in code.co_consts + code.co_names
