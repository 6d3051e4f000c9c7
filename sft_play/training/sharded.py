"""A divided model (models.sharding) in transformers' Trainer: its wrapper and its checkpoints.

Every rank must call each of these functions.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from sft_play.models.sharding import trains_divided
from sft_play.runs.resumed import DIVIDED_OPTIMIZER


def wrapped(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a divided model, ready to train: with autocast, its adapters wrapped in DDP.

    accelerate refuses DDP around a model with divided weights, although it need not know of them.
    """
    # autocast alone: what is offloaded stays in host memory
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    if trains_divided(model):
        model._is_accelerate_prepared = True
        return model
    frozen = [name for name, tensor in model.named_parameters() if not tensor.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    on_gpu = accelerator.device.type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[accelerator.local_process_index] if on_gpu else None,
        **accelerator.ddp_handler.to_kwargs(),
    )


def whole(number: Any) -> Any:
    """Return a number of divided tensors as a plain one; every rank must call it."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def save_optimizer(folder: Path, trainer: Trainer) -> None:
    """Save the state of a divided optimizer, each rank its part, and of its schedule."""
    optimizer = trainer.optimizer.optimizer  # accelerate's wrapper around torch's
    state = {"optimizer": get_optimizer_state_dict(trainer.model, optimizer)}
    dcp.save(state, checkpoint_id=folder / DIVIDED_OPTIMIZER)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(folder: Path, trainer: Trainer) -> None:
    """Load what `save_optimizer` saved, on any number of ranks."""
    optimizer = trainer.optimizer.optimizer
    state = {"optimizer": get_optimizer_state_dict(trainer.model, optimizer)}
    dcp.load(state, checkpoint_id=folder / DIVIDED_OPTIMIZER)
    set_optimizer_state_dict(trainer.model, optimizer, state["optimizer"])
    schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
    trainer.lr_scheduler.load_state_dict(schedule)
