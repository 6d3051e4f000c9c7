"""The smallest random model of each model type, from the config class of transformers.

Every kind of layer that a type has occurs once: sliding and full attention, attention without
positions, recurrent mixers, dense layers and experts. No weight keeps a default of zero or one, so
that a part which ignores a norm's weight, a bias or a sink changes the loss.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from newer_models import known_newer_types, newer_fields
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny model. Those of kernels on GPUs are larger: `GPU_SIZES`."""

    vocabulary: int = 2304  # of the tokenizer in data/tiny_llama
    hidden: int = 32
    head: int = 8  # features of an attention head, of which there are 4 over 2 of keys and values
    intermediate: int = 48
    expert: int = 24  # intermediate size of an expert
    state: int = 8  # features of the state and the heads of a recurrent mixer
    window: int = 7  # tokens, shorter than most documents of the tests

    def common(self) -> dict[str, Any]:
        """Return the fields that nearly every config class has."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.head,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        }


TINY = Sizes()
# Some CPUs unpack rows wrongly that are no whole blocks of 64 weights: test_models_bnb.py
WHOLE_BLOCKS = Sizes(hidden=64, head=16, intermediate=64, expert=64)
GPU_SIZES = Sizes(hidden=256, head=64, intermediate=384, expert=128, state=64, window=64)

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
LINEAR_AND_FULL = ["linear_attention", "full_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

SCALES = {  # of Granite
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}

DENSE = (
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2"),
    *("gemma3", "gemma4", "phi", "phi3", "smollm3", "granite", "olmo2", "olmo3", "glm4"),
    *("cohere2", "exaone4", "hunyuan_v1_dense", "seed_oss", "starcoder2", "stablelm"),
    *("nemotron", "apertus", "ernie4_5", "helium"),
)
EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "granitemoe"),
    *("ernie4_5_moe", "lfm2_moe"),
)
HYBRID = (
    *("qwen3_5", "qwen3_next", "qwen3_5_moe", "lfm2", "falcon_h1", "granitemoehybrid"),
    *("nemotron_h", "bamba", "jamba"),
)
# Types that no code of this project was written for
OTHERS = (
    *("gpt2", "gptj", "gpt_neox", "opt", "bloom", "minicpm3", "deepseek_v2", "deepseek_v3"),
    *("dots1", "exaone_moe", "mamba2"),
)
MODEL_TYPES = (*DENSE, *EXPERTS, *HYBRID, *OTHERS)
NEWER = known_newer_types(TINY)  # none with the transformers of requirements.lock

# A model that reads images trains as its text model.
TEXT_MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def tiny_config(model_type: str, sizes: Sizes = TINY, **changes: Any) -> PreTrainedConfig:
    """Return the config of a tiny model; `changes` are fields of its config class."""
    fields = {**sizes.common(), **_fields_of(model_type, sizes), **changes}
    return AutoConfig.for_model(TEXT_MODELS.get(model_type, model_type), **fields)


def tiny_model(
    model_type: str,
    sizes: Sizes = TINY,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """Return a tiny model with random weights, in training mode.

    `attention` is the implementation, None for the one that transformers chooses.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type, sizes, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    draw_weights(model)
    model.config.use_cache = False
    return model.to(dtype).train()


def with_adapters(model: nn.Module, **options: Any) -> PeftModel:
    """Return a model with LoRA; B is not zero, which would give A no gradient."""
    chosen = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    adapted = get_peft_model(model, LoraConfig(**chosen))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.train()


@torch.no_grad()
def move_trained(model: nn.Module, seed: int = 1) -> None:
    """Move the trained weights, so that adapters do something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw all weights, away from the values that would hide a mistake.

    Matrices get a fixed variance of their outputs, so that attention is far from uniform and tokens
    matter to each other. Vectors (norms, biases, sinks, decay rates) are moved from their defaults.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        elif name.endswith("bias") or "conv" in name:
            parameter.normal_(std=0.3)
        else:
            parameter.normal_(std=min(parameter.shape[-2:]) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("bias", "layer_scalar")):  # of a router's choice; of a layer's output
            buffer.add_(torch.randn_like(buffer), alpha=0.1)


def write_base(
    model_type: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes = TINY,
    **changes: Any,
) -> Path:
    """Write a tiny model in float32 and a tokenizer as a base that a run can load."""
    model = tiny_model(model_type, sizes, **changes)
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _fields_of(model_type: str, sizes: Sizes) -> dict[str, Any]:
    """Return the config fields of a type that differ from `Sizes.common`."""
    for kind in (_dense_fields, _expert_fields, _hybrid_fields, _other_fields, newer_fields):
        fields = kind(sizes)
        if model_type in fields:
            return fields[model_type]
    raise ValueError(f"{model_type}: no tiny model; add its fields to {__file__}")


def _dense_fields(sizes: Sizes) -> dict[str, dict[str, Any]]:
    window = {"sliding_window": sizes.window, "layer_types": SLIDING_AND_FULL}
    return {
        "llama": {},
        "mistral": {"sliding_window": sizes.window},
        "ministral": window,
        "ministral3": {
            "rope_parameters": {
                **YARN,
                "type": "yarn",
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            }
        },
        "qwen2": {},
        "qwen3": {},
        "gemma": {},
        "gemma2": {**window, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        "gemma3": {**window, "query_pre_attn_scalar": 16},
        "gemma3n_text": {
            **window,
            "vocab_size_per_layer_input": sizes.vocabulary,
            "hidden_size_per_layer_input": sizes.hidden,
            "intermediate_size": [sizes.intermediate] * 2,
            "activation_sparsity_pattern": [0.9, 0.0],
            "num_kv_shared_layers": 0,
            "laurel_rank": sizes.hidden,
            "altup_num_inputs": 2,
        },
        "gemma4": {
            **window,
            "num_hidden_layers": 4,
            "layer_types": SLIDING_AND_FULL * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": sizes.vocabulary,
            "final_logit_softcapping": 5.0,
            "per_layer_config": {
                "1": {"head_dim": 2 * sizes.head},
                "3": {"head_dim": 2 * sizes.head},
            },
        },
        "phi": {"num_key_value_heads": 4, "hidden_size": 4 * sizes.head},
        "phi3": {"sliding_window": sizes.window, "hidden_size": 4 * sizes.head},
        "smollm3": {"no_rope_layers": [1, 0]},
        "granite": {**SCALES, "hidden_size": 4 * sizes.head},
        "olmo2": {},
        "olmo3": window,
        "glm4": {"attention_bias": True},
        "cohere2": window,
        "exaone4": {**window, "sliding_window_pattern": 2},
        "hunyuan_v1_dense": {},
        "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
        "starcoder2": {"sliding_window": sizes.window},
        "stablelm": {"use_qkv_bias": True, "hidden_size": 4 * sizes.head},
        "nemotron": {},
        "apertus": {"rope_parameters": LLAMA3_ROPE},
        "ernie4_5": {"use_bias": True},
        "helium": {},
    }


def _expert_fields(sizes: Sizes) -> dict[str, dict[str, Any]]:
    routed = {"moe_intermediate_size": sizes.expert, "num_experts_per_tok": 2}
    return {
        "qwen2_moe": {
            **routed,
            "num_experts": 6,
            "shared_expert_intermediate_size": sizes.expert,
            "mlp_only_layers": [0],
        },
        "qwen3_moe": {**routed, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
        "gpt_oss": {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": sizes.window,
            "layer_types": SLIDING_AND_FULL,
            "rope_parameters": {**YARN, "truncate": False},
        },
        "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
        "glm4_moe": {
            **routed,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
        },
        "granitemoe": {**SCALES, "num_local_experts": 6, "num_experts_per_tok": 2},
        "ernie4_5_moe": {
            "moe_intermediate_size": sizes.expert,
            "moe_k": 2,
            "moe_num_experts": 6,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
        "lfm2_moe": {
            **routed,
            "num_experts": 6,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
            "layer_types": ["conv", "full_attention"],
        },
    }


def _hybrid_fields(sizes: Sizes) -> dict[str, dict[str, Any]]:
    delta_rule = {
        "layer_types": LINEAR_AND_FULL,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": sizes.state,
        "linear_value_head_dim": sizes.state,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    routed = {
        "moe_intermediate_size": sizes.expert,
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "shared_expert_intermediate_size": sizes.expert,
    }
    mamba = {
        "mamba_n_heads": 2 * sizes.hidden // sizes.state,
        "mamba_d_head": sizes.state,
        "mamba_n_groups": 2,
        "mamba_d_state": sizes.state,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    }
    return {
        "qwen3_5": delta_rule,
        "qwen3_next": {**delta_rule, **routed, "mlp_only_layers": [0]},
        "qwen3_5_moe": {**delta_rule, **routed},
        "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        "falcon_h1": {
            **mamba,
            "mamba_d_ssm": 2 * sizes.hidden,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 1.5,
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "mlp_multipliers": [0.9, 0.7],
            "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.8,
        },
        "granitemoehybrid": {
            **mamba,
            "layer_types": LINEAR_AND_FULL,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": sizes.expert,
            **SCALES,
        },
        "nemotron_h": {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": sizes.state,
            "mamba_num_heads": 2 * sizes.hidden // sizes.state,
            "mamba_head_dim": sizes.state,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 16,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": sizes.expert,
            "moe_shared_expert_intermediate_size": sizes.expert,
            "routed_scaling_factor": 1.7,
        },
        "bamba": {**mamba, "attn_layer_indices": [1]},
        "jamba": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": sizes.state,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    }


def _other_fields(sizes: Sizes) -> dict[str, dict[str, Any]]:
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": sizes.head,
        "qk_rope_head_dim": sizes.head,
        "v_head_dim": sizes.head,
        "head_dim": sizes.head,
    }
    routed = {
        "moe_intermediate_size": sizes.expert,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        "gpt2": {**no_dropout, "n_positions": 512},
        "gptj": {**no_dropout, "n_positions": 512, "rotary_dim": sizes.head // 2},
        "gpt_neox": {},
        "opt": {"dropout": 0.0, "ffn_dim": sizes.intermediate, "word_embed_proj_dim": sizes.hidden},
        "bloom": {},
        "minicpm3": {**latent, "dim_model_base": sizes.hidden // 2},
        "deepseek_v2": {**latent, **routed},
        "deepseek_v3": {**latent, **routed, "n_group": 2, "topk_group": 1},
        "dots1": {**routed, "sliding_window": sizes.window, "layer_types": SLIDING_AND_FULL},
        "exaone_moe": {
            "moe_intermediate_size": sizes.expert,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": sizes.window,
            "layer_types": SLIDING_AND_FULL,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "mamba2": {
            "num_heads": 2 * sizes.hidden // sizes.state,
            "head_dim": sizes.state,
            "state_size": sizes.state,
            "n_groups": 2,
            "chunk_size": 16,
        },
    }
