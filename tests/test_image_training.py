"""A step of rows with images is that of plain transformers: packed, padded, and by itself."""

import importlib.util

import pytest
from architecture_steps import Gap, adapted, fused, gap, settings
from image_models import WITH_TORCHVISION, image_model, image_tokenizer, write_image_model
from image_steps import conversations, reference_step, stored, trained_step
from test_published_training import without_dropout

from sft_play.config.schema import Config
from sft_play.data import processor
from sft_play.data.processor import Processor
from sft_play.errors import EnvironmentFault
from sft_play.models.checkpointing import checkpoint_layers

TYPES = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "internvl", "glm4v", "llava"),
)


def gap_of_step(model_type, tokenizer, folder, packed: bool, **tuning) -> tuple[Gap, set[str]]:
    """Return how much a run's step differs from plain PEFT's, and which weights have gradients."""
    base = write_image_model(model_type, folder / "base", tokenizer)
    chosen = settings(tuning.get("mode", "lora"))
    values = chosen.model_dump()
    values["tuning"] |= tuning
    config = Config.model_validate({**values, "model": {"name": str(base)}})
    own = image_tokenizer(tokenizer, model_type)
    rows = conversations(folder)
    samples = stored(rows, config, own, folder / "store")
    model = image_model(own, model_type).train()
    for part in (model.config, model.config.get_text_config()):  # as a run does
        part.use_cache = False
    without_dropout(model)
    plain = adapted(model, config)
    made = fused(plain, config)
    checkpoint_layers(made, 0)
    expected = reference_step(plain, rows, samples, config, own)
    found = gap(expected, trained_step(made, samples, config, own, packed))
    return found, {name for name, gradient in expected.gradients.items() if gradient.any()}


# of these types rows are padded in `make test`, too: linear attention, images that attend to all of
# themselves, features added to layers; the others differ in what comes before the text model
PADDED = ("qwen3_5", "gemma3", "qwen3_vl")
STEPS = [
    pytest.param(name, packed, marks=[pytest.mark.long] * (not packed and name not in PADDED))
    for name in TYPES
    for packed in (True, False)
] + [
    pytest.param(*case.values, packed, marks=case.marks)
    for case in WITH_TORCHVISION
    for packed in (True, False)
]


@pytest.mark.parametrize(("model_type", "packed"), STEPS)
def test_a_step_is_that_of_plain_peft(model_type, packed, tokenizer, tmp_path):
    found, _ = gap_of_step(model_type, tokenizer, tmp_path, packed)
    assert found.is_rounding, found


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_so_is_one_that_trains_encoders(model_type, mode, tokenizer, tmp_path):
    found, reached = gap_of_step(model_type, tokenizer, tmp_path, True, mode=mode, encoders=mode)
    assert found.is_rounding, found
    assert any("visual" in name or "vision_tower" in name for name in reached)
    assert any("merger" in name or "projector" in name for name in reached) == (
        mode == "full" or model_type == "qwen3_vl"  # Gemma's projector is no linear layer
    )


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="it is installed")
def test_a_processor_that_needs_torchvision_says_so(tokenizer, tmp_path):
    base = write_image_model("mistral3", tmp_path / "base", tokenizer)
    config = Config.model_validate({"model": {"name": str(base)}})
    with pytest.raises(EnvironmentFault, match="pip install torchvision"):
        Processor(config, tokenizer).write(conversations(tmp_path)[0])


def test_a_processor_of_an_older_form_is_refused(tokenizer, tmp_path, monkeypatch):
    from transformers.models.gemma3n import processing_gemma3n

    base = write_image_model("gemma3", tmp_path / "base", tokenizer)
    monkeypatch.setattr(
        processor, "_processor_class", lambda _: processing_gemma3n.Gemma3nProcessor
    )
    config = Config.model_validate({"model": {"name": str(base)}})
    with pytest.raises(EnvironmentFault, match="does not say what it writes for an image"):
        Processor(config, tokenizer).write(conversations(tmp_path)[0])
