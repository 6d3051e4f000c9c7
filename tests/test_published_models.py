"""Tiny checkpoints of published types: every type is built, and its files are those of the hub."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from published_corrections import NOT_BUILT, OTHER_LOGITS, READS_AHEAD, REFUSED_TEXT
from published_models import (
    BUILT_TYPES,
    IMAGE_TEXT_TYPES,
    PEOPLES,
    published_class,
    published_model,
    shrink_default,
    write_published,
)
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Parts of the message of each reason
REASONS = {"timm": "timm", "config": "encoder.*decoder"}
TYPES = [
    pytest.param(name, marks=() if name in PEOPLES else pytest.mark.architectures)
    for name in BUILT_TYPES
]


@pytest.fixture(scope="module", autouse=True)
def configs_have_short_names():
    """Let a config in a message be its class: huggingface_hub formats one that nobody reads.

    For each config inside another it tries the types of the field, and says why each is another.
    """
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(transformers.PreTrainedConfig, "__repr__", object.__repr__)
        yield


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


def test_every_type_of_transformers_is_built_or_has_a_reason():
    assert NOT_BUILT.keys() < set(IMAGE_TEXT_TYPES)
    assert {*REFUSED_TEXT, *OTHER_LOGITS, *READS_AHEAD} <= set(BUILT_TYPES)


@pytest.mark.parametrize("model_type", sorted(NOT_BUILT.keys() - {"shieldgemma2"}))
def test_a_type_that_is_not_built_cannot_be(model_type):
    if "timm" in NOT_BUILT[model_type] and transformers.utils.is_timm_available():
        pytest.skip("timm is installed")
    message = next(text for word, text in REASONS.items() if word in NOT_BUILT[model_type])
    with pytest.raises((ImportError, ValueError), match=message):
        config = shrink_default(model_type)
        published_class(config)(config)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # diffusion_gemma draws a canvas
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("model_type", TYPES)
def test_the_declared_class_opens_the_folder_as_the_model_that_was_written(model_type, published):
    folder = published(model_type)
    declared = json.loads((folder / "config.json").read_text())["architectures"]
    written = published_model(model_type)
    assert declared == [type(written).__name__]
    opened = open_folder(type(written), folder)
    found = opened.state_dict()
    differing = {
        name
        for name, tensor in written.state_dict().items()
        if not torch.equal(found[name], tensor)
    }
    # Opening clears the row of padding
    of_kosmos = {"text_model.model.embed_tokens.weight", "text_model.lm_head.weight"}
    assert differing == (of_kosmos if model_type == "kosmos-2" else set())
    ids = torch.arange(5, 17)[None]
    if model_type in REFUSED_TEXT:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=REFUSED_TEXT[model_type]):
            logits_of(opened, ids)
        return
    logits = logits_of(opened, ids)
    # mapped weights lie at other addresses, for which some CPUs sum in another order
    torch.testing.assert_close(logits, logits_of(written, ids), rtol=1e-5, atol=1e-5)
    assert (logits.shape[1] != ids.shape[1]) == (model_type in OTHER_LOGITS)
    if model_type not in OTHER_LOGITS:
        changed = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
        moved = (logits_of(opened, changed) - logits)[:, :-1].abs().max()
        assert (moved > 1e-4) == (model_type in READS_AHEAD)


def open_folder(model_class: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Open a folder, in which no tensor may be missing or unknown."""
    if model_class.__name__ == "Qwen2_5OmniForConditionalGeneration":
        return model_class.from_pretrained(folder)  # its class returns no loading info
    opened, loading = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return opened


@pytest.mark.parametrize("model_type", TYPES)
def test_every_kind_of_layer_is_in_the_tiny_config(model_type):
    tiny = shrink_default(model_type).get_text_config()
    default = CONFIG_MAPPING[model_type]().get_text_config()
    for kinds in ("layer_types", "mlp_layer_types"):
        published_kinds = set(vars(default).get(kinds) or ())
        assert published_kinds <= set(vars(tiny).get(kinds) or ()), kinds


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
            "kimi_k25",
            "language_model.model.layers.1.mlp.experts.0.gate_proj.weight "
            "language_model.lm_head.weight vision_tower.encoder.blocks.0.wqkv.weight "
            "mm_projector.pre_norm.weight mm_projector.proj.0.weight",
        ),
        (
            "qwen2_audio",
            "language_model.model.layers.0.self_attn.q_proj.weight audio_tower.layers.0.fc1.weight",
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


def test_a_template_lies_where_its_repositories_have_it(published):
    files = {path.name for path in published("mistral3").iterdir()}
    assert {"chat_template.json", "processor_config.json", "preprocessor_config.json"} <= files
    assert "chat_template.jinja" not in files
    assert "chat_template.jinja" in {path.name for path in published("qwen3_5").iterdir()}
