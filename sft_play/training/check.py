"""What must hold before a run may go on, and of its weights before it may call itself done."""

from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from sft_play.errors import CheckpointError, DivergedError, EnvironmentFault


def check_engine(model: torch.nn.Module, strategy: str) -> None:
    """Raise EnvironmentFault unless the wrapped model is what the strategy calls for; libraries fall back without a word."""
    wrapped = type(model).__name__
    engines = {"single": None, "ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine"}
    if engines[strategy] != (wrapped if wrapped in (*engines.values(), "DataParallel") else None):
        raise EnvironmentFault(f"strategy={strategy} was planned, and the model is wrapped in {wrapped}; try make doctor")


def check_saved_adapter(folder: Path, model: torch.nn.Module, zero_stage: int) -> None:
    """Read the saved adapter back: finite, trained, and under ZeRO stages below 3 equal to the weights in memory.

    Raises: CheckpointError when the file is not what was trained; DivergedError when it holds NaN or never moved.
    """
    saved = load_file(folder / "adapter_model.safetensors")
    broken = [name for name, tensor in saved.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise DivergedError(f"{folder}: {len(broken)} adapter tensors hold NaN or infinity, {broken[0]} first; lower TRAIN_LEARNING_RATE")
    if not any(tensor.any() for name, tensor in saved.items() if "lora_B" in name):
        raise DivergedError(f"{folder}: the adapter is as it was initialised, so nothing was learned; raise TRAIN_LEARNING_RATE or the number of steps")
    if zero_stage == 3:
        return  # the weights in memory are shards
    trained = get_peft_model_state_dict(model)
    differing = sorted(trained.keys() ^ saved.keys()) or [
        name for name, tensor in trained.items() if not torch.equal(tensor.detach().cpu(), saved[name].to(tensor.dtype))
    ]
    if differing:
        raise CheckpointError(f"{folder}: {len(differing)} tensors on disk are not those that were trained, {differing[0]} first; check the disk")
