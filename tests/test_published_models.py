"""Tiny checkpoints of published types: every type is built, and its files are those of the hub."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from published_models import IMAGE_TEXT_TYPES, published_model, write_published
from safetensors import safe_open

FIRST = [
    *("gemma3", "qwen3_5", "qwen3_5_moe", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("llama4", "smolvlm"),
]


@pytest.fixture(scope="module")
def published(tokenizer, tmp_path_factory) -> Callable[[str], Path]:
    """A function that returns the folder of a published type, written once."""
    folders: dict[str, Path] = {}

    def write(model_type: str) -> Path:
        if model_type not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            folders[model_type] = write_published(model_type, folder, tokenizer)
        return folders[model_type]

    return write


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("model_type", FIRST)
def test_the_declared_class_opens_the_folder_as_the_model_that_was_written(model_type, published):
    assert model_type in IMAGE_TEXT_TYPES
    folder = published(model_type)
    declared = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = published_model(model_type)
    opened, loading = getattr(transformers, declared).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        (
            "gemma3",
            "language_model.model.layers.1.self_attn.q_norm.weight "
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight "
            "vision_tower.vision_model.post_layernorm.bias "
            "multi_modal_projector.mm_input_projection_weight",
        ),
        (
            "qwen2_5_vl",
            "model.layers.0.self_attn.q_proj.bias visual.blocks.0.attn.qkv.weight "
            "visual.merger.mlp.0.weight visual.patch_embed.proj.weight lm_head.weight",
        ),
        (
            "qwen3_5",
            "model.language_model.layers.0.linear_attn.in_proj_qkv.weight "
            "model.visual.blocks.0.mlp.linear_fc1.weight mtp.layers.0.self_attn.q_proj.weight "
            "mtp.layers.0.mlp.down_proj.weight mtp.fc.weight mtp.norm.weight "
            "mtp.pre_fc_norm_embedding.weight mtp.pre_fc_norm_hidden.weight lm_head.weight",
        ),
        (
            "mistral3",
            "language_model.model.layers.0.self_attn.q_proj.weight language_model.lm_head.weight "
            "vision_tower.transformer.layers.0.attention.q_proj.weight "
            "multi_modal_projector.patch_merger.merging_layer.weight",
        ),
        (
            "llama4",
            "language_model.model.layers.0.feed_forward.gate_proj.weight "
            "language_model.model.layers.1.feed_forward.shared_expert.down_proj.weight "
            "language_model.lm_head.weight vision_model.patch_embedding.linear.weight "
            "vision_model.model.layers.0.self_attn.q_proj.weight "
            "multi_modal_projector.linear_1.weight",
        ),
        (
            "smolvlm",
            "model.text_model.layers.0.self_attn.q_proj.weight lm_head.weight "
            "model.vision_model.encoder.layers.0.mlp.fc1.weight "
            "model.connector.modality_projection.proj.weight",
        ),
    ],
)
def test_tensors_are_named_as_on_the_hub(model_type, names, published):
    written = shapes_in(published(model_type))
    assert set(names.split()) <= written.keys()
    assert not [name for name in written if name.startswith("model.") and "gemma3" in model_type]


@pytest.mark.parametrize(
    ("model_type", "expert", "shape"),
    [
        ("llama4", "language_model.model.layers.1.feed_forward.experts.gate_up_proj", (6, 32, 96)),
        ("qwen3_vl_moe", "model.language_model.layers.1.mlp.experts.gate_up_proj", (6, 32, 48)),
        ("qwen3_5_moe", "model.language_model.layers.1.mlp.experts.gate_up_proj", (6, 48, 32)),
    ],
)
def test_experts_lie_in_the_file_as_on_the_hub(model_type, expert, shape, published):
    """(experts, input features, output features), but Qwen3.5 has the output features first."""
    assert shapes_in(published(model_type))[expert] == shape
