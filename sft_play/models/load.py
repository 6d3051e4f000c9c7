"""Load a run's model with its backend, in the right dtype, on the right device.

Code after this module works with a transformers model and need not know the backend.
"""

from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault, first_line
from sft_play.models import bnb, lora
from sft_play.models.export import savable_generation_config
from sft_play.models.fast.install import install_fused_kernels
from sft_play.process import Process


def load_model(config: Config, process: Process, zero_stage: int = 0) -> PreTrainedModel:
    """Return the model to train, with adapters unless the mode is full, and with fused kernels.

    `zero_stage` is DeepSpeed's ZeRO stage, 0 without DeepSpeed.

    Raises: EnvironmentFault when the weights cannot be loaded; ConfigError when adapters match no
    layer.
    """
    if config.tuning.backend == "unsloth":
        from sft_play.models import unsloth  # only here: it patches transformers

        return unsloth.load(config, process)
    model = load_base(config, process, zero_stage)
    if config.tuning.mode != "full":
        model = lora.add_adapters(model, config, lora.trainable_token_ids(config))
    install_fused_kernels(model, config, process, zero_stage)
    return model


def load_base(
    config: Config,
    process: Process,
    zero_stage: int = 0,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> PreTrainedModel:
    """Return the base model on this rank's device (ZeRO-3: partitioned); no weight is frozen.

    `dtype` is that of unquantised weights: None for the one that training uses, "auto" for the one
    in the files.

    Raises: EnvironmentFault when weights cannot be loaded or are missing in the files.
    """
    model_config = config.model
    options: dict[str, Any] = {"dtype": dtype or weight_dtype(config, process.compute_dtype)}
    if config.tuning.mode == "qlora":
        quantization = bnb.quantization_config(config, process.compute_dtype, zero_stage)
        options["quantization_config"] = quantization
    if zero_stage < 3:
        options["device_map"] = {"": process.device}
    if model_config.attn_implementation != "auto":
        options["attn_implementation"] = model_config.attn_implementation
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            model_config.name,
            revision=model_config.revision,
            trust_remote_code=model_config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EnvironmentFault(
            f"model.name={model_config.name}: the weights could not be loaded: {first_line(error)}"
        ) from error
    missing = sorted(loading_info["missing_keys"])
    if missing:  # transformers would fill them with random numbers and go on
        raise EnvironmentFault(
            f"model.name={model_config.name}: {len(missing)} tensors are not in its weight files, "
            f"{missing[0]} first; get the model again"
        )
    if config.tuning.mode == "qlora":
        bnb.keep_differentiable(model)
    if model.can_generate():
        model.generation_config = savable_generation_config(model)
    return model


def weight_dtype(config: Config, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of unquantised base weights: `model.dtype`, or what auto means here."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    if config.tuning.mode == "full":
        # bfloat16 has 8 bits of precision: an update of 1e-5 of a weight would be rounded away
        return torch.float32
    return compute_dtype
