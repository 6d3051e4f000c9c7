"""Load a run's model with its backend, in the right dtype, on the right device.

Code that runs later works with a transformers model and need not know the backend.
"""

import contextlib
import logging
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import configuration_utils as generation_file

from sft_kernels.attention.forward import keep_soft_caps
from sft_kernels.e4m3.linear import has_float8
from sft_kernels.linear_attention import bind_by_device
from sft_kernels.process import Process
from sft_play.config.loader import environment
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.models import bnb, expert_parallel, lora, placement, sharding, weight_offloading
from sft_play.models.architecture import auto_class_of, drop_encoders, empty_twin, encoders_of
from sft_play.models.base_files import (
    growth_of_base,
    reading_grown,
    reading_stored,
    stored_config,
    stored_format,
    stores_own_head,
)
from sft_play.models.bnb import packing_experts
from sft_play.models.delivered import deliver, deliver_adapters
from sft_play.models.export import savable_generation_config
from sft_play.models.fast import install_fused_kernels
from sft_play.models.float8 import leave_to_each_rank, quantizing_to_float8
from sft_play.models.images import keep_encoders_in_their_type
from sft_play.models.positions import keep_angles_exact, refuse_longer_rows, with_stretched_rope
from sft_play.models.proofs import ProofStore
from sft_play.models.stored_weights import one_tensor_at_a_time
from sft_play.plan.base_model import require_base
from sft_play.plan.stored_as import StoredAs, keeps_mxfp4
from sft_play.runs.model_folder import refuse_unsafe_base

logger = logging.getLogger(__name__)

MISMATCHED = "ignore_mismatched_sizes"  # in transformers' error if shapes differ
# Tensors of a checkpoint that a model may leave unused; any other unused tensor is an error
MAY_BE_UNUSED = {
    r"(^|\.)(mtp|nextn|mtp_[a-z]+|eagle[a-z_]*)\.": "layers that predict further tokens",
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$": "buffers that the class computes",
    r"(^|\.)position_ids$": "a buffer that the class computes",
    r"\.(attn|attention|self_attention)\.(bias|masked_bias)$": "masks of GPT-2 and GPT-NeoX",
    r"^(v_head|value_head)\.": "the value head of a model trained by PPO",
    r"\.[kvq]_scale$": "scales of a quantized key-value cache",
}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Layers after the last one that predict further tokens, of DeepSeek V3, GLM 4.5, Step 3.5 and Ling:
# how configs name their number, and modules that no other layer has
FURTHER_LAYERS = re.compile(r"nextn|mtp")
OF_FURTHER_LAYERS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")


@dataclass(frozen=True)
class WeightPlaces:
    """Where a model's weights are stored: on one device, unless a field changes that."""

    zero_stage: int = 0  # of DeepSpeed
    is_fsdp: bool = False  # base weights are sharded across the ranks
    is_expert_parallel: bool = False  # each rank stores a part of the experts
    most_layers: int = 0  # maximum per GPU if model.device_map fills GPUs one after the other
    offloaded_layers: int = 0  # layers whose frozen weights are in host memory


ON_DEVICE = WeightPlaces()


def load_model(
    config: Config,
    process: Process,
    places: WeightPlaces = ON_DEVICE,
    proofs: ProofStore | None = None,
) -> PreTrainedModel:
    """Return the model to train, with adapters unless the mode is full, and with fused kernels.

    `proofs` are cached results of kernel checks from earlier starts.

    Raises: EnvironmentFault when the weights cannot be loaded; ConfigError when adapters match no
    layer.
    """
    if config.tuning.backend == "unsloth":
        from sft_play.models import unsloth  # not at the top: it patches transformers

        return unsloth.load_with_unsloth(config, process)
    model = base = load_base(config, process, places)
    deliver(model, config)
    if config.tuning.mode == "full":
        _freeze_what_its_class_freezes(model, config.tuning.encoders == "full")
    else:
        model = lora.add_adapters(model, config, lora.trainable_token_ids(config))
        deliver_adapters(model)
        if places.is_fsdp and is_quantized(config):
            check = bnb.refuse_wrong_unpacking
            sharding.shard_quantized(base, process, config.train.fsdp_offload, check)
        elif has_float8(base):
            leave_to_each_rank(model)
    if places.offloaded_layers:
        weight_offloading.offload_layers(model, base, process, places.offloaded_layers)
    if places.is_expert_parallel:
        expert_parallel.keep_local_experts(base, process)
    if places.is_fsdp:
        sharding.move_unsharded(model, process)
    sharding.run_one_token(base, process)
    install_fused_kernels(model, config, process, places.zero_stage, proofs)
    return model


def _freeze_what_its_class_freezes(model: PreTrainedModel, trains_encoders: bool) -> None:
    """Freeze modules that read no text, and what no gradient reaches, e.g. a balancing bias.

    The balancing bias is a router's. Encoders stay trainable with `trains_encoders`.

    transformers creates every parameter again when it loads weights, and makes all of them
    trainable.
    """
    made = empty_twin(model)
    frozen = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    for encoder in () if trains_encoders else encoders_of(model).values():
        encoder.requires_grad_(False)


def load_trained(model: PreTrainedModel, folder: str) -> None:
    """Load the weights that transformers saved from this model, under any names.

    Trainer would skip weights that are saved in pieces or under names that differ from the model's.
    """
    saved = type(model).from_pretrained(folder, dtype="auto", device_map="cpu").state_dict()
    model.load_state_dict({name: saved[name] for name in model.state_dict()})


def load_base(
    config: Config,
    process: Process,
    places: WeightPlaces = ON_DEVICE,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> PreTrainedModel:
    """Return the base model on this rank's device; no weight is frozen.

    Under ZeRO-3 and FSDP it is sharded; quantized weights under FSDP have no values yet. Under
    model.device_map it is on the GPUs of this process. Layers to offload are on the host. `dtype`
    is that of unquantized weights: None for training's, "auto" for that of the files.

    Raises: EnvironmentFault if weights cannot be loaded or are missing in the files; ConfigError
    for experts in 4 bits under ZeRO-3, and for a device map that does not match the modules.
    """
    require_base(config, environment())
    quantization = None
    if config.tuning.mode == "qlora":
        storage = bnb.storage_type(process.compute_dtype, places.zero_stage, places.is_fsdp)
        quantization = bnb.quantization_config(config, process.compute_dtype, storage)
    stored = config_to_load(config)
    if stores_own_head(config, stored):
        stored.get_text_config().tie_word_embeddings = stored.tie_word_embeddings = False
    found = stored_format(config, stored)
    options = {"config": stored, **attention_option(config)}
    options["dtype"] = dtype or weight_dtype(config, process.compute_dtype)
    if found is not None and dtype == "auto":
        options["dtype"] = getattr(torch, found.dtype)  # the files' dtype has 8 bits
    if found is not None and found.way == "packed":
        bnb.set_compute_dtype(stored, process.compute_dtype)
    elif quantization is not None:  # None would make transformers read quantized numbers as weights
        options["quantization_config"] = quantization
    devices = placement.resolve_device_map(config, process, stored, places.most_layers)
    if places.is_fsdp and not is_quantized(config) and config.train.fsdp_offload:
        devices = {"": torch.device("cpu")}
    if places.zero_stage < 3:
        options["device_map"] = devices
    # Some classes draw random weights that the files then replace. The adapters must not depend on
    # how many are drawn.
    gpus = list(process.devices) if process.is_gpu else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        stack.enter_context(reading_grown(growth_of_base(config)))
        if found is not None:
            keeps = keeps_mxfp4(config, found)
            stack.enter_context(reading_stored(found, process.device, keeps))
        stack.enter_context(_reading(config, process, found, places))
        if places.is_fsdp and is_quantized(config):
            stack.enter_context(sharding.keeping_local_rows(process, config.train.fsdp_offload))
        if places.offloaded_layers:
            stack.enter_context(weight_offloading.leaving_on_host(process, places.offloaded_layers))
        if places.offloaded_layers or _has_experts(stored):
            stack.enter_context(one_tensor_at_a_time())
        model = _from_pretrained(config, options)
    if len(set(devices.values())) > 1:
        placement.move_inputs_to_embedding(model)
    if quantization is not None:
        bnb.finish_loading(model, quantization.bnb_4bit_quant_storage)
    _finish_loading(model, config)
    return model


def _finish_loading(model: PreTrainedModel, config: Config) -> None:
    """Change what transformers sets up differently from what training needs."""
    if config.tuning.encoders == "drop":
        drop_encoders(model)
    refuse_longer_rows(model, config.model.max_seq_len)
    keep_soft_caps(model)
    keep_angles_exact(model)
    keep_encoders_in_their_type(model)
    bind_by_device(model)
    if model.can_generate():
        model.generation_config = savable_generation_config(model)


def _reading(
    config: Config, process: Process, found: StoredAs | None, places: WeightPlaces
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which weights are quantized or sharded as they are read."""
    if config.tuning.mode == "qlora":
        return packing_experts(keeps_mxfp4(config, found))
    if config.tuning.has_float8_base:
        return quantizing_to_float8(process.device)
    if places.is_fsdp:
        trains_weights = config.tuning.mode == "full"
        offloads = config.train.fsdp_offload
        return sharding.sharding_while_loading(process, trains_weights, offloads)
    if places.is_expert_parallel:
        return expert_parallel.sharding_experts_while_loading(process)
    return contextlib.nullcontext()


def is_quantized(config: Config) -> bool:
    """Return whether the base is quantized while it is read: to 4 bits or to float8."""
    return config.tuning.mode == "qlora" or config.tuning.has_float8_base


def config_to_load(config: Config) -> PretrainedConfig:
    """Return the config of a base's files with added tokens, and with its rope stretched."""
    stored = stored_config(config)
    if config.model.rope_scaling.rope_type:
        return with_stretched_rope(stored, config.model)
    return stored


def attention_option(config: Config) -> dict[str, str]:
    """Return the option of transformers' loader that model.attn_implementation sets."""
    attention = config.model.attn_implementation
    return {} if attention == "auto" else {"attn_implementation": attention}


def _from_pretrained(config: Config, options: dict[str, Any]) -> PreTrainedModel:
    """Return transformers' model, loaded by the auto class of its config.

    Raises: EnvironmentFault if a tensor cannot be loaded; ConfigError for experts in 4 bits under
    ZeRO-3, and for an attention that the architecture does not support.
    """
    name = config.model.name
    refuse_unsafe_base(config)
    if config.model.trust_remote_code:
        logger.warning("model %s@%s runs its own code", name, config.model.revision or "local")
    try:
        model, loading_info = auto_class_of(options["config"]).from_pretrained(
            name,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            output_loading_info=True,
            use_safetensors=None if config.model.allow_pickled_weights else True,
            **options,
        )
    except ConfigError:
        raise
    except RuntimeError as error:
        if MISMATCHED not in str(error):
            raise
        raise EnvironmentFault(
            f"model.name={name}: its weight files have other shapes than its config.json says, so "
            "they are not of one model; get the model again"
        ) from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        asked = options.get("attn_implementation")
        if asked and "attention" in str(error).lower():
            raise ConfigError(
                f"model.attn_implementation={asked}: {first_line(error)}; set "
                "MODEL_ATTN_IMPLEMENTATION=auto"
            ) from error
        remedy = "see that the folder is whole, or get the model again"
        if isinstance(error, ImportError) and config.model.trust_remote_code:
            remedy = (
                "its code was written for another transformers version: fix it, or set MODEL_NAME "
                "to a model without"
            )
        raise EnvironmentFault(
            f"model.name={name}: the weights could not be loaded: {first_line(error)}; {remedy}"
        ) from error
    except (AttributeError, KeyError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(frame.filename == generation_file.__file__ for frame in frames):
            raise
        raise EnvironmentFault(
            f"model.name={name}: its generation_config.json has values of other types "
            f"({first_line(error)}); correct the file, or get the model again"
        ) from error
    refuse_unaccounted(name, model, loading_info)
    return model


def refuse_unaccounted(
    name: str, model: PreTrainedModel, loading_info: Mapping[str, Iterable[str]]
) -> None:
    """Raise EnvironmentFault for parameters that are in no file, and for unused tensors.

    transformers would fill the missing parameters with random numbers and skip the unused tensors.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: {len(missing)} tensors are not in its weight files, "
            f"{missing[0]} first; get the model again"
        )
    unused = sorted(
        key
        for key in loading_info["unexpected_keys"]
        if not any(re.search(pattern, key) for pattern in MAY_BE_UNUSED)
    )
    further = further_layers(unused, model.config.get_text_config())
    unused = [key for key in unused if _layer(key) not in further]
    if unused:
        raise EnvironmentFault(
            f"model.name={name}: {len(unused)} tensors of its weight files belong to no parameter "
            f"of {type(model).__name__}, {unused[0]} first; get the model again, or set MODEL_NAME "
            "to the one that its config.json describes"
        )


def further_layers(unused: Iterable[str], config: PretrainedConfig) -> set[int]:
    """Return the layers after a model's last one that predict further tokens.

    Their own modules tell them apart from layers that the config leaves out by mistake. If none of
    these modules is in the files, the config's number of such layers decides.
    """
    end = getattr(config, "num_hidden_layers", 0)
    named = {_layer(key) for key in unused if OF_FURTHER_LAYERS.search(key)}
    facts = vars(config).items()
    counts = [n for name, n in facts if FURTHER_LAYERS.search(name) and isinstance(n, int)]
    counted = range(end, end + max(counts, default=0))
    return {layer for layer in named or counted if layer >= end}


def _layer(key: str) -> int:
    """Return the layer in a tensor's name, -1 if there is none."""
    found = LAYER.search(key)
    return int(found[1]) if found else -1


def _has_experts(stored: PretrainedConfig) -> bool:
    """Return whether a config sets a number of experts above one."""
    sizes = vars(stored.get_text_config()).items()
    return any("experts" in name and isinstance(size, int) and size > 1 for name, size in sizes)


def weight_dtype(config: Config, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of unquantized base weights: `model.dtype`, or what auto means here."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    if config.tuning.mode == "full":
        # bfloat16 has 8 bits of precision: an update of 1e-5 of a weight would be rounded away
        return torch.float32
    return compute_dtype
