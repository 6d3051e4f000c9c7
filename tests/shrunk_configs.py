"""Makes any composite config of transformers tiny: sizes by the names of their fields.

Of lists with an entry a layer those layers stay at which a kind of layer occurs first.
"""

import inspect
from pathlib import Path
from typing import Any

from tiny_models import Sizes, tiny_config
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

IMAGE_PIXELS = 32  # of a side; an image has 4 times 4 patches
PATCH_PIXELS = 8
LAST_TOKEN = 2300  # of the tiny tokenizer; marks of images are the tokens before it

# The names under which configs have each size, as fields of `Sizes` or plain numbers
_NAMES: tuple[tuple[str | int, str], ...] = (
    (
        "hidden",
        "hidden_size d_model n_embd embed_dim hidden_dim encoder_hidden_size "
        "decoder_hidden_size output_dim out_hidden_size projection_dim "
        "projector_hidden_size projection_hidden_size patch_embed_hidden_size "
        "text_hidden_size vision_output_dim projector_input_dim projector_output_dim "
        "word_embed_proj_dim image_text_hidden_size image_token_embed_dim "
        "merged_hidden_size embedding_size thinker_hidden_size downsample_hidden_size",
    ),
    (
        "intermediate",
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim "
        "dense_intermediate_size intermediate_size_mlp alignment_intermediate_size "
        "projection_intermediate_size",
    ),
    (
        "expert",
        "moe_intermediate_size shared_expert_intermediate_size share_expert_dim "
        "shared_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (
        "head",
        "head_dim d_kv dim_head swa_head_dim index_head_dim qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim resampler_head_dim resampler_dim_head",
    ),
    (
        "state",
        "linear_key_head_dim linear_value_head_dim linear_head_dim laurel_rank "
        "hidden_size_per_layer_input",
    ),
    ("vocabulary", "vocab_size vocab_size_per_layer_input"),
    ("window", "sliding_window sliding_window_size"),
    (1, "n_shared_experts moe_num_shared_experts first_k_dense_replace"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers layers depth encoder_layers "
        "decoder_layers num_decoder_layers num_blocks conf_num_hidden_layers "
        "resampler_depth num_global_layers aligner_num_add_layers num_key_value_heads "
        "swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk moe_k "
        "num_codebooks num_quantizers num_code_groups",
    ),
    (
        4,
        "num_attention_heads attention_heads num_heads encoder_attention_heads "
        "decoder_attention_heads n_heads num_sliding_attention_heads "
        "swa_num_attention_heads conf_num_attention_heads resampler_n_heads "
        "resampler_heads linear_num_value_heads linear_num_heads index_n_heads "
        "mm_tokens_per_image num_query_tokens latent_query_num resampler_n_latents "
        "resampler_num_latents",
    ),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (
        16,
        "kv_lora_rank q_lora_rank hc_lowrank num_position_embeddings output_channels "
        "enc_dim enc_emb_dim enc_se_channels enc_attention_channels downsample_channels",
    ),
    (
        32,
        "base_channels latent_channels ext_pw_out_channel depthwise_separable_out_channel "
        "nemo_conv_channels decoder_dim emb_dim codebook_dim "
        "vector_quantization_hidden_dimension post_conv_in_channels "
        "post_conv_mid_channels post_conv_out_channels mm_embed_dim output_proj_dims "
        "mm_posemb_size position_embedding_size",
    ),
    (64, "num_embeddings codebook_size num_embeds codebook_vocab_size mel_vocab_size"),
    (PATCH_PIXELS, "patch_size"),
    (IMAGE_PIXELS, "image_size crop_size"),
    (512, "max_position_embeddings"),
)
_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")
_CHOSEN_LAYERS = {  # numbers of layers, of which there are 2
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "cross_attention_layers": [1],
}
# What the hub has where the default of transformers is another
_TEXT_TYPES = {"mistral3": "ministral3", "granite4_vision": "granite"}


def shrunk_config(model_type: str, sizes: Sizes, changes: dict[str, Any]) -> PreTrainedConfig:
    """Return the tiny config of a type; `changes` are fields, dictionaries of those of parts."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    for part, part_class in config_class.sub_configs.items():
        if default.get(part) is None and part_class is not AutoConfig:
            default[part] = part_class().to_dict()  # most repositories have these towers
    if model_type in _TEXT_TYPES:
        default["text_config"] = {"model_type": _TEXT_TYPES[model_type]}
    fields = merged(_shrunk(default, sizes, {}), changes)
    config = config_class(**fields)
    _set_rope_sections(config.get_text_config())
    return config


def _shrunk(fields: dict[str, Any], sizes: Sizes, tokens: dict[str, int]) -> dict[str, Any]:
    """Return fields with their sizes made small; `tokens` has the marks of images given so far."""
    small = {key: _small(key, value, sizes, tokens) for key, value in fields.items()}
    if str(fields.get("model_type")).startswith("siglip"):
        small["vision_use_head"] = False  # the head pools an image to one vector
    lists = {key: fields[key] for key in _LAYERS if isinstance(fields.get(key), list)}
    lists = {key: values for key, values in lists.items() if values}
    if lists:
        chosen = _first_of_each_kind(lists)
        layers = fields["num_hidden_layers"]
        for key, values in small.items():
            if isinstance(values, list) and len(values) == layers:
                small[key] = [values[i] for i in chosen]
        small["num_hidden_layers"] = len(chosen)
        if fields.get("per_layer_config"):
            small["per_layer_config"] = {
                str(chosen.index(int(layer))): _shrunk(own, sizes, tokens)
                for layer, own in fields["per_layer_config"].items()
                if int(layer) in chosen
            }
    return small


def _small(key: str, value: Any, sizes: Sizes, tokens: dict[str, int]) -> Any:
    if isinstance(value, dict) and "model_type" in value:
        return _text_fields(value["model_type"], sizes) or _shrunk(value, sizes, tokens)
    if key.endswith(("token_id", "token_index", "im_start_id", "im_end_id", "im_newline_id")):
        return _token(key, value, tokens)
    if key in _CHOSEN_LAYERS and value is not None:
        return _CHOSEN_LAYERS[key]
    for size, names in _NAMES:
        if key in names.split() and value is not None:
            number = size if isinstance(size, int) else getattr(sizes, size)
            return [number] * len(value) if isinstance(value, list | tuple) else number
    return value


def _token(key: str, value: Any, tokens: dict[str, int]) -> int | None:
    """Return the id of a token of the tiny tokenizer that stands for one of the default config."""
    plain = {"pad": 0, "eos": 1, "bos": None}
    name = key.split("_")[0]
    if value is None or name in plain:
        return plain.get(name)
    return tokens.setdefault(key.rsplit("_", 1)[0], LAST_TOKEN - len(tokens))


def _text_fields(model_type: str, sizes: Sizes) -> dict[str, Any] | None:
    """Return the fields of a text config that tiny_models has, None where it has none."""
    try:
        return tiny_config(model_type.removesuffix("_text"), sizes).to_dict()
    except ValueError:
        return None


def _first_of_each_kind(lists: dict[str, list[Any]]) -> list[int]:
    """Return at least two layers, with every value of every list among them."""
    seen: set[tuple[str, Any]] = set()
    chosen = []
    rows = list(zip(*lists.values(), strict=False))
    for layer, values in enumerate(rows):
        new = set(zip(lists, values, strict=True)) - seen
        if new:
            chosen.append(layer)
            seen |= new
    return chosen if len(chosen) > 1 else [chosen[0], chosen[0] + 1]


def _set_rope_sections(text: PreTrainedConfig) -> None:
    """Share the features of a head out to time, height and width where the type has M-RoPE."""
    source = Path(inspect.getfile(type(text)))
    source = source.with_name(source.name.replace("configuration_", "modeling_"))
    if "mrope_section" not in source.read_text() or not text.rope_parameters:
        return
    parameters = text.rope_parameters
    for own in [parameters] if "rope_theta" in parameters else parameters.values():
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        half = int(head * own.get("partial_rotary_factor", 1.0)) // 2
        time = (half + 1) // 2
        height = (half - time + 1) // 2
        if sum(own.get("mrope_section") or []) != half:
            own["mrope_section"] = [time, height, half - time - height]


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with changes on top, those of dictionaries within them joined likewise."""
    joined = dict(fields)
    for key, value in changes.items():
        inner = joined.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        joined[key] = merged(inner, value) if both else value
    return joined
