"""A step of rows with images is that of plain transformers: packed, padded, and by itself."""

import pytest
from architecture_steps import adapted, fused, gap, settings
from image_models import image_model, image_tokenizer, write_image_model
from image_steps import conversations, reference_step, stored, trained_step
from test_published_training import without_dropout

from sft_play.config.schema import Config

TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_that_of_plain_peft(model_type, packed, tokenizer, tmp_path) -> None:
    base = write_image_model(model_type, tmp_path / "base", tokenizer)
    chosen = settings("lora")
    config = Config.model_validate({**chosen.model_dump(), "model": {"name": str(base)}})
    own = image_tokenizer(tokenizer, model_type)
    rows = conversations(tmp_path)
    samples = stored(rows, config, own, tmp_path / "store")
    model = image_model(own, model_type).train()
    model.config.get_text_config().use_cache = False
    without_dropout(model)
    plain = adapted(model, chosen)
    made = fused(plain, chosen)
    expected = reference_step(plain, rows, samples, config, own)
    found = gap(expected, trained_step(made, samples, config, own, packed))
    assert found.is_rounding, found
