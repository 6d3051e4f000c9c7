"""Checkpoints: what a trainer saves, how its folder is published, and how it is loaded again.

A folder is written in a staging folder, checked, sealed and renamed. Every rank must call each of
these functions. A rank that fails raises, and the failure's broadcast ends the others: none passes
the barrier before the folder is published.
"""

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations import deepspeed_load_checkpoint, is_deepspeed_zero3_enabled
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from sft_play.config.schema import TrainSection
from sft_play.errors import CheckpointError, SftPlayError
from sft_play.models.adapter_state import ExpertPart, as_published, load_published, part_of
from sft_play.models.load import load_trained
from sft_play.models.sharding import whole_state_dict
from sft_play.process import Process
from sft_play.runs import checkpoints, seal, stamp
from sft_play.runs.checkpoints import STAGING
from sft_play.runs.files import rename, share
from sft_play.runs.resumed import DIVIDED_OPTIMIZER
from sft_play.training.best import best_step, metric_of, scores_by_step
from sft_play.training.checks import check_finite, check_finite_optimizer, innermost
from sft_play.training.guards import GUARDS

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

RANDOM_STATES = "gpu_random_states.pt"  # of the GPUs of a model that is placed on several


def save_checkpoint(trainer: "SftTrainer") -> Path:
    """Publish checkpoint-N of this step, remove old ones, and return its folder."""
    step = trainer.state.global_step
    check_finite(trainer.model, step)
    check_finite_optimizer(trainer.optimizer, step)
    folder = Path(trainer.args.output_dir)
    target = folder / f"checkpoint-{step}"
    with published(target, trainer.process, {**trainer.stamp, "global_step": step}) as staged:
        write_state(trainer, staged)
    if trainer.args.should_save:
        best = best_step(trainer.state.log_history, trainer.best_metric)
        checkpoints.rotate(folder, trainer.args.save_total_limit, best)
    trainer.process.gather(None)  # no rank continues before it can be resumed from
    return target


def save_now(trainer: "SftTrainer") -> None:
    """Save a checkpoint of this step, unless there is one."""
    target = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    if trainer.process.min(int(target.is_dir())) == 0:
        trainer.save_checkpoint()


def write_state(trainer: "SftTrainer", folder: Path) -> None:
    """Write all that a resume reads, in transformers' files."""
    trainer.save_model(str(folder))
    if trainer.trains_divided:
        dcp.save(_divided_optimizer(trainer), checkpoint_id=folder / DIVIDED_OPTIMIZER)
    elif trainer.shares_experts:
        # as one process has it: a collective
        state = reshape_moments(trainer, trainer.optimizer.state_dict(), ExpertPart.whole)
        if trainer.args.should_save:
            torch.save(state, folder / OPTIMIZER_NAME)
    else:
        trainer._save_optimizer_and_scheduler(str(folder))
    if (trainer.trains_divided or trainer.shares_experts) and trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
    trainer._save_scaler(str(folder))
    trainer._save_rng_state(str(folder))
    devices = trainer.process.devices
    if len(devices) > 1:  # Trainer's file has the state of the first GPU
        torch.save(list(map(torch.cuda.get_rng_state, devices)), folder / RANDOM_STATES)
    has_moved = trainer.movement.has_moved(trainer.process)
    if trainer.args.should_save:
        control = trainer.control
        trainer.state.stateful_callbacks[type(control).__name__] = control.state()
        guards = {"skipped_steps": trainer.guard.skipped, "has_moved": has_moved}
        trainer.state.stateful_callbacks[GUARDS] = guards
        trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))


def write_weights(trainer: "SftTrainer", folder: str) -> None:
    """Write the trained weights, their config and the tokenizer, and no other file.

    Trainer would add training_args.bin, which has the hub token in plain text.
    """
    model = trainer.model
    is_peft = isinstance(model, PeftModel)
    state_dict = None  # the model has all weights
    if trainer.trains_divided:
        state_dict = whole_state_dict(model)
    elif is_deepspeed_zero3_enabled():
        state_dict = trainer.model_wrapped._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=is_peft
        )
        state_dict = state_dict or {}  # None on other ranks than the main one
    elif is_peft:
        state_dict = model.state_dict()
    if is_peft:
        state_dict = as_published(model, state_dict)
    if not trainer.args.should_save:
        return
    # by default PEFT would ask the hub whether the vocabulary was resized
    options = {"save_embedding_layers": False} if is_peft else {}
    used_cache = trainer.text_config.use_cache
    trainer.text_config.use_cache = trainer.base_use_cache
    try:
        model.save_pretrained(folder, state_dict=state_dict, **options)
    finally:
        trainer.text_config.use_cache = used_cache
    trainer.processing_class.save_pretrained(folder)


@contextmanager
def loading_plain(checkpoint: Path) -> Iterator[None]:
    """Let torch.load run no code of pickles, as DeepSpeed would. Raises: CheckpointError."""
    load = torch.load
    torch.load = lambda *args, **options: load(*args, **{**options, "weights_only": True})
    try:
        yield
    except UnpicklingError as error:
        raise CheckpointError(
            f"{checkpoint}: a file of it is a pickle that could run any code, and is not loaded "
            f"({' '.join(str(error).split())[:300]}); choose another checkpoint"
        ) from error
    finally:
        torch.load = load


def load_weights(trainer: "SftTrainer", checkpoint: Path) -> None:
    """Put the trained weights of a checkpoint into the model."""
    model = trainer.model
    if trainer.is_deepspeed_enabled:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [LossScaler, ZeroStageEnum, fragment_address]
        is_strict = not isinstance(model, PeftModel)
        with loading_plain(checkpoint), torch.serialization.safe_globals(classes):
            deepspeed_load_checkpoint(
                trainer.model_wrapped, str(checkpoint), load_module_strict=is_strict
            )
    elif isinstance(model, PeftModel):
        load_published(model, checkpoint, is_trainable=True)
    elif not trainer.trains_divided:  # else the model was loaded from there
        load_trained(model, str(checkpoint))


def load_optimizer(trainer: "SftTrainer", checkpoint: Path) -> None:
    """Load the state of optimizer, schedule and loss scaler; a divided one on any world size."""
    if trainer.trains_divided:
        state = _divided_optimizer(trainer)
        dcp.load(state, checkpoint_id=checkpoint / DIVIDED_OPTIMIZER)
        optimizer = trainer.optimizer.optimizer
        set_optimizer_state_dict(trainer.model, optimizer, state["optimizer"])
        state = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
        trainer.lr_scheduler.load_state_dict(state)
    else:
        with loading_plain(checkpoint), cutting_optimizer(trainer), keeping_types(trainer):
            trainer._load_optimizer_and_scheduler(str(checkpoint))
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # in a wrapper
    if isinstance(schedule, LambdaLR):  # that of the checkpoint, which train.extend makes longer
        apply_schedule(schedule)
    trainer._load_scaler(str(checkpoint))


def load_random_state(trainer: "SftTrainer", checkpoint: Path) -> None:
    """Restore the random generators of this rank, on all of its devices."""
    with loading_plain(checkpoint):
        trainer._load_rng_state(str(checkpoint))
    devices = trainer.process.devices
    path = checkpoint / RANDOM_STATES
    if len(devices) > 1 and path.is_file():
        for state, device in zip(torch.load(path, weights_only=True), devices, strict=False):
            torch.cuda.set_rng_state(state, device)


def take_best(trainer: "SftTrainer", train: TrainSection) -> dict[str, Any] | None:
    """Put the weights of the best checkpoint into the model, and return which one it is.

    None if that is not asked for, or no checkpoint was scored. Every rank must call it.
    """
    metric = metric_of(train)
    history = trainer.state.log_history
    step = best_step(history, metric)
    if not train.load_best_model_at_end or step is None:
        return None
    found = {"step": step, "metric": metric, "value": scores_by_step(history, metric)[step]}
    if step == trainer.state.global_step:
        return found
    checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    damage = seal.find_damage(checkpoint) if trainer.process.local_rank == 0 else None
    if trainer.process.max(int(damage is not None)):
        if damage is not None:
            logger.warning(
                "%s: %s; the weights of the last step are saved, not the best", checkpoint, damage
            )
        return None
    load_weights(trainer, checkpoint)
    if trainer.process.is_main:
        logger.info(
            "best step=%d %s=%.4f: its weights are scored and saved, not those of step %d",
            *(step, metric, found["value"], trainer.state.global_step),
        )
    return found


def _divided_optimizer(trainer: "SftTrainer") -> dict[str, object]:
    """Return the state of an optimizer whose weights FSDP divides: this rank's part."""
    optimizer = trainer.optimizer.optimizer  # torch's, in accelerate's wrapper
    return {"optimizer": get_optimizer_state_dict(trainer.model, optimizer)}


@contextmanager
def cutting_optimizer(trainer: "SftTrainer") -> Iterator[None]:
    """Let the optimizer load of a whole state what belongs to this rank's experts."""
    if not trainer.shares_experts:
        yield
        return
    optimizer = trainer.optimizer.optimizer  # torch's, in accelerate's wrapper
    with optimizer.register_load_state_dict_pre_hook(
        lambda _, state: reshape_moments(trainer, state, ExpertPart.cut)
    ):
        yield


@contextmanager
def keeping_types(trainer: "SftTrainer") -> Iterator[None]:
    """Let the optimizer load its state in the types that were saved.

    torch would cast it to the type of the weights: Adafactor's is float32 over bfloat16 weights.
    """
    optimizer = innermost(trainer.optimizer)
    saved: dict[int, dict[str, Any]] = {}

    def restore(loaded: torch.optim.Optimizer) -> None:
        for number, state in loaded.state_dict()["state"].items():
            for name, value in saved[number].items():
                if torch.is_tensor(value):
                    state[name] = value.to(state[name].device)

    before = optimizer.register_load_state_dict_pre_hook(
        lambda _, state: saved.update(state["state"])
    )
    with before, optimizer.register_load_state_dict_post_hook(restore):
        yield


def reshape_moments(
    trainer: "SftTrainer",
    state: dict[str, Any],
    reshape: Callable[[ExpertPart, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Return an optimizer's state in which the moments of experts are reshaped."""
    groups = trainer.optimizer.param_groups
    parts = [part_of(parameter) for group in groups for parameter in group["params"]]
    moments = {number: dict(values) for number, values in state["state"].items()}
    for number, part in enumerate(parts):
        if part is not None:
            for name, value in moments.get(number, {}).items():
                if value.dim():  # a step is no matrix
                    moments[number][name] = reshape(part, value)
    return {**state, "state": moments}


def apply_schedule(schedule: LambdaLR) -> None:
    """Give the optimizer the rates of its schedule for the step to come."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(schedule.last_epoch) for base, factor in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates  # what is logged


@contextmanager
def published(
    target: Path, process: Process, facts: stamp.Stamp, keeps_refused: bool = False
) -> Iterator[Path]:
    """Yield the staging folder of `target`, which is stamped, sealed and published afterwards.

    With `keeps_refused` what a check inside refuses stays, under the name `<target>.refused`.
    On machines that do not share the main rank's disk, the first rank publishes its own part.
    """
    staged = target.parent / STAGING / target.name
    mark = staged / f".{secrets.token_hex(8)}"
    try:
        staged.mkdir(parents=True, exist_ok=True)
        if process.is_main:
            mark.touch()
        yield staged
        places = process.gather(mark)  # every rank has written
        is_publisher = process.is_main
        if process.local_rank == 0 and not places[0].exists():
            is_publisher = True
        process.gather(None)  # every rank has looked
        if process.is_main:
            mark.unlink()
        if is_publisher:
            share(staged)
            stamp.write(staged, facts)
            checkpoints.publish(staged, target)
    except Exception as error:
        # what a check refuses the user may judge otherwise
        if isinstance(error, SftPlayError) and process.is_main and keeps_refused:
            refused = target.with_name(f"{target.name}.refused")
            shutil.rmtree(refused, ignore_errors=True)
            rename(staged, refused)
            logger.warning("what was refused is in %s", refused)
        # it cannot be used, and on a full disk run.json needs the space
        shutil.rmtree(staged, ignore_errors=True)
        raise


def dtypes_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the types of trained and of frozen weights, as torch names them."""
    found: dict[str, set[str]] = {"trained": set(), "frozen": set()}
    for parameter in model.parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        found[kind].add(str(parameter.dtype).removeprefix("torch."))
    return {kind: sorted(names) for kind, names in found.items()}
