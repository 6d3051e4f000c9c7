"""What a trainer is made of once its run begins: state, wrapped model, optimizer and schedule."""

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DummyScheduler
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.integrations import deepspeed_init
from transformers.trainer import TRAINER_STATE_NAME, align_special_tokens
from transformers.trainer_utils import SchedulerType

from sft_play.config.schedules import options_of
from sft_play.errors import CheckpointError
from sft_play.models import expert_parallel
from sft_play.models.adapter_state import part_of
from sft_play.models.sharding import is_divided
from sft_play.plan.workload import schedule_warning
from sft_play.training.checkpoints import apply_schedule, load_optimizer, load_weights
from sft_play.training.guards import GUARDS

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

# Parameters with LoRA+'s higher rate, as in peft.optimizers.create_loraplus_optimizer
FASTER = ("lora_B", "lora_embedding_B", "lora_magnitude_vector")


def begin_state(
    trainer: "SftTrainer", checkpoint: Path | None, max_steps: int, epochs: int
) -> None:
    """Begin the state of a run, or read that of a checkpoint, with what decides about its end.

    Raises: CheckpointError for one that is after the last step of the schedule; DivergedError.
    """
    if checkpoint is None:
        trainer.state = TrainerState(stateful_callbacks=[trainer.control], total_flos=0.0)
        trainer.state.train_batch_size = trainer.args.per_device_train_batch_size
    else:
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        global_step = trainer.state.global_step
        if global_step > max_steps:
            raise CheckpointError(
                f"the checkpoint has taken {global_step} steps, and this schedule ends at "
                f"{max_steps}: nothing is left to train; set more TRAIN_EPOCHS or TRAIN_MAX_STEPS"
            )
        guards = trainer.state.stateful_callbacks.get(GUARDS, {})
        trainer.guard.skipped += guards.get("skipped_steps", [])
        trainer.loss_watch.replay(trainer.state.log_history)
    # a resumed state has the logging and saving intervals of the run that wrote it; use ours
    trainer.state.compute_steps(trainer.args, max_steps)
    trainer.state.init_training_references(trainer, max_steps, epochs, None)


def prepare(trainer: "SftTrainer", checkpoint: Path | None, loader: DataLoader) -> None:
    """Wrap the model for its strategy, and make optimizer and schedule, or load their state."""
    max_steps = trainer.state.max_steps
    trainer.args.lr_scheduler_kwargs = options_of(trainer.args, max_steps)
    if trainer.processing_class is not None:
        align_special_tokens(trainer.model, trainer.processing_class)
    if checkpoint is not None and not trainer.is_deepspeed_enabled:
        load_weights(trainer, checkpoint)
    if trainer.is_deepspeed_enabled:
        trainer.optimizer, trainer.lr_scheduler = deepspeed_init(
            trainer, num_training_steps=max_steps
        )
    trainer.create_optimizer()
    accelerator = trainer.accelerator
    if trainer.shares_experts:
        expert_parallel.average_own_gradients(trainer.model, trainer.process)
    if is_divided(trainer.model) or trainer.shares_experts:
        trainer.model_wrapped = wrap_divided(trainer)
        trainer.optimizer = accelerator.prepare(trainer.optimizer)
    elif isinstance(trainer.lr_scheduler, DummyScheduler):
        trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = accelerator.prepare(
            trainer.model, trainer.optimizer, trainer.lr_scheduler
        )
    else:
        trainer.model_wrapped, trainer.optimizer = accelerator.prepare(
            trainer.model, trainer.optimizer
        )
    trainer.create_scheduler(num_training_steps=max_steps)
    warmup = trainer.args.get_warmup_steps(max_steps)
    if trainer.args.lr_scheduler_type != SchedulerType.CONSTANT:
        begin_warm_up(trainer.lr_scheduler, warmup)
    warning = schedule_warning(trainer.args, max_steps)
    if warning is not None:
        logger.warning("warning: %s", warning)
    if checkpoint is not None:
        if trainer.is_deepspeed_enabled:
            load_weights(trainer, checkpoint)
        load_optimizer(trainer, checkpoint)
    handler = trainer.callback_handler
    handler.model, handler.train_dataloader = trainer.model, loader
    handler.optimizer, handler.lr_scheduler = trainer.optimizer, trainer.lr_scheduler
    trainer.model_wrapped.zero_grad()


def wrap_divided(trainer: "SftTrainer") -> nn.Module:
    """Return a divided model with autocast, the adapters that all ranks have wrapped in DDP.

    accelerate refuses DDP around a model with divided weights (models.sharding), although it need
    not know of them, nor of experts that are not those of other ranks (models.expert_parallel).
    """
    model, accelerator = trainer.model, trainer.accelerator
    # autocast alone: what is offloaded stays in host memory
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    if trainer.trains_divided:
        return model
    shared, left_alone = [], []
    for name, tensor in model.named_parameters():
        is_shared = tensor.requires_grad and part_of(tensor) is None
        (shared if is_shared else left_alone).append(name)
    if not shared:
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_alone)
    on_gpu = accelerator.device.type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[accelerator.local_process_index] if on_gpu else None,
        **accelerator.ddp_handler.to_kwargs(),
    )


def clip_gradients(
    trainer: "SftTrainer", parameters: Iterable[nn.Parameter]
) -> torch.Tensor | float:
    """Clip the gradients to train.max_grad_norm; return their norm before that."""
    most = trainer.args.max_grad_norm or math.inf
    if trainer.shares_experts:
        return expert_parallel.clip_gradients(parameters, most)
    norm = trainer.accelerator.clip_grad_norm_(parameters, most)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if trainer.is_deepspeed_enabled and isinstance(norm, torch.Tensor):
        norm = norm.item()
    return norm


def begin_warm_up(schedule: Any, warmup: int) -> None:
    """Let the warm-up of a schedule, which may be wrapped, begin at 1/W of the rate.

    transformers' begins at 0: a run of one step would train nothing. So each step of the warm-up
    has the rate of transformers' next step, and the last one the peak.
    """

    def with_warm_up(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: 1.0 if step + 1 == warmup else factor(step + (step < warmup))

    schedule = getattr(schedule, "scheduler", schedule)
    schedule.lr_lambdas = list(map(with_warm_up, schedule.lr_lambdas))
    apply_schedule(schedule)


def set_rates(trainer: "SftTrainer", optimizer: Optimizer, model: nn.Module) -> None:
    """Give the B matrices of LoRA+, and towers, the learning rates that the run asks for."""
    if trainer.loraplus_lr_ratio is not None:
        raise_learning_rate_of_b(optimizer, model, trainer.loraplus_lr_ratio)
    if trainer.towers_learning_rate is not None:
        factor = trainer.towers_learning_rate / trainer.args.learning_rate
        give_own_rate(optimizer, set(map(id, trainer.tower_weights)), factor)


def raise_learning_rate_of_b(optimizer: Optimizer, model: nn.Module, ratio: float) -> None:
    """Move the parameters of B to groups of their own, with `ratio` times the learning rate.

    LoRA+ (Hayou et al., arXiv 2402.12354), for the optimizer of train.optim. Whole modules keep
    their rate. Call it before the first step and before a schedule is made. The first group keeps
    its rate: it is the one that is logged.
    """
    faster_ids: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(word in name for word in FASTER):
            faster_ids.add(id(parameter))
    assert faster_ids, "no adapter has a B matrix"
    give_own_rate(optimizer, faster_ids, ratio)


def give_own_rate(optimizer: Optimizer, chosen: set[int], factor: float) -> None:
    """Move parameters, by their `id`, to groups of their own, with `factor` times the rate."""
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if not own:
            continue
        group["params"] = [part for part in group["params"] if id(part) not in chosen]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": own, "lr": factor * group["lr"]})
