"""What must hold before a run may go on, and of its weights before it may call itself done."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from sft_play.errors import CheckpointError, DivergedError, EnvironmentFault


def check_engine(model: torch.nn.Module, strategy: str) -> None:
    """Raise EnvironmentFault unless the wrapped model is what the strategy calls for; libraries fall back without a word."""
    wrapped = type(model).__name__
    engines = {"single": None, "ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine"}
    if engines[strategy] != (wrapped if wrapped in (*engines.values(), "DataParallel") else None):
        raise EnvironmentFault(
            f"strategy={strategy} was planned, and the model is wrapped in {wrapped}; try make doctor"
        )


def check_finite(model: torch.nn.Module, step: int) -> None:
    """Raise DivergedError when a trained weight is no number. Weights that ZeRO-3 has partitioned are empty here and pass."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise DivergedError(
                f"{name} holds NaN or infinity at step {step}: the run has diverged; try a lower TRAIN_LEARNING_RATE"
            )


def check_saved_adapter(
    folder: Path, model: torch.nn.Module, zero_stage: int, is_complete: bool = True
) -> None:
    """Read the saved adapter back: finite, trained, and under ZeRO stages below 3 equal to the weights in memory.

    A run that was stopped (not `is_complete`) may have learned nothing yet.
    Raises: CheckpointError when the file is not what was trained; DivergedError when it holds NaN or never moved.
    """
    # the weights in memory are shards under ZeRO-3; without save_embedding_layers peft would ask the hub about the vocabulary
    trained = (
        None if zero_stage == 3 else get_peft_model_state_dict(model, save_embedding_layers=False)
    )
    seen = _check_saved(folder, trained)
    if trained is not None and seen != trained.keys():
        raise CheckpointError(
            f"{folder}: {len(seen)} tensors were saved and {len(trained)} were trained; check the disk"
        )
    if is_complete and not any(tensor.any() for name, tensor in _saved(folder) if "lora_B" in name):
        raise DivergedError(
            f"{folder}: the adapter is as it was initialised, so nothing was learned; raise TRAIN_LEARNING_RATE or the number of steps "
            "(the first one of a warm-up has a learning rate of 0)"
        )


def check_saved_model(folder: Path, model: torch.nn.Module, zero_stage: int) -> None:
    """Read the saved weights of a full run back: finite, and under ZeRO stages below 3 equal to the weights in memory.

    Tensors that the architecture stores under another name than it computes with are looked at for NaN alone.
    Raises: CheckpointError when a file is not what was trained; DivergedError when it holds NaN.
    """
    _check_saved(folder, None if zero_stage == 3 else model.state_dict())


def _check_saved(folder: Path, trained: Mapping[str, torch.Tensor] | None) -> set[str]:
    """Compare what lies in a folder with the weights in memory, None with nothing; return the names that were found there."""
    differing, broken, seen = [], [], set()
    try:
        for name, tensor in _saved(folder):
            seen.add(name)
            if not torch.isfinite(tensor).all():
                broken.append(name)
            elif (
                trained
                and name in trained
                and not torch.equal(trained[name].detach().cpu(), tensor.to(trained[name].dtype))
            ):
                differing.append(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: what was saved cannot be read back ({error}); check the disk"
        ) from None
    if not seen:
        raise CheckpointError(f"{folder}: holds no weights; check the disk")
    if broken:
        raise DivergedError(
            f"{folder}: {len(broken)} tensors hold NaN or infinity, {broken[0]} first; lower TRAIN_LEARNING_RATE"
        )
    if differing:
        raise CheckpointError(
            f"{folder}: {len(differing)} tensors on disk are not those that were trained, {differing[0]} first; check the disk"
        )
    return seen


def _saved(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's safetensors files one by one: all of them at once may not fit beside the model."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
