"""The class of a checkpoint, and its text part, on published composite checkpoints."""

import pytest
import torch
from published_models import published_config, published_model
from tiny_models import tiny_model
from transformers import PreTrainedConfig

from sft_kernels.modules import decoder_of
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models.architecture import auto_class_of, decoder_layers, drop_encoders, encoders_of

VISION = ["model.multi_modal_projector", "model.vision_tower"]
ENCODERS = {
    "gemma3": VISION,
    "mistral3": VISION,
    "qwen3_5": ["model.visual"],
    "qwen2_5_vl": ["model.visual"],
    "llama4": ["multi_modal_projector", "vision_model"],
    "smolvlm": ["model.connector", "model.vision_model"],
    # layers and parts inside the decoder that a text passes over
    "mllama": [
        "model.language_model.layers.1",
        "model.multi_modal_projector",
        "model.vision_model",
    ],
    "ernie4_5_vl_moe": [
        "model.language_model.layers.1.mlp.vision_moe",
        "model.resampler_model",
        "model.vision_tower",
    ],
    # a config without a part for text
    "phi4_multimodal": [
        "model.embed_tokens_extend.audio_embed",
        "model.embed_tokens_extend.image_embed",
    ],
}


@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoders_are_what_a_text_does_not_run(model_type):
    model = published_model(model_type)
    ids = torch.arange(2, 18)[None]
    try:
        before = model(input_ids=ids, use_cache=False).logits
    except AttributeError as error:  # Llama 4 of transformers 5.24
        pytest.skip(f"the model's own code does not run: {error}")
    assert sorted(encoders_of(model)) == ENCODERS[model_type]
    for encoder in encoders_of(model).values():
        for parameter in encoder.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    drop_encoders(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert not any(weight.isnan().any() for weight in decoder_of(model).parameters()) or (
        model_type == "mllama"  # its layers keep their numbers
    )


def test_the_stack_of_layers_is_that_of_the_language_model():
    model = published_model("paligemma")
    encoder = model.model.vision_tower
    encoder.encoder.layers.extend([encoder.encoder.layers[0]] * 9)  # its encoder is deeper
    assert decoder_layers(model) == list(model.model.language_model.layers)


def test_llama_4_has_its_decoder_without_the_head():
    model = published_model("llama4")
    assert decoder_of(model) is model.language_model.model


def test_a_model_of_text_has_no_encoders():
    assert encoders_of(tiny_model("qwen3_5")) == {}


@pytest.mark.parametrize(
    "model_type, declared, expected",
    [
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("mistral3", "Mistral3ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
        ("qwen3_5", None, "AutoModelForMultimodalLM"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "AutoModelForMultimodalLM"),
        ("mllama", "MllamaForConditionalGeneration", "AutoModelForImageTextToText"),
    ],
)
def test_the_class_is_the_one_that_is_declared(model_type, declared, expected):
    config = published_config(model_type)
    config.architectures = [declared] if declared else None
    assert auto_class_of(config).__name__ == expected


def test_a_type_that_generates_no_text_is_named():
    class OtherConfig(PreTrainedConfig):
        model_type = "other"

    with pytest.raises(EnvironmentFault, match="no class of its model_type other that generates"):
        auto_class_of(OtherConfig())


@pytest.mark.parametrize("model_type", ["kosmos-2", "pix2struct", "t5gemma2", "blip-2"])
def test_a_model_that_needs_more_than_text_is_refused_with_what_it_needs(model_type):
    with pytest.raises(ConfigError, match=r"cannot run on text only: .*set MODEL_NAME"):
        encoders_of(published_model(model_type))
