"""bitsandbytes: 4-bit base weights, on GPUs and on CPUs."""

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig

from sft_play.config.schema import Config
from sft_play.models.packed import dtype_name


def quantization_config(
    config: Config, compute_dtype: torch.dtype, is_divided: bool = False
) -> BitsAndBytesConfig:
    """Return the 4-bit configuration of a qlora base.

    Where ranks divide the base, the packed bytes are stored in the compute dtype: DeepSpeed
    partitions only floating-point tensors, and so does the FSDP of torch before 2.13.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.tuning.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if is_divided else torch.uint8,
    )


def plain_quantization(config: Config, compute_dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the same as plain values, for a process that loads a qlora base by itself."""
    if config.tuning.mode != "qlora":
        return None
    asked = quantization_config(config, compute_dtype)
    names = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    values = {name: getattr(asked, name) for name in names}
    return {**values, "bnb_4bit_compute_dtype": dtype_name(compute_dtype)}


def keep_differentiable(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights when the model is evaluated on a CPU.

    On a CPU with AVX512-BF16 it repacks them for inference and never packs them back. Its product
    with repacked weights has no gradient: training after an evaluation would continue with
    gradients that are wrong by 100 %, and with scales rounded to bfloat16.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
