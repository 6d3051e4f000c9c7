"""Tiny configs of model types that came after the transformers of requirements.lock.

They are tried where a newer one is installed: `make test-newest`.
"""

from typing import TYPE_CHECKING, Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from tiny_models import Sizes


def newer_fields(sizes: "Sizes") -> dict[str, dict[str, Any]]:
    """Return the config fields of each type that differ from `Sizes.common`."""
    window = {"sliding_window": sizes.window}
    both = {**window, "layer_types": ["sliding_attention", "full_attention"]}
    routed = {"moe_intermediate_size": sizes.expert, "num_experts_per_tok": 2, "num_experts": 6}
    shared = {**routed, "shared_expert_intermediate_size": sizes.expert}
    latent = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": sizes.head,
        "qk_rope_head_dim": sizes.head,
        "v_head_dim": sizes.head,
    }
    grouped = {"moe_intermediate_size": sizes.expert, "num_experts_per_tok": 2}
    grouped |= {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {
        "exaone": {},
        "internlm3": {"attention_bias": True, "mlp_bias": True},
        "iquestcoder": {},
        "apertus1p5_text": {},
        "dory": {
            **window,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "initializer_range": 1.0,  # weights are scaled by its inverse
        },
        "beam": {
            **routed,
            **both,
            "mlp_layer_types": ["dense", "sparse"],
            "n_group": 2,
            "topk_group": 1,
        },
        "flint": {**shared, **both, "mlp_only_layers": [0]},
        "kolibri1": {**shared, **both},
        "sarvam_moe": {**grouped, "n_group": 2, "topk_group": 1},
        "sarvam_mla": {**latent, **grouped},
        "dots3_note_text": {**latent, **grouped, "mlp_layer_types": ["dense", "sparse"]},
        "bailing_hybrid": {
            **latent,
            **grouped,
            "num_local_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "lara_mini": {
            **shared,
            **window,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
            "linear_key_head_dim": sizes.state,
            "linear_value_head_dim": sizes.state,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "lfm3": {
            **window,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
        "inkling2_text": {
            **grouped,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "sliding_window_size": sizes.window,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": sizes.head,
            "unpadded_vocab_size": sizes.vocabulary,
            "d_rel": 4,
            "rel_extent": 16,
        },
    }


def known_newer_types(sizes: "Sizes") -> tuple[str, ...]:
    """Return those of the types that the installed transformers has."""
    return tuple(name for name in newer_fields(sizes) if name in CONFIG_MAPPING)
