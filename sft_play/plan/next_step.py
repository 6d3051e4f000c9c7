"""What to type when a run did not fit: the same effective batch in less memory. Pure: no torch, no I/O."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.config.layers import displayed
from sft_play.config.schema import Config
from sft_play.plan.batch import pack_into
from sft_play.plan.launch import PROJECT_ROOT

TARGETS = {"single": "train", "ddp": "train-distributed", "deepspeed": "train-deepspeed"}
OF_A_MICRO_BATCH = ("forward", "backward")
ZERO3 = PROJECT_ROOT / "configs" / "deepspeed_zero3.json"
KEEPS_CHECKPOINTS = {
    "train.batch_size",
    "train.grad_accum",
    "train.eval_batch_size",
    "train.gradient_checkpointing",
}


def next_command(
    config: Config, plan: Mapping[str, Any], run: Path, phase: str, has_checkpoint: bool
) -> str:
    """Return the make command of a run that needs less in `phase`, one of memory.PHASES, where `run` ran out of memory.

    `config` and `plan` are the run's resolved ones, and CONFIG is the file that holds them: whatever else was set stays, the
    effective batch too. `has_checkpoint` says whether the new run can go on where this one was.
    """
    changes = smaller(config, plan, phase)
    words: dict[str, object] = {"CONFIG": run / "config.yaml"}
    if plan["device"] == "cpu":
        words["DEVICE"] = "cpu"
    if config.train.run_name:
        words["RUN"] = f"{run.name}-2"  # the name is taken
    words |= _ranks(plan)
    target = TARGETS[plan["strategy"]]
    if not changes:  # nothing is left to make smaller on these GPUs
        target, changes = "train-deepspeed", {"tuning.backend": "bnb", "train.grad_accum": "auto"}
        words |= {
            "NUM_GPUS": 2 * len(plan["used_before_bytes"]),
            "DEEPSPEED_CONFIG": displayed(ZERO3),
        }
    words |= {name.upper().replace(".", "_"): value for name, value in changes.items()}
    if has_checkpoint and changes.keys() <= KEEPS_CHECKPOINTS:
        words["TRAIN_RESUME_FROM"] = run
    return " ".join(
        ["make", target, *(f"{name}={shlex.quote(_text(value))}" for name, value in words.items())]
    )


def smaller(config: Config, plan: Mapping[str, Any], phase: str) -> dict[str, object]:
    """Return the settings, by dotted name, with which `phase` needs less; {} where only more GPUs help."""
    rows, accum, eval_rows = (
        plan["per_device_batch_size"],
        plan["grad_accum"],
        config.train.eval_batch_size,
    )
    if phase == "evaluation" and isinstance(eval_rows, int) and eval_rows > 1:
        return {"train.eval_batch_size": eval_rows // 2}
    if phase in OF_A_MICRO_BATCH and plan["sequences"] > 1:
        half = max(
            size
            for size in range(1, rows)
            if rows * accum % size == 0 and _sequences(plan, size) <= max(1, plan["sequences"] // 2)
        )
        return {"train.batch_size": half, "train.grad_accum": rows * accum // half}
    if phase in OF_A_MICRO_BATCH and plan["checkpointing"] != "full":
        return {"train.gradient_checkpointing": True}
    if phase in (*OF_A_MICRO_BATCH, "evaluation") and config.model.max_seq_len > 1:
        return {"model.max_seq_len": config.model.max_seq_len // 2}
    if config.tuning.mode == "lora":  # what is held whatever the rows are
        return {"tuning.mode": "qlora"}
    return {}


def _sequences(plan: Mapping[str, Any], rows: int) -> int:
    """Return how many sequences a micro-batch of up to `rows` rows would have: packed ones may not fill it."""
    fullest = plan["choice"]["wanted"]["fullest_step"]
    return pack_into(fullest, rows, plan["world_size"])[1] if fullest else rows


def _ranks(plan: Mapping[str, Any]) -> dict[str, object]:
    """Return the variables that start as many ranks as the run had."""
    per_node = len(plan["used_before_bytes"])
    words: dict[str, object] = {"NUM_GPUS": per_node} if plan["strategy"] != "single" else {}
    if plan["world_size"] > per_node:
        words["NNODES"] = plan["world_size"] // per_node
    if plan["deepspeed_source"]:
        words["DEEPSPEED_CONFIG"] = displayed(Path(plan["deepspeed_source"]))
    return words


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
