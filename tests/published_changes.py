"""What the names of config fields do not tell of a tiny published checkpoint, by model type."""

from typing import Any

from tiny_models import LINEAR_AND_FULL, SLIDING_AND_FULL, Sizes

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

NO_TIMM = "the vision tower is a model of timm, which is not installed"
# Why there is no tiny model
NOT_BUILT = {
    "evolla": "reads proteins; no auto class of transformers knows its config class",
    "fast_vlm": NO_TIMM,
    "gemma3n": NO_TIMM,
    "perception_lm": NO_TIMM,
    "pi0": "draws actions of a robot: its class has no generation config",
    "shieldgemma2": "classifies images: the repository declares ShieldGemma2ForImageClassification",
    "vision-encoder-decoder": "joins two models that the config names: there is no default one",
}
# Why the class computes no logits of a row that is text alone
NO_TEXT_ROWS = {
    **dict.fromkeys(
        (
            "blip",
            "blip-2",
            "idefics",
            "instructblip",
            "instructblipvideo",
            "kosmos-2",
            "pp_formulanet",
        ),
        "wants pixel values in every call",
    ),
    "diffusion_gemma": "draws all tokens of a block from noise, none after another",
    "kyutai_speech_to_text": "wants the codes of sound beside each token",
    "pix2struct": "wants flattened patches in every call",
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"), "has no forward: its thinker is the language model"
    ),
    **dict.fromkeys(("florence2", "t5gemma2"), "is an encoder and a decoder: text goes to both"),
    "udop": "wants the place of each token on the page",
    "voxtral_realtime": "wants sound in every call",
}


def changes_by_type(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return the fields to set; those of parts are dictionaries, joined with the shrunk ones."""
    return {**_of_language(sizes), **_of_towers(sizes), **_of_sound(sizes)}


def _of_language(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return what the language models need: kinds of layers, experts, rotary positions."""
    half = sizes.head // 2
    window = {"sliding_window": sizes.window, "layer_types": SLIDING_AND_FULL}
    gemma4_tower = {
        "model_type": "gemma4_vision",
        **sizes.common(),
        "num_key_value_heads": 4,
        "patch_size": 8,
        "position_embedding_size": 64,
    }
    routed = {"num_experts": 8, "moe_intermediate_size": sizes.expert}
    return {
        "cohere_compass": {
            "text_config": {
                **window,
                "rope_parameters": {
                    "sliding_attention": {
                        **PLAIN_ROPE,
                        "mrope_section": [half // 4, half // 4, half // 2],
                    },
                    "full_attention": {
                        **PLAIN_ROPE,
                        "mrope_section": [half // 4, half // 4, half // 2],
                    },
                },
            }
        },
        "cosmos3_edge": {
            "text_config": {
                "rope_parameters": {"mrope_section": [half - half // 2, half // 4, half // 4]}
            }
        },
        "deepseek_ocr2": {
            "text_config": {
                "moe_intermediate_size": sizes.expert,
                "num_experts_per_tok": 2,
                "mlp_layer_types": ["dense", "sparse"],
            }
        },
        "diffusion_gemma": {
            "text_config": {**routed, "top_k_experts": 2},
            "vision_config": gemma4_tower,
        },
        "emu3": {
            "text_config": {"bos_token_id": 1},
            "vocabulary_map": {"<image>": 2300},
            "vq_config": {"channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1},
        },
        "ernie4_5_vl_moe": {
            # height and width share features in turn, time has the last ones
            "text_config": {"rope_parameters": {"mrope_section": [half // 4, half // 4, half // 2]}}
        },
        "exaone4_5": {"text_config": window},
        "glm5_next": {
            "text_config": {
                "num_key_value_heads": 4,
                "qk_rope_head_dim": 0,
                "index_topk": 16,
                "index_kpool": 4,
            }
        },
        "llama4": {
            "text_config": {
                "interleave_moe_layer_step": 2,
                "moe_layers": [1],
                "attention_chunk_size": 512,
                "num_experts_per_tok": 1,
            }
        },
        "minimax_m3_vl": {
            "text_config": {
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "minimax_m3_sparse"],
            }
        },
        "mistral3": {"tie_word_embeddings": False},
        "mistral4": {"head_dim": 2 * sizes.head, "num_key_value_heads": 4},
        "qwen4_exp": {
            "text_config": {
                "layer_types": [LINEAR_AND_FULL[0], "qwen_sparse_attention"],
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
                "number_of_conv_states": 3,
            }
        },
        "step3p7": {
            "text_config": {
                **window,
                "mlp_layer_types": ["dense", "sparse"],
                "rope_parameters": {"sliding_attention": PLAIN_ROPE},
            }
        },
    }


def _of_towers(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return what the parts that read images need."""
    codes = {"channel_multiplier": [1, 1], "num_res_blocks": 1}
    return {
        "chameleon": {"vocabulary_map": {"<image>": 2300, "IMGIMGAZ": 2299, "IMGIMGBZ": 2298}},
        "granite4_vision": {
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0], [1, 1]],
            "spatial_target_layers": [0, 1, 0, 1],
        },
        "hunyuan_vl": {
            "text_config": {"head_dim": sizes.head},
            "vision_config": {"max_image_size": 64, "max_vit_seq_len": 64},
        },
        "inkling_mm_model": {
            "text_config": {"mlp_layer_types": ["dense", "sparse"]},
            "vision_config": {"n_layers": 3, "patch_size": 2},
        },
        "janus": {"vq_config": codes},
        "mllama": {
            "text_config": {"bos_token_id": 1, "num_hidden_layers": 3},
            "vision_config": {
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 3 * sizes.hidden,
            },
        },
    }


def _of_sound(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return what the parts that read or make sound need."""
    marks = {"vision_start_token_id": 2285, "vision_end_token_id": 2286}
    codec = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    return {
        "fun_asr_nano": {
            "adaptor_config": {"intermediate_size": sizes.hidden // 4},
            "audio_config": {"num_timestamp_prediction_layers": 1, "num_hidden_layers": 3},
        },
        "kyutai_speech_to_text": {
            "codec_config": {
                "num_filters": 4,
                "upsample_groups": sizes.hidden,
                "num_key_value_heads": 4,
            }
        },
        "qwen2_5_omni_thinker": marks,
        "qwen3_omni_moe_thinker": marks,
        "qwen2_5_omni": {
            "thinker_config": marks,
            "token2wav_config": {
                "dit_config": {
                    "enc_channels": [16, 16, 16, 16, 48],
                    "look_ahead_layers": [1],
                    "look_backward_layers": [0],
                },
                "bigvgan_config": {"upsample_initial_channel": 64},
            },
        },
        "qwen3_omni_moe": {
            "thinker_config": marks,
            "talker_config": {
                "spatial_merge_size": 2,
                "text_config": {"shared_expert_intermediate_size": sizes.expert},
            },
        },
        "vibevoice_asr": {
            "acoustic_tokenizer_encoder_config": codec,
            "semantic_tokenizer_encoder_config": codec,
        },
    }
