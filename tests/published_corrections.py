"""What the names of config fields do not tell of the tiny published models."""

from typing import Any

# Types that are not built, with the reason; a test asks for it.
NOT_BUILT: dict[str, str] = {}

# Text configs whose rotary embedding has sections for time, height and width (M-RoPE).
ROTATED_BY_SECTIONS = {
    *("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Qwen3VLTextConfig", "Qwen3VLMoeTextConfig"),
    *("Qwen3_5TextConfig", "Qwen3_5MoeTextConfig", "Qwen2_5OmniTextConfig"),
    *("Qwen3OmniMoeTextConfig", "Glm4vTextConfig", "Glm4vMoeTextConfig", "GlmOcrTextConfig"),
    "PaddleOCRTextConfig",
}

# Fields of config classes
CORRECTIONS: dict[str, dict[str, Any]] = {
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "Mistral3Config": {"tie_word_embeddings": False},
    "SiglipVisionConfig": {"vision_use_head": False},
    # One layer with positions, dense; one without, of experts
    "Llama4TextConfig": {
        "interleave_moe_layer_step": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
    },
}
