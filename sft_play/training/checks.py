"""Checks of a model before and during training, and of its saved weights afterwards."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from sft_play.errors import CheckpointError, DivergedError, EnvironmentFault
from sft_play.models.sharding import is_divided, own_part

WRAPPERS_OF_STRATEGY = {
    "single": (None,),
    "ddp": ("DistributedDataParallel",),
    "fsdp": (None, "DistributedDataParallel"),  # that of adapters, over divided weights
    "deepspeed": ("DeepSpeedEngine",),
}
WRAPPERS = ("DistributedDataParallel", "DeepSpeedEngine", "DataParallel")


def check_engine(model: torch.nn.Module, strategy: str) -> None:
    """Raise EnvironmentFault unless the model is wrapped as the strategy demands.

    Libraries fall back to another wrapper without a message.
    """
    wrapped = type(model).__name__
    found = wrapped if wrapped in WRAPPERS else None
    if found not in WRAPPERS_OF_STRATEGY[strategy]:
        raise EnvironmentFault(
            f"strategy={strategy} was planned, and the model is wrapped in {wrapped}; try make "
            "doctor"
        )
    if is_divided(model) != (strategy == "fsdp"):
        divided = "not " if strategy == "fsdp" else ""
        raise EnvironmentFault(
            f"strategy={strategy} was planned, and FSDP has {divided}divided the weights; try make "
            "doctor"
        )


def check_finite(model: torch.nn.Module, step: int) -> None:
    """Raise DivergedError when a trained weight, or this rank's part of it, is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's part of this rank
        if not torch.isfinite(own_part(own)).all():
            raise DivergedError(
                f"{name} holds NaN or infinity at step {step}: the run has diverged; try a lower "
                "TRAIN_LEARNING_RATE"
            )


def check_saved_adapter(
    folder: Path, model: torch.nn.Module, zero_stage: int, is_complete: bool = True
) -> None:
    """Read the saved adapter back: it must be finite, trained, and equal to the weights in memory.

    Under ZeRO-3 the comparison is left out: weights in memory are shards. A run that was stopped
    (not `is_complete`) may have learned nothing yet.

    Raises: CheckpointError when the file is not what was trained; DivergedError when it holds NaN
    or was never updated.
    """
    trained = None
    if zero_stage != 3:
        # by default PEFT would ask the hub whether the vocabulary was resized
        trained = get_peft_model_state_dict(model, save_embedding_layers=False)
    seen = _check_saved(folder, trained)
    if trained is not None and seen != trained.keys():
        raise CheckpointError(
            f"{folder}: {len(seen)} tensors were saved and {len(trained)} were trained; check the "
            "disk"
        )
    if is_complete and not any(tensor.any() for name, tensor in _saved(folder) if "lora_B" in name):
        raise DivergedError(
            f"{folder}: the adapter is as it was initialised, so nothing was learned; raise "
            "TRAIN_LEARNING_RATE or the number of steps "
            "(the first one of a warm-up has a learning rate of 0)"
        )


def check_saved_model(folder: Path, model: torch.nn.Module, zero_stage: int) -> None:
    """Read the saved weights of a full run back: finite, and equal to the weights in memory.

    Under ZeRO-3 they are only checked for NaN and infinity. So are tensors that the architecture
    saves under another name than it has in memory.

    Raises: CheckpointError when a file is not what was trained; DivergedError when it holds NaN.
    """
    trained = None if zero_stage == 3 else model.state_dict()
    _check_saved(folder, trained)


def _check_saved(folder: Path, trained: Mapping[str, torch.Tensor] | None) -> set[str]:
    """Check the tensors in a folder, also against those in memory if given; return their names."""
    differing: list[str] = []
    broken: list[str] = []
    seen: set[str] = set()
    try:
        for name, tensor in _saved(folder):
            seen.add(name)
            expected = trained.get(name) if trained else None
            if not torch.isfinite(tensor).all():
                broken.append(name)
            elif expected is not None and not _is_equal(tensor, expected):
                differing.append(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: what was saved cannot be read back ({error}); check the disk"
        ) from None
    if not seen:
        raise CheckpointError(f"{folder}: holds no weights; check the disk")
    if broken:
        raise DivergedError(
            f"{folder}: {len(broken)} tensors hold NaN or infinity, {broken[0]} first; lower "
            "TRAIN_LEARNING_RATE"
        )
    if differing:
        raise CheckpointError(
            f"{folder}: {len(differing)} tensors on disk are not those that were trained, "
            f"{differing[0]} first; check the disk"
        )
    return seen


def _is_equal(saved: torch.Tensor, trained: torch.Tensor) -> bool:
    """Compare a saved tensor with the trained one; of a divided one the main rank's rows."""
    own = own_part(trained.detach()).cpu()
    if isinstance(trained, DTensor):
        saved = saved[: len(own)]
    return torch.equal(own, saved.to(trained.dtype))


def _saved(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a folder's safetensors files, one at a time to save memory."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
