"""Add adapters to mixture-of-experts models, in PEFT's layout.

PEFT's "all-linear" is not used for them. For some model types it skips the experts. For others it
doubles the rank of gate_up_proj and adapts the router. It also confuses the names of shared experts
with those of the experts. This module selects what is adapted, by shape, even if PEFT cannot adapt
a linear layer. PEFT wraps it, and loads it again by the targets of adapter_config.json.
"""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import peft
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from peft.tuners.tuners_utils import cast_adapter_dtype
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import _get_submodules
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
    get_model_conversion_mapping,
)
from torch import nn
from transformers import PreTrainedModel

from sft_play.config.schema import LoraSection
from sft_play.data.limits import refuse_endless
from sft_play.errors import CheckpointError, ConfigError
from sft_play.models.adapter_state import ADAPTER, load_published, why_not_fitting
from sft_play.models.architecture import encoders_of
from sft_play.models.bnb import unpack_with_adapter
from sft_play.models.experts import (
    ExpertWeight,
    encoder_linears,
    expert_weights,
    is_adaptable_linear,
    is_named,
    layer_of,
    linear_names,
    reads_weight,
    routing_linears,
    source_of,
    wrap_shared,
)
from sft_play.plan.structure import FUSED, with_fused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterTargets:
    """The modules and parameters of a model that get adapters."""

    linears: tuple[str, ...]  # full names of linear layers
    experts: tuple[ExpertWeight, ...]


def names_targets(model: PreTrainedModel) -> bool:
    """Return whether PEFT would select wrong targets: with experts, encoders or other modules."""
    return bool(
        expert_weights(model)
        or routing_linears(model)
        or encoders_of(model)
        or _without_effect(model)
        or _unread_by_peft(model, linear_names(model))
    )


def choose_targets(
    model: PreTrainedModel, lora: LoraSection, in_encoders: bool = False
) -> AdapterTargets:
    """Return what `tuning.lora` adapts: all-linear excludes the output head and the routers.

    With `in_encoders`, linear layers of encoders with the same names are included.

    Raises: ConfigError for a name that the model lacks, or if the experts it requests do not exist.
    """
    linears = _chosen_linears(model, lora)
    experts = _chosen_experts(model, lora)
    if isinstance(lora.target_modules, list):
        names = [*linears, *(weight.name for weight in experts)]
        _refuse_unknown(model, lora, names)
    in_layers = lora.layers_to_transform
    if in_layers is not None:
        linears = [name for name in linears if layer_of(name) in in_layers]
        experts = [weight for weight in experts if layer_of(weight.name) in in_layers]
    if in_encoders:
        names = lora.target_modules
        every = encoder_linears(model)
        linears += [each for each in every if isinstance(names, str) or is_named(each, names)]
    unread = _unread_by_peft(model, [*linears, *(weight.module_name for weight in experts)])
    if unread:
        words = f"{_last_words(unread)}: PEFT {peft.__version__} does not load them once saved"
        if isinstance(lora.target_modules, list):
            raise ConfigError(f"tuning.lora.target_modules: no adapters on {words}; leave that out")
        logger.info("adapters: none on %s", words)
        linears = [name for name in linears if name not in unread]
        experts = [weight for weight in experts if weight.module_name not in unread]
    if experts:
        _refuse_unsupported(lora)
    return AdapterTargets(tuple(linears), tuple(experts))


def adapter_config(
    model: PreTrainedModel, targets: AdapterTargets, config: LoraConfig
) -> LoraConfig:
    """Return the config with targets by which plain PEFT finds the same modules and parameters."""
    renamed = _renamed_by_peft(model, targets.linears)
    modules = [name for name in targets.linears if name not in renamed]
    parameters = [weight.name for weight in targets.experts]
    # if PEFT would confuse a linear layer's name with that of experts, the layer is named by its
    # weight
    parameters += [f"{name}.weight" for name in targets.linears if name in renamed]
    every_parameter = [weight.name for weight in expert_weights(model)]
    every_module = [name for name, _ in model.named_modules()]
    for name in every_module:
        if is_adaptable_linear(model.get_submodule(name)):
            every_parameter.append(f"{name}.weight")
    return replace(
        config,
        target_modules=_targets(modules, every_module, bool(encoders_of(model))),
        target_parameters=_without_layers(parameters, every_parameter) or None,
    )


def add_expert_adapters(
    model: PreTrainedModel, config: LoraConfig, shares_experts: bool = False
) -> PeftModel:
    """Return the model with the adapters of `config`, whose targets `adapter_config` has set.

    With `shares_experts`, the experts of a layer have one adapter per parameter.

    PEFT wraps what it can find by `target_modules`. The rest is wrapped here by PEFT's method for
    one module. PEFT's search would skip parameters in 4 bits. It would also compute a linear layer
    that is named by its weight with a full copy of that weight.
    """
    wanted = config.target_parameters
    if not wanted:
        return get_peft_model(model, config)
    experts = [weight for weight in expert_weights(model) if is_named(weight.name, wanted)]
    linears = [name for name in linear_names(model) if is_named(f"{name}.weight", wanted)]
    modules = config.target_modules or DUMMY_TARGET_MODULES
    adapted = get_peft_model(model, replace(config, target_modules=modules, target_parameters=None))
    for name in linears:
        _wrap(adapted, name)
    for weight in experts:
        if shares_experts:
            wrap_shared(adapted, ADAPTER, weight)
        else:
            _wrap(adapted, weight.module_name, weight.parameter_name)
        unpack_with_adapter(adapted.base_model.model.get_submodule(weight.module_name))
    cast_adapter_dtype(adapted.base_model, ADAPTER)
    saved = adapted.peft_config[ADAPTER]
    saved.target_parameters = wanted
    if modules == DUMMY_TARGET_MODULES:
        saved.target_modules = []
    return adapted


def load_frozen_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Return the base model with the adapter of a folder, frozen, also over a 4-bit base.

    Raises: CheckpointError if a tensor of either has no counterpart.
    """
    config = LoraConfig.from_pretrained(folder)
    if isinstance(config.target_modules, str):
        _refuse_endless(config.target_modules, base)
    config.inference_mode = True
    config.base_model_name_or_path = None  # PEFT warns if the base was moved
    adapted = add_expert_adapters(base, config)
    try:
        load_published(adapted, folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; is {base.name_or_path or 'this'} the base it was trained on? Set MODEL_NAME "
            "to its base, or get the whole adapter again"
        ) from error
    return adapted.eval()


def _refuse_endless(pattern: str, base: PreTrainedModel) -> None:
    """Raise DataError for a layer pattern that backtracks endlessly on a model's names."""
    what = f"target_modules={pattern[:100]} of adapter_config.json"
    remedy = "write the names of the layers there, as a list"
    refuse_endless(
        lambda: [re.fullmatch(pattern, name) for name, _ in base.named_modules()], what, remedy
    )


def load_adapter_weights(adapted: PeftModel, folder: str) -> None:
    """Load the weights of a saved adapter into adapters that were just added.

    Raises: ConfigError if the saved adapter has other tensors.
    """
    try:
        load_published(adapted, folder, is_trainable=True)
    except (RuntimeError, CheckpointError) as error:  # RuntimeError: different sizes
        raise ConfigError(
            f"model.adapter={folder}: no adapter of this model and these settings "
            f"({why_not_fitting(error)}); set MODEL_NAME to its base, and leave TUNING_LORA_* out"
        ) from error


def _chosen_linears(model: PreTrainedModel, lora: LoraSection) -> list[str]:
    names = linear_names(model)
    if isinstance(lora.target_modules, list):
        return [name for name in names if is_named(name, lora.target_modules)]
    refused = _without_effect(model)
    if refused:
        logger.info(
            "adapters: none on %s: they would have no effect or no gradient", _last_words(refused)
        )
    left_out = refused | routing_linears(model)
    head = model.get_output_embeddings()
    return [
        name for name in names if name not in left_out and model.get_submodule(name) is not head
    ]


def _without_effect(model: PreTrainedModel) -> set[str]:
    """Return the linear layers whose adapters would have no effect.

    PEFT refuses those that it knows. For the others, a module multiplies by `self.<name>.weight`,
    or computes without a gradient. For example, the modules that choose the tokens of sparse
    attention run without a gradient.
    """
    refused: set[str] = set()
    unmoved = _without_gradient(model)
    for name in linear_names(model):
        parent_name, _, word = name.rpartition(".")
        if name.startswith(unmoved) or reads_weight(word, type(model.get_submodule(parent_name))):
            refused.add(name)
            continue
        try:
            LoraModel._check_target_module_compatiblity(None, LoraConfig(), model, word)
        except ValueError:
            refused.add(name)
    return refused


def _unread_by_peft(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of modules whose saved adapters PEFT could not assign to a module."""
    # PEFT renames adapters on load as transformers renames a checkpoint of the model type
    saved = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    tensors = dict.fromkeys(saved, torch.empty(0))
    read = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), tensors)
    return {name for key, name in saved.items() if key not in read}


def _last_words(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _without_gradient(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of the modules inside a forward method under no_grad."""
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if re.search(r"@torch\.no_grad\(\)\s+(@.*\s+)*def forward\(", source_of(type(module)))
    )


def _chosen_experts(model: nn.Module, lora: LoraSection) -> list[ExpertWeight]:
    weights = expert_weights(model)
    is_asked = lora.experts in ("per_expert", "shared")
    if is_asked and not weights:
        form = " in 3-D parameters" if routing_linears(model) else ""
        raise ConfigError(
            f"tuning.lora.experts={lora.experts}: the model has no experts{form}; set "
            "TUNING_LORA_EXPERTS=auto"
        )
    if lora.experts == "none":
        return []
    if is_asked or not isinstance(lora.target_modules, list):
        return weights
    wanted = with_fused(lora.target_modules)
    return [weight for weight in weights if is_named(weight.name, wanted)]


def _refuse_unknown(model: nn.Module, lora: LoraSection, chosen: list[str]) -> None:
    targets = lora.target_modules
    fused_parts: set[str] = set()
    for fused, parts in FUSED:
        if set(parts) <= set(targets) and any(is_named(name, [fused]) for name in chosen):
            fused_parts.update(parts)
    unknown = [
        target
        for target in targets
        if target not in fused_parts and not any(is_named(name, [target]) for name in chosen)
    ]
    if unknown:
        experts = [weight.name for weight in expert_weights(model)]
        of_experts = [target for target in unknown if any(is_named(e, [target]) for e in experts)]
        if of_experts:
            raise ConfigError(
                f"tuning.lora.experts=none: target_modules names {of_experts[0]} of the experts; "
                "leave it out, or set TUNING_LORA_EXPERTS=auto"
            )
        nor_experts = " and no experts' parameter" if experts else ""
        known = _last_words([*linear_names(model), *experts])
        raise ConfigError(
            f"tuning.lora.target_modules: the model has no linear layer{nor_experts} "
            f"{', '.join(unknown)}; it has {known}"
        )


def _refuse_unsupported(lora: LoraSection) -> None:
    """Raise ConfigError for settings that PEFT does not support for experts' parameters."""
    leave_out = "or leave the experts out with TUNING_LORA_EXPERTS=none"
    if lora.dropout:
        raise ConfigError(
            f"tuning.lora.dropout={lora.dropout}: adapters of experts change the weights, and "
            f"PEFT has no dropout there; set TUNING_LORA_DROPOUT=0, {leave_out}"
        )
    if lora.use_dora:
        raise ConfigError(
            "tuning.lora.use_dora=true: PEFT has no DoRA for the adapters of experts; set "
            f"TUNING_LORA_USE_DORA=false, {leave_out}"
        )
    if lora.init_lora_weights == "orthogonal":
        raise ConfigError(
            "tuning.lora.init_lora_weights=orthogonal: PEFT has none for the adapters of experts; "
            f"set TUNING_LORA_INIT_LORA_WEIGHTS=default, {leave_out}"
        )


def _renamed_by_peft(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names that PEFT would confuse with experts, as in checkpoints of transformers 4.

    It calls PEFT, because the names that it converts depend on the model type and its version.
    """
    conversions = get_model_conversion_mapping(model)
    by_word: dict[str, list[str]] = {}
    for name in names:
        by_word.setdefault(name.rpartition(".")[2], []).append(name)
    renamed: set[str] = set()
    for word, of_word in by_word.items():
        config = LoraConfig(target_modules=[word])
        try:
            convert_peft_config_for_transformers(config, model, conversions)
            is_kept = word in config.target_modules
        except ValueError:  # PEFT requires the other half of a fused parameter
            is_kept = False
        if not is_kept:
            renamed.update(of_word)
    return renamed


def _without_layers(names: list[str], every_name: list[str]) -> list[str]:
    """Return the names without their layers if these match the same parameters; sorted."""
    short = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in names})
    return short if _names_exactly(short, names, every_name) else sorted(names)


def _targets(names: list[str], every_name: list[str], has_encoders: bool) -> list[str] | str:
    """Return targets by which PEFT finds `names`: last words, or an expression with encoders.

    The expression ends in one group, of last words if these suffice: vLLM reads them from there.
    PEFT would shorten a list of full names to endings that also match modules of an encoder.
    """
    words = sorted({name.rpartition(".")[2] for name in names})
    if not names or not has_encoders:
        return words if _names_exactly(words, names, every_name) else names
    path = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    expression = rf"{re.escape(path)}\..*\.({'|'.join(words)})"
    found = {name for name in every_name if re.fullmatch(expression, name)}
    if found == set(names):
        return expression
    rests = (re.escape(name.removeprefix(f"{path}.")) for name in names)
    return rf"{re.escape(path)}\.({'|'.join(rests)})"


def _names_exactly(targets: list[str], names: list[str], every_name: list[str]) -> bool:
    """Return whether the targets make PEFT find exactly `names`."""
    return {name for name in every_name if is_named(name, targets)} == set(names)


def _wrap(model: PeftModel, name: str, parameter_name: str | None = None) -> None:
    """Let PEFT wrap one module, or one parameter of a module that may already be wrapped."""
    tuner = model.base_model
    parent, child, child_name = _get_submodules(tuner.model, name)
    key = name if parameter_name is None else f"{name}.{parameter_name}"
    tuner._create_and_replace(
        model.peft_config[ADAPTER],
        ADAPTER,
        child,
        child_name,
        parent,
        current_key=key,
        parameter_name=parameter_name,
    )
