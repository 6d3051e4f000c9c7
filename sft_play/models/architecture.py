"""Find the class that a checkpoint declares, and the part of that class that reads text.

A composite model has a language model, which is trained, and encoders for images or sound, which
are not. Both are found by structure. This module imports no code of other packages.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_kernels.linear_attention import bind_by_device
from sft_kernels.modules import decoder_of
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.models.stored_weights import replaced

ENCODERS = "encoder_names"  # attribute of a model: found only once
TOKENS = 8
AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class_of(config: PretrainedConfig) -> type:
    """Return transformers' auto class that builds the class declared by a config.

    If a config declares no class that transformers knows, a composite config is opened with its
    encoders.

    Raises: EnvironmentFault for a config whose models do not generate text after a prompt.
    """
    own_code = getattr(config, "auto_map", None) or {}
    made = {}  # the name of the class that each auto class builds
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
            f"model.name={config.name_or_path}: transformers has no class of its model_type "
            f"{config.model_type} that generates text after a prompt; set MODEL_NAME to a causal "
            "language model"
        )
    return list(made)[-1 if is_composite_config(config) else 0]


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """Return the model that a config describes, on the meta device."""
    with torch.device("meta"):
        model = auto_class_of(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    bind_by_device(model)
    return model


def empty_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class and config on the meta device, never sharded by ZeRO-3."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # accepts any mask
    with replaced(deepspeed, _hf_deepspeed_config_weak_ref=None), torch.device("meta"):
        twin = type(model)(config)
    bind_by_device(twin)  # packaged kernels write anywhere on the GPU if tensors have no data
    return twin


def is_composite_config(config: PretrainedConfig) -> bool:
    """Return whether the language model's config is only a part of this one."""
    return config.get_text_config() is not config


def encoders_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a composite model that read no text, by name: encoders and projectors.

    They are the modules next to the decoder, and modules inside it that text-only rows do not run,
    e.g. the cross-attention of Mllama. A text-only model has none.

    Raises: ConfigError for a model that cannot run on text only.
    """
    if not model.config.sub_configs:
        return {}
    names = vars(model).get(ENCODERS)
    if names is None:
        names = vars(model)[ENCODERS] = _encoder_names(empty_twin(model))
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}


def _encoder_names(twin: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of an empty model's encoders."""
    try:
        text = {twin.get_input_embeddings(), twin.get_output_embeddings()}
        ran = _modules_of_a_text(twin)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.name={twin.config.name_or_path}: {type(twin).__name__} cannot run on text "
            f"only: {first_line(error)}; set MODEL_NAME to a model that can"
        ) from None
    found = {}
    if is_composite_config(twin.config):
        found |= _apart(twin, "", text | {decoder_of(twin)})
    if ran:
        for name, module in _apart(twin, "", text | ran, enters=True).items():
            is_leaf = next(module.children(), None) is None  # its weight may be read by its name
            if not is_leaf and not f"{name}.".startswith(tuple(f"{encoder}." for encoder in found)):
                found[name] = module
    return tuple(found)


def _modules_of_a_text(twin: PreTrainedModel) -> set[nn.Module]:
    """Return the modules of an empty model that text-only rows run; none if this is unknown.

    Experts are skipped: the values of the tensors decide which expert gets a token.

    Raises: TypeError, ValueError if the model requires inputs other than text.
    """
    ran: set[nn.Module] = set()

    def note(module: nn.Module, _: tuple[Any, ...]) -> None:
        ran.add(module)

    for module in twin.modules():
        module.register_forward_pre_hook(note)
        own = module.parameters(recurse=False)
        has_experts = any(weight.dim() == 3 and len(weight) > 1 for weight in own)
        if has_experts and not isinstance(module, _ConvNd):
            module.forward = lambda hidden, *_, **__: hidden
    inputs = {
        "input_ids": torch.zeros(1, TOKENS, dtype=torch.int64, device="meta"),
        "position_ids": torch.arange(TOKENS, device="meta")[None],
        "attention_mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"),
        "use_cache": False,
    }
    parameters = inspect.signature(type(twin).forward).parameters
    if "kwargs" not in parameters:
        inputs = {name: value for name, value in inputs.items() if name in parameters}
    try:
        with torch.no_grad():
            twin.eval()(**inputs)
    except RuntimeError:  # it branches on values, which an empty model does not have
        return set()
    return ran


def drop_encoders(model: PreTrainedModel) -> None:
    """Free the encoders of a model, which reads only text from then on."""
    for name in encoders_of(model):
        holder, _, own = name.rpartition(".")
        holder = model.get_submodule(holder)
        if not isinstance(holder, nn.ModuleList):  # e.g. a layer of Mllama, which is skipped
            setattr(holder, own, None)


def text_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that read text with their names, in the order of `named_modules`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    apart: set[nn.Module] = set()
    if isinstance(base, PreTrainedModel):
        for encoder in encoders_of(base).values():
            apart.update(encoder.modules())
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


def replace_tensors(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a model. Tied ones stay tied."""
    replaced = functools.cache(replace)  # once for tied ones
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = replaced(tensor)


def _apart(
    module: nn.Module, name: str, kept: set[nn.Module], enters: bool = False
) -> dict[str, nn.Module]:
    """Return the largest modules that contain none of `kept`, and skip the modules inside those.

    With `enters`, also search the modules inside `kept`.
    """
    if module in kept and not enters:
        return {}
    if not any(part in kept for part in module.modules()):
        return {name: module}
    found = {}
    for own, child in module.named_children():
        found |= _apart(child, f"{name}.{own}".lstrip("."), kept, enters)
    return found
