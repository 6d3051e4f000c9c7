"""One small case of each model type: a packed step through the fused kernels, and what breaks it.

`make test-architectures` has the whole table, tests/test_architectures_table.py.
"""

from typing import Any

import pytest
import torch
from architecture_steps import (
    CPU,
    MAX_SEQ_LEN,
    adapted,
    fused,
    gap,
    reference_step,
    settings,
    trained_step,
    without_gradient,
)
from tiny_models import MODEL_TYPES, OTHERS, TINY, tiny_model

from sft_play.data.collate import PackCollator
from sft_play.errors import ConfigError
from sft_play.models.fast.install import uses_varlen_attention
from sft_play.training.cross_document import check_cross_document

LISTED = [model_type for model_type in MODEL_TYPES if model_type not in OTHERS]
# Positions that are counted from the mask, or distances that ignore it: packing is refused.
NEVER_PACKED = ("opt", "bloom")

NOT_YET = (
    *("falcon_h1", "gpt_oss", "lfm2", "lfm2_moe", "qwen3_5", "qwen3_next", "qwen3_5_moe"),
    *("granitemoehybrid", "nemotron_h", "bamba", "jamba", "mamba2"),
)


def cases() -> list[Any]:
    unfinished = pytest.mark.xfail(reason="packing of these types is being built", strict=False)
    made: list[Any] = []
    for model_type in MODEL_TYPES:
        marks = [unfinished] if model_type in NOT_YET else []
        made.append(pytest.param(model_type, marks=marks))
    return made


@pytest.mark.parametrize("model_type", cases())
def test_a_packed_step_is_that_of_plain_peft_on_each_document_alone(model_type: str) -> None:
    config = settings("lora")
    plain = adapted(tiny_model(model_type), config)
    assert not any(hides_mistakes(weight) for weight in plain.parameters())
    made = fused(plain, config)
    reference = reference_step(plain)
    assert without_gradient(plain) == []
    if model_type in NEVER_PACKED:
        collator = PackCollator(0, MAX_SEQ_LEN, uses_varlen_attention(made))
        with pytest.raises(ConfigError, match="TRAIN_PACKING=false"):
            check_cross_document(made, collator, TINY.vocabulary, CPU)
    found = gap(reference, trained_step(made, is_packed=model_type not in NEVER_PACKED))
    assert found.is_rounding, found


def hides_mistakes(weight: torch.Tensor) -> bool:
    """Return whether a weight is all zeros or all ones, as norms and biases begin."""
    return bool(torch.isin(weight, torch.tensor([0.0, 1.0])).all())
