"""Base weights and tokenizer of a run: which backend loads them, in which type, on which device.

The only room that knows a backend; everything behind it sees a transformers model.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.render import template_of
from sft_play.errors import EnvironmentFault
from sft_play.models import bnb, lora


@dataclass(frozen=True)
class Placement:
    """Where and in what type this rank computes."""

    device: torch.device
    compute_dtype: torch.dtype  # of matmuls: float32 on a CPU, bfloat16 or float16 on a GPU
    zero_stage: int  # 0 without DeepSpeed


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template and a pad token. Raises EnvironmentFault when it cannot be had."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.name, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:  # ImportError: a package that the tokenizer's file format needs
        raise EnvironmentFault(f"model.name={config.model.name}: no tokenizer could be loaded: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise EnvironmentFault(f"model.name={config.model.name}: its tokenizer has no fast version, which finding the answers' tokens needs")
    if tokenizer.eos_token_id is None:
        raise EnvironmentFault(
            f"model.name={config.model.name}: its tokenizer names no eos_token, so an answer could not end; add one to tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked out everywhere; the id only has to exist
    tokenizer.chat_template = template_of(tokenizer)  # saved with the adapter: use renders as training did
    return tokenizer


def load_model(config: Config, placement: Placement) -> PreTrainedModel:
    """Return the model to train: base weights, quantised where asked, with adapters unless mode is full.

    Raises: EnvironmentFault when the weights cannot be had; ConfigError when targets match no layer.
    """
    if config.tuning.backend == "unsloth":
        from sft_play.models import unsloth

        return unsloth.load(config, placement)
    model = load_base(config, placement)
    if config.tuning.mode == "full":
        return model
    return lora.add_adapters(model, config)


def load_base(config: Config, placement: Placement, dtype: torch.dtype | Literal["auto"] | None = None) -> PreTrainedModel:
    """Return the base weights on this rank's device (ZeRO-3: partitioned), frozen nowhere yet.

    `dtype` is the type of unquantised weights: None is what training uses, "auto" is the one they are stored in.
    Raises: EnvironmentFault when the weights cannot be had, or some of them are not in the file.
    """
    options: dict[str, Any] = {"dtype": dtype or weight_dtype(config, placement.compute_dtype), "output_loading_info": True}
    if config.tuning.mode == "qlora":
        options["quantization_config"] = bnb.quantization(config, placement)
    if placement.zero_stage < 3:
        options["device_map"] = {"": placement.device}
    if config.model.attn_implementation != "auto":
        options["attn_implementation"] = config.model.attn_implementation
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            config.model.name, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code, **options
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EnvironmentFault(f"model.name={config.model.name}: the weights could not be loaded: {_first_line(error)}") from error
    if loaded["missing_keys"]:  # transformers would fill them with random numbers and go on
        missing = sorted(loaded["missing_keys"])
        raise EnvironmentFault(f"model.name={config.model.name}: {len(missing)} tensors are not in its weight files, {missing[0]} first; get the model again")
    if config.tuning.mode == "qlora":
        bnb.keep_differentiable(model)
    return model


def weight_dtype(config: Config, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the type of unquantised base weights: `model.dtype`, or by `auto` what mode and device call for."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    # full: bfloat16 has 8 bits of mantissa, and an update of 1e-5 of a weight would be rounded away
    return torch.float32 if config.tuning.mode == "full" else compute_dtype


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
