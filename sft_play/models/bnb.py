"""bitsandbytes: 4-bit base weights, on GPUs and on CPUs."""

import torch
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig

from sft_play.config.schema import Config


def quantization_config(
    config: Config, compute_dtype: torch.dtype, zero_stage: int
) -> BitsAndBytesConfig:
    """Return the 4-bit configuration of a qlora base.

    Under ZeRO-3 the packed bytes are stored in the compute dtype, because DeepSpeed partitions only
    floating-point tensors.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.tuning.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if zero_stage == 3 else torch.uint8,
    )


def keep_differentiable(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights when the model is evaluated on a CPU.

    On a CPU with AVX512-BF16 it repacks them for inference and never packs them back. Its product
    with repacked weights has no gradient: training after an evaluation would continue with
    gradients that are wrong by 100 %, and with scales rounded to bfloat16.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
