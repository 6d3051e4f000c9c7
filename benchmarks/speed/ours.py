"""Our arms: the make target that a user types, and what its run folder says.

No setting that concerns speed is given: choosing them is the program's work. The arm that follows
a guide's recipe has that guide's numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import GIB
from benchmarks.processes import last_words
from benchmarks.speed.results import ArmRun, Measurement
from benchmarks.speed.samples import Inputs, Samples, count_step_tokens
from benchmarks.speed.workloads import (
    ALONE,
    LORA_ALPHA,
    LORA_RANK,
    SEED,
    WARM_UP,
    Arm,
    Launch,
    Workload,
)
from sft_play.errors import ExitClass
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs import metrics
from sft_play.runs.folder import RunFolder


def make_command(
    workload: Workload,
    arm: Arm,
    inputs: Inputs,
    out: Path,
    steps: int,
    on_cpu: bool,
    launch: Launch = ALONE,
) -> list[str]:
    """Return the make command: the workload, how it is logged, and nothing beside training."""
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": "run",
        "PY": sys.executable,
        "MODEL_NAME": inputs.model,
        "MODEL_MAX_SEQ_LEN": workload.max_seq_len,
        "TUNING_MODE": workload.mode,
        "TUNING_LORA_R": LORA_RANK,
        "TUNING_LORA_ALPHA": LORA_ALPHA,
        "DATA_TRAIN_PATH": inputs.rows,
        "DATA_VAL_PATH": inputs.held_out,
        "DATA_CACHE_DIR": inputs.folder / "cache",
        "TRAIN_OUTPUT_DIR": out,
        "TRAIN_EFFECTIVE_BATCH_SIZE": workload.rows_per_step,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": workload.learning_rate,
        "TRAIN_LR_SCHEDULER_TYPE": "constant",
        "TRAIN_WARMUP_STEPS": 0,
        "TRAIN_SEED": SEED,
        "TRAIN_LOGGING_STEPS": WARM_UP,
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "TRAIN_REOPEN_SAVED": "false",
    }
    if arm.follows_recipe:
        settings |= dict(workload.recipe)
    settings |= dict(arm.variables)
    if on_cpu:
        settings["DEVICE"] = "cpu"
    elif workload.mode == "full":
        settings["MODEL_DTYPE"] = "bfloat16"
    target = arm.program.replace("ours", "train")
    if launch.ranks > 1:
        target = "train-distributed"
        settings |= {
            "NUM_GPUS": launch.ranks,
            "TRAIN_STRATEGY": launch.strategy,
            "TUNING_BACKEND": arm.program.removeprefix("ours-"),
        }
    return ["make", target, *(f"{name}={value}" for name, value in settings.items())]


def read_run(workload: Workload, out: Path, samples: Path, steps: int, started: float) -> ArmRun:
    """Return what a run of ours measured, from run.json, tb/ and the weights that it saved."""
    folder = RunFolder(out / "run")
    report = folder.read_report()
    if report.status != "done":
        ran_out = report.exit_class == ExitClass.OUT_OF_MEMORY
        status = "out of memory" if ran_out else "failed"
        return ArmRun(status, started, error=report.cause or last_words(out / "log"))
    logged = _logged_steps(folder.tensorboard)
    timed = count_step_tokens(workload, Samples.read(samples), steps)[WARM_UP:]
    measured = Measurement(
        seconds=_seconds_between(logged, WARM_UP, steps),
        real_tokens=sum(step.real for step in timed),
        trained_tokens=sum(step.trained for step in timed),
        ready_seconds=logged[WARM_UP].clock - started,
        losses=report.loss,
        least_grad_norm=min(step.grad_norm for step in logged.values()),
        untrained=_untrained_adapters(folder.path / "adapter"),
        peak_reserved_gib=report.peak_bytes.reserved / GIB,
        peak_allocated_gib=None,
        own_tokens_per_second=report.tokens_per_second,
        predicted_gib=report.peak_bytes.predicted / GIB,
        rows_used=report.data["train"]["rows_used"],
        unhidden_communication=_unhidden_communication(folder),
    )
    fused = " ".join(sorted(report.fast_path["on"])) or "nothing"
    settings = _chosen_settings(folder) | {"fused": fused}
    return ArmRun("done", started, settings, measured=measured)


def _chosen_settings(folder: RunFolder) -> dict[str, object]:
    """Return what the plan chose."""
    planned = PlannedRun.read(folder)
    train = planned.config.train
    return {
        "batch_size": train.batch_size,
        "gradient_checkpointing": train.gradient_checkpointing,
        "optim": train.optim,
        "packing": planned.plan.packing,
        "micro_batches": planned.plan.layout.micro_batches,
    }


class LoggedStep(NamedTuple):
    """When a step was logged, the norm of its gradient, and how long the steps before it took."""

    clock: float
    grad_norm: float
    step_seconds: float  # mean since the log before, as the GPU computed them


def _logged_steps(folder: Path) -> dict[int, LoggedStep]:
    """Return the logged steps; TensorBoard's events carry the time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    norms = {event.step: event.value for event in events.Scalars("train/grad_norm")}
    seconds = {event.step: event.value for event in events.Scalars("train/step_seconds")}
    steps = {}
    for event in events.Scalars("train/loss"):
        step = event.step
        steps[step] = LoggedStep(event.wall_time, norms[step], seconds[step])
    return steps


def _seconds_between(logged: dict[int, LoggedStep], first: int, last: int) -> float:
    """Return the time of the steps after `first`, up to `last`; both were logged.

    When a log was written tells less: evaluations and saves come in between.
    """
    total, before = 0.0, first
    for step in sorted(logged):
        if first < step <= last:
            total += (step - before) * logged[step].step_seconds
            before = step
    assert before == last, f"step {last} was not logged"
    return total


def _unhidden_communication(folder: RunFolder) -> float | None:
    """Return the share of the last timed step that waited for gradients of other ranks.

    None where the engine does not say.
    """
    shares = []
    for line in metrics.read(folder.metrics).lines:
        waited = line.values.get("step/communication_seconds")
        if waited is not None and "step_seconds" in line.values:
            shares.append(waited / line.values["step_seconds"])
    return shares[-1] if shares else None


def _untrained_adapters(adapter: Path) -> list[str]:
    from safetensors.torch import load_file

    from benchmarks.speed.watch import untrained_adapters

    weights = adapter / "adapter_model.safetensors"
    return untrained_adapters(load_file(weights)) if weights.exists() else []
