"""Base weights of a run: which backend loads them, in which type, on which device.

The only room that knows a backend; everything behind it sees a transformers model.
"""

from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault, first_line
from sft_play.models import bnb, lora
from sft_play.models.fast.install import make_fast
from sft_play.process import Process


def load_model(config: Config, process: Process, zero_stage: int = 0) -> PreTrainedModel:
    """Return the model to train: base weights, quantised where asked, with adapters unless mode is full, made fast.

    `zero_stage` is 0 without DeepSpeed. Raises: EnvironmentFault when the weights cannot be had; ConfigError when targets match no layer.
    """
    if config.tuning.backend == "unsloth":
        from sft_play.models import unsloth

        return unsloth.load(config, process)
    model = load_base(config, process, zero_stage)
    if config.tuning.mode != "full":
        model = lora.add_adapters(model, config)
    make_fast(model, config, process, zero_stage)
    return model


def load_base(
    config: Config,
    process: Process,
    zero_stage: int = 0,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> PreTrainedModel:
    """Return the base weights on this rank's device (ZeRO-3: partitioned), frozen nowhere yet.

    `dtype` is the type of unquantised weights: None is what training uses, "auto" is the one they are stored in.
    Raises: EnvironmentFault when the weights cannot be had, or some of them are not in the file.
    """
    options: dict[str, Any] = {
        "dtype": dtype or weight_dtype(config, process.compute_dtype),
        "output_loading_info": True,
    }
    if config.tuning.mode == "qlora":
        options["quantization_config"] = bnb.quantization(config, process.compute_dtype, zero_stage)
    if zero_stage < 3:
        options["device_map"] = {"": process.device}
    if config.model.attn_implementation != "auto":
        options["attn_implementation"] = config.model.attn_implementation
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            config.model.name,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EnvironmentFault(
            f"model.name={config.model.name}: the weights could not be loaded: {first_line(error)}"
        ) from error
    if loaded["missing_keys"]:  # transformers would fill them with random numbers and go on
        missing = sorted(loaded["missing_keys"])
        raise EnvironmentFault(
            f"model.name={config.model.name}: {len(missing)} tensors are not in its weight files, {missing[0]} first; get the model again"
        )
    if config.tuning.mode == "qlora":
        bnb.keep_differentiable(model)
    return model


def weight_dtype(config: Config, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the type of unquantised base weights: `model.dtype`, or by `auto` what mode and device call for."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    # full: bfloat16 has 8 bits of mantissa, and an update of 1e-5 of a weight would be rounded away
    return torch.float32 if config.tuning.mode == "full" else compute_dtype
