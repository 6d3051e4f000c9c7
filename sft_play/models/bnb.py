"""bitsandbytes: 4-bit base weights, on GPUs and on CPUs."""

import copy
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor
from transformers import BitsAndBytesConfig, PretrainedConfig

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.models.parameters import dtype_name, log_packed


def storage_type(compute_dtype: torch.dtype, zero_stage: int, is_fsdp: bool = False) -> torch.dtype:
    """Return the type in which the bytes of a 4-bit base are stored: uint8 where it is whole.

    DeepSpeed divides only floating-point tensors, and so does the FSDP of torch before 2.13.
    DeepSpeed casts those in another type than it computes in. FSDP copies several tensors in one
    kernel, which turns 16-bit numbers into float32 and back: of bytes that are a NaN it makes
    others, and float32 it leaves alone.
    """
    if zero_stage == 3:
        return compute_dtype
    return torch.float32 if is_fsdp else torch.uint8


def quantization_config(
    config: Config, compute_dtype: torch.dtype, storage: torch.dtype = torch.uint8
) -> BitsAndBytesConfig:
    """Return the 4-bit configuration of a qlora base, whose bytes are stored in `storage`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.tuning.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=storage,
    )


def plain_quantization(config: Config, compute_dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the same as plain values, for a process that loads a qlora base by itself."""
    if config.tuning.mode != "qlora":
        return None
    asked = quantization_config(config, compute_dtype)
    names = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    values = {name: getattr(asked, name) for name in names}
    return {**values, "bnb_4bit_compute_dtype": dtype_name(compute_dtype)}


def with_compute_dtype(stored: PretrainedConfig, compute_dtype: torch.dtype) -> PretrainedConfig:
    """Return the config of a base in 4 bits, which computes in `compute_dtype` now."""
    for part in (stored, stored.get_text_config()):
        if getattr(part, "quantization_config", None):
            part.quantization_config["bnb_4bit_compute_dtype"] = dtype_name(compute_dtype)
    return stored


def finish_loading(model: torch.nn.Module, storage: torch.dtype) -> None:
    """Make a packed model trainable on this device, and log what is packed.

    The bytes of a checkpoint that was in 4 bits become those of `storage`, too.

    Raises: EnvironmentFault where this CPU unpacks a weight to other numbers than were packed.
    """
    for weight in model.parameters():
        if isinstance(weight, Params4bit) and weight.dtype != storage:
            weight.data = weight.data.flatten().view(storage)[:, None]
            weight.quant_storage = storage
    keep_differentiable(model)
    refuse_wrong_unpacking(model)
    log_packed(model)


def keep_differentiable(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights when the model is evaluated on a CPU.

    On a CPU with AVX512-BF16 it repacks them for inference and never packs them back. Its product
    with repacked weights has no gradient: training after an evaluation would continue with
    gradients that are wrong by 100 %, and with scales rounded to bfloat16.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def refuse_wrong_unpacking(model: torch.nn.Module) -> None:
    """Raise EnvironmentFault where this CPU unpacks a weight to other numbers than were packed.

    The kernel of bitsandbytes 0.50 for CPUs with AVX512 takes the scales of other blocks where the
    rows of a weight are no whole blocks (of 64 weights).
    """
    looked_at = set()
    for name, weight in model.named_parameters():
        if not isinstance(weight, Params4bit) or weight.device.type != "cpu":
            continue
        state = weight.quant_state
        if state.shape[-1] % state.blocksize and state.shape not in looked_at:
            looked_at.add(state.shape)
            if not is_unpacked_rightly(weight):
                raise EnvironmentFault(
                    f"tuning.mode=qlora: this CPU unpacks {name} {tuple(state.shape)} to other "
                    f"numbers than were packed: its rows are no whole blocks of {state.blocksize}; "
                    "set TUNING_MODE=lora, or train on a GPU"
                )


def is_unpacked_rightly(weight: Params4bit) -> bool:
    """Return whether a packed weight is unpacked to the numbers that its flat copy is."""
    flat: Tensor = weight.data.view(-1, 1)
    unpacked = dequantize_4bit(flat, weight.quant_state)
    state = copy.copy(weight.quant_state)
    state.shape = torch.Size([unpacked.numel()])
    return torch.equal(unpacked.flatten(), dequantize_4bit(flat, state).flatten())
