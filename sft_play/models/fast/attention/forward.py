"""Forward method of attention modules like Llama's, for batches without a mask.

Modules that get what `masks.unmasked` returns run `attention_forward`; otherwise, as in evaluation,
in generation and with a cache, they run the code of their class.

Legend: B rows, T tokens of a row, H query heads, K key and value heads, D features of
a head.
"""

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn

from sft_play.models.fast.attention.kernels import attend
from sft_play.models.fast.attention.masks import documents_of, is_unmasked
from sft_play.models.fast.attention.reference import Scoring
from sft_play.models.fast.attention.rope import apply_rotary
from sft_play.models.fast.linears.lora import LinearGroup
from sft_play.models.fast.recognise import AttentionKind
from sft_play.models.fast.setup import is_training


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
    query, key, value = _project(self, hidden_states)
    kind: AttentionKind = self.attention_kind  # set where this method is installed
    has_norms = hasattr(self, "q_norm")
    if has_norms and kind.norms_all_heads:
        query, key = self.q_norm(query), self.k_norm(key)
    # (B, T, H or K, D)
    query, key, value = [each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value)]
    if has_norms and not kind.norms_all_heads:
        query, key = self.q_norm(query), self.k_norm(key)
    if kind.rotates:
        query, key = apply_rotary(query, key, *position_embeddings)
    scoring = Scoring(self.scaling, _window(self))
    mixed = attend(query, key, value, scoring, documents_of(attention_mask, kwargs))
    (output,) = _run_linears(self, mixed.flatten(-2), self.output_linear)
    return output, None


def projections(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linears of queries, keys and values, or in Phi 3 the one that computes all."""
    if hasattr(module, "qkv_proj"):
        return (module.qkv_proj,)
    return (module.q_proj, module.k_proj, module.v_proj)


def _project(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return queries (B, T, H * D), keys and values (B, T, K * D)."""
    outputs = _run_linears(module, hidden, module.input_linears)
    if len(outputs) == 3:
        return outputs
    keys = module.num_key_value_heads * module.head_dim
    queries = outputs[0].shape[-1] - 2 * keys
    return outputs[0].split((queries, keys, keys), dim=-1)


def _run_linears(module: nn.Module, x: Tensor, linears: LinearGroup) -> tuple[Tensor, ...]:
    outputs = linears.fused(x) if is_training(module) else None
    return tuple(linear(x) for linear in linears.modules) if outputs is None else outputs


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
