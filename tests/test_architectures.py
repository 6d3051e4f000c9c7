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
from architecture_table import PAGE
from tiny_models import MODEL_TYPES, NEWER, TINY, tiny_model

from sft_kernels.boundaries import DOCUMENTS
from sft_kernels.install import fused_kernels_of
from sft_play.data.collate import PackCollator
from sft_play.errors import ConfigError
from sft_play.training.isolation import check_cross_document

# Distances that come with the mask: packing is refused.
NEVER_PACKED = ("bloom",)


# Types with experts after attention that other types have, too. `make test-architectures` trains all
REPEATED = (
    *("deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "lfm2_moe"),
    *("qwen3_5_moe", "olmoe", "mixtral"),
    # and dense ones, whose layers are those of others with another norm, bias or scale
    *("ministral", "ministral3", "seed_oss", "smollm3", "hunyuan_v1_dense", "exaone4", "olmo2"),
    *("gemma", "starcoder2", "qwen3", "bamba", "gpt_neox"),
)
TRIED_TYPES = [
    pytest.param(name, marks=[pytest.mark.long] * (name in REPEATED))
    for name in (*MODEL_TYPES, *NEWER)
]


@pytest.mark.parametrize("model_type", TRIED_TYPES)
def test_a_packed_step_is_that_of_plain_peft_on_each_document_alone(model_type):
    config = settings("lora")
    plain = adapted(tiny_model(model_type), config)
    assert not any(hides_mistakes(weight) for weight in plain.parameters())
    made = fused(plain, config)
    reference = reference_step(plain)
    assert without_gradient(plain) == []
    if model_type in NEVER_PACKED:
        collator = PackCollator(0, MAX_SEQ_LEN, fused_kernels_of(made).reads_boundaries)
        with pytest.raises(ConfigError, match="TRAIN_PACKING=false"):
            check_cross_document(made, collator, TINY.vocabulary, CPU)
        return
    for is_packed in (True, False):
        found = gap(reference, trained_step(made, is_packed))
        assert found.is_rounding, f"{is_packed=}: {found}"


def hides_mistakes(weight: torch.Tensor) -> bool:
    """Return whether a weight is all zeros or all ones, as norms and biases begin."""
    return bool(torch.isin(weight, torch.tensor([0.0, 1.0])).all())


def offset_of_norms_forgotten(model: Any) -> None:
    """Scale by the weight where the model scales by 1 + weight."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight -= 1.0


def windows_forgotten(model: Any) -> None:
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            if getattr(holder, "sliding_window", None):
                holder.sliding_window = MAX_SEQ_LEN


def documents_joined(model: Any) -> None:
    """Let each document see those before it, at the positions of one text."""

    def join(module, args, kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name != DOCUMENTS}
        positions = torch.arange(kwargs["input_ids"].shape[1])[None]
        return args, {**kwargs, "position_ids": positions}

    model.register_forward_pre_hook(join, with_kwargs=True)


def experts_unscaled(model: Any) -> None:
    """Add up what the experts of a token return, whatever its router gave them."""

    def unscale(module, args):
        hidden, index, weights = args
        return hidden, index, torch.ones_like(weights)

    for experts in experts_of(model):
        experts.register_forward_pre_hook(unscale)


def first_expert_dead(model: Any) -> None:
    """Send no token to the first expert of each layer."""

    def avoid(module, args):
        hidden, index, weights = args
        return hidden, index, torch.where(index == 0, 0.0, weights)

    for experts in experts_of(model):
        experts.register_forward_pre_hook(avoid)


def experts_of(model: Any) -> list[Any]:
    """Return the modules that a layer calls for its experts: with adapters, the outermost of them."""
    found = [
        module
        for name, module in model.named_modules()
        if name.endswith(".experts") and not isinstance(module, torch.nn.ModuleList)
    ]
    assert found
    return found


MUTANTS = [
    ("gemma3", offset_of_norms_forgotten),
    ("mistral", windows_forgotten),
    ("llama", documents_joined),
    ("qwen3_5", documents_joined),
    ("gpt_oss", experts_unscaled),
    ("mixtral", first_expert_dead),
]


@pytest.mark.parametrize("model_type, break_it", MUTANTS)
def test_the_comparison_sees_a_mutant(model_type, break_it):
    config = settings("lora")
    plain = adapted(tiny_model(model_type), config)
    made = fused(plain, config)
    reference = reference_step(plain)
    break_it(made)
    found = gap(reference, trained_step(made, is_packed=True))
    assert max(found.logits, found.gradients) > 1e-2, found
    if break_it is first_expert_dead:
        assert any("experts" in name and "[0]" in name for name in without_gradient(made))


def test_the_page_has_a_row_for_every_model_type():
    written = PAGE.read_text(encoding="utf-8")
    assert [name for name in MODEL_TYPES if f"| `{name}` |" not in written] == []
