"""Our attention under the modules of transformers, which keep projections, norms and positions.

Attention modules of transformers look up the function that mixes values by the name in their config
(AttentionInterface). Ours are registered there as `sft_play_over_<own>`. Given what `unmasked`
returns, they call `attend`; given any other mask, as in evaluation and generation, they call the
function that the model had before. The mask function of `own` is registered by the same name, so
that masks are made as before.

Legend: B rows, T tokens of a row, H query heads, K key and value heads, D features of a head.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from sft_play.models.architecture import decoder_of
from sft_play.models.fast.attention.kernels import attend
from sft_play.models.fast.attention.masks import documents_of, is_unmasked
from sft_play.models.fast.attention.reference import Scoring

logger = logging.getLogger(__name__)

PREFIX = "sft_play_over_"
IMPLEMENTATIONS = ("sdpa", "eager")  # that ours may replace
# Tensors that change what attention computes, by transformers' keywords; not a complete list
FOREIGN = ("position_bias", "indices", "block_indices", "head_mask", "encoder_hidden_states")


def implementations(decoder: nn.Module) -> list[tuple[PretrainedConfig, str | None]]:
    """Return the configs that the modules of a decoder read, and the attention that each names."""
    configs = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return [(config, config._attn_implementation) for config in configs.values()]


def use_interface(decoder: nn.Module) -> None:
    """Let the attention modules of a decoder call ours where they get UNMASKED.

    Raises: ValueError if they have an attention that ours does not replace.
    """
    for config, own in implementations(decoder):
        if own is None or own.startswith(PREFIX):
            continue
        if own not in IMPLEMENTATIONS:
            raise ValueError(f"the model's attention is {own}")
        config._attn_implementation = _registered(own)


def keep_soft_caps(model: PreTrainedModel) -> None:
    """Let a model whose scores have a soft cap compute it: transformers' sdpa leaves it out.

    Its own eager function does then, in training and evaluation, wherever no fused kernel does.
    """
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is None or config._attn_implementation != "sdpa":
        return
    use_interface(decoder_of(model))
    logger.info(
        "attention: sdpa of transformers leaves out the model's soft cap of %g; the model's own "
        "eager attention computes it where no fused kernel does",
        cap,
    )


@functools.cache
def _registered(own: str) -> str:
    """Register our attention over one of transformers'; return its name."""
    name = PREFIX + own
    function = functools.partial(attention_interface_forward, own=own)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def attention_interface_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    own: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (B, T, H, V) of attention, and weights if the model's own returns them.

    query (B, H, T, D), key (B, K, T, D) and value (B, K, T, V), as transformers passes them.
    """
    if not is_unmasked(attention_mask):
        function = _own_function(module, own, kwargs)
        if function is not ALL_ATTENTION_FUNCTIONS.get("sdpa"):
            attention_mask = _additive(attention_mask, query, key)
        return function(module, query, key, value, attention_mask, **kwargs)
    _check(module, query, key, kwargs)
    scale = kwargs.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scoring = Scoring(
        scale=scale,
        window=kwargs.get("sliding_window") or None,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    tokens_first = []
    for tensor in (query, key, value):
        tokens_first.append(tensor.transpose(1, 2))
    return attend(*tokens_first, scoring, documents_of(attention_mask, kwargs)), None


def _own_function(module: nn.Module, own: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the model's own attention function.

    transformers' sdpa leaves out soft caps without a word: there it is the eager one.
    """
    if own == "eager" or kwargs.get("softcap") is not None:
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[own]


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask of sdpa, (B, 1, T, keys) bool or none where causal, as eager attention adds it.

    Additive masks are returned as they are.
    """
    if mask is None:
        tokens, keys = query.shape[2], key.shape[2]
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(keys - tokens)[None, None]
    if mask.dtype != torch.bool:
        return mask
    added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return added.masked_fill(~mask, torch.finfo(query.dtype).min)


def _check(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if attention is asked for something that `attend` does not compute."""
    name = type(module).__name__
    if kwargs.get("dropout"):
        raise ValueError(f"{name} has a dropout of {kwargs['dropout']}")
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal or query.shape[2] != key.shape[2]:
        raise ValueError(f"{name} is not causal attention of a sequence to itself")
    for keyword in FOREIGN:
        if kwargs.get(keyword) is not None:
            raise ValueError(f"{name} has {keyword}")
