"""Attention for batches without a mask, and SFT-Play's attention in modules of transformers.

Modules that get `packed.UNMASKED` attend without a mask. Otherwise (in generation, with a cache,
and in evaluation without documents) they run the original implementation. Modules like Llama's get
`attention_forward` as their forward method.

Other modules keep their projections, norms and positions. They look up their attention function by
the name in their config (AttentionInterface). SFT-Play's functions are registered there as
`sft_play_over_<own>`. With any mask but UNMASKED, these call the model's previous function. The
mask function of `own` is registered by the same name, so that masks are created as before.

Legend: B rows, T tokens per row, H query heads, K key and value heads, D features per head.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from sft_kernels.attention.kernels import attend
from sft_kernels.attention.reference import Scoring, apply_rotary, image_masks, with_image_rows
from sft_kernels.linears.lora import LinearGroup
from sft_kernels.modules import decoder_of
from sft_kernels.packed import UNMASKED, PackedDocuments, is_unmasked
from sft_kernels.recognize import AttentionKind
from sft_kernels.training_setup import is_training

logger = logging.getLogger(__name__)


def attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
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
            **kwargs,
        )
    outputs = _run_linears(self, hidden_states, self.input_linears)
    if len(outputs) == 1:  # one projection for all three
        keys = self.num_key_value_heads * self.head_dim
        outputs = outputs[0].split((outputs[0].shape[-1] - 2 * keys, keys, keys), dim=-1)
    query, key, value = outputs
    kind: AttentionKind = self.attention_kind  # set when this method is installed
    has_norms = hasattr(self, "q_norm")
    if has_norms and kind.norms_all_heads:
        query, key = self.q_norm(query), self.k_norm(key)
    # (B, T, H or K, D)
    query, key, value = [each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value)]
    if has_norms and not kind.norms_all_heads:
        query, key = self.q_norm(query), self.k_norm(key)
    if kind.rotates:
        cos, sin = position_embeddings
        width = (1 + kind.has_half_tables) * cos.shape[-1]
        query, key = apply_rotary(query, key, cos, sin, width)
    scoring = Scoring(self.scaling, _window(self), sinks=getattr(self, "sinks", None))
    mixed = _attend_batch(self, query, key, value, scoring, attention_mask)
    (output,) = _run_linears(self, mixed.flatten(-2), self.output_linear)
    return output, None


def _attend_batch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, mask: Tensor
) -> Tensor:
    """Return attention (B, T, H, V) in the documents of the batch.

    query (B, T, H, D), key (B, T, K, D) and value (B, T, K, V). `mask` is UNMASKED, or its copy for
    a batch with images.
    """
    documents = module.packed_documents.on(query.device)  # set when attention is installed
    mixed = attend(query, key, value, scoring, documents)
    if documents is not None and mask in documents.image_rows:
        rows = documents.image_rows[mask]
        mixed = with_image_rows(mixed, (query, key, value), scoring, rows)
    return mixed


def _run_linears(module: nn.Module, x: Tensor, linears: LinearGroup) -> tuple[Tensor, ...]:
    outputs = linears.fused(x) if is_training(module) else None
    return tuple(linear(x) for linear in linears.modules) if outputs is None else outputs


def _window(module: nn.Module) -> int | None:
    """Return how many tokens a token attends to, including itself; None for all before it."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    if not _reads_window(type(module)):
        return None  # other layers of this class have windows, but this one does not
    return getattr(module.config, "sliding_window", None)


@cache
def _reads_window(module_class: type[nn.Module]) -> bool:
    """Return whether the forward method of a class reads a window."""
    code = inspect.unwrap(module_class.forward).__code__
    return "sliding_window" in code.co_consts + code.co_names


PREFIX = "sft_play_over_"
IMPLEMENTATIONS = ("sdpa", "eager")  # those that SFT-Play may replace
# Tensors that change what attention computes, by transformers' keywords; not a complete list
FOREIGN = ("position_bias", "indices", "block_indices", "head_mask", "encoder_hidden_states")


def implementations(decoder: nn.Module) -> list[tuple[PretrainedConfig, str | None]]:
    """Return the configs that a decoder's modules read, and the attention that each names."""
    configs = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return [(config, config._attn_implementation) for config in configs.values()]


def use_interface(decoder: nn.Module) -> None:
    """Make a decoder's attention modules call SFT-Play's attention if they get UNMASKED.

    Raises: ValueError if they use an attention that cannot be replaced.
    """
    for config, own in implementations(decoder):
        if own is None or own.startswith(PREFIX):
            continue
        if own not in IMPLEMENTATIONS:
            raise ValueError(f"the model's attention is {own}")
        config._attn_implementation = _registered(own)


def keep_soft_caps(model: PreTrainedModel) -> None:
    """Make a model apply the soft cap of its scores, which transformers' sdpa ignores.

    The model's eager function then computes it, in training and evaluation, if no fused kernel
    does.
    """
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is None or config._attn_implementation != "sdpa":
        return
    use_interface(decoder_of(model))
    logger.info(
        "attention: sdpa of transformers leaves out the model's soft cap of %g; the model's own "
        "eager attention computes it if no fused kernel does",
        cap,
    )


def remove_mask(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a decoder: replace the mask of batches that need none.

    These are batches with document boundaries, and training batches of unpacked rows, whose padding
    is on the right.
    """
    is_packed = kwargs.get("cu_seq_lens_q") is not None
    watched: PackedDocuments | None = vars(module).get("packed_documents")
    given = kwargs.get("attention_mask")
    is_made = isinstance(given, dict) or (isinstance(given, Tensor) and given.dim() == 4)
    sees_ahead = is_made and watched is not None and watched.has_images
    if sees_ahead and not (is_packed and watched.batch.image_blocks):
        return None  # the model's mask defines what image tokens attend to
    # a training batch with position ids but without boundaries is packed and needs its mask
    is_plain_step = is_training(module) and kwargs.get("position_ids") is None
    # newer versions use the second name
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    if cache is not None or not (is_packed or is_plain_step):
        return None
    mask = image_masks(given, watched.batch) if sees_ahead else UNMASKED
    return args, {**kwargs, "attention_mask": mask, "use_cache": False}


def mask_chunks(
    decoder: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a decoder with chunks: mask longer packed rows by document.

    transformers cuts chunks by the position in the row. Here positions restart at each chunk of a
    document. A causal mask of these positions separates chunks in the same way as documents.
    """
    positions = kwargs.get("position_ids")
    size = decoder.config.attention_chunk_size
    if positions is None or positions.shape[1] <= size:
        return None
    if any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values")):
        return None
    # only shape, dtype and device of the embeddings are read
    embeddings = positions.new_empty((*positions.shape, 0), dtype=decoder.dtype)
    masks = {}
    for kind, begun in (("full_attention", positions), ("chunked_attention", positions % size)):
        masks[kind] = create_causal_mask(decoder.config, embeddings, None, None, begun)
    return args, {**kwargs, "attention_mask": masks}


@functools.cache
def _registered(own: str) -> str:
    """Register SFT-Play's attention in place of one of transformers'; return its name."""
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
    """Return attention's output (B, T, H, V), and weights if the model's function returns them.

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
    tokens_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return _attend_batch(module, *tokens_first, scoring, attention_mask), None


def _own_function(module: nn.Module, own: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the model's original attention function.

    If scores have a soft cap, this is the eager function: transformers' sdpa silently ignores
    it.
    """
    if own == "eager" or kwargs.get("softcap") is not None:
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[own]


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask of sdpa in the additive form of eager attention.

    The given mask is (B, 1, T, keys) bool, or None if causal. Additive masks are not changed.
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
