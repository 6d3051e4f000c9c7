"""The class that a checkpoint declares, and which part of that class reads text.

A composite model has a language model, which is trained, and towers beside it for images or sound,
which are not. Both are found by structure. Imports no code of other rooms.
"""

from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.errors import EnvironmentFault

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class_of(config: PretrainedConfig) -> type:
    """Return transformers' auto class that makes the class which a config declares.

    Where it declares none that transformers knows, a composite config is opened with its towers.

    Raises: EnvironmentFault for a config whose models generate no text after a prompt.
    """
    own_code = getattr(config, "auto_map", None) or {}
    made = {}  # the name of the class that each auto class makes
    for auto_class in AUTO_CLASSES:
        if auto_class.__name__ in own_code:
            return auto_class
        model_class = auto_class._model_mapping.get(type(config), None)
        if model_class is not None:
            made[auto_class] = model_class.__name__
    declared = config.architectures or []
    for auto_class, name in made.items():
        if name in declared:
            return auto_class
    if not made:
        raise EnvironmentFault(
            f"model_type {config.model_type}: transformers has no class for it that generates text "
            "after a prompt; set MODEL_NAME to a causal language model"
        )
    return list(made)[-1 if is_composite(config) else 0]


def empty_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Return the model that a config describes, on the meta device."""
    with torch.device("meta"):
        return auto_class_of(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )


def is_composite(config: PretrainedConfig) -> bool:
    """Return whether the language model's config is a part of this one."""
    return config.get_text_config() is not config


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the stack of layers of a model without adapters, without its output head.

    Of ModernBERT's decoder get_decoder finds the head, which is called `decoder` there; of Llama 4
    with its tower it finds the language model with its head.
    """
    found = model.get_decoder()
    if found is model.get_output_embeddings():
        return model.base_model
    while found is not model and _has_head(found):
        model, found = found, found.get_decoder()
    return found


def towers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a composite model that read no text, by name: towers and projectors.

    A model of text has none.
    """
    if not is_composite(model.config):
        return {}
    text = {decoder_of(model), model.get_input_embeddings(), model.get_output_embeddings()}
    return dict(_outside(model, "", text))


def drop_towers(model: PreTrainedModel) -> None:
    """Free the towers of a model, which reads text alone from then on."""
    for name in towers_of(model):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, None)


def text_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that read text with their names, in the order of `named_modules`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    apart: set[nn.Module] = set()
    if isinstance(base, PreTrainedModel):
        for tower in towers_of(base).values():
            apart.update(tower.modules())
    return [(name, module) for name, module in model.named_modules() if module not in apart]


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the longest stack of layers that read text and can be checkpointed."""
    longest: list[GradientCheckpointingLayer] = []
    for _, module in text_modules(model):
        if not isinstance(module, nn.ModuleList) or len(module) <= len(longest):
            continue
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            longest = list(module)
    return longest


def _has_head(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None


def _outside(module: nn.Module, name: str, text: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the largest modules that neither are, nor are in, nor hold one of `text`."""
    if module in text:
        return []
    if not any(part in text for part in module.modules()):
        return [(name, module)]
    found = []
    for own, child in module.named_children():
        found += _outside(child, f"{name}.{own}".lstrip("."), text)
    return found
