"""Tiny published checkpoints: all types there are, in the classes and names of the hub."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from published_changes import NO_TEXT_ROWS
from published_models import (
    BUILT_TYPES,
    IMAGE_TEXT_TYPES,
    NOT_BUILT,
    auto_class,
    published_config,
    published_model,
    weight_files,
    write_published,
)
from safetensors.torch import load_file
from tiny_models import WHOLE_BLOCKS
from transformers import AutoModelForImageClassification

ROW = torch.tensor([[3, 70, 81, 92, 103, 4, 114, 125, 136, 147, 158, 1]])
# What transformers says to a type that is not built
REFUSALS = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "requires the timm library"),
    "evolla": "Unrecognized configuration class",
    "pi0": "no attribute 'generation_config'",
    "vision-encoder-decoder": "not both `encoder` and `decoder`",
}
# Where tensors begin in the files of the hub, with numbers of layers as N
HUB_NAMES = {
    "gemma3": (
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.N.pre_feedforward_layernorm.weight",
        "language_model.model.norm.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "vision_tower.vision_model.encoder.layers.N.self_attn.q_proj.weight",
        "vision_tower.vision_model.post_layernorm.weight",
    ),
    "llama4": (
        "language_model.lm_head.weight",
        "language_model.model.layers.N.feed_forward.experts.gate_up_proj",
        "language_model.model.layers.N.feed_forward.shared_expert.up_proj.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_model.model.layers.N.self_attn.q_proj.weight",
        "vision_model.patch_embedding.linear.weight",
        "vision_model.vision_adapter.mlp.fc1.weight",
    ),
    "mistral3": (
        "language_model.lm_head.weight",
        "language_model.model.layers.N.self_attn.q_proj.weight",
        "multi_modal_projector.patch_merger.merging_layer.weight",
        "vision_tower.patch_conv.weight",
        "vision_tower.transformer.layers.N.attention.q_proj.weight",
    ),
    "qwen2_5_vl": (
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.N.self_attn.q_proj.bias",
        "model.norm.weight",
        "visual.blocks.N.attn.qkv.weight",
        "visual.merger.mlp.N.weight",
        "visual.patch_embed.proj.weight",
    ),
    "qwen3_5": (
        "lm_head.weight",
        "model.language_model.layers.N.linear_attn.in_proj_qkv.weight",
        "model.language_model.layers.N.self_attn.q_norm.weight",
        "model.visual.blocks.N.attn.qkv.weight",
        "mtp.fc.weight",
        "mtp.layers.N.self_attn.q_proj.weight",
        "mtp.pre_fc_norm_embedding.weight",
    ),
    "qwen3_5_moe": (
        "model.language_model.layers.N.mlp.experts.gate_up_proj",
        "mtp.layers.N.mlp.experts.N.gate_proj.weight",
    ),
    "smolvlm": (
        "lm_head.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.layers.N.self_attn.q_proj.weight",
        "model.vision_model.encoder.layers.N.self_attn.q_proj.weight",
    ),
}
# What files of the hub begin with, and nothing else
HUB_PARTS = {
    "gemma3": {"language_model.model", "multi_modal_projector", "vision_tower.vision_model"},
    "llama4": {"language_model", "multi_modal_projector", "vision_model"},
    "mistral3": {"language_model", "multi_modal_projector", "vision_tower"},
    "qwen2_5_vl": {"lm_head", "model", "visual"},
    "qwen3_5": {"lm_head", "model.language_model", "model.visual", "mtp"},
    "qwen3_5_moe": {"lm_head", "model.language_model", "model.visual", "mtp"},
    "smolvlm": {"lm_head", "model.connector", "model.text_model", "model.vision_model"},
}


def reopened(folder: Path):
    """Return a checkpoint by the class that it declares, which has a place for every tensor."""
    declared = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, declared[0])
    if hasattr(model_class, "load_speakers"):  # its from_pretrained cannot say what it loaded
        return model_class.from_pretrained(folder)
    model, loaded = model_class.from_pretrained(folder, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"], loaded
    return model


@pytest.mark.parametrize("model_type", BUILT_TYPES)
def test_a_published_checkpoint_opens_by_its_declared_class(model_type, tmp_path, tokenizer):
    drawn = published_model(model_type).eval()
    model = reopened(write_published(model_type, tmp_path, tokenizer)).eval()
    assert type(model) is type(drawn)
    expected, state = drawn.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    if model_type in NO_TEXT_ROWS:
        return
    with torch.no_grad():
        logits = model(input_ids=ROW).logits
        assert logits.isfinite().all()
        assert logits.shape == (*ROW.shape, model.config.get_text_config().vocab_size)
        assert torch.equal(logits, drawn(input_ids=ROW).logits)


@pytest.mark.parametrize("model_type", NO_TEXT_ROWS)
def test_a_type_without_text_rows_gives_no_logits_of_one(model_type):
    model = published_model(model_type).eval()
    with torch.no_grad():
        if model_type in ("diffusion_gemma", "florence2"):  # of tokens that it chooses itself
            assert model(input_ids=ROW).logits.shape[1] != ROW.shape[1]
            return
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            model(input_ids=ROW)


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_a_type_is_not_built_for_the_reason_that_is_written_down(model_type):
    if model_type == "shieldgemma2":
        model = AutoModelForImageClassification.from_config(published_config(model_type))
        assert type(model).__name__ in NOT_BUILT[model_type]
        return
    with pytest.raises((AttributeError, ImportError, ValueError), match=REFUSALS[model_type]):
        published_model(model_type)


def test_reasons_are_about_types_of_the_installed_transformers():
    assert NOT_BUILT.keys() | NO_TEXT_ROWS.keys() <= set(IMAGE_TEXT_TYPES)


@pytest.mark.parametrize("model_type", HUB_NAMES)
def test_tensors_have_the_names_of_the_hub(model_type, tmp_path, tokenizer):
    names = weight_files(write_published(model_type, tmp_path, tokenizer))
    numbered = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names}
    assert numbered >= set(HUB_NAMES[model_type])
    parts = tuple(f"{part}." for part in HUB_PARTS[model_type])
    assert [name for name in names if not name.startswith(parts)] == []
    assert all(any(name.startswith(part) for name in names) for part in parts)


def test_a_checkpoint_in_shards_of_16_bits_opens_like_one_file(tmp_path, tokenizer):
    folder = write_published(
        "qwen3_5", tmp_path, tokenizer, dtype=torch.bfloat16, shard_bytes=10**5
    )
    files = weight_files(folder)
    assert len(set(files.values())) > 2
    assert "mtp.fc.weight" in files
    assert {load_file(file)[name].dtype for name, file in files.items()} == {torch.bfloat16}
    model = reopened(folder)
    drawn = published_model("qwen3_5").state_dict()
    assert all(
        torch.equal(tensor, drawn[name].to(torch.bfloat16))
        for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize("model_type", BUILT_TYPES)
def test_a_text_config_can_have_rows_of_whole_blocks(model_type):
    with torch.device("meta"):
        model = auto_class(model_type).from_config(published_config(model_type, WHOLE_BLOCKS))
    text = model.config.get_text_config()
    assert getattr(text, "hidden_size", getattr(text, "d_model", 0)) % 64 == 0
    assert text.vocab_size == WHOLE_BLOCKS.vocabulary


def test_a_chat_template_lies_where_the_repository_has_it(tmp_path, tokenizer):
    for model_type, in_config in (("mistral3", False), ("gemma3", True)):
        folder = write_published(model_type, tmp_path / model_type, tokenizer)
        assert not (folder / "chat_template.jinja").exists()
        written = json.loads((folder / "chat_template.json").read_text())
        assert written == {"chat_template": tokenizer.chat_template}
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        assert ("chat_template" in fields) == in_config
    assert (tmp_path / "gemma3" / "preprocessor_config.json").exists()


def test_an_old_config_has_the_fields_of_its_text_on_top(tmp_path, tokenizer):
    folder = write_published("qwen2_5_vl", tmp_path, tokenizer)
    fields = json.loads((folder / "config.json").read_text())
    assert "text_config" not in fields and "rope_parameters" not in fields
    text, drawn = reopened(folder).config.text_config, published_config("qwen2_5_vl").text_config
    assert text.rope_parameters["mrope_section"] == drawn.rope_parameters["mrope_section"]
    assert (text.hidden_size, text.vocab_size) == (drawn.hidden_size, drawn.vocab_size)
