"""Checkpoints: write and load them, publish a folder, and find the best one.

The file names and formats of an engine are those of transformers. A folder is written as a staging
folder, then checked, sealed and renamed. Every rank must call each of these functions. If a rank
fails, it raises, and the failure broadcast ends the others: none passes the barrier before the
folder is published.
"""

import logging
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import DeepSpeedSchedulerWrapper
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations import deepspeed_load_checkpoint, is_deepspeed_zero3_enabled
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import safe_globals

from sft_kernels.process import Process
from sft_play.config.schema import TrainSection
from sft_play.errors import CheckpointError, SftPlayError
from sft_play.models.adapter_state import ExpertPart, as_published, load_published, part_of
from sft_play.models.load import load_trained
from sft_play.models.sharding import full_state_dict
from sft_play.runs import checkpoints, seal, stamp
from sft_play.runs.checkpoints import STAGING, TRAINER_STATE
from sft_play.runs.files import rename, share
from sft_play.runs.report import BestCheckpoint
from sft_play.runs.resumed import DIVIDED_OPTIMIZER
from sft_play.training.best import best_step, metric_of, scores_by_step
from sft_play.training.checks import check_finite, check_finite_optimizer
from sft_play.training.engine import Engine, apply_schedule
from sft_play.training.events import Events
from sft_play.training.state import State

logger = logging.getLogger(__name__)


def checkpoint_folder(engine: Engine, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return Path(engine.args.output_dir) / f"checkpoint-{step}"


def save_checkpoint(
    engine: Engine, events: Events, run_stamp: stamp.Stamp, best_metric: str
) -> Path:
    """Publish checkpoint-N of this step, remove old ones, and return its folder."""
    process, state = engine.process, events.state
    step = state.global_step
    check_finite(engine.model, step)
    check_finite_optimizer(engine.optimizer, step)
    target = checkpoint_folder(engine, step)
    with published(target, process, replace(run_stamp, global_step=step)) as staged:
        write_weights(engine, staged)
        write_optimizer(engine, staged)
        torch.save(read_generators(), staged / _random_state_name(process))
        if process.is_main:
            events.write_state(staged / TRAINER_STATE)
    if process.is_main:
        best = best_step(state.log_history, best_metric)
        checkpoints.rotate(target.parent, engine.settings.save_total_limit, best)
    process.gather(None)  # no rank continues before the checkpoint can be resumed
    return target


def take_best(engine: Engine, state: State, train: TrainSection) -> BestCheckpoint | None:
    """Load the weights of the best checkpoint into the model, and return which one it is.

    Return None if this is not requested, or if no checkpoint was scored. Every rank must call it.
    """
    metric = metric_of(train)
    history = state.log_history
    step = best_step(history, metric)
    if not train.load_best_model_at_end or step is None:
        return None
    found = BestCheckpoint(step, metric, scores_by_step(history, metric)[step])
    if step == state.global_step:
        return found
    checkpoint = checkpoint_folder(engine, step)
    damage = seal.find_damage(checkpoint) if engine.process.local_rank == 0 else None
    if engine.process.max(int(damage is not None)):
        if damage is not None:
            logger.warning(
                "%s: %s; the weights of the last step are saved, not the best", checkpoint, damage
            )
        return None
    load_trained_weights(engine, checkpoint)
    if engine.process.is_main:
        logger.info(
            "best step=%d %s=%.4f: its weights are scored and saved, not those of step %d",
            step,
            metric,
            found.value,
            state.global_step,
        )
    return found


@contextmanager
def published(
    target: Path, process: Process, facts: stamp.Stamp, keeps_refused: bool = False
) -> Iterator[Path]:
    """Yield the staging folder of `target`; afterwards stamp, seal and publish it.

    If `keeps_refused`, a folder that a check inside refuses is kept as `<target>.refused`.
    On machines that do not share the main rank's disk, the first rank publishes its part.
    """
    staged = target.parent / STAGING / target.name
    mark = staged / f".{secrets.token_hex(8)}"
    is_complete = False
    try:
        staged.mkdir(parents=True, exist_ok=True)
        if process.is_main:
            mark.touch()
        yield staged
        places = process.gather(mark)  # every rank has written the mark
        has_other_disk = process.local_rank == 0 and not places[0].exists()
        process.gather(None)  # every rank has checked for it
        if process.is_main:
            mark.unlink()
        if process.is_main or has_other_disk:
            share(staged)
            stamp.write(staged, facts)
            checkpoints.publish(staged, target)
        is_complete = True
    except SftPlayError:
        if process.is_main and keeps_refused:  # the user may accept what a check refuses
            refused = target.with_name(f"{target.name}.refused")
            shutil.rmtree(refused, ignore_errors=True)
            rename(staged, refused)
            logger.warning("what was refused is in %s", refused)
        raise
    finally:
        if not is_complete:  # it cannot be used, and run.json needs the space on a full disk
            shutil.rmtree(staged, ignore_errors=True)


def dtypes_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the types of trained and of frozen weights, as torch names them."""
    found: dict[str, set[str]] = {"trained": set(), "frozen": set()}
    for parameter in model.parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        found[kind].add(str(parameter.dtype).removeprefix("torch."))
    return {kind: sorted(names) for kind, names in found.items()}


def write_weights(engine: Engine, folder: Path) -> None:
    """Write the trained weights, their config and the tokenizer, and no other file."""
    model = engine.model
    is_peft = isinstance(model, PeftModel)
    state_dict = None  # the model has all weights
    if engine.trains_divided:
        state_dict = full_state_dict(model)
    elif is_deepspeed_zero3_enabled():
        state_dict = engine.wrapped._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=is_peft
        )
        state_dict = state_dict or {}  # None on all ranks except the main one
    elif is_peft:
        state_dict = model.state_dict()
    if is_peft:
        state_dict = as_published(model, state_dict)
    if not engine.process.is_main:
        return
    # by default PEFT would query the hub to find out if the vocabulary was resized
    options = {"save_embedding_layers": False} if is_peft else {}
    used_cache = engine.text_config.use_cache
    engine.text_config.use_cache = engine.base_use_cache
    try:
        model.save_pretrained(folder, state_dict=state_dict, **options)
    finally:
        engine.text_config.use_cache = used_cache
    engine.tokenizer.save_pretrained(folder)


def load_trained_weights(engine: Engine, checkpoint: Path) -> None:
    """Put the trained weights of a checkpoint into the model."""
    model = engine.model
    if engine.is_deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [LossScaler, ZeroStageEnum, fragment_address]
        is_strict = not isinstance(model, PeftModel)
        with loading_plain(checkpoint), torch.serialization.safe_globals(classes):
            deepspeed_load_checkpoint(engine.wrapped, str(checkpoint), load_module_strict=is_strict)
    elif isinstance(model, PeftModel):
        load_published(model, checkpoint, is_trainable=True)
    elif not engine.trains_divided:  # otherwise the model was loaded from this checkpoint
        load_trained(model, str(checkpoint))


@contextmanager
def loading_plain(checkpoint: Path) -> Iterator[None]:
    """Keep torch.load from running code of pickles, as DeepSpeed would. Raises: CheckpointError."""
    load = torch.load
    torch.load = lambda *args, **options: load(*args, **options | {"weights_only": True})
    try:
        yield
    except UnpicklingError as error:
        raise CheckpointError(
            f"{checkpoint}: a file of it is a pickle that could run any code, and is not loaded "
            f"({' '.join(str(error).split())[:300]}); choose another checkpoint"
        ) from error
    finally:
        torch.load = load


def write_optimizer(engine: Engine, folder: Path) -> None:
    """Write the state of optimizer, schedule and loss scaler. DeepSpeed writes its state itself."""
    is_main = engine.process.is_main
    if engine.trains_divided:
        dcp.save(_divided_optimizer(engine), checkpoint_id=folder / DIVIDED_OPTIMIZER)
    elif engine.is_deepspeed:
        is_peft = isinstance(engine.model, PeftModel)
        engine.wrapped.save_checkpoint(str(folder), exclude_frozen_parameters=is_peft)
    elif engine.shares_experts or is_main:
        state = engine.optimizer.state_dict()
        if engine.shares_experts:  # in the layout of one process: a collective
            state = reshape_moments(engine, state, ExpertPart.whole)
        if is_main:
            torch.save(state, folder / OPTIMIZER_NAME)
    if is_main and not isinstance(engine.lr_scheduler, DeepSpeedSchedulerWrapper):
        torch.save(engine.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
    scaler = engine.accelerator.scaler
    if is_main and scaler is not None:
        torch.save(scaler.state_dict(), folder / SCALER_NAME)


def load_optimizer(engine: Engine, checkpoint: Path) -> None:
    """Load the state of optimizer, schedule and loss scaler; sharded state fits any world size."""

    def read(name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
        return torch.load(checkpoint / name, map_location=device, weights_only=True)

    process, scaler = engine.process, engine.accelerator.scaler
    with loading_plain(checkpoint):
        if engine.trains_divided:
            state = _divided_optimizer(engine)
            dcp.load(state, checkpoint_id=checkpoint / DIVIDED_OPTIMIZER)
            set_optimizer_state_dict(engine.model, engine.torch_optimizer, state["optimizer"])
        elif not engine.is_deepspeed:  # which has loaded it with the weights
            # several ranks of a host would multiply its host memory
            device = process.device if process.world_size > 1 else "cpu"
            state = read(OPTIMIZER_NAME, device)
            if engine.shares_experts:
                state = reshape_moments(engine, state, ExpertPart.cut)
            with keeping_types(engine):
                engine.optimizer.load_state_dict(state)
        if not isinstance(engine.lr_scheduler, DeepSpeedSchedulerWrapper):
            engine.lr_scheduler.load_state_dict(read(SCHEDULER_NAME))
        if scaler is not None:
            scaler.load_state_dict(read(SCALER_NAME))
    schedule = getattr(engine.lr_scheduler, "scheduler", engine.lr_scheduler)  # in a wrapper
    if isinstance(schedule, LambdaLR):  # the checkpoint's schedule, which train.extend makes longer
        apply_schedule(schedule)


def _divided_optimizer(engine: Engine) -> dict[str, Any]:
    """Return this rank's part of the state of an optimizer whose weights FSDP shards."""
    return {"optimizer": get_optimizer_state_dict(engine.model, engine.torch_optimizer)}


@contextmanager
def keeping_types(engine: Engine) -> Iterator[None]:
    """Let the optimizer load its state in the types that were saved.

    torch would cast it to the type of the weights: Adafactor's is float32 over bfloat16 weights.
    """
    optimizer = engine.torch_optimizer
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
    engine: Engine,
    state: dict[str, Any],
    reshape: Callable[[ExpertPart, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Return an optimizer's state in which the moments of experts are reshaped."""
    groups = engine.optimizer.param_groups
    parts = [part_of(parameter) for group in groups for parameter in group["params"]]
    moments = {number: dict(values) for number, values in state["state"].items()}
    for number, part in enumerate(parts):
        if part is not None:
            for name, value in moments.get(number, {}).items():
                if value.dim():  # a step is not a matrix
                    moments[number][name] = reshape(part, value)
    return {**state, "state": moments}


def read_generators() -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy, torch and all GPUs."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),  # [] without a GPU
    }


def set_generators(states: dict[str, Any]) -> None:
    """Restore the states of random generators."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    gpus = states.get("cuda", [])
    if torch.is_tensor(gpus):  # saved by one process, in the format of transformers
        gpus = [gpus]
    for number, state in enumerate(gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, number)


def load_random_state(process: Process, checkpoint: Path) -> None:
    """Restore this rank's random generators; a rank that is new keeps its current ones."""
    path = checkpoint / _random_state_name(process)
    if path.is_file():
        with loading_plain(checkpoint), safe_globals():
            set_generators(torch.load(path))


def _random_state_name(process: Process) -> str:
    return f"rng_state_{process.rank}.pth" if process.world_size > 1 else "rng_state.pth"
