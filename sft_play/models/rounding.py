"""Base weights as a run computed with them: rounded to 4 bits or to float8, and unpacked again."""

import copy

import torch
from bitsandbytes import functional as bnb_functional
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from sft_play.config.schema import Config
from sft_play.models import bnb, expert_quantization
from sft_play.models.base_config import stored_config, stored_format
from sft_play.models.float8.loading import Float8Config, float8_candidates
from sft_play.models.float8.quantise import quantise_weight, why_not_quantised

Quantization = BitsAndBytesConfig | Float8Config


def quantization_of(config: Config, compute_dtype: torch.dtype) -> tuple[str, Quantization] | None:
    """Return how a run's base was quantised, in words and as a config; None if it was not.

    A base whose files are in 4 bits was trained as it is stored.
    """
    found = stored_format(config, stored_config(config))
    if found is not None and found.way == "packed":
        return None
    if config.tuning.mode == "qlora":
        return "rounded to 4 bits", bnb.quantization_config(config, compute_dtype)
    if config.tuning.has_float8_base:
        return "rounded to float8", Float8Config()
    return None


def quantised_names(model: PreTrainedModel, quantization: Quantization) -> set[str]:
    """Return the names of the parameters that are quantised in a model of this kind.

    The model may have adapters and no weights.
    """
    if isinstance(quantization, BitsAndBytesConfig):
        return expert_quantization.packed_names(model, quantization)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    return {f"{name}.weight" for name in float8_candidates(empty).quantised}


def rounded(weight: Tensor, quantization: Quantization) -> Tensor:
    """Return a weight as a quantised base computes with it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(quantization, BitsAndBytesConfig):
        packed = expert_quantization.pack(weight.to(device), quantization)
        unpacked = bnb_functional.dequantize_4bit(packed.data, packed.quant_state)
        return unpacked.to(weight.device)
    found = quantise_weight(weight)
    if why_not_quantised(weight, found) is not None:
        return weight
    return found.dequantised(torch.float32)
