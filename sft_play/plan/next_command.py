"""The next command to type: that of a plan, or one that needs less memory. No I/O."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from sft_play.config.backends import backend_of
from sft_play.config.layers import displayed
from sft_play.config.rules import broken
from sft_play.config.schema import Config, env_name
from sft_play.config.targets import READS
from sft_play.errors import OutOfMemory
from sft_play.plan import batch
from sft_play.plan.batch import BatchRequest
from sft_play.plan.inputs import why_not_offloaded
from sft_play.plan.memory import GIB
from sft_play.plan.probe_fit import MeasuredFit
from sft_play.plan.run_plan import RunPlan
from sft_play.plan.step import Layout
from sft_play.plan.strategy import unsharded, why_not_fsdp

TARGETS = {
    "single": "train",
    "ddp": "train-distributed",
    "fsdp": "train-distributed",
    "ep": "train-distributed",
    "deepspeed": "train-deepspeed",
}
MICRO_BATCH_PHASES = ("forward", "backward")
# Settings that do not affect a run's checkpoint
KEEP_CHECKPOINTS = {
    "train.batch_size",
    "train.grad_accum",
    "train.eval_batch_size",
    "train.gradient_checkpointing",
    "train.activation_offloading",
    "train.weight_offloading",
}


def make_command(target: str, variables: Mapping[str, object]) -> list[str]:
    """Return the words of a make command, quoted for a shell."""
    words = ["make", target]
    for name, value in variables.items():
        text = "null" if value is None else str(value)
        words.append(f"{name}={shlex.quote(text.lower() if isinstance(value, bool) else text)}")
    return words


def start_command(plan: RunPlan, given: Mapping[str, str]) -> list[str]:
    """Return the make command that starts a plan, with the variables of this call."""
    target = TARGETS[plan.ranks.strategy]
    variables = {name: value for name, value in given.items() if name in READS[target]}
    if plan.deepspeed:
        variables["DEEPSPEED_CONFIG"] = os.path.relpath(plan.deepspeed.source)
    if plan.ranks.strategy in ("fsdp", "ep"):
        variables["TRAIN_STRATEGY"] = plan.ranks.strategy
    if plan.ranks.strategy != "single":
        variables["NUM_GPUS"] = str(plan.ranks.per_node)
    return make_command(target, variables)


def resume_command(plan: RunPlan, folder: Path) -> str:
    """Return the make command that continues a run from its folder."""
    variables = {"TRAIN_RESUME_FROM": folder, **_rank_variables(plan)}
    return " ".join(make_command(TARGETS[plan.ranks.strategy], variables))


def does_not_fit(plan: RunPlan) -> OutOfMemory:
    """Return the error of a plan that does not fit: what is missing, and the best changes."""
    changes = [change.words for change in plan.changes]
    advice = "; or ".join(changes[:3]) or "a smaller model, or a GPU with more memory"
    if len(changes) > 3:
        advice += "; make plan lists more"
    return OutOfMemory(f"{plan.shortage}; try {advice}")


def probe_does_not_fit(
    fit: MeasuredFit,
    request: BatchRequest,
    layout: Layout,
    allowed_bytes: int,
    budget_bytes: int,
    device: str,
) -> OutOfMemory:
    """Return the error of a measured step that does not fit, and one of the same rows that does.

    Tries have shown that no more than `allowed_bytes` are safe.
    """
    advice = smaller_rows(layout.max_seq_len)
    asked = replace(request, batch_size="auto", grad_accum="auto", gradient_checkpointing="auto")
    fitting = batch.choose_layout(asked, fit.peak, allowed_bytes)
    if fitting is not None:
        advice = f"TRAIN_BATCH_SIZE={fitting.batch_size} TRAIN_GRAD_ACCUM={fitting.grad_accum}"
        if fitting.checkpointed_layers > layout.checkpointed_layers:
            advice += " TRAIN_GRADIENT_CHECKPOINTING=auto"
    return OutOfMemory(
        f"train.batch_size={layout.batch_size} does not fit: a step takes about "
        f"{fit.peak(layout) / GIB:.1f} GiB by what was measured before training, and {device} has "
        f"{budget_bytes / GIB:.1f} GiB; try {advice}"
    )


def smaller_rows(max_seq_len: int) -> str:
    """Return what to try if a single row does not fit."""
    shorter = max(1, max_seq_len // 2)
    on_more = "make train-distributed TRAIN_STRATEGY=fsdp on more GPUs"
    return f"TUNING_MODE=qlora, MODEL_MAX_SEQ_LEN={shorter}, or {on_more}"


def after_out_of_memory(
    config: Config, plan: RunPlan, run: Path, phase: str, has_checkpoint: bool
) -> str:
    """Return the make command of a run that needs less in `phase`, if `run` lacked memory.

    `config` is the run's resolved one, and CONFIG is its file, so all other settings are
    kept, including the effective batch. `has_checkpoint` says whether the new run can
    resume from the old one.
    """
    settings = smaller_settings(config, plan, phase)
    variables: dict[str, object] = {"CONFIG": run / "config.yaml"}
    if plan.ranks.device == "cpu":
        variables["DEVICE"] = "cpu"
    if config.train.run_name:
        variables["RUN"] = f"{run.name}-2"  # the name is taken
    variables |= _rank_variables(plan)
    target = TARGETS[plan.ranks.strategy]
    if not settings:  # nothing can be reduced further on these GPUs
        target = "train-distributed"
        settings = _divided(config)
        variables["NUM_GPUS"] = 2 * plan.ranks.per_node
        variables.pop("DEEPSPEED_CONFIG", None)
    for setting, value in settings.items():
        variables[env_name(setting)] = value
    if has_checkpoint and settings.keys() <= KEEP_CHECKPOINTS:
        variables["TRAIN_RESUME_FROM"] = run
    return " ".join(make_command(target, variables))


def smaller_settings(config: Config, plan: RunPlan, phase: str) -> dict[str, object]:
    """Return the settings with which `phase` needs less; {} if only more GPUs help."""
    layout = plan.layout
    eval_batch_size = config.train.eval_batch_size
    if phase == "evaluation" and isinstance(eval_batch_size, int) and eval_batch_size > 1:
        return {"train.eval_batch_size": eval_batch_size // 2}
    is_micro_batch = phase in MICRO_BATCH_PHASES
    if is_micro_batch and layout.sequences * layout.capacity > layout.max_seq_len:
        return _halved(plan)
    if is_micro_batch and plan.checkpointing != "full":
        return {"train.gradient_checkpointing": True}
    is_gpu = plan.ranks.device == "cuda"
    can_offload = is_gpu and backend_of(config).recomputes_by_layer
    if is_micro_batch and can_offload and not plan.step.offload_activations:
        return {"train.activation_offloading": True}
    can_offload = is_gpu and why_not_offloaded(config, plan.ranks) is None
    if can_offload and not plan.step.offloaded_weight_layers:
        return {"train.weight_offloading": True}
    depends_on_rows = is_micro_batch or phase == "evaluation"
    if depends_on_rows and config.model.max_seq_len > 1:
        return {"model.max_seq_len": config.model.max_seq_len // 2}
    unquantized = {"tuning.base_dtype": "auto"} if config.tuning.has_float8_base else {}
    quantized = {"tuning.mode": "qlora", **unquantized}
    if config.tuning.mode == "lora" and not broken(config.changed(quantized), str):
        return quantized  # bytes that do not depend on the rows
    return {}


def _divided(config: Config) -> dict[str, object]:
    """Return the settings that shard a model across GPUs, without those that prevent it."""
    changes = {"tuning.backend": "bnb", "train.grad_accum": "auto"}
    if config.tuning.mode != "full":
        changes |= {name: attrgetter(name)(Config()) for name in unsharded(config)}
    is_zero = why_not_fsdp(config.changed(changes)) is not None
    return {**changes, "train.strategy": "zero3" if is_zero else "fsdp"}


def _halved(plan: RunPlan) -> dict[str, object]:
    """Return the largest micro-batch of the same step with half the sequences."""
    layout = plan.layout
    rows_of_rank = layout.batch_size * layout.grad_accum
    for batch_size in range(layout.batch_size - 1, 1, -1):
        if rows_of_rank % batch_size:
            continue
        if replace(layout, batch_size=batch_size).sequences <= max(1, layout.sequences // 2):
            break
    else:
        batch_size = 1
    return {"train.batch_size": batch_size, "train.grad_accum": rows_of_rank // batch_size}


def _rank_variables(plan: RunPlan) -> dict[str, object]:
    """Return the variables that start as many ranks as the run had."""
    variables: dict[str, object] = {}
    if plan.ranks.strategy != "single":
        variables["NUM_GPUS"] = plan.ranks.per_node
    if plan.ranks.nodes > 1:
        variables["NNODES"] = plan.ranks.nodes
    if plan.deepspeed:
        variables["DEEPSPEED_CONFIG"] = displayed(Path(plan.deepspeed.source))
    return variables
