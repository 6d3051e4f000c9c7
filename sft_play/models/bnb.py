"""bitsandbytes: 4-bit base weights, on GPUs and on CPUs."""

import torch
from transformers import BitsAndBytesConfig

from sft_play.config.schema import Config


def quantization(config: Config, placement) -> BitsAndBytesConfig:
    """Return the 4-bit configuration of a qlora base.

    Under ZeRO-3 the packed bytes are stored as the compute type, because DeepSpeed partitions floating-point tensors only.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.tuning.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=placement.compute_dtype,
        bnb_4bit_quant_storage=placement.compute_dtype if placement.zero_stage == 3 else torch.uint8,
    )
