"""Tiny random checkpoints in the files, tensor names and classes of published repositories.

They are models that read images or sound next to text. Each has the config class, the declared
class, the encoders and the files of a folder on the hub; only its sizes are ours. The sizes are found
by structure: every part of a type's default config is made small by the names of its fields, and as
many of its layers are kept as show every kind of layer. `published_corrections` has what names do
not tell, and why some types are not built.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from published_corrections import (
    NOT_BUILT,
    PARTS,
    ROTATED_BY_SECTIONS,
    TIME_LAST,
    TWINS,
    class_fields,
    small_fields,
)
from published_files import write_processor, write_weights
from tiny_models import MODEL_TYPES, TINY, Sizes, draw_weights, tiny_config
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IMAGE_TEXT_CLASSES = {
    **getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
IMAGE_TEXT_TYPES = tuple(sorted(IMAGE_TEXT_CLASSES))
BUILT_TYPES = tuple(name for name in IMAGE_TEXT_TYPES if name not in NOT_BUILT)
# Those that people download; `make test-architectures` tries the others, too
PEOPLES = (
    *("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("mistral3", "llama4", "glm4v", "internvl", "smolvlm", "lfm2_vl", "mllama", "kimi_k25"),
)

# The last ids of the vocabulary stand for images, sound and their ends.
SPECIAL_IDS = 32

HIDDEN = {
    *("hidden_size", "d_model", "embed_dim", "out_hidden_size", "projection_dim", "hidden_dim"),
    *("output_dim", "encoder_hidden_size", "text_hidden_size", "vision_output_dim"),
    *("projector_input_dim", "projector_output_dim", "projector_hidden_size"),
    *("projection_hidden_size", "word_embed_proj_dim", "image_text_hidden_size"),
    *("downsample_hidden_size", "output_channels", "patch_embed_hidden_size"),
    *("decoder_hidden_size", "thinker_hidden_size", "embedding_size"),
}
HEADS = {
    *("num_attention_heads", "attention_heads", "num_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "conf_num_attention_heads", "resampler_n_heads"),
    *("swa_num_attention_heads", "num_sliding_attention_heads", "n_heads"),
    *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
}
KEY_VALUE_HEADS = {"num_key_value_heads", "swa_num_key_value_heads"}
HEAD_SIZES = {
    *("head_dim", "d_kv", "resampler_head_dim", "dim_head", "swa_head_dim", "global_head_dim"),
    *("index_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
}
INTERMEDIATE = {
    *("intermediate_size", "mlp_dim", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("intermediate_size_mlp", "dense_intermediate_size", "alignment_intermediate_size"),
    *("projection_intermediate_size", "share_expert_dim", "merged_hidden_size"),
}
EXPERT_SIZES = {
    *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
}
EXPERTS = {*("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")}
LAYERS = {
    *("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_global_layers", "n_layers", "conf_num_hidden_layers"),
    *("num_blocks", "resampler_depth", "layers"),
}
EXPERTS_PER_TOKEN = {"num_experts_per_tok", "moe_topk", "moe_k"}
RANKS = {"q_lora_rank", "kv_lora_rank", "laurel_rank", "hc_lowrank"}
TOKEN_IDS = ("_token_id", "_token_index")
LAYER_LISTS = {"layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types"}


def published_config(
    model_type: str, sizes: Sizes = TINY, text_type: str | None = None
) -> PreTrainedConfig:
    """Return the tiny composite config of a model type, as its repositories have it.

    `text_type` is the model type of the language model, None for the one of the default config:
    Ministral 3 is a mistral3 with `ministral3`.

    Raises: ValueError for a type in `NOT_BUILT`.
    """
    if model_type in NOT_BUILT:
        raise ValueError(f"{model_type}: {NOT_BUILT[model_type]}")
    return shrink_default(model_type, sizes, text_type)


def shrink_default(
    model_type: str, sizes: Sizes = TINY, text_type: str | None = None
) -> PreTrainedConfig:
    """Return the default config of a type made small, also of one that is not built."""
    parts = dict(PARTS.get(model_type, {}))
    if text_type is not None:
        parts["text_config"] = text_type
    default = CONFIG_MAPPING[model_type](
        **{name: CONFIG_MAPPING[part]() for name, part in parts.items()}
    )
    return _shrink(default, default.get_text_config(), sizes)


def published_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that repositories of this type declare in `architectures`."""
    return getattr(transformers, IMAGE_TEXT_CLASSES[config.model_type])


def published_model(
    model_type: str, sizes: Sizes = TINY, text_type: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """Return the tiny model of the declared class in float32, all weights drawn, in evaluation."""
    torch.manual_seed(seed)
    config = published_config(model_type, sizes, text_type)
    model = published_class(config)(config)
    draw_weights(model)
    return model.eval()


def write_published(
    model_type: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes = TINY,
    text_type: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a tiny checkpoint as its repository has it: weights, configs, tokenizer, processor."""
    model = published_model(model_type, sizes, text_type)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # not the complex angles of Llama 4's encoder
            tensor.data = tensor.data.to(dtype)
    if model.can_generate():
        model.generation_config.bos_token_id = None
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    write_weights(model, folder)
    tokenizer.save_pretrained(folder)
    write_processor(model.config.model_type, folder)
    return folder


def _shrink(config: PreTrainedConfig, text: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    """Return a small config of the class of `config`, its parts made small first."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = _shrink(value, text, sizes).to_dict()
    small = _text_fields if config is text else _small_fields
    own = class_fields(sizes).get(type(config).__name__, {})
    return type(config)(**{**fields, **small(config, sizes), **own})


def _text_fields(config: PreTrainedConfig, sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a language model: those of its tiny twin, or what its names tell."""
    twin = config.model_type.removesuffix("_text")
    twin = TWINS.get(twin, twin)
    if twin in MODEL_TYPES:
        known = tiny_config(twin, sizes).to_dict()
        fields = {
            name: known[name] for name in known if name not in ("model_type", "architectures")
        }
    else:
        fields = _small_fields(config, sizes)
        common = {**sizes.common(), "num_hidden_layers": fields.get("num_hidden_layers", 2)}
        fields |= {name: common[name] for name in common if name in vars(config)}
    if type(config).__name__ in ROTATED_BY_SECTIONS:
        sections = _sections(config.rope_parameters, sizes)
        if type(config).__name__ in TIME_LAST:
            sections["mrope_section"] = [sizes.head // 8, sizes.head // 8, sizes.head // 4]
        fields["rope_parameters"] = sections
    return fields


def _sections(parameters: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return rope parameters whose sections (time, height, width) fill the rotated features."""
    changed = {"partial_rotary_factor": 0.5} if "partial_rotary_factor" in parameters else {}
    rotated = int(sizes.head * changed.get("partial_rotary_factor", 1.0)) // 2
    width, height = rotated // 4, (rotated + 2) // 4
    sections = [rotated - width - height, height, width]
    return {**parameters, **changed, "mrope_section": sections}


def _small_fields(config: PreTrainedConfig, sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a config that their names make small, with their values."""
    fields = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kept = _kept_layers(values)
    by_name = _sizes_by_name(sizes, len(kept))
    for name, value in values.items():
        if name.endswith(TOKEN_IDS) and isinstance(value, int):
            fields[name] = _special_id(name, sizes)
        elif name in LAYER_LISTS and isinstance(value, list | tuple):
            fields[name] = [value[index] for index in kept]
        elif name in by_name and value is not None:
            fields[name] = _like(value, by_name[name])
    return fields


def _special_id(name: str, sizes: Sizes) -> int | None:
    """Return the id of a token that a config names, within the vocabulary of the tokenizer."""
    texts = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if name in texts:
        return texts[name]
    kind = name.removesuffix("_token_id").removesuffix("_token_index")
    return sizes.vocabulary - 1 - sum(map(ord, kind)) % SPECIAL_IDS


def _like(value: Any, size: Any) -> Any:
    """Return a size in the form of the default: alone, or once for each element of a tuple."""
    if isinstance(value, list | tuple) and not isinstance(size, list | tuple):
        return [size for _ in value]
    return size


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Return the indices of the first default layers that show every kind, 2 at least."""
    kept = set()
    for name in LAYER_LISTS & values.keys():
        if isinstance(values[name], list | tuple):
            kinds = list(values[name])
            kept |= {kinds.index(kind) for kind in kinds}
    more = iter(range(10))
    while len(kept) < 2:
        kept.add(next(more))
    return sorted(kept)


def _sizes_by_name(sizes: Sizes, layers: int) -> dict[str, Any]:
    """Return the small value of each field name that this module knows."""
    groups = (
        (HIDDEN, sizes.hidden),
        (HEADS, 4),
        (KEY_VALUE_HEADS, 4),
        (HEAD_SIZES, sizes.head),
        (INTERMEDIATE, sizes.intermediate),
        (EXPERT_SIZES, sizes.expert),
        (EXPERTS, 6),
        (EXPERTS_PER_TOKEN, 2),
        (RANKS, 16),
        (LAYERS, layers),
    )
    named = {name: value for names, value in groups for name in names}
    return named | small_fields(sizes)
