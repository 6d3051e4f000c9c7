"""What the names of config fields do not tell of the tiny published models."""

from typing import Any

from tiny_models import SLIDING_AND_FULL, YARN, Sizes

IMAGE_SIZE = 32  # pixels of a side
PATCH_SIZE = 8

# Types that are not built, with the reason. A test builds each and asks for the error.
NOT_BUILT: dict[str, str] = {
    "fast_vlm": "its encoder needs timm",
    "gemma3n": "its encoder needs timm",
    "perception_lm": "its encoder needs timm",
    "shieldgemma2": "its repositories declare a classifier of images",
    "vision-encoder-decoder": "it has no config of its own",
}

# What the forward pass of a type says to tokens of text alone, for those that refuse them
REFUSED_TEXT = {
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo"), "pixel_values"),
    **dict.fromkeys(("idefics", "kosmos-2", "pp_formulanet"), "pixel_values"),
    "kyutai_speech_to_text": "size of tensor",  # ids of text and of codes for sound
    "pi0": "state",  # of a robot
    "pix2struct": "flattened_patches",
    "qwen2_5_omni": "unimplemented",  # its part `thinker` is a type of its own
    "qwen3_omni_moe": "unimplemented",
    "t5gemma2": "inputs_embeds",  # of its decoder
    "udop": "Bbox",
    "voxtral_realtime": "input_features",
}
# Types whose logits are not those of the tokens that were given: an encoder with a decoder, and
# a canvas drawn at random
OTHER_LOGITS = {"florence2", "diffusion_gemma"}
# Types whose text tokens see later ones, unless token_type_ids say what is answered
READS_AHEAD = {"paligemma"}

# Parts that a default config leaves out and repositories have, with their model types
PARTS = {
    "gemma4": {"vision_config": "gemma4_vision", "audio_config": "gemma4_audio"},
    "gemma4_unified": {
        "vision_config": "gemma4_unified_vision",
        "audio_config": "gemma4_unified_audio",
    },
    "diffusion_gemma": {"vision_config": "gemma4_vision"},
    "granite4_vision": {"text_config": "granite4_vision_text"},
}
# Types in tests/tiny_models.py whose fields a text config has, where its name is another
TWINS = {"gemma4_unified": "gemma4"}

# Text configs whose rotary embedding has sections for time, height and width (M-RoPE)
ROTATED_BY_SECTIONS = {
    *("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Qwen3VLTextConfig", "Qwen3VLMoeTextConfig"),
    *("Qwen3_5TextConfig", "Qwen3_5MoeTextConfig", "Qwen4ExpTextConfig"),
    *("Qwen2_5OmniTextConfig", "Qwen3OmniMoeTextConfig", "Glm4vTextConfig"),
    *("Glm4vMoeTextConfig", "GlmOcrTextConfig", "PaddleOCRTextConfig"),
    *("Ernie4_5_VLMoeTextConfig", "Cosmos3EdgeTextConfig"),
}
# Those of them in the order height, width, time
TIME_LAST = {"Ernie4_5_VLMoeTextConfig"}


def small_fields(sizes: Sizes) -> dict[str, Any]:
    """Return fields by the names that they have in any part of a config."""
    return {
        "vocab_size": sizes.vocabulary,
        "vocab_size_per_layer_input": sizes.vocabulary,
        "hidden_size_per_layer_input": sizes.head,
        "max_position_embeddings": 512,
        "max_source_positions": 64,
        "sliding_window": sizes.window,
        "sliding_window_size": sizes.window,
        "attention_chunk_size": 64,  # a proof has rows of one token more
        "image_size": IMAGE_SIZE,
        "crop_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "num_position_embeddings": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "deepstack_visual_indexes": [0, 1],
        "fullatt_block_indexes": [1],
        "global_attn_indexes": [1],
        "n_group": 1,
        "topk_group": 1,
        "insert_layer_id": 0,
        "position_embedding_size": 16,
        "mm_posemb_size": 16,
        "mm_embed_dim": sizes.hidden,
        "audio_embed_dim": sizes.hidden,
        "output_proj_dims": sizes.hidden,
        "subsampling_conv_channels": [8, 4],
        # Of image tokenizers: their norms have 32 groups
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "latent_channels": 32,
        "num_embeddings": 32,
        "num_res_blocks": 1,
        "codebook_size": 32,
        "image_token_embed_dim": sizes.hidden,
        # Of encoders for sound
        "num_filters": 2,
        "codebook_dim": 16,
        "num_quantizers": 4,
        "vector_quantization_hidden_dimension": 16,
        "upsample_groups": sizes.hidden,
        "ext_pw_out_channel": sizes.hidden,
        "depthwise_separable_out_channel": sizes.hidden,
        "nemo_conv_channels": sizes.hidden,
        "bias_max_distance": 16,
        "depths": 1,
        "decoder_dim": 64,
        # Of voices
        "upsample_initial_channel": 64,
        "mel_dim": 8,
        "num_embeds": 64,
        "emb_dim": sizes.hidden,
        "enc_dim": 16,
        "enc_emb_dim": 16,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "accept_hidden_layer": 1,
        # Of encoders that shrink pictures by convolutions
        "post_conv_in_channels": sizes.hidden,
        "post_conv_mid_channels": sizes.hidden,
        "post_conv_out_channels": sizes.hidden,
        "downsample_channels": [sizes.hidden, sizes.hidden],
    }


def class_fields(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return fields by the name of their config class."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "ChameleonConfig": {"vocabulary_map": _image_vocabulary(sizes), "num_key_value_heads": 4},
        "CohereCompassTextConfig": {
            "rope_parameters": {
                "sliding_attention": {
                    **rope,
                    "mrope_section": [sizes.head // 8, sizes.head // 8, sizes.head // 4],
                },
                "full_attention": None,
            }
        },
        "DeepseekOcr2TextConfig": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
        },
        "DiffusionGemmaTextConfig": {
            "layer_types": SLIDING_AND_FULL,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": sizes.expert,
            "head_dim": sizes.head,
            "global_head_dim": 2 * sizes.head,
        },
        "Emu3Config": {"vocabulary_map": _image_vocabulary(sizes)},
        "Emu3TextConfig": {"bos_token_id": 2, "attention_dropout": 0.0},
        "FunAsrNanoAdaptorConfig": {"intermediate_size": sizes.hidden // 4},
        "Gemma3Config": {"mm_tokens_per_image": 4},
        "Gemma4VisionConfig": {"position_embedding_size": 128},
        "Glm5NextTextConfig": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0},
        "Granite4VisionConfig": {
            "deepstack_layer_map": [[-1, 0]],
            "downsample_rate": "1/2",
            "spatial_target_layers": [0, 1, 0, 1],
        },
        "Granite4VisionTextConfig": {"attention_multiplier": 0.3, "residual_multiplier": 0.5},
        "HunYuanVLTextConfig": {
            "rope_parameters": {**rope, "mrope_section": [sizes.head // 8] * 4}
        },
        "HunYuanVLVisionConfig": {"max_image_size": IMAGE_SIZE, "min_image_size": PATCH_SIZE},
        "InklingAudioConfig": {"mel_vocab_size": 8, "n_mel_bins": 8},
        "InklingTextConfig": {"mlp_layer_types": ["dense", "sparse"]},
        # Fewer layers than steps from a pixel to a patch would need scipy
        "InklingVisionConfig": {"n_layers": 3, "patch_size": 2},
        "Kimi_K25Config": {"tie_word_embeddings": False},
        "KyutaiSpeechToTextConfig": {
            "num_codebooks": 4,
            "codebook_vocab_size": 33,
            "audio_bos_token_id": 32,
            "audio_pad_token_id": sizes.vocabulary + 2,
        },
        # One layer with positions, dense; one without, of experts
        "Llama4TextConfig": {
            "interleave_moe_layer_step": 2,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
        },
        "Llama4VisionConfig": {"intermediate_size": 4 * sizes.hidden},
        "MiniMaxM3VLTextConfig": {
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
        "Mistral3Config": {"tie_word_embeddings": False},
        "Mistral4Config": {
            "head_dim": 2 * sizes.head,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **YARN,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "MllamaTextConfig": {
            "bos_token_id": 2,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
        },
        "MllamaVisionConfig": {
            "intermediate_layers_indices": [0],
            "vision_output_dim": 2 * sizes.hidden,
        },
        "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": sizes.vocabulary - 2},
        "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": sizes.vocabulary - 2},
        "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
        "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": sizes.expert},
        "Qwen4ExpTextConfig": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": sizes.head,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1],
            "ple_embed_dim": sizes.hidden,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 64,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 2,
        },
        "SiglipVisionConfig": {"vision_use_head": False},
        "Step3p7TextConfig": {
            "sliding_window": sizes.window,
            "layer_types": SLIDING_AND_FULL,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
            "num_hidden_layers": 2,
        },
    }


def _image_vocabulary(sizes: Sizes) -> dict[str, int]:
    """Return ids of the token for a picture and of some codes of its parts."""
    last = sizes.vocabulary - 1
    codes = {f"IMGIMG{letter}Z": last - 40 - index for index, letter in enumerate("ABCD")}
    return {"<image>": last, **codes}
