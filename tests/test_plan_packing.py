"""sft_play.plan.needs: where rows are packed, and what attention needs then."""

from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan.needs import PackingChoice, needs_boundaries, resolve_packing


def resolved(settings: dict[str, Any], model_type: str) -> PackingChoice:
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, name = path.split(".")
        sections.setdefault(section, {})[name] = value
    return resolve_packing(Config.model_validate(sections), model_type)


@pytest.mark.parametrize(
    "settings, model_type, expected",
    [
        ({}, "llama", True),
        ({}, "qwen3_5", True),
        ({}, "an_architecture_of_tomorrow", True),
        ({}, "bloom", False),
        ({"train.packing": True}, "bloom", True),
        ({"train.packing": False}, "llama", False),
        ({"tuning.backend": "unsloth", "model.max_seq_len": 8192}, "llama", True),
        ({"tuning.backend": "unsloth"}, "olmo", False),
        ({"tuning.backend": "unsloth", "model.max_seq_len": 8193}, "llama", False),
        ({"tuning.backend": "unsloth", "tuning.mode": "full"}, "llama", False),
        ({"tuning.backend": "unsloth", "train.packing": True}, "olmo", True),
        ({"tuning.backend": "unsloth", "train.packing": False}, "llama", False),
    ],
    ids=str,
)
def test_packing_is_resolved(settings, model_type, expected):
    choice = resolved(settings, model_type)
    assert choice.is_packed == expected
    is_auto = "train.packing" not in settings  # what was asked for needs no reason
    assert (choice.because is not None) == (is_auto and not expected)


def test_packing_for_full_training_by_unsloth_is_refused():
    settings = {"tuning.backend": "unsloth", "tuning.mode": "full", "train.packing": True}
    with pytest.raises(ConfigError, match=r"train.packing=true: .*TRAIN_PACKING=auto"):
        resolved(settings, "llama")


def test_only_attention_that_reads_position_ids_goes_without_boundaries():
    for name in ("auto", "sdpa", "eager"):
        assert not needs_boundaries(name)
    assert needs_boundaries("flash_attention_2")
    assert needs_boundaries("auto", has_fast_attention=True)
